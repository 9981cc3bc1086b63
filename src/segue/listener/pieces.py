"""How is a WebSocket frame of megabytes read in steps?

As fragments: the parser would copy all of it out of its buffer, and once more to unmask it, and the event loop would
wait. Between two frames the parser asks whether there are more bytes. There the head of a large frame is replaced by
the head of its first piece, and then those of the others are written in front of the bytes that follow. Lengths change,
and nothing else: what is not allowed is refused by the parser, as a frame that is larger than a message may be.
"""

from __future__ import annotations

import struct
from collections.abc import Generator

from websockets.server import ServerProtocol
from websockets.streams import StreamReader

# A multiple of 4, the bytes of a mask: each piece is masked from its beginning.
PIECE_BYTES = 16 * 1024
# The bit of a last fragment, and those of what a frame is.
_FIN, _OPCODE = 0x80, 0x0F
# The opcodes of data; all others are control frames, which are never large.
_CONTINUED, _BINARY = 0, 2
# Masked, with a length of eight bytes, or of two.
_LARGE, _MEDIUM = 0xFF, 0xFE
_LARGE_HEAD = struct.Struct("!BBQ4s")
_PIECE_HEAD = struct.Struct("!BBH4s")


class PiecesParser(ServerProtocol):
    """A parser of a server that takes large frames as fragments."""

    reader: PiecesReader

    def parse(self) -> Generator[None]:
        self.reader = PiecesReader(self)
        yield from super().parse()


class PiecesReader(StreamReader):
    """What a parser reads from."""

    def __init__(self, parser: PiecesParser) -> None:
        super().__init__()
        self._parser = parser
        # Of the frame that is read in pieces: its first byte, then that of a continuation; its mask; what is left.
        self._first = 0
        self._mask = b""
        self._left = 0
        # Pieces that are not the last of their frame.
        self._pieces = 0

    def take_pieces(self) -> int:
        """How many fragments were made since the last call, that are no frames of the peer."""
        pieces, self._pieces = self._pieces, 0
        return pieces

    def at_eof(self) -> Generator[None, None, bool]:
        """Whether there is no more; the parser asks it where a frame may begin."""
        if (yield from super().at_eof()):
            return True
        buffer = self.buffer
        if not self._left:
            while len(buffer) < 2 and not self.eof:
                yield
            if len(buffer) > 1 and buffer[1] == _LARGE and buffer[0] & _OPCODE <= _BINARY:
                while len(buffer) < _LARGE_HEAD.size and not self.eof:
                    yield
                self._begin(buffer)
        if self._left:
            self._write_head(buffer)
        return False

    def _begin(self, buffer: bytearray) -> None:
        """Take off the head of a large frame, unless it is to be refused."""
        if len(buffer) < _LARGE_HEAD.size:
            return
        first, _, size, mask = _LARGE_HEAD.unpack_from(buffer)
        most, before = self._parser.max_message_size, self._parser.current_size or 0
        if size > PIECE_BYTES and (most is None or before + size <= most):
            self._first, self._left, self._mask = first, size, mask
            del buffer[: _LARGE_HEAD.size]

    def _write_head(self, buffer: bytearray) -> None:
        size = min(self._left, PIECE_BYTES)
        self._left -= size
        self._pieces += self._left > 0
        first = self._first & ~_FIN if self._left else self._first
        buffer[:0] = _PIECE_HEAD.pack(first, _MEDIUM, size, self._mask)
        self._first &= ~_OPCODE
