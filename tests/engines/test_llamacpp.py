"""Does the llama.cpp engine speak with a REAL llama.cpp server? SmolLM2, short prompts."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass

import pytest
from aiohttp import web

from segue.engines import llamacpp
from segue.engines.hidden_tokens import HiddenTokens
from segue.engines.llamacpp import LLAMACPP, KnownGrammars
from segue.engines.token_engine import TokenEngine
from segue.errors import EngineFailed, InvalidRequest, Unavailable
from segue.readers.tags import any_of, json_of, sequence, tag_of, text_without, words
from segue.seams.model import Finish, Grammar, Ids, ItemText, JobStarted, Piece, Sampling, Scene
from segue.seams.prompt import Head, Tokens, id_array
from tests.contracts import engine as contract
from tests.contracts.dialect import smollm2
from tests.contracts.engine import chatml
from tests.contracts.turns import said
from tests.engines.asking import (
    PROMISES,
    Greedy,
    Played,
    Promise,
    finish_of,
    heard,
    ids_of,
    job,
    logprobs_of,
    tokens,
    upstream,
)
from tests.engines.fakes.server import Fake, event
from tests.engines.llama_listener import CONTEXT_TOKENS, KEY, Listener, llama_server

HIDDEN_TOKENS = HiddenTokens(smollm2())


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    with llama_server() as found:
        yield found


@pytest.fixture
async def engine(listener: Listener) -> AsyncIterator[TokenEngine[KnownGrammars]]:
    async with upstream(listener.url, KEY) as address:
        yield TokenEngine(LLAMACPP, address, hidden_tokens=HIDDEN_TOKENS)


def text_of(pieces: Sequence[Piece]) -> str:
    reader = chatml().reader(Scene(Head(), None, ()))
    spoken = [one for piece in pieces if isinstance(piece, Ids) for one in reader.feed(piece)]
    spoken += reader.close(is_cut=False)
    return "".join(one.text for one in spoken if isinstance(one, ItemText))


# The sums of a batch are rounded differently from those of one job, so that "the same answer alone and together" is
# not promised by llama.cpp; who gets whose answer is asked below.
DETERMINISTIC = [one for one in PROMISES if one is not contract.serves_jobs_beside_each_other]


@pytest.mark.parametrize("promise", DETERMINISTIC, ids=lambda promise: promise.__name__)
async def test_engine_keeps_its_promise(
    promise: Promise, engine: TokenEngine[KnownGrammars]
) -> None:
    await promise(Greedy(engine, chatml()))


async def test_jobs_beside_each_other_get_their_own_answers(
    engine: TokenEngine[KnownGrammars],
) -> None:
    jobs = [
        job(tokens([1, 4093, 198, 100 + n]), 20, schema=b'{"const":"answer %d"}' % n)
        for n in range(4)
    ]
    await heard(engine, jobs[0])  # What is known of the server is shared from here on.
    answers = await asyncio.gather(*(heard(engine, one) for one in jobs))
    assert [text_of(pieces) for pieces in answers] == [f'"answer {n}"' for n in range(4)]


async def test_next_turn_finds_its_prefix_kept(engine: TokenEngine[KnownGrammars]) -> None:
    """Prompt and sampled ids of the turn before are all reused, but for the last one, which was never computed."""
    first = Greedy(engine, chatml()).job(said("Hello there"))
    ids = ids_of(await heard(engine, first))
    assert isinstance(first.prompt, Tokens)
    grown = first.prompt.plus(id_array(ids)).plus(first.prompt.chunks()[-1])

    pieces = await heard(engine, job(grown, 2))
    again = finish_of(pieces)

    known = first.prompt.length + len(ids)
    assert known - 1 <= again.cached_tokens <= known
    # It is told before the first token too, for those who break off.
    assert pieces[0] == JobStarted(again.cached_tokens)


async def test_warm_up_prefills_and_says_nothing(engine: TokenEngine[KnownGrammars]) -> None:
    prompt = Greedy(engine, chatml()).job(said("What do bees eat in winter?")).prompt
    assert isinstance(prompt, Tokens)

    pieces = await heard(engine, job(prompt, 0))
    assert [type(piece) for piece in pieces] == [JobStarted, Finish]

    assert finish_of(await heard(engine, job(prompt, 2))).cached_tokens == prompt.length - 1


async def test_answer_follows_the_schema(engine: TokenEngine[KnownGrammars]) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 10}, "hot": {"type": "boolean"}},
        "required": ["city", "hot"],
        "additionalProperties": False,
    }
    prompt = Greedy(engine, chatml()).job(said("Paris in summer, as JSON.")).prompt
    assert isinstance(prompt, Tokens)
    value = json.loads(
        text_of(await heard(engine, job(prompt, 60, schema=json.dumps(schema).encode())))
    )
    assert set(value) == {"city", "hot"}
    assert isinstance(value["hot"], bool)


async def test_prompt_that_does_not_fit_is_the_clients_error(
    engine: TokenEngine[KnownGrammars],
) -> None:
    with pytest.raises(InvalidRequest) as raised:
        await heard(engine, job(tokens([28] * (CONTEXT_TOKENS + 1))))
    assert raised.value.code == "context_length_exceeded"
    assert str(CONTEXT_TOKENS) in raised.value.message


async def test_stop_that_the_server_does_not_know_is_kept_by_us(
    engine: TokenEngine[KnownGrammars],
) -> None:
    prompt = Greedy(engine, chatml()).job(said("Count to five.")).prompt
    assert isinstance(prompt, Tokens)
    whole = ids_of(await heard(engine, job(prompt, 12)))
    stop = whole[4]

    pieces = await heard(engine, job(prompt, 12, stops=frozenset({stop})))

    assert ids_of(pieces) == whole[: whole.index(stop) + 1]
    assert finish_of(pieces).reason == "stop"


async def test_wrong_key_is_the_operators_fault(listener: Listener) -> None:
    async with upstream(listener.url, "wrong") as address:
        with pytest.raises(EngineFailed, match="key"):
            await heard(TokenEngine(LLAMACPP, address), job(tokens([1])))


async def test_cancelled_prefill_frees_the_server(engine: TokenEngine[KnownGrammars]) -> None:
    """The next job is answered, though the one before would have read its prompt for seconds."""
    asking = asyncio.create_task(heard(engine, job(tokens(range(100, 1_000)), 100)))
    await asyncio.sleep(0)
    asking.cancel()
    await asyncio.wait([asking])
    async with asyncio.timeout(20):
        assert finish_of(await heard(engine, job(tokens([1, 4093, 198]), 1))).reason == "length"


async def test_characters_of_several_tokens_arrive_whole(
    engine: TokenEngine[KnownGrammars],
) -> None:
    prompt = Greedy(engine, chatml()).job(said("Repeat exactly: 🎉🎉🦜 日本語 ☃")).prompt

    text = text_of(await heard(engine, job(prompt, 24)))

    assert any(len(character.encode()) == 4 for character in text)
    assert "\ufffd" not in text


async def test_server_that_is_killed_in_the_middle_is_a_failure_and_then_unavailable() -> None:
    with llama_server(slots=1) as victim:
        async with upstream(victim.url, KEY) as address:
            engine = TokenEngine(LLAMACPP, address)
            assert await engine.is_ready()
            pieces = engine.sample(job(tokens([1, 4093, 198]), 500, stops=frozenset()))
            async with aclosing(pieces):
                assert isinstance(await anext(pieces), JobStarted)
                assert isinstance(await anext(pieces), Ids)
                victim.process.kill()
                with pytest.raises(EngineFailed):
                    async with asyncio.timeout(20):
                        async for _ in pieces:
                            pass
            with pytest.raises(Unavailable):
                await heard(engine, job(tokens([1]), 1))
            assert not await engine.is_ready()


async def test_engine_says_how_likely_its_tokens_were(engine: TokenEngine[KnownGrammars]) -> None:
    prompt = Greedy(engine, chatml()).job(said("What is 2+2?")).prompt
    asked = Sampling(temperature=0, top_logprobs=3, wants_logprobs=True)

    pieces = await heard(engine, job(prompt, 6, sampling=asked))

    for id, one in zip(ids_of(pieces), logprobs_of(pieces), strict=True):
        assert one is not None
        assert one.top[0] == (id, one.logprob), "the greedy take the likeliest"
        assert [value for _, value in one.top] == sorted((v for _, v in one.top), reverse=True)
        assert len(one.top) == 3


async def test_grammar_is_kept_and_a_broken_one_is_the_clients_error(
    engine: TokenEngine[KnownGrammars],
) -> None:
    prompt = Greedy(engine, chatml()).job(said("Name a number.")).prompt
    lark = Grammar("lark", 'start: "n=" /[0-9]{3}/')
    pieces = await heard(engine, job(prompt, 20, schema=lark, stops=frozenset({0, 2})))
    assert re.fullmatch("n=[0-9]{3}", text_of(pieces))
    for _ in range(2):
        with pytest.raises(InvalidRequest) as raised:
            await heard(engine, job(prompt, 20, schema=Grammar("lark", "start: nowhere")))
        assert raised.value.code == "unsupported_grammar"


# JSON, one of two, and a text, which is the last because small models do not end it.
TAG = tag_of(
    sequence([
        words("<b>\n"), json_of({"type": ["boolean", "null"]}),
        any_of([words("x"), words('y"\\\n')]), words("</b>"), text_without("the ", "a", ", "),
    ])
)  # fmt: skip


@pytest.mark.parametrize("kind", ["%llguidance", "a server without it"])
async def test_structural_tag_is_followed(
    engine: TokenEngine[KnownGrammars], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """As Lark, and as GBNF where a server has no llguidance."""
    monkeypatch.setattr(llamacpp, "LLGUIDANCE", kind)
    prompt = Greedy(engine, chatml()).job(said("Name a number.")).prompt
    for seed in range(3):
        wanted = job(prompt, 60, sampling=Sampling(seed=seed), schema=TAG, stops=frozenset({0, 2}))
        text = text_of(await heard(engine, wanted))
        found = re.fullmatch(r'<b>\n(true|false|null)(x|y"\\\n)</b>((?s:.*))', text)
        assert found is not None, text
        assert not re.search("the |a|, ", found[3])


async def test_jobs_at_the_same_time_are_each_held_to_their_own_grammar(
    engine: TokenEngine[KnownGrammars],
) -> None:
    prompt = Greedy(engine, chatml()).job(said("Name a number.")).prompt
    texts = ["one", "two", "three", "four", "one"]
    jobs = [job(prompt, 8, schema=tag_of(words(text)), stops=frozenset({0, 2})) for text in texts]
    await heard(engine, jobs[0])  # What is known of the server is shared from here on.
    answers = await asyncio.gather(*(heard(engine, one) for one in jobs))
    assert [text_of(one) for one in answers] == texts


async def test_server_without_llguidance_is_never_given_a_grammar() -> None:
    """It would end its process. A FAKE: the one in the wheel has llguidance."""
    async with FakeLlama() as fake, upstream(fake.url) as address:
        with pytest.raises(InvalidRequest, match="without llguidance") as raised:
            await heard(
                TokenEngine(LLAMACPP, address), job(tokens([1]), schema=Grammar("regex", "a"))
            )
        assert raised.value.code == "unsupported_grammar"
        assert not any("grammar" in one for one in fake.requests)


@dataclass
class FakeLlama(Fake):
    """Shows a JSON schema back as llama.cpp's own kind of grammar."""

    def routes(self) -> list[web.RouteDef]:
        return [web.post("/completion", self._completion)]

    async def _completion(self, request: web.Request) -> web.Response:
        body = await self.body_of(request)
        assert "json_schema" in body
        settings = {"grammar": "root ::= object"}
        return web.json_response({"tokens": [1], "generation_settings": settings})


@pytest.mark.parametrize("bad", [-1, -(2**31), 2**31])
async def test_bad_id_of_a_character_with_hidden_tokens_is_a_failure_of_the_engine(
    bad: int,
) -> None:
    played = Played([event({"content": "é", "tokens": [bad], "tokens_predicted": 3})])
    with pytest.raises(EngineFailed, match="no vocabulary has"):
        await heard(TokenEngine(LLAMACPP, played, hidden_tokens=HIDDEN_TOKENS), job(tokens([1])))
