"""What of a text may reach a terminal or a log? Neither control characters, which are orders to a terminal, nor
passwords in addresses.

In: text of a model, of a server or of an engine. Out: the same, with control characters as JSON writes them, so that
JSON stays JSON. Tabs and newlines stay; carriage returns are left out.
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

# C0 and C1 with DEL between them, and the two separators at which some programs break lines.
_CONTROLS = {*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029} - {ord("\t"), ord("\n")}
_TABLE = {code: f"\\u{code:04x}" for code in _CONTROLS} | {ord("\r"): ""}


def printable(text: str) -> str:
    """The text without orders to a terminal."""
    return text if text.isprintable() else text.translate(_TABLE)


def without_password(url: str) -> str:
    """An address without its password."""
    hidden = re.sub(r"(//[^/@:?]*):[^/?]*@", r"\1:…@", url)
    return re.sub(r"(password=)[^&]*", r"\1…", hidden)


def shown_address(url: str) -> str:
    """The address without user and password."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
