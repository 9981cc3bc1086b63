"""Does the vLLM codec use both of vLLM's endpoints? Against a FAKE; its shapes were recorded from vLLM 0.32."""

from __future__ import annotations

from typing import cast

import pytest

from segue.engines.token_engine import TokenEngine
from segue.engines.vllm import RENDER, VLLM
from segue.errors import EngineFailed, InvalidRequest
from segue.seams.lineage import Lineage
from segue.seams.model import Finish, Grammar, Sampling, TokenLogprob
from tests.contracts.engine import Bench, chatml
from tests.engines.asking import (
    PROMISES,
    STOP,
    Played,
    Promise,
    finish_of,
    heard,
    ids_of,
    job,
    logprobs_of,
    reply,
    tokens,
    upstream,
)
from tests.engines.fakes.server import DONE, event
from tests.engines.fakes.thread import remote
from tests.engines.fakes.vllm import FakeVllm, logprob

BOTH = pytest.mark.parametrize("is_scaled_out", [False, True])
PATHS = {False: "/v1/completions", True: "/inference/v1/generate"}


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
@BOTH
async def test_engine_keeps_its_promise(promise: Promise, is_scaled_out: bool) -> None:
    with remote(lambda: FakeVllm(reply, is_scaled_out=is_scaled_out)) as fake:
        async with upstream(fake.url) as address:
            engine = TokenEngine(VLLM, address, "fake")
            await heard(engine, job(tokens([1])))
            await promise(Bench(engine, chatml()))


@pytest.mark.parametrize("limit", [2, 3, None])
async def test_stop_that_its_rust_front_end_names_again_counts_once(limit: int | None) -> None:
    fake = FakeVllm(lambda prompt: [7, 8, STOP], ends_apart=True)
    async with fake, upstream(fake.url) as address:
        pieces = await heard(TokenEngine(VLLM, address, "fake"), job(tokens([1]), limit))
    assert ids_of(pieces) == [7, 8, STOP][:limit]
    assert finish_of(pieces).reason == ("length" if limit == 2 else "stop")


@BOTH
async def test_job_goes_the_way_that_is_offered_and_asks_once(is_scaled_out: bool) -> None:
    async with FakeVllm(is_scaled_out=is_scaled_out) as fake, upstream(fake.url) as address:
        engine = TokenEngine(VLLM, address, "fake")
        for _ in range(2):
            assert ids_of(await heard(engine, job(tokens([1, 3], [4])))) == [7, 8, 9]
        way = PATHS[is_scaled_out]
        offers = ["/inference/v1/generate", "/version", *[RENDER] * is_scaled_out]
        # Where it takes no images, it is not asked whether its model sees.
        sees = ["/tokenize"] * is_scaled_out
        assert fake.paths == ["/v1/models", *offers, *sees, *offers, way, way]
        sent = fake.requests[-1]
        assert (sent["token_ids"] if is_scaled_out else sent["prompt"]) == [1, 3, 4]
        assert sent["model"] == "fake"


async def test_own_sampling_of_the_model_holds_where_nobody_chose() -> None:
    """Of its two endpoints only one looks into the model's generation_config; the other is told what is in it."""
    async with FakeVllm(is_scaled_out=True) as fake, upstream(fake.url) as address:
        engine = TokenEngine(VLLM, address, "fake")
        await heard(engine, job(tokens([1]), sampling=Sampling(top_p=0.5)))
        sent = cast("dict[str, object]", fake.requests[-1]["sampling_params"])
        assert (sent["temperature"], sent["top_p"], sent["top_k"]) == (0.3, 0.5, 20)
        assert "output_kind" not in sent
        assert engine.facts.sampling == Sampling(temperature=0.3, top_p=0.9)


@BOTH
async def test_sampling_and_stops_are_handed_on(is_scaled_out: bool) -> None:
    async with FakeVllm(is_scaled_out=is_scaled_out) as fake, upstream(fake.url) as address:
        sampling = Sampling(0.5, 0, 0.25, -0.5, seed=7)
        await heard(TokenEngine(VLLM, address, "fake"), job(tokens([1]), 5, sampling=sampling))
        sent = fake.requests[-1]
        settings = sent["sampling_params"] if is_scaled_out else sent
        assert isinstance(settings, dict)
        assert settings["max_tokens"] == 5
        assert settings["temperature"] == 0.5
        assert 0 < settings["top_p"] < 0.001
        assert settings["presence_penalty"] == 0.25
        assert settings["frequency_penalty"] == -0.5
        assert settings["stop_token_ids"] == [STOP]
        assert settings["seed"] == 7


@BOTH
@pytest.mark.parametrize(
    "version, name, wanted",
    [
        ("0.32.0+cpu", "structured_outputs", {"json": {"type": "object"}}),
        ("0.10.2", "guided_json", {"type": "object"}),
        ("dev", "structured_outputs", {"json": {"type": "object"}}),
    ],
)
async def test_schema_has_the_name_that_this_version_knows(
    is_scaled_out: bool, version: str, name: str, wanted: object
) -> None:
    fake = FakeVllm(is_scaled_out=is_scaled_out, version=version)
    async with fake, upstream(fake.url) as address:
        engine = TokenEngine(VLLM, address, "fake")
        assert engine.can_constrain
        await heard(engine, job(tokens([1]), schema=b'{"type":"object"}'))
        sent = fake.requests[-1]
        settings = sent["sampling_params"] if is_scaled_out else sent
        assert isinstance(settings, dict)
        assert settings[name] == wanted


@BOTH
async def test_engine_says_how_much_of_the_prompt_it_kept(is_scaled_out: bool) -> None:
    async with FakeVllm(is_scaled_out=is_scaled_out) as fake, upstream(fake.url) as address:
        engine = TokenEngine(VLLM, address, "fake")
        first = await heard(engine, job(tokens(range(100, 140))))
        assert finish_of(first).cached_tokens == 0
        second = await heard(engine, job(tokens(range(100, 140), ids_of(first), [5] * 20)))
        assert finish_of(second).cached_tokens == 32


@BOTH
async def test_warm_up_reads_the_prompt_and_says_nothing(is_scaled_out: bool) -> None:
    async with FakeVllm(is_scaled_out=is_scaled_out) as fake, upstream(fake.url) as address:
        engine = TokenEngine(VLLM, address, "fake")
        assert await heard(engine, job(tokens([1] * 40), 0)) == [Finish("length", 0)]
        assert finish_of(await heard(engine, job(tokens([1] * 60)))).cached_tokens == 32


async def test_warm_up_of_nothing_asks_nobody() -> None:
    async with FakeVllm() as fake, upstream(fake.url) as address:
        assert await heard(TokenEngine(VLLM, address, "fake"), job(tokens(), 0)) == [
            Finish("length")
        ]
        assert fake.paths == []


@BOTH
async def test_prompt_that_does_not_fit_is_the_clients_error(is_scaled_out: bool) -> None:
    fake = FakeVllm(is_scaled_out=is_scaled_out, context_tokens=50)
    async with fake, upstream(fake.url) as address:
        with pytest.raises(InvalidRequest) as raised:
            await heard(TokenEngine(VLLM, address, "fake"), job(tokens([1] * 60)))
        assert raised.value.code == "context_length_exceeded"


async def test_error_inside_the_stream_is_a_failure_of_the_engine() -> None:
    async with FakeVllm(fault_at=1) as fake, upstream(fake.url) as address:
        with pytest.raises(EngineFailed):
            await heard(TokenEngine(VLLM, address, "fake"), job(tokens([1])))


async def test_server_without_token_ids_is_said_to_be_too_old() -> None:
    async with FakeVllm(gives_ids=False) as fake, upstream(fake.url) as address:
        with pytest.raises(EngineFailed, match="newer"):
            await heard(TokenEngine(VLLM, address, "fake"), job(tokens([1])))


async def test_model_that_is_not_served_is_a_failure_of_the_engine() -> None:
    async with FakeVllm(model="other") as fake, upstream(fake.url) as address:
        with pytest.raises(EngineFailed, match="model"):
            await heard(TokenEngine(VLLM, address, "fake"), job(tokens([1])))


async def test_server_that_comes_back_in_another_way_is_asked_again() -> None:
    async with FakeVllm(is_scaled_out=True) as fake, upstream(fake.url) as address:
        engine = TokenEngine(VLLM, address, "fake")
        await heard(engine, job(tokens([1])))
        fake.is_scaled_out = False
        with pytest.raises(EngineFailed):
            await heard(engine, job(tokens([1])))
        assert ids_of(await heard(engine, job(tokens([1])))) == [7, 8, 9]


@BOTH
async def test_logprobs_belong_to_their_ids(is_scaled_out: bool) -> None:
    """The likeliest first, though vLLM puts the sampled one before them."""
    async with FakeVllm(is_scaled_out=is_scaled_out) as fake, upstream(fake.url) as address:
        engine = TokenEngine(VLLM, address, "fake")
        asked = Sampling(top_logprobs=3, wants_logprobs=True)
        pieces = await heard(engine, job(tokens([1]), sampling=asked))
        bare = await heard(engine, job(tokens([1]), sampling=Sampling(wants_logprobs=True)))
        plain = await heard(engine, job(tokens([1]), sampling=Sampling(top_logprobs=3)))
    for id, one in zip(ids_of(pieces), logprobs_of(pieces), strict=True):
        assert one == TokenLogprob(logprob(id), ((1, -1 / 64), (2, -2 / 64), (id, logprob(id))))
    assert logprobs_of(bare) == [TokenLogprob(logprob(id)) for id in ids_of(bare)]
    assert logprobs_of(plain) == []


@BOTH
@pytest.mark.parametrize("version, is_new", [("0.32.0+cpu", True), ("0.10.2", False)])
async def test_grammar_has_the_name_that_this_version_knows(
    is_scaled_out: bool, version: str, is_new: bool
) -> None:
    fake = FakeVllm(is_scaled_out=is_scaled_out, version=version)
    async with fake, upstream(fake.url) as address:
        engine = TokenEngine(VLLM, address, "fake")
        for syntax, name in (("lark", "grammar"), ("regex", "regex")):
            assert syntax in engine.grammars
            await heard(engine, job(tokens([1]), schema=Grammar(syntax, 'start: "a"')))
            sent = fake.requests[-1]
            settings = sent["sampling_params"] if is_scaled_out else sent
            assert isinstance(settings, dict)
            found = settings["structured_outputs"][name] if is_new else settings[f"guided_{name}"]
            assert found == 'start: "a"'


@BOTH
async def test_structural_tag_is_handed_on_as_text(is_scaled_out: bool) -> None:
    async with FakeVllm(is_scaled_out=is_scaled_out) as fake, upstream(fake.url) as address:
        engine = TokenEngine(VLLM, address, "fake")
        assert "structural_tag" in engine.grammars
        await heard(engine, job(tokens([1]), schema=Grammar("structural_tag", "{}")))
        sent = fake.requests[-1]
        settings = sent["sampling_params"] if is_scaled_out else sent
        assert isinstance(settings, dict)
        assert settings["structured_outputs"] == {"structural_tag": "{}"}


@BOTH
async def test_priority_is_sent_where_it_is_taken_and_the_chain_always(is_scaled_out: bool) -> None:
    """The lowest goes first here. A server without priorities says so once, and the client does not notice."""
    fake = FakeVllm(is_scaled_out=is_scaled_out, takes_priority=True)
    urgent, plain = Lineage("resp_1", priority=1), Lineage("resp_1")
    async with fake, upstream(fake.url) as address:
        engine = TokenEngine(VLLM, address, "fake")
        for lineage, sent in ((plain, None), (urgent, -1)):
            await heard(engine, job(tokens([1]), lineage=lineage))
            assert fake.requests[-1].get("priority") == sent
            assert fake.headers[-1]["x-session-id"] == "resp_1"
        fake.takes_priority = False
        before = len(fake.requests)
        for _ in range(2):
            assert ids_of(await heard(engine, job(tokens([1]), lineage=urgent))) == [7, 8, 9]
        assert [one.get("priority") for one in fake.requests[before:]] == [-1, None, None]


async def test_only_the_first_answer_is_read_and_nothing_after_its_end() -> None:
    one, other = {"index": 1, "token_ids": [9]}, {"index": 0, "token_ids": [7]}
    last = {"index": 0, "token_ids": [8], "finish_reason": "content_filter"}
    late = {"index": 0, "token_ids": [9], "finish_reason": "stop"}
    said = [event({"choices": choices}) for choices in ([one, other], [one], [last], [late])]
    pieces = await heard(TokenEngine(VLLM, Played([*said, DONE]), "fake"), job(tokens([1])))

    assert ids_of(pieces) == [7, 8]
    assert finish_of(pieces).reason == "content_filter"
