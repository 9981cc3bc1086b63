"""What does a web search mean: the functions that a model sees, their arguments, and the tool's own settings?

The contract has one tool, `web_search`, and one type of item for three actions (docs/protocol.md 3.5, 4). A model
is given three functions. Its arguments are parsed leniently.
"""

from __future__ import annotations

from typing import assert_never

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, structs

from segue.wire.items import WebSearchCall
from segue.wire.tools import (
    FunctionTool,
    Offer,
    Tools,
    WebFilters,
    WebSearch,
    WebSearchTool,
    check_names,
    described,
    parameters_of,
)

# The namespace of the three functions.
WEB = "web"
WEB_ABOUT = "Finds and reads pages. Cite what you use by its number in brackets, as in [1]."

# Beyond this a text is no query.
QUERY_CHARS_MAX = 1_000


def _function(name: str, about: str, **arguments: str) -> FunctionTool:
    """A function of texts, all of which must be given."""
    properties = {key: described("string", words) for key, words in arguments.items()}
    parameters = parameters_of({**properties}, *properties)
    return FunctionTool(name=name, description=about, parameters=parameters)


ADDRESS_ABOUT = "The page's address."
WEB_FUNCTIONS = (
    _function(
        "search",
        "Searches for pages. Gives the number, title, address and a few words of each.",
        query="What to look for.",
    ),
    _function("open_page", "Reads a page.", url=ADDRESS_ABOUT),
    _function(
        "find_in_page",
        "Finds the places of a page where some words stand.",
        url=ADDRESS_ABOUT,
        pattern="The words, as they stand there.",
    ),
)

WEB_OFFERS = tuple(
    Offer(one, namespace=WEB, about=WEB_ABOUT, builtin="web_search", execution="server")
    for one in WEB_FUNCTIONS
)


def with_web(tools: Tools, *, is_on: bool) -> Tools:
    """The same tools, with the functions of a web search if there is one among them and it is on, and without them if
    not; the very same if they are so already."""
    has_web = is_on and any(isinstance(one, WebSearchTool) for one in tools.known)
    if has_web == tools.has_web:
        return tools
    others = [one for one in tools.offers if one.builtin != "web_search"]
    offers = (*others, *WEB_OFFERS) if has_web else tuple(others)
    check_names((*offers, *tools.deferred))
    return structs.replace(tools, offers=offers, has_web=has_web)


# The item has no place for what was found.
LOST = "What was found then is not at hand any more."


class UrlSource(Struct, frozen=True, tag_field="type", tag="url"):
    """A page that a search has found."""

    url: str


class SearchAction(Struct, frozen=True, tag_field="type", tag="search", kw_only=True):
    query: str
    queries: list[str] = []
    # Shown where the request asks for them.
    sources: list[UrlSource] | UnsetType = UNSET


class OpenPageAction(Struct, frozen=True, tag_field="type", tag="open_page", kw_only=True):
    url: str


class FindInPageAction(Struct, frozen=True, tag_field="type", tag="find_in_page", kw_only=True):
    pattern: str
    url: str


WebAction = SearchAction | OpenPageAction | FindInPageAction


class _Written(Struct, frozen=True):
    """What a model may write for any of the three functions; `type` where it is an action already."""

    type: str = ""
    query: str = ""
    q: str = ""
    url: str = ""
    pattern: str = ""


_action: msgspec.json.Decoder[WebAction] = msgspec.json.Decoder(WebAction)
_definition: msgspec.json.Decoder[WebSearch] = msgspec.json.Decoder(WebSearch)


def read_action(name: str, arguments: str | bytes) -> WebAction:
    """What the model asks for, by the function's name and its arguments; an action that was made of them is read alike.

    Arguments that cannot be parsed are empty ones, which the tool then reports.
    """
    try:
        written = msgspec.json.decode(arguments or "{}", type=_Written)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        written = _Written()
    match written.type or name:
        case "open_page":
            return OpenPageAction(url=written.url)
        case "find_in_page":
            return FindInPageAction(pattern=written.pattern or written.query, url=written.url)
        case _:
            query = (written.query or written.q)[:QUERY_CHARS_MAX].strip()
            return SearchAction(query=query, queries=[query] if query else [])


def as_call(action: Raw | bytes) -> tuple[str, str]:
    """The function and the arguments with which a model would ask for this action: what it is shown of its past."""
    read = read_action("search", bytes(action))
    match read:
        case SearchAction(query=query):
            arguments = {"query": query}
        case OpenPageAction(url=url):
            arguments = {"url": url}
        case FindInPageAction(url=url, pattern=pattern):
            arguments = {"url": url, "pattern": pattern}
        case _:
            assert_never(read)
    return str(read.__struct_config__.tag), msgspec.json.encode(arguments).decode()


def called_by(action: Raw | bytes) -> str:
    """The whole name of that function."""
    return f"{WEB}.{as_call(action)[0]}"


def words_of_action(action: Raw | bytes) -> str:
    """The output of a search whose results are not stored any more, because a client has sent its item again."""
    try:
        read = _action.decode(action)
    except msgspec.MsgspecError:
        return LOST
    if isinstance(read, SearchAction):
        return "\n".join([LOST, *(source.url for source in read.sources or ())])
    return f"{LOST}\n{read.url}"


def without_sources(call: WebSearchCall) -> WebSearchCall:
    """The same call for a client that has not asked what was found."""
    if not isinstance(call.action, Raw):
        return call
    action = _action.decode(call.action)
    if not isinstance(action, SearchAction) or action.sources is UNSET:
        return call
    bare = structs.replace(action, sources=UNSET)
    return structs.replace(call, action=Raw(msgspec.json.encode(bare)))


def read_definition(definition: Raw | bytes) -> WebSearchTool:
    """The tool as the request gave it, which was checked when the request was."""
    return _definition.decode(definition)


def domains_of(tool: WebSearchTool) -> tuple[list[str], list[str]]:
    """The allowed domains, none for all; and the blocked ones."""
    filters = tool.filters or WebFilters()
    return list(filters.allowed_domains or ()), list(filters.blocked_domains or ())
