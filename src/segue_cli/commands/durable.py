"""Which store does a command read and change? That of a server, which must outlive the server."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from segue.errors import Misconfigured
from segue.server.storage import ServerStore, open_store
from segue.settings.values import Settings


def open_durable(settings: Settings, what: str) -> AbstractAsyncContextManager[ServerStore]:
    """The store; refused where it keeps this only as long as a server runs."""
    if settings.store_kind == "memory":
        raise Misconfigured(
            f"store: memory keeps {what} only while the server runs. Name the server's store with --store."
        )
    return open_store(settings)
