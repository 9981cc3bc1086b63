"""Histories that come back in another spelling: random agent loops, in every family."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator
from functools import cache
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from segue.dialects.choose import choose
from segue.dialects.deepseek import TEMPLATES
from segue.dialects.messages import MessagesDialect
from segue.dialects.template import template_dialect
from segue.engines.scripted import Script, ScriptedCall, ScriptedEngine, ScriptedTurn
from segue.seams.model import Delta, Deltas, Dialect, Engine, EngineFacts, Finish, Job, Piece
from segue.seams.prompt import Prompt, Tokens
from segue.vocabularies.chat_template import ChatTemplate
from segue.vocabularies.load import vocabulary_from_file
from segue.vocabularies.vocabulary import Vocabulary
from tests.contracts.test_dialects import MAKERS, examples
from tests.models.families import BY_NAME, model_folder
from tests.pipeline import Stage
from tests.scenarios.test_upstream_engines import staged

Json = dict[str, Any]

# Words of which each stands in one place of a history.
WORD = re.compile(r"\b(?:asking0|saying\d|arg\dn\d|output\dn\d|reminder\d)\b")
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
TOOLS: list[Json] = [
    {"type": "function", "name": "look", "description": "Looks things up.", "parameters": SCHEMA},
    {"type": "function", "name": "count", "parameters": SCHEMA},
]


# --- families ---------------------------------------------------------------------------------------------------------


class ChattingEngine:
    """A chat endpoint that plays a script."""

    can_constrain = False
    grammars: frozenset[str] = frozenset()
    facts = EngineFacts()

    def __init__(self, script: Script) -> None:
        self._turns = script.turns

    async def is_ready(self) -> bool:
        return True

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        turn = self._turns[min(job.model_turns, len(self._turns) - 1)]
        yield Deltas((Delta(reasoning=turn.reasoning, text=turn.text),))
        for index, call in enumerate(turn.calls):
            arguments = bytes(call.arguments).decode()
            yield Deltas((Delta(call_index=index, call_name=call.name, call_arguments=arguments),))
        yield Finish("stop")


class FamilyCase(NamedTuple):
    dialect: Dialect
    # None: prompts are messages.
    vocabulary: Vocabulary | None
    counts_tokens: bool = True
    # How many tokens at the end of a prompt an answer without thoughts may change.
    cue_tokens: int = 0

    def engine(self, script: Script) -> Engine:
        is_chat = self.vocabulary is None
        return ChattingEngine(script) if is_chat else ScriptedEngine(self.dialect, script)

    def flat(self, prompt: Prompt) -> list[int]:
        """A prompt as numbers, of which a longer one begins with the same."""
        return [*prompt.flat()] if isinstance(prompt, Tokens) else [*b",".join(prompt.chunks())]

    def text(self, prompt: Prompt) -> str:
        if self.vocabulary is None:
            return bytes(self.flat(prompt)).decode()
        return b"".join(map(self.vocabulary.bytes_of, self.flat(prompt))).decode()


@cache
def family_of(name: str) -> FamilyCase:
    if name == "messages":
        return FamilyCase(MessagesDialect(), None, counts_tokens=False)
    if name in BY_NAME:
        folder = model_folder(name)
        vocabulary = vocabulary_from_file(folder)
        return FamilyCase(choose(folder, vocabulary), vocabulary, counts_tokens=False, cue_tokens=8)
    if name not in TEMPLATES:
        case = MAKERS[name]()
        return FamilyCase(case.dialect, case.vocabulary)
    vocabulary = vocabulary_from_file(model_folder("DeepSeek V3.2"))
    template = ChatTemplate(TEMPLATES[name], values={"thinking": True})
    # No special token stands after the outputs of V3.2: the last of them are always tokenized with what follows.
    counts_tokens = name != "deepseek-v3.2"
    return FamilyCase(template_dialect(vocabulary, template, name), vocabulary, counts_tokens)


families = pytest.mark.parametrize("family", [*MAKERS, *TEMPLATES, "messages"])


# --- loops ------------------------------------------------------------------------------------------------------------


class LoopStep(NamedTuple):
    """What the model says, and what the client adds."""

    thinks: bool
    talks: bool
    calls: int
    # Whether the outputs come in another order than the calls.
    is_reversed: bool
    has_reminder: bool
    has_new_tool: bool


loops = st.lists(
    st.builds(
        LoopStep,
        st.booleans(),
        st.booleans(),
        st.integers(1, 3),
        st.booleans(),
        st.booleans(),
        st.booleans(),
    ),
    min_size=2,
    max_size=4,
)


def script_of(steps: list[LoopStep]) -> Script:
    def arguments(n: int, index: int) -> Raw:
        value = {"q": f"arg{n}n{index}", "deep": {"b": [1.0, 2.5], "a": None}, "n": 100.0}
        return Raw(json.dumps(value).encode())

    turns = [
        ScriptedTurn(
            f"thought{n}" if step.thinks else "",
            f"saying{n}" if step.talks else "",
            tuple(
                ScriptedCall(TOOLS[index % 2]["name"], arguments(n, index))
                for index in range(step.calls)
            ),
        )
        for n, step in enumerate(steps)
    ]
    return Script((*turns, ScriptedTurn(text="Done.")))


def added_by(step: LoopStep, n: int, output: list[Json]) -> list[Json]:
    """What a client adds to an answer."""
    calls = [item for item in output if item["type"] == "function_call"]
    added = [
        {
            "type": "function_call_output",
            "call_id": call["call_id"],
            "output": f"output{n}n{index}",
        }
        for index, call in enumerate(calls)
    ]
    if step.is_reversed:
        added.reverse()
    if step.has_reminder:
        added.append({"type": "message", "role": "developer", "content": f"reminder{n}"})
    if step.has_new_tool:
        tool = {"type": "function", "name": f"late{n}", "parameters": SCHEMA}
        added.append({"type": "additional_tools", "role": "developer", "tools": [tool]})
    return added


# --- spellings --------------------------------------------------------------------------------------------------------


def reordered(value: Json, draw: st.DataObject) -> Json:
    return {name: value[name] for name in sorted(value, reverse=draw.draw(st.booleans()))}


def respelt(item: Json, draw: st.DataObject) -> Json:
    """The same item in another spelling."""
    flip = lambda: draw.draw(st.booleans())  # noqa: E731
    sent = reordered(item, draw)
    for name in ("id", "status"):
        sent.pop(name, None)
    if flip():
        sent["id"] = f"mine_{draw.draw(st.integers(0, 9))}"
    if item["type"] == "message":
        text = item["content"] if isinstance(item["content"], str) else item["content"][0]["text"]
        kind = "output_text" if item["role"] == "assistant" else "input_text"
        part: Json = {"text": text, "type": kind}
        if kind == "input_text" and flip():
            part["prompt_cache_breakpoint"] = {"mode": "explicit"}
        sent["content"] = [part] if flip() else text
    elif item["type"] == "function_call":
        value = json.loads(item["arguments"])
        value["n"] = 100 if flip() else 1e2
        sent["arguments"] = json.dumps(value, sort_keys=flip(), indent=2 if flip() else None)
    elif item["type"] == "function_call_output" and flip():
        sent["output"] = [{"type": "input_text", "text": item["output"]}]
    return sent


def sent_history(history: list[Json], lost: set[int], draw: st.DataObject) -> list[Json]:
    """The history as a client sends it: in another spelling each time, with thoughts that never come back once lost."""
    for index, item in enumerate(history):
        if item["type"] == "reasoning" and draw.draw(st.booleans()):
            lost.add(index)
    return [respelt(item, draw) for index, item in enumerate(history) if index not in lost]


async def play(
    stage: Stage, case: FamilyCase, steps: list[LoopStep], draw: st.DataObject
) -> list[Json]:
    """The whole loop; the history at its end."""
    history: list[Json] = [{"type": "message", "role": "user", "content": "asking0"}]
    lost: set[int] = set()
    before: list[int] = []
    for n in range(len(steps) + 1):
        tools = [reordered(tool, draw) for tool in TOOLS]
        told = await stage.turn(input=sent_history(history, lost, draw), tools=tools, store=False)
        assert told.response["status"] == "completed", told.response["error"]
        prompt = case.flat(stage.engine.jobs[-1].prompt)
        kept = len(before) - case.cue_tokens if before else 0
        assert prompt[:kept] == before[:kept]
        if before and case.counts_tokens:
            # What was written and what was sampled is not tokenized again.
            sampled = len(stage.engine.sampled[-2])
            assert told.tally.tokens_tokenized <= len(prompt) - len(before) - sampled + 2
        before = prompt
        if n < len(steps):
            output = told.response["output"]
            history += [*output, *added_by(steps[n], n, output)]
    return history


@families
@examples(12)
@given(steps=loops, draw=st.data())
def test_history_in_any_spelling_goes_on_where_it_ended(
    family: str, steps: list[LoopStep], draw: st.DataObject
) -> None:
    """The prompt begins with the one before, is the same without warmth, and only what is new is tokenized."""
    case = family_of(family)

    async def run() -> None:
        engine = case.engine(script_of(steps))
        async with staged(engine, case.dialect, checks_rendering=True) as stage:
            await play(stage, case, steps, draw)

    asyncio.run(run())


@families
@examples(8)
@given(steps=loops, draw=st.data())
def test_history_that_was_changed_is_not_taken_for_the_old_one(
    family: str, steps: list[LoopStep], draw: st.DataObject
) -> None:
    case = family_of(family)

    async def run() -> None:
        engine = case.engine(script_of(steps))
        async with staged(engine, case.dialect, checks_rendering=True) as stage:
            history = await play(stage, case, steps, draw)
            words = WORD.findall(
                json.dumps([item for item in history if item["type"] != "reasoning"])
            )
            old = draw.draw(st.sampled_from(words))
            changed = json.loads(re.sub(rf"\b{old}\b", "changed", json.dumps(history)))
            told = await stage.turn(input=changed, tools=TOOLS, store=False)
            assert told.response["status"] == "completed", told.response["error"]
            text = case.text(stage.engine.jobs[-1].prompt)
            assert "changed" in text
            assert not re.search(rf"\b{old}\b", text)

    asyncio.run(run())


@pytest.mark.parametrize("family", [name for name, row in BY_NAME.items() if row.is_quick])
def test_reminders_and_new_tools_cost_nothing_of_what_is_before_them(family: str) -> None:
    """In the templates of well-known models: the strict ones take no system message there, or forget at a question."""
    case = family_of(family)
    steps = [LoopStep(True, True, 2, True, True, True)] * 3

    async def run() -> None:
        engine = case.engine(script_of(steps))
        async with staged(engine, case.dialect, checks_rendering=True) as stage:
            history: list[Json] = [{"type": "message", "role": "user", "content": "asking0"}]
            before: list[int] = []
            for n, step in enumerate([*steps, steps[0]]):
                told = await stage.turn(input=history, tools=TOOLS, store=False)
                assert told.response["status"] == "completed", told.response["error"]
                prompt = case.flat(stage.engine.jobs[-1].prompt)
                kept = max(0, len(before) - case.cue_tokens)
                assert prompt[:kept] == before[:kept]
                before = prompt
                output = told.response["output"]
                history += [*output, *added_by(step, n, output)]

    asyncio.run(run())
