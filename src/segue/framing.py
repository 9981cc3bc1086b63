"""How do two processes of one machine exchange messages over a Unix socket?

A frame is a length (four bytes, little-endian) and as many bytes of MessagePack. In: a value, or a stream to read
from. Out: the bytes of one frame, which the caller decodes. What a connection may fail with is in `CONNECTION_LOST`.
"""

from __future__ import annotations

import asyncio
import struct

import msgspec

# The longest frames are prompts: this is one of sixteen million tokens.
FRAME_BYTES_MAX = 64 * 1024 * 1024

# The other side closed the connection, or sent something that is not a frame.
CONNECTION_LOST = (OSError, asyncio.IncompleteReadError, msgspec.MsgspecError)

_length = struct.Struct("<I")


def write_frame(writer: asyncio.StreamWriter, value: msgspec.Struct) -> None:
    """Put one frame into the buffer of the connection; the caller drains it."""
    data = msgspec.msgpack.encode(value)
    writer.write(_length.pack(len(data)) + data)


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """The next frame; raises one of `CONNECTION_LOST` where there is none."""
    (size,) = _length.unpack(await reader.readexactly(_length.size))
    if size > FRAME_BYTES_MAX:
        raise ConnectionError(f"a frame of {size} bytes is longer than {FRAME_BYTES_MAX}")
    return await reader.readexactly(size)
