"""A real model in this process: SmolLM2 on two cores, so prompts are short and answers shorter.

One engine serves all tests of this file. Greedy sampling makes its answers repeatable; what is tested is never
whether the model is clever.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import jsonschema
import msgspec
import pytest

from segue.errors import ApiError, EngineFailed, InvalidRequest, Misconfigured, Unavailable
from segue.seams.model import (
    Finish,
    Grammar,
    Ids,
    ItemOpened,
    ItemText,
    Job,
    JobStarted,
    Piece,
    Sampling,
    Scene,
)
from segue.seams.prompt import NO_TOKENS, Head, Tokens, id_array
from segue.vocabularies.load import vocabulary_from_gguf
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.items import Item
from segue.wire.requests import ToolChoiceName
from segue.wire.tools import CustomTool
from segue_embedded import embedded, loading
from segue_embedded.embedded import EmbeddedEngine
from segue_embedded.loading import check_cpu, load_advice
from segue_embedded.weights import find_weights
from tests.contracts import engine as contract
from tests.contracts.dialect import tools_of
from tests.contracts.engine import Bench, chatml, ids_of, sampled
from tests.contracts.turns import said

CONTEXT = 1_024
# At most this long are answers whose end nobody waits for.
SHORT = 16
GREEDY = Sampling(temperature=0.0)
WAIT_S = 60


class GreedyBench(Bench):
    """Jobs whose answers can be compared, and that end soon."""

    def job(self, *given: Item, **options: object) -> Job:
        # To "Hi" this model says ten tokens and stops.
        job = super().job(*(given or (said("Hi"),)), **options)  # type: ignore[arg-type]
        limit = min(job.output_tokens_max, SHORT)
        return msgspec.structs.replace(job, sampling=GREEDY, output_tokens_max=limit)


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddedEngine]:
    engine = load()
    yield engine
    asyncio.run(engine.close())


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return vocabulary_from_gguf(weights())


@pytest.fixture
def bench(engine: EmbeddedEngine) -> GreedyBench:
    return GreedyBench(engine, chatml())


def weights() -> Path:
    path = find_weights("smollm2")
    return path


def load(parallel: int = 3) -> EmbeddedEngine:
    words = vocabulary_from_gguf(weights())
    return EmbeddedEngine(weights(), words, context_tokens=CONTEXT, parallel=parallel)


def with_prompt(job: Job, prompt: Tokens, **changes: object) -> Job:
    return msgspec.structs.replace(job, prompt=prompt, **changes)


def long_job(bench: Bench, words: int) -> Job:
    """A prompt of about this many tokens that shares nothing with any other."""
    return bench.job(said(" ".join(f"{words * 7 + n}" for n in range(words // 4))))


def finish_of(pieces: list[Piece]) -> Finish:
    assert isinstance(pieces[-1], Finish)
    return pieces[-1]


@pytest.mark.parametrize(
    "promise",
    [
        contract.streams_ids_then_one_finish,
        contract.ends_its_turn_with_a_stop,
        contract.honours_the_limit,
        contract.closing_frees_it,
        contract.cancelling_frees_it,
        contract.serves_jobs_beside_each_other,
        contract.says_whether_it_is_ready,
    ],
    ids=lambda promise: promise.__name__,
)
async def test_embedded_engine_keeps_its_promise(
    promise: Callable[[Bench], Awaitable[None]], bench: GreedyBench
) -> None:
    await promise(bench)


async def test_model_answers_in_words(bench: GreedyBench) -> None:
    """Through the dialect and its reader, the same words each time."""

    async def ask() -> str:
        job = bench.job(said("What is 2+2?"))
        reader = bench.dialect.reader(job.scene)
        heard = reader.feed(Ids(ids_of(await sampled(bench.engine, job))))
        heard += reader.close(is_cut=False)
        return "".join(one.text for one in heard if isinstance(one, ItemText))

    first = await ask()

    assert first.endswith(" 4.")
    assert await ask() == first


async def test_chain_of_turns_is_computed_once(bench: GreedyBench, vocabulary: Vocabulary) -> None:
    """Each turn's prompt is the last one, what was sampled, and a few new tokens; only those are computed.

    The very last sampled token was never fed to the model, and a stop may be missing.
    """
    job = bench.job(said("My name is Ada. What is my name?"), output_tokens_max=12)
    start, end, newline = (
        vocabulary.special("<|im_start|>"),
        vocabulary.special("<|im_end|>"),
        198,
    )
    more = [newline, start, *vocabulary.encode("user\nAnd then?"), end, newline]
    more += [start, *vocabulary.encode("assistant\n")]
    known = 0
    for turn in range(6):
        pieces = await sampled(bench.engine, job)
        cached = finish_of(pieces).cached_tokens
        # It is told before the first token too, for those who break off.
        assert pieces[0] == JobStarted(cached)
        assert turn == 0 or known - 2 <= cached <= known
        assert isinstance(job.prompt, Tokens)
        ids = ids_of(pieces)
        known = job.prompt.length + len(ids)
        ending = [] if ids[-1] == end else [end]
        job = with_prompt(job, job.prompt.plus(id_array([*ids, *ending, *more])))


async def test_conversations_outnumber_slots_and_keep_their_prefix(bench: GreedyBench) -> None:
    jobs = [bench.job(said(f"{n} is my number. " * 12), output_tokens_max=1) for n in range(5)]
    for job in jobs:
        await sampled(bench.engine, job)

    for job in jobs:
        assert isinstance(job.prompt, Tokens)
        again = finish_of(await sampled(bench.engine, job))
        assert again.cached_tokens == job.prompt.length - 1


async def test_conversations_at_once_do_not_disturb_each_other(bench: GreedyBench) -> None:
    """Seven jobs on three slots; each has its own prefix cached afterwards."""
    jobs = [bench.job(said(f"Count from {n}."), output_tokens_max=8) for n in range(7)]

    answers = await asyncio.gather(*(sampled(bench.engine, job) for job in jobs))

    assert all(0 < len(ids_of(pieces)) <= 8 for pieces in answers)


async def test_waiting_jobs_are_served_in_the_order_they_came() -> None:
    engine = load(parallel=1)
    bench = GreedyBench(engine, chatml())
    order: list[int] = []

    async def run(n: int) -> None:
        await sampled(engine, bench.job(output_tokens_max=6 - n))
        order.append(n)

    try:
        await asyncio.gather(*(run(n) for n in range(5)))
    finally:
        await engine.close()

    assert order == [0, 1, 2, 3, 4]


async def test_prompt_is_read_ahead_without_a_word(bench: GreedyBench) -> None:
    """No output tokens: a warm-up. The job itself then finds everything in place."""
    job = long_job(bench, 120)
    assert isinstance(job.prompt, Tokens)

    ahead = await sampled(bench.engine, msgspec.structs.replace(job, output_tokens_max=0))
    warm = await sampled(bench.engine, msgspec.structs.replace(job, output_tokens_max=2))

    cached = finish_of(ahead).cached_tokens
    assert ahead == [JobStarted(cached), Finish("length", cached_tokens=cached, output_tokens=0)]
    assert finish_of(ahead).cached_tokens < job.prompt.length // 2
    assert finish_of(warm).cached_tokens == job.prompt.length - 1


async def test_client_leaves_during_a_long_prompt_and_the_slot_is_soon_free(
    bench: GreedyBench,
) -> None:
    """All slots read prompts that would take many seconds; all are left; a new job is answered.

    The limit is loose, for busy machines: without a cancel each prompt alone would take longer.
    """
    tasks = [asyncio.create_task(sampled(bench.engine, long_job(bench, 700 + n))) for n in range(3)]
    await asyncio.wait(tasks, timeout=0.5)
    assert not any(task.done() for task in tasks)
    began = time.monotonic()
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    left_s = time.monotonic() - began

    await sampled(bench.engine, bench.job(said("Hello there"), output_tokens_max=1))
    free_s = time.monotonic() - began

    assert left_s < 2
    assert free_s < 4


async def test_client_that_leaves_a_long_prompt_and_comes_back_finds_what_was_read(
    bench: GreedyBench,
) -> None:
    """As Codex does when its warm-up takes too long: it opens another socket and sends the same."""
    job = long_job(bench, 300)
    ahead = msgspec.structs.replace(job, output_tokens_max=0)
    async with asyncio.timeout(WAIT_S), aclosing(bench.engine.sample(ahead)) as pieces:
        assert isinstance(await anext(pieces), JobStarted)
        # Prompts are read side by side: when this one is through, some of the long one is read.
        await sampled(bench.engine, bench.job(said("Hello you"), output_tokens_max=2))
    again = await sampled(bench.engine, msgspec.structs.replace(job, output_tokens_max=1))
    assert finish_of(again).cached_tokens > 0


async def test_client_leaves_during_an_answer_and_the_model_stops(
    bench: GreedyBench, engine: EmbeddedEngine
) -> None:
    began = 0.0
    job = msgspec.structs.replace(bench.job(said("Tell me a story.")), output_tokens_max=600)
    async with asyncio.timeout(WAIT_S), aclosing(engine.sample(job)) as pieces:
        async for _ in pieces:
            began = time.monotonic()
            break

    assert time.monotonic() - began < 2
    await asyncio.to_thread(idle, engine)
    assert time.monotonic() - began < 4


def idle(engine: EmbeddedEngine) -> None:
    """Wait until every worker has taken a task of ours, and so has finished its own."""
    everyone = threading.Barrier(engine._parallel, timeout=WAIT_S)
    for waiting in [engine._workers.submit(everyone.wait) for _ in range(engine._parallel)]:
        waiting.result(WAIT_S)


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 12},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def forced_job(bench: Bench, vocabulary: Vocabulary, schema: object) -> Job:
    """A call that the dialect began, as `Rendered.lead` does; temperature 1."""
    job = bench.job(said("What is the weather in Paris this week?"))
    assert isinstance(job.prompt, Tokens)
    lead = vocabulary.encode('<tool_call>\n{"name": "get_weather", "arguments": ')
    return with_prompt(
        job,
        job.prompt.plus(lead),
        sampling=Sampling(),
        schema=json.dumps(schema).encode(),
        output_tokens_max=80,
    )


async def test_forced_call_satisfies_its_schema_every_time(
    bench: GreedyBench, vocabulary: Vocabulary
) -> None:
    job = forced_job(bench, vocabulary, SCHEMA)
    answers: list[list[Piece]] = []
    for _ in range(2):
        answers += await asyncio.gather(*(sampled(bench.engine, job) for _ in range(4)))

    texts = [b"".join(map(vocabulary.bytes_of, ids_of(pieces))) for pieces in answers]
    assert [finish_of(pieces).reason for pieces in answers] == ["stop"] * 8
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    assert len(set(texts)) > 1, "temperature 1 writes more than one text"


@pytest.mark.parametrize(
    "schema", [{"type": "nothing"}, {"$ref": "#/absent"}, {"type": "array", "uniqueItems": True}]
)
async def test_schema_that_cannot_be_held_is_refused(
    bench: GreedyBench, vocabulary: Vocabulary, schema: object
) -> None:
    """llama.cpp itself would answer without any constraint."""
    for _ in range(2):
        with pytest.raises(InvalidRequest) as refused:
            await sampled(bench.engine, forced_job(bench, vocabulary, schema))
        assert refused.value.code == "unsupported_schema"


async def test_list_that_would_take_all_memory_is_refused(
    bench: GreedyBench, vocabulary: Vocabulary
) -> None:
    """The library would write it out, item by item. Requests with such a schema do not come so far."""
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 10**9}
    with pytest.raises(InvalidRequest) as refused:
        await sampled(bench.engine, forced_job(bench, vocabulary, schema))
    assert refused.value.code == "unsupported_schema"
    assert ids_of(await sampled(bench.engine, bench.job()))


def references(count: int) -> object:
    """Objects that lead to each other."""
    defs: dict[str, object] = {f"d{count}": {"type": "integer"}}
    for n in range(count):
        inner = {"a": {"$ref": f"#/$defs/d{n + 1}"}}
        defs[f"d{n}"] = {"type": "object", "properties": inner, "required": ["a"]}
    return {"$ref": "#/$defs/d0", "$defs": defs}


async def test_schema_that_would_end_the_process_is_refused(
    bench: GreedyBench, vocabulary: Vocabulary, caplog: pytest.LogCaptureFixture
) -> None:
    """References to references overflow the library's stack. It is tried in a process of its own, once."""
    for _ in range(2):
        with pytest.raises(InvalidRequest) as refused:
            await sampled(bench.engine, forced_job(bench, vocabulary, references(2_000)))
        assert refused.value.code == "unsupported_schema"
    assert caplog.text.count("ended the process that tries them") == 1
    assert ids_of(await sampled(bench.engine, forced_job(bench, vocabulary, references(20))))


async def test_grammar_that_is_larger_than_the_library_may_take_is_refused(
    bench: GreedyBench,
) -> None:
    for grammar in (
        Grammar("regex", "ab" * 200_000),
        Grammar("lark", f'start: "{"ab" * 200_000}"'),
    ):
        with pytest.raises(InvalidRequest, match="256 KiB"):
            await sampled(bench.engine, lark_job(bench, grammar))


@pytest.mark.parametrize(
    "grammar",
    [Grammar("lark", 'start: "a"{1000000000}'), Grammar("regex", "((a{1000}){1000}){100}")],
)
async def test_grammar_that_is_given_up_on_ends_the_answer(
    bench: GreedyBench, vocabulary: Vocabulary, grammar: Grammar
) -> None:
    """llama.cpp would go on with any text: nothing of it is an answer."""
    job = msgspec.structs.replace(lark_job(bench, grammar), output_tokens_max=200)
    text = ""
    with pytest.raises(InvalidRequest, match="to the end of the answer") as failed:
        async with aclosing(bench.engine.sample(job)) as pieces:
            async for piece in pieces:
                ids = piece.ids if isinstance(piece, Ids) else ()
                text += b"".join(map(vocabulary.bytes_of, ids)).decode()
    assert failed.value.code == "unsupported_grammar"
    assert not text.strip("a")


async def test_schema_that_is_given_up_on_ends_the_answer(
    bench: GreedyBench, vocabulary: Vocabulary
) -> None:
    schema = {"type": "string", "pattern": "^(a{1000000})$"}
    with pytest.raises(InvalidRequest, match="to the end of the answer") as failed:
        await sampled(bench.engine, forced_job(bench, vocabulary, schema))
    assert failed.value.code == "unsupported_schema"


def lark_job(bench: Bench, grammar: Grammar) -> Job:
    """A call of a custom tool with this grammar, as the dialect begins it; temperature 1."""
    shape = {"type": "grammar", "syntax": grammar.syntax, "definition": grammar.definition}
    tool = CustomTool(name="run", format=msgspec.Raw(json.dumps(shape).encode()))
    head = Head(tools=tools_of(tool), tool_choice=ToolChoiceName(type="custom", name="run"))
    scene = Scene(head, None, (said('Run it for "Paris".'),), can_constrain=True)
    rendered = bench.dialect.render(scene)
    assert rendered.schema == grammar
    return msgspec.structs.replace(
        bench.job(),
        prompt=rendered.prompt,
        scene=scene,
        schema=rendered.schema,
        sampling=Sampling(),
        output_tokens_max=60,
    )


# Each with what its inputs look like: quotes, newlines and backslashes are the grammar's own, not those of JSON.
GRAMMARS = [
    (
        Grammar(
            "lark",
            'start: "SELECT " NAME " FROM \\"" NAME "\\"\\n" "LIMIT " /[0-9]{1,3}/\nNAME: /[a-z]{1,8}/',
        ),
        r'SELECT [a-z]{1,8} FROM "[a-z]{1,8}"\nLIMIT [0-9]{1,3}',
    ),
    (Grammar("regex", r'[a-z]{2,5}/"\d{2}"\\ (yes|no)'), r'[a-z]{2,5}/"\d{2}"\\ (yes|no)'),
]


@pytest.mark.parametrize("grammar, pattern", GRAMMARS, ids=["lark", "regex"])
async def test_forced_input_follows_its_grammar_every_time(
    bench: GreedyBench, grammar: Grammar, pattern: str
) -> None:
    job = lark_job(bench, grammar)
    # One after the other: all but the first find the prompt computed.
    answers = [await sampled(bench.engine, job) for _ in range(8)]

    inputs = []
    for pieces in answers:
        reader = bench.dialect.reader(job.scene)
        heard = reader.feed(Ids(bench.dialect.render(job.scene).lead))
        heard += reader.feed(Ids(ids_of(pieces))) + reader.close(is_cut=False)
        assert heard[0] == ItemOpened("custom", "run")
        inputs.append("".join(one.text for one in heard if isinstance(one, ItemText)))
    assert [one for one in inputs if not re.fullmatch(pattern, one)] == []
    assert [finish_of(pieces).reason for pieces in answers] == ["stop"] * 8
    assert len(set(inputs)) > 1, "temperature 1 writes more than one"


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("lark", "start: nowhere"),
        Grammar("lark", "this is ) no grammar"),
        Grammar("regex", "(unbalanced"),
        Grammar("regex", "(?=ahead)a"),
    ],
    ids=["unknown rule", "no rule", "unbalanced", "lookahead"],
)
async def test_grammar_that_cannot_be_read_is_refused(bench: GreedyBench, grammar: Grammar) -> None:
    """llama.cpp itself would answer without any constraint."""
    for _ in range(2):
        with pytest.raises(InvalidRequest) as refused:
            await sampled(bench.engine, lark_job(bench, grammar))
        assert refused.value.code == "unsupported_grammar"


@pytest.mark.parametrize("definition", ["[a-z]*", "🦜{1,2}", "(.|\n)*"])
async def test_grammar_that_allows_much_is_not_mistaken_for_none(
    bench: GreedyBench, definition: str
) -> None:
    job = msgspec.structs.replace(
        lark_job(bench, Grammar("regex", definition)), output_tokens_max=8
    )

    assert isinstance(finish_of(await sampled(bench.engine, job)), Finish)


async def test_engine_says_how_likely_its_tokens_were(
    bench: GreedyBench, vocabulary: Vocabulary
) -> None:
    """Of a character that took several tokens llama.cpp tells only the last one's."""
    asked = Sampling(temperature=0.0, top_logprobs=3, wants_logprobs=True)
    job = msgspec.structs.replace(bench.job(said("Repeat exactly: hello 🎉")), sampling=asked)
    alone = msgspec.structs.replace(job, sampling=Sampling(temperature=0.0, wants_logprobs=True))

    pieces = await sampled(bench.engine, job)
    ids = ids_of(pieces)
    logprobs = [one for piece in pieces if isinstance(piece, Ids) for one in piece.logprobs]

    assert ids == ids_of(await sampled(bench.engine, alone))
    assert len(logprobs) == len(ids)
    for id, one in zip(ids, logprobs, strict=True):
        if one is None:
            with pytest.raises(UnicodeDecodeError):
                vocabulary.bytes_of(id).decode()
            continue
        assert one.top[0] == (id, one.logprob), "the greedy take the likeliest"
        assert len(one.top) == 3
        assert 0 < sum(math.exp(value) for _, value in one.top) <= 1.0001
    bare = await sampled(bench.engine, alone)
    assert all(not one.top for p in bare if isinstance(p, Ids) for one in p.logprobs if one)


async def test_characters_of_several_tokens_arrive_whole(
    bench: GreedyBench, vocabulary: Vocabulary
) -> None:
    """llama.cpp shows one id of an emoji. The others are found again: the next turn's prefix proves them."""
    job = bench.job(said("Repeat exactly: 🎉🎉🦜 日本語 ☃"))
    pieces = await sampled(bench.engine, job)
    ids = ids_of(pieces)
    text = b"".join(map(vocabulary.bytes_of, ids)).decode()
    assert any(len(character.encode()) == 4 for character in text)
    assert "\ufffd" not in text

    assert isinstance(job.prompt, Tokens)
    more = with_prompt(job, job.prompt.plus(id_array([*ids, 198])), output_tokens_max=1)
    cached = finish_of(await sampled(bench.engine, more)).cached_tokens
    assert cached >= job.prompt.length + len(ids) - 1


async def test_same_answer_is_sampled_only_by_the_greedy(
    bench: GreedyBench, vocabulary: Vocabulary
) -> None:
    """The temperature reaches the model."""
    job = bench.job(said("Tell me a story."), output_tokens_max=16)
    warm = msgspec.structs.replace(job, sampling=Sampling(temperature=1.5))

    answers = [ids_of(await sampled(bench.engine, warm)) for _ in range(3)]

    assert len({tuple(ids) for ids in answers}) > 1


async def test_seed_makes_the_same_choices_again(bench: GreedyBench) -> None:
    job = bench.job(said("Tell me a story."), output_tokens_max=16)
    answers: dict[int, set[tuple[int, ...]]] = {}
    for seed in (-1, 2**62, -1, 2**62):
        seeded = msgspec.structs.replace(job, sampling=Sampling(temperature=1.5, seed=seed))
        answers.setdefault(seed, set()).add(tuple(ids_of(await sampled(bench.engine, seeded))))

    assert [len(found) for found in answers.values()] == [1, 1]
    assert answers[-1] != answers[2**62]


async def test_impossible_ids_are_an_engine_failure(bench: GreedyBench) -> None:
    job = bench.job()

    for ids in ([], [1, 4_000_000]):
        with pytest.raises(EngineFailed, match="refused"):
            await sampled(bench.engine, with_prompt(job, NO_TOKENS.plus(id_array(ids))))


async def test_prompt_beyond_the_context_says_both_figures(bench: GreedyBench) -> None:
    """Nobody should ask: a turn is refused before. Here it would otherwise be cut in silence."""
    job = bench.job()

    with pytest.raises(ApiError, match=rf"2000 tokens, at most {CONTEXT} fit"):
        await sampled(bench.engine, with_prompt(job, NO_TOKENS.plus(id_array([1] * 2_000))))


def test_listener_is_on_loopback_and_wants_a_key(engine: EmbeddedEngine) -> None:
    address = engine._server.listening_address  # type: ignore[union-attr]

    assert address.startswith("http://127.0.0.1:")
    for path in ("/slots", "/props", "/v1/models"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(address + path, timeout=WAIT_S)
        assert refused.value.code == 401
        refused.value.close()


def test_signals_stay_with_python(engine: EmbeddedEngine) -> None:
    """Versions of the wrapper have taken SIGINT and SIGTERM for themselves."""
    for number in (signal.SIGINT, signal.SIGTERM):
        heard = threading.Event()
        before = signal.signal(number, lambda *_, heard=heard: heard.set())
        try:
            os.kill(os.getpid(), number)
            assert heard.wait(WAIT_S)
        finally:
            signal.signal(number, before)


async def test_engine_is_closed_while_it_runs() -> None:
    """Running and waiting jobs end with a word, threads end, and nothing is taken any more."""
    before = set(threading.enumerate())
    engine = load(parallel=1)
    bench = GreedyBench(engine, chatml())
    tasks = [asyncio.create_task(sampled(engine, long_job(bench, 400))) for _ in range(2)]
    await asyncio.wait(tasks, timeout=0.3)
    assert engine.load == (1, 1)
    began = time.monotonic()

    await engine.close()
    await engine.close()

    ended = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(one) for one in ended] == [Unavailable] * 2
    assert time.monotonic() - began < 4
    assert not await engine.is_ready()
    with pytest.raises(Unavailable):
        await sampled(engine, bench.job())
    left = set(threading.enumerate()) - before
    assert not [thread for thread in left if thread.name.startswith("segue-embedded")]


async def test_engine_that_has_too_many_jobs_refuses_more(
    bench: GreedyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "WAITING_MAX", 0)
    running = [bench.engine.sample(bench.job()) for _ in range(3)]
    try:
        for pieces in running:
            assert isinstance(await anext(pieces), JobStarted)
        assert not await bench.engine.is_ready()
        with pytest.raises(Unavailable, match="Too many"):
            await sampled(bench.engine, bench.job())
    finally:
        for pieces in running:
            await pieces.aclose()


def test_weights_that_are_none_are_said_before_anything_starts(
    tmp_path: Path, vocabulary: Vocabulary
) -> None:
    wrong = tmp_path / "wrong.gguf"
    wrong.write_bytes(b"GGUF and nothing else")

    with pytest.raises(Misconfigured, match="no weights at"):
        EmbeddedEngine(tmp_path / "absent.gguf", vocabulary, context_tokens=64)
    with pytest.raises(Misconfigured, match="cannot be loaded"):
        EmbeddedEngine(wrong, vocabulary, context_tokens=64)


def test_cpu_that_the_wheel_does_not_fit_is_named(tmp_path: Path) -> None:
    info = tmp_path / "cpuinfo"
    info.write_text("processor : 0\nflags : fpu sse2 avx fma\n")

    if loading.platform.machine() in ("x86_64", "AMD64"):
        with pytest.raises(Misconfigured, match="avx2, bmi2, f16c"):
            check_cpu(info)
    info.write_text("flags : avx2 bmi2 f16c fma\n")
    check_cpu(info)
    check_cpu(tmp_path / "absent")


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, vocabulary: Vocabulary) -> None:
    monkeypatch.setitem(__import__("sys").modules, "xllamacpp", None)

    assert "apt install libgomp1" in load_advice(ImportError("libgomp.so.1: cannot open"))
    with pytest.raises(Misconfigured, match="pip install --no-deps xllamacpp"):
        EmbeddedEngine(weights(), vocabulary, context_tokens=64)
