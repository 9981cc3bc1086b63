"""Which tools does a request of this API offer? Its `tools` in, tools of the Responses API out. Pure.

A deferred tool is not in the list: it is shown where the history names it (`Tooling.deferred`), so that nothing before
that place changes. Tools that clients run and whose schema they leave to the server are functions here. A tool that the
server would have to run and that is not set up is refused by its name: a model would make up what it returns.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from segue.errors import InvalidRequest, cut_name
from segue.messages.blocks import CacheControl, decode
from segue.messages.history import Ttl, longer
from segue.wire.codec import TOOLS_MAX, encode
from segue.wire.requests import COUNT_MAX, ToolChoiceName, ToolName
from segue.wire.tools import FUNCTION_NAME, described, parameters_of

# The date of a tool's version: `bash_20250124`.
DATE = re.compile(r"_\d{8}\Z")


class Location(Struct, frozen=True):
    city: str | None = None
    region: str | None = None
    country: str | None = None
    timezone: str | None = None


class GivenTool(Struct, frozen=True, kw_only=True):
    """A tool of a request; which fields count depends on its type."""

    type: str | None = None
    name: str | None = None
    description: str | None = None
    input_schema: Raw | UnsetType = UNSET
    strict: bool | None = None
    defer_loading: bool | None = None
    cache_control: CacheControl | None = None
    # Of a web search.
    max_uses: Annotated[int, Meta(gt=0, le=COUNT_MAX)] | None = None
    allowed_domains: list[str] | None = None
    blocked_domains: list[str] | None = None
    user_location: Location | None = None
    # Of tools of a remote server.
    mcp_server_name: str | None = None
    configs: dict[str, ToolsetConfig] | None = None
    default_config: ToolsetConfig | None = None


class ToolsetConfig(Struct, frozen=True):
    enabled: bool | None = None
    defer_loading: bool | None = None


class RemoteServer(Struct, frozen=True, kw_only=True):
    name: str
    url: str
    authorization_token: str | None = None
    tool_configuration: RemoteServerTools | None = None


class RemoteServerTools(Struct, frozen=True):
    enabled: bool | None = None
    allowed_tools: list[str] | None = None


class ToolChoice(Struct, frozen=True):
    type: str
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Tooling(Struct, frozen=True):
    """The tools of a request."""

    # Those that the model sees from the beginning, as JSON.
    listed: tuple[Raw, ...] = ()
    # Those that it sees where the history names them.
    deferred: Mapping[str, Raw] = {}
    names: tuple[str, ...] = ()
    ttl: Ttl = ""
    # Tools of the server that the request asks for: `web_search`, `mcp`, `tool_search`.
    served: frozenset[str] = frozenset()
    # Remote servers whose tools are asked for.
    toolsets: tuple[GivenTool, ...] = ()
    # How often the tools of the server may be called.
    uses_max: int | None = None

    @property
    def raw(self) -> Raw:
        """The list."""
        return Raw(b"[" + b",".join(map(bytes, self.listed)) + b"]")


NO_TOOLING = Tooling()
_tools = msgspec.json.Decoder(list[Raw] | None)
_tool = msgspec.json.Decoder(GivenTool)


def translate_tools(raw: Raw) -> Tooling:
    """The tools of a request."""
    raws = decode(_tools, raw, "tools") or []
    if len(raws) > TOOLS_MAX:
        raise InvalidRequest(f"tools: at most {TOOLS_MAX} tools, not {len(raws)}", param="tools")
    listed: list[Raw] = []
    names: dict[str, None] = {}
    deferred: dict[str, Raw] = {}
    # The deferred ones, as a search of ours finds them.
    findable: list[Raw] = []
    served: set[str] = set()
    toolsets: list[GivenTool] = []
    ttl: Ttl = ""
    uses_max: int | None = None
    for index, each in enumerate(raws):
        place = f"tools.{index}"
        tool = decode(_tool, each, place)
        if tool.cache_control is not None:
            ttl = longer(ttl, tool.cache_control)
        kind = _kind(tool)
        if kind in SERVED:
            served.add(SERVED[kind])
            uses_max = tool.max_uses if kind == "web_search" else uses_max
            if kind == "mcp_toolset":
                # It has no schema; a field that it should not have would hold the whole body.
                toolsets.append(msgspec.structs.replace(tool, input_schema=UNSET))
            else:
                listed.append(Raw(encode(_served(tool, kind))))
            continue
        function = _function(tool, kind, place)
        definition = Raw(encode(function))
        name = str(function["name"])
        if name in deferred or name in names:
            raise InvalidRequest(f"tools: Tool names must be unique: {cut_name(name)}", param=place)
        if tool.defer_loading:
            deferred[name] = definition
            findable.append(Raw(encode({**function, "defer_loading": True})))
        else:
            listed.append(definition)
            names[name] = None
    if "tool_search" in served:
        listed += findable
    return Tooling(
        tuple(listed), deferred, tuple(names), ttl, frozenset(served), tuple(toolsets), uses_max
    )


def translate_definition(raw: Raw, place: str) -> tuple[str, Raw]:
    """A tool that is defined among the messages: its name, and the function."""
    tool = decode(_tool, raw, place)
    function = _function(tool, _kind(tool), place)
    return str(function["name"]), Raw(encode(function))


def _kind(tool: GivenTool) -> str:
    """What the type of a tool says without its date; a plain function has none."""
    if tool.type is None or tool.type == "custom":
        return ""
    return DATE.sub("", tool.type)


def _function(tool: GivenTool, kind: str, place: str) -> dict[str, object]:
    if kind and kind not in CLIENT_TOOLS:
        problem = f"the tool '{cut_name(tool.type)}' is not set up on this server"
        raise InvalidRequest(f"{place}: {problem}", code="unsupported_value", param=place)
    usual = CLIENT_TOOLS.get(kind)
    name = tool.name or (usual.name if usual else "")
    if not FUNCTION_NAME.fullmatch(name):
        problem = "String should match pattern '^[a-zA-Z0-9_-]{1,128}$'"
        raise InvalidRequest(f"{place}.name: {problem}", param=f"{place}.name")
    schema = tool.input_schema
    if usual is not None:
        schema = usual.parameters
    elif schema is UNSET:
        where = f"{place}.input_schema"
        raise InvalidRequest(f"{where}: Field required", param=where)
    elif not bytes(schema).lstrip().startswith(b"{"):
        where = f"{place}.input_schema"
        raise InvalidRequest(f"{where}: Input should be an object", param=where)
    function: dict[str, object] = {"type": "function", "name": name}
    description = tool.description or (usual.description if usual else None)
    if description is not None:
        function["description"] = description
    return {**function, "parameters": schema, "strict": bool(tool.strict)}


# --- tools that clients run, with the schema that the API has published for them --------------------


class ClientTool(Struct, frozen=True):
    name: str
    description: str
    parameters: Raw


def _numbers(about: str) -> dict[str, object]:
    items = {"type": "integer"}
    return {"type": "array", "items": items, "minItems": 2, "maxItems": 2, "description": about}


_BASH = ClientTool(
    "bash",
    "Runs a command in a bash shell that stays open between calls.",
    parameters_of(
        {
            "command": described("string", "The command; required unless the shell is restarted."),
            "restart": described("boolean", "Whether to start the shell anew."),
        }
    ),
)
_PATH = described("string", "The path of the file or folder.")
_VIEW_RANGE = _numbers("The first and the last line to show, from 1; -1 is the end.")
_EDITS: dict[str, object] = {
    "path": _PATH,
    "view_range": _VIEW_RANGE,
    "file_text": described("string", "For `create`: the contents of the new file."),
    "old_str": described("string", "For `str_replace`: what to replace; it must occur once."),
    "new_str": described("string", "For `str_replace`: what to put in its place."),
    "insert_line": described("integer", "For `insert`: the line after which to insert."),
    "insert_text": described("string", "For `insert`: what to insert."),
}


def _commands(*names: str) -> dict[str, object]:
    return {"type": "string", "enum": [*names], "description": "What to do."}


_EDITOR = ClientTool(
    "str_replace_based_edit_tool",
    "Shows, creates and edits files.",
    parameters_of(
        {"command": _commands("view", "create", "str_replace", "insert"), **_EDITS},
        "command",
        "path",
    ),
)
_MEMORY = ClientTool(
    "memory",
    "Keeps notes in files below /memories, which last from one conversation to the next.",
    parameters_of(
        {
            "command": _commands("view", "create", "str_replace", "insert", "delete", "rename"),
            **_EDITS,
            "old_path": described("string", "For `rename`: the path now."),
            "new_path": described("string", "For `rename`: the new path."),
        },
        "command",
    ),
)
CLIENT_TOOLS: Mapping[str, ClientTool] = {
    "bash": _BASH,
    "text_editor": _EDITOR,
    "memory": _MEMORY,
}


# --- tools that the server runs ---------------------------------------------------------------------

# The kind of a tool by its type, and the hosted tool that it is.
SERVED = {
    "web_search": "web_search",
    "mcp_toolset": "mcp",
    "tool_search_tool_bm25": "tool_search",
    "tool_search_tool_regex": "tool_search",
}


def _served(tool: GivenTool, kind: str) -> dict[str, object]:
    if SERVED[kind] == "tool_search":
        return {"type": "tool_search"}
    search: dict[str, object] = {"type": "web_search"}
    if tool.allowed_domains or tool.blocked_domains:
        filters = {"allowed_domains": tool.allowed_domains, "blocked_domains": tool.blocked_domains}
        search["filters"] = filters
    if tool.user_location is not None:
        search["user_location"] = tool.user_location
    return search


def with_servers(tooling: Tooling, servers: Sequence[RemoteServer]) -> Tooling:
    """The same tools with those of remote servers: those of the request, and by their names those that the operator has
    set up. An older form of the request has no toolsets: then all of its servers are meant."""
    by_name = {server.name: server for server in servers}
    wanted = tooling.toolsets or [GivenTool(mcp_server_name=name) for name in by_name]
    remote = (_remote(by_name.get(each.mcp_server_name or ""), each) for each in wanted)
    listed = [Raw(encode(definition)) for definition in remote if definition is not None]
    served = tooling.served | {"mcp"}
    return msgspec.structs.replace(tooling, listed=(*tooling.listed, *listed), served=served)


def _remote(server: RemoteServer | None, toolset: GivenTool) -> dict[str, object] | None:
    """A remote server as a tool; None where none of its tools is enabled."""
    usual = toolset.default_config or ToolsetConfig()
    configs = toolset.configs or {}
    older = (server and server.tool_configuration) or RemoteServerTools()
    on = [name for name, config in configs.items() if config.enabled]
    is_off = usual.enabled is False or older.enabled is False
    if is_off and not on:
        return None
    label = toolset.mcp_server_name or ""
    definition: dict[str, object] = {"type": "mcp", "server_label": label}
    definition["require_approval"] = "never"
    if server is not None:
        definition["server_url"] = server.url
    if server is not None and server.authorization_token:
        definition["authorization"] = server.authorization_token
    allowed = on if is_off else older.allowed_tools
    if allowed is not None:
        definition["allowed_tools"] = allowed
    return definition


# --- the choice -------------------------------------------------------------------------------------


def translate_choice(
    choice: ToolChoice | None, callable_names: Sequence[str], removed: frozenset[str]
) -> Literal["none", "auto", "required"] | ToolChoiceName | None:
    """Which tools may or must be called. Tools that were removed stay in the prompt, and may not be called."""
    kind = "auto" if choice is None else choice.type
    if kind == "none":
        return "none"
    if kind == "tool":
        name = (choice and choice.name) or ""
        if not name or name in removed:
            problem = f"Tool '{cut_name(name)}' not found in provided tools"
            raise InvalidRequest(f"tool_choice: {problem}", param="tool_choice")
        return ToolChoiceName(type="function", name=name)
    if kind not in ("auto", "any"):
        problem = "Input should be 'auto', 'any', 'tool' or 'none'"
        raise InvalidRequest(f"tool_choice.type: {problem}", param="tool_choice")
    mode: Literal["auto", "required"] = "required" if kind == "any" else "auto"
    if not removed:
        return None if mode == "auto" else mode
    left = [ToolName(type="function", name=name) for name in callable_names]
    return ToolChoiceName(type="allowed_tools", mode=mode, tools=left) if left else "none"
