"""Which of the deferred tools does the model mean? The hosted tool `tool_search`.

In: the arguments of a search, and the tools that it may find. Out: the best of them, as definitions to be loaded.
Ranked by SQLite's FTS5 like the document index (docs/decisions/0020-tool-search.md), in a table in memory that lives as
long as the search: a word in a name counts more than one in a description. A tool that is called by its name is always
found. The answer is an item of its own, the `tool_search_output`; nobody outside is asked.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import cast

import msgspec
from msgspec import UNSET, Raw
from msgspec.structs import replace

from segue.documents.words import TOKENIZE, as_match
from segue.seams.tools import (
    AnyHostedKind,
    HostedCall,
    HostedKind,
    HostedTool,
    ToolRequest,
    ToolResult,
)
from segue.wire.codec import as_item
from segue.wire.items import ItemValue, ToolSearchCall, ToolSearchOutput
from segue.wire.tools import CustomTool, FunctionTool, NamespaceTool, Offer, ToolSearchTool

NAME = "tool_search"
# How often the tools of one response are searched for.
SEARCHES_MAX = 16
# What is loaded stays in the prompt for the rest of the chain.
FOUND_MAX = 8
# So much of a text is searched, and of what is looked for: to divide more of it into words would hold the interpreter.
SEARCHED_CHARS_MAX = 32 * 1024
# Of what a namespace is for, which counts for each of its tools: thousands may have the same.
ABOUT_CHARS_MAX = 1_024

TABLE = f"CREATE VIRTUAL TABLE tools USING fts5 (name, namespace, parameters, about, {TOKENIZE})"
ADD = "INSERT INTO tools (rowid, name, namespace, parameters, about) VALUES (?, ?, ?, ?, ?)"
# How much a word counts in each column.
RANK = "SELECT rowid FROM tools WHERE tools MATCH ? ORDER BY bm25(tools, 4, 2.5, 1.5, 1), rowid"

# Where an identifier is divided into words: `getUser_id2` is four words.
BOUNDARY = re.compile(
    r"_|(?<=[a-z])(?=[A-Z0-9])|(?<=[A-Z])(?=[0-9]|[A-Z][a-z])|(?<=[0-9])(?=[A-Za-z])"
)
NULL = Raw(b"null")


class ToolSearch:
    """Searches the tools that the model has not loaded yet."""

    async def call(self, call: HostedCall) -> ToolResult:
        offers = call.scene.deferred if call.scene is not None else ()
        wanted = _texts(msgspec.json.decode(call.arguments))
        found = await asyncio.to_thread(search, wanted, offers)
        return ToolResult("", as_item(_output(call.item_id, [*definitions_of(found)])))


def tool_search() -> HostedTool:
    """The search for tools, which every server has. What the model calls is an offer of the request's own tools."""
    kind: HostedKind[ToolSearchCall, ToolSearchOutput] = HostedKind(
        struct=ToolSearchOutput,
        tool=ToolSearch(),
        request=_request,
        begun=(),
        answer=_answer,
        # The search is over: it has found nothing.
        failed=lambda value, message, code: replace(value, status="completed"),
        stopped=lambda value: replace(value, status="incomplete"),
    )
    return HostedTool(
        name=NAME,
        definitions=(ToolSearchTool,),
        key=lambda definition: NAME,
        kinds=(cast("AnyHostedKind", kind),),
        is_serial=True,
        calls_max=SEARCHES_MAX,
        is_inside=True,
    )


def _request(call: ToolSearchCall) -> ToolRequest:
    return ToolRequest(
        NAME, NAME, "{}" if call.arguments is UNSET else bytes(call.arguments).decode()
    )


def _answer(call: ItemValue, new_id: Callable[[type[ItemValue]], str]) -> ToolSearchOutput | None:
    if not isinstance(call, ToolSearchCall) or call.execution != "server":
        return None
    # Neither item has a call_id: the same letters after the prefix show that they belong together.
    letters = (call.id or "").rpartition("_")[2]
    return replace(_output(f"tso_{letters}", []), status="in_progress")


def _output(
    item_id: str, tools: list[FunctionTool | CustomTool | NamespaceTool]
) -> ToolSearchOutput:
    return ToolSearchOutput(
        id=item_id, call_id=None, execution="server", status="completed", tools=[*tools]
    )


def search(wanted: str, offers: Sequence[Offer]) -> list[Offer]:
    """The tools that fit best, best first; tools that share no word with `wanted` are left out."""
    wanted = wanted[:SEARCHED_CHARS_MAX]
    names = set(re.findall(r"[\w.-]+", wanted.lower()))
    named = dict.fromkeys(
        number
        for number, offer in enumerate(offers)
        if not names.isdisjoint((offer.qualified_name.lower(), offer.tool.name.lower()))
    )
    found = dict.fromkeys((*_ranked(wanted, offers), *named))
    best = sorted(found, key=lambda number: number not in named)
    return [offers[number] for number in best[:FOUND_MAX]]


def _ranked(wanted: str, offers: Sequence[Offer]) -> list[int]:
    """The places of the offers that have any of these words."""
    match = as_match(_divided(wanted))
    if not match:
        return []
    with closing(sqlite3.connect(":memory:")) as database:
        database.execute(TABLE)
        database.executemany(ADD, ((n, *_columns(offer)) for n, offer in enumerate(offers)))
        return [int(number) for (number,) in database.execute(RANK, (match,))]


def _columns(offer: Offer) -> list[str]:
    tool = offer.tool
    texts = (
        tool.name,
        offer.namespace,
        _parameters(tool),
        f"{offer.about[:ABOUT_CHARS_MAX]} {tool.description or ''}",
    )
    return [_divided(text or "") for text in texts]


def _divided(text: str) -> str:
    return BOUNDARY.sub(" ", text[:SEARCHED_CHARS_MAX])


def _parameters(tool: FunctionTool | CustomTool) -> str:
    if isinstance(tool, CustomTool) or not isinstance(tool.parameters, Raw):
        return ""
    match msgspec.json.decode(tool.parameters):
        case {"properties": dict() as properties}:
            return " ".join(properties)
        case _:
            return ""


def definitions_of(offers: Sequence[Offer]) -> list[FunctionTool | CustomTool | NamespaceTool]:
    """Whole definitions; those of one namespace stand in it together."""
    groups: dict[str | int, list[Offer]] = {}
    for number, offer in enumerate(offers):
        groups.setdefault(number if offer.namespace is None else offer.namespace, []).append(offer)
    return [
        NamespaceTool(name=key, description=group[-1].about, tools=[*map(_complete, group)])
        if isinstance(key, str)
        else _complete(group[0])
        for key, group in groups.items()
    ]


def _complete(offer: Offer) -> FunctionTool | CustomTool:
    """A function as responses show it, with its nullable keys."""
    tool = offer.tool
    if isinstance(tool, CustomTool):
        return tool
    return replace(
        tool,
        description=None if tool.description is UNSET else tool.description,
        parameters=NULL if tool.parameters is UNSET else tool.parameters,
        strict=None if tool.strict is UNSET else tool.strict,
    )


def _texts(value: object) -> str:
    """Every text in there: a search may be asked in any shape."""
    match value:
        case str():
            return value
        case list():
            return " ".join(map(_texts, value))
        case dict():
            return " ".join(map(_texts, value.values()))
        case _:
            return ""
