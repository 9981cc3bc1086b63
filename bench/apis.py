"""What does a turn cost on each API? CPU of the server for the same agent loop on Responses, Messages and Chat.

    python -m bench apis [--context 100000] [--rounds 10] [--ways http-full,messages,…]

Full history: the coding session of `segue bench` (19 KB of tools, 2 KB a tool output, calls before it up to the
context) is sent again each turn by each API, streamed, unstored. Chained: `previous_response_id` over HTTP (stored, as
it must be) beside Messages' `thread`, with system and tools left out as the SDKs do, and sent again as Claude Code
does. All ways take turns in one run against one server with the scripted engine; figures are medians of rounds. What
is chained should be flat over several contexts. The exit status is 1 if a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from bench.exchange import Reply, exchange
from bench.peer import cpu_s, server
from segue_bench.client import ClientConnection, ServerAddress, local
from segue_bench.plan import CODEX
from segue_bench.rounds import interleaved, print_table
from segue_bench.server import ServerProcess
from segue_bench.workload import Workload, WorkloadMaker, tool_output

TURNS = 8
OUTPUT_TOKENS_MAX = 1_000
Items = list[dict[str, Any]]


class ApiLoop:
    """One conversation, from parts that are encoded already: no client could make a request faster."""

    path = ""
    is_chained = False

    def __init__(self, address: ServerAddress, workload: Workload) -> None:
        self._connection = ClientConnection(address)
        self._said = self.translated([json.loads(item) for item in workload.opening])
        self.tools: Items = json.loads(workload.tools)
        self.last = self.send()

    def translated(self, items: Items) -> list[bytes]:
        """The history so far in this API's words."""
        raise NotImplementedError

    def answered(self, reply: Reply) -> list[bytes]:
        """An answer as the client sends it back."""
        raise NotImplementedError

    def result(self, call_id: str, output: str) -> bytes:
        """What a tool said."""
        raise NotImplementedError

    def body(self) -> bytes:
        """The next request."""
        raise NotImplementedError

    def send(self) -> Reply:
        return exchange(self._connection, self.path, self.body())

    def turn(self, output: str) -> Reply:
        """Answer the open call with this output."""
        kept = [] if self.is_chained else [*self._said, *self.answered(self.last)]
        self._said = kept + [self.result(call.id, output) for call in self.last.calls]
        self.last = self.send()
        return self.last

    def close(self) -> None:
        self._connection.close()


class ResponsesLoop(ApiLoop):
    path = "/v1/responses"

    def translated(self, items: Items) -> list[bytes]:
        return [msgspec.json.encode(item) for item in items]

    def answered(self, reply: Reply) -> list[bytes]:
        text = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": []}
        said: list[Any] = [{"type": "message", "role": "assistant", "content": [text]}]
        said += [
            {
                "type": "function_call",
                "call_id": call.id,
                "name": call.name,
                "arguments": call.arguments,
            }
            for call in reply.calls
        ]
        return [msgspec.json.encode(item) for item in said]

    def result(self, call_id: str, output: str) -> bytes:
        return tool_output(call_id, output)

    def body(self, more: bytes = b'"store":false,') -> bytes:
        tools = msgspec.json.encode(self.tools)
        head = b'{"model":"scripted","stream":true,' + more + b'"tools":' + tools
        return head + b',"input":[' + b",".join(self._said) + b"]}"


class ChainedLoop(ResponsesLoop):
    is_chained = True

    def body(self, more: bytes = b"") -> bytes:
        if hasattr(self, "last"):
            more = b'"previous_response_id":"' + self.last.id.encode() + b'",'
        return super().body(more)


class MessagesLoop(ApiLoop):
    path = "/v1/messages"

    def translated(self, items: Items) -> list[bytes]:
        self.system = items[0]["content"][0]["text"]
        said: list[Any] = []
        for item in items[1:]:
            match item["type"]:
                case "message" if item["role"] == "user":
                    said.append({"role": "user", "content": item["content"][0]["text"]})
                case "message":
                    words = {"type": "text", "text": item["content"][0]["text"]}
                    said.append({"role": "assistant", "content": [words]})
                case "function_call":
                    call = {"type": "tool_use", "id": item["call_id"], "name": item["name"]}
                    call["input"] = json.loads(item["arguments"])
                    said[-1]["content"].append(call)
                case _:
                    said.append(json.loads(self.result(item["call_id"], item["output"])))
        return [msgspec.json.encode(message) for message in said]

    def answered(self, reply: Reply) -> list[bytes]:
        blocks: list[Any] = [
            {"type": "thinking", "thinking": text, "signature": sign}
            for text, sign in reply.thoughts
        ]
        blocks += [{"type": "text", "text": reply.text}] if reply.text else []
        blocks += [
            {"type": "tool_use", "id": call.id, "name": call.name}
            | {"input": json.loads(call.arguments or "{}")}
            for call in reply.calls
        ]
        return [msgspec.json.encode({"role": "assistant", "content": blocks})]

    def result(self, call_id: str, output: str) -> bytes:
        block = {"type": "tool_result", "tool_use_id": call_id, "content": output}
        return msgspec.json.encode({"role": "user", "content": [block]})

    def head(self) -> bytes:
        fields = ("name", "description")
        tools = [
            {**{f: tool[f] for f in fields}, "input_schema": tool["parameters"]}
            for tool in self.tools
        ]
        encoded = msgspec.json.encode({"system": self.system, "tools": tools})[1:-1]
        return encoded + b","

    def body(self) -> bytes:
        return self.written(self.head())

    def written(self, head: bytes) -> bytes:
        first = b'{"model":"scripted","max_tokens":%d,"stream":true,' % OUTPUT_TOKENS_MAX
        return first + head + b'"messages":[' + b",".join(self._said) + b"]}"


class MarkedLoop(MessagesLoop):
    """With the marker that Claude Code moves to the last block of each request."""

    def body(self) -> bytes:
        last = self._said[-1]
        message = json.loads(last)
        if isinstance(message["content"], str):
            message["content"] = [{"type": "text", "text": message["content"]}]
        message["content"][-1]["cache_control"] = {"type": "ephemeral"}
        self._said[-1] = msgspec.json.encode(message)
        body = super().body()
        self._said[-1] = last
        return body


class ThreadLoop(MessagesLoop):
    """`thread`: only what is new, system and tools left out as the SDKs do."""

    is_chained = True

    def body(self) -> bytes:
        if not hasattr(self, "last"):
            return self.written(self.head() + b'"thread":{"type":"create"},')
        return self.written(self.head_again() + self.parent())

    def head_again(self) -> bytes:
        return b""

    def parent(self) -> bytes:
        parent = self.last.id.encode()
        return b'"thread":{"type":"continue","previous_message_id":"' + parent + b'"},'


class ThreadWithHeadLoop(ThreadLoop):
    """The same with system and tools in each request, as Claude Code does."""

    def head_again(self) -> bytes:
        return self.head()


class ChatLoop(ApiLoop):
    path = "/v1/chat/completions"

    def translated(self, items: Items) -> list[bytes]:
        said: list[Any] = [{"role": "system", "content": items[0]["content"][0]["text"]}]
        for item in items[1:]:
            match item["type"]:
                case "message":
                    said.append({"role": item["role"], "content": item["content"][0]["text"]})
                case "function_call":
                    function = {"name": item["name"], "arguments": item["arguments"]}
                    call = {"id": item["call_id"], "type": "function", "function": function}
                    said[-1]["tool_calls"] = [call]
                case _:
                    said.append(json.loads(self.result(item["call_id"], item["output"])))
        return [msgspec.json.encode(message) for message in said]

    def answered(self, reply: Reply) -> list[bytes]:
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reply.calls
        ]
        message = {"role": "assistant", "content": reply.text or None, "tool_calls": calls}
        return [msgspec.json.encode(message)]

    def result(self, call_id: str, output: str) -> bytes:
        return msgspec.json.encode({"role": "tool", "tool_call_id": call_id, "content": output})

    def body(self) -> bytes:
        fields = ("name", "description", "parameters")
        tools = [
            {"type": "function", "function": {f: tool[f] for f in fields}} for tool in self.tools
        ]
        usage = {"include_usage": True}
        head = {"model": "scripted", "stream": True, "stream_options": usage, "tools": tools}
        return msgspec.json.encode(head)[:-1] + b',"messages":[' + b",".join(self._said) + b"]}"


class ApiWay(NamedTuple):
    """A way, what it is compared with, and how much of that it may cost."""

    make: type[ApiLoop]
    against: str = ""
    bar: float | None = None


WAYS = {
    "http-full": ApiWay(ResponsesLoop),
    "messages": ApiWay(MessagesLoop, "http-full", 1.15),
    "messages-marked": ApiWay(MarkedLoop, "http-full", 1.15),
    "chat": ApiWay(ChatLoop, "http-full", 1.10),
    "http-chained": ApiWay(ChainedLoop),
    "thread": ApiWay(ThreadLoop, "http-chained", 1.15),
    "thread-with-head": ApiWay(ThreadWithHeadLoop, "http-chained"),
}


class ApiCost(NamedTuple):
    """A turn of one way: CPU of the server, wall, bytes sent, events."""

    cpu_ms: float
    wall_ms: float
    sent: float
    events: float


def measure(ways: Sequence[str], context: int, rounds: int) -> dict[str, ApiCost]:
    """The medians of each way at this context, all in one run."""
    maker = WorkloadMaker(CODEX, 1)
    # The opening, and a round that is not counted.
    calls, turns = maker.calls_before(context), 1 + TURNS * (rounds + 1)
    workload = maker.workload(calls, 1.0, turns)
    with server(json.loads(maker.script(calls, turns)), "--context-tokens", "1000000") as process:
        address = local(process.port)
        loops = {way: WAYS[way].make(address, workload) for way in ways}
        candidates = {way: partial(_round, process, loop) for way, loop in loops.items()}
        results = interleaved(candidates, rounds)
        for loop in loops.values():
            loop.close()
    return {way: _median(costs) for way, costs in results.items()}


def _round(process: ServerProcess, loop: ApiLoop) -> ApiCost:
    output = (__doc__ or "") * 3
    before = cpu_s(process)
    replies = [loop.turn(output[: CODEX.tool_output_bytes]) for _ in range(TURNS)]
    cpu = cpu_s(process) - before
    if any(not reply.calls for reply in replies):
        raise SystemExit("bench: the script is shorter than the loop")
    return ApiCost(
        1e3 * cpu / TURNS,
        1e3 * statistics.mean(reply.turn_s for reply in replies),
        statistics.mean(reply.sent_bytes for reply in replies),
        statistics.mean(reply.events for reply in replies),
    )


def _median(costs: Sequence[ApiCost]) -> ApiCost:
    return ApiCost(*(statistics.median(column) for column in zip(*costs, strict=True)))


def main(arguments: Sequence[str]) -> int:
    """Print the table; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(prog="python -m bench apis", description=__doc__)
    parser.add_argument("--context", type=int, nargs="+", default=[100_000], metavar="TOKENS")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--ways", default=",".join(WAYS), metavar="WAY,…", help=", ".join(WAYS))
    options = parser.parse_args(arguments)
    ways = options.ways.split(",")
    if unknown := [way for way in ways if way not in WAYS]:
        parser.error(f"--ways: '{unknown[0]}' is not one of {', '.join(WAYS)}")
    rows, is_missed = [], False
    for context in options.context:
        costs = measure(ways, context, options.rounds)
        for name, cost in costs.items():
            way = WAYS[name]
            base = costs.get(way.against)
            ratio = cost.cpu_ms / base.cpu_ms if base else None
            is_missed |= bool(ratio and way.bar and ratio > way.bar)
            shown = f"{ratio:.2f} x {way.against}" if ratio else "-"
            bar = f"{way.bar} x" if way.bar else "-"
            rows.append(
                (name, context, cost.events, cost.sent / 1e3, cost.wall_ms, cost.cpu_ms, shown, bar)
            )
    print_table(
        "way {}|history {:,}|events {:.0f}|sent kB {:.1f}|wall ms {:.2f}|CPU ms {:.2f}|CPU {}|bar {}",
        rows,
    )
    return int(is_missed)
