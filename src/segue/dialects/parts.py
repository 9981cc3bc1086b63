"""What does an item say to a model that reads only text?

In: an item of any type. Out: a `Part`: what it is to the model, and its words, before any family has put its marks
around them. Nothing is left out silently: a picture, a file or a sound becomes words, and an item that no
family has a place for becomes JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, assert_never

import msgspec
from msgspec import Raw

from segue.dialects.files import text_of_file
from segue.readers.call_json import is_object
from segue.readers.offers import added_by, definition_of
from segue.wire import items
from segue.wire.calls import arguments_of
from segue.wire.codec import encode
from segue.wire.items import Item, ItemValue
from segue.wire.kinds import (
    KINDS,
    Shown,
    call_id_of,
    called,
    is_call,
    is_model_written,
    is_output,
    shown_as,
)
from segue.wire.tools import Offer

# Fields of a call or an output that the model does not need, or that are part of every call.
NOT_SHOWN = {"type", "id", "call_id"}
NOTHING_FOUND = "No tool was found."
# As it stands in a data URL, and no other words.
MEDIA_TYPE = re.compile(r"[\w.+-]{1,64}/[\w.+-]{1,64}(?=[;,])", re.ASCII)


class Part(NamedTuple):
    """What one item says. Of a call, `text` holds the arguments; of tools that were added, nothing."""

    kind: Shown
    text: str
    # Whom a call calls, by the one name that the model sees.
    name: str = ""
    # Which call this is, or which one it answers.
    call_id: str = ""
    # Of a call that is nothing but code: the code.
    code: str | None = None


# What an item says that has no words of its own; left out like a thought that is closed.
NOTHING = Part("think", "")
DECLINED = "The user declined this call."


# What stands for a picture that the model sees; None: it is described in words.
Show = Callable[[items.InputImage], str | None]

# What goes on in the same block: a model turn in the order in which the model writes it.
MODEL_TURN = {
    ("think", "think"), ("think", "talk"), ("think", "call"), ("talk", "call"), ("call", "call"),
}  # fmt: skip


def blocks_of(
    given: Sequence[Item],
    joins: set[tuple[str, str]],
    tools: Callable[[Sequence[Offer]], str],
    show: Show | None = None,
) -> list[list[Part]]:
    """What these items say, by block; `tools` writes the tools that an item brings, `show` pictures."""
    blocks: list[list[Part]] = []
    for item in given:
        part = part_of(item, show)
        if part.kind == "tools":
            added = added_by(item)
            part = Part("tools", tools(added)) if added else NOTHING
        if part.kind == "think" and not part.text:
            continue
        if blocks and (blocks[-1][-1].kind, part.kind) in joins:
            blocks[-1].append(part)
        else:
            blocks.append([part])
    return blocks


def in_call_order(given: Sequence[Item], before: Sequence[Item]) -> Sequence[Item]:
    """These items, with neighbouring outputs in the order of their calls, for families that know them by nothing
    else. `before`: what the model wrote right before them."""
    if sum(is_output(item.value) for item in given) < 2:
        return given
    ordered: list[Item] = []
    outputs: list[Item] = []
    places: dict[str, int] = {}
    was_model = False
    for item in (*before, *given):
        if is_output(item.value):
            outputs.append(item)
            was_model = False
            continue
        ordered += _by_place(outputs, places)
        outputs = []
        ordered.append(item)
        is_model = is_model_written(item.value)
        if is_model and not was_model:
            # Of each model turn the calls count anew.
            places = {}
        was_model = is_model
        if is_call(item.value):
            places[call_id_of(item.value)] = len(places)
    return [*ordered, *_by_place(outputs, places)][len(before) :]


def _by_place(outputs: Sequence[Item], places: Mapping[str, int]) -> list[Item]:
    return sorted(outputs, key=lambda item: places.get(call_id_of(item.value), len(places)))


def parts_of(given: Sequence[Item]) -> list[Part]:
    """What these items say. Reasoning that came encrypted, from elsewhere, says nothing."""
    parts = [part_of(item) for item in given]
    return [part for part in parts if part.text or part.kind != "think"]


def part_of(item: Item, show: Show | None = None) -> Part:
    """What one item says; `show` writes its pictures."""
    value = item.value
    if isinstance(value, items.FunctionCallOutput) and isinstance(value.output, str):
        # What an agent sends on almost every turn.
        return Part("response", value.output, call_id=value.call_id or "")
    match shown_as(value):
        case "nothing":
            return NOTHING
        case "think":
            return Part("think", _thought(value))
        case "call":
            name = called(value) or KINDS[type(value)].type.removesuffix("_call")
            code = (value.code or "") if isinstance(value, items.CodeInterpreterCall) else None
            return Part("call", _arguments(item), name, call_id_of(value), code)
        case "response":
            return Part("response", _output(item, show), call_id=call_id_of(value))
        case "tools":
            return Part("tools", "")
        case "talk" | "user" | "system" as kind:
            return Part(kind, _said(item, show))
        case kind:
            assert_never(kind)


def _thought(value: ItemValue) -> str:
    parts = (value.content or value.summary) if isinstance(value, items.Reasoning) else ()
    return "\n\n".join(part.text for part in parts)


def _arguments(item: Item) -> str:
    """What the model wrote to make a call; of a call that another server has run, all that is known of it."""
    match item.value:
        case items.FunctionCall(arguments=text) | items.McpCall(arguments=text):
            return text
        case items.McpApprovalRequest(arguments=text):
            return text
        case items.CustomToolCall(input=text):
            return dumps({"input": text})
        case (
            items.ShellCall()
            | items.LocalShellCall()
            | items.ApplyPatchCall()
            | items.ToolSearchCall()
            | items.CodeInterpreterCall() as value
        ):
            arguments = arguments_of(value)
            return arguments if isinstance(arguments, str) else dumps(arguments)
        case items.WebSearchCall() as value:
            return encode(arguments_of(value)).decode()
        case _:
            return dumps(_fields(item, but={*NOT_SHOWN, "status"}))


def _output(item: Item, show: Show | None) -> str:
    """What a call returned; where no words are for the model, the fields of the item."""
    match item.value:
        case items.FunctionCallOutput(output=output) | items.CustomToolCallOutput(output=output):
            return _joined(output, "\n", show)
        case items.LocalShellCallOutput(output=text) | items.HostedOutput(output=text):
            return text
        case items.ShellCallOutput(output=outputs):
            return dumps([_printed(output) for output in outputs])
        case items.ToolSearchOutput():
            definitions = [dumps(definition_of(offer)) for offer in added_by(item)]
            return "\n".join(definitions) or NOTHING_FOUND
        case items.McpApprovalResponse(reason=reason):
            return f"{DECLINED} {reason}" if reason else DECLINED
        case _:
            return dumps(_fields(item, but=NOT_SHOWN))


def _said(item: Item, show: Show | None) -> str:
    """The words of a message, or of a setting; of anything else, the item as JSON."""
    match item.value:
        case items.Message() as message:
            return text_of(message, show)
        case items.ConfigurationUpdate() as update:
            return _updated(update)
        case _:
            return dumps(_without_bytes(msgspec.json.decode(item.raw)))


def text_of(value: items.Message, show: Show | None = None) -> str:
    """The words of a message. The model's own parts are one text; parts of others are separate texts."""
    return _joined(value.content, "" if value.role == "assistant" else "\n", show)


def dumps(value: object, indent: int | None = None) -> str:
    """JSON with the spaces that templates put into it, where some have it over several lines."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def object_or_string(text: str) -> str:
    """Arguments as JSON: verbatim if they are an object, as a string if not."""
    bare = text.strip()
    return bare if is_object(bare) else dumps(text)


def _joined(
    content: str | Sequence[items.MessagePart | items.OutputPart],
    glue: str,
    show: Show | None = None,
) -> str:
    """These parts as one text, with `glue` between words; around a picture there is none."""
    if isinstance(content, str):
        return content
    text = ""
    needs_glue = False
    for part in content:
        shown = show(part) if show and isinstance(part, items.InputImage) else None
        text += (glue if needs_glue and shown is None else "") + (shown or words_of(part))
        needs_glue = shown is None
    return text


def words_of(part: items.MessagePart | items.OutputPart) -> str:
    """What one part of a message or of an output says."""
    match part:
        case items.InputText() | items.OutputText():
            return part.text
        case items.Refusal():
            return part.refusal
        case items.InputImage():
            return f"[image: {_origin(part.image_url, part.file_id)}, which this model cannot see]"
        case items.InputFile():
            origin = _origin(part.filename, part.file_url, part.file_id, _kind_of(part.file_data))
            text = text_of_file(part)
            if text is None:
                return f"[file: {origin}, which cannot be read here]"
            return f"[file: {origin}]\n{text}\n[end of file]"
        case items.InputAudio():
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
    kind = MEDIA_TYPE.match(text, len("data:"))
    return f"{kind[0] if kind else 'data'} sent as data"


def _without_bytes(value: object) -> object:
    """JSON as the model reads it: the same, with words in place of embedded data."""
    match value:
        case str():
            return _without_data(value)
        case list():
            return [_without_bytes(inner) for inner in value]
        case dict():
            return {key: _without_bytes(inner) for key, inner in value.items()}
        case _:
            return value


def _fields(item: Item, but: set[str]) -> object:
    """What is particular to this item."""
    fields = msgspec.json.decode(item.raw, type=dict[str, object])
    if isinstance(item.value, items.ImageGenerationCall) and "result" in fields:
        fields["result"] = "[image, which this model cannot see]"
    return _without_bytes({key: value for key, value in fields.items() if key not in but})


def _printed(output: items.ShellOutput) -> dict[str, object]:
    """What one command printed, as the model reads it."""
    outcome = output.outcome
    ended: dict[str, object] = (
        {"exit_code": outcome.exit_code}
        if isinstance(outcome, items.ShellExit)
        else {"timed_out": True}
    )
    # As it comes: so what is there of an output begins the whole of it.
    return {"stdout": output.stdout, "stderr": output.stderr, **ended}


def _updated(value: items.ConfigurationUpdate) -> str:
    """New settings in words; that they are kept is not up to the words."""
    lines: list[str] = []
    if value.reasoning and value.reasoning.effort:
        lines.append(f"From here on the effort of reasoning is: {value.reasoning.effort}.")
    wanted = value.text.format if value.text else None
    if wanted is not None and isinstance(wanted.schema, Raw):
        schema = dumps(msgspec.json.decode(wanted.schema))
        lines.append(f"From here on answers are JSON of this schema: {schema}")
    elif wanted is not None:
        kind = "plain text" if wanted.type == "text" else "JSON"
        lines.append(f"From here on answers are {kind}.")
    return " ".join(lines) or "The settings stay as they are."
