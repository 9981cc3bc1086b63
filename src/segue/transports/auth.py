"""Where in a request is the API key? In the Authorization header or, from a browser, among the subprotocols."""

from __future__ import annotations

import re
from collections.abc import Sequence

BEARER = re.compile(r"(?i:bearer) +(\S+) *")
# A browser cannot set headers on a WebSocket. It offers our protocol and its key; only the protocol is ever answered.
PROTOCOL = "segue.v1"
KEY_PROTOCOL = "segue-key."


def bearer(header: str) -> str | None:
    """The secret in an Authorization header; None without a header, "" if the header holds no secret."""
    if not header:
        return None
    match = BEARER.fullmatch(header)
    return match[1] if match else ""


def offered(protocols: Sequence[str]) -> str | None:
    """The secret among the subprotocols that a browser offers."""
    names = [name.strip() for line in protocols for name in line.split(",")]
    secrets = [name for name in names if name.startswith(KEY_PROTOCOL)]
    return secrets[0].removeprefix(KEY_PROTOCOL) if secrets else None
