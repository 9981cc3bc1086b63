"""A FAKE front of NVIDIA Dynamo. Its events and its refusals were recorded from Dynamo 1.6.1 with simulated workers
(`tests/golden/dynamo`); `make test-dynamo` compares them with the real front. No model is behind it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import cast

from aiohttp import web

from tests.engines.fakes.server import DONE, Body, Fake, event, spoken

KNOWN = frozenset(
    {"model", "prompt", "stream", "stream_options", "max_tokens", "stop_token_ids", "nvext", "seed"}
    | {"temperature", "top_p", "presence_penalty", "frequency_penalty", "logprobs", "cache_salt"}
    | {"guided_json", "guided_regex", "guided_grammar", "return_tokens_as_token_ids"}
)
EXTRAS = frozenset({"completion_token_ids", "worker_id", "timing", "stop_reason"})
NVEXT = frozenset({"extra_fields", "annotations", "agent_hints", "cache_salt"})
OUTPUT_TOKENS_MAX = 1_048_576


@dataclass
class FakeDynamo(Fake):
    """`has_workers`: while it has none, it does not know the model."""

    model: str = "fake"
    has_workers: bool = True
    # `/inference/v1/generate`, which does not stream.
    has_generate: bool = False
    # The worker of each session.
    sessions: dict[str, int] = field(default_factory=dict)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/completions", self._completions),
            web.post("/inference/v1/generate", self._generate),
            web.get("/v1/models", self._models),
            web.get(r"/v1/models/{name:.+}/ready", self._ready),
        ]

    def refusal(self, status: int, message: str) -> web.Response:
        """Its refusals are not inside an `error`."""
        kind = {400: "Bad Request", 404: "Not Found", 503: "Service Unavailable"}
        body = {"message": message, "type": kind.get(status, "Error"), "code": status}
        return web.json_response(body, status=status)

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "created": 1, "owned_by": "nvidia"}
        card |= {"context_window": self.context_tokens}
        return web.json_response({"object": "list", "data": [card] if self.has_workers else []})

    async def _ready(self, request: web.Request) -> web.Response:
        if not self.has_workers or request.match_info["name"] != self.model:
            return self.refusal(404, "Model not found")
        return web.json_response({"model": self.model, "ready": True})

    async def _generate(self, request: web.Request) -> web.Response:
        body = await self.body_of(request)
        if not self.has_generate:
            return self.refusal(404, "Route not found: POST /inference/v1/generate")
        if "token_ids" not in body:
            words = "Failed to deserialize the JSON body into the target type: missing field `token_ids`"
            return self.refusal(400, words)
        error = {"message": "streaming (stream=true) is not implemented", "code": 501}
        return web.json_response({"error": error}, status=501)

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self.body_of(request)
        if not self.has_workers:
            return web.Response(status=404)
        if refused := self._refuse(body):
            return refused
        prompt = cast("list[int]", body["prompt"])
        session = request.headers.get("x-dynamo-session-id", "")
        worker = self.sessions.setdefault(session, 4_335_089_140_298_178_684 + len(self.sessions))
        response = await self.begin(request)
        stops = cast("list[int]", body["stop_token_ids"])
        ids, reason = spoken(self.answer(prompt), stops, cast(int, body["max_tokens"]))
        cached = self.cached(prompt, body.get("cache_salt"))
        ended = reason == "stop" and ids[-1] in stops
        for n, id in enumerate(ids):
            await self.pause(request, n)
            if n == self.fault_at:
                error = {"message": "Internal server error", "type": "internal_server_error"}
                await response.write(event({"error": {**error, "code": 500}}))
                await response.write(DONE)
                return response
            if n < len(ids) - ended:
                await response.write(self._event(worker, [id], f"<{id}>"))
        last = [ids[-1]] if ended else []
        stop = {"stop_reason": ids[-1]} if ended else {}
        await response.write(self._event(worker, last, "", reason, stop))
        usage = {"prompt_tokens": len(prompt), "completion_tokens": len(ids)}
        details = {"audio_tokens": None, "cached_tokens": cached}
        await response.write(
            event(
                self._head() | {"choices": [], "usage": usage | {"prompt_tokens_details": details}}
            )
        )
        await response.write(DONE)
        self.remember([*prompt, *ids], body.get("cache_salt"))
        return response

    def _refuse(self, body: Body) -> web.Response | None:
        nvext = cast(Body, body.get("nvext", {}))
        if unknown := sorted(nvext.keys() - NVEXT):
            words = "Failed to deserialize the JSON body into the target type: unknown field"
            return self.refusal(400, f"{words} `{unknown[0]}`")
        if unknown := sorted(body.keys() - KNOWN):
            names = ", ".join(f"`{name}`" for name in unknown)
            return self.refusal(400, f"Validation: Unsupported parameter(s): {names}")
        wanted = cast(int, body["max_tokens"])
        if wanted < 1:
            words = f"Max tokens must be greater than 0, got {wanted}"
            return self.refusal(400, f"Validation: {words}")
        if wanted > OUTPUT_TOKENS_MAX:
            words = f"Max tokens must not exceed {OUTPUT_TOKENS_MAX}, got {wanted}"
            return self.refusal(400, f"Validation: {words}")
        if body.get("model") != self.model:
            return self.refusal(404, "Model not found")
        assert set(cast("list[str]", nvext["extra_fields"])) <= EXTRAS
        return None

    def _head(self) -> Body:
        head: Body = {"id": "cmpl-1", "created": 1, "model": self.model}
        return head | {"system_fingerprint": None, "object": "text_completion"}

    def _event(
        self,
        worker: int,
        ids: list[int],
        text: str,
        reason: str | None = None,
        stop: Body | None = None,
    ) -> bytes:
        choice: Body = {"text": text, "index": 0}
        if reason is not None:
            choice["finish_reason"] = reason
        at = {"prefill_worker_id": worker, "prefill_dp_rank": 0}
        at |= {"decode_worker_id": worker, "decode_dp_rank": 0}
        nvext: Body = {"worker_id": at, **(stop or {}), "completion_token_ids": ids}
        return event(self._head() | {"choices": [choice], "usage": None, "nvext": nvext})


def shape(value: object) -> object:
    """The keys of a JSON value, whatever is in them."""
    if isinstance(value, dict):
        return {key: shape(one) for key, one in sorted(value.items())}
    return [shape(one) for one in value[:1]] if isinstance(value, list) else type(value).__name__


def events_in(raw: bytes) -> list[Body]:
    """The events of a stream."""
    lines = [line.removeprefix(b"data: ") for line in raw.split(b"\n") if line]
    assert lines[-1] == b"[DONE]"
    return [json.loads(line) for line in lines[:-1]]
