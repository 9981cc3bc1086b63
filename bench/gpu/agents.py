"""How does Claude Code's loop run through each server? Its recorded head, a long first text, and a call each turn.

System, tools and first messages are those of a recording (`tests/golden/wires`); what the opening says becomes one long
first text of the user. After every answer the client runs a recorded call and sends its output; no model of random
weights calls tools, so the words of an answer are the model's and its call is the recorded one. Three kinds: *plain*;
*reminder*: a system message after every output; *search*: every third output is that of ToolSearch, and tools that were
deferred are in the list from then on. On Chat the same is said in Chat's words.
"""

from __future__ import annotations

import json
import os
import time
from typing import Any

import msgspec

from bench.exchange import Body, exchange
from bench.gpu.talk import Place, Talk, TalkDetails, TalkUsage
from bench.replay import load

RECORDED = "claude-code"
KINDS = ("plain", "reminder", "search")
REMINDER = "<total_tokens>{} tokens left</total_tokens>"
TOKENS = 5_000_000
SEARCH_EVERY = 3
DEFERRED = 24


def deferred_tool(number: int) -> Body:
    """A tool that is not shown to the model until a search finds it."""
    schema = {"type": "object", "properties": {"path": {"type": "string"}}, "required": ["path"]}
    words = f"Tool number {number} of a server that has many. " * 6
    return {"name": f"mcp__many__tool_{number}", "description": words, "input_schema": schema}


class AgentTalk(Talk):
    """Claude Code's loop on Messages."""

    path = "/v1/messages"
    kind = "plain"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        head = load(RECORDED).requests[0].body
        self._system, self._tools = head["system"], list(head["tools"])
        self._first, *self._others = head["messages"]
        # No two sessions have the same text, so that none finds the blocks of another after its tools.
        self._grown = [f"Session {os.urandom(8).hex()}."]
        self._turns = 0
        self._found = 0

    def say(self, role: str, text: str) -> None:
        """Before the first turn: more of the first text. Later: the output of the tool, in the place of the newest."""
        if not self._turns:
            self._grown.append(text)
        else:
            self.said += [msgspec.json.encode(message) for message in self._result(text)]

    @property
    def _is_search(self) -> bool:
        """Whether the call of the last answer was ToolSearch."""
        return self.kind == "search" and self._turns % SEARCH_EVERY == 0

    def _call(self) -> Body:
        name, given = (
            ("ToolSearch", {"query": "select:many"})
            if self._is_search
            else (
                "Bash",
                {"command": f"cat file{self._turns}", "description": "Read a file"},
            )
        )
        return {"type": "tool_use", "id": f"toolu_{self._turns}", "name": name, "input": given}

    def _opening(self) -> list[Body]:
        first = [*self._first["content"], {"type": "text", "text": "\n".join(self._grown)}]
        return [{"role": "user", "content": first}, *self._others]

    def _answered(self, text: str) -> Body:
        words = [{"type": "text", "text": text}] if text.strip() else []
        return {"role": "assistant", "content": [*words, self._call()]}

    def _result(self, text: str) -> list[Body]:
        content: Any = text
        if self._is_search:
            tool = deferred_tool(self._found % DEFERRED)
            self._found += 1
            self._add_tool({**tool, "defer_loading": True})
            content = [{"type": "tool_reference", "tool_name": tool["name"]}]
        result = {"type": "tool_result", "tool_use_id": f"toolu_{self._turns}", "content": content}
        messages: list[Body] = [{"role": "user", "content": [result]}]
        if self.kind == "reminder":
            messages.append({"role": "system", "content": self._reminder()})
        return messages

    def _reminder(self) -> str:
        return REMINDER.format(TOKENS - 1_000 * self._turns)

    def _add_tool(self, tool: Body) -> None:
        """By name, where the client puts it: among the others."""
        if all(other["name"] != tool["name"] for other in self._tools):
            self._tools = sorted([*self._tools, tool], key=lambda other: other["name"])

    def _headers(self) -> dict[str, str]:
        return {"anthropic-version": "2023-06-01"}

    def _fields(self) -> Body:
        return {
            "model": "m",
            "system": self._system,
            "tools": self._tools,
            "max_tokens": self.place.output_tokens,
            "temperature": self.place.temperature,
            "stream": True,
        }

    def _body(self) -> bytes:
        if not self._turns:
            self.said = [msgspec.json.encode(message) for message in self._opening()]
        fields = msgspec.json.encode(self._fields())[1:]
        return b'{"messages":[' + b",".join(self.said) + b"]," + fields

    def _exchange(self, body: bytes) -> TalkUsage:
        began = time.perf_counter()
        reply = exchange(self.connection, self.path, body, self._headers())
        self._first_at, self._last_at = began + reply.ttft_s, began + reply.turn_s
        self._turns += 1
        self.said.append(msgspec.json.encode(self._answered(reply.text)))
        cached = TalkDetails(reply.cached_tokens)
        return TalkUsage(reply.prompt_tokens, reply.output_tokens, cached)


class AgentChatTalk(AgentTalk):
    """The same loop as an agent on Chat Completions has it."""

    path = "/v1/chat/completions"

    def _opening(self) -> list[Body]:
        first, *others = super()._opening()
        system = "\n\n".join(block["text"] for block in self._system)
        user = "\n\n".join(block["text"] for block in first["content"])
        messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
        for other in others:
            content = other["content"]
            words = content if isinstance(content, str) else content[0]["text"]
            messages.append({"role": other["role"], "content": words})
        return messages

    def _answered(self, text: str) -> Body:
        call = self._call()
        function = {"name": call["name"], "arguments": json.dumps(call["input"])}
        calls = [{"id": call["id"], "type": "function", "function": function}]
        return {"role": "assistant", "content": text, "tool_calls": calls}

    def _result(self, text: str) -> list[Body]:
        result, *reminder = super()._result(text)
        block = result["content"][0]
        content = block["content"]
        words = content if isinstance(content, str) else f"Found {content[0]['tool_name']}."
        return [{"role": "tool", "tool_call_id": block["tool_use_id"], "content": words}, *reminder]

    def _headers(self) -> dict[str, str]:
        return {}

    def _fields(self) -> Body:
        tools = [
            {
                "type": "function",
                "function": {
                    "name": tool["name"],
                    "description": tool.get("description", ""),
                    "parameters": tool["input_schema"],
                },
            }
            for tool in self._tools
            if "input_schema" in tool
        ]
        fields = {**super()._fields(), "tools": tools, "stream_options": {"include_usage": True}}
        del fields["system"]
        fields["max_completion_tokens"] = fields.pop("max_tokens")
        return fields


def of_kind(talk: type[AgentTalk], kind: str) -> type[Talk]:
    """The loop of this kind."""
    return type(f"{kind.title()}{talk.__name__}", (talk,), {"kind": kind})


# By each way: what stands in front of vLLM, and how the client talks.
AGENT_WAYS: dict[str, tuple[str, type[Talk]]] = {
    f"{name}-{kind}": (gateway, of_kind(talk, kind))
    for kind in KINDS
    for name, gateway, talk in (
        ("cc-messages", "", AgentTalk),
        ("cc-chat", "", AgentChatTalk),
        ("cc-segue-messages", "segue", AgentTalk),
        ("cc-segue-chat", "segue", AgentChatTalk),
    )
}
