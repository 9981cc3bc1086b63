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
# The last opcode of data; after it come control frames, which are never large.
_BINARY = 2
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
        self._first, self._mask, self._left = 0, b"", 0

    def at_eof(self) -> Generator[None, None, bool]:
        """Whether there is no more; the parser asks it where a frame may begin."""
        if (yield from super().at_eof()):
            return True
        if not self._left:
            while not self.eof and self._is_cut():
                yield
            self._begin()
        if self._left:
            size = min(self._left, PIECE_BYTES)
            self._left -= size
            first = self._first & ~_FIN if self._left else self._first
            self.buffer[:0] = _PIECE_HEAD.pack(first, _MEDIUM, size, self._mask)
            self._first &= ~_OPCODE
        return False

    def _is_cut(self) -> bool:
        """Whether more of a head must come to know it."""
        size = len(self.buffer)
        return size < 2 or (self.buffer[1] == _LARGE and size < _LARGE_HEAD.size)

    def _begin(self) -> None:
        """Take off the head of a large frame, unless it is to be refused."""
        buffer, parser = self.buffer, self._parser
        if len(buffer) < 2 or buffer[1] != _LARGE or buffer[0] & _OPCODE > _BINARY or self.eof:
            return
        first, _, size, mask = _LARGE_HEAD.unpack_from(buffer)
        most = parser.max_message_size
        if size > PIECE_BYTES and (most is None or size <= most - (parser.current_size or 0)):
            self._first, self._left, self._mask = first, size, mask
            del buffer[: _LARGE_HEAD.size]
