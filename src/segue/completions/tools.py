"""Which tools does a client of Chat Completions offer, and which must be called? Its words in, ours out. Pure."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.errors import InvalidRequest, cut_name
from segue.wire.codec import decode_body, encode
from segue.wire.requests import MaybeFlag, MaybeText, RawField, ToolChoiceName, ToolName
from segue.wire.tools import CustomTool, FunctionTool, WebLocation, WebSearchTool


class ChatFunction(Struct, frozen=True):
    """A function; in `functions` it stands by itself."""

    name: str
    description: MaybeText = UNSET
    parameters: RawField = UNSET
    strict: MaybeFlag = UNSET


class ChatGrammar(Struct, frozen=True):
    syntax: str
    definition: str


class CustomFormat(Struct, frozen=True):
    type: Literal["text", "grammar"]
    grammar: ChatGrammar | None = None


class ChatCustom(Struct, frozen=True):
    name: str
    description: MaybeText = UNSET
    format: CustomFormat | None = None


class ChatTool(Struct, frozen=True):
    type: str = "function"
    function: ChatFunction | None = None
    custom: ChatCustom | None = None


class ApproximateLocation(Struct, frozen=True):
    approximate: WebLocation | None = None


class SearchOptions(Struct, frozen=True):
    """`web_search_options`."""

    search_context_size: Literal["low", "medium", "high"] | UnsetType | None = UNSET
    user_location: ApproximateLocation | None = None


class FunctionChoice(Struct, frozen=True):
    name: str


class AllowedChoice(Struct, frozen=True):
    mode: Literal["auto", "required"]
    tools: list[ChatToolName]


class ChatToolName(Struct, frozen=True):
    """One tool of a choice."""

    type: str | None = None
    function: FunctionChoice | None = None
    custom: FunctionChoice | None = None


class ChatChoice(ChatToolName, frozen=True):
    """A tool choice given as an object: a tool, or several that are allowed."""

    allowed_tools: AllowedChoice | None = None


_tools = msgspec.json.Decoder(list[Raw])
_tool = msgspec.json.Decoder(ChatTool)
_function = msgspec.json.Decoder(ChatFunction)
_search = msgspec.json.Decoder(SearchOptions)


def offered_tools(listed: Raw | None, search: Raw | None, *, is_old: bool) -> RawField:
    """The tools of a request: those in its list, of which the old `functions` have no type, and the web search."""
    path = "functions" if is_old else "tools"
    raws = [] if listed is None else decode_body(_tools, listed, path)
    tools: list[FunctionTool | CustomTool | WebSearchTool] = [
        _offer(raw, f"{path}[{index}]", is_old=is_old) for index, raw in enumerate(raws)
    ]
    if search is not None:
        options = decode_body(_search, search, "web_search_options")
        place = options.user_location and options.user_location.approximate
        tools.append(
            WebSearchTool(
                search_context_size=options.search_context_size, user_location=place or UNSET
            )
        )
    return Raw(encode(tools)) if tools else UNSET


def _offer(raw: Raw, path: str, *, is_old: bool) -> FunctionTool | CustomTool:
    if is_old:
        return _function_tool(decode_body(_function, raw, path))
    tool = decode_body(_tool, raw, path)
    match tool:
        case ChatTool(type="function", function=ChatFunction() as function):
            return _function_tool(function)
        case ChatTool(type="function"):
            # As the Responses API has them.
            return _function_tool(decode_body(_function, raw, path))
        case ChatTool(type="custom", custom=ChatCustom() as custom):
            return CustomTool(
                name=custom.name, description=custom.description, format=_custom_format(custom)
            )
        case _:
            raise InvalidRequest(
                f"Invalid value: '{cut_name(tool.type)}'. A tool of this API is a 'function' or 'custom', with the "
                "field of the same name.",
                code="invalid_value",
                param=f"{path}.type",
            )


def _function_tool(function: ChatFunction) -> FunctionTool:
    return FunctionTool(
        name=function.name,
        description=function.description,
        parameters=function.parameters,
        strict=function.strict,
    )


def _custom_format(custom: ChatCustom) -> RawField:
    match custom.format:
        case None:
            return UNSET
        case CustomFormat(grammar=ChatGrammar(syntax, definition)):
            return Raw(encode({"type": "grammar", "syntax": syntax, "definition": definition}))
        case CustomFormat(type=kind):
            return Raw(encode({"type": kind}))


def translate_choice(
    choice: Literal["none", "auto", "required"] | ChatChoice | FunctionChoice | None,
) -> Literal["none", "auto", "required"] | ToolChoiceName | None:
    """The tool that must be called, or those that may be."""
    match choice:
        case FunctionChoice(name):
            return ToolChoiceName(type="function", name=name)
        case ChatChoice(function=None, custom=None, allowed_tools=AllowedChoice(mode, tools)):
            names: list[ToolName] = [_tool_named(tool) for tool in tools]
            return ToolChoiceName(type="allowed_tools", mode=mode, tools=names)
        case ChatChoice():
            return _tool_named(choice)
        case _:
            return choice


def _tool_named(choice: ChatToolName) -> ToolChoiceName:
    match choice:
        case ChatToolName(function=FunctionChoice(name)):
            return ToolChoiceName(type="function", name=name)
        case ChatToolName(custom=FunctionChoice(name)):
            return ToolChoiceName(type="custom", name=name)
        case _:
            raise InvalidRequest(
                "'tool_choice' has none of the fields 'function', 'custom' and 'allowed_tools'.",
                code="invalid_value",
                param="tool_choice",
            )
