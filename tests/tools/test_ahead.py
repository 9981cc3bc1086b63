"""What the engine reads of a tool's output before the tool has ended: always a beginning of the prompt that follows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.ahead import output
from bench.render import HEAD, history
from segue.dialects.chatml import SMOLLM2
from segue.dialects.family import TokenDialect
from segue.seams.model import Engine, EngineFacts, Finish, Job, Piece, Sampling, Scene
from segue.seams.prompt import NO_TOKENS, Tokens
from segue.server.aliases import NamedModels
from segue.tools.ahead import STEP_CHARS, ReadAhead, common_beginning, stable_end
from segue.turn.plan import Plan
from segue.turn.resources import NextRound
from segue.vocabularies.load import vocabulary_from_gguf
from segue.vocabularies.vocabulary import slices_of
from segue.wire.items import Item
from segue_embedded.weights import find_weights
from tests.contracts.dialect import smollm2
from tests.dialects import templates
from tests.doors.test_hosted_tool import FLAGS, HOSTED
from tests.scenarios.test_tools import calling, scripted
from tests.support import MODEL, Served, metric, until, wire

Body = dict[str, Any]
DONE = {"text": "So it is."}
WORDS = "the words of a long output " * (2 * STEP_CHARS // 27)
"""More than is read in one part."""


# --- where a text may be cut ------------------------------------------------------------------------


def vocabularies() -> list[Any]:
    names = ["smollm2", "llama3_2", "qwen3"]
    return [pytest.param(name, id=name) for name in names]


@cache
def encode(name: str) -> Any:
    if name == "smollm2":
        return vocabulary_from_gguf(find_weights(name)).encode
    return templates.vocabulary(name).encode


PIECES = st.one_of(
    st.sampled_from(
        ["word", " word", "  ", " ", "\n", "\r\n", "\n\n", "\t", "//", ".", "!?", "don't", "'s", "123",
         "4567", "漢字", "é", "e\u0301", "😀", "\u00a0", "\u2028", "_x", "\\n", '\\"', "/usr/bin", "ǅ", "अि"]
    ),
    st.text(max_size=6),
)  # fmt: skip


@pytest.mark.parametrize("name", vocabularies())
@settings(deadline=None, max_examples=150)
@given(
    pieces=st.lists(PIECES, max_size=40),
    at=st.integers(0, 200),
    after=st.sampled_from(["", "\n</tool_response>", " .", "word"]),
    is_json=st.booleans(),
)
def test_ids_up_to_the_stable_place_are_those_of_the_whole_text(
    name: str, pieces: list[str], at: int, after: str, is_json: bool
) -> None:
    """Whatever comes, and whatever a template writes behind it; as it is, or as JSON."""
    whole = "".join(pieces)
    shown = whole[:at]
    end = stable_end(shown)

    def prompt(text: str) -> Tokens:
        text = (
            json.dumps([{"stdout": text, "exit_code": 0}], ensure_ascii=False) if is_json else text
        )
        ids = encode(name)("Said:\n" + text + after)
        return Tokens(NO_TOKENS, ids, len(ids))

    read = common_beginning(prompt(shown[:end]), prompt(shown))
    assert not end or prompt(whole).flat()[: read.length] == read.flat()


@pytest.mark.parametrize("name", vocabularies())
@settings(deadline=None, max_examples=150)
@given(pieces=st.lists(PIECES, max_size=60), slice_chars=st.integers(4, 40))
def test_slices_of_a_text_have_the_ids_of_the_whole(
    name: str, pieces: list[str], slice_chars: int
) -> None:
    """So that of an output that grows only the end is encoded."""
    text = "".join(pieces)
    ids = [id for part in slices_of(text, len(text), slice_chars) for id in encode(name)(part)]
    assert ids == [*encode(name)(text)]


def test_text_without_a_space_between_words_has_no_stable_place() -> None:
    assert stable_end("a" * 9_000) == stable_end("") == stable_end("word ") == 0
    assert stable_end("one two  three\n four") == len("one")


# --- in a turn --------------------------------------------------------------------------------------


@dataclass
class PrefixEngine:
    """The scripted engine, which says how much of a prompt it has read before, and keeps the jobs."""

    inner: Engine
    caches: bool = True
    jobs: list[Job] = field(default_factory=list)
    ahead: list[Tokens] = field(default_factory=list)
    can_constrain: bool = False
    grammars: frozenset[str] = frozenset()
    facts: EngineFacts = field(default_factory=EngineFacts)
    # The read that never ends.
    hangs_at: int = 0

    async def is_ready(self) -> bool:
        return True

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        assert isinstance(job.prompt, Tokens)
        if job.is_ahead:
            assert job.output_tokens_max == 0
            self.ahead.append(job.prompt)
            if len(self.ahead) == self.hangs_at:
                await asyncio.Event().wait()
            yield Finish("length", cached_tokens=0)
            return
        self.jobs.append(job)
        async for piece in self.inner.sample(job):
            if isinstance(piece, Finish) and self.caches:
                piece = Finish(piece.reason, cached_tokens=0)
            yield piece


def with_prefix(served: Served, *, caches: bool = True) -> PrefixEngine:
    models = served.app.runner.models
    assert isinstance(models, NamedModels)
    engine = PrefixEngine(models[MODEL].engine, caches)
    models.add(MODEL, replace(models[MODEL], engine=engine))
    return engine


async def test_output_is_read_while_its_tool_still_runs(tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = calling("shell", commands=[WORDS, f"wait {go}"])
    async with scripted(tmp_path, run, DONE, **FLAGS) as served, wire(served) as socket:
        engine = with_prefix(served)
        await socket.create(input="Go", tools=[HOSTED], store=False)
        await until(lambda: engine.ahead)
        assert len(engine.jobs) == 1
        go.touch()
        response = (await socket.events())[-1]["response"]
        first, last = engine.jobs
        assert isinstance(first.prompt, Tokens)
        assert isinstance(last.prompt, Tokens)
        whole = last.prompt.flat()
        read = engine.ahead[-1]
        assert whole[: read.length] == read.flat()
        # All but the last words of what was there when it was read.
        assert read.length > first.prompt.length + STEP_CHARS // 8
        # Nobody pays for it.
        prompts = first.prompt.length + last.prompt.length
        assert response["usage"]["input_tokens"] == prompts
        assert await metric(served, "segue_tokens_ahead_total") > 0
        assert await metric(served, "segue_tokens_ahead_lost_total") == 0


@pytest.mark.parametrize("hangs_at", [1, 2])
async def test_tool_that_has_ended_does_not_wait_for_a_read_that_does_not_end(
    hangs_at: int, tmp_path: Path
) -> None:
    go = [tmp_path / "go", tmp_path / "go on"]
    run = calling("shell", commands=[WORDS, f"wait {go[0]}", WORDS, f"wait {go[1]}"])
    async with scripted(tmp_path, run, DONE, **FLAGS) as served, wire(served) as socket:
        engine = with_prefix(served)
        engine.hangs_at = hangs_at
        await socket.create(input="Go", tools=[HOSTED], store=False)
        await until(lambda: engine.ahead)
        go[0].touch()
        await until(lambda: len(engine.ahead) >= hangs_at)
        go[1].touch()
        assert (await socket.events())[-1]["response"]["status"] == "completed"
    assert len(engine.ahead) == hangs_at
    assert len(engine.jobs) == 2


async def test_end_of_a_turn_is_not_lost_while_a_read_is_given_up() -> None:
    """As at the end of the process: whoever is cancelled while it waits for the engine to let go has been cancelled."""
    ahead = ReadAhead(cast(Plan, None), cast(NextRound, None))
    let_go = asyncio.Event()

    async def read() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await let_go.wait()

    ahead._task = reading = asyncio.create_task(read())
    await asyncio.sleep(0)
    stopping = asyncio.create_task(ahead.stop())
    await until(lambda: reading.cancelling())
    stopping.cancel()
    let_go.set()
    with pytest.raises(asyncio.CancelledError):
        await stopping


@pytest.mark.parametrize(
    "made, is_lost",
    [(lambda text: text, False), (lambda text: text[:900] + "[…]" + text[-900:], True)],
    ids=["whole", "cut in the middle"],
)
async def test_what_was_read_of_an_output_that_is_cut_is_counted_as_lost_and_never_in_the_prompt(
    made: Callable[[str], str], is_lost: bool
) -> None:
    dialect = TokenDialect(SMOLLM2, smollm2())
    past = history(dialect, 200)

    def scene(items: tuple[Item, ...]) -> Scene:
        return Scene(HEAD, past.warm, items)

    def prompt(text: str) -> Tokens:
        return cast(Tokens, dialect.render(scene(output(text))).context)

    engine = PrefixEngine(cast(Engine, None))
    asked = Job(dialect.render(scene(())).context, scene(()), Sampling(), frozenset(), 1)
    started = SimpleNamespace(route=None)
    tally = SimpleNamespace(tokens_ahead=0, tokens_ahead_lost=0, spans=[], started=started)
    model = SimpleNamespace(dialect=dialect, engine=engine)
    plan = SimpleNamespace(id="resp_1", model=model, tally=tally)
    ahead = ReadAhead(cast(Plan, plan), NextRound(scene, asked, Finish("stop", cached_tokens=0)))
    ahead.show(WORDS, output)
    await until(lambda: tally.tokens_ahead)
    await ahead.stop()
    ahead.settle(output(made(WORDS)))
    assert tally.tokens_ahead_lost == tally.tokens_ahead * is_lost
    (read,) = engine.ahead
    whole = prompt(made(WORDS)).flat()
    assert (whole[: read.length] == read.flat()) != is_lost


@pytest.mark.parametrize("why", ["no_cache", "short", "guard"])
async def test_nothing_is_read_ahead_where_it_gains_nothing(why: str, tmp_path: Path) -> None:
    flags: Body = dict(FLAGS)
    if why == "guard":
        (tmp_path / "segue.toml").write_text('[guard_rules]\npatterns = ["rainbow"]\n')
        flags |= {"guard": ("rules",), "config": str(tmp_path / "segue.toml")}
    run = calling("shell", commands=["word" if why == "short" else WORDS, "a"])
    async with scripted(tmp_path, run, DONE, **flags) as served, wire(served) as socket:
        engine = with_prefix(served, caches=why != "no_cache")
        await socket.create(input="Go", tools=[HOSTED], store=False)
        assert (await socket.events())[-1]["response"]["status"] == "completed"
    assert len(engine.jobs) == 2
    assert engine.ahead == []
