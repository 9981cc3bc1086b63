"""What stands after the server under test, so that calls and failures can be made to happen?

A chat endpoint without a model, and an endpoint for responses without state. It looks for a script in the last user
message that has one (`target.script`), and plays the step whose number is the count of answers since then; the last
step repeats. Without a script it answers `Hello.`. A step may have `text`, `reasoning`, `calls`, `echo` (the answer is
what the endpoint was sent, as JSON), `finish`, `fail` (an HTTP status, with `error` instead of the usual one), `cut`
(the stream breaks), `pause_s` (before the first word), `pieces` (how many deltas), `gap_s` (between them),
`needs_choice` (there are calls only if the request has this `tool_choice`). Text ends before a `stop` of the
request, which the answer names as vLLM does.
`GET /conform/state` counts requests, for cases that look whether the answer to a client that left was stopped.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count
from typing import cast

from aiohttp import web

from segue_conform.case import Json
from segue_conform.target import MARK
from segue_conform.upstream_responses import as_chat, events_of, messages_of, response_of

MODEL = "conform"
DEFAULT: Json = {"text": "Hello."}
FAILURE: Json = {
    "message": "The script says so.",
    "type": "server_error",
    "param": None,
    "code": None,
}
# No script may hold a server longer.
PAUSE_S_MAX = 20.0


@dataclass
class State:
    """What the endpoint has been asked."""

    running: int = 0
    answered: int = 0
    aborted: int = 0
    numbers: Iterator[int] = field(default_factory=lambda: count(1))


def text_in(content: object) -> str:
    """The text of a message, whether it is a string or a list of parts."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(str(part.get("text", "")) for part in parts if isinstance(part, dict))


def step_for(messages: list[Json]) -> Json:
    """The step that is to be played for these messages."""
    for at in range(len(messages) - 1, -1, -1):
        _, mark, written = text_in(messages[at].get("content")).partition(MARK)
        if mark and messages[at].get("role") == "user":
            steps, _ = json.JSONDecoder().raw_decode(written)
            answers = sum(message.get("role") == "assistant" for message in messages[at:])
            return cast(Json, steps[min(answers, len(steps) - 1)])
    return DEFAULT


def echo(body: Json) -> str:
    """What the endpoint was sent, for cases that look at what a model would read."""
    messages = [
        {
            "role": message.get("role"),
            "text": text_in(message.get("content")),
            "calls": [call["function"]["name"] for call in message.get("tool_calls") or []],
        }
        for message in body.get("messages", [])
    ]
    sent = {
        "messages": messages,
        "tools": [tool.get("function", {}).get("name") for tool in body.get("tools") or []],
        "tool_choice": choice_in(body),
        "max_tokens": body.get("max_tokens") or body.get("max_completion_tokens"),
        "format": (body.get("response_format") or {}).get("type"),
    }
    return json.dumps(sent)


def choice_in(body: Json) -> object:
    """The choice of tools: a word, or the name of the function that is forced."""
    choice = body.get("tool_choice")
    return choice.get("function", {}).get("name") if isinstance(choice, dict) else choice


def played(body: Json, step: Json) -> Json:
    """The step as this request makes it."""
    if step.get("echo"):
        step = {**step, "text": echo(body)}
    if step.get("needs_choice", choice_in(body)) != choice_in(body):
        step = {**step, "calls": [], "text": f"The choice is {choice_in(body)}."}
    stops = body.get("stop") or []
    for stop in [stops] if isinstance(stops, str) else stops:
        if (text := str(step.get("text") or "")) and stop in text and not step.get("echo"):
            step = {**step, "text": text.partition(stop)[0], "stop_reason": stop}
    return step


class Upstream:
    """The endpoint."""

    def __init__(self) -> None:
        self.state = State()

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.router.add_post("/v1/chat/completions", self._completions)
        app.router.add_post("/v1/responses", self._responses)
        app.router.add_get("/health", self._counts)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/conform/state", self._counts)
        return app

    async def _models(self, request: web.Request) -> web.Response:
        row = {
            "id": MODEL,
            "object": "model",
            "created": 0,
            "owned_by": "conform",
            "max_model_len": 131_072,
        }
        return web.json_response({"object": "list", "data": [row]})

    async def _counts(self, request: web.Request) -> web.Response:
        state = self.state
        return web.json_response(
            {"running": state.running, "answered": state.answered, "aborted": state.aborted}
        )

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        if not are_messages(body.get("messages")):
            return _bad("messages must be a list of messages")
        return await self._answer(request, body, step_for(body["messages"]), _chat)

    async def _responses(self, request: web.Request) -> web.StreamResponse:
        body = await _body(request)
        if not (isinstance(body.get("input"), str) or are_messages(body.get("input"))):
            return _bad("input must be a text or a list of items")
        return await self._answer(request, body, step_for(messages_of(body)), _response)

    async def _answer(
        self, request: web.Request, body: Json, step: Json, chunks_of: Chunks
    ) -> web.StreamResponse:
        self.state.running += 1
        try:
            await asyncio.sleep(min(float(step.get("pause_s", 0)), PAUSE_S_MAX))
            if "fail" in step:
                failure = {"error": step.get("error", FAILURE)}
                return web.json_response(failure, status=int(step["fail"]))
            whole, chunks = chunks_of(body, step, next(self.state.numbers))
            answer = (
                await self._play(request, step, chunks)
                if body.get("stream")
                else web.json_response(whole)
            )
            self.state.answered += 1
            return answer
        except (asyncio.CancelledError, ConnectionError):
            self.state.aborted += 1
            raise
        finally:
            self.state.running -= 1

    async def _play(
        self, request: web.Request, step: Json, chunks: list[Json]
    ) -> web.StreamResponse:
        """The answer as a stream; one that is to break off does so in its middle."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for chunk in chunks[: max(1, len(chunks) // 2)] if step.get("cut") else chunks:
            name = f"event: {chunk['type']}\n" if "type" in chunk else ""
            await response.write(f"{name}data: {json.dumps(chunk)}\n\n".encode())
            await asyncio.sleep(float(step.get("gap_s", 0)))
        if step.get("cut"):
            assert request.transport is not None
            request.transport.close()
            return response
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


async def _body(request: web.Request) -> Json:
    """The body of a request; an empty one where it is no JSON object."""
    try:
        body = await request.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


def are_messages(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(message, dict) for message in value)


def _bad(words: str) -> web.Response:
    error = {"message": words, "type": "invalid_request_error", "param": None, "code": None}
    return web.json_response({"error": error}, status=400)


# A request, a step and a number: the whole answer, and the same as a stream.
Chunks = Callable[[Json, Json, int], tuple[Json, list[Json]]]


def _chat(body: Json, step: Json, number: int) -> tuple[Json, list[Json]]:
    step = played(body, step)
    with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
    return whole(step, number), list(deltas(step, number, with_usage))


def _response(body: Json, step: Json, number: int) -> tuple[Json, list[Json]]:
    step = played(as_chat(body), step)
    response = response_of(body, step, number)
    return response, list(events_of(response))


def calls_in(step: Json, number: int) -> list[Json]:
    return [
        {
            "index": at,
            "id": f"call_{number}_{at}",
            "type": "function",
            "function": {"name": call["name"], "arguments": json.dumps(call.get("arguments", {}))},
        }
        for at, call in enumerate(step.get("calls", []))
    ]


def ending_of(step: Json) -> Json:
    """Why the answer ends, and at which of the request's stops."""
    reason = step.get("finish") or ("tool_calls" if step.get("calls") else "stop")
    return {"finish_reason": reason, "stop_reason": step.get("stop_reason")}


def usage_of(step: Json) -> Json:
    written = max(1, len(str(step.get("text", ""))) // 4)
    return {"prompt_tokens": 20, "completion_tokens": written, "total_tokens": 20 + written}


def whole(step: Json, number: int) -> Json:
    """An answer without a stream."""
    message: Json = {"role": "assistant", "content": step.get("text")}
    if step.get("reasoning"):
        message["reasoning_content"] = step["reasoning"]
    if step.get("calls"):
        message["tool_calls"] = calls_in(step, number)
    choice = {"index": 0, "message": message, **ending_of(step)}
    head = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 0, "model": MODEL}
    return {**head, "choices": [choice], "usage": usage_of(step)}


def deltas(step: Json, number: int, with_usage: bool) -> Iterator[Json]:
    """The same as a stream."""
    head = {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion.chunk",
        "created": 0,
        "model": MODEL,
    }

    def chunk(delta: Json, **ending: object) -> Json:
        return {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None} | ending]}

    yield chunk({"role": "assistant", "content": ""})
    for piece in pieces(str(step.get("reasoning", "")), step):
        yield chunk({"reasoning_content": piece})
    for piece in pieces(str(step.get("text", "")), step):
        yield chunk({"content": piece})
    for call in calls_in(step, number):
        arguments = call["function"]["arguments"]
        yield chunk({"tool_calls": [{**call, "function": {**call["function"], "arguments": ""}}]})
        for piece in pieces(arguments, step):
            yield chunk(
                {"tool_calls": [{"index": call["index"], "function": {"arguments": piece}}]}
            )
    yield chunk({}, **ending_of(step))
    if with_usage:
        yield {**head, "choices": [], "usage": usage_of(step)}


def pieces(text: str, step: Json) -> Iterator[str]:
    size = max(1, -(-len(text) // int(step.get("pieces", 4))))
    return (text[at : at + size] for at in range(0, len(text), size))
