"""How does a request get into the engine, and what it samples out of it?

    plain     `EngineClient.generate`, which is public: a task and a queue for each request
    stepwise  with versions that were tried: the tokens of a step are taken where vLLM's API server reads them, before
              it makes an object of each. First and last outputs go vLLM's own way, so its metrics count as ever

In: a prompt, sampling parameters, and a `Heard` for each request. Out: calls of its methods, and of `flush` when the
outputs of one step are through. They are called where vLLM reads the outputs of all requests, which an exception would
end: who raises one hears no more, and nobody else notices.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

log = logging.getLogger("vllm.segue")


def is_asked_wrongly(error: BaseException) -> bool:
    """Whether vLLM says so: by `ValueError`, and by kinds of its own since 0.32."""
    return any(kind.__name__ in ("ValueError", "VLLMClientError") for kind in type(error).__mro__)


class Heard(Protocol):
    """Who listens to one request."""

    def tokens(self, ids: Sequence[int], cached: int | None) -> None:
        """Sampled in one step; `cached` is known with the first."""

    def end(self, reason: str, stop: int | str | None) -> None:
        """The last call."""

    def failed(self, status: int, words: str) -> None:
        """Instead of an end."""


class Request:
    """One request in the engine."""

    def __init__(self, id: str, heard: Heard) -> None:
        self.id = id
        self.heard = heard
        # Whether vLLM itself has seen the first output.
        self.has_begun = self.is_over = False
        self.task: asyncio.Task[None] | None = None

    def output(self, output: Any) -> None:
        """What vLLM made of an output, or an exception."""
        if self.is_over:
            return
        if isinstance(output, BaseException):
            self.fail(output)
            return
        (made,) = output.outputs
        first = not self.has_begun
        self.has_begun = True
        if made.token_ids:
            cached = output.num_cached_tokens if first else None
            self.heard.tokens(list(made.token_ids), cached)
        if made.finish_reason is not None:
            self.is_over = True
            self.heard.end(made.finish_reason, made.stop_reason)

    def fail(self, error: BaseException) -> None:
        """No more comes of it."""
        if self.is_over:
            return
        self.is_over = True
        is_wrong = is_asked_wrongly(error)
        status = 400 if is_wrong else 503 if "Dead" in type(error).__name__ else 500
        words = str(error) if is_wrong else "The engine failed."
        if status == 500:
            log.warning("segue: a request failed: %s: %s", type(error).__name__, error)
        self.heard.failed(status, words)


class Outputs:
    """All requests of the plugin in one engine; `flush` is called after each step with something of theirs."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.flush: Callable[[], None] = lambda: None
        self._requests: dict[str, Request] = {}
        self._is_flushing = False
        self.is_stepwise = False
        self._aborting: set[asyncio.Task[None]] = set()

    def step_by_step(self) -> None:
        """Take tokens where vLLM reads them; raises where this vLLM is another than was tried."""
        processor = self._engine.output_processor
        if processor.stream_interval != 1:
            raise ValueError("--stream-interval is set")
        process, count = processor.process_outputs, processor._update_stats_from_output
        states, ours = processor.request_states, self._requests

        def process_outputs(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            rest = outputs
            if ours:
                at = kwargs.get("engine_core_timestamp", args[0] if args else None)
                stats = kwargs.get("iteration_stats", args[1] if len(args) > 1 else None)
                rest = []
                for output in outputs:
                    request = ours.get(output.request_id)
                    if (
                        request is None
                        or not request.has_begun
                        or output.finish_reason is not None
                        or output.new_logprobs is not None
                    ):
                        rest.append(output)
                        continue
                    state = states.get(output.request_id)
                    if state is not None:
                        count(state, output, at, stats)
                        try:
                            request.heard.tokens(output.new_token_ids, None)
                        except Exception as error:
                            self._give_up(request, error)
                self._flush_soon()
            return process(rest, *args, **kwargs)

        processor.process_outputs = process_outputs
        self.is_stepwise = True

    async def start(
        self, id: str, prompt: Any, params: Any, heard: Heard, **options: Any
    ) -> Request:
        """The request is in the engine when this returns; it may have failed by then."""
        request = Request(id, heard)
        if not self.is_stepwise:
            request.task = asyncio.create_task(self._generate(request, prompt, params, options))
            return request
        try:
            queue = await self._engine.add_request(id, prompt, params, **options)
        except Exception as error:
            request.fail(error)
            return request

        def put(output: Any) -> None:
            try:
                request.output(output)
            except Exception as error:
                self._give_up(request, error)
            if request.is_over:
                self._requests.pop(queue.request_id, None)
            self._flush_soon()

        try:
            early = queue.get_nowait()
        except Exception as error:
            early = error
        queue.put = put
        self._requests[queue.request_id] = request
        if early is not None:
            put(early)
        return request

    async def _generate(
        self, request: Request, prompt: Any, params: Any, options: dict[str, Any]
    ) -> None:
        try:
            async for output in self._engine.generate(prompt, params, request.id, **options):
                request.output(output)
                self._flush_soon()
        except Exception as error:
            request.fail(error)
            self._flush_soon()

    async def abort(self, request: Request) -> None:
        """Nobody listens any longer."""
        if request.is_over:
            return
        request.is_over = True
        if request.task is not None:
            request.task.cancel()
            return
        self._forget(request)
        await self._engine.abort(request.id)

    def _forget(self, request: Request) -> None:
        for id, one in list(self._requests.items()):
            if one is request:
                del self._requests[id]

    def _give_up(self, request: Request, error: Exception) -> None:
        """A fault of ours."""
        log.error("segue: an answer could not be passed on", exc_info=error)
        request.is_over = True
        with suppress(Exception):
            request.heard.failed(500, "The engine failed.")
        self._forget(request)
        task = asyncio.create_task(self._engine.abort(request.id))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    def _flush_soon(self) -> None:
        """Once for all that this round of the event loop brings."""
        if not self._is_flushing:
            self._is_flushing = True
            asyncio.get_running_loop().call_soon(self._flush_now)

    def _flush_now(self) -> None:
        self._is_flushing = False
        self.flush()
