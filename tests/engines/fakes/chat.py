"""A FAKE chat endpoint: it plays recorded shapes of `/v1/chat/completions` streams. No model is behind it."""

from __future__ import annotations

from dataclasses import dataclass, field

from aiohttp import web

from tests.engines.fakes.server import DONE, Body, Fake, event


@dataclass
class FakeChat(Fake):
    """Answers with these events, whatever it is asked."""

    events: list[Body] = field(default_factory=list)
    has_done: bool = True
    # What it says instead, with this status.
    refuses: tuple[int, str] | None = None
    # Like OpenAI's newer models.
    wants_completion_limit: bool = False
    owned_by: str = ""
    # The models that it lists, and whether it refuses all others.
    names: tuple[str, ...] = ("gpt",)
    is_strict: bool = False
    # Of these models it is said that they are adapters of the first.
    adapters: tuple[str, ...] = ()

    def routes(self) -> list[web.RouteDef]:
        return [
            web.post("/v1/chat/completions", self._completions),
            web.get("/v1/models", self._models),
        ]

    async def _models(self, request: web.Request) -> web.Response:
        cards: list[Body] = [{"id": name, "owned_by": self.owned_by} for name in self.names]
        cards += [{"id": name, "parent": self.names[0]} for name in self.adapters]
        return web.json_response({"object": "list", "data": cards})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self.body_of(request)
        if self.refuses is not None:
            return self.refusal(*self.refuses)
        if self.is_strict and body["model"] not in (*self.names, *self.adapters):
            return self.refusal(404, f"model '{body['model']}' not found")
        if self.wants_completion_limit and "max_tokens" in body:
            return self.refusal(
                400,
                "Unsupported parameter: 'max_tokens' is not supported with this model. "
                "Use 'max_completion_tokens' instead.",
            )
        response = await self.begin(request)
        for n, one in enumerate(self.events):
            await self.pause(request, n)
            await response.write(event(one))
        if self.has_done:
            await response.write(DONE)
        return response


def delta(**fields: object) -> Body:
    """An event with this delta."""
    return {"id": "1", "object": "chat.completion.chunk", "choices": [choice(fields)]}


def choice(fields: Body, finish_reason: str | None = None) -> Body:
    return {"index": 0, "delta": fields, "finish_reason": finish_reason}


def end(finish_reason: str = "stop") -> Body:
    """The event that says why it stopped."""
    return {"id": "1", "object": "chat.completion.chunk", "choices": [choice({}, finish_reason)]}


def usage(prompt: int, completion: int, **details: int) -> Body:
    """The event with the counts, which has no choices."""
    return {
        "id": "1",
        "object": "chat.completion.chunk",
        "choices": [],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "prompt_tokens_details": {"cached_tokens": details.get("cached", 0)},
            "completion_tokens_details": {"reasoning_tokens": details.get("reasoning", 0)},
        },
    }
