"""What a turn that is broken off has cost, and where it was served: real sockets in front of FAKE engines."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from segue_embedded.weights import find_weights
from tests.contracts.dialect import smollm2
from tests.engines.fakes.server import Fake
from tests.engines.fakes.sglang import FakeSglang
from tests.engines.fakes.vllm import FakeVllm
from tests.support import Served, Wire, serving, until, wire


def story(prompt: Sequence[int]) -> list[int]:
    words = smollm2()
    return [*words.encode("A story. " * 40), words.special("<|im_end|>")]


@asynccontextmanager
async def served_by(engine: str, *fakes: Fake) -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        for fake in fakes:
            await stack.enter_async_context(fake)
        flags = {
            "engine": engine,
            "engine_url": tuple(fake.url for fake in fakes),
            "tokenizer": str(find_weights("smollm2")),
            "model": ("fake",),
            "context_tokens": 8_000,
        }
        yield await stack.enter_async_context(serving(**flags))


async def turn(socket: Wire, **fields: Any) -> dict[str, Any]:
    last = await socket.turn(model="fake", store=False, **fields)
    found: dict[str, Any] = last["response"]
    return found


async def steered(socket: Wire, *fakes: Fake, **fields: Any) -> dict[str, Any]:
    """A response that is steered while one of these engines writes it."""
    for fake in fakes:
        # Behind a whole sentence, where a steer is heeded at once.
        fake.hold_at = 21
        fake.held.clear()
        fake.gate.clear()
    await socket.create(model="fake", store=False, **fields)
    target = (await socket.next())["response"]["id"]
    await until(lambda: any(fake.held.is_set() for fake in fakes))
    await socket.send(
        {"type": "response.steer", "previous_response_id": target, "input": "Shorter."}
    )
    while (await socket.next())["type"] != "response.steer.accepted":
        pass
    for fake in fakes:
        fake.gate.set()
    found: dict[str, Any] = (await socket.events())[-1]["response"]
    assert found["incomplete_details"] == {"reason": "steered"}
    return found


async def test_successor_goes_to_the_replica_that_served_the_steered_response() -> None:
    fakes = [FakeVllm(story, block=1) for _ in range(3)]
    async with served_by("vllm", *fakes) as served, wire(served) as socket:
        # Where a new chain of a socket begins is a matter of chance.
        await steered(socket, *fakes, input="Tell me.")
        (home,) = (fake for fake in fakes if asked(fake))
        assert (await socket.events())[-1]["type"] == "response.completed"
    assert [asked(fake) for fake in fakes] == [2 * (fake is home) for fake in fakes]


def asked(fake: Fake) -> int:
    """How many jobs it was sent."""
    return len([path for path in fake.paths if "completions" in path])


async def test_engine_that_says_early_what_it_has_kept_is_believed_when_a_steer_breaks_it_off() -> (
    None
):
    fake = FakeSglang(story, block=1)
    async with served_by("sglang", fake) as served, wire(served) as socket:
        first = await turn(socket, input="Tell me.", max_output_tokens=5)
        usage = (await steered(socket, fake, input="Go on.", previous_response_id=first["id"]))[
            "usage"
        ]
    known = first["usage"]["total_tokens"]
    assert usage["input_tokens"] > known
    assert usage["input_tokens_details"]["cached_tokens"] >= known - 1


@pytest.mark.parametrize("fault", [{"fault_at": 30}, {"break_at": 30}])
async def test_tokens_of_an_answer_that_breaks_are_counted(fault: dict[str, int]) -> None:
    fake = FakeVllm(story, **fault)
    async with served_by("vllm", fake) as served, wire(served) as socket:
        failed = await turn(socket, input="Tell me.")
        assert failed["status"] == "failed"
        usage = failed["usage"]
        assert usage["input_tokens"] > 0
        assert usage["output_tokens"] == 30


async def test_job_that_is_refused_costs_nothing() -> None:
    fake = FakeVllm(story, context_tokens=10)
    async with served_by("vllm", fake) as served, wire(served) as socket:
        failed = await turn(socket, input="Tell me.")
        assert failed["status"] == "failed"
        assert failed["usage"]["total_tokens"] == 0
