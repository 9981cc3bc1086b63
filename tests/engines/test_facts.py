"""Is what an engine says of itself believed, and is nothing else asked of it?"""

from __future__ import annotations

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.border.refusals import ContextRefused, error_for_status
from segue.engines.facts import facts_in, fitted, learned
from segue.engines.sglang import SGLANG
from segue.engines.token_engine import TokenEngine
from segue.engines.vllm import VLLM
from segue.errors import InvalidRequest
from segue.seams.model import EngineFacts
from tests.engines.asking import heard, ids_of, job, tokens, upstream
from tests.engines.fakes.sglang import FakeSglang
from tests.engines.fakes.vllm import FakeVllm

LONG = tokens([1] * 60)


def listed(*cards: dict[str, object]) -> bytes:
    return json.dumps({"object": "list", "data": cards}).encode()


@pytest.mark.parametrize(
    ("body", "tokens", "sees_images"),
    [
        (listed({"id": "m", "max_model_len": 32_768}), 32_768, None),
        (listed({"id": "m", "context_length": 8_192}, {"id": "n"}), 8_192, None),
        (listed({"id": "m", "context_window": 131_072}), 131_072, None),
        # The only model of a server, whatever it calls it.
        (listed({"id": "/weights/m", "max_model_len": 4_096}), 4_096, None),
        # An adapter has the context of its base.
        (
            listed({"id": "base", "max_model_len": 4_096}, {"id": "m", "parent": "base"}),
            4_096,
            None,
        ),
        (listed({"id": "n", "max_model_len": 1}, {"id": "o", "max_model_len": 2}), None, None),
        (listed({"id": "m", "architecture": {"input_modalities": ["text", "image"]}}), None, True),
        (listed({"id": "m", "input_modalities": ["text"]}), None, False),
        (listed({"id": "m"}), None, None),
        (listed({"id": "m", "owned_by": None, "max_model_len": 9}), 9, None),
        (listed({"id": "m", "max_model_len": "many"}), None, None),
        (listed(), None, None),
        (b"<html>", None, None),
    ],
)
def test_list_of_models(body: bytes, tokens: int | None, sees_images: bool | None) -> None:
    facts = facts_in(body, "m")
    assert (facts.context_tokens, facts.sees_images) == (tokens, sees_images)


@pytest.mark.parametrize(
    "message",
    [
        "max_tokens=131041 cannot be greater than max_model_len=32768. Please request fewer output tokens.",
        "max_tokens=131041cannot be greater than max_model_len=max_total_tokens=32768. (parameter=max_tokens)",
        "This model's maximum context length is 32768 tokens. However, you requested 40000 tokens.",
        "You passed 5 input tokens. However, the model's context length is only 32768 tokens, resulting in 1.",
        "Input length (40000) exceeds model's maximum context length (32768).",
        "The input (40000 tokens) is longer than the model's context length (32768 tokens).",
        "Requested token count exceeds the model's maximum context length of 32768 tokens. You requested 40000.",
        "request (40000 tokens) exceeds the available context size (32768 tokens), try increasing it",
    ],
)
def test_refusal_names_the_context(message: str) -> None:
    error = error_for_status(400, json.dumps({"message": message}).encode())
    assert isinstance(error, ContextRefused)
    assert error.context_tokens == 32_768
    assert learned(EngineFacts(), error) == EngineFacts(context_tokens=32_768)
    # No news: asking again would end in the same way.
    assert learned(EngineFacts(context_tokens=32_768), error) is None


def test_refusal_that_names_no_context_teaches_nothing() -> None:
    error = error_for_status(
        400, b'{"message": "input is too long for the context window. Sorry, 7."}'
    )
    assert isinstance(error, ContextRefused)
    assert learned(EngineFacts(), error) is None


@given(
    context=st.one_of(st.none(), st.integers(1, 1_000)),
    reserved=st.integers(0, 8),
    length=st.integers(1, 900),
    limit=st.one_of(st.none(), st.integers(0, 2_000)),
)
def test_what_is_asked_for_fits(
    context: int | None, reserved: int, length: int, limit: int | None
) -> None:
    facts = EngineFacts(context_tokens=context, reserved_tokens=reserved)
    asked = fitted(job(tokens([1] * length), limit), facts).output_tokens_max
    if context is None or limit == 0:
        assert asked == limit
        return
    assert asked is not None
    room = context - reserved - length
    assert asked == (min(room, room if limit is None else limit) if room > 0 else 1)


@pytest.mark.parametrize("is_scaled_out", [False, True])
@pytest.mark.parametrize("lists_models", [True, False])
async def test_small_vllm_takes_jobs_without_a_limit_and_with_a_large_one(
    is_scaled_out: bool, lists_models: bool
) -> None:
    """Asked, or learned from its refusal: the client sees an answer in both cases."""
    fake = FakeVllm(context_tokens=100, is_scaled_out=is_scaled_out, lists_models=lists_models)
    async with fake, upstream(fake.url) as address:
        engine = TokenEngine(VLLM, address, "fake")
        for limit in (None, 10_000, 70):
            assert ids_of(await heard(engine, job(LONG, limit))) == [7, 8, 9]
        jobs = [body for body in fake.requests if "model" in body]
        # It refuses once, when it had not been asked.
        assert len(jobs) == (3 if lists_models else 4)
        assert engine.facts.context_tokens == 100
        sent = msgspec.convert(jobs[-1].get("sampling_params", jobs[-1]), dict[str, object])
        assert sent["max_tokens"] == 40


@pytest.mark.parametrize("drafts", [0, 5])
async def test_sglang_has_room_for_its_drafts(drafts: int) -> None:
    async with FakeSglang(context_tokens=100, drafts=drafts) as fake, upstream(fake.url) as address:
        engine = TokenEngine(SGLANG, address)
        assert ids_of(await heard(engine, job(LONG, None))) == [7, 8, 9]
        assert ids_of(await heard(engine, job(LONG, 10_000))) == [7, 8, 9]
        assert len(fake.requests) == 2
        assert engine.facts == EngineFacts(
            context_tokens=100,
            reserved_tokens=drafts + 1,
            models=("default",),
            sees_images=False,
        )


async def test_prompt_that_fits_no_more_is_refused_in_the_engines_words() -> None:
    async with FakeVllm(context_tokens=50) as fake, upstream(fake.url) as address:
        with pytest.raises(InvalidRequest, match="maximum context length is 50 tokens"):
            await heard(TokenEngine(VLLM, address, "fake"), job(LONG))


async def test_server_that_comes_back_is_asked_again() -> None:
    async with FakeVllm(context_tokens=100) as fake, upstream(fake.url) as address:
        engine = TokenEngine(VLLM, address, "fake")
        assert await engine.is_ready()
        assert engine.facts.context_tokens == 100
        await fake.stop()
        with pytest.raises(Exception, match="does not answer"):
            await heard(engine, job(LONG))
        fake.context_tokens = 200
        await fake.start()
        assert await engine.is_ready()
        assert engine.facts.context_tokens == 200
