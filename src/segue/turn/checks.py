"""What may no request ask for, and no item, whatever its history?

Pure: a request, or a part of it, in; an error or nothing out.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import UNSET

from segue.errors import InvalidRequest, cut_name
from segue.wire.codec import TOOLS_MAX, check_schema
from segue.wire.effects import Effects
from segue.wire.items import (
    CompactionTrigger,
    ConfigurationUpdate,
    CustomToolCallOutput,
    FunctionCallOutput,
    InputFile,
    InputImage,
    Item,
    Message,
    TextUpdate,
)
from segue.wire.requests import Compact, Create, RawField, TextConfig, ToolChoiceName
from segue.wire.tools import BUILTINS, Offer, Tools, chosen_offers

# Each of these asks for something that is not built.
UNSUPPORTED = ("prompt",)
# The least that a history may be compacted at (docs/protocol.md 2).
THRESHOLD_MIN = 1_000
# What is written as one piece, instructions and tools in every snapshot of the response: to write more would hold up
# other requests.
WRITTEN_BYTES_MAX = 10 * 1024 * 1024
# The same for a name, of a user or of a place in a cache: some clients put JSON there.
NAME_BYTES_MAX = 64 * 1024


def check_request(create: Create) -> None:
    """What no request may ask for."""
    if create.background and create.store is False:
        raise InvalidRequest(
            "A background response must be stored: otherwise it could not be fetched.",
            code="unsupported_value",
            param="store",
        )
    for index, rule in enumerate(create.context_management or ()):
        _check_compaction(rule, f"context_management[{index}]")
    for name in UNSUPPORTED:
        if getattr(create, name):
            raise InvalidRequest(
                f"'{name}' is not supported by this server.",
                code="unsupported_parameter",
                param=name,
            )


def check_sizes(create: Create) -> None:
    """What is written as one piece is not too long. An input of items is none."""
    form = create.text.format if create.text is not None else None
    sizes = {
        "input": (len(create.input) if isinstance(create.input, str) else 0, WRITTEN_BYTES_MAX),
        "instructions": (len(create.instructions or ""), WRITTEN_BYTES_MAX),
        "tools": (_size(create.tools), WRITTEN_BYTES_MAX),
        "text": (0 if form is None else _size(form.schema), WRITTEN_BYTES_MAX),
        "user": (len(create.user or ""), NAME_BYTES_MAX),
        "prompt_cache_key": (len(create.prompt_cache_key or ""), NAME_BYTES_MAX),
    }
    for name, (size, size_max) in sizes.items():
        if size > size_max:
            message = f"Invalid '{name}': {size} bytes, at most {size_max}."
            raise InvalidRequest(message, code="invalid_value", param=name)
    choice = create.tool_choice
    if isinstance(choice, ToolChoiceName) and len(choice.tools or ()) > TOOLS_MAX:
        message = f"Too many tools: {len(choice.tools or ())}, at most {TOOLS_MAX}."
        raise InvalidRequest(message, code="invalid_value", param="tool_choice.tools")


def _size(raw: RawField) -> int:
    return 0 if raw is UNSET else memoryview(raw).nbytes


def _check_compaction(rule: Compact, path: str) -> None:
    if rule.type != "compaction":
        raise InvalidRequest(
            f"'{path}.type' must be 'compaction'.", code="invalid_value", param=f"{path}.type"
        )
    if rule.compact_threshold is not None and rule.compact_threshold < THRESHOLD_MIN:
        raise InvalidRequest(
            f"'{path}.compact_threshold' must be at least {THRESHOLD_MIN}.",
            code="invalid_value",
            param=f"{path}.compact_threshold",
        )


def check_items(items: Sequence[Item]) -> None:
    """What no item may ask for, whichever way it comes."""
    for index, item in enumerate(items):
        match item.value:
            case ConfigurationUpdate(text=TextUpdate() as text):
                check_format(text, f"input[{index}].")
            case CompactionTrigger() if index != len(items) - 1:
                raise InvalidRequest(
                    "'compaction_trigger' must be the last item of the input.",
                    code="invalid_value",
                    param=f"input[{index}].type",
                )
            case (
                Message(content=list() as parts)
                | FunctionCallOutput(output=list() as parts)
                | CustomToolCallOutput(output=list() as parts)
            ):
                if any(map(_is_unread, parts)):
                    raise InvalidRequest(
                        "'file_id' is not supported: this server has no Files API. "
                        "Send the contents inline instead.",
                        code="unsupported_value",
                        param=f"input[{index}]",
                    )
            case _:
                pass


def _is_unread(part: object) -> bool:
    """Whether a part names a file of ours whose contents were not read: this server has none."""
    match part:
        case InputFile(file_id=str() as file_id, file_data=data):
            return bool(file_id) and not data
        case InputImage(file_id=str() as file_id, image_url=url):
            return bool(file_id) and not url
        case _:
            return False


def check_format(text: TextConfig | TextUpdate | None, of: str = "") -> None:
    """A format by schema needs its schema; a schema that is not needed is echoed all the same."""
    if text is None or text.format is None:
        return
    path = f"{of}text.format.schema"
    schema = text.format.schema
    is_absent = schema is UNSET or bytes(schema) == b"null"
    if is_absent and text.format.type == "json_schema":
        raise InvalidRequest(f"Missing required parameter: '{path}'.", param=path)
    if schema is not UNSET:
        check_schema(schema, path)


def check_served(
    unserved: Sequence[str],
    choice: str | ToolChoiceName | None,
    tools: Tools,
    effects: Effects,
    *,
    refuses: bool,
) -> None:
    """A model that is not offered what its client counts on makes up what it would return: such a request is refused,
    unless there are other tools to call, or none may be called. `refuses`: always."""
    others = tools.offers or tools.deferred or tools.late or effects.offers or effects.deferred
    if refuses or not (others or choice == "none"):
        raise InvalidRequest(
            f"'tools' asks for '{unserved[0]}', which is not set up here, or not allowed for this API key.",
            code="unsupported_value",
            param="tools",
        )


def check_tool_choice(choice: str | ToolChoiceName, tools: Tools, effects: Effects) -> None:
    """A choice that cannot be met is refused now rather than quietly missed. Tools from items count."""
    problem = _unmet(choice, tools, effects)
    if problem is not None:
        raise InvalidRequest(
            f"'tool_choice' {problem}.", code="unsupported_value", param="tool_choice"
        )


def _unmet(choice: str | ToolChoiceName, tools: Tools, effects: Effects) -> str | None:
    """Why this choice cannot be met; None if it can be."""
    offers = tools.offers + effects.offers
    # A deferred tool can be called by name, though the model has not seen all of it.
    known: tuple[Offer, ...] = (*offers, *tools.deferred, *effects.deferred)
    match choice:
        case "required" | ToolChoiceName(type="allowed_tools") if tools.late:
            # Which tools there are is known when the turn begins.
            return None
        case ToolChoiceName(type=kind, server_label=str() as label) if (kind, label) in tools.late:
            return None
        case "required" if not offers:
            return "is 'required', but no tool was given that can be called"
        case ToolChoiceName(type="allowed_tools", mode="required", tools=allowed):
            is_met = bool(chosen_offers(allowed or [], known))
            return None if is_met else "requires one of several tools, none of which is in 'tools'"
        case ToolChoiceName(type="allowed_tools"):
            return None
        case ToolChoiceName():
            return None if chosen_offers([choice], known) else _unknown(choice)
        case _:
            return None


def _unknown(choice: ToolChoiceName) -> str:
    """What is wrong with the name of a tool that is not there."""
    kind = choice.type
    if kind in ("function", "custom"):
        return f"names the tool '{cut_name(choice.name)}', which is not in 'tools'"
    if choice.server_label is not None:
        return f"names the server '{choice.server_label}', which is not in 'tools'"
    if kind in BUILTINS:
        return f"forces '{kind}', which is not in 'tools' as something that the client runs"
    return f"forces '{cut_name(kind)}', which this server cannot run"
