"""A FAKE vLLM. The shapes are those recorded from vLLM 0.32 (`/v1/completions` with `return_token_ids`, and
`/inference/v1/generate`); the words of its refusals are vLLM's. No model is behind it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from aiohttp import web

from tests.engines.fakes.server import DONE, Body, Fake, event, spoken


@dataclass
class FakeVllm(Fake):
    """`is_scaled_out`: whether it was started with `--enable-scale-out`."""

    model: str = "fake"
    is_scaled_out: bool = False
    version: str = "0.32.0+cpu"
    # An old one does not know `return_token_ids`.
    gives_ids: bool = True
    # One behind a gateway that hides everything but the endpoint itself.
    lists_models: bool = True
    # Started with `--scheduling-policy priority`.
    takes_priority: bool = False
    # Its Rust front end: `/v1/completions` tells why it ended in an event of its own, without ids.
    ends_apart: bool = False
    # The id that stands for an image, if the model sees.
    image_id: int | None = None
    # What its plugin says of itself, if it has that.
    sessions: dict[str, object] | None = None
    # What it says of itself at /metrics.
    metrics: str = ""
    tokenize: Callable[[str], list[int]] = lambda text: list(text.encode())

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/completions", self._completions),
            web.post("/inference/v1/generate", self._generate),
            web.get("/version", self._version),
            web.get("/segue/session", self._sessions),
            web.get("/metrics", self._metrics),
            web.get("/v1/models", self._models),
            web.post("/tokenize", self._tokenize),
            web.post("/v1/completions/render", self._render),
        ]

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=self.metrics)

    async def _render(self, request: web.Request) -> web.Response:
        """Of its own it samples at 0.3; `/v1/completions` does so by itself, the other endpoint does not."""
        own = {"temperature": 0.3, "top_p": 0.9, "top_k": 20, "stop": [], "output_kind": 2}
        return web.json_response([{"token_ids": [0], "sampling_params": own}])

    async def _sessions(self, request: web.Request) -> web.Response:
        return (
            self.refusal(404, "Not Found")
            if self.sessions is None
            else web.json_response(self.sessions)
        )

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": self.model, "object": "model", "max_model_len": self.context_tokens}
        if not self.lists_models:
            return self.refusal(404, "Not Found")
        return web.json_response({"object": "list", "data": [card]})

    async def _tokenize(self, request: web.Request) -> web.Response:
        """As recorded: of a chat with an image the tokens are counted, if the model sees."""
        body = json.loads(await request.read())
        if "prompt" in body:
            return web.json_response({"tokens": self.tokenize(body["prompt"])})
        (part,) = body["messages"][0]["content"]
        assert part["image_url"]["url"].startswith("data:image/png;base64,")
        if self.image_id is None:
            return self.refusal(400, f"{self.model} is not a multimodal model")
        return web.json_response({"count": 66, "max_model_len": 1, "tokens": [self.image_id] * 66})

    async def _version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": self.version})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self.body_of(request)
        prompt = cast("list[int]", body["prompt"])
        if body.get("model") != self.model:
            return self.refusal(404, f"The model `{body.get('model')}` does not exist.")
        refused = self._refuse_priority(body) or self._refuse(prompt, body)
        if refused is not None:
            return refused
        assert body["stream"] is True
        response = await self.begin(request)
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": self.model}
        ids, reason = spoken(self.answer(prompt), *_limits(body))
        cached = self.cached(prompt, body.get("cache_salt"))
        for n, id in enumerate(ids):
            await self.pause(request, n)
            if n == self.fault_at:
                await response.write(event({"error": {"message": "EngineCore died", "code": 500}}))
                await response.write(DONE)
                return response
            is_last = n == len(ids) - 1
            end: Body = {
                "finish_reason": reason if is_last else None,
                "stop_reason": id if is_last and reason == "stop" else None,
            }
            choice: Body = {"index": 0, "text": f"<{id}>", "logprobs": None}
            choice |= {} if self.ends_apart else end
            if (count := body.get("logprobs")) is not None:
                assert body["return_tokens_as_token_ids"] is True
                tops = {f"token_id:{one}": value for one, value in likeliest(id, count)}
                choice["logprobs"] = {
                    "text_offset": [0],
                    "tokens": [f"token_id:{id}"],
                    "token_logprobs": [logprob(id)],
                    "top_logprobs": [tops],
                }
            if body.get("return_token_ids") and self.gives_ids:
                choice |= {"token_ids": [id], "prompt_token_ids": prompt if n == 0 else None}
            await response.write(event({**head, "choices": [choice], "usage": None}))
            if is_last and self.ends_apart:
                last = {"index": 0, "text": "", "token_ids": [], **end}
                await response.write(event({**head, "choices": [last], "usage": None}))
        await response.write(event({**head, "choices": [], "usage": _usage(prompt, ids, cached)}))
        await response.write(DONE)
        self.remember([*prompt, *ids], body.get("cache_salt"))
        return response

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self.body_of(request)
        if not self.is_scaled_out:
            return self.refusal(403, "Forbidden")
        parts = body.get("content_parts", [])
        if not isinstance(parts, list):
            return self.refusal(
                400, "'loc': 'body.content_parts', 'msg': 'Input should be a valid list'"
            )
        if "token_ids" not in body or "sampling_params" not in body:
            return web.json_response({"detail": [{"type": "missing"}]}, status=422)
        prompt = cast("list[int]", body["token_ids"])
        if prompt.count(self.image_id or -1) != len(parts):
            return self.refusal(400, "Failed to apply prompt replacement for mm_items['image'][0]")
        sampling = cast(Body, body["sampling_params"])
        refused = self._refuse_priority(body) or self._refuse(prompt, sampling)
        if refused is not None:
            return refused
        response = await self.begin(request)
        ids, reason = spoken(self.answer(prompt), *_limits(sampling))
        cached = self.cached(prompt, body.get("cache_salt"))
        for n, id in enumerate(ids):
            await self.pause(request, n)
            is_last = n == len(ids) - 1
            choice: Body = {"index": 0, "token_ids": [id]}
            choice["finish_reason"] = reason if is_last else None
            if (count := sampling.get("logprobs")) is not None:
                tops = likeliest(id, count)
                top = [{"token_id": one, "logprob": value, "rank": 1} for one, value in tops]
                said = {"token_id": id, "logprob": logprob(id), "rank": 2, "top_logprobs": top}
                choice["logprobs"] = {"content": [said]}
            await response.write(event({"request_id": "1", "choices": [choice]}))
        # Each image takes 66 tokens in place of its placeholder.
        usage = _usage([*prompt, *[0] * 65 * len(parts)], ids, cached)
        await response.write(event({"request_id": "1", "choices": [], "usage": usage}))
        await response.write(DONE)
        self.remember([*prompt, *ids], body.get("cache_salt"))
        return response

    def _refuse_priority(self, body: Body) -> web.Response | None:
        if not body.get("priority") or self.takes_priority:
            return None
        words = f"Got priority {body['priority']} but Priority scheduling is not enabled."
        return self.refusal(400, words)

    def _refuse(self, prompt: Sequence[int], sampling: Body) -> web.Response | None:
        wanted = cast(int, sampling["max_tokens"])
        if wanted < 1:
            return self.refusal(400, f"max_tokens must be at least 1, got {wanted}.")
        if not 0 < cast(float, sampling.get("top_p", 1)) <= 1:
            return self.refusal(400, "top_p must be in (0, 1]")
        if wanted > self.context_tokens:
            return self.refusal(
                400,
                f"max_tokens={wanted} cannot be greater than max_model_len={self.context_tokens}. "
                "Please request fewer output tokens.",
            )
        if len(prompt) + wanted > self.context_tokens:
            return self.refusal(
                400,
                f"This model's maximum context length is {self.context_tokens} tokens. However, you "
                f"requested {len(prompt) + wanted} tokens. Please reduce the length of the messages.",
            )
        return None


def logprob(id: int) -> float:
    """What it says of a token that it sampled."""
    return -id / 8


def likeliest(id: int, count: object) -> list[tuple[int, float]]:
    """The sampled token first, as vLLM has it, then those that were likelier."""
    assert isinstance(count, int)
    return [(id, logprob(id)), *((n, -n / 64) for n in range(1, count))][: max(count, 1)]


def _limits(sampling: Body) -> tuple[list[int], int]:
    return cast("list[int]", sampling["stop_token_ids"]), cast(int, sampling["max_tokens"])


def _usage(prompt: Sequence[int], ids: Sequence[int], cached: int) -> Body:
    return {
        "prompt_tokens": len(prompt),
        "completion_tokens": len(ids),
        "total_tokens": len(prompt) + len(ids),
        "prompt_tokens_details": {"cached_tokens": cached},
    }
