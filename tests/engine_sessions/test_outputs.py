"""How do tokens come out of a vLLM that was tried, and whom does a fault of ours cost its answer? Without vLLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from segue_vllm.outputs import Outputs


class Queue:
    """As vLLM's collector: what comes before anybody takes it waits here."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.waiting: Any = None

    def put(self, output: Any) -> None:
        self.waiting = output

    def get_nowait(self) -> Any:
        if isinstance(self.waiting, Exception):
            raise self.waiting
        return self.waiting


class Processor:
    """As vLLM's: makes an object of each output and puts it into its queue."""

    stream_interval = 1

    def __init__(self) -> None:
        self.request_states: dict[str, Queue] = {}
        self.made: list[str] = []
        self.counted: list[str] = []

    def _update_stats_from_output(self, state: Queue, *_: Any) -> None:
        self.counted.append(state.request_id)

    def process_outputs(self, outputs: Sequence[Any], *_: Any) -> None:
        for output in outputs:
            self.made.append(output.request_id)
            finish, ids = output.finish_reason, output.new_token_ids
            made = SimpleNamespace(token_ids=ids, finish_reason=finish, stop_reason=None)
            queue = self.request_states[output.request_id]
            queue.put(SimpleNamespace(outputs=[made], num_cached_tokens=3))


class Engine:
    """As vLLM's client of its core."""

    def __init__(self) -> None:
        self.output_processor = Processor()
        self.aborted: list[str] = []

    async def add_request(self, id: str, prompt: Any, params: Any, **options: Any) -> Queue:
        queue = self.output_processor.request_states[id] = Queue(id)
        return queue

    async def abort(self, id: str) -> None:
        self.aborted.append(id)

    def step(self, *ids: str, token: int = 7, finish: str | None = None) -> None:
        """One token for each of them."""
        fields = {"new_token_ids": [token], "finish_reason": finish, "new_logprobs": None}
        outputs = [SimpleNamespace(request_id=id, **fields) for id in ids]
        self.output_processor.process_outputs(outputs, 0.0, None)


class PublicEngine:
    """As vLLM's client of any version: a generator for each request."""

    def __init__(self, *said: Any) -> None:
        self._said = said
        self.left = asyncio.Event()
        self.goes_on = asyncio.Event()

    async def generate(self, prompt: Any, params: Any, id: str, **_: Any) -> AsyncIterator[Any]:
        try:
            for one in self._said:
                if isinstance(one, Exception):
                    raise one
                ids, finish = one
                made = SimpleNamespace(token_ids=ids, finish_reason=finish, stop_reason=2)
                yield SimpleNamespace(outputs=[made], num_cached_tokens=3)
            await self.goes_on.wait()
        finally:
            self.left.set()


class Ear:
    """Who hears one request, and may break at some token."""

    def __init__(self, breaks_at: int = -1) -> None:
        self.heard: list[Any] = []
        self._breaks_at = breaks_at

    def tokens(self, ids: Sequence[int], cached: int | None) -> None:
        if len(self.heard) == self._breaks_at:
            raise KeyError("a fault of ours")
        self.heard.append((list(ids), cached))

    def end(self, reason: str, stop: int | str | None) -> None:
        self.heard.append(reason)

    def failed(self, status: int, words: str) -> None:
        self.heard.append(status)


async def test_first_and_last_output_go_vllms_own_way_and_those_between_do_not() -> None:
    engine, ear = Engine(), Ear()
    outputs = Outputs(engine)
    outputs.step_by_step()
    await outputs.start("a", None, None, ear)
    for finish in (None, None, None, "stop"):
        engine.step("a", finish=finish)
    assert ear.heard == [([7], 3), ([7], None), ([7], None), ([7], None), "stop"]
    assert engine.output_processor.made == ["a", "a"]
    assert engine.output_processor.counted == ["a", "a"]
    assert not outputs._requests


async def test_fault_of_ours_at_a_token_ends_its_answer_and_neither_another_nor_the_engine() -> (
    None
):
    """It happens where vLLM reads the tokens of all requests: an exception there ends vLLM."""
    for breaks_at in (0, 1, 3):
        engine, broken, other = Engine(), Ear(breaks_at), Ear()
        outputs = Outputs(engine)
        outputs.step_by_step()
        for id, ear in (("a", broken), ("b", other)):
            await outputs.start(id, None, None, ear)
        for _ in range(5):
            engine.step("a", "b")
        await asyncio.sleep(0)
        assert broken.heard[breaks_at:] == [500]
        assert other.heard == [([7], 3)] + 4 * [([7], None)]
        assert engine.aborted == ["a"]
        assert set(outputs._requests) == {"b"}


class EngineDeadError(Exception):
    """Of vLLM, by its name."""


class VLLMClientError(Exception):
    """Of vLLM since 0.32, by its name."""


class VLLMValidationError(VLLMClientError):
    """A kind of it."""


@pytest.mark.parametrize(
    "last, heard",
    [
        (([9], "stop"), [([9], None), "stop"]),
        (EngineDeadError(), [503]),
        (ValueError("bad"), [400]),
        (VLLMValidationError("bad"), [400]),
        (OSError(), [500]),
    ],
    ids=["stop", "killed", "wrongly asked", "wrongly asked 0.32", "fault"],
)
async def test_vllm_that_was_not_tried_is_asked_by_public_ways(last: Any, heard: list[Any]) -> None:
    engine, ear = PublicEngine(([7], None), ([8, 8], None), last), Ear()
    outputs = Outputs(engine)
    flushed = asyncio.Event()
    outputs.flush = flushed.set
    request = await outputs.start("a", None, None, ear)
    await asyncio.wait_for(flushed.wait(), 5)
    engine.goes_on.set()
    assert request.task is not None
    await asyncio.wait_for(request.task, 5)
    assert ear.heard == [([7], 3), ([8, 8], None), *heard]


async def test_request_that_nobody_waits_for_leaves_a_vllm_that_was_not_tried() -> None:
    engine, ear = PublicEngine(([7], None)), Ear()
    outputs = Outputs(engine)
    flushed = asyncio.Event()
    outputs.flush = flushed.set
    request = await outputs.start("a", None, None, ear)
    await asyncio.wait_for(flushed.wait(), 5)
    await outputs.abort(request)
    await asyncio.wait_for(engine.left.wait(), 5)
    assert ear.heard == [([7], 3)]
