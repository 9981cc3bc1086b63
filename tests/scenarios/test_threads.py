"""Threads of the Messages API over real sockets: a turn costs what is new in it, and a thread that is lost says so."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.accounts.hashes import issue_key
from segue.cluster.hub import Hub
from segue.cluster.threads import FETCH_S
from segue.ids import tag_of
from segue.server.aliases import NamedModels
from segue.server.app import WorkerPlace
from segue.stores.threads import UNUSED_S_MAX
from tests.canaries import WORD
from tests.pipeline import RecordingEngine, flat
from tests.scenarios.test_chained_equals_full import read
from tests.support import (
    MODEL,
    WAIT_S,
    Answer,
    Served,
    fetch,
    metric,
    served_process,
    serving,
    until,
)

Body = dict[str, Any]

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather in a city", "input_schema": SCHEMA}
LATER = {"name": "later", "description": "More", "input_schema": SCHEMA, "defer_loading": True}
CREATE = {"type": "create"}
SCRIPT = {
    "turns": [
        {"text": "Two.", "calls": [{"name": "get_weather", "arguments": {"city": "Paris"}},
                                   {"name": "get_weather", "arguments": {"city": "Rome"}}]},
        {"reasoning": "One more is due.", "calls": [{"name": "get_weather", "arguments": {"city": "Oslo"}}]},
        {"reasoning": "Nearly.", "text": "That is all."},
        {"text": "Go on."},
    ]
}  # fmt: skip


def text_of(answer: Answer) -> str:
    assert answer.status == 200, answer.body
    return "".join(block["text"] for block in answer.json["content"] if block["type"] == "text")


def results(answer: Answer, text: str = "sunny") -> list[Body]:
    """The results of all calls of an answer."""
    calls = [block for block in answer.json["content"] if block["type"] == "tool_use"]
    return [{"type": "tool_result", "tool_use_id": call["id"], "content": text} for call in calls]


def user(content: object) -> Body:
    return {"role": "user", "content": content}


async def post(
    served: Any, *messages: Body, headers: dict[str, str] | None = None, **fields: Any
) -> Answer:
    body = {"model": MODEL, "max_tokens": 200, "messages": list(messages), **fields}
    return await fetch(served, "POST", "/v1/messages", body, headers)


async def create(served: Any, text: str = "Weather?", **fields: Any) -> Answer:
    fields = {"system": "Be short.", "tools": [WEATHER], "thread": CREATE, **fields}
    answer = await post(served, user(text), **fields)
    assert answer.status == 200, answer.body
    return answer


def after(answer: Answer) -> Body:
    return {"type": "continue", "previous_message_id": answer.json["id"]}


def check_lost(answer: Answer, message_id: str) -> None:
    assert answer.status == 404
    body = answer.json
    assert body.pop("request_id").startswith("req_")
    assert body == {
        "type": "error",
        "error": {
            "type": "not_found_error",
            "message": f"No usable thread state was found for {message_id}.",
            "details": {"error_code": "thread_not_found"},
        },
    }


def record(served: Served) -> RecordingEngine:
    """From now on every prompt of this server is kept."""
    models = served.app.runner.models
    assert isinstance(models, NamedModels)
    engine = RecordingEngine(models[MODEL].engine)
    models.add(MODEL, replace(models[MODEL], engine=engine))
    return engine


def script(folder: Path) -> str:
    path = folder / "script.json"
    path.write_text(json.dumps(SCRIPT))
    return str(path)


async def test_turn_of_a_thread_has_its_history_and_costs_what_is_new(tmp_path: Path) -> None:
    async with serving(script=script(tmp_path)) as served:
        engine = record(served)
        first = await create(served, "Weather? " * 400)
        before = await metric(served, "segue_tokens_tokenized_total")
        second = await post(served, user(results(first)), thread=after(first))
        third = await post(served, user(results(second)), thread=after(second))
        assert text_of(third) == "That is all."
        prompts = [flat(job) for job in engine.jobs]
        for shorter, longer in pairwise(prompts):
            assert longer[: len(shorter)] == shorter
        assert await metric(served, "segue_tokens_tokenized_total") - before < 200
        assert await metric(served, "segue_items_validated_total") == 1 + 2 + 1
        assert await metric(served, "segue_tool_decodes_total") == 1
        assert third.json["usage"]["input_tokens"] == len(prompts[-1])


async def test_turn_may_be_continued_more_than_once(tmp_path: Path) -> None:
    async with serving(script=script(tmp_path)) as served:
        engine = record(served)
        first = await create(served)
        forks = await asyncio.gather(
            *(post(served, user(results(first, f"{n}")), thread=after(first)) for n in range(3))
        )
        again = await post(served, user(results(forks[1])), thread=after(forks[1]))
        assert text_of(again) == "That is all."
        assert [answer.status for answer in forks] == [200] * 3
        assert len(engine.jobs) == 5


async def test_messages_may_be_empty_and_nothing_may_be_asked_for(tmp_path: Path) -> None:
    """After `pause_turn` there is nothing new to say; `max_tokens: 0` only fills the cache."""
    async with serving(script=script(tmp_path)) as served:
        warmed = await create(served, "Hello", max_tokens=0)
        assert warmed.json["content"] == []
        first = await post(served, thread=after(warmed))
        assert first.status == 200, first.body
        assert text_of(first) == "Two."
        refused = await post(served, thread=CREATE)
        assert refused.status == 400


async def test_head_is_inherited_repeated_or_new(tmp_path: Path) -> None:
    """Repeated in other spellings it is the same; another one is the new head, and nothing is lost of the history."""
    head = {
        "system": [{"type": "text", "text": "Be short.", "cache_control": {"type": "ephemeral"}}]
    }
    marked = {**WEATHER, "cache_control": {"type": "ephemeral"}, "type": "custom"}
    spellings: list[Body] = [
        {},
        {"system": "Be short.", "tools": [WEATHER]},
        {**head, "tools": [marked]},
        {"tools": [WEATHER, LATER]},
    ]
    async with serving(script=script(tmp_path)) as served:
        engine = record(served)
        first = await create(served)
        for spelling in spellings:
            await post(served, user(results(first)), thread=after(first), **spelling)
        prompts = [flat(job) for job in engine.jobs[1:]]
        assert all(prompt == prompts[0] for prompt in prompts)
        other = await post(
            served, user(results(first)), thread=after(first), system="Be long.", tools=[WEATHER]
        )
        assert other.status == 200
        assert flat(engine.jobs[-1]) != prompts[0]
        # What was said last is inherited from there on.
        last = await post(served, user(results(other)), thread=after(other))
        assert last.status == 200
        text = read(flat(engine.jobs[-1]))
        assert "Be long." in text
        assert "Be short." not in text


async def test_deferred_tools_on_a_continue_lose_nothing(tmp_path: Path) -> None:
    """As Claude Code does after a ToolSearch; also where the tools came with an earlier turn."""
    found = {"type": "tool_reference", "tool_name": "later"}
    async with serving(script=script(tmp_path)) as served:
        engine = record(served)
        for tools in ([WEATHER], [WEATHER, LATER]):
            engine.jobs.clear()
            first = await create(served, tools=tools)
            one, two = results(first)
            searched = user([{**one, "content": [found]}, two])
            more = {} if LATER in tools else {"tools": [LATER, WEATHER]}
            second = await post(served, searched, thread=after(first), **more)
            # Named once more, it is not shown once more.
            (one,) = results(second)
            third = await post(served, user([{**one, "content": [found]}]), thread=after(second))
            assert text_of(third) == "That is all."
            prompts = [flat(job) for job in engine.jobs]
            assert prompts[1][: len(prompts[0])] == prompts[0]
            assert prompts[2][: len(prompts[1])] == prompts[1]
            assert read(prompts[2]).count('"name": "later"') == 1


async def test_tool_that_was_taken_away_stays_away(tmp_path: Path) -> None:
    gone = {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "get_weather"}}
    async with serving(script=script(tmp_path)) as served:
        first = await create(served)
        removal = {"role": "system", "content": [gone]}
        second = await post(served, user(results(first)), removal, thread=after(first))
        assert second.status == 200, second.body
        refused = await post(
            served,
            user(results(second) or "x"),
            thread=after(second),
            tool_choice={"type": "tool", "name": "get_weather"},
        )
        assert refused.status == 400
        assert "get_weather" in refused.json["error"]["message"]


async def test_lost_foreign_and_made_up_threads_are_the_same(tmp_path: Path) -> None:
    async with serving(auth="keys", script=script(tmp_path)) as served:
        app = served.app

        async def key(owner: str) -> dict[str, str]:
            _, secret = await issue_key(app.state.store.keys, app.state.hashes, "k", owner)
            return {"Authorization": f"Bearer {secret}"}

        ada, eve, other = await key("ada"), await key("eve"), await key("ada")
        first = await create(served, headers=ada)
        thread = after(first)
        check_lost(await post(served, user("x"), thread=thread, headers=eve), first.json["id"])
        for made_up in ("msg_" + "0" * 32, "", "x", first.json["id"].replace("msg_", "item_")):
            asked = {"type": "continue", "previous_message_id": made_up}
            check_lost(await post(served, user("x"), thread=asked, headers=ada), made_up)
        # Another key of the same owner has the same threads.
        again = await post(served, user(results(first)), thread=thread, headers=other)
        assert again.status == 200


async def test_thread_is_gone_an_hour_after_its_last_use(tmp_path: Path) -> None:
    async with serving(script=script(tmp_path)) as served:
        threads, late = served.app.state.threads, 0.0
        usual = threads.clock
        threads.clock = lambda: usual() + late
        first = await create(served)
        late += UNUSED_S_MAX - 60
        second = await post(served, user(results(first)), thread=after(first))
        assert second.status == 200
        late += UNUSED_S_MAX - 60
        assert (await post(served, user(results(second)), thread=after(second))).status == 200
        late += UNUSED_S_MAX + 60
        lost = await post(served, user(results(second)), thread=after(second))
        check_lost(lost, second.json["id"])
        assert threads.bytes == 0


async def test_threads_go_with_their_key() -> None:
    async with serving(auth="keys") as served:
        app = served.app
        keys = app.state.store.keys
        key, secret = await issue_key(keys, app.state.hashes, "k", "ada")
        headers = {"x-api-key": secret}
        await create(served, headers=headers)
        assert app.state.threads.bytes > 0
        assert app.state.budget.bytes_of(key.id) == app.state.threads.bytes
        await keys.revoke(key.id)
        app.state.accounts.confirm_soon()
        await until(lambda: not app.state.threads.bytes)
        assert app.state.budget.bytes_of(key.id) == 0


async def test_threads_of_a_key_that_is_long_unused_go_with_it_as_well(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Keys that are not used leave the cache of this process; not while they hold something."""
    async with serving(auth="keys") as served:
        app = served.app
        keys, accounts, threads = app.state.store.keys, app.state.accounts, app.state.threads
        key, secret = await issue_key(keys, app.state.hashes, "k", "ada")
        await create(served, headers={"x-api-key": secret})
        monkeypatch.setattr("segue.accounts.account.IDLE_S", -1.0)
        assert await accounts.confirm() == []
        assert threads.bytes > 0
        await keys.revoke(key.id)
        app.state.accounts.confirm_soon()
        await until(lambda: not threads.bytes)


async def test_memory_of_threads_is_counted_and_bounded(tmp_path: Path) -> None:
    async with serving(script=script(tmp_path), connections_state_bytes_max=200_000) as served:
        first = await create(served, "x" * 20_000)
        assert await metric(served, 'segue_memory_bytes{part="threads"}') > 20_000
        for _ in range(12):
            await create(served, "y" * 20_000)
        assert served.app.state.threads.bytes <= 200_000
        lost = await post(served, user(results(first)), thread=after(first))
        check_lost(lost, first.json["id"])


async def test_threads_that_are_off_are_refused_and_never_ignored() -> None:
    async with serving(threads=False) as served:
        for thread in (CREATE, {"type": "continue", "previous_message_id": "msg_1"}):
            for stream in (False, True):
                refused = await post(served, user("x"), thread=thread, stream=stream)
                assert refused.status == 400
                error = refused.json["error"]
                assert error["type"] == "invalid_request_error"
                assert error["details"] == {
                    "error_code": "thread_unsupported_request",
                    "unsupported": [],
                }
                assert "--no-threads" in error["message"]
        assert (await post(served, user("x"))).status == 200


@pytest.mark.parametrize("thread", [{"type": "fork"}, {"type": "continue"}, {}, "create", [1]])
async def test_thread_that_makes_no_sense_is_refused(thread: object) -> None:
    async with serving() as served:
        refused = await post(served, user("x"), thread=thread)
        assert refused.status == 400
        assert "thread" in refused.json["error"]["message"]
        assert "details" not in refused.json["error"]


async def test_failed_and_plain_turns_are_not_kept(tmp_path: Path) -> None:
    async with serving(script=script(tmp_path)) as served:
        plain = await post(served, user("x"))
        check_lost(await post(served, user("y"), thread=after(plain)), plain.json["id"])
        first = await create(served)
        missing = await post(served, user("no results"), thread=after(first))
        assert missing.status == 400
        assert "tool_use" in missing.json["error"]["message"]
        # The thread is as it was.
        assert (await post(served, user(results(first)), thread=after(first))).status == 200


async def test_stored_response_is_no_thread_and_a_thread_no_stored_response() -> None:
    async with serving() as served:
        stored = await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": "x"})
        name = stored.json["id"].replace("resp_", "msg_")
        asked = {"type": "continue", "previous_message_id": name}
        check_lost(await post(served, user("y"), thread=asked), name)
        first = await create(served)
        turn_id = first.json["id"].replace("msg_", "resp_")
        body = {"model": MODEL, "input": "x", "previous_response_id": turn_id}
        refused = await fetch(served, "POST", "/v1/responses", body)
        assert refused.json["error"]["code"] == "previous_response_not_found"
        assert (await fetch(served, "GET", f"/v1/responses/{turn_id}")).status == 404


async def test_tokens_of_a_thread_are_counted_with_its_history(tmp_path: Path) -> None:
    async with serving(script=script(tmp_path)) as served:
        first = await create(served)
        body = {"model": MODEL, "messages": [user(results(first))], "thread": after(first)}
        counted = await fetch(served, "POST", "/v1/messages/count_tokens", body)
        second = await post(served, user(results(first)), thread=after(first))
        assert counted.json["input_tokens"] == second.json["usage"]["input_tokens"]


# --- why the cache had less ---


async def reason(
    served: Served, previous: str, *messages: Body, system: str = "Be short.", **fields: Any
) -> Body | None:
    """What the answer says of the prompt, compared with that of this message."""
    asked = {"system": system, "tools": [WEATHER], **fields}
    compared = {"previous_message_id": previous}
    answer = await post(served, *messages, diagnostics=compared, **asked)
    assert answer.status == 200, answer.body
    found: Body | None = answer.json["diagnostics"]
    return found and found["cache_miss_reason"]


@pytest.mark.parametrize("is_thread", [False, True])
async def test_answer_says_what_of_the_prompt_has_changed(is_thread: bool, tmp_path: Path) -> None:
    config = tmp_path / "segue.toml"
    models = [f"[[models]]\nname = '{name}'\nengine = 'scripted'" for name in (MODEL, "other")]
    config.write_text("\n".join(models))
    long = "Tell me more about the weather. " * 40
    async with serving(config=str(config)) as served:
        more = {"thread": CREATE} if is_thread else {}
        first = user(long)
        before = await post(served, first, system="Be short.", tools=[WEATHER], **more)
        assert before.json["diagnostics"] is None
        name = before.json["id"]
        said = {"role": "assistant", "content": before.json["content"]}
        if is_thread:
            more = {"thread": after(before)}
        new = user(results(before))
        messages = [new] if is_thread else [first, said, new]
        assert await reason(served, name, *messages, **more) is None
        changed = {
            "model_changed": {"model": "other"},
            "system_changed": {"system": "Be long."},
            "tools_changed": {"tools": [WEATHER, {**WEATHER, "name": "more"}]},
        }
        for kind, fields in changed.items():
            found = await reason(served, name, *messages, **more, **fields)
            assert found is not None
            assert found["type"] == kind
            assert found["cache_missed_input_tokens"] > 100
        if not is_thread:
            other = [user(long.replace("more", "less")), said, new]
            found = await reason(served, name, *other)
            assert found is not None
            assert found["type"] == "messages_changed"
            assert found["cache_missed_input_tokens"] > 100
        unknown = await reason(served, "msg_" + "0" * 32, *messages, **more)
        assert unknown == {"type": "previous_message_not_found"}


# --- a thread is its history ----------------------------------------------------------------------


class House:
    """A server that all examples talk to, with all its prompts. Nothing is known again of a history that is resent."""

    def __init__(self, folder: Path) -> None:
        self.runner = asyncio.Runner()
        self.stack = AsyncExitStack()
        opened = serving(script=script(folder), render_cache_bytes_max=0)
        self.served = self.runner.run(self.stack.enter_async_context(opened))
        self.engine = record(self.served)

    def close(self) -> None:
        self.runner.run(self.stack.aclose())
        self.runner.close()


moves = st.lists(
    st.fixed_dictionaries(
        {
            "text": st.text(alphabet="ab \n#é", min_size=1, max_size=8).filter(str.strip),
            "reminds": st.booleans(),
            "system": st.sampled_from([None, None, "Be short.", "Be long."]),
            "tools": st.sampled_from([None, None, [WEATHER, LATER], [LATER, WEATHER]]),
            "finds": st.booleans(),
            "from": st.integers(0, 5),
        }
    ),
    min_size=1,
    max_size=5,
)


def test_continued_thread_gives_the_engine_what_the_whole_history_gives(tmp_path: Path) -> None:
    house = House(tmp_path)

    @settings(max_examples=25, deadline=None)
    @given(moves)
    def compare(moves: list[Body]) -> None:
        house.runner.run(_compare(house.served, house.engine, moves))

    try:
        compare()
    finally:
        house.close()


async def _compare(served: Served, engine: RecordingEngine, moves: list[Body]) -> None:
    head: Body = {"system": "Be short.", "tools": [WEATHER]}
    first = user("Weather?")
    # Every turn so far: the answer, all messages up to it, and the head that holds there.
    said = {"role": "assistant"}
    answer = await post(served, first, thread=CREATE, **head)
    turns = [(answer, [first, {**said, "content": answer.json["content"]}], head)]
    for move in moves:
        parent, messages, head = turns[min(move["from"], len(turns) - 1)]
        asked = {name: move[name] for name in ("system", "tools") if move[name] is not None}
        # A client finds what it has sent.
        finds = move["finds"] and LATER in {**head, **asked}["tools"]
        new = [user([*_found(results(parent), finds=finds), text(move["text"])])]
        if move["reminds"]:
            new.append({"role": "system", "content": f"Reminder: {move['text']}"})
        engine.jobs.clear()
        answer = await post(served, *new, thread=after(parent), **asked)
        assert answer.status == 200, answer.body
        whole = [*messages, *new]
        head = {**head, **asked}
        again = await post(served, *whole, **head)
        assert again.status == 200, again.body
        threaded, full = (flat(job) for job in engine.jobs)
        assert threaded == full
        turns.append((answer, [*whole, {**said, "content": answer.json["content"]}], head))


def text(words: str) -> Body:
    return {"type": "text", "text": words}


def _found(given: list[Body], *, finds: bool) -> list[Body]:
    reference = [{"type": "tool_reference", "tool_name": "later"}]
    return [{**given[0], "content": reference}, *given[1:]] if finds and given else given


# --- other workers --------------------------------------------------------------------------------

Pair = tuple[Served, Served]


@pytest.fixture(params=["hub", "postgres"])
async def pair(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Pair]:
    """Two workers that know each other."""
    flags: Body = {"script": script(tmp_path), "seal_keys": str(tmp_path / "seals")}
    async with AsyncExitStack() as stack:
        if request.param == "hub":
            flags["store"] = f"sqlite:///{tmp_path / 'shared.db'}"
            place = WorkerPlace(group="here", hub=str(tmp_path / "hub"))
            await stack.enter_async_context(Hub().opened(place.hub))
        else:
            server = request.getfixturevalue("postgres")
            flags["store"] = await server.make_database()
            stack.push_async_callback(server.drop_database, flags["store"])
            place = WorkerPlace()
        here = await stack.enter_async_context(serving(place, **flags))
        there = await stack.enter_async_context(serving(place, **flags))
        await until(lambda: here.app.state.peers.others and there.app.state.peers.others)
        yield here, there


async def test_thread_goes_on_in_another_worker_with_the_ids_that_were_sampled(pair: Pair) -> None:
    here, there = pair
    engines = [record(served) for served in pair]
    first = await create(here, "Weather? " * 2_000)
    second = await post(here, user(results(first)), thread=after(first))
    moved = await post(there, user(results(second)), thread=after(second))
    assert text_of(moved) == "That is all."
    before, prompt = flat(engines[0].jobs[-1]), flat(engines[1].jobs[-1])
    sampled = engines[0].sampled[-1]
    assert prompt[: len(before) + len(sampled)] == [*before, *sampled]
    # From now on the chain is here: it costs what is new.
    tokens = await metric(there, "segue_tokens_tokenized_total")
    last = await post(there, user("And?"), thread=after(moved))
    assert text_of(last) == "Go on."
    assert await metric(there, "segue_tokens_tokenized_total") - tokens < 100
    # And the worker that has made it can go on as well, from either.
    back = await post(here, user("Back"), thread=after(last))
    assert text_of(back) == "Go on."


async def test_worker_that_is_gone_or_never_was_is_a_lost_thread(pair: Pair) -> None:
    here, there = pair
    first = await create(here)
    here.app.state.threads.drop("local", "")
    check_lost(await post(there, user(results(first)), thread=after(first)), first.json["id"])
    made_up = "msg_" + "0" * 32
    asked = {"type": "continue", "previous_message_id": made_up}
    check_lost(await post(there, user("x"), thread=asked), made_up)


async def test_foreign_thread_of_another_worker_is_lost_as_well(pair: Pair) -> None:
    here, there = pair
    app = here.app
    headers = {}
    for owner in ("ada", "eve"):
        _, secret = await issue_key(app.state.store.keys, app.state.hashes, owner, owner)
        headers[owner] = {"x-api-key": secret}
    for served in pair:
        served.app.state.accounts.confirm_soon()
        await until(lambda served=served: served.app.state.accounts.is_required)
    first = await create(here, headers=headers["ada"])
    thread = after(first)
    check_lost(
        await post(there, user("x"), thread=thread, headers=headers["eve"]), first.json["id"]
    )
    moved = await post(there, user(results(first)), thread=thread, headers=headers["ada"])
    assert moved.status == 200


async def test_worker_that_died_is_a_lost_thread_in_time(postgres: Any, tmp_path: Path) -> None:
    """Two servers of one database, in processes of their own; the one with the thread is killed."""
    url = await postgres.make_database()
    flags = ("--store", url, "--script", script(tmp_path))
    try:
        with (
            served_process(*flags, cwd=tmp_path) as here,
            served_process(*flags, cwd=tmp_path) as there,
        ):
            first = await create(here)
            # They may have to meet first; until then the thread is lost, and said to be.
            async with asyncio.timeout(WAIT_S):
                while True:
                    second = await post(there, user(results(first)), thread=after(first))
                    if second.status != 404:
                        break
            lost = await create(here)
            here.process.kill()
            here.process.wait()
            asked_at = time.monotonic()
            found = await post(there, user(results(lost)), thread=after(lost))
            check_lost(found, lost.json["id"])
            assert time.monotonic() - asked_at < FETCH_S + 5
            # What has moved before is there.
            third = await post(there, user(results(second)), thread=after(second))
            assert text_of(third) == "That is all."
    finally:
        await postgres.drop_database(url)


async def test_workers_of_one_server_have_each_others_threads(tmp_path: Path) -> None:
    """Every request is a connection of its own, which any worker may accept."""
    store = f"sqlite:///{tmp_path}/s.db"
    flags = ("--store", store, "--workers", "2", "--script", script(tmp_path))
    with served_process(*flags, cwd=tmp_path) as served:
        answer = await create(served)
        home = tag_of(answer.json["id"])
        async with asyncio.timeout(WAIT_S):
            while tag_of(answer.json["id"]) == home:
                last = answer
                answer = await post(served, user(results(last) or "And?"), thread=after(last))
                if answer.status == 404:
                    # The workers have not met yet.
                    answer = last
                assert answer.status == 200, answer.body
        assert answer.json["usage"]["input_tokens"] > last.json["usage"]["input_tokens"]


async def test_nothing_of_a_thread_that_moves_can_be_read_on_the_way(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL writes notifications to its disk; what passes there is sealed."""
    here, there = pair
    seen: list[bytes] = []
    for served in pair:
        bus = served.app.state.cluster.bus
        publish = bus.publish

        async def listen(topic: str, body: bytes, publish: Any = publish) -> None:
            seen.append(body)
            await publish(topic, body)

        monkeypatch.setattr(bus, "publish", listen)
    # So long that it travels in many parts.
    texts = [WORD, *(f"{number:x}" * 40 for number in range(5_000))]
    first = await create(here, " ".join(texts), system=WORD)
    moved = await post(there, user(results(first, WORD)), thread=after(first))
    assert moved.status == 200
    assert max(map(len, seen)) > 10_000
    assert not any(WORD.encode() in body for body in seen)
