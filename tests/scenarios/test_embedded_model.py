"""A real model behind the real ports: SmolLM2 in this process, over HTTP, SSE and WebSocket."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from msgspec import Raw, structs

from segue.dialects.chatml import SMOLLM2
from segue.dialects.family import TokenDialect
from segue.engines.scripted import Script, ScriptedCall, ScriptedEngine, ScriptedTurn
from segue.seams.model import Finish, Ids, Job, Piece
from segue.seams.prompt import Tokens, id_array
from segue.server.aliases import NamedModels
from segue.turn.plan import Model
from segue.vocabularies.load import vocabulary_from_gguf
from segue.web.index import build
from segue_embedded.embedded import EmbeddedEngine
from segue_embedded.weights import find_weights
from tests.clients.outside import ROOT, run_python
from tests.mcp_server import remote
from tests.support import WEATHER, Served, fetch, kinds, metric, served_process, serving, wire

NAME = "smollm2"
CONTEXT = 1_024
# What a client has for a few answers of a model on a busy machine.
RUN_S_MAX = 240


@asynccontextmanager
async def serving_smollm2(parallel: int = 2, **flags: object) -> AsyncIterator[Served]:
    """The whole product, with the embedded model beside the scripted one."""
    path = find_weights("smollm2")
    words = vocabulary_from_gguf(path)
    engine = EmbeddedEngine(path, words, context_tokens=CONTEXT, parallel=parallel)
    try:
        async with serving(**flags) as served:
            models = served.app.runner.models
            assert isinstance(models, NamedModels)
            models.add(NAME, Model(NAME, engine, TokenDialect(SMOLLM2, words), CONTEXT))
            yield served
    finally:
        await engine.close()


async def test_client_talks_to_a_model_over_websocket() -> None:
    """Turn by turn only the new tokens are tokenized by us and computed by the engine."""
    async with serving_smollm2() as served, wire(served) as socket:
        parent, known, tokenized = None, 0, []
        for turn in range(5):
            before = await metric(served, "segue_tokens_tokenized_total")
            end = await socket.turn(
                model=NAME,
                input="And then?" if turn else "Tell me a story of a cat.",
                previous_response_id=parent,
                max_output_tokens=16,
                store=False,
            )
            assert end["type"] in ("response.completed", "response.incomplete"), end
            usage = end["response"]["usage"]
            # The last token that was sampled is not computed before it is needed.
            assert known - 1 <= usage["input_tokens_details"]["cached_tokens"] <= known
            parent, known = end["response"]["id"], usage["total_tokens"]
            tokenized.append(await metric(served, "segue_tokens_tokenized_total") - before)
        assert tokenized[0] > tokenized[1] == tokenized[2] == tokenized[3] == tokenized[4] > 0


async def test_client_talks_to_a_model_over_http() -> None:
    """The same greedy answer as JSON, as SSE and over a socket."""
    story = {"model": NAME, "input": "Say hello.", "temperature": 0, "max_output_tokens": 24}
    async with serving_smollm2() as served:
        plain = (await fetch(served, "POST", "/v1/responses", story)).json
        events = (await fetch(served, "POST", "/v1/responses", {**story, "stream": True})).events
        async with wire(served) as socket:
            await socket.create(**story)
            heard = await socket.events()

    text = plain["output"][0]["content"][0]["text"]
    assert "hello" in text.lower()
    assert "".join(one.get("delta", "") for one in events) == text
    assert events[-1]["response"]["output"][0]["content"][0]["text"] == text
    assert kinds(heard)[-1] == kinds(events)[-1]
    assert "".join(one.get("delta", "") for one in heard) == text


async def test_client_demands_a_tool_and_its_arguments_satisfy_the_schema() -> None:
    """The string is bounded: at temperature 1 this model may go on in an endless one until its limit, which is then
    an incomplete call and not a broken one."""
    city = {"type": "string", "maxLength": 12}
    tool = WEATHER | {"parameters": WEATHER["parameters"] | {"properties": {"city": city}}}
    async with serving_smollm2() as served:
        for _ in range(5):
            story = {"model": NAME, "input": "Weather in Oslo?", "tools": [tool]}
            story |= {"tool_choice": "required", "max_output_tokens": 60}
            answer = (await fetch(served, "POST", "/v1/responses", story)).json
            calls = [one for one in answer["output"] if one["type"] == "function_call"]
            assert [call["name"] for call in calls] == ["get_weather"], answer["output"]
            jsonschema.validate(json.loads(calls[0]["arguments"]), tool["parameters"])


async def test_client_leaves_a_model_in_mid_sentence_and_the_next_one_is_served() -> None:
    async with serving_smollm2() as served:
        async with wire(served) as socket:
            await socket.create(model=NAME, input="Tell me everything.", store=False)
            while (await socket.next())["type"] != "response.output_text.delta":
                pass
        answer = await fetch(
            served, "POST", "/v1/responses", {"model": NAME, "input": "Hi", "max_output_tokens": 2}
        )
        assert answer.status == 200


LOOK = {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}
NUMBER = {
    "type": "custom",
    "name": "count",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "n=" /[0-9]{1,4}/'},
}


async def test_client_forces_a_tool_with_a_grammar_and_its_input_follows_it() -> None:
    """The next turn goes on behind what was sampled; a broken grammar is refused in words."""
    story: dict[str, Any] = {"model": NAME, "input": "Count.", "tools": [NUMBER]}
    story |= {"tool_choice": {"type": "custom", "name": "count"}, "max_output_tokens": 40}
    async with serving_smollm2() as served:
        first = (await fetch(served, "POST", "/v1/responses", story)).json
        call = first["output"][0]
        assert (call["type"], call["status"]) == ("custom_tool_call", "completed")
        assert re.fullmatch("n=[0-9]{1,4}", call["input"])
        answer = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "ok"}
        more = {"input": [answer], "previous_response_id": first["id"], "tool_choice": "none"}
        second = (await fetch(served, "POST", "/v1/responses", story | more)).json
        shape = {**NUMBER["format"], "definition": "start: nowhere"}
        wrong = {"tools": [{**NUMBER, "format": shape}]}
        refused = await fetch(served, "POST", "/v1/responses", story | wrong)
    assert all(one["type"] == "message" for one in second["output"])
    known = first["usage"]["total_tokens"] - 1
    assert second["usage"]["input_tokens_details"]["cached_tokens"] >= known - 1
    assert (refused.status, refused.json["error"]["code"]) == (400, "unsupported_grammar")


async def test_client_asks_a_model_how_likely_its_words_were() -> None:
    story = {"model": NAME, "input": "Say hello.", "temperature": 0, "max_output_tokens": 8}
    story |= {"include": ["message.output_text.logprobs"], "top_logprobs": 3}
    async with serving_smollm2() as served:
        part = (await fetch(served, "POST", "/v1/responses", story)).json["output"][0]["content"][0]
    logprobs = part["logprobs"]
    assert b"".join(bytes(one["bytes"]) for one in logprobs).decode() == part["text"]
    for one in logprobs:
        top = [other["logprob"] for other in one["top_logprobs"]]
        assert top == sorted(top, reverse=True)
        assert (one["logprob"], len(top)) == (top[0], 3)


async def test_model_that_may_not_call_does_not() -> None:
    """The tools stay in the prompt; what looks like a call is text."""
    story = {"model": NAME, "input": "Look!", "tools": [LOOK], "tool_choice": "none"}
    story |= {"max_output_tokens": 30, "instructions": "Always call the tool."}
    async with serving_smollm2() as served:
        for _ in range(3):
            answer = (await fetch(served, "POST", "/v1/responses", story)).json
            assert [one["type"] for one in answer["output"]] == ["message"]


async def test_model_calls_a_server_and_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """Behind the pause the engine has everything that it had before it: only what the tool said is computed."""
    async with remote() as far:
        config = tmp_path / "segue.toml"
        config.write_text(f'[[mcp]]\nlabel = "own"\nurl = "{far.url}"\n')
        tool = {"type": "mcp", "server_label": "own", "require_approval": "never"}
        async with serving_smollm2(config=str(config)) as served, wire(served) as socket:
            end = await socket.turn(
                model=NAME,
                input="Say bees.",
                tools=[{**tool, "allowed_tools": ["echo"]}],
                tool_choice={"type": "mcp", "server_label": "own", "name": "echo"},
                temperature=0,
                max_output_tokens=80,
            )
            tokenized = await metric(served, "segue_tokens_tokenized_total")
    listed, call, *_ = end["response"]["output"]
    assert (listed["type"], call["type"], call["status"]) == (
        "mcp_list_tools",
        "mcp_call",
        "completed",
    )
    assert far.calls == [json.loads(call["arguments"])["text"]] == [call["output"]]
    usage = end["response"]["usage"]
    cached = usage["input_tokens_details"]["cached_tokens"]
    # Two prompts: of the second all is cached but for what the tool said, its marks and the cue.
    assert usage["input_tokens"] - cached <= tokenized + usage["output_tokens"] + 40
    assert cached > usage["input_tokens"] / 3


class DictatedEngine:
    """The embedded engine, which reads every prompt and every word, and is told what to say: a model of this size does
    not call five tools by itself. Notes what it was given, and what it had of that already."""

    def __init__(self, engine: EmbeddedEngine, script: ScriptedEngine) -> None:
        self._engine = engine
        self._script = script
        self.can_constrain, self.grammars = False, frozenset[str]()
        self.facts = engine.facts
        # For each round: the prompt, what of it was cached, and what was said.
        self.rounds: list[tuple[int, int, int]] = []

    async def is_ready(self) -> bool:
        return True

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        assert isinstance(job.prompt, Tokens)
        cached = await self._read(job)
        said = id_array()
        async with aclosing(self._script.sample(job)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Ids):
                    said.extend(piece.ids)
                    yield piece
        await self._read(structs.replace(job, prompt=job.prompt.plus(said)))
        self.rounds.append((job.prompt.length, cached, len(said)))
        yield Finish("stop", cached_tokens=cached)

    async def _read(self, job: Job) -> int:
        """Compute this prompt; how much of it was there."""
        cached = 0
        async with aclosing(
            self._engine.sample(structs.replace(job, output_tokens_max=0, schema=None))
        ) as pieces:
            async for piece in pieces:
                cached = piece.cached_tokens if isinstance(piece, Finish) else cached
        return cached


async def test_response_with_five_hosted_calls_costs_what_is_new_in_it(tmp_path: Path) -> None:
    """Behind each pause the engine has everything from before it, what the model said included; and what is tokenized
    in the whole response is what the last prompt has beside what was sampled."""
    calls = tuple(
        ScriptedTurn(calls=(ScriptedCall("own.echo", Raw(f'{{"text":"{word}"}}'.encode())),))
        for word in ("ants", "bees", "cats", "dogs", "eels")
    )
    script = Script((*calls, ScriptedTurn(text="Done.")))
    async with remote() as far:
        config = tmp_path / "segue.toml"
        config.write_text(f'[[mcp]]\nlabel = "own"\nurl = "{far.url}"\n')
        tool = {"type": "mcp", "server_label": "own", "require_approval": "never"}
        async with serving_smollm2(config=str(config)) as served, wire(served) as socket:
            models = served.app.runner.models
            assert isinstance(models, NamedModels)
            model = models[NAME]
            assert isinstance(model.engine, EmbeddedEngine)
            engine = DictatedEngine(model.engine, ScriptedEngine(model.dialect, script))
            models.add(NAME, replace(model, engine=engine, checks_rendering=True))
            end = await socket.turn(
                model=NAME, input="Go.", tools=[{**tool, "allowed_tools": ["echo"]}]
            )
            tokenized = await metric(served, "segue_tokens_tokenized_total")
            models.add(NAME, model)
    assert far.calls == ["ants", "bees", "cats", "dogs", "eels"]
    assert [one["type"] for one in end["response"]["output"]][1:] == ["mcp_call"] * 5 + ["message"]
    assert len(engine.rounds) == 6
    for (before, _, said), (prompt, cached, _) in pairwise(engine.rounds):
        # The last token is not computed before it is needed.
        assert before + said - 1 <= cached <= before + said
        # What the tool said, with the marks around it.
        assert 0 < prompt - before - said < 40
    last, _, _ = engine.rounds[-1]
    sampled = sum(said for _, _, said in engine.rounds[:-1])
    # Beside that stand only what closes the model's words and what makes it speak, which are kept as ids.
    assert 0 <= last - (tokenized + sampled) <= 6 * 5
    usage = end["response"]["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == sum(one for _, one, _ in engine.rounds)


@pytest.mark.reliability
def test_official_client_forces_hosted_calls_of_a_real_model(tmp_path: Path) -> None:
    """An MCP tool and a web search over a local index, over HTTP and over the socket, on SmolLM2."""
    stories = ["http:mcp", "socket:web", "socket:mcp", "http:web"]
    papers = tmp_path / "papers"
    papers.mkdir()
    (papers / "rain.md").write_text("# About rain\n\nClouds bring rain.\n")
    build(papers, tmp_path / "i.db", "https://docs.a.com")
    config = tmp_path / "segue.toml"
    command = [sys.executable, "-m", "tests.mcp_server"]
    config.write_text(
        f'store = "memory"\nsearch_index = "{tmp_path / "i.db"}"\ncontext_tokens = {CONTEXT}\n'
        f'[[mcp]]\nlabel = "own"\ncommand = {json.dumps(command)}\n'
        f"environment = {{ PYTHONPATH = {json.dumps(str(ROOT))} }}\n"
    )
    flags = ("--config", str(config), "--engine", "embedded", "--model", NAME)
    with served_process(*flags, cwd=tmp_path) as served:
        found = run_python("python_forced.py", served, NAME, *stories, s_max=RUN_S_MAX)
        assert not [line for line in served.printed if "Traceback" in line], served.printed
    for story in stories:
        call = next(one for one in found[story]["output"] if one["type"] != "mcp_list_tools")
        assert call["status"] == "completed"
        if story.endswith("mcp"):
            assert (call["type"], call["name"]) == ("mcp_call", "echo")
            assert json.loads(call["arguments"])["text"] == call["output"]
        else:
            assert call["type"] == "web_search_call"
        # It has gone on behind the pause, and what stood before it was not computed again.
        usage = found[story]["usage"]
        assert usage["input_tokens_details"]["cached_tokens"] > usage["input_tokens"] / 3
