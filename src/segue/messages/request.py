"""What does a request of this API ask for? Its body in, the request of a turn out. Pure.

`read_body` reads the fields and leaves messages, system and tools as bytes; `compile_request` puts together what
became of those (`history`, `tools`). Unknown fields are ignored; what would be wrong in silence is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, assert_never

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from segue.errors import InvalidRequest, cut_name
from segue.messages.blocks import CacheControl, decode
from segue.messages.history import (
    EFFORTS,
    Defined,
    FoundTools,
    Loaded,
    Removed,
    System,
    TranslatedMessage,
    Ttl,
    longer,
    turn_id_of,
)
from segue.messages.pairs import check_pairs
from segue.messages.tools import (
    RemoteServer,
    ToolChoice,
    Tooling,
    translate_choice,
    translate_definition,
)
from segue.wire.codec import LARGE_BYTES, check_shape, encode_kept
from segue.wire.requests import (
    CacheOptions,
    Count,
    Create,
    Effort,
    ReasoningConfig,
    TextConfig,
    TextFormat,
    Whole,
)

MESSAGES_MAX = 100_000
STOPS_MAX = 16
STOP_CHARS_MAX = 256
# How much thinking a budget of tokens is.
LOW_BUDGET, MEDIUM_BUDGET = 4_096, 16_384
# What a response is asked for beside its text: the thoughts, sealed, where a search has looked and what it has found.
INCLUDE = [
    "reasoning.encrypted_content",
    "web_search_call.action.sources",
    "segue:web_search_call.action.text",
]
# Each of these asks for something that the server does not do, and that must not be left out in silence.
REFUSED = {
    "safeguards": "this server has no safeguards of its own to run; run the check yourself",
    "compaction": "this server does not compact on request; send your own summary instead",
}


class ThinkingConfig(Struct, frozen=True):
    type: str
    budget_tokens: Whole | None = None
    display: str | None = None


class OutputFormat(Struct, frozen=True):
    type: str
    schema: Raw | UnsetType = UNSET


class OutputConfig(Struct, frozen=True):
    effort: str | None = None
    format: OutputFormat | None = None


class _Metadata(Struct, frozen=True):
    user_id: str | None = None


class DiagnosticsAsked(Struct, frozen=True):
    previous_message_id: str | None = None


class Thread(Struct, frozen=True):
    """`create` keeps the turn, `continue` has it as its parent."""

    type: str
    previous_message_id: str | None = None


class MessagesBody(Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/messages`, and of a count of its tokens."""

    model: str
    messages: list[Raw]
    system: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    max_tokens: Count | None = None
    stream: bool | None = None
    stop_sequences: list[str] | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: ThinkingConfig | None = None
    output_config: OutputConfig | None = None
    # An older place of the format.
    output_format: OutputFormat | None = None
    metadata: _Metadata | None = None
    speed: str | None = None
    cache_control: CacheControl | None = None
    diagnostics: DiagnosticsAsked | None = None
    mcp_servers: list[RemoteServer] | None = None
    thread: Thread | None = None
    safeguards: Raw | UnsetType = UNSET
    compaction: Raw | UnsetType = UNSET

    @property
    def is_continued(self) -> bool:
        """Whether it continues a thread: its messages are only the new ones."""
        return self.thread is not None and self.thread.type == "continue"

    @property
    def parent_id(self) -> str | None:
        """The turn that it continues."""
        thread = self.thread
        if thread is None or not self.is_continued or thread.previous_message_id is None:
            return None
        return turn_id_of(thread.previous_message_id)


class ShownTools(Struct, frozen=True, omit_defaults=True):
    """Tools that messages have brought, and those that they took away again, by name."""

    joined: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


NONE_SHOWN = ShownTools()


class Surroundings(Struct, frozen=True):
    """What is known of a request beside its body."""

    # What its headers say of the conversation.
    session: str | None = None
    is_beta: bool = False
    # Only the tokens are counted, so that the messages may end with an answer.
    counts: bool = False


class AskedTurn(Struct, frozen=True):
    """What a request asks for: a turn, and how it is to be answered."""

    create: Create
    # Whether thoughts leave as signatures alone.
    hides_thinking: bool = False
    # How long the client wants its prompt cached; nothing was marked where this is empty.
    ttl: Ttl = ""
    # The client's own limit of the answer.
    tokens_max: int | None = None
    shown: ShownTools = NONE_SHOWN
    # Whether the answer is to say what the cache did not have.
    wants_diagnostics: bool = False
    # What was left out of the request, for the header `x-segue-repairs`.
    repairs: tuple[str, ...] = ()
    # Whether it asks for something that is not for everybody yet: then some fields are there that others do not know.
    is_beta: bool = False
    # Tools of the server that it asks for.
    served: frozenset[str] = frozenset()


_body = msgspec.json.Decoder(MessagesBody)


def read_body(body: bytes | bytearray) -> MessagesBody:
    """The fields of a request. Slow work if the body is large."""
    if len(body) > LARGE_BYTES:
        check_shape(body)
    read = decode(_body, body)
    if len(read.messages) > MESSAGES_MAX:
        message = f"messages: at most {MESSAGES_MAX} messages, not {len(read.messages)}"
        raise InvalidRequest(message, param="messages")
    for name, problem in REFUSED.items():
        value = getattr(read, name)
        if value is not UNSET and bytes(value) != b"null":
            raise InvalidRequest(f"{name}: {problem}", code="unsupported_parameter", param=name)
    return read


def compile_request(
    body: MessagesBody,
    messages: Sequence[TranslatedMessage],
    system: System,
    tooling: Tooling,
    around: Surroundings,
    before: ShownTools = NONE_SHOWN,
) -> AskedTurn:
    """The request of a turn. `before`: what earlier turns of its thread have shown."""
    if not around.counts:
        _check_newest(body, messages)
    check_pairs(messages, is_continued=body.is_continued)
    history = _History(tooling, before)
    for message in messages:
        history.add(message)
    ttl = _ttl(body, messages, system, tooling)
    thinking = body.thinking
    hides = thinking is not None and thinking.display == "omitted"
    return AskedTurn(
        Create(
            model=body.model,
            input=history.items,
            instructions=system.instructions,
            previous_response_id=body.parent_id,
            store=False,
            stream=body.stream,
            generate=False if body.max_tokens == 0 else None,
            max_output_tokens=body.max_tokens or None,
            temperature=body.temperature,
            top_p=body.top_p,
            stop=_stops(body.stop_sequences),
            tools=tooling.raw if tooling.listed else UNSET,
            tool_choice=translate_choice(body.tool_choice, history.callable, history.removed),
            parallel_tool_calls=_is_parallel(body.tool_choice),
            max_tool_calls=tooling.uses_max,
            reasoning=_reasoning(thinking, body.output_config),
            text=_text(body),
            include=INCLUDE,
            service_tier="fast" if body.speed == "fast" else None,
            prompt_cache_options=_compared(body.diagnostics),
            prompt_cache_key=around.session or session_of(body.metadata),
        ),
        hides_thinking=hides,
        ttl=ttl,
        tokens_max=body.max_tokens,
        shown=history.shown,
        wants_diagnostics=body.diagnostics is not None,
        repairs=("billing_header",) if system.is_cut else (),
        is_beta=around.is_beta,
        served=tooling.served,
    )


class _History:
    """The items of all messages, in order, with the tools that join on the way."""

    def __init__(self, tooling: Tooling, before: ShownTools) -> None:
        self._tooling = tooling
        self.items: list[Raw] = []
        # What can be called, by name, and what was taken away again.
        self._names = dict.fromkeys((*tooling.names, *before.joined))
        self._removed = dict.fromkeys(before.removed)

    @property
    def callable(self) -> list[str]:
        return [name for name in self._names if name not in self._removed]

    @property
    def shown(self) -> ShownTools:
        listed = set(self._tooling.names)
        joined = (name for name in self._names if name not in listed)
        return ShownTools(tuple(joined), tuple(self._removed))

    @property
    def removed(self) -> frozenset[str]:
        return frozenset(self._removed)

    def add(self, message: TranslatedMessage) -> None:
        for piece in message.pieces:
            match piece:
                case Raw():
                    self.items.append(piece)
                case Loaded(names=names):
                    self._load(names)
                case Defined(definition=raw):
                    name, definition = translate_definition(raw, "tool_addition")
                    self._join({name: definition})
                case Removed(name=name):
                    self._removed[name] = None
                case FoundTools(letters=letters, names=names):
                    self._find(letters, names)
                case _:
                    assert_never(piece)

    def _load(self, names: Iterable[str]) -> None:
        for name in names:
            self._removed.pop(name, None)
        self._join(self._new(names))

    def _find(self, letters: str, names: Iterable[str]) -> None:
        found = self._new(names)
        self._names |= dict.fromkeys(found)
        output = {"type": "tool_search_output", "id": f"tso_{letters}", "execution": "server"}
        item = {**output, "status": "completed", "tools": [*found.values()]}
        self.items.append(Raw(encode_kept(item)))

    def _new(self, names: Iterable[str]) -> dict[str, Raw]:
        """The deferred tools among these that were not shown yet: a tool is shown once, however often it is named."""
        deferred, known = self._tooling.deferred, self._names
        return {name: deferred[name] for name in names if name in deferred and name not in known}

    def _join(self, tools: dict[str, Raw]) -> None:
        if tools:
            self._names |= dict.fromkeys(tools)
            item = {"type": "additional_tools", "role": "developer", "tools": [*tools.values()]}
            self.items.append(Raw(encode_kept(item)))


def _check_newest(body: MessagesBody, messages: Sequence[TranslatedMessage]) -> None:
    """The messages end with the client's words, all of which are understood."""
    if not messages and not body.is_continued:
        raise InvalidRequest("messages: at least one message is required", param="messages")
    if not messages:
        return
    if messages[-1].role == "assistant":
        problem = (
            "This model does not support assistant message prefill. "
            "The conversation must end with a user message."
        )
        raise InvalidRequest(problem, code="unsupported_value", param="messages")
    for index in range(len(messages) - 1, -1, -1):
        message = messages[index]
        if message.role == "assistant":
            return
        if message.unknown is not None:
            number, kind = message.unknown
            place = f"messages.{index}.content.{number}"
            problem = f"content of type '{cut_name(kind)}' is not supported by this server"
            raise InvalidRequest(f"{place}: {problem}", code="unsupported_value", param=place)


def _ttl(
    body: MessagesBody, messages: Iterable[TranslatedMessage], system: System, tooling: Tooling
) -> Ttl:
    marks = {system.ttl, tooling.ttl, *(message.ttl for message in messages)}
    if body.cache_control is not None:
        marks.add(longer("", body.cache_control))
    return "1h" if "1h" in marks else "5m" if "5m" in marks else ""


def _compared(asked: DiagnosticsAsked | None) -> CacheOptions | None:
    if asked is None or asked.previous_message_id is None:
        return None
    return CacheOptions(comparison_response_id=turn_id_of(asked.previous_message_id))


def _stops(stops: list[str] | None) -> list[str] | None:
    if not stops:
        return None
    if len(stops) > STOPS_MAX:
        message = f"stop_sequences: at most {STOPS_MAX} sequences, not {len(stops)}"
        raise InvalidRequest(message, param="stop_sequences")
    if not all(0 < len(stop) <= STOP_CHARS_MAX for stop in stops):
        message = f"stop_sequences: each has 1 to {STOP_CHARS_MAX} characters"
        raise InvalidRequest(message, param="stop_sequences")
    return stops


def _is_parallel(choice: ToolChoice | None) -> bool | None:
    return False if choice is not None and choice.disable_parallel_tool_use else None


def _reasoning(
    thinking: ThinkingConfig | None, config: OutputConfig | None
) -> ReasoningConfig | None:
    effort: Effort | None = EFFORTS.get((config and config.effort) or "")
    if thinking is not None and thinking.type == "disabled":
        effort = "none"
    elif thinking is not None and thinking.budget_tokens is not None and effort is None:
        effort = _effort_of(thinking.budget_tokens)
    return None if effort is None else ReasoningConfig(effort=effort)


def _effort_of(budget_tokens: int) -> Effort:
    if budget_tokens < LOW_BUDGET:
        return "low"
    return "medium" if budget_tokens < MEDIUM_BUDGET else "high"


def _text(body: MessagesBody) -> TextConfig | None:
    asked = (body.output_config and body.output_config.format) or body.output_format
    if asked is None:
        return None
    if asked.type != "json_schema":
        place = "output_config.format.type"
        raise InvalidRequest(f"{place}: Input should be 'json_schema'", param=place)
    # A copy: a turn does not hold the body of its request.
    schema = asked.schema if asked.schema is UNSET else asked.schema.copy()
    return TextConfig(TextFormat("json_schema", name="answer", schema=schema, strict=True))


class _Session(Struct, frozen=True):
    session_id: str = ""


_session = msgspec.json.Decoder(_Session)


def session_of(metadata: _Metadata | None) -> str | None:
    """What the request says of its conversation: a hint for routing. Claude Code puts JSON into the user's id."""
    user_id = metadata.user_id if metadata is not None else None
    if not user_id:
        return None
    try:
        return _session.decode(user_id).session_id or user_id
    except (msgspec.MsgspecError, RecursionError):
        return user_id
