"""What a parser gives that takes large frames in pieces is what the library's own gives, but for the sizes."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.exceptions import PayloadTooBig
from websockets.frames import Frame, Opcode
from websockets.server import ServerProtocol
from websockets.utils import apply_mask

from segue.listener.pieces import PIECE_BYTES, PiecesParser

UPGRADE = (
    b"GET / HTTP/1.1\r\nHost: a\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
MASK = b"\x01\x82\x03\x84"
# What has a length of eight bytes.
LARGE_BYTES = 65_536
MESSAGE_BYTES_MAX = 300_000
# Data frames and pings, whole and in fragments, in a wrong order, masked or not, with a bit that means nothing.
FIRST_BYTES = (0x81, 0x01, 0x80, 0x00, 0x82, 0x02, 0x89, 0xC1, 0x83)
SIZES = (
    0,
    5,
    200,
    PIECE_BYTES,
    LARGE_BYTES,
    LARGE_BYTES + 3,
    3 * PIECE_BYTES + LARGE_BYTES,
    MESSAGE_BYTES_MAX + 1,
)


def frame(first: int, data: bytes, *, is_masked: bool = True) -> bytes:
    size, bit = len(data), 0x80 if is_masked else 0
    if size < 126:
        head = struct.pack("!BB", first, bit | size)
    elif size < LARGE_BYTES:
        head = struct.pack("!BBH", first, bit | 126, size)
    else:
        head = struct.pack("!BBQ", first, bit | 127, size)
    return head + (MASK + apply_mask(data, MASK) if is_masked else data)


def parsed(parser: ServerProtocol, data: bytes, cuts: Sequence[int]) -> list[Frame]:
    parser.receive_data(UPGRADE)
    (request,) = parser.events_received()
    parser.send_response(parser.accept(request))  # type: ignore[arg-type]
    found: list[Frame] = []
    for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True):
        parser.receive_data(data[start:end])
        found += parser.events_received()  # type: ignore[arg-type]
    return found


def messages(frames: Sequence[Frame]) -> list[tuple[Opcode, bytes]]:
    """Fragments joined; a message that is not whole too."""
    joined: list[tuple[Opcode, bytes]] = []
    is_open = False
    for one in frames:
        if one.opcode in (Opcode.TEXT, Opcode.BINARY) or not is_open or one.opcode is Opcode.PING:
            joined.append((one.opcode, bytes(one.data)))
        else:
            opcode, before = joined[-1]
            joined[-1] = opcode, before + bytes(one.data)
        is_open = not one.fin if one.opcode is not Opcode.PING else is_open
    return joined


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_pieces_are_the_frames_that_were_sent(data: st.DataObject) -> None:
    kinds = st.sampled_from(FIRST_BYTES[:7] * 3 + FIRST_BYTES)
    frames = st.tuples(kinds, st.sampled_from(SIZES), st.sampled_from([True] * 9 + [False]))
    sent = b"".join(
        frame(first, (bytes(range(251)) * (size // 251 + 1))[:size], is_masked=is_masked)
        for first, size, is_masked in data.draw(st.lists(frames, min_size=1, max_size=5))
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(sent)), max_size=8)))
    library = ServerProtocol(max_size=MESSAGE_BYTES_MAX)
    ours = PiecesParser(max_size=MESSAGE_BYTES_MAX)
    expected, got = parsed(library, sent, cuts), parsed(ours, sent, cuts)
    assert type(ours.parser_exc) is type(library.parser_exc)
    if library.parser_exc is None:
        assert messages(got) == messages(expected)
        # Pieces are not counted as frames of the peer: of each large frame the last at most.
        assert sum(one.fin or len(one.data) != PIECE_BYTES for one in got) <= len(expected)
    assert ours.data_to_send() == library.data_to_send() or library.parser_exc is not None
    assert max((len(one.data) for one in got), default=0) < LARGE_BYTES


def test_large_frame_arrives_while_it_comes() -> None:
    """No step takes more than a piece out of the buffer, and nothing waits for the end of the frame."""
    parser = PiecesParser(max_size=None)
    text = b"a" * (10 * PIECE_BYTES + 7)
    frames = parsed(parser, frame(0x81, text)[: 5 * PIECE_BYTES], [])
    assert [len(one.data) for one in frames] == [PIECE_BYTES] * 4
    assert not any(one.fin for one in frames)
    assert len(parser.reader.buffer) < PIECE_BYTES + 14


@pytest.mark.parametrize("before", [b"", frame(0x01, b"a" * 100)])
def test_frame_that_makes_a_message_too_large_is_refused_by_its_head(before: bytes) -> None:
    parser = PiecesParser(max_size=LARGE_BYTES + 50)
    first = 0x80 if before else 0x81
    sent = before + frame(first, b"a" * (LARGE_BYTES + 51 - len(before) // 2))
    parsed(parser, sent[: len(before) + 14], [])
    assert isinstance(parser.parser_exc, PayloadTooBig)
