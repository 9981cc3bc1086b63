"""Does each answer of a connection hear what is for it: together, in order, to its end, and with pauses for others?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from segue.engine_sessions import link as links
from segue.engine_sessions.frames import SessionEnd, SessionTaken, SessionTokens, new_key
from segue.engine_sessions.link import SessionAnswered, SessionLink
from segue_vllm.frames import PROTOCOL, End, Hello, Said, Taken, Tokens, read_asked, write_said
from tests.engine_sessions.replica import server_frame, unmasked, upgraded
from tests.support import until


class Ear:
    """Who hears one answer, and the order in which all of a connection heard."""

    def __init__(self, order: list[int]) -> None:
        self.number = 0
        self._order = order
        self.calls: list[list[SessionAnswered]] = []
        self.is_lost = False

    def hear(self, said: Sequence[SessionAnswered]) -> None:
        self.calls.append(list(said))
        self._order.append(self.number)

    def lost(self) -> None:
        self.is_lost = True


class Peer:
    """The other end of a connection, and its transport."""

    def __init__(self, answers: int) -> None:
        key = new_key()
        self.asked: list[object] = []
        self.pings = 0
        self.is_paused = False
        self.order: list[int] = []
        self.link = SessionLink(key)
        self.link.connection_made(cast(asyncio.Transport, self))
        self.link.data_received(upgraded(key))
        self.say([Hello(PROTOCOL, "i", 1, 100)])
        self.ears = [Ear(self.order) for _ in range(answers)]
        for ear in self.ears:
            ear.number = self.link.begin(ear)

    def say(self, *steps: Sequence[Said]) -> None:
        """A frame for each, which arrive at once."""
        self.link.data_received(b"".join(server_frame(write_said(step)) for step in steps))

    def write(self, data: bytes) -> None:
        first, body = unmasked(data)
        if first & 0x0F == 2:
            self.asked.append(read_asked(body))
        self.pings += first & 0x0F == 9

    def abort(self) -> None:
        self.link.connection_lost(None)

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False


async def rounds(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_steps_that_arrive_together_are_one_piece_of_each_answer() -> None:
    peer = Peer(2)
    one, two = (ear.number for ear in peer.ears)
    peer.say(
        [Taken(one, 7), Tokens(one, [1], 3), Tokens(two, [9])],
        [Tokens(one, [2]), Tokens(two, [8])],
        [Tokens(one, [4, 5]), End(one, "stop", 5), Tokens(two, [7])],
    )
    assert peer.ears[0].calls == [
        [SessionTaken(one, 7), SessionTokens(one, [1, 2, 4, 5], 3), SessionEnd(one, "stop", 5)]
    ]
    assert peer.ears[1].calls == [[SessionTokens(two, [9, 8, 7])]]


async def test_nothing_is_heard_after_the_end_of_an_answer() -> None:
    peer = Peer(1)
    (ear,) = peer.ears
    peer.say([Tokens(ear.number, [1]), End(ear.number, "stop", 1), Tokens(ear.number, [2])])
    peer.say([Tokens(ear.number, [3])])
    assert ear.calls == [[SessionTokens(ear.number, [1]), SessionEnd(ear.number, "stop", 1)]]
    peer.link.close()
    await rounds()
    assert not ear.is_lost


async def test_few_answers_are_served_at_a_time_and_others_meet_what_came_meanwhile() -> None:
    peer = Peer(3 * links.HEARERS_MAX)
    numbers = [ear.number for ear in peer.ears]
    peer.say([Tokens(number, [1]) for number in numbers])
    assert peer.order == numbers[: links.HEARERS_MAX]
    peer.say([Tokens(number, [2]) for number in numbers])
    await rounds()
    # The first ones go to the end of the row, the last ones get both at once.
    assert peer.order == [*numbers, *numbers[: links.HEARERS_MAX]]
    assert [said.ids for call in peer.ears[-1].calls for said in call] == [[1, 2]]  # type: ignore[union-attr]


async def test_what_has_come_before_the_connection_ends_is_heard() -> None:
    for is_broken in (False, True):
        peer = Peer(2 * links.HEARERS_MAX + 1)
        *ended, cut = peer.ears
        peer.say(
            [Tokens(cut.number, [1])],
            [
                s
                for ear in ended
                for s in (Tokens(ear.number, [1]), End(ear.number, "length", None))
            ],
        )
        if is_broken:
            peer.link.data_received(b"\xff\xff\xff")
        peer.link.connection_lost(None)
        await rounds()
        assert all(len(ear.calls) == 1 and not ear.is_lost for ear in ended)
        assert cut.calls
        assert cut.is_lost


async def test_answer_that_begins_on_a_lost_connection_is_lost_at_once() -> None:
    peer = Peer(0)
    peer.link.connection_lost(None)
    ear = Ear([])
    peer.link.begin(ear)
    assert ear.is_lost


async def test_long_read_is_worked_off_with_pauses_and_the_engine_is_slowed_down() -> None:
    peer = Peer(1)
    (ear,) = peer.ears
    step = server_frame(write_said([Tokens(ear.number, [1])]))
    count = 2 * links.UNREAD_BYTES_MAX // len(step)
    peer.link.data_received(step * count)
    assert peer.is_paused
    assert len(ear.calls) == 1
    others = 0
    while peer.link._unread:
        await asyncio.sleep(0)
        others += 1
    await rounds()
    assert others >= 2 * links.UNREAD_BYTES_MAX // links.READ_BYTES_MAX - 2
    assert not peer.is_paused
    heard = [said for call in ear.calls for said in call if isinstance(said, SessionTokens)]
    assert sum(len(said.ids) for said in heard) == count


async def test_longest_message_is_refused_before_it_is_held() -> None:
    peer = Peer(1)
    size = links.UNREAD_BYTES_MAX * 16
    peer.link.data_received(b"\x82\x7f" + size.to_bytes(8))
    await rounds()
    assert peer.link.reason == "a frame is too long"
    assert peer.ears[0].is_lost


async def test_engine_that_is_gone_without_a_word_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A machine that loses its power sends no end of a connection: the system notices after a quarter of an hour."""
    monkeypatch.setattr(links, "PING_S", 0.01)
    peer = Peer(1)
    await until(lambda: peer.ears[0].is_lost)
    assert peer.pings == links.PINGS_MAX
    assert peer.link.reason == "the engine did not answer to 2 pings"


async def test_engine_that_answers_to_pings_may_be_silent_for_long() -> None:
    peer = Peer(1)
    for _ in range(3 * links.PINGS_MAX):
        peer.link._check()
        peer.link.data_received(server_frame(b"", 0x8A))
    assert peer.pings == 0
    for _ in range(3):
        peer.link._check()
        for _ in range(links.PINGS_MAX):
            peer.link._check()
        peer.link.data_received(server_frame(b"", 0x8A))
    assert peer.pings == 3 * links.PINGS_MAX
    assert not peer.ears[0].is_lost
    peer.link.close()
    await rounds()
    assert peer.link._timer.cancelled()
