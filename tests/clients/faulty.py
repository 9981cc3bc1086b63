"""A FAKE chat endpoint that plays a script, and breaks or falls silent where a test says so. No model is behind it."""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.clients.task import Turns
from tests.engines.fakes.chat import FakeChat, delta, end, usage
from tests.engines.fakes.server import DONE, Body, event


@dataclass
class FaultyChat(FakeChat):
    """Answers with the entry of its script that follows the tool outputs that it was shown."""

    turns: Turns = field(default_factory=list)
    # Other scripts, for conversations in which a user has said these words.
    others: dict[str, Turns] = field(default_factory=dict)
    # Requests, counted from one, whose connection breaks in the middle of the answer.
    broken: frozenset[int] = frozenset()
    # Requests before whose answer nothing is said for so many seconds.
    silent_s: dict[int, float] = field(default_factory=dict)
    # A longer request is refused, in the words of vLLM.
    body_bytes_max: int | None = None
    asked: int = 0

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await self.body_of(request)
        self.asked += 1
        size = len(json.dumps(body))
        if self.body_bytes_max is not None and size > self.body_bytes_max:
            most = self.body_bytes_max // 4
            return self.refusal(
                400,
                f"This model's maximum context length is {most} tokens. However, your request has {size // 4} input "
                "tokens. Please reduce the length of the input messages.",
            )
        number = self.asked
        response = await self.begin(request)
        await asyncio.sleep(self.silent_s.get(number, 0))
        turns = self._script_for(body)
        events = spoken(turns[min(turn_of(body), len(turns) - 1)])
        for index, one in enumerate(events):
            if number in self.broken and index == 1:
                assert request.transport is not None
                request.transport.abort()
                raise asyncio.CancelledError
            await response.write(event(one))
        await response.write(DONE)
        return response

    def _script_for(self, body: Body) -> Turns:
        messages = body["messages"]
        assert isinstance(messages, list)
        users = json.dumps([one["content"] for one in messages if one["role"] == "user"])
        return next((turns for words, turns in self.others.items() if words in users), self.turns)


def turn_of(body: Body) -> int:
    """How many tools have answered already: half an answer that a client kept does not count."""
    messages = body["messages"]
    assert isinstance(messages, list)
    answered = sum(1 for one in messages if one["role"] == "tool")
    # smolagents sends calls and results as text.
    return answered or sum(1 for one in messages if "Calling tools:" in json.dumps(one))


def spoken(turn: dict[str, Any]) -> list[Body]:
    """The events of one scripted turn."""
    pieces = re.findall(r"\s*\S+\s*", turn.get("text", ""))
    words = [delta(role="assistant", content=piece) for piece in pieces]
    calls = [
        delta(
            role="assistant",
            tool_calls=[
                {
                    "index": index,
                    "id": f"call_{index}_{id(one)}",
                    "type": "function",
                    "function": {"name": one["name"], "arguments": json.dumps(one["arguments"])},
                }
            ],
        )
        for index, one in enumerate(turn.get("calls", []))
    ]
    begin = [delta(role="assistant", content="Well. ")] if calls else []
    return [
        *begin,
        *words,
        *calls,
        end("tool_calls" if calls else "stop"),
        usage(turn.get("usage", 100), 10),
    ]
