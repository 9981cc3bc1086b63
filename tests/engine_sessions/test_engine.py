"""What does Segue do where an engine keeps conversations, does not, or fails in between?"""

from __future__ import annotations

import asyncio
import logging
from array import array
from contextlib import aclosing, nullcontext
from typing import cast

import pytest

from segue.border.refusals import EngineLost
from segue.engine_sessions import link
from segue.engine_sessions.engine import SessionEngine
from segue.engines.queued import QueuedEngine, forget
from segue.engines.token_engine import TokenEngine
from segue.engines.vllm import VLLM
from segue.errors import EngineFailed, Unavailable
from segue.observe.metrics import Metrics
from segue.seams.model import Finish, Ids, Sampling
from segue.seams.prompt import Tokens, id_array
from segue_vllm import serving
from segue_vllm.chains import Chains, Unknown, new_digest
from segue_vllm.frames import Refused, bytes_of
from segue_vllm.kept import Refusal
from tests.engine_sessions.replica import MODEL, FakeCore, FakeRequest, Replica, answer_to
from tests.engines.asking import finish_of, heard, ids_of, job, tokens
from tests.support import until

PROMPT = tokens(range(10, 60))


async def turn(engine: SessionEngine, prompt: Tokens, most: int = 6) -> list[int]:
    got = ids_of(await heard(engine, job(prompt, most, sampling=Sampling())))
    assert got == answer_to(prompt.flat().tolist(), most)
    return got


async def test_second_turn_sends_only_what_is_new() -> None:
    replica = Replica("one")
    engine = replica.engine()
    answer = await turn(engine, PROMPT)
    await turn(engine, PROMPT.plus(id_array(answer)).plus(id_array([7, 8])))
    assert engine.session_counts[0] == {"whole": 1, "kept": 1}
    assert replica.core is not None
    assert replica.core.kept.counts["taken"] == 1
    await replica.close()


async def test_without_the_plugin_everything_goes_over_http_and_it_is_seldom_asked_for() -> None:
    replica = Replica("one")
    replica.has_plugin = False
    engine = replica.engine()
    for _ in range(3):
        await turn(engine, PROMPT)
    assert replica.by_http == 3
    assert engine._retry_at > asyncio.get_running_loop().time() + 30
    assert not engine.session_counts[0]
    await replica.close()


async def test_images_and_logprobs_go_over_http() -> None:
    replica = Replica("one")
    engine = replica.engine()
    asked = job(PROMPT, 4, sampling=Sampling(wants_logprobs=True))
    assert finish_of(await heard(engine, asked))
    assert replica.by_http == 1
    assert not engine.session_counts[0]
    await replica.close()


async def test_engine_that_is_killed_in_an_answer_ends_it_once_in_words() -> None:
    replica = Replica("one")
    engine = replica.engine()
    pieces = []
    with pytest.raises(EngineLost, match="in the middle of its answer"):
        async with aclosing(engine.sample(job(PROMPT, 30, sampling=Sampling()))) as said:
            async for piece in said:
                pieces.append(piece)
                if isinstance(piece, Ids):
                    replica.is_up = False
                    replica.lose()
    assert pieces
    with pytest.raises(Unavailable):
        await turn(engine, PROMPT)
    replica.is_up = True
    engine._retry_at = 0.0
    await turn(engine, PROMPT)
    await replica.close()


async def test_core_that_is_killed_beside_its_plugin_ends_an_answer_in_the_same_words() -> None:
    replica = Replica("one")
    engine = replica.engine()
    with pytest.raises(EngineLost, match="in the middle of its answer"):
        async with aclosing(engine.sample(job(PROMPT, 30, sampling=Sampling()))) as said:
            async for piece in said:
                if isinstance(piece, Ids):
                    (request,) = replica.door.requests
                    request.fail(type("EngineDeadError", (Exception,), {})())
                    replica.server.flush()
    await replica.close()


async def test_connection_that_breaks_before_the_first_token_costs_nothing_but_the_whole_prompt() -> (
    None
):
    replica = Replica("one")
    engine = replica.engine()
    await turn(engine, PROMPT)
    replica.door.may_go.clear()
    waiting = asyncio.create_task(turn(engine, PROMPT.plus(id_array([5]))))
    await replica.door.has_waiting.wait()
    replica.lose()
    await waiting
    assert engine.session_counts[0]["http"] == 1
    assert replica.by_http == 1
    replica.door.may_go.set()
    await replica.close()


async def test_engine_that_is_gone_without_a_word_costs_a_turn_seconds_and_not_its_whole_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    replica = Replica("one")
    engine = replica.engine()
    await turn(engine, PROMPT)
    monkeypatch.setattr(link, "PING_S", 0.01)
    replica.wires[0].is_gone = True
    engine._link._check()  # type: ignore[union-attr]
    # This one is asked elsewhere: a server behind the same address, or the same that is back.
    await turn(engine, PROMPT.plus(id_array([5])))
    assert replica.by_http == 1
    assert engine._link.reason == "the engine did not answer to 2 pings"  # type: ignore[union-attr]
    await turn(engine, PROMPT.plus(id_array([6])))
    assert engine.session_counts[0] == {"whole": 1, "kept": 2, "http": 1}
    await replica.close()


async def test_message_that_is_cut_breaks_the_connection_and_the_turn_goes_on() -> None:
    replica = Replica("one")
    engine = replica.engine()
    await turn(engine, PROMPT)
    replica.door.may_go.clear()
    waiting = asyncio.create_task(turn(engine, PROMPT.plus(id_array([5]))))
    await replica.door.has_waiting.wait()
    # A list that says it has one more.
    replica.wires[0].send(b"\x82\x03\x92\x94\x03")
    await waiting
    assert engine._link is not None
    assert engine._link.reason == "a message cannot be read"
    replica.door.may_go.set()
    await replica.close()


async def test_answer_that_we_cannot_use_is_taken_back_at_the_engine() -> None:
    """A fault of ours, in the middle of an answer, which goes on for nobody."""
    replica = Replica("one")
    engine = replica.engine()
    count = 0

    def take(piece: object) -> bool:
        nonlocal count
        count += 1
        raise RuntimeError("a fault")

    replica.door.may_go.clear()
    asked = job(PROMPT, 30, sampling=Sampling(), take=take)
    waiting = asyncio.create_task(heard(engine, asked))
    await replica.door.has_waiting.wait()
    (request,) = replica.door.requests
    replica.door.may_go.set()
    with pytest.raises(RuntimeError, match="a fault"):
        await waiting
    await asyncio.wait_for(replica.door.has_aborted.wait(), 5)
    assert replica.door.aborted == [request]
    assert count == 1
    await turn(engine, PROMPT)
    assert replica.by_http == 0
    await replica.close()


@pytest.mark.parametrize(
    "about, words",
    [
        ({"protocol": 2}, "its plugin speaks protocol 2, not ours"),
        ({"protocol": "x"}, ""),
        ({"package": "another"}, ""),
        ({"path": "https://elsewhere"}, ""),
        ({"path": "/v1/\u20ac"}, ""),
        ({"path": "/v1 HTTP/1.1\r\nx: y\r\n"}, ""),
    ],
    ids=["newer", "unreadable", "another package", "elsewhere", "no path", "a header"],
)
async def test_plugin_that_we_do_not_know_gets_no_connection_and_turns_go_on(
    about: dict[str, object], words: str, caplog: pytest.LogCaptureFixture
) -> None:
    replica = Replica("one")
    replica.about |= about
    engine = replica.engine()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            await turn(engine, PROMPT)
    assert replica.by_http == 2
    assert not replica.wires
    assert caplog.text.count(words) >= 1
    assert caplog.text.count("its plugin") == bool(words)
    await replica.close()


async def test_plugin_that_greets_in_another_protocol_is_left_and_it_is_said(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PROTOCOL", 2)
    replica = Replica("one")
    engine = replica.engine()
    with caplog.at_level(logging.INFO):
        await turn(engine, PROMPT)
    assert replica.by_http == 1
    assert "its plugin cannot be reached: protocol 2 is not 1" in caplog.text
    await replica.close()


async def test_plugin_of_any_version_is_asked_if_its_protocol_is_ours() -> None:
    replica = Replica("one")
    replica.about |= {"version": "99.0.dev1", "vllm": "99.0", "step": 7, "more": [1]}
    engine = replica.engine()
    await turn(engine, PROMPT)
    assert (replica.by_http, engine.session_counts[0]) == (0, {"whole": 1})
    await replica.close()


async def test_handle_of_another_owner_is_refused_and_the_turn_goes_on_by_its_whole_prompt() -> (
    None
):
    """As if Segue had mixed them up: the engine says so, and nothing of the other's is read."""
    replica = Replica("one")
    engine = replica.engine()
    answer = await turn(engine, PROMPT)
    (known,) = engine.known._turns.values()
    known.scope = ("bob", None)
    prompt = PROMPT.plus(id_array(answer)).plus(id_array([7]))
    asked = job(prompt, 6, sampling=Sampling(), owner="bob")
    assert ids_of(await heard(engine, asked)) == answer_to(prompt.flat().tolist(), 6)
    assert engine.session_counts == ({"whole": 2, "kept": 1}, {"owner": 1})
    assert replica.by_http == 0
    await replica.close()


async def cut_turn(cut: int, prompt: Tokens) -> str:
    """A turn after a turn, on a connection that ends after so many bytes: what became of it."""
    replica = Replica("one", seed=cut)
    engine = replica.engine()
    answer = await turn(engine, prompt)
    (wire,) = replica.wires
    wire.bytes_left = cut
    prompt = prompt.plus(id_array(answer)).plus(id_array([7, 8]))
    wanted, got, ends = answer_to(prompt.flat().tolist(), 6), [], 0
    how = "by handle"
    try:
        async for piece in engine.sample(job(prompt, 6, sampling=Sampling())):
            got += piece.ids if isinstance(piece, Ids) else ()
            ends += isinstance(piece, Finish)
    except EngineLost as error:
        how, ends = error.message, ends + 1
        assert got == wanted[: len(got)]
        assert got
    else:
        assert got == wanted
        how = "by whole prompt" if replica.by_http else how
    assert ends == 1
    await turn(engine, prompt)
    await replica.close()
    return how


async def test_frames_cut_at_any_byte_of_a_turn_end_it_once_or_let_it_go_on() -> None:
    words = "The engine broke off in the middle of its answer."
    ways = ["by whole prompt", words, "by handle"]
    found = [await cut_turn(0, PROMPT)]
    while found[-1] != "by handle":
        found.append(await cut_turn(len(found), PROMPT))
    # First nothing has come, then some of it, then all.
    assert found == sorted(found, key=ways.index)
    assert set(found) == set(ways)
    assert len(found) > 20


async def test_output_that_was_read_ahead_is_gone_on_from_with_what_is_new() -> None:
    replica = Replica("one")
    engine = replica.engine()
    answer = await turn(engine, PROMPT)
    output = list(range(100, 400))
    for end in (100, 200, 300):
        ids = id_array([*answer, *output[:end]])
        prompt = Tokens(PROMPT, ids, PROMPT.length + len(ids))
        asked = job(prompt, 0, sampling=Sampling(), is_ahead=True)
        assert not ids_of(await heard(engine, asked))
    assert replica.core is not None
    computed = replica.core.computed
    await turn(engine, PROMPT.plus(id_array(answer)).plus(id_array([*output, 7, 8])))
    assert engine.session_counts[0] == {"whole": 1, "kept": 4}
    # Every time the blocks were handed on.
    assert replica.core.kept.counts["taken"] == 4
    assert replica.core.computed - computed < 20
    await replica.close()


async def test_what_was_given_up_while_it_was_read_ahead_is_not_gone_on_from() -> None:
    replica = Replica("one")
    engine = replica.engine()
    answer = await turn(engine, PROMPT)
    replica.door.may_go.clear()
    prompt = Tokens(PROMPT, id_array([*answer, 100, 101]), PROMPT.length + len(answer) + 2)
    asked = job(prompt, 0, sampling=Sampling(), is_ahead=True)
    reading = asyncio.create_task(heard(engine, asked))
    await replica.door.has_waiting.wait()
    reading.cancel()
    await replica.door.has_aborted.wait()
    replica.door.may_go.set()
    await turn(engine, PROMPT.plus(id_array(answer)).plus(id_array([100, 101, 7])))
    assert replica.server.counts["core_refused"] == 0
    assert engine.session_counts == ({"whole": 1, "kept": 2}, {})
    await replica.close()


async def test_restarted_engine_refuses_nothing_because_its_handles_are_forgotten() -> None:
    replica = Replica("one")
    engine = replica.engine()
    answer = await turn(engine, PROMPT)
    replica.restart()
    engine._retry_at = 0.0
    await turn(engine, PROMPT.plus(id_array(answer)).plus(id_array([7])))
    assert engine.session_counts[0] == {"whole": 2}
    await replica.close()


async def test_forgotten_conversation_is_refused_and_sent_as_a_whole() -> None:
    replica = Replica("one", tokens_max=120)
    engine = replica.engine()
    answer = await turn(engine, PROMPT)
    for start in (100, 200, 300):
        await turn(engine, tokens(range(start, start + 50)))
    await turn(engine, PROMPT.plus(id_array(answer)).plus(id_array([7])))
    assert engine.session_counts[1] == {"evicted": 1}
    await replica.close()


async def test_core_that_has_forgotten_is_asked_again_by_the_plugin_itself() -> None:
    replica = Replica("one")
    engine = replica.engine()
    answer = await turn(engine, PROMPT)
    assert replica.core is not None
    for key in list(replica.core.kept._turns):
        replica.core.kept._forget(key)
    await turn(engine, PROMPT.plus(id_array(answer)).plus(id_array([7])))
    assert replica.server.counts["core_refused"] == 1
    assert not engine.session_counts[1]
    await replica.close()


async def test_failure_of_the_request_is_the_words_of_http() -> None:
    """Whatever the plugin cannot do is asked once more over HTTP, which says it in its words."""
    replica = Replica("one")
    engine = SessionEngine(replica, "other")
    engine._known, engine._has_facts = replica.engine()._known, True
    assert ids_of(await heard(engine, job(PROMPT, 3, sampling=Sampling())))
    assert engine.session_counts[0] == {"whole": 1, "http": 1}
    await replica.close()


async def test_silence_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    replica = Replica("one")
    replica.timeouts = type(replica.timeouts)(first_s=0.05, silence_s=0.05)
    engine = replica.engine()
    replica.door.may_go.clear()
    with pytest.raises(EngineFailed, match="sent nothing"):
        await heard(engine, job(PROMPT, 3, sampling=Sampling()))
    replica.door.may_go.set()
    await replica.close()


async def test_owner_of_whom_everything_was_erased_is_forgotten_on_both_sides() -> None:
    replica = Replica("one")
    engine = replica.engine()
    answer = await turn(engine, PROMPT)
    other = job(PROMPT, 6, sampling=Sampling(), owner="bob")
    await heard(engine, other)
    chains = replica.server.chains
    assert (len(chains), len(engine.known)) == (2, 2)
    server = QueuedEngine("one", engine)
    forget(lambda: {"m": server, "n": QueuedEngine("two", TokenEngine(VLLM, replica))})("bob")
    await until(lambda: len(chains) == 1)
    assert (len(engine.known), chains.turns) == (1, 1)
    forget(lambda: {"m": server})(job(PROMPT, 1).owner)
    await turn(engine, PROMPT.plus(id_array(answer)).plus(id_array([7])))
    assert engine.session_counts == ({"whole": 3}, {})
    assert (len(chains), chains.turns) == (1, 1)
    await replica.close()


@pytest.mark.parametrize("is_new", [False, True], ids=["lost", "none yet"])
async def test_owner_who_is_erased_while_there_is_no_connection_is_forgotten_all_the_same(
    is_new: bool,
) -> None:
    """A connection broke just then, or this server has begun after the turns of the one before it."""
    replica = Replica("one")
    engine = replica.engine()
    await turn(engine, PROMPT)
    await heard(engine, job(PROMPT, 6, sampling=Sampling(), owner="bob"))
    replica.lose()
    if is_new:
        engine = replica.engine()
    # While it is not tried again, either.
    engine._retry_at = asyncio.get_running_loop().time() + 60
    engine.forget_owner(job(PROMPT, 1).owner)
    engine._retry_at = 0.0
    engine.forget_owner("carol")
    await until(lambda: len(replica.server.chains) == 1)
    await heard(engine, job(PROMPT, 6, sampling=Sampling(), owner="bob"))
    assert replica.server.counts["turns"] == 3
    await replica.close()


# --- what the plugin refuses ------------------------------------------------------------------------

SCOPE = (MODEL, None, None)


def begun(chains: Chains) -> int:
    return chains.begin("alice", SCOPE, 0, 0, b"", array("I", [1, 2, 3])).handle


def digest_of(*ids: int) -> bytes:
    digest = new_digest()
    digest.update(bytes_of(array("I", ids)))
    found: bytes = digest.digest()
    return found


@pytest.mark.parametrize(
    "why, owner, scope, handle, length, digest",
    [
        ("unknown", "alice", SCOPE, 7, 2, digest_of(1, 2)),
        ("owner", "bob", SCOPE, 1, 2, digest_of(1, 2)),
        ("model", "alice", ("n", None, None), 1, 2, digest_of(1, 2)),
        ("adapter", "alice", (MODEL, "a", None), 1, 2, digest_of(1, 2)),
        ("salt", "alice", (MODEL, None, "s"), 1, 2, digest_of(1, 2)),
        ("length", "alice", SCOPE, 1, 4, digest_of(1, 2)),
        ("digest", "alice", SCOPE, 1, 2, digest_of(1, 3)),
        ("digest", "alice", SCOPE, 1, 2, b""),
        ("evicted", "alice", SCOPE, 2, 2, digest_of(1, 2)),
    ],
)
def test_refusal_says_why(
    why: str,
    owner: str,
    scope: tuple[str, str | None, str | None],
    handle: int,
    length: int,
    digest: bytes,
) -> None:
    chains = Chains(1_000)
    assert begun(chains) == 1
    chains.forget(begun(chains))
    with pytest.raises(Unknown) as refused:
        chains.begin(owner, scope, handle, length, digest, array("I", [9]))
    assert refused.value.why == why
    assert Refused(1, why, str(refused.value)).words
    going_on = chains.begin("alice", SCOPE, 1, 2, digest_of(1, 2), array("I", [9]))
    assert going_on.flat().tolist() == [1, 2, 9]


class Adapter:
    """As vLLM's `LoRARequest`, which is equal to every one of its name."""

    def __init__(self, path: str, number: int) -> None:
        self.lora_name, self.lora_path, self.lora_int_id = "a", path, number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Adapter)

    def __hash__(self) -> int:
        return hash(self.lora_name)


@pytest.mark.parametrize(
    "path, number, is_same", [("p", 1, True), ("q", 1, False), ("p", 2, False)]
)
def test_blocks_of_an_adapter_are_not_those_of_another_that_was_loaded_under_its_name(
    path: str, number: int, is_same: bool
) -> None:
    core = FakeCore(blocks=40, tokens_max=1_000)
    first = FakeRequest("1", [5, 6, 7], None, Adapter("p", 1))
    sampled = core.run(first, {"keep": "k"}, 2)
    child = FakeRequest("2", [8], None, Adapter(path, number))
    whole = [5, 6, 7, *sampled]
    with nullcontext() if is_same else pytest.raises(Refusal, match="adapter"):
        core.arrive(child, {"from": "k", "length": len(whole), "tail": whole[-4:]})
    assert bool(core.kept.claims) == is_same


def test_ids_of_forgotten_turns_are_freed_when_nothing_stands_on_them() -> None:
    chains = Chains(1_000)
    first = chains.begin("alice", SCOPE, 0, 0, b"", array("I", range(100)))
    second = chains.begin(
        "alice", SCOPE, first.handle, 100, digest_of(*range(100)), array("I", [1])
    )
    chains.end(first)
    chains.forget(first.handle)
    assert chains.tokens == 101
    chains.end(second)
    chains.forget(second.handle)
    assert chains.tokens == 0


def test_turns_of_few_ids_are_bounded_in_number() -> None:
    """A chain of them, too, of which only the last has a handle."""
    chains = Chains(1_000_000, turns_max=10)
    ids = [1]
    part = chains.begin("alice", SCOPE, 0, 0, b"", array("I", ids))
    for _ in range(9):
        chains.end(part)
        digest = digest_of(*ids)
        part = chains.begin("alice", SCOPE, part.handle, len(ids), digest, array("I", [2]))
        ids.append(2)
    assert (chains.turns, len(chains)) == (10, 10)
    for _ in range(4):
        chains.end(chains.begin("alice", SCOPE, 0, 0, b"", array("I", [3])))
    # The chain cannot be shorter while its last turn runs.
    assert (chains.turns, len(chains)) == (11, 1)
    chains.end(part)
    chains.end(chains.begin("alice", SCOPE, 0, 0, b"", array("I", [3])))
    assert (chains.turns, chains.tokens, len(chains)) == (2, 2, 2)


def test_turns_of_few_ids_are_bounded_in_number_in_the_core() -> None:
    core = FakeCore(blocks=40, tokens_max=1_000_000)
    core.kept.turns_max = 3
    for number in range(9):
        key = {"keep": str(number)}
        core.run(FakeRequest(str(number), [number, 5], None, None), key, 2)
    assert list(core.kept._turns) == list(core.kept.held) == ["6", "7", "8"]


# --- what is counted --------------------------------------------------------------------------------


async def test_jobs_and_refusals_are_counted_on_the_page_of_metrics_once() -> None:
    replica = Replica("one")
    server = QueuedEngine("one", replica.engine())
    metrics = Metrics()
    await turn(cast(SessionEngine, server.engine), PROMPT)
    for _ in range(2):
        metrics.count_sessions("one", *server.take_sessions())
    metrics.count_sessions("one", {}, {"evicted": 3})
    page = metrics.write().decode()
    assert 'segue_engine_session_turns_total{how="whole",replica="one"} 1.0' in page
    assert 'segue_engine_session_refusals_total{reason="evicted",replica="one"} 3.0' in page
    assert QueuedEngine("two", TokenEngine(VLLM, replica)).take_sessions() == ({}, {})
    await replica.close()
