"""How is the port encrypted, and how does a certificate change while connections are open?

In: two files. Out: a context for the listener. When a file changes, or on SIGHUP, both are loaded again into the same
context: new handshakes get the new certificate, open connections keep theirs. Files that do not belong together (one is
still being written) are not loaded until they do. A client that sends HTTP without TLS gets an error, in HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

from segue.aio import in_background
from segue.errors import Misconfigured, Refused
from segue.listener.exchange import raw_refusal

log = logging.getLogger(__name__)

# What OpenSSL calls a handshake that begins with GET, POST, PUT or HEAD.
HTTP_REQUEST = "HTTP_REQUEST"
# Certificates are renewed weeks before they expire; there is no hurry.
LOOK_S = 10.0

FileStamps = tuple[tuple[int, int, int], ...]


class Certificate:
    """A certificate and its key, from two files."""

    def __init__(self, cert: Path, key: Path) -> None:
        self._paths = (cert, key)
        self._stamps: FileStamps = ()
        self.context = _context()
        try:
            self._stamps = self._read_stamps()
            self._load()
        except (OSError, ValueError) as error:
            raise Misconfigured(f"tls_cert, tls_key: {cert}, {key}: {_why(error)}.") from None

    def reload(self) -> bool:
        """Load the files again; False if they cannot be used, and the old certificate stays."""
        try:
            self._stamps = self._read_stamps()
            self._load()
        except (OSError, ValueError) as error:
            log.warning("the TLS certificate was not reloaded: %s", _why(error))
            return False
        log.info("the TLS certificate was reloaded")
        return True

    @asynccontextmanager
    async def watched(self, every_s: float = LOOK_S) -> AsyncIterator[None]:
        """Load changed files while inside."""
        async with in_background("certificate", partial(self._watch, every_s)):
            yield

    async def _watch(self, every_s: float) -> None:
        while True:
            await asyncio.sleep(every_s)
            try:
                has_changed = self._read_stamps() != self._stamps
            except OSError:
                continue  # between the old file and the new one
            if has_changed:
                self.reload()

    def _read_stamps(self) -> FileStamps:
        stats = [path.stat() for path in self._paths]
        return tuple((stat.st_ino, stat.st_mtime_ns, stat.st_size) for stat in stats)

    def _load(self) -> None:
        # Tried in a fresh context first: half a pair in the real one would fail every handshake.
        _context().load_cert_chain(*self._paths)
        self.context.load_cert_chain(*self._paths)


class _Handshake(ssl.SSLObject):
    """One connection. A plain HTTP request gets an answer instead of a handshake, and the rest of it is dropped until
    the client leaves or the time for a handshake is over."""

    incoming: ssl.MemoryBIO
    outgoing: ssl.MemoryBIO
    _is_refused = False

    def do_handshake(self) -> None:
        if not self._is_refused:
            try:
                return super().do_handshake()
            except ssl.SSLError as error:
                if error.reason != HTTP_REQUEST:
                    raise
            message = "This port needs HTTPS: use https:// (or wss://) in the URL."
            self.outgoing.write(raw_refusal(Refused(message, status=400, code="tls_required")))
            self._is_refused = True
        self.incoming.read()
        raise ssl.SSLWantReadError


class _Context(ssl.SSLContext):
    sslobject_class = _Handshake

    def wrap_bio(
        self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, *args: Any, **options: Any
    ) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, *args, **options)
        assert isinstance(made, _Handshake)
        made.incoming, made.outgoing = incoming, outgoing
        return made


def _context() -> ssl.SSLContext:
    context = _Context(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _why(error: OSError | ValueError) -> str:
    """The reason, without a piece of the key."""
    if isinstance(error, ssl.SSLError):
        return f"the files are not a certificate and its key ({error.reason})"
    return getattr(error, "strerror", None) or "the files cannot be used"
