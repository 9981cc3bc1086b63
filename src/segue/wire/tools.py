"""What a tool definition means: every type of the contract, decoded once and kept as bytes.

Agents resend all their tools, some 19 KB, on every turn. A `Tools` value keeps the bytes beside the decoded
form, so that the next turn compares bytes and decodes only what differs (docs/protocol.md 4).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, structs

from segue.errors import InvalidRequest, cut_name
from segue.wire.requests import MaybeFlag, MaybeText, RawField, ToolChoiceName, ToolName, Whole

# What the contract allows in the name of a function, but for its length: agents put the name of a plugin and of an MCP
# server before that of a tool, and are past 64 characters then (MCP itself allows 128).
TOOL_NAME_CHARS_MAX = 128
FUNCTION_NAME = re.compile(rf"[a-zA-Z0-9_-]{{1,{TOOL_NAME_CHARS_MAX}}}")
# The label of a remote server stands before the names of its tools; operators may call one by its host.
SERVER_LABEL = re.compile(rf"[a-zA-Z0-9_.-]{{1,{TOOL_NAME_CHARS_MAX}}}")

Execution = Literal["server", "client"]
# Built-in tools of the contract that the model sees as functions wherever it is served; each has a type of call item of
# its own. What a hosted tool offers has the name of its own row (seams/tools.py).
Builtin = Literal[
    "shell", "local_shell", "apply_patch", "tool_search", "mcp", "web_search", "code_interpreter"
]  # fmt: skip
BUILTINS: frozenset[str] = frozenset(get_args(Builtin))


class Definition(Struct, frozen=True, tag_field="type", kw_only=True):
    """What every tool may carry."""


class FunctionTool(Definition, tag="function", frozen=True, kw_only=True):
    name: str
    description: MaybeText = UNSET
    parameters: RawField = UNSET
    strict: MaybeFlag = UNSET
    is_async: MaybeFlag = msgspec.field(name="async", default=UNSET)
    defer_loading: MaybeFlag = UNSET
    output_schema: RawField = UNSET
    allowed_callers: list[str] | UnsetType | None = UNSET


class CustomTool(Definition, tag="custom", frozen=True, kw_only=True):
    name: str
    description: MaybeText = UNSET
    format: RawField = UNSET
    is_async: MaybeFlag = msgspec.field(name="async", default=UNSET)
    defer_loading: MaybeFlag = UNSET


class NamespaceTool(Definition, tag="namespace", frozen=True, kw_only=True):
    name: str
    description: MaybeText = UNSET
    tools: list[FunctionTool | CustomTool] = []


class ToolSearchTool(Definition, tag="tool_search", frozen=True, kw_only=True):
    execution: Execution | UnsetType | None = UNSET
    description: MaybeText = UNSET
    parameters: RawField = UNSET


class WebFilters(Struct, frozen=True):
    """Which pages a web search may find and open: those of these domains and below, but for these."""

    allowed_domains: list[str] | None = None
    blocked_domains: list[str] | None = None


class WebLocation(Struct, frozen=True):
    """Roughly where the user is, in the client's words."""

    country: str | None = None
    region: str | None = None
    city: str | None = None
    timezone: str | None = None


class WebSearchTool(Definition, tag="web_search", frozen=True, kw_only=True):
    search_context_size: Literal["low", "medium", "high"] | UnsetType | None = UNSET
    external_web_access: MaybeFlag = UNSET
    filters: WebFilters | UnsetType | None = UNSET
    user_location: WebLocation | UnsetType | None = UNSET


# Older names of the same tool.


class DatedWebSearchTool(WebSearchTool, tag="web_search_2025_08_26", frozen=True, kw_only=True): ...


class WebSearchPreviewTool(WebSearchTool, tag="web_search_preview", frozen=True, kw_only=True): ...


class DatedWebSearchPreviewTool(
    WebSearchTool, tag="web_search_preview_2025_03_11", frozen=True, kw_only=True
): ...


class McpTool(Definition, tag="mcp", frozen=True, kw_only=True):
    """`headers` and `authorization` are left out on purpose: they are never echoed or stored."""

    server_label: str
    server_url: MaybeText = UNSET
    connector_id: MaybeText = UNSET
    tunnel_id: MaybeText = UNSET
    server_description: MaybeText = UNSET
    allowed_tools: RawField = UNSET
    require_approval: RawField = UNSET
    defer_loading: MaybeFlag = UNSET


class Skill(Struct, frozen=True):
    """Something that a shell can do, and where it is written down how: at the client, or in a container."""

    type: MaybeText = UNSET
    source: RawField = UNSET
    name: MaybeText = UNSET
    description: MaybeText = UNSET
    path: MaybeText = UNSET
    # Of one that the server keeps; the version is a text or a number.
    skill_id: MaybeText = UNSET
    version: RawField = UNSET


class ShellEnvironment(Struct, frozen=True):
    """Where commands are run; `local` is at the client's."""

    type: str
    skills: list[Skill] | UnsetType | None = UNSET
    # Of a container that the server runs.
    container_id: MaybeText = UNSET
    memory_limit: MaybeText = UNSET
    file_ids: list[str] | UnsetType | None = UNSET
    network_policy: RawField = UNSET


class ShellTool(Definition, tag="shell", frozen=True, kw_only=True):
    environment: ShellEnvironment | UnsetType | None = UNSET


class ApplyPatchTool(Definition, tag="apply_patch", frozen=True, kw_only=True): ...


class LocalShellTool(Definition, tag="local_shell", frozen=True, kw_only=True): ...


class ComputerTool(Definition, tag="computer", frozen=True, kw_only=True): ...


class ComputerUseTool(ComputerTool, tag="computer_use", frozen=True, kw_only=True): ...


class ComputerUsePreviewTool(
    ComputerTool, tag="computer_use_preview", frozen=True, kw_only=True
): ...


class ProgrammaticTool(Definition, tag="programmatic_tool_calling", frozen=True, kw_only=True): ...


class FileSearchTool(Definition, tag="file_search", frozen=True, kw_only=True):
    vector_store_ids: list[str] | UnsetType = UNSET
    max_num_results: Whole | UnsetType | None = UNSET
    filters: RawField = UNSET
    ranking_options: RawField = UNSET


class CodeInterpreterTool(Definition, tag="code_interpreter", frozen=True, kw_only=True):
    container: RawField = UNSET


class ImageGenerationTool(Definition, tag="image_generation", frozen=True, kw_only=True): ...


WebSearch = WebSearchTool | DatedWebSearchTool | WebSearchPreviewTool | DatedWebSearchPreviewTool
_Called = FunctionTool | CustomTool | NamespaceTool | ToolSearchTool
_Run = McpTool | ShellTool | ApplyPatchTool | LocalShellTool
_Computer = ComputerTool | ComputerUseTool | ComputerUsePreviewTool
_Foreign = ProgrammaticTool | FileSearchTool | CodeInterpreterTool | ImageGenerationTool
ToolDefinition = _Called | WebSearch | _Run | _Computer | _Foreign


# Tools whose names are the client's.
NAMED = (FunctionTool, CustomTool, NamespaceTool)


def tag_of(tool: ToolDefinition) -> str:
    """The type of a tool, as a request writes it."""
    return str(tool.__struct_config__.tag)


def builtin_of(tag: str) -> str:
    """The built-in tool of a type, which may be an older name of it."""
    return "web_search" if tag.startswith("web_search") else tag


class Offer(Struct, frozen=True):
    """A tool that the model can call by name, with its namespace."""

    tool: FunctionTool | CustomTool
    namespace: str | None = None
    # What its namespace is for.
    about: str = ""
    # Which built-in tool of the contract this function is for: the name of a row of `kinds`.
    builtin: str | None = None
    # Who runs it, where the server may.
    execution: Execution | None = None
    # Whether a person must approve the call first.
    needs_approval: bool = False
    # Made from the fields above: the one name that the model sees and writes, and which type of item a call of it is.
    qualified_name: str = ""
    kind: str = "function"

    def __post_init__(self) -> None:
        name, kind = self.tool.name, "custom" if isinstance(self.tool, CustomTool) else "function"
        if self.builtin is not None:
            kind = f"{self.builtin}_approval" if self.needs_approval else self.builtin
        name = f"{self.namespace}.{name}" if self.namespace else name
        structs.force_setattr(self, "qualified_name", name)
        structs.force_setattr(self, "kind", kind)


# What a tool costs beside its bytes: its definition, and its offer.
OFFER_BYTES = 250


class Tools(Struct, frozen=True):
    """All tools of a request: as they came, as they mean, and as the response echoes them.

    Of the `deferred` the model sees the names only, until a search has loaded them. `raw` is a digest
    where there are secrets in what came: it serves only to be compared.
    """

    raw: bytes = b"[]"
    definitions: tuple[ToolDefinition, ...] = ()
    echo: bytes = b"[]"
    offers: tuple[Offer, ...] = ()
    deferred: tuple[Offer, ...] = ()
    # What hosted tools offer: among the offers, or among the deferred.
    hosted: tuple[Offer, ...] = ()
    # Hosted tools that say only when the turn begins what they offer: by type and by key.
    late: frozenset[tuple[str, str]] = frozenset()
    # Tools that items have brought and that are not the client's to run; one of the same name in the request goes
    # before.
    carried: tuple[ToolDefinition, ...] = ()
    # Made from the fields above: the types of all definitions.
    kinds: frozenset[type[ToolDefinition]] = frozenset()

    def __post_init__(self) -> None:
        structs.force_setattr(self, "kinds", frozenset(map(type, self.known)))

    @property
    def known(self) -> tuple[ToolDefinition, ...]:
        """The definitions of the request, and those that the history carries."""
        return (*self.definitions, *self.carried)

    @property
    def held_bytes(self) -> int:
        """What they hold in memory: as they came, as they mean and as they are repeated; and an offer of each."""
        return 3 * len(self.raw) + OFFER_BYTES * (len(self.offers) + len(self.deferred))

    @property
    def unserved(self) -> tuple[str, ...]:
        """The types of tools that the model is not offered, although the request or its history lists them: the server
        would have to run them, and they are not set up."""
        if self.kinds.issubset(NAMED):
            return ()
        tags = [tag_of(tool) for tool in self.known if not isinstance(tool, NAMED)]
        served = {offer.builtin for offer in (*self.offers, *self.deferred)}
        served |= {kind for kind, _ in self.late}
        return tuple(dict.fromkeys(tag for tag in tags if builtin_of(tag) not in served))

    def is_told_like(self, other: Tools) -> bool:
        """Whether the model sees the same of both."""
        return self is other or (self.hosted == other.hosted and self.echo == other.echo)

    def with_hosted(
        self, offers: Sequence[Offer], late: frozenset[tuple[str, str]] = frozenset()
    ) -> Tools:
        """The same tools with what hosted tools offer now; the very same if they are so already."""
        hosted = tuple(offers)
        if hosted == self.hosted and late == self.late:
            return self
        before = {offer.qualified_name for offer in self.hosted}
        own, own_deferred = (
            [offer for offer in group if offer.qualified_name not in before]
            for group in (self.offers, self.deferred)
        )
        has_search = _has_search(self.known)
        shown, later = _divided(hosted) if has_search else (hosted, ())
        check_names((*own, *own_deferred, *hosted))
        return structs.replace(
            self,
            offers=(*own, *shown),
            deferred=(*own_deferred, *later),
            hosted=hosted,
            late=late,
        )


NO_TOOLS = Tools()


def offers_of(definitions: Sequence[ToolDefinition]) -> tuple[Offer, ...]:
    """What the model can call: namespaces opened, and tools that the client runs as functions."""
    offers: list[Offer] = []
    findable = definitions
    for tool in definitions:
        offers += _opened(tool, findable)
        if isinstance(tool, ToolSearchTool):
            # Of two searches the first is called: no other lists everything again.
            findable = ()
    return tuple(offers)


def split_offers(
    definitions: Sequence[ToolDefinition],
) -> tuple[tuple[Offer, ...], tuple[Offer, ...]]:
    """What the model can call now, and what is deferred: it stays away while a search of the same list can find it."""
    offers = offers_of(definitions)
    return _divided(offers) if _has_search(definitions) else (offers, ())


def _divided(offers: Sequence[Offer]) -> tuple[tuple[Offer, ...], tuple[Offer, ...]]:
    shown = tuple(offer for offer in offers if offer.tool.defer_loading is not True)
    return shown, tuple(offer for offer in offers if offer.tool.defer_loading is True)


def _has_search(definitions: Sequence[ToolDefinition]) -> bool:
    return any(isinstance(tool, ToolSearchTool) for tool in definitions)


def _opened(tool: ToolDefinition, findable: Sequence[ToolDefinition] = ()) -> list[Offer]:
    match tool:
        case FunctionTool() | CustomTool():
            return [Offer(tool)]
        case NamespaceTool():
            return [Offer(inner, tool.name, tool.description or "") for inner in tool.tools]
        # A shell in a container would be ours to run.
        case ShellTool(environment=place) if not place or place.type == "local":
            return [Offer(_shell(tool), builtin="shell")]
        case LocalShellTool():
            return [Offer(LOCAL_SHELL, builtin="local_shell")]
        case ApplyPatchTool():
            return [Offer(APPLY_PATCH, builtin="apply_patch")]
        case ToolSearchTool():
            search, execution = _search(tool, findable), tool.execution or "server"
            return [Offer(search, builtin="tool_search", execution=execution)]
        case _:
            return []


def carried_of(definitions: Sequence[ToolDefinition]) -> tuple[ToolDefinition, ...]:
    """The tools of an item that hold in the head as if the request had listed them: those that a server may run, and
    the search that finds them."""
    return tuple(
        tool for tool in definitions if isinstance(tool, ToolSearchTool) or not _opened(tool)
    )


def carried_name(tool: ToolDefinition) -> str:
    """By what a newer tool takes the place of this one: its type, or the server that it names."""
    return tool.server_label if isinstance(tool, McpTool) else tag_of(tool)


# --- built-in tools of the contract, as the model sees them --------------------------------------


def parameters_of(properties: dict[str, object], *required: str) -> Raw:
    """The schema of a function's arguments."""
    schema = {"type": "object", "properties": properties, "required": required}
    return Raw(msgspec.json.encode({**schema, "additionalProperties": False}))


def described(kind: str, about: str) -> dict[str, object]:
    """The schema of one argument."""
    return {"type": kind, "description": about}


def _list(about: str) -> dict[str, object]:
    return {"type": "array", "items": {"type": "string"}, "minItems": 1, "description": about}


SHELL_ABOUT = "Runs commands in a shell. Each command is run on its own, as it is written."
SHELL_PARAMETERS = parameters_of(
    {
        "commands": _list("The commands, in order."),
        "timeout_ms": described("integer", "How long all of them may take."),
        "max_output_length": described(
            "integer", "How many characters of what they print are wanted."
        ),
    },
    "commands",
)
LOCAL_SHELL = FunctionTool(
    name="local_shell",
    description="Runs one program with its arguments.",
    parameters=parameters_of(
        {
            "command": _list("The program, then each argument."),
            "env": {
                "type": "object",
                "additionalProperties": {"type": "string"},
                "description": "Environment variables.",
            },
            "timeout_ms": {"type": "integer"},
            "user": described("string", "As whom to run it."),
            "working_directory": {"type": "string"},
        },
        "command",
    ),
)
DIFF_ABOUT = (
    "What changes, in the form of a V4A diff: hunks after `@@`, lines with ` `, `+` or `-` before them; of a new "
    "file every line with `+`. Empty to delete a file."
)
APPLY_PATCH = FunctionTool(
    name="apply_patch",
    description="Creates, updates or deletes one file.",
    parameters=parameters_of(
        {
            "type": {"type": "string", "enum": ["create_file", "update_file", "delete_file"]},
            "path": {"type": "string"},
            "diff": described("string", DIFF_ABOUT),
        },
        *("type", "path", "diff"),
    ),
)
SEARCH_ABOUT = (
    "Finds tools that cannot be called yet, and loads them: from then on they can be. "
    "Ask in a few words for what is needed."
)
SEARCH_PARAMETERS = parameters_of(
    {"query": described("string", "Names, or words of what the tool should do.")}, "query"
)


def _shell(tool: ShellTool) -> FunctionTool:
    skills = tool.environment.skills if tool.environment else None
    lines = [
        f"- {skill.name or 'skill'}: {skill.description or ''} ({skill.path or ''})"
        for skill in skills or ()
    ]
    heading = ["Skills, each with the place of its instructions:"] if lines else []
    about = "\n".join([SHELL_ABOUT, *heading, *lines])
    return FunctionTool(name="shell", description=about, parameters=SHELL_PARAMETERS)


def _search(search: ToolSearchTool, definitions: Sequence[ToolDefinition]) -> FunctionTool:
    """The search, and in its description what it can find: of a lone tool what it does, of a namespace the names."""
    lines = [line for tool in definitions if (line := _findable(tool))]
    heading = ["These can be found:"] if lines else []
    about = "\n".join([search.description or SEARCH_ABOUT, *heading, *lines])
    # Our own search asks for what it needs; a client's may ask for anything.
    own = search.parameters if search.execution == "client" else UNSET
    has_own = isinstance(own, Raw) and bytes(own) != b"null"
    parameters = own if has_own else SEARCH_PARAMETERS
    return FunctionTool(name="tool_search", description=about, parameters=parameters)


def _findable(tool: ToolDefinition) -> str:
    match tool:
        case NamespaceTool():
            names = [inner.name for inner in tool.tools if inner.defer_loading is True]
            return f"- {tool.name} ({', '.join(names)}): {tool.description or ''}" if names else ""
        case FunctionTool(defer_loading=True) | CustomTool(defer_loading=True):
            return f"- {tool.name}: {tool.description or ''}"
        case McpTool(defer_loading=True):
            return f"- {tool.server_label}: {tool.server_description or ''}"
        case _:
            return ""


# --- names and choices ----------------------------------------------------------------------------


def check_names(offers: Sequence[Offer], param: str = "tools") -> None:
    """Refuse two tools that the model would call by one name: it would be unclear which of them it means."""
    names = [offer.qualified_name for offer in offers]
    if len(names) != len(set(names)):
        name, _ = Counter(names).most_common(1)[0]
        raise InvalidRequest(
            f"Two tools have the same name: '{cut_name(name)}'.", code="invalid_value", param=param
        )


def offer_named(offers: Sequence[Offer], qualified_name: str) -> Offer | None:
    """The offer that the model means by this name."""
    return next((offer for offer in offers if offer.qualified_name == qualified_name), None)


def forced_offers(choice: str | ToolChoiceName, offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """The tools of which one must be called by this choice; none if the model may do without."""
    if choice == "required":
        return tuple(offers)
    if not isinstance(choice, ToolChoiceName):
        return ()
    if choice.type != "allowed_tools":
        return chosen_offers([choice], offers)
    return chosen_offers(choice.tools or [], offers) if choice.mode == "required" else ()


def allowed_offers(choice: str | ToolChoiceName, offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """The tools that may be called by this choice."""
    if not isinstance(choice, ToolChoiceName):
        return () if choice == "none" else tuple(offers)
    if choice.type == "allowed_tools":
        return chosen_offers(choice.tools or [], offers)
    is_callable = choice.type in ("function", "custom") or choice.type in BUILTINS
    return chosen_offers([choice], offers) if is_callable else tuple(offers)


def chosen_offers(choices: Iterable[ToolName], offers: Sequence[Offer]) -> tuple[Offer, ...]:
    """The tools that these choices mean, by name or by type."""
    is_meant = _Meant(choices)
    return tuple(filter(is_meant, offers))


class _Meant:
    """Whether any of these choices means a tool; a choice without a namespace means any."""

    def __init__(self, choices: Iterable[ToolName]) -> None:
        self._kinds: set[str] = set()
        # Servers of tools and their names; None: all of the server.
        self._remote: set[tuple[str | None, str | None]] = set()
        self._names: set[str | None] = set()
        self._in_namespaces: set[tuple[str | None, str | None]] = set()
        for choice in choices:
            kind = builtin_of(choice.type)
            if kind == "mcp":
                self._remote.add((choice.server_label, choice.name))
                continue
            self._kinds.add(kind)
            if kind not in BUILTINS:
                self._names.add(choice.name)
                self._in_namespaces.add((choice.namespace, choice.name))

    def __call__(self, offer: Offer) -> bool:
        name, namespace = offer.tool.name, offer.namespace
        if offer.builtin is not None:
            is_remote = not self._remote.isdisjoint({(namespace, None), (namespace, name)})
            return offer.builtin in self._kinds or (offer.builtin == "mcp" and is_remote)
        if offer.qualified_name in self._names:
            return True
        return not self._in_namespaces.isdisjoint({(None, name), (namespace, name)})


def grammar_of(offer: Offer) -> tuple[str, str] | None:
    """The grammar that the input of this tool must follow: its syntax and its definition; None where it has none."""
    if not isinstance(offer.tool, CustomTool) or not isinstance(offer.tool.format, Raw):
        return None
    match msgspec.json.decode(offer.tool.format):
        case {"type": "grammar", **shape}:
            return str(shape.get("syntax")), str(shape.get("definition") or "")
        case _:
            return None
