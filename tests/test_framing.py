"""Do frames arrive whole, wherever their bytes are cut, and is what is no frame refused?"""

from __future__ import annotations

import asyncio
from typing import cast

import msgspec
import pytest

from segue.framing import CONNECTION_LOST, FRAME_BYTES_MAX, read_frame, write_frame


class Value(msgspec.Struct):
    text: str


class Written:
    """A writer that keeps what is written."""

    def __init__(self) -> None:
        self.data = b""

    def write(self, data: bytes) -> None:
        self.data += data


def framed(*texts: str) -> bytes:
    writer = Written()
    for text in texts:
        write_frame(cast(asyncio.StreamWriter, writer), Value(text))
    return writer.data


async def test_frames_do_not_depend_on_where_their_bytes_are_cut() -> None:
    data = framed("one", "", "ü" * 300)
    for at in range(len(data) + 1):
        reader = asyncio.StreamReader()
        reader.feed_data(data[:at])
        reader.feed_data(data[at:])
        texts = [msgspec.msgpack.decode(await read_frame(reader), type=Value) for _ in range(3)]
        assert [value.text for value in texts] == ["one", "", "ü" * 300]


@pytest.mark.parametrize(
    "data", [b"", b"\x01", framed("cut")[:-1], (FRAME_BYTES_MAX + 1).to_bytes(4, "little")]
)
async def test_what_is_no_whole_frame_is_a_lost_connection(data: bytes) -> None:
    reader = asyncio.StreamReader()
    reader.feed_data(data)
    reader.feed_eof()
    with pytest.raises(CONNECTION_LOST):
        await read_frame(reader)
