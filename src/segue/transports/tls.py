"""How is the port encrypted, and how does a certificate change while connections are open?

In: two files. Out: a context for the listener. When a file changes, or somebody asks, both are loaded again into the
same context: handshakes from then on get the new certificate, open connections go on with what they have. Files that
do not belong together (one is still being written) are left alone until they do.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from segue.errors import Misconfigured

log = logging.getLogger(__name__)

# Certificates are renewed weeks before they end; nobody waits for this.
LOOK_S = 10.0

Stamp = tuple[tuple[int, int, int], ...]


class Certificate:
    """A certificate and its key, as they lie in two files."""

    def __init__(self, cert: Path, key: Path) -> None:
        self._paths = (cert, key)
        self._stamp: Stamp = ()
        self.context = _context()
        try:
            self._stamp = self._look()
            self._load()
        except (OSError, ValueError) as error:
            raise Misconfigured(f"tls_cert, tls_key: {_why(error)}.") from None

    def reload(self) -> bool:
        """Take what the files hold now; False if they cannot be used, and then nothing has changed."""
        try:
            self._stamp = self._look()
            self._load()
        except (OSError, ValueError) as error:
            log.warning("the certificate was not loaded again: %s", _why(error))
            return False
        log.info("the certificate was loaded again")
        return True

    @asynccontextmanager
    async def watched(self, every_s: float = LOOK_S) -> AsyncIterator[None]:
        """While inside, changed files are loaded."""
        task = asyncio.create_task(self._watch(every_s))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    async def _watch(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                has_changed = self._look() != self._stamp
            except OSError:
                continue  # between the old file and the new one
            if has_changed:
                self.reload()

    def _look(self) -> Stamp:
        found = [path.stat() for path in self._paths]
        return tuple((one.st_ino, one.st_mtime_ns, one.st_size) for one in found)

    def _load(self) -> None:
        # Tried out first: half a pair in the context would end every handshake.
        _context().load_cert_chain(*self._paths)
        self.context.load_cert_chain(*self._paths)


def _context() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _why(error: OSError | ValueError) -> str:
    """In words, and never with a piece of the key."""
    if isinstance(error, ssl.SSLError):
        return f"the files are no certificate and its key ({error.reason})"
    return getattr(error, "strerror", None) or "the files cannot be used"
