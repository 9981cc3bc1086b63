"""How does a turn look to a client of this API? A response in, a message out; an item in, its blocks out. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.messages.history import message_id_of, tool_use_id_of
from segue.messages.request import AskedTurn
from segue.messages.served import MCP_CALL, SERVER_CALL, TEXT_KEY
from segue.turn.plan import Tally
from segue.wire.cache import MaybeDiagnostics
from segue.wire.codec import encode
from segue.wire.response import NO_USAGE, Response, Usage

StopReason = Literal[
    "end_turn",
    "max_tokens",
    "stop_sequence",
    "tool_use",
    "refusal",
    "model_context_window_exceeded",
]
# What stands in place of arguments that are no JSON object, as the API's documentation names it.
INVALID_JSON = "INVALID_JSON"
GUARDED = "A guard of this server has stopped the response."
SEARCH_FAILED = {"type": "web_search_tool_result_error", "error_code": "unavailable"}
# The model itself calls, not a program that it has written.
DIRECT = {"type": "direct"}
EMPTY_OBJECT = Raw(b"{}")
# What the API calls a change of this part of a prompt.
CHANGED_PARTS = {
    "model": "model_changed",
    "instructions": "system_changed",
    "tools": "tools_changed",
    "input": "messages_changed",
}

Block = dict[str, object]
# Makes an opaque text that only we can open, for the same owner.
SealText = Callable[[bytes], str]


# --- what is read of a response ---------------------------------------------------------------------


class _Part(Struct, frozen=True):
    text: str = ""
    refusal: str = ""
    annotations: list[Annotation] | None = None


class Annotation(Struct, frozen=True):
    type: str = ""
    url: str = ""
    title: str = ""


class OutputItem(Struct, frozen=True):
    """An item of a response; which fields count depends on its type."""

    type: str
    id: str = ""
    status: str | None = None
    content: list[_Part] | UnsetType | None = UNSET
    summary: list[_Part] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str = ""
    # JSON as a string; of a search for tools, an object.
    arguments: Raw = EMPTY_OBJECT
    action: _Action | None = None
    server_label: str = ""
    output: str | Raw | None = None
    error: Raw | None = None
    tools: list[NamedTool] | None = None

    @property
    def is_clients_call(self) -> bool:
        return self.type == "function_call"

    @property
    def is_search(self) -> bool:
        return (
            self.type == "web_search_call" and self.action is not None and bool(self.action.query)
        )


class _Action(Struct, frozen=True):
    type: str = ""
    query: str = ""
    url: str = ""
    pattern: str = ""
    sources: list[FoundPage] = []
    # What the model has read.
    text: str = msgspec.field(name=TEXT_KEY, default="")


class FoundPage(Struct, frozen=True):
    url: str


class NamedTool(Struct, frozen=True):
    name: str = ""


read_item = msgspec.json.Decoder(OutputItem).decode
_string = msgspec.json.Decoder(str)
_object = msgspec.json.Decoder(dict[str, Raw])


# --- blocks -----------------------------------------------------------------------------------------


def blocks_of(item: OutputItem, seal: SealText, *, hides_thinking: bool) -> list[Block]:
    """The blocks of an item that is done. What clients may not read is sealed for them."""
    match item.type:
        case "reasoning":
            return thinking_block(item, hides=hides_thinking)
        case "message":
            return [
                {"type": "text", "text": text, "citations": citations_of(part) or None}
                for part in item.content or ()
                if (text := part.text or part.refusal)
            ]
        case "function_call":
            return [tool_use(item, input_of(arguments_of(item)))]
        case _:
            begun = server_call(item)
            return [*([] if begun is None else [begun]), *server_result(item, seal)]


def tool_use(item: OutputItem, given: object) -> Block:
    """A call of a tool of the client."""
    use_id = tool_use_id_of(item.call_id or "")
    call = {"type": "tool_use", "id": use_id, "name": item.name, "input": given}
    return {**call, "caller": DIRECT}


def thinking_block(item: OutputItem, *, hides: bool) -> list[Block]:
    """A thought; none where the model has thought nothing. Of one that the operator hides there is the signature."""
    text = thought_of(item)
    if not text and (item.content or item.summary):
        return []
    shown = "" if hides else text
    return [{"type": "thinking", "thinking": shown, "signature": item.encrypted_content or ""}]


def thought_of(item: OutputItem) -> str:
    """The text of a thought, as far as the operator shows it."""
    return "".join(part.text for part in item.content or item.summary or ())


def citations_of(part: _Part) -> list[Block]:
    """The pages that a text cites."""
    return [
        citation(annotation)
        for annotation in part.annotations or ()
        if annotation.type == "url_citation"
    ]


def citation(annotation: Annotation) -> Block:
    return {
        "type": "web_search_result_location",
        "url": annotation.url,
        "title": annotation.title,
        "cited_text": "",
        "encrypted_index": "",
    }


def arguments_of(item: OutputItem) -> str:
    """The arguments of a call as the model wrote them."""
    try:
        return _string.decode(item.arguments)
    except msgspec.MsgspecError:
        return bytes(item.arguments).decode()


def input_of(arguments: str) -> Raw:
    """The input of a call: an object, whatever the model wrote."""
    if not arguments.strip():
        return EMPTY_OBJECT
    try:
        _object.decode(arguments)
    except (msgspec.MsgspecError, RecursionError):
        return Raw(encode({INVALID_JSON: arguments}))
    return Raw(arguments.encode())


def server_call(item: OutputItem) -> Block | None:
    """The block of a call of one of our own tools; None for what clients of this API do not see."""
    action = item.action
    match item.type:
        case "web_search_call" if action is not None and item.is_search:
            return _served(item, "web_search", {"query": action.query})
        case "web_search_call" if action is not None:
            asked = {"url": action.url} | ({"pattern": action.pattern} if action.pattern else {})
            return _served(item, "web_fetch", asked)
        case "tool_search_call":
            return _served(item, "tool_search_tool_bm25", input_of(arguments_of(item)))
        case "mcp_call":
            return {
                "type": "mcp_tool_use",
                "id": MCP_CALL + item.id,
                "name": item.name,
                "server_name": item.server_label,
                "input": input_of(arguments_of(item)),
            }
        case _:
            return None


def _served(item: OutputItem, name: str, given: object) -> Block:
    call = {"type": "server_tool_use", "id": SERVER_CALL + item.id, "name": name, "input": given}
    return {**call, "caller": DIRECT}


def server_result(item: OutputItem, seal: SealText) -> list[Block]:
    """The block with what one of our own tools has returned, to be sent back as it is."""
    action = item.action
    answers = {"tool_use_id": SERVER_CALL + item.id, "caller": DIRECT}
    match item.type:
        case "web_search_call" if action is not None and item.is_search:
            sealed = seal(action.text.encode()) if action.text and action.sources else ""
            pages = [
                _page(page, sealed if not at else "") for at, page in enumerate(action.sources)
            ]
            content: object = pages if item.status == "completed" else SEARCH_FAILED
            return [{"type": "web_search_tool_result", **answers, "content": content}]
        case "web_search_call" if action is not None:
            return [{"type": "web_fetch_tool_result", **answers, **_fetched(item, action)}]
        case "tool_search_output":
            # It belongs to the call with the same letters.
            call_id = SERVER_CALL + item.id.replace("tso_", "tsc_", 1)
            names = [
                {"type": "tool_reference", "tool_name": tool.name} for tool in item.tools or ()
            ]
            found = {"type": "tool_search_tool_search_result", "tool_references": names}
            return [{"type": "tool_search_tool_result", "tool_use_id": call_id, "content": found}]
        case "mcp_call":
            is_error = item.error is not None and bytes(item.error) != b"null"
            text = _words(item.error) if is_error else _words(item.output)
            return [
                {
                    "type": "mcp_tool_result",
                    "tool_use_id": MCP_CALL + item.id,
                    "is_error": is_error,
                    "content": [{"type": "text", "text": text, "citations": None}],
                }
            ]
        case _:
            return []


def _page(page: FoundPage, sealed: str) -> Block:
    found = {"type": "web_search_result", "url": page.url, "title": page.url, "page_age": None}
    return {**found, "encrypted_content": sealed}


def _fetched(item: OutputItem, action: _Action) -> Block:
    if item.status != "completed":
        return {"content": {"type": "web_fetch_tool_result_error", "error_code": "unavailable"}}
    source = {"type": "text", "media_type": "text/plain", "data": action.text}
    document = {"type": "document", "source": source, "title": None, "citations": None}
    result = {"type": "web_fetch_result", "url": action.url, "retrieved_at": None}
    return {"content": {**result, "content": document}}


def _words(raw: str | Raw | None) -> str:
    if raw is None or isinstance(raw, str):
        return raw or ""
    try:
        return _string.decode(raw)
    except msgspec.MsgspecError:
        return bytes(raw).decode()


# --- how it ended, and what it cost -----------------------------------------------------------------


class Ending(Struct, frozen=True):
    """Why the answer ended, as this API says it."""

    stop_reason: StopReason
    stop_sequence: str | None = None
    stop_details: Block | None = None


def ending_of(
    response: Response, items: Iterable[OutputItem], stop_string: str | None, tokens_max: int | None
) -> Ending:
    """`tokens_max`: the client's own limit; an answer that was cut before it has filled the context."""
    details = response.incomplete_details
    if details is not None and details.reason == "content_filter":
        return refusal(GUARDED)
    if details is not None:
        wrote = (response.usage or NO_USAGE).output_tokens
        is_short = tokens_max is not None and wrote < tokens_max
        return Ending("model_context_window_exceeded" if is_short else "max_tokens")
    if tokens_max == 0:
        return Ending("max_tokens")
    if any(item.is_clients_call for item in items):
        return Ending("tool_use")
    if stop_string is not None:
        return Ending("stop_sequence", stop_string)
    return Ending("end_turn")


def refusal(explanation: str) -> Ending:
    """A guard has stopped the response."""
    details: Block = {"type": "refusal", "category": None, "explanation": explanation}
    return Ending("refusal", None, details)


def usage_of(usage: Usage, asked: AskedTurn, tier: str, items: Sequence[OutputItem] = ()) -> Block:
    """What the turn has cost: what was read from the cache, what was written to it, and the rest are the prompt. Only
    a client that has marked something is said what was written."""
    searches = sum(item.is_search for item in items)
    fetches = sum(item.type == "web_search_call" and not item.is_search for item in items)
    read = usage.input_tokens_details.cached_tokens
    ttl = asked.ttl
    written = usage.input_tokens_details.cache_write_tokens if ttl else 0
    beta: Block = {"iterations": None, "fallback_credit": None} if asked.is_beta else {}
    return {
        "input_tokens": usage.input_tokens - read - written,
        "cache_creation_input_tokens": written,
        "cache_read_input_tokens": read,
        "cache_creation": {
            "ephemeral_5m_input_tokens": written if ttl == "5m" else 0,
            "ephemeral_1h_input_tokens": written if ttl == "1h" else 0,
        },
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"thinking_tokens": usage.output_tokens_details.reasoning_tokens},
        "server_tool_use": {"web_search_requests": searches, "web_fetch_requests": fetches}
        if searches or fetches
        else None,
        "service_tier": "priority" if tier == "priority" else "standard",
        "speed": "fast" if tier == "priority" else "standard",
        "inference_geo": None,
        **beta,
    }


# What the last usage of a stream may have, by the API's types.
DELTA_USAGE = (
    "input_tokens",
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "output_tokens",
    "output_tokens_details",
    "server_tool_use",
    "iterations",
    "fallback_credit",
)


def diagnostics_of(found: MaybeDiagnostics, parted: tuple[str, int] | None) -> Block | None:
    """Why less of the prompt was in the cache than of the prompt before; nothing where all of it was. `parted`: which
    part of the prompt has changed, and what that cost."""
    reason: Block = {"type": "unavailable"}
    if found is not UNSET and found.type == "comparison_response_not_found":
        reason = {"type": "previous_message_not_found"}
    elif parted is not None and parted[0] in CHANGED_PARTS:
        reason = {"type": CHANGED_PARTS[parted[0]], "cache_missed_input_tokens": parted[1]}
    elif found is UNSET or (parted is None and found.type != "unavailable"):
        return None
    return {"cache_miss_reason": reason}


# --- the message ------------------------------------------------------------------------------------


def message_of(
    response: Response,
    asked: AskedTurn,
    content: list[Block],
    ending: Ending | None,
    usage: Block,
    parted: tuple[str, int] | None = None,
) -> Block:
    """The message; before its end it has no reason to have stopped."""
    beta: Block = {"context_management": None} if asked.is_beta else {}
    return {
        "id": message_id_of(response.id),
        "type": "message",
        "role": "assistant",
        "model": response.model,
        "content": content,
        "stop_reason": ending and ending.stop_reason,
        "stop_sequence": ending and ending.stop_sequence,
        "stop_details": ending and ending.stop_details,
        "container": None,
        "diagnostics": diagnostics_of(response.prompt_cache_diagnostics, parted),
        "usage": usage,
        **beta,
    }


def answer_of(response: Response, asked: AskedTurn, seal: SealText, tally: Tally) -> bytes:
    """A turn that has ended, as one JSON object."""
    items = [read_item(raw) for raw in response.output]
    hides = asked.hides_thinking
    content = [block for item in items for block in blocks_of(item, seal, hides_thinking=hides)]
    ending = ending_of(response, items, tally.stop_string, asked.tokens_max)
    usage = usage_of(response.usage or NO_USAGE, asked, response.service_tier, items)
    return encode(message_of(response, asked, content, ending, usage, tally.parted))


def refused_answer(response: Response, asked: AskedTurn, explanation: str) -> bytes:
    """A guard has stopped the request itself: a message without content."""
    usage = usage_of(response.usage or NO_USAGE, asked, response.service_tier)
    return encode(message_of(response, asked, [], refusal(explanation), usage))
