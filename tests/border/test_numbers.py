"""A replica that miscounts costs nobody an answer: what cannot be true is replaced by our own count."""

from __future__ import annotations

import hashlib
import json

import pytest

from segue.border.numbers import has_too_much, plausible
from segue.limits import UNSEEN_TOKENS_MAX
from segue.seams.model import Finish, Job, JobStarted, Sampling, Scene
from segue.seams.prompt import NO_MESSAGES, NO_TOKENS, Head, Prompt, id_array

# 40 bytes, about 12 tokens; and 31 tokens.
MESSAGES = NO_MESSAGES.plus(b"m" * 40, tokens=12)
TOKENS = NO_TOKENS.plus(id_array(range(31)))
MOST = 40 + UNSEEN_TOKENS_MAX
ABSURD = [-1, -(10**30), MOST + 1, 2**31, 2**63 - 1, 2**63, 10**30]


def job(prompt: Prompt) -> Job:
    return Job(prompt, Scene(Head(), None, ()), Sampling(), frozenset(), None)


@pytest.mark.parametrize("count", ABSURD)
def test_count_of_an_endpoint_that_cannot_be_true_is_ours(count: int) -> None:
    said = Finish("stop", count, count, count, count)
    found = plausible(job(MESSAGES), said)

    cached = 12 if count > 0 else 0
    # How many deltas came, the turn knows itself.
    assert (found.input_tokens, found.output_tokens, found.cached_tokens) == (12, None, cached)
    assert found.reasoning_tokens is None


@pytest.mark.parametrize("count", ABSURD)
def test_cache_of_an_engine_holds_no_more_than_the_prompt(count: int) -> None:
    cached = 31 if count > 0 else 0
    for said in (Finish("stop", count), Finish("length", count, count)):
        found = plausible(job(TOKENS), said)
        assert (found.cached_tokens, found.input_tokens) == (cached, None)
    started = plausible(job(TOKENS), JobStarted(count, route="a"))
    assert started.cached_tokens is not None
    assert 0 <= started.cached_tokens <= 31 + UNSEEN_TOKENS_MAX


@pytest.mark.parametrize(
    "said",
    [
        Finish("stop"),
        Finish("stop", 12, 12, 900_000, 899_000),
        Finish("length", 0, 0, 0, 0),
        # A picture, or a prompt that the endpoint adds.
        Finish("stop", 50_000, 60_000, 5),
        JobStarted(),
        JobStarted(12, route="a"),
    ],
)
def test_what_can_be_true_is_left_alone(said: Finish | JobStarted) -> None:
    assert plausible(job(MESSAGES), said) is said


def test_more_is_never_cached_than_read() -> None:
    assert plausible(job(MESSAGES), Finish("stop", 10**9, 3, 1)) == Finish("stop", 3, 3, 1)


@pytest.mark.parametrize(
    "number", ["1e300", "1E300", "2e+0300", "5e-324", "-4.9E-324", "1" * 300, "0." + "1" * 300]
)
def test_event_with_many_numbers_that_are_slow_to_read_is_too_much(number: str) -> None:
    """65,000 of them stopped everybody for half a second."""
    assert has_too_much(json.dumps([0] * 3_000).replace("0", number).encode())


@pytest.mark.parametrize(
    "event",
    [
        {"logprobs": [{"token": " e1", "logprob": -1.1920928955078125e-07 * n} for n in range(9_000)]},
        {"arguments": hashlib.shake_128(b"dump").hexdigest(400_000)},
        {"token_ids": list(range(100_000, 160_000))},
        {"bounds": [1e300, -1e300, 5e-324] * 100, "text": "x" * 9_000},
    ],
    ids=["logprobs", "dump", "ids", "bounds"],
)  # fmt: skip
def test_event_with_numbers_as_servers_send_them_is_read(event: object) -> None:
    assert not has_too_much(json.dumps(event).encode())
