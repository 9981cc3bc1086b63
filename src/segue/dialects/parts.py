"""What does an item say to a model that reads only text?

In: an item of any type. Out: a `Part`: what it is to the model, and its words, before any family has put its marks
around them. Nothing is left out without a word: a picture, a file or a sound is told in words, and an item that no
family has a place for is told as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Literal, NamedTuple, assert_never

import msgspec
from msgspec import Raw

from segue.dialects.offers import added_by, definition_of
from segue.wire.calls import arguments_of
from segue.wire.files import text_of_file
from segue.wire.items import (
    AdditionalTools,
    ApplyPatchCall,
    ApplyPatchCallOutput,
    CodeInterpreterCall,
    Compaction,
    CompactionSummary,
    CompactionTrigger,
    ComputerCall,
    ComputerCallOutput,
    ConfigurationUpdate,
    CustomToolCall,
    CustomToolCallOutput,
    FileSearchCall,
    FunctionCall,
    FunctionCallOutput,
    HostedOutput,
    ImageGenerationCall,
    InputAudio,
    InputFile,
    InputImage,
    InputText,
    Item,
    ItemReference,
    LocalShellCall,
    LocalShellCallOutput,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    McpListTools,
    Message,
    MessagePart,
    OutputPart,
    OutputText,
    Program,
    ProgramOutput,
    Reasoning,
    Refusal,
    ShellCall,
    ShellCallOutput,
    ShellExit,
    ShellOutput,
    ToolSearchCall,
    ToolSearchOutput,
    Value,
    WebSearchCall,
)
from segue.wire.web import as_call, called_by

Kind = Literal["think", "talk", "call", "response", "user", "system", "tools"]
# Fields of a call that say nothing to the model, or that stand elsewhere.
UNTOLD = {"type", "id", "call_id", "status"}
NOTHING_FOUND = "No tool was found."


class Part(NamedTuple):
    """What one item says. Of a call, `text` holds the arguments; of tools that were added, nothing."""

    kind: Kind
    text: str
    # Whom a call calls, by the one name that the model sees.
    name: str = ""
    # Which call this is, or which one it answers.
    call_id: str = ""


# What an item says that has no words of its own; left out like a thought that is closed.
NOTHING = Part("think", "")
DECLINED = "The user declined this call."


def parts_of(items: Sequence[Item]) -> list[Part]:
    """What these items say. Reasoning that came encrypted, from elsewhere, says nothing."""
    parts = [part_of(item) for item in items]
    return [part for part in parts if part.text or part.kind != "think"]


def part_of(item: Item) -> Part:
    """What one item says."""
    value = item.value
    match value:
        case Message():
            kinds: dict[str, Kind] = {"assistant": "talk", "user": "user"}
            return Part(kinds.get(value.role, "system"), text_of(value))
        case Reasoning():
            return Part("think", "\n\n".join(part.text for part in value.content or value.summary))
        case FunctionCall():
            return Part("call", value.arguments, called(value), value.call_id)
        case CustomToolCall():
            return Part("call", dumps({"input": value.input}), called(value), value.call_id)
        case ShellCall() | LocalShellCall() | ApplyPatchCall() | ToolSearchCall():
            arguments = arguments_of(value)
            told = arguments if isinstance(arguments, str) else dumps(arguments)
            return Part("call", told, _bare_type(item), _call_id(value))
        case (
            ComputerCall()
            | FileSearchCall()
            | CodeInterpreterCall()
            | ImageGenerationCall()
            | Program()
        ):
            told = dumps(_fields(item, but=UNTOLD))
            return Part("call", told, _bare_type(item), _call_id(value))
        case WebSearchCall(action=Raw() as action):
            return Part("call", as_call(action)[1], called_by(action), _call_id(value))
        case WebSearchCall():
            return NOTHING
        case McpCall(approval_request_id=str()):
            # The model made this call when it asked for the approval.
            return NOTHING
        case McpCall() | McpApprovalRequest():
            return Part("call", value.arguments, called(value), _call_id(value))
        case McpApprovalResponse(approve=True) | McpListTools():
            # What comes of the one stands behind it; of the other, in the head.
            return NOTHING
        case McpApprovalResponse():
            told = f"{DECLINED} {value.reason}" if value.reason else DECLINED
            return Part("response", told, call_id=value.approval_request_id)
        case HostedOutput():
            return Part("response", value.output, call_id=value.call_id)
        case FunctionCallOutput() | CustomToolCallOutput():
            return Part("response", _joined(value.output, "\n"), call_id=_call_id(value))
        case LocalShellCallOutput():
            return Part("response", value.output, call_id=_call_id(value))
        case ShellCallOutput():
            return Part(
                "response", dumps([_printed(one) for one in value.output]), call_id=value.call_id
            )
        case ToolSearchOutput():
            found = [dumps(definition_of(offer)) for offer in added_by(item)]
            return Part("response", "\n".join(found) or NOTHING_FOUND, call_id=_call_id(value))
        case ApplyPatchCallOutput() | ComputerCallOutput() | ProgramOutput():
            told = dumps(_fields(item, but={"type", "id", "call_id"}))
            return Part("response", told, call_id=_call_id(value))
        case AdditionalTools():
            return Part("tools", "")
        case ConfigurationUpdate():
            return Part("system", _updated(value))
        case Compaction() | CompactionSummary() | CompactionTrigger() | ItemReference():
            return Part("system", dumps(_told(msgspec.json.decode(item.raw))))
        case _:
            assert_never(value)


def text_of(value: Message) -> str:
    """The words of a message. The model's own parts are one text; parts of others are separate texts."""
    return _joined(value.content, "" if value.role == "assistant" else "\n")


def dumps(value: object) -> str:
    """JSON with the spaces that templates put into it."""
    return json.dumps(value, ensure_ascii=False)


def dumps_indented(value: object) -> str:
    """The same over several lines, as some templates have it."""
    return json.dumps(value, ensure_ascii=False, indent=4)


def is_object(text: str) -> bool:
    """Whether this is the JSON of an object."""
    try:
        return text.startswith("{") and isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def object_or_string(text: str) -> str:
    """Arguments as JSON: verbatim if they are an object, as a string if not."""
    bare = text.strip()
    return bare if is_object(bare) else dumps(text)


def _joined(content: str | Sequence[MessagePart | OutputPart], glue: str) -> str:
    return content if isinstance(content, str) else glue.join(_words(part) for part in content)


def _words(part: MessagePart | OutputPart) -> str:
    match part:
        case InputText() | OutputText():
            return part.text
        case Refusal():
            return part.refusal
        case InputImage():
            return f"[image: {_origin(part.image_url, part.file_id)}, which this model cannot see]"
        case InputFile():
            origin = _origin(part.filename, part.file_url, part.file_id, _kind_of(part.file_data))
            text = text_of_file(part)
            if text is None:
                return f"[file: {origin}, which cannot be read here]"
            return f"[file: {origin}]\n{text}\n[end of file]"
        case InputAudio():
            return f"[audio: {_origin(part.audio_url)}, which this model cannot hear]"
        case _:
            assert_never(part)


def _origin(*places: object) -> str:
    """Where something came from, without its bytes."""
    for place in places:
        if isinstance(place, str) and place:
            return _without_data(place)
    return "sent as data"


def _kind_of(file_data: object) -> object:
    """Of the data itself only what says its kind: bare base64 is no origin."""
    return file_data if isinstance(file_data, str) and file_data.startswith("data:") else None


def _without_data(text: str) -> str:
    """The text itself, or for a data URL only what kind of data it is."""
    if not text.startswith("data:"):
        return text
    return f"{text[5:].partition(',')[0].partition(';')[0] or 'data'} sent as data"


def _told(value: object) -> object:
    """JSON for the model's eyes: the same, with words in place of embedded data."""
    match value:
        case str():
            return _without_data(value)
        case list():
            return [_told(inner) for inner in value]
        case dict():
            return {key: _told(inner) for key, inner in value.items()}
        case _:
            return value


def _fields(item: Item, but: set[str]) -> object:
    """What is particular to this item."""
    fields = msgspec.json.decode(item.raw, type=dict[str, object])
    if isinstance(item.value, ImageGenerationCall) and "result" in fields:
        fields["result"] = "[image, which this model cannot see]"
    return _told({key: value for key, value in fields.items() if key not in but})


def _printed(output: ShellOutput) -> dict[str, object]:
    """What one command printed, as the model is told."""
    outcome = output.outcome
    ended: dict[str, object] = (
        {"exit_code": outcome.exit_code} if isinstance(outcome, ShellExit) else {"timed_out": True}
    )
    return {**ended, "stdout": output.stdout, "stderr": output.stderr}


def _updated(value: ConfigurationUpdate) -> str:
    """New settings in words; that they are kept is not up to the words."""
    parsed: list[str] = []
    if value.reasoning and value.reasoning.effort:
        parsed.append(f"From here on the effort of reasoning is: {value.reasoning.effort}.")
    wanted = value.text.format if value.text else None
    if wanted is not None and isinstance(wanted.schema, Raw):
        schema = dumps(msgspec.json.decode(wanted.schema))
        parsed.append(f"From here on answers are JSON of this schema: {schema}")
    elif wanted is not None:
        parsed.append(
            f"From here on answers are {'plain text' if wanted.type == 'text' else 'JSON'}."
        )
    return " ".join(parsed) or "The settings stay as they are."


def _bare_type(item: Item) -> str:
    tag = type(item.value).__struct_config__.tag
    assert isinstance(tag, str)
    return tag.removesuffix("_call")


def _call_id(value: Value) -> str:
    found = getattr(value, "call_id", None)
    if isinstance(found, str):
        return found
    match value:
        case LocalShellCallOutput(id=str() as named):
            return named
        case ToolSearchCall(id=str() as named) | ToolSearchOutput(id=str() as named):
            # Our own search has no call_id; call and output have the same letters behind their prefix.
            return f"search_{named.rpartition('_')[2]}"
        case McpCall(id=str() as named) | McpApprovalRequest(id=str() as named):
            return named
        case WebSearchCall(id=str() as named):
            return named
        case _:
            return ""


def called(value: Value) -> str:
    """Whom a call calls, by the one name that the model sees; nothing where the item alone does not tell."""
    match value:
        case McpCall() | McpApprovalRequest():
            return f"{value.server_label}.{value.name}"
        case FunctionCall() | CustomToolCall():
            return f"{value.namespace}.{value.name}" if value.namespace else value.name
        case WebSearchCall(action=Raw() as action):
            return called_by(action)
        case _:
            return ""
