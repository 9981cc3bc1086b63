"""Which server does a TLS client want to speak with? The name in the first message of a connection (RFC 6066, 3).

In: the bytes that a client has sent so far. Out: the name, None while more bytes are needed, or `NoName`. Only what is
needed to find the name is read; everything that does not fit is refused. Pure.
"""

from __future__ import annotations

# The first message of a client, with large keys; it may be cut into records of any size.
HELLO_BYTES_MAX = 16 * 1024
# Clients use one; what is read again with each piece must be short.
RECORDS_MAX = 16
HANDSHAKE, CLIENT_HELLO, SERVER_NAME, HOST_NAME = 22, 1, 0, 0


class NoName(Exception):
    """The client does not speak TLS, or names no server, or several."""


class _Fields:
    """Numbers and fields with lengths, one after the other."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def __bool__(self) -> bool:
        return bool(self._data)

    def take(self, size: int) -> bytes:
        if len(self._data) < size:
            raise NoName("a field of the first message is cut off")
        taken, self._data = self._data[:size], self._data[size:]
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size), "big")

    def field(self, length_size: int) -> _Fields:
        return _Fields(self.take(self.number(length_size)))

    def text(self) -> str:
        try:
            return self._data.decode("ascii")
        except UnicodeDecodeError:
            raise NoName("the server's name is not in ASCII") from None


def server_name(data: bytes) -> str | None:
    """The name of the server, in lower case; None while the message is not whole."""
    message = _handshake(data)
    if message is None:
        return None
    hello = _Fields(message)
    # Version and random; the session; ciphers; compressions.
    hello.take(34)
    for length_size in (1, 2, 1):
        hello.field(length_size)
    extensions = hello.field(2) if hello else _Fields(b"")
    found = []
    while extensions:
        kind, body = extensions.number(2), extensions.field(2)
        if kind == SERVER_NAME:
            found += _names(body.field(2))
    if len(found) != 1:
        raise NoName("the client names no server, or several")
    return found[0].lower()


def _names(entries: _Fields) -> list[str]:
    found = []
    while entries:
        if entries.number(1) != HOST_NAME:
            raise NoName("the client names its server in an unknown way")
        found.append(entries.field(2).text())
    return found


def _handshake(data: bytes) -> bytes | None:
    """The body of the first message, which may be cut into several records."""
    message, rest = b"", data
    for _ in range(RECORDS_MAX):
        if message and message[0] != CLIENT_HELLO:
            raise NoName("the client does not begin with its first message")
        if len(message) >= 4:
            size = int.from_bytes(message[1:4], "big")
            if size > HELLO_BYTES_MAX:
                raise NoName("the first message is too long")
            if len(message) >= 4 + size:
                return message[4 : 4 + size]
        if rest and rest[0] != HANDSHAKE:
            raise NoName("the client does not speak TLS")
        if len(rest) < 5:
            return None
        size = int.from_bytes(rest[3:5], "big")
        if size == 0 or rest[1] != 3:
            raise NoName("the client does not speak TLS")
        if size > HELLO_BYTES_MAX:
            raise NoName("the first message is too long")
        if len(rest) < 5 + size:
            return None
        message, rest = message + rest[5 : 5 + size], rest[5 + size :]
    raise NoName("the first message is cut into too many records")
