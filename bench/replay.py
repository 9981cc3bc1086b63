"""How is a recorded session of a client played again, so that it hears this server's answers and sends them back?

A recording (`tests/golden/wires`) has the requests as the client sent them, in order, and what the model said to each,
which becomes the script of the scripted engine. When a request is played, what this server really answered stands in
the place of the recorded answers, in the client's own spelling: ids of calls, signatures and thoughts are the server's;
the order of keys, the spelling of arguments, what was left out and all the rest is the client's.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.exchange import Body, Reply
from tests.clients.recordings import read_recording

TURN_PATHS = ("/v1/messages", "/v1/chat/completions")
LAST_ANSWER = {"text": "That is all."}


@dataclass(eq=False)
class Recorded:
    """A request for a turn: what the model says to it, the request that it goes on from, its conversation."""

    path: str
    headers: dict[str, str]
    body: Body
    turn: Body | None
    parent: Recorded | None = None
    conversation: int = 0
    # What this server answered.
    reply: Reply | None = None

    @property
    def messages(self) -> list[Body]:
        messages: list[Body] = self.body["messages"]
        return messages

    @property
    def turns_before(self) -> int:
        """Answers in its history; several messages of the model in a row are one."""
        roles = [message["role"] for message in self.messages]
        return sum(
            role == "assistant" and before != "assistant"
            for before, role in zip(["", *roles], roles, strict=False)
        )


@dataclass
class Recording:
    """All requests for turns of a session, in order."""

    name: str
    requests: list[Recorded] = field(default_factory=list)

    @property
    def api(self) -> str:
        return "Messages" if self.requests[0].path == TURN_PATHS[0] else "Chat"

    def scripts(self) -> list[Body]:
        """For each conversation what the scripted engine answers, by how many answers the history has."""
        answers: dict[int, dict[int, Body]] = {}
        for request in self.requests:
            turns = answers.setdefault(request.conversation, {})
            turns[request.turns_before] = request.turn or LAST_ANSWER
        return [
            {"turns": [turns.get(n, LAST_ANSWER) for n in range(max(turns) + 1)]}
            for _, turns in sorted(answers.items())
        ]


def load(name: str) -> Recording:
    """The recording of this name; turns of threads are left out: they send no history."""
    found = Recording(name)
    for sent in read_recording(name):
        where = sent.path.partition("?")[0]
        if where in TURN_PATHS and "thread" not in sent.body:
            request = Recorded(where, sent.headers, sent.body, sent.turn)
            request.parent = _parent(found.requests, request)
            if request.parent is not None:
                request.conversation = request.parent.conversation
            elif found.requests:
                request.conversation = 1 + max(one.conversation for one in found.requests)
            found.requests.append(request)
    return found


def _parent(requests: Sequence[Recorded], request: Recorded) -> Recorded | None:
    """The longest request so far whose messages are the beginning of these."""
    canonical = [meaning(message) for message in request.messages]
    fitting = [
        other
        for other in requests
        if len(other.messages) < len(request.messages)
        and other.path == request.path
        and [meaning(message) for message in other.messages] == canonical[: len(other.messages)]
    ]
    return max(fitting, key=lambda other: len(other.messages), default=None)


def meaning(message: Body) -> str:
    """A message without what clients change when they send it again: markers, and a list for a text."""

    def without(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: without(one) for key, one in value.items() if key != "cache_control"}
        return [without(one) for one in value] if isinstance(value, list) else value

    message = without(message)
    if isinstance(message.get("content"), str):
        message["content"] = [{"type": "text", "text": message["content"]}]
    return json.dumps(message, sort_keys=True)


def body_for(request: Recorded, model: str) -> Body:
    """The request with this server's answers in the place of the recorded ones."""
    messages = json.loads(json.dumps(request.messages))
    ids: dict[str, str] = {}
    before = request.parent
    while before is not None:
        place = len(before.messages)
        if before.reply is not None and messages[place]["role"] == "assistant":
            ids |= _answer(messages[place], before.reply)
        before = before.parent
    for message in messages:
        if message.get("tool_call_id") in ids:
            message["tool_call_id"] = ids[message["tool_call_id"]]
        for block in message["content"] if isinstance(message.get("content"), list) else ():
            if block.get("tool_use_id") in ids:
                block["tool_use_id"] = ids[block["tool_use_id"]]
    return {**request.body, "model": model, "messages": messages}


def free_body_for(request: Recorded, model: str, output_tokens_max: int) -> Body:
    """The same for a model that says what it likes: its words as they are, and outputs as the user's text.

    Where a tool was searched for, the recorded call stays after the words: what it found can only follow a call.
    """
    messages: list[Body] = json.loads(json.dumps(request.messages))
    before = request.parent
    while before is not None:
        place = len(before.messages)
        if before.reply is not None and messages[place]["role"] == "assistant":
            _speak(messages, place, before.reply.text)
        before = before.parent
    fields = {**request.body, "model": model, "messages": messages, "temperature": 0}
    fields["max_tokens"] = output_tokens_max
    for name in ("max_completion_tokens", "thinking", "reasoning_effort", "output_config"):
        fields.pop(name, None)
    return fields


def _speak(messages: list[Body], place: int, text: str) -> None:
    """Put words into the place of the answer at this place, and make text of the outputs after it."""
    message = messages[place]
    blocks = message["content"] if isinstance(message.get("content"), list) else None
    if finds_tools(messages[place + 1 :][:1]):
        words = [{"type": "text", "text": text}] if text.strip() else []
        message["content"] = words + [b for b in blocks or () if b["type"] == "tool_use"]
        return
    for name in ("tool_calls", "reasoning_content", "reasoning"):
        message.pop(name, None)
    message["content"] = text if blocks is None else [{"type": "text", "text": text}]
    for after in messages[place + 1 :]:
        if after["role"] == "assistant":
            return
        if after["role"] == "tool":
            after["role"] = "user"
            del after["tool_call_id"]
        elif isinstance(after["content"], list):
            after["content"] = [_as_text(block) for block in after["content"]]


def _as_text(block: Body) -> Body:
    if block["type"] != "tool_result":
        return block
    content = block.get("content") or ""
    said = content if isinstance(content, str) else json.dumps(content)
    return {"type": "text", "text": said or "-"}


def finds_tools(messages: Sequence[Body]) -> bool:
    """Whether these messages are the result of a search for tools."""
    return '"tool_reference"' in json.dumps(messages)


def _answer(message: Body, reply: Reply) -> dict[str, str]:
    """Put an answer into the place of the recorded one; the ids of calls, recorded and new."""
    ids: dict[str, str] = {}
    calls = iter(reply.calls)
    thoughts = iter(reply.thoughts)
    content = message.get("content") or ""
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    assert "".join(texts).strip() == reply.text.strip()
    for block in list(blocks):
        if block["type"] == "tool_use":
            call = next(calls)
            assert (block["name"], block["input"]) == (
                call.name,
                json.loads(call.arguments or "{}"),
            )
            ids[block["id"]], block["id"] = call.id, call.id
        elif block["type"] == "thinking":
            if (thought := next(thoughts, None)) is None:
                blocks.remove(block)
            else:
                block["thinking"], block["signature"] = thought
    for recorded in message.get("tool_calls") or ():
        call = next(calls)
        function = recorded["function"]
        assert (function["name"], json.loads(function["arguments"])) == (
            call.name,
            json.loads(call.arguments),
        )
        ids[recorded["id"]], recorded["id"] = call.id, call.id
    for key in ("reasoning_content", "reasoning"):
        if key in message:
            message[key] = reply.thoughts[0][0] if reply.thoughts else ""
    return ids
