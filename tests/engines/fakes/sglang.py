"""A FAKE SGLang. No SGLang can run here: the shapes of `/generate` and `/abort_request` are read from its source
(0.5.23), never observed. No model is behind it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import cast

from aiohttp import web

from tests.engines.fakes.server import DONE, Body, Fake, event, spoken


@dataclass
class FakeSglang(Fake):
    """`is_incremental`: started with `--incremental-streaming-output`; else each event repeats all ids so far."""

    is_incremental: bool = False
    # How many ids come in one event.
    interval: int = 1
    # How many tokens it speculates ahead.
    drafts: int = 0
    # Started with `--enable-priority-scheduling`, and with `--schedule-low-priority-values-first`.
    takes_priority: bool = False
    is_low_first: bool = False
    # The id that stands for an image, if the model sees.
    image_id: int | None = None
    aborted: list[str] = field(default_factory=list)

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/generate", self._generate),
            web.post("/abort_request", self._abort),
            web.get("/v1/models", self._models),
            web.get("/get_server_info", self._server_info),
            web.get("/get_model_info", self._model_info),
        ]

    async def _models(self, request: web.Request) -> web.Response:
        card = {"id": "default", "object": "model", "max_model_len": self.context_tokens}
        return web.json_response({"object": "list", "data": [card]})

    async def _server_info(self, request: web.Request) -> web.Response:
        said: Body = {
            "speculative_num_draft_tokens": self.drafts or None,
            "max_running_requests": 64,
        }
        said |= {"enable_priority_scheduling": self.takes_priority}
        said |= {"schedule_low_priority_values_first": self.is_low_first}
        return web.json_response(
            {"speculative_algorithm": "EAGLE" if self.drafts else None, **said}
        )

    async def _model_info(self, request: web.Request) -> web.Response:
        return web.json_response({"has_image_understanding": self.image_id is not None})

    async def _abort(self, request: web.Request) -> web.Response:
        body = await self.body_of(request)
        self.aborted.append(cast(str, body["rid"]))
        self.gate.set()
        return web.Response(status=200)

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await self.body_of(request)
        prompt = cast("list[int]", body["input_ids"])
        sampling = cast(Body, body["sampling_params"])
        assert sampling.get("json_schema") is None or isinstance(sampling["json_schema"], str)
        images = cast("list[str]", body.get("image_data", []))
        if prompt.count(self.image_id or -1) != len(images):
            error = {
                "message": "prompt has 0 image placeholder token(s) but 1 image(s) were provided"
            }
            return web.json_response({"error": error}, status=400)
        if len(prompt) >= self.context_tokens:
            message = (
                f"The input ({len(prompt)} tokens) is longer than the model's context length "
                f"({self.context_tokens} tokens)."
            )
            return web.json_response({"error": {"message": message}}, status=400)
        response = await self.begin(request)
        limit = cast("int | None", sampling["max_new_tokens"])
        total = len(prompt) + self.drafts + (limit or 0)
        if total > self.context_tokens:
            message = (
                f"Requested token count exceeds the model's maximum context length of {self.context_tokens} tokens. "
                f"You requested a total of {total} tokens."
            )
            await response.write(event({"error": {"message": message}}))
            await response.write(DONE)
            return response
        limit = self.context_tokens - len(prompt) if limit is None else limit
        stops = cast("list[int]", sampling["stop_token_ids"])
        ids, reason = spoken(self.answer(prompt), stops, limit)
        cached = self.cached(prompt, body.get("extra_key"))
        sent = 0
        for n in range(len(ids)):
            await self.pause(request, n)
            if body["rid"] in self.aborted:
                raise asyncio.CancelledError
            count = n + 1
            is_last = count == len(ids)
            if count % self.interval and not is_last:
                continue
            finish = _finish(reason, ids) if is_last else None
            meta = {
                "id": body["rid"],
                "finish_reason": finish,
                # Each image takes 66 tokens in place of its placeholder.
                "prompt_tokens": len(prompt) + 65 * len(images),
                "completion_tokens": count,
                "cached_tokens": cached,
                "weight_version": "default",
            }
            if n == self.fault_at:
                meta["finish_reason"] = {
                    "type": "abort",
                    "message": "out of memory",
                    "status_code": 503,
                }
            shown = ids[sent:count] if self.is_incremental else ids[:count]
            if body.get("return_logprob"):
                tops = cast(int, body["top_logprobs_num"])
                meta["output_token_logprobs"] = [[-id / 8, id, None] for id in shown]
                meta["output_top_logprobs"] = [
                    [[-n / 64, n, None] for n in range(1, tops + 1)] or None for _ in shown
                ]
            await response.write(event({"text": "…", "output_ids": shown, "meta_info": meta}))
            sent = count
        await response.write(DONE)
        self.remember([*prompt, *ids], body.get("extra_key"))
        return response


def _finish(reason: str, ids: list[int]) -> Body:
    if reason == "length":
        return {"type": "length", "length": len(ids)}
    return {"type": "stop", "matched": ids[-1]}
