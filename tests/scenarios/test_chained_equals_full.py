"""Chained equals full: whatever a client does, the engine sees exactly the conversation that the specification says.

A state machine talks to a real server over real sockets, with a SQLite file behind it. Its model of the world is a tree
of turns and three rules: which parents can be found, what a failure makes the connection forget, and which items a turn
stands on. From those items the dialect renders the prompt once more, with nothing warm; the engine must have been given
the same ids. Nobody else's words may be in it, and a plain continuation may have cost only what was new in it.
"""

from __future__ import annotations

import asyncio
import json
import re
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)
from msgspec import structs

from segue.errors import EngineFailed
from segue.seams.history import Round, Turn
from segue.seams.model import Ids, ItemClosed, Scene, TurnClosed
from segue.seams.prompt import Head, IdArray, Tokens, id_array
from segue.server.aliases import NamedModels
from segue.turn.resolve import count_model_turns
from segue.vocabularies.load import vocabulary_from_gguf
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.codec import decode_item, decode_tools
from segue.wire.items import Item
from segue_embedded.weights import find_weights
from tests.contracts.engine import chatml
from tests.contracts.turns import make_turn
from tests.events import check_refusal, check_turn
from tests.pipeline import RecordingEngine, flat
from tests.support import MODEL, TERMINAL, WEATHER, Served, Wire, fetch, serving, wire

LATER = {"type": "function", "name": "later", "async": True}
PATCH = {"type": "custom", "name": "patch"}
TOOLS: list[list[dict[str, Any]]] = [[], [WEATHER], [WEATHER, PATCH, LATER]]
INSTRUCTIONS = [None, "Be brief."]
LANES = [None, "a", "b"]

# The k-th model turn of any chain: parallel calls, a custom one, one that may stay open, reasoning, plain text.
SCRIPT = {
    "turns": [
        {"text": "It depends.", "calls": [{"name": "get_weather", "arguments": {"city": "Paris"}},
                                          {"name": "get_weather", "arguments": {"city": "Rome"}}]},
        {"reasoning": "A patch is due.", "calls": [{"name": "patch", "input": "*** Begin"}]},
        {"calls": [{"name": "later"}, {"name": "get_weather"}]},
        {"reasoning": "Nearly done.", "text": "That is all."},
        {"text": "Go on."},
    ]
}  # fmt: skip

# Everything that a client says here carries a number of its own.
MARK = re.compile(r"#\d+#")

CONFIG = """
engine = "scripted"
script = "{script}"
[[models]]
name = "scripted"
aliases = ["alias"]
"""


@dataclass(eq=False)
class Node:
    """A turn that was answered, as the specification sees it."""

    id: str
    parent: Node | None
    given: list[dict[str, Any]]
    wrote: list[dict[str, Any]]
    sampled: list[int]
    head: Head
    is_stored: bool
    status: str
    did_sample: bool
    open_calls: dict[str, dict[str, Any]] = field(default_factory=dict)

    def lineage(self) -> list[Node]:
        return [*(self.parent.lineage() if self.parent else []), self]

    @property
    def marks(self) -> list[str]:
        """The numbers that make its words its own."""
        return MARK.findall("".join(text for item in self.given for text in texts_of(item)))

    @property
    def is_whole_in_store(self) -> bool:
        return all(node.is_stored for node in self.lineage())

    def turn(self) -> Turn:
        """This history as a value, with what was sampled and with nothing warm."""
        turn: Turn | None = None
        for node in self.lineage():
            ids, tail = kept(node)
            one = Round(
                given=as_items(node.given),
                wrote=as_items(node.wrote),
                ids=ids,
                tail=tail,
                fingerprint=chatml().fingerprint,
                did_sample=node.did_sample,
            )
            turn = structs.replace(make_turn(node.id, turn), rounds=(one,))
        assert turn is not None
        return turn


def as_items(given: list[dict[str, Any]]) -> tuple[Item, ...]:
    return tuple(decode_item(json.dumps(one).encode(), "input") for one in given)


def kept(node: Node) -> tuple[tuple[IdArray[int], ...], IdArray[int]]:
    """What the engine sampled, by item, and what closes it: read again, apart from the pipeline."""
    if not node.did_sample:
        return (), id_array()
    reader = chatml().reader(Scene(node.head, None, ()))
    said = reader.feed(Ids(node.sampled)) + reader.close(is_cut=node.status != "completed")
    ids = tuple(one.ids for one in said if isinstance(one, ItemClosed))
    (tail,) = (one.ids for one in said if isinstance(one, TurnClosed))
    joined = [id for part in (*ids, tail) for id in part]
    assert joined[: len(node.sampled)] == node.sampled
    return ids, tail


def render(head: Head, past: Node | None, given: list[dict[str, Any]]) -> tuple[list[int], int]:
    """The prompt with nothing warm, and how long it is without the cue."""
    scene = Scene(head, past.turn() if past else None, as_items(given))
    rendered = chatml().render(scene)
    assert isinstance(rendered.prompt, Tokens)
    return rendered.prompt.flat().tolist(), rendered.context.length


@cache
def vocabulary() -> Vocabulary:
    path = find_weights("smollm2")
    return vocabulary_from_gguf(path)


def read(ids: list[int]) -> str:
    return b"".join(vocabulary().bytes_of(id) for id in ids).decode()


def texts_of(item: dict[str, Any]) -> list[str]:
    """What of an item the model must be able to read."""
    match item:
        case {"type": "function_call"}:
            return [item["name"], item["arguments"]]
        case {"type": "custom_tool_call"}:
            return [item["name"], item["input"]]
        case {"output": str() as text} | {"content": str() as text}:
            return [text]
        case {"content": list() as parts}:
            return [part["text"] for part in parts]
        case _:
            raise AssertionError(item)


heads = st.builds(
    lambda tools, instructions: (tools, instructions),
    st.integers(0, len(TOOLS) - 1),
    st.sampled_from(INSTRUCTIONS),
)
options = st.fixed_dictionaries(
    {
        "model": st.sampled_from([MODEL, MODEL, "alias"]),
        "store": st.booleans(),
        "generate": st.sampled_from([True, True, True, False]),
    }
)


class House:
    """The server that all examples talk to; their ids differ, so they do not meet."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.loop = asyncio.Runner()
        self.stack = AsyncExitStack()
        script, config = folder / "script.json", folder / "segue.toml"
        script.write_text(json.dumps(SCRIPT))
        config.write_text(CONFIG.format(script=script))
        self.served: Served
        self.engine: RecordingEngine
        self.loop.run(self.open())

    async def open(self) -> None:
        self.served = await self.stack.enter_async_context(
            serving(
                config=str(self.folder / "segue.toml"),
                store=f"sqlite:///{self.folder / 'segue.db'}",
                durability="relaxed",
            )
        )
        models = self.served.app.runner.models
        assert isinstance(models, NamedModels)
        self.engine = RecordingEngine(models[MODEL].engine)
        for name in (MODEL, "alias"):
            models.add(name, replace(models[name], engine=self.engine))

    async def restart(self) -> None:
        await self.stack.aclose()
        await self.open()

    def close(self) -> None:
        self.loop.run(self.stack.aclose())
        self.loop.close()


class Conversations(RuleBasedStateMachine):
    """Everything that a client may do with responses."""

    def __init__(self, house: House) -> None:
        super().__init__()
        self.house = house
        self.loop = house.loop
        self.stack = AsyncExitStack()
        self.nodes: list[Node] = []
        self.broken: list[str] = []
        # What this connection must find without a store, and which lane made it.
        self.named: set[str] = set()
        self.made_by: dict[str, str | None] = {}
        self.count = 0
        self.restarts = 0
        self.socket: Wire
        self.loop.run(self._connect())

    @property
    def served(self) -> Served:
        return self.house.served

    @property
    def engine(self) -> RecordingEngine:
        return self.house.engine

    async def _connect(self) -> None:
        await self.stack.aclose()
        self.socket = await self.stack.enter_async_context(wire(self.served))
        self.named.clear()
        self.made_by.clear()

    def teardown(self) -> None:
        self.loop.run(self.stack.aclose())

    # --- rules ------------------------------------------------------------------------------------

    @rule(lane=st.sampled_from(LANES), head=heads, options=options, has_developer=st.booleans())
    def client_begins(
        self,
        lane: str | None,
        head: tuple[int, str | None],
        options: dict[str, Any],
        has_developer: bool,
    ) -> None:
        developer = [{"role": "developer", "content": self._words("You are")}]
        given = [*(developer if has_developer else []), self._question()]
        self.loop.run(self._play(None, given, lane, head, options))

    @precondition(lambda self: self.nodes)
    @rule(
        lane=st.sampled_from(LANES),
        stores=st.lists(st.booleans(), min_size=2, max_size=4),
        answers_async=st.booleans(),
    )
    def client_loops(self, lane: str | None, stores: list[bool], answers_async: bool) -> None:
        """Several turns of an agent in a row, with nothing changed but what is stored."""
        for is_stored in stores:
            parent = self.nodes[-1]
            given = self._owed(parent, answers_async) or [self._question()]
            fields = {"model": MODEL, "store": is_stored, "generate": True}
            self.loop.run(self._play(parent, given, lane, self._same_head(parent), fields))

    @precondition(lambda self: self.nodes)
    @rule(
        pick=st.integers(0, 99),
        lane=st.sampled_from(LANES),
        head=st.none() | heads,
        options=options,
        is_over_http=st.sampled_from([False, False, False, True]),
        is_empty=st.sampled_from([False, False, False, True]),
        answers_async=st.booleans(),
        limit=st.sampled_from([None, None, None, 3, 20]),
    )
    def client_continues(
        self,
        pick: int,
        lane: str | None,
        head: tuple[int, str | None] | None,
        options: dict[str, Any],
        is_over_http: bool,
        is_empty: bool,
        answers_async: bool,
        limit: int | None,
    ) -> None:
        """From the latest turn or from any older one; with the parent's tools and instructions, or with others."""
        parent = self.nodes[-1 - (pick % len(self.nodes) if pick > 50 else 0)]
        given = self._owed(parent, answers_async) or ([] if is_empty else [self._question()])
        fields = dict(options)
        if limit is not None:
            fields["max_output_tokens"] = limit
        chosen = head if head is not None else self._same_head(parent)
        self.loop.run(self._play(parent, given, lane, chosen, fields, is_over_http=is_over_http))

    @precondition(lambda self: self.nodes)
    @rule(
        pick=st.integers(0, 99),
        lane=st.sampled_from(LANES),
        how=st.sampled_from(["call", "owed", "engine", "model", "engine in the middle"]),
        is_stored=st.booleans(),
        retries=st.booleans(),
    )
    def continuation_fails(
        self, pick: int, lane: str | None, how: str, is_stored: bool, retries: bool
    ) -> None:
        """And perhaps the client tries again from the same parent, as if it had not."""
        parent = self.nodes[-1 - (pick % len(self.nodes) if pick > 30 else 0)]
        self.loop.run(self._fail(parent, lane, how, is_stored))
        if retries:
            given = self._owed(parent, answers_async=False) or [self._question()]
            fields = {"model": MODEL, "store": is_stored, "generate": True}
            self.loop.run(self._play(parent, given, lane, self._same_head(parent), fields))

    @precondition(lambda self: self.broken)
    @rule(pick=st.integers(0, 9), lane=st.sampled_from(LANES))
    def client_continues_what_failed(self, pick: int, lane: str | None) -> None:
        parent_id = self.broken[pick % len(self.broken)]
        self.loop.run(self._is_not_found(parent_id, [self._question()], lane))

    @precondition(lambda self: self.nodes)
    @rule()
    def client_reconnects(self) -> None:
        self.loop.run(self._connect())

    @precondition(lambda self: self.nodes and self.restarts == 0)
    @rule()
    def server_restarts(self) -> None:
        self.restarts += 1

        async def story() -> None:
            await self.stack.aclose()
            await self.house.restart()
            await self._connect()

        self.loop.run(story())

    @precondition(lambda self: self.nodes)
    @rule(pick=st.integers(0, 99), head=heads)
    def client_resends_everything(self, pick: int, head: tuple[int, str | None]) -> None:
        """A client that keeps its own history gets the prompt that one who chains would get."""
        node = self.nodes[-1 - pick % len(self.nodes)]
        self.loop.run(self._resend(node, head))

    # --- what the rules do ------------------------------------------------------------------------

    async def _play(
        self,
        parent: Node | None,
        given: list[dict[str, Any]],
        lane: str | None,
        head: tuple[int, str | None],
        fields: dict[str, Any],
        *,
        is_over_http: bool = False,
    ) -> None:
        found = self._findable(parent, is_over_http=is_over_http)
        asked = {**fields, **self._head_fields(head), "input": given}
        if parent is not None:
            asked["previous_response_id"] = parent.id
        if found == "no" and parent is not None:
            await self._is_not_found(parent.id, given, lane, asked, is_over_http=is_over_http)
            return
        jobs, warmed = len(self.engine.jobs), len(self.engine.warmed)
        before = await self._counters()
        events = await self._ask(asked, lane, is_over_http=is_over_http)
        if events[-1]["type"] == "error" and found == "maybe" and parent is not None:
            check_refusal(events[-1], 400, "previous_response_not_found", lane)
            self._forget(parent, lane)
            return
        response = check_turn(events, None if is_over_http else lane)
        assert response["status"] in ("completed", "incomplete"), response
        assert response["model"] == fields["model"]
        assert response["previous_response_id"] == (parent.id if parent else None)
        did_sample = fields["generate"]
        assert len(self.engine.jobs) == jobs + did_sample
        node = Node(
            id=response["id"],
            parent=parent,
            given=given,
            wrote=response["output"],
            sampled=self.engine.sampled[-1] if did_sample else [],
            head=self._head(head),
            is_stored=fields["store"],
            status=response["status"],
            did_sample=did_sample,
        )
        node.open_calls = self._open_after(node)
        if did_sample:
            self._check_prompt(node)
        else:
            assert response["output"] == []
            for job in self.engine.warmed[warmed:]:
                prompt, until = render(node.head, node.parent, node.given)
                assert flat(job) == prompt[:until]
        if not is_over_http:
            # Warm is what was made here and not forgotten since; what came back from the store may be cold.
            is_warm = parent is not None and parent.id in self.made_by
            if parent is not None and is_warm and node.head == parent.head:
                await self._check_cost(node, before)
            self.named.add(node.id)
            self.made_by[node.id] = lane
            if parent is not None:
                self.named.add(parent.id)
        self.nodes.append(node)

    async def _fail(self, parent: Node, lane: str | None, how: str, is_stored: bool) -> None:
        given = self._owed(parent, answers_async=False) or [self._question()]
        fields: dict[str, Any] = {"model": MODEL, "store": is_stored}
        code = ""
        match how:
            case "call":
                given.append({"type": "function_call_output", "call_id": "nobody", "output": ""})
                code = "invalid_function_call_output"
            case "owed":
                if not self._owed(parent, answers_async=False):
                    return
                given = [self._question()]
                code = "missing_function_call_output"
            case "model":
                fields["model"] = "nobody's"
                code = "model_not_found"
            case _:
                self.engine.fault = EngineFailed("The engine broke.")
                self.engine.fault_after = how.endswith("middle")
        found = self._findable(parent, is_over_http=False)
        fields |= {"input": given, "previous_response_id": parent.id}
        events = await self._ask(fields, lane)
        self.engine.fault = None
        if code:
            is_missing = events[-1]["error"]["code"] == "previous_response_not_found"
            assert is_missing == (found == "no") or found == "maybe"
            status = 404 if code == "model_not_found" and not is_missing else 400
            wanted = "previous_response_not_found" if is_missing else code
            check_refusal(events[-1], status, wanted, lane)
        elif events[-1]["type"] == "error":
            assert found != "yes"
            check_refusal(events[-1], 400, "previous_response_not_found", lane)
        else:
            assert found != "no"
            response = check_turn(events, lane)
            assert response["status"] == "failed"
            assert response["error"]["message"] == "The engine broke."
            self.broken.append(response["id"])
        self._forget(parent, lane)

    def _forget(self, parent: Node, lane: str | None) -> None:
        """A failed continuation makes its own lane forget the parent; a failed fork does not."""
        is_fork = parent.id in self.made_by and self.made_by[parent.id] != lane
        if not is_fork:
            self.named.discard(parent.id)
            self.made_by.pop(parent.id, None)

    async def _is_not_found(
        self,
        parent_id: str,
        given: list[dict[str, Any]],
        lane: str | None,
        fields: dict[str, Any] | None = None,
        *,
        is_over_http: bool = False,
    ) -> None:
        jobs = len(self.engine.jobs)
        asked = {
            "model": MODEL,
            **(fields or {}),
            "input": given,
            "previous_response_id": parent_id,
        }
        events = await self._ask(asked, lane, is_over_http=is_over_http)
        check_refusal(
            events[-1], 400, "previous_response_not_found", None if is_over_http else lane
        )
        assert (
            events[-1]["error"]["message"] == f"Previous response with id '{parent_id}' not found."
        )
        assert len(self.engine.jobs) == jobs

    async def _resend(self, node: Node, head: tuple[int, str | None]) -> None:
        lineage = node.lineage()
        new = self._owed(node, answers_async=True) or [self._question()]
        history = [item for one in lineage for item in (*one.given, *one.wrote)] + new
        asked = {**self._head_fields(head), "model": MODEL, "store": False, "input": history}
        response = check_turn(await self._ask(asked, None))
        self.named.add(response["id"])
        self.made_by[response["id"]] = None
        prompt, _ = render(self._head(head), None, history)
        assert self.engine.prompt == prompt
        chained, _ = render(self._head(head), node, new)
        is_plain = all(
            one.did_sample and one.status == "completed" and one.given for one in lineage
        )
        if is_plain:
            assert prompt == chained
            turns = sum(one.did_sample for one in lineage)
            assert count_model_turns(as_items(history)) == turns
            assert self.engine.jobs[-1].model_turns == turns

    # --- what must hold ---------------------------------------------------------------------------

    def _check_prompt(self, node: Node) -> None:
        prompt, _ = render(node.head, node.parent, node.given)
        assert self.engine.prompt == prompt
        text = read(prompt)
        assert ("Be brief." in text) == (node.head.instructions is not None)
        assert ("<tools>" in text) == bool(node.head.tools.offers)
        lineage = node.lineage()
        place = 0
        for one in lineage:
            for item in (*one.given, *(one.wrote if one is not node else [])):
                for words in texts_of(item):
                    place = text.find(words, place)
                    assert place >= 0, f"{words!r} is missing or out of order in {text!r}"
                    place += len(words)
        assert MARK.findall(text) == [mark for one in lineage for mark in one.marks]

    async def _check_cost(self, node: Node, before: tuple[float, float]) -> None:
        """A continuation of something warm costs the tokens of its new items and no decoding of tools."""
        _, until = render(node.head, node.parent, node.given)
        _, since = render(node.head, node.parent, [])
        tokenized, decodes = await self._counters()
        assert tokenized - before[0] == until - since
        assert decodes - before[1] == 0

    def _findable(
        self, parent: Node | None, *, is_over_http: bool
    ) -> Literal["yes", "no", "maybe"]:
        """Whether a continuation must, must not, or may find its parent.

        It may, where a stored turn stands on unstored ones that are only in memory, and was itself forgotten.
        """
        if parent is None or parent.is_whole_in_store:
            return "yes"
        if is_over_http:
            return "no"
        if parent.id in self.named:
            return "yes"
        is_near = any(one.id in self.named for one in parent.lineage())
        return "maybe" if parent.is_stored and is_near else "no"

    # --- small things -----------------------------------------------------------------------------

    async def _ask(
        self, fields: dict[str, Any], lane: str | None, *, is_over_http: bool = False
    ) -> list[dict[str, Any]]:
        """The events of a turn; over HTTP a refusal is shown as the event that it would be."""
        if not is_over_http:
            more = {} if lane is None else {"stream_id": lane}
            await self.socket.send({"type": "response.create", **fields, **more})
            events = [await self.socket.next()]
            while events[-1]["type"] not in TERMINAL:
                events.append(await self.socket.next())
            return events
        answer = await fetch(self.served, "POST", "/v1/responses", {**fields, "stream": True})
        if answer.status == 200:
            return answer.events
        return [{"type": "error", "sequence_number": 0, "status": answer.status, **answer.json}]

    async def _counters(self) -> tuple[float, float]:
        page = (await fetch(self.served, "GET", "/metrics")).body.decode()
        names = ("segue_tokens_tokenized_total", "segue_tool_decodes_total")
        tokenized, decodes = (
            float(page.partition(f"\n{name} ")[2].partition("\n")[0]) for name in names
        )
        return tokenized, decodes

    def _words(self, text: str) -> str:
        self.count += 1
        return f"{text} #{self.count}#"

    def _question(self) -> dict[str, Any]:
        return {"role": "user", "content": self._words("What of")}

    def _owed(self, node: Node, answers_async: bool) -> list[dict[str, Any]]:
        """Outputs for all calls that wait for one, and for those that may stay open if so wished."""
        return [
            {
                "type": f"{call['type']}_output",
                "call_id": call["call_id"],
                "output": self._words("It is"),
            }
            for call in node.open_calls.values()
            if answers_async or not call.get("async")
        ]

    def _open_after(self, node: Node) -> dict[str, dict[str, Any]]:
        open_calls = dict(node.parent.open_calls) if node.parent else {}
        for item in (*node.given, *node.wrote):
            if item.get("type") in ("function_call", "custom_tool_call"):
                open_calls[item["call_id"]] = item
            elif "call_id" in item:
                del open_calls[item["call_id"]]
        return open_calls

    def _head_fields(self, head: tuple[int, str | None]) -> dict[str, Any]:
        fields: dict[str, Any] = {"tools": TOOLS[head[0]]}
        return fields if head[1] is None else {**fields, "instructions": head[1]}

    def _head(self, head: tuple[int, str | None]) -> Head:
        tools, _ = decode_tools(json.dumps(TOOLS[head[0]]).encode(), None)
        return Head(instructions=head[1], tools=tools)

    def _same_head(self, node: Node) -> tuple[int, str | None]:
        names = len(node.head.tools.definitions)
        tools = next(n for n, one in enumerate(TOOLS) if len(one) == names)
        return tools, node.head.instructions


def test_engine_sees_the_conversation_that_the_specification_says(tmp_path: Path) -> None:
    house = House(tmp_path)
    try:
        run_state_machine_as_test(
            lambda: Conversations(house),
            settings=settings(
                max_examples=30,
                stateful_step_count=15,
                deadline=None,
                derandomize=True,
                # Explaining would trace every line of the server; shrinking would take minutes.
                phases=[Phase.generate],
                suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
            ),
        )
    finally:
        house.close()
