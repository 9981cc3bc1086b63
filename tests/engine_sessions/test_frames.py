"""Are messages read as they were sent, wherever the bytes are cut, and is everything else refused?"""

from __future__ import annotations

import random
from contextlib import suppress

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue.engine_sessions import frames
from segue.engine_sessions.frames import Incoming, ProtocolBroken
from segue.seams.prompt import id_array
from segue_vllm import frames as plugin
from tests.engine_sessions.replica import server_frame

IDS = st.lists(st.integers(0, 2**24 - 1), max_size=40)
SAID = st.one_of(
    st.builds(
        plugin.Hello,
        st.integers(0, 9),
        st.text(max_size=16),
        st.integers(1, 2),
        st.integers(1, 2**20),
    ),
    st.builds(plugin.Taken, st.integers(1, 2**40), st.integers(1, 2**40)),
    st.builds(plugin.Tokens, st.integers(1, 2**40), IDS, st.none() | st.integers(0, 2**20)),
    st.builds(
        plugin.End,
        st.integers(1, 2**40),
        st.sampled_from(["stop", "length"]),
        st.none() | st.integers(0, 9),
    ),
    st.builds(plugin.Refused, st.integers(1, 2**40), st.text(max_size=9), st.text(max_size=40)),
    st.builds(plugin.Failed, st.integers(1, 2**40), st.integers(400, 599), st.text(max_size=40)),
)


def test_ask_is_these_bytes() -> None:
    """The plugin of another version reads just this."""
    ask = frames.SessionAsk(
        7, 3, 2, b"d" * 16, frames.id_bytes(id_array([1, 256])), "o", "m", None, 0, b"{}"
    )
    data = msgspec.msgpack.encode(ask)
    assert data == (
        b"\x9b\x01\x07\x03\x02\xc4\x10" + b"d" * 16 + b"\xc4\x08\x01\x00\x00\x00\x00\x01\x00\x00"
        b"\xa1o\xa1m\xc0\x00\xc4\x02{}"
    )
    assert msgspec.to_builtins(plugin.read_asked(data)) == msgspec.to_builtins(ask)
    assert plugin.ids_of(ask.ids).tolist() == [1, 256]


def test_step_is_these_bytes() -> None:
    step = [plugin.Tokens(1, [5, 300]), plugin.End(2, "stop", 2)]
    assert (
        plugin.write_said(step) == b"\x92\x94\x03\x01\x92\x05\xcd\x01,\xc0\x94\x04\x02\xa4stop\x02"
    )


@settings(suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.lists(SAID, max_size=5), max_size=5), st.integers(0, 2**32), st.booleans())
def test_what_the_plugin_says_is_read_wherever_it_is_cut(
    messages: list[list[plugin.Said]], seed: int, is_fragmented: bool
) -> None:
    source = random.Random(seed)
    stream = b""
    for message in messages:
        data = plugin.write_said(message)
        cut = source.randint(0, len(data)) if is_fragmented else len(data)
        if is_fragmented:
            stream += server_frame(data[:cut], 0x02) + server_frame(b"ping", 0x89)
            stream += server_frame(data[cut:], 0x80)
        else:
            stream += server_frame(data)
    incoming, got = Incoming(), []
    while stream:
        cut = source.randint(1, len(stream))
        piece, stream = stream[:cut], stream[cut:]
        got += [frames.read_said(data) for data in incoming.feed(piece)]
    assert [msgspec.to_builtins(one) for one in got] == [
        msgspec.to_builtins(one) for one in messages
    ]
    assert incoming.pings == [b"ping"] * (len(messages) * is_fragmented)


@given(st.lists(SAID, min_size=1, max_size=3))
def test_message_that_is_cut_at_any_byte_is_never_read_as_another(said: list[plugin.Said]) -> None:
    data = plugin.write_said(said)
    for cut in range(len(data)):
        with pytest.raises(ProtocolBroken):
            frames.read_said(data[:cut])
    assert Incoming().feed(server_frame(data)[:-1]) == []


@given(st.binary(max_size=200))
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    with suppress(ProtocolBroken):
        for message in Incoming().feed(data):
            frames.read_said(message)


@pytest.mark.parametrize(
    "data",
    [b"\x82\x80\0\0\0\0", b"\xc2\x00", b"\x80\x01a", b"\x81\x01a", b"\x82\x7f\xff\0\0\0\0\0\0\0"],
    ids=["masked", "extension", "no beginning", "text", "too long"],
)
def test_frame_that_no_plugin_sends_is_refused(data: bytes) -> None:
    with pytest.raises(ProtocolBroken):
        Incoming().feed(data)


@given(st.binary(max_size=300))
def test_plugin_reads_or_refuses_any_message(data: bytes) -> None:
    with suppress(msgspec.MsgspecError, ValueError):
        plugin.read_asked(data)
