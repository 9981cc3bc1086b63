"""How is vLLM's API server asked by Segue? `GET /segue/session`, and a WebSocket at `/v1/segue/session`.

An endpoint plugin (`vllm.endpoint_plugins`), loaded where `VLLM_PLUGINS` names `segue`. The first path says what is
there and what was counted; the second is behind vLLM's own key check, as all of `/v1` is, and carries all answers of a
connection. What is said there is in `serving`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import msgspec
import vllm
from fastapi import FastAPI, WebSocket, WebSocketDisconnect
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from segue_vllm import __version__
from segue_vllm.frames import PROTOCOL, Ask
from segue_vllm.kept import REQUEST_IDS, TAIL_IDS
from segue_vllm.outputs import Heard, Outputs, Request
from segue_vllm.serving import Connection, SessionServer
from segue_vllm.versions import is_tried

log = logging.getLogger("vllm.segue")

TOKENS_MAX = int(os.environ.get("SEGUE_VLLM_TOKENS", 32_000_000))
ABOUT, STREAMS = "/segue/session", "/v1/segue/session"
# The WebSocket's code.
NOT_READY = 1013
SELF_TEST_S, SELF_TEST_TOKENS = 60.0, 4

_encode, _params = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(SamplingParams)


class VllmDoor:
    """vLLM's engine."""

    def __init__(self, engine: Any, models: Any) -> None:
        self._models = models
        self.max_model_len = int(engine.model_config.max_model_len)
        # How the model samples where nobody says.
        self._own = dict(engine.model_config.get_diff_sampling_param())
        self._own.pop("max_tokens", None)
        self.outputs = Outputs(engine)

    def adapter(self, model: str) -> Any:
        """The LoRA of this name; None for the model itself. Raises `LookupError`."""
        if any(path.name == model for path in self._models.base_model_paths):
            return None
        try:
            return self._models.lora_requests[model]
        except KeyError:
            raise LookupError(f"The model `{model}` does not exist.") from None

    async def start(
        self, ask: Ask, ids: list[int], room: int, kept: dict[str, Any] | None, heard: Heard
    ) -> Request:
        """Sample after these ids."""
        fields = self._own | msgspec.json.decode(ask.sampling, type=dict[str, Any])
        if (structured := fields.pop("structured_outputs", None)) is not None:
            fields["structured_outputs"] = StructuredOutputsParams(**structured)
        # What cannot be asked for here.
        fields |= {"n": 1, "detokenize": False, "output_kind": RequestOutputKind.DELTA, "stop": []}
        fields["logprobs"] = fields["prompt_logprobs"] = None
        fields["extra_args"] = None if kept is None else {"segue": kept}
        fields["max_tokens"] = min(fields.get("max_tokens") or room, room)
        params = SamplingParams(**fields)
        # As the engine core does, which reads nothing more of anybody when it cannot read one.
        _params.decode(_encode(params))
        return await self.outputs.start(
            f"{REQUEST_IDS}{secrets.token_hex(8)}",
            tokens_input(ids, cache_salt=ask.salt),
            params,
            heard,
            lora_request=self.adapter(ask.model),
            priority=ask.priority,
        )

    async def abort(self, request: Request) -> None:
        """Nobody listens any longer."""
        await self.outputs.abort(request)


class SeguePlugin:
    """The entry point."""

    name = "segue"
    required_tasks = ("generate",)

    def __init__(self) -> None:
        self._server: SessionServer | None = None
        self._door: VllmDoor
        self._reason = ""

    def attach_router(self, app: FastAPI) -> None:
        """Both paths."""

        async def about() -> dict[str, Any]:
            return {} if self._server is None else self._about(self._server)

        async def streams(socket: WebSocket) -> None:
            if self._server is None:
                await socket.close(NOT_READY)
                return
            with suppress(WebSocketDisconnect):
                await Connection(self._server, socket).run()

        app.add_api_route(ABOUT, about, methods=["GET"], include_in_schema=False)
        app.add_api_websocket_route(STREAMS, streams)

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """vLLM is ready."""
        if engine_client is None:
            return
        self._door = door = VllmDoor(engine_client, state.openai_serving_models)
        server = SessionServer(door, TOKENS_MAX)
        door.outputs.flush = server.flush
        if is_tried(vllm.__version__):
            try:
                door.outputs.step_by_step()
            except Exception as error:
                log.warning("segue: tokens come by the public way: %s", error)
        else:
            log.warning("segue: vLLM %s was not tried: only public ways", vllm.__version__)
        self._reason = await _why_not_two(engine_client, door.outputs)
        server.step = 1 if self._reason else 2
        why = f" ({self._reason})" if self._reason else ""
        log.info("segue: sessions by step %d%s", server.step, why)
        self._server = server

    def _about(self, server: SessionServer) -> dict[str, Any]:
        """For those who ask what is there."""
        return {
            "package": "segue-vllm",
            "version": __version__,
            "protocol": PROTOCOL,
            "vllm": vllm.__version__,
            "instance": server.instance,
            "step": server.step,
            "reason": self._reason,
            "stepwise": self._door.outputs.is_stepwise,
            "path": STREAMS,
            "max_model_len": self._door.max_model_len,
            "tokens": server.chains.tokens,
            "tokens_max": server.chains.tokens_max,
            "handles": len(server.chains),
            "evicted": server.chains.evicted,
            **server.counts,
            "refused": server.refused,
        }


async def _why_not_two(engine: Any, outputs: Outputs) -> str:
    """Why the scheduler cannot be asked to go on; empty where it can."""
    chosen = engine.vllm_config.scheduler_config.scheduler_cls
    name = chosen if isinstance(chosen, str) else getattr(chosen, "__module__", "")
    if not str(name).startswith("segue_vllm."):
        return "vLLM runs without --scheduler-cls segue_vllm.scheduler.KeepAsyncScheduler"
    try:
        async with asyncio.timeout(SELF_TEST_S):
            return await self_test(outputs)
    except Exception as error:
        return f"the self-test failed: {type(error).__name__} {error}"


# --- the self-test --------------------------------------------------------------------------------------


class _Collected:
    """What came of one request."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.cached: int | None = None
        self.reason = ""
        self.over = asyncio.Event()

    def tokens(self, ids: Sequence[int], cached: int | None) -> None:
        self.ids += ids
        self.cached = self.cached if cached is None else cached

    def end(self, reason: str, stop: int | str | None) -> None:
        self.reason = reason
        self.over.set()

    def failed(self, status: int, words: str) -> None:
        self.end(words, None)


async def self_test(outputs: Outputs) -> str:
    """Two turns by the core's own memory, whose hashes the scheduler compares with those of the whole prompt; and a
    turn after nothing, which it must refuse. Empty if all is well."""
    first, second = list(range(100, 500)), list(range(600, 640))
    # Other API servers of the same core may test themselves at the same time.
    key = f"self-test-{secrets.token_hex(8)}"
    one = await _asked(outputs, first, {"keep": key})
    if one.reason != "length" or len(one.ids) != SELF_TEST_TOKENS:
        return f"the self-test's first turn ended with {one.reason}"
    length = len(first) + len(one.ids)
    whole = [*first, *one.ids]
    nobody = {"from": "nobody", "length": length, "tail": whole[-TAIL_IDS:], "keep": None}
    refused = await _asked(outputs, second, nobody)
    if refused.reason != "error" or refused.ids:
        return "the scheduler does not refuse what it does not know: it keeps nothing, its log says why"
    going_on = {"from": key, "length": length, "tail": whole[-TAIL_IDS:], "check": True}
    two = await _asked(outputs, second, {"keep": None, **going_on})
    if two.reason != "length" or len(two.ids) != SELF_TEST_TOKENS:
        return "the scheduler keeps nothing, or other hashes than those of the whole prompt: its log says what"
    return ""


async def _asked(outputs: Outputs, ids: list[int], segue: dict[str, Any]) -> _Collected:
    params = SamplingParams(
        max_tokens=SELF_TEST_TOKENS,
        min_tokens=SELF_TEST_TOKENS,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"segue": segue},
    )
    collected = _Collected()
    await outputs.start(
        f"{REQUEST_IDS}test-{secrets.token_hex(8)}", tokens_input(ids), params, collected
    )
    await collected.over.wait()
    return collected
