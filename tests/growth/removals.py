"""What does the growth fuzzer find when a fix is taken out?

Each removal is a switch, by the name of the fix: it patches the real code, so that it does what it once did. Its rows
are those of the fuzzer that must find it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import segue.border.believed
import segue.border.numbers
import segue.border.one_answer
import segue.engines.client
import segue.mcp.bounded
import segue.mcp.definitions
import segue.messages.routes
import segue.readers.call_tags
import segue.readers.plain_names
import segue.resent.canonical
import segue.schemas.json_schema
import segue.turn.references
import segue.wire.codec
import segue.wire.inner_json
import segue.wire.tools
from segue.engines.upstream import EventStream
from segue.mcp.definitions import ToolRules
from segue.readers.call_tags import _CallTags
from segue.readers.tags import Node, any_of, sequence
from segue.schemas.followed import _Unrolled
from segue.schemas.json_schema import UNIONS, JsonSchema, listed
from segue.seams.access import Seals
from segue.seams.model import Finish, JobStarted
from segue.wire.items import RemoteTool
from segue.wire.tools import McpTool, Offer, ToolDefinition

NO_LIMIT = 2**60
DEPTH_MAX = 8


@dataclass(frozen=True)
class Removal:
    """A fix that can be taken out, what then goes wrong, and which rows find it."""

    what: str
    take_out: Callable[[ExitStack], None]
    rows: Sequence[str]
    # Where a row finds it only at sizes that `make test` does not try.
    is_long: bool = False


def _schema_memory(stack: ExitStack) -> None:
    def types_of(schema: JsonSchema, part: Any, depth: int = 0) -> frozenset[str]:
        if not isinstance(part, dict) or depth > DEPTH_MAX:
            return frozenset()
        said = part.get("type")
        found = {said} if isinstance(said, str) else set()
        choices = [choice for word in UNIONS for choice in listed(part, word)]
        for inner in (*choices, schema.at(part.get("$ref"))):
            found |= types_of(schema, inner, depth + 1)
        return frozenset(found)

    stack.enter_context(patch.object(JsonSchema, "_types_of", types_of))


def _schema_shapes(stack: ExitStack) -> None:
    def trusting(part: Any, word: str) -> Any:
        return part.get(word, []) if isinstance(part, dict) else []

    stack.enter_context(patch.object(segue.schemas.json_schema, "listed", trusting))


def _linear_grammar(stack: ExitStack) -> None:
    def first_of(
        tags: _CallTags, nodes: Sequence[Node], before: Sequence[Node], after: Sequence[Node]
    ) -> Node:
        """Any of them may be the first, and each is written with all that may follow it."""
        return any_of([sequence([node, *after[at + 1 :]]) for at, node in enumerate(nodes)])

    stack.enter_context(patch.object(_CallTags, "_some", first_of))
    stack.enter_context(patch.object(segue.readers.call_tags, "check_size", lambda *_: None))


def _names(stack: ExitStack) -> None:
    plain = segue.readers.plain_names
    stack.enter_context(patch.object(plain, "_digest_name", lambda name, _: plain.plain_name(name)))


def _lists(stack: ExitStack) -> None:
    stack.enter_context(patch.object(_Unrolled, "_count", lambda *_: 0))


def _counts(stack: ExitStack) -> None:
    def believed(_: object, said: JobStarted | Finish) -> JobStarted | Finish:
        return said

    stack.enter_context(patch.object(segue.border.believed, "plausible", believed))


def _whole_answers(stack: ExitStack) -> None:
    stack.enter_context(patch.object(EventStream, "note_whole", lambda _: None))


def _few_values(stack: ExitStack) -> None:
    stack.enter_context(patch.object(segue.border.numbers, "COMMAS_FOR_BRACKET", 64))


def _mcp_pauses(stack: ExitStack) -> None:
    for name in ("CHUNKS_AT_ONCE", "CHUNKS_MAX"):
        stack.enter_context(patch.object(segue.mcp.bounded, name, NO_LIMIT))


def _mcp_lines(stack: ExitStack) -> None:
    async def as_they_come(events: segue.mcp.bounded._Events) -> AsyncIterator[bytes]:
        async for chunk in events._inner:
            yield chunk

    stack.enter_context(patch.object(segue.mcp.bounded._Events, "__aiter__", as_they_come))


def _one_answer(stack: ExitStack) -> None:
    stack.enter_context(patch.object(segue.border.one_answer, "ANSWERS_MAX", NO_LIMIT))


def _sealed_kinds(stack: ExitStack) -> None:
    def opened(seals: Seals, owner: str, sealed: str, path: str) -> str | None:
        body = seals.open(owner, sealed)
        return None if body is None else body.decode()

    for room in (segue.turn.references, segue.messages.routes):
        stack.enter_context(patch.object(room, "open_text", opened))


def _one_search(stack: ExitStack) -> None:
    def each_in_full(definitions: Sequence[ToolDefinition]) -> tuple[Offer, ...]:
        return tuple(offer for tool in definitions for offer in tools._opened(tool, definitions))

    tools = segue.wire.tools
    stack.enter_context(patch.object(tools, "offers_of", each_in_full))


def _rules_once(stack: ExitStack) -> None:
    class Anew(ToolRules):
        """Read for each tool."""

        def __init__(self, definition: McpTool) -> None:
            self._definition = definition

        def allow(self, tool: RemoteTool) -> bool:
            return ToolRules(self._definition).allow(tool)

        def ask(self, tool: RemoteTool) -> bool:
            return ToolRules(self._definition).ask(tool)

    stack.enter_context(patch.object(segue.mcp.definitions, "ToolRules", Anew))


def _slow_numbers(stack: ExitStack) -> None:
    for room in (segue.wire.codec, segue.resent.canonical):
        stack.enter_context(patch.object(room, "slow_numbers", lambda _: 0))
    for room in (segue.wire.inner_json, segue.resent.canonical):
        stack.enter_context(patch.object(room, "is_slow_text", lambda _: False))


def _pauses(stack: ExitStack) -> None:
    stack.enter_context(patch.object(segue.engines.client, "USED_BYTES_MAX", NO_LIMIT))


def _threads(stack: ExitStack) -> None:
    async def here(call: Callable[..., object], *args: object, **named: object) -> object:
        return call(*args, **named)

    stack.enter_context(patch.object(asyncio, "to_thread", here))


REMOVALS: dict[str, Removal] = {
    "schema-memory": Removal(
        "a union of references to itself is walked n to the fifth times",
        _schema_memory,
        ("types, references of a part to itself",),
    ),
    "schema-shapes": Removal(
        "a keyword of a schema that is null, not a list, fails the turn",
        _schema_shapes,
        ("types, any shape",),
    ),
    "linear-grammar": Removal(
        "the grammar of a forced call grows with the square of its optional properties",
        _linear_grammar,
        ("calls in gemma4, optional properties",),
    ),
    "names": Removal("two tools have one name at a chat endpoint", _names, ("names of tools",)),
    "lists": Removal(
        "a list of a billion items is written out",
        _lists,
        ("items of a list that is written out",),
    ),
    "counts": Removal(
        "what an engine counts is believed",
        _counts,
        ("engine: lies about usage", "engine: negative usage"),
    ),
    "sealed-kinds": Removal(
        "what was sealed as something else fails the turn that it is given to",
        _sealed_kinds,
        ("any value, Responses: seals", "any value, Messages"),
    ),
    "one-search": Removal(
        "each of many searches for tools lists all that can be found",
        _one_search,
        ("searches for tools", "searches for tools, in an item"),
    ),
    "rules-once": Removal(
        "what is allowed of a remote server is read again for each of its tools",
        _rules_once,
        ("tools of an MCP server, by name",),
    ),
    "whole-answers": Removal(
        "what an engine does after the end of its answer costs the answer",
        _whole_answers,
        ("engine: streams that break off", "engine: much after the end"),
    ),
    "few-values": Removal(
        "an event of an engine has two million token ids",
        _few_values,
        ("vllm: ids of one event", "sglang: ids of one event"),
        is_long=True,
    ),
    "mcp-pauses": Removal(
        "the pieces of an answer of an MCP server are read without a pause",
        _mcp_pauses,
        ("MCP server: pieces of an event",),
        is_long=True,
    ),
    "mcp-lines": Removal(
        "what is no event reaches the library for the protocol",
        _mcp_lines,
        ("MCP server: blank lines", "MCP server: comments"),
        is_long=True,
    ),
    "one-answer": Removal(
        "all interim answers of a page are kept and worked off at once",
        _one_answer,
        ("page: interim answers",),
    ),
    "slow-numbers": Removal(
        "numbers that take the JSON library 250 times as long as others are read like those",
        _slow_numbers,
        (
            "slow numbers in arguments",
            "slow numbers of an item",
            "slow numbers of a tool",
            "slow numbers of a format",
        ),
    ),
    "pauses": Removal(
        "what an engine says at once is worked off at once",
        _pauses,
        ("engine: deltas at once",),
        is_long=True,
    ),
    "threads": Removal(
        "long texts are read, and prompts compared, on the event loop",
        _threads,
        ("words", "messages in another order"),
        is_long=True,
    ),
}


@contextmanager
def without(name: str) -> Iterator[None]:
    """The product without this fix."""
    with ExitStack() as stack:
        REMOVALS[name].take_out(stack)
        yield
