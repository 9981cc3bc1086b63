"""How does a turn use a web search? The hosted tool `web_search`.

The contract has one tool and one type of item for three actions (docs/protocol.md 3.5, 4); a model is given three
functions. What was found is for the model, and for clients that ask for it; an item that a client sends back has no
place for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec
from msgspec import UNSET, Raw, Struct, structs

from segue.seams.tools import (
    AnyHostedKind,
    HostedKind,
    HostedTool,
    Tool,
    ToolRequest,
    ToolResult,
)
from segue.web.cite import cite
from segue.wire.calls import WEB
from segue.wire.codec import encode
from segue.wire.effects import Effects
from segue.wire.events import WebSearchCompleted, WebSearchInProgress, WebSearchSearching
from segue.wire.items import ItemValue, SearchAction, WebAction, WebSearchCall
from segue.wire.requests import Create
from segue.wire.tools import (
    FunctionTool,
    Offer,
    Tools,
    WebSearchTool,
    described,
    parameters_of,
)

NAME = "web_search"
ABOUT = "Finds and reads pages. Cite what you use by its number in brackets, as in [1]."
# The value of `include` that shows what a search has found.
SOURCES = "web_search_call.action.sources"
# Ours, for APIs whose clients send back what was found: the text that the model has read, and its key in the action.
TEXT = "segue:web_search_call.action.text"
TEXT_KEY = "segue:text"
LOST = "What was found then is not at hand any more."


def _function(name: str, about: str, **arguments: str) -> FunctionTool:
    """A function of texts, all of which must be given."""
    properties = {key: described("string", words) for key, words in arguments.items()}
    parameters = parameters_of({**properties}, *properties)
    return FunctionTool(name=name, description=about, parameters=parameters)


ADDRESS_ABOUT = "The page's address."
FUNCTIONS = (
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
OFFERS = tuple(
    Offer(function, namespace=WEB, about=ABOUT, builtin=NAME, execution="server")
    for function in FUNCTIONS
)


def web_search(tool: Tool | None) -> HostedTool:
    """The search with this tool. Without one a definition is accepted, and the model does not see it."""

    def offers(tools: Tools, effects: Effects, tools_before: Tools | None) -> Sequence[Offer]:
        return OFFERS if tool is not None else ()

    return HostedTool(
        name=NAME,
        definitions=(WebSearchTool,),
        key=lambda definition: NAME,
        kinds=(_kind(tool),),
        offers=offers,
        words=words_of,
        public=_public,
        cite=cite,
        scope=NAME,
        # Sources are numbered through the whole response.
        is_serial=True,
    )


def _kind(tool: Tool | None) -> AnyHostedKind:
    kind: HostedKind[WebSearchCall, WebSearchCall] = HostedKind(
        struct=WebSearchCall,
        tool=tool,
        request=_request,
        begun=(WebSearchInProgress, WebSearchSearching),
        ended=lambda value: WebSearchCompleted,
        failed=lambda value, message, code: structs.replace(value, status="failed"),
        stopped=lambda value: structs.replace(value, status="incomplete"),
    )
    return cast("AnyHostedKind", kind)


def _request(value: WebSearchCall) -> ToolRequest:
    action = bytes(value.action).decode() if isinstance(value.action, Raw) else "{}"
    return ToolRequest(NAME, NAME, action)


# --- what clients and models read -----------------------------------------------------------------


class _Read(Struct, frozen=True, rename={"text": TEXT_KEY}):
    text: str | None = None


_action: msgspec.json.Decoder[WebAction] = msgspec.json.Decoder(WebAction)
_read = msgspec.json.Decoder(_Read)
_fields = msgspec.json.Decoder(dict[str, Raw])


def words_of(value: ItemValue) -> str | None:
    """The output of a search that a client has sent again: what was read then, if it is there, or where that was."""
    if not isinstance(value, WebSearchCall) or not isinstance(value.action, Raw):
        return None
    try:
        if text := _read.decode(value.action).text:
            return text
        action = _action.decode(value.action)
    except msgspec.MsgspecError:
        return LOST
    if isinstance(action, SearchAction):
        return "\n".join([LOST, *(source.url for source in action.sources or ())])
    return f"{LOST}\n{action.url}"


def _public(result: ToolResult, begun: ItemValue, create: Create) -> ItemValue:
    value, include = result.item.value, create.include or ()
    if not isinstance(value, WebSearchCall):
        return value
    shown = value if SOURCES in include else without_sources(value)
    return with_text(shown, result.text) if TEXT in include else shown


def with_text(call: WebSearchCall, text: str) -> WebSearchCall:
    """The same call with what the model has read of it."""
    action = _fields.decode(call.action) if isinstance(call.action, Raw) else {}
    return structs.replace(call, action=Raw(encode({**action, TEXT_KEY: text})))


def without_sources(call: WebSearchCall) -> WebSearchCall:
    """The same call for a client that has not asked what was found."""
    if not isinstance(call.action, Raw):
        return call
    action = _action.decode(call.action)
    if not isinstance(action, SearchAction) or action.sources is UNSET:
        return call
    bare = structs.replace(action, sources=UNSET)
    return structs.replace(call, action=Raw(encode(bare)))
