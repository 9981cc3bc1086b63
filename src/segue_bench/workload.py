"""What is sent in one agent loop? Its texts, tools, history, and the script of the model.

A shape and a seed in, JSON values out; the same seed on the same Python gives the same bytes. The texts are source code
of the standard library, because a tokenizer's speed depends on what it reads. Nothing here
uses a socket.
"""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

Item = dict[str, object]

# More than the longest history needs; files are taken in the order of their names.
CORPUS_CHARS = 4_000_000
TOOL_NAME = "read_file"
# Tokens of the call and of the words before it in an answer, in SmolLM2's vocabulary: the rest is padding.
CALL_TOKENS = 46
WORDS_TOKENS = 8
# Source code in SmolLM2's vocabulary, and a call without its output. Only a first guess: a probe corrects it.
BYTES_PER_TOKEN = 3.1
CALL_BYTES = 200
WORDS = "I will look at the next file"


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """The sizes of an agent session."""

    instructions_bytes: int
    tools_bytes: int
    tool_output_bytes: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """One session: the tools, the input before the loop, and the tool outputs of the loop."""

    tools: bytes
    opening: tuple[bytes, ...]
    outputs: tuple[str, ...]


class WorkloadMaker:
    """Makes workloads of one shape."""

    def __init__(self, shape: WorkloadShape, seed: int) -> None:
        self.shape = shape
        self._seed = seed
        self.tools = encoded_tools(shape.tools_bytes)

    def calls_before(self, context_tokens: int) -> int:
        """How many tool calls a history of about this many tokens has."""
        head_bytes = self.shape.instructions_bytes + len(self.tools)
        history_bytes = context_tokens * BYTES_PER_TOKEN - head_bytes
        return max(0, round(history_bytes / (self.shape.tool_output_bytes + CALL_BYTES)))

    def workload(self, calls: int, scale: float, turns: int) -> Workload:
        """A session after this many tool calls, their outputs scaled, and the outputs for the turns to come."""
        source = random.Random(self._seed)
        opening = [
            _message("developer", _text(source, self.shape.instructions_bytes)),
            _message("user", "Find the fault and mend it."),
        ]
        for number in range(calls):
            opening += _exchange(source, number, round(self.shape.tool_output_bytes * scale))
        if calls:
            opening.append(_message("user", "Go on."))
        outputs = tuple(_text(source, self.shape.tool_output_bytes) for _ in range(turns))
        return Workload(self.tools, tuple(map(msgspec.json.encode, opening)), outputs)

    def script(self, calls: int, turns: int) -> bytes:
        """What the scripted engine answers to such a workload: a call each turn, and at the end only words."""
        pad = max(0, self.shape.output_tokens - CALL_TOKENS)
        call = {"name": TOOL_NAME, "arguments": {"path": "src/main.py", "line": 20}}
        going = {"text": WORDS, "pad_tokens": pad, "calls": [call]}
        last = {"text": WORDS, "pad_tokens": max(0, self.shape.output_tokens - WORDS_TOKENS)}
        # The opening is answered by the first entry after the history, the last turn by the last.
        return msgspec.json.encode({"turns": [going] * (calls + turns) + [last]})


def tool_output(call_id: str, output: str) -> bytes:
    """A tool's output, as an item."""
    return msgspec.json.encode(
        {"type": "function_call_output", "call_id": call_id, "output": output}
    )


def user_message(text: str) -> bytes:
    """A user's message with this text, for a model that called no tool."""
    return msgspec.json.encode(_message("user", text))


def encoded_tools(size: int) -> bytes:
    """Tools of about this many bytes, as a coding agent sends them."""
    tools = [_tool(TOOL_NAME)]
    while len(encoded := msgspec.json.encode(tools)) < size:
        tools.append(_tool(f"tool_{len(tools)}"))
    return encoded


def _tool(name: str) -> Item:
    properties: Item = {"path": {"type": "string"}, "line": {"type": "integer"}}
    for number in range(6):
        properties[f"option_{number}"] = {
            "type": "string",
            "description": "What this option changes, and when it is better left out.",
        }
    return {
        "type": "function",
        "name": name,
        "description": "What this tool does, what it needs, and what it gives back. " * 5,
        "parameters": {"type": "object", "properties": properties, "required": ["path"]},
        "strict": False,
    }


def _message(role: str, text: str) -> Item:
    return {"type": "message", "role": role, "content": [{"type": "input_text", "text": text}]}


def _exchange(source: random.Random, number: int, size: int) -> Iterator[Item]:
    """Words and a call of the model, and the output of the tool."""
    words = {"type": "output_text", "text": WORDS + f", number {number}."}
    yield {"type": "message", "role": "assistant", "content": [words]}
    yield {
        "type": "function_call",
        "call_id": f"call_before_{number}",
        "name": TOOL_NAME,
        "arguments": '{"path":"src/main.py","line":20}',
    }
    yield {
        "type": "function_call_output",
        "call_id": f"call_before_{number}",
        "output": _text(source, size),
    }


def _text(source: random.Random, size: int) -> str:
    """This many characters of source code, from a random place."""
    corpus = _corpus()
    start = source.randrange(max(1, len(corpus) - size))
    return corpus[start : start + size]


@cache
def _corpus() -> str:
    """The source of the standard library, or ours where it is not installed as text."""
    library = Path(sysconfig.get_paths()["stdlib"])
    texts = []
    size = 0
    for path in sorted(library.glob("*.py")) or sorted(Path(__file__).parents[1].rglob("*.py")):
        text = path.read_bytes().decode("ascii", "replace")
        texts.append(text)
        size += len(text)
        if size > CORPUS_CHARS:
            break
    return "".join(texts)
