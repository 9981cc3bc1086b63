"""How is a conversation written as chat messages, and how are an endpoint's deltas read?

For engines that render and parse themselves. A prompt is a row of JSON messages, each serialized once and chained: the
next turn adds what the model wrote and what is given now, and nothing before that is touched. Instructions and what
developers say before the first user message are the first message; only if they change is everything written again.
Tools are not part of it: the engine has a field for them.

A model turn is one assistant message: reasoning, text and calls together. Calls and their outputs are paired by
`call_id`; a call or an output without an id is written as text, because endpoints refuse either without the other.

Endpoints differ in what they take: a `MessageForm` says how messages are written. The engine changes it when the
endpoint refuses a message (`otherwise`) or sends its thoughts under another name (`hear`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterator, Sequence
from typing import TypeGuard

import msgspec
from msgspec import Struct, structs

from segue.derivation.roles import JsonObject, RoleRule, place
from segue.dialects.parts import MODEL_TURN, Part, dumps, part_of, words_of
from segue.errors import EngineFailed
from segue.readers.call_json import is_object
from segue.readers.forced import check_endpoint
from segue.readers.item_writer import ItemWriter
from segue.readers.offers import call_of, callable_offers
from segue.readers.plain_names import PlainNames
from segue.seams.history import Round, Warm, above, since_fresh
from segue.seams.model import (
    Deltas,
    ItemOpened,
    ItemText,
    Parsed,
    Piece,
    Rendered,
    Scene,
    TurnClosed,
)
from segue.seams.prompt import NO_IDS, NO_MESSAGES, Head, IdArray, Messages
from segue.wire import items as wire
from segue.wire.effects import Effects
from segue.wire.kinds import call_id_of, is_output
from segue.wire.tools import Tools

# A change of this file that changes what is written needs a new number.
VERSION = "messages4"
# Gemini's own word for a call whose signature is not known: it must stand where the signature would.
UNSIGNED = {"google": {"thought_signature": "skip_thought_signature_validator"}}

# Of text, code and JSON as agents send them, about; the endpoint's own count replaces it after each turn.
BYTES_PER_TOKEN = 3.5
PICTURE_TOKENS = 1_000


class MessageForm(Struct, frozen=True):
    """How one endpoint wants its messages."""

    # Where thoughts go back: in a field of this name, in the "content" between `<think>` marks, or as a "thinking" part
    # of it, each as the endpoint itself sends them. None: they are not sent.
    reasoning: str | None = "reasoning_content"
    # Where they were refused.
    refused: tuple[str, ...] = ()
    roles: RoleRule = RoleRule()
    # Whether every model turn needs thoughts, be they blank.
    needs_thoughts: bool = False
    # Whether every call needs a signature.
    signs_calls: bool = False
    # Whether pictures are sent; otherwise they are described in words.
    sees_images: bool = True
    # Names of tools that are written otherwise than by themselves, because another tool would be called so too.
    respelled: frozenset[tuple[str, str]] = frozenset()


def _roles(**changed: object) -> Callable[[MessageForm], MessageForm]:
    def change(form: MessageForm) -> MessageForm:
        return structs.replace(form, roles=structs.replace(form.roles, **changed))

    return change


def _first(form: MessageForm) -> MessageForm:
    return form if form.roles.system == "never" else _roles(system="first")(form)


# What endpoints say of messages that they do not take, and what to write instead.
CHANGES: tuple[tuple[str, Callable[[MessageForm], MessageForm]], ...] = (
    (
        r"reasoning_content.{0,60}(missing|passed back|required)|missing.{0,40}reasoning_content",
        lambda form: structs.replace(form, reasoning="reasoning_content", needs_thoughts=True),
    ),
    (r"thought_?signature", lambda form: structs.replace(form, signs_calls=True)),
    (
        r"system (role|message|prompt|instruction)s? (is |are )?not (supported|allowed|enabled)",
        _roles(system="never"),
    ),
    (
        r"system message.{0,40}(beginning|first|start)|unexpected role '?(system|developer)"
        r"|alternat",
        _first,
    ),
    (
        r"alternat|unexpected role '?(user|tool|assistant)|consecutive (user|assistant)",
        _roles(alternates=True),
    ),
    (
        r"(image|vision|multimodal).{0,60}not (support|available)|support.{0,20} (image|vision)",
        lambda form: structs.replace(form, sees_images=False),
    ),
    (r"no user (query|message)|at least one user|contents? (is|are) not", _roles(needs_user=True)),
)


class MessagesDialect:
    """A `Dialect` for chat endpoints. `form` is how messages are written from now on."""

    takes_images = True

    def __init__(self) -> None:
        self.form = MessageForm()
        self.name = "messages"
        self.fingerprint = VERSION
        # None: the endpoint ends the model's turn itself.
        self.stops: frozenset[int] = frozenset()
        # Of the tools that were last asked for: agents send the same ones each turn.
        self._names: tuple[Tools, Effects, PlainNames] | None = None

    def render(self, scene: Scene) -> Rendered:
        """The messages. Their counts are in bytes, as the length of the prompt is."""
        if scene.head.tool_choice not in ("auto", "none") or scene.format is not None:
            check_endpoint(scene)
        return self.render_as(scene, self.form_for(scene))

    def form_for(self, scene: Scene) -> MessageForm:
        """The form in which this scene is written."""
        form = self.form
        respelled = self._names_of(scene).respelled
        sees_images = scene.sees_images and form.sees_images
        if sees_images == form.sees_images and not respelled:
            return form
        return structs.replace(form, sees_images=sees_images, respelled=respelled)

    def names(self, scene: Scene) -> Callable[[str], str]:
        """What the tools of this scene are called, by their qualified names."""
        return self._names_of(scene).name

    def _names_of(self, scene: Scene) -> PlainNames:
        tools = scene.head.tools
        effects = scene.effects
        cached = self._names
        if cached is None or cached[0] is not tools or cached[1] is not effects:
            cached = self._names = (tools, effects, PlainNames(callable_offers(scene)))
        return cached[2]

    def render_as(self, scene: Scene, form: MessageForm) -> Rendered:
        """The messages in this form."""
        warm, rounds = self._last_warm(scene, form)
        rows = [row for round_ in rounds for row in (round_.given, round_.wrote)] + [scene.given]
        values = (item.value for row in rows for item in row)
        answered = {call_id_of(value) for value in values if is_output(value)}
        names = self._names_of(scene)
        messages = [message for row in rows for message in _messages(row, form, answered, names)]
        if warm is None and scene.head.instructions is not None:
            messages.insert(0, _message("system", scene.head.instructions))
        # More instructions may follow at the beginning, and belong into the same message.
        is_begun = warm is not None or any(message["role"] != "system" for message in messages)
        placed = place(messages, form.roles, is_beginning=warm is None)
        context = warm or NO_MESSAGES
        encoded = [*map(_encode, placed)]
        tokens = sum(map(_tokens, placed, encoded))
        if warm is None:
            tokens += _estimate(len(scene.head.tools.raw))
        row = b",".join(encoded)
        context = context.plus(row, form if is_begun else None, tokens)
        reused = 0 if warm is None else warm.length
        return Rendered(context, NO_IDS, context.length - reused, reused)

    def otherwise(self, form: MessageForm, refusal: str) -> MessageForm | None:
        """How to write instead, by an endpoint's refusal; None if it is about something else."""
        for pattern, change in CHANGES:
            changed = change(form)
            if changed != form and re.search(pattern, refusal, re.IGNORECASE):
                return changed
        name = form.reasoning
        if name is not None and name != "content" and re.search(rf"\b{name}\b", refusal):
            return structs.replace(form, reasoning=None, refused=(*form.refused, name))
        return None

    def adopt(self, form: MessageForm, scene: Scene) -> None:
        """Write in this form from now on; it was found for a scene that may have had no place for pictures."""
        sees_images = form.sees_images or not scene.sees_images
        sees_images = self.form.sees_images and sees_images
        self.form = structs.replace(form, sees_images=sees_images, respelled=frozenset())

    def hear(self, name: str) -> None:
        """The endpoint sends its thoughts under this name: so they go back."""
        if name != self.form.reasoning and name not in self.form.refused:
            self.form = structs.replace(self.form, reasoning=name)

    def write(self, items: Sequence[wire.Item]) -> IdArray[int]:
        """Nothing: a chat endpoint takes no ids."""
        return NO_IDS

    def reader(self, scene: Scene) -> MessagesReader:
        return MessagesReader(scene, self._names_of(scene))

    def _last_warm(
        self, scene: Scene, form: MessageForm
    ) -> tuple[Messages | None, Sequence[Round]]:
        """The longest row that still holds, and the rounds after it. What a turn keeps ends before its last words."""
        # The last is the oldest.
        later = [*reversed(scene.rounds)]
        turn = scene.past
        while turn is not None:
            row = self._usable(scene.head, turn.warm, form)
            if row is not None:
                return row, [Round((), turn.rounds[-1].wrote), *reversed(later)]
            later.extend(reversed(turn.rounds))
            turn = above(turn)
        return None, since_fresh(later[::-1])

    def _usable(self, head: Head, warm: Warm | None, form: MessageForm) -> Messages | None:
        """The row that was kept, if it was made in this form under the same instructions."""
        if warm is None or warm.fingerprint != self.fingerprint or not form.roles.is_local:
            return None
        row = warm.prompt
        if not isinstance(row, Messages) or row.form != form:
            return None
        return row if warm.head.instructions == head.instructions else None


def _messages(
    items: Sequence[wire.Item], form: MessageForm, answered: Container[str], names: PlainNames
) -> Iterator[JsonObject]:
    """These items as messages."""
    spoken: list[Part] = []
    pictures: list[wire.InputImage] = []
    for item in items:
        part = part_of(item)
        if part.kind == "tools" or _is_cut_call(item, part, answered):
            # The engine has a field for tools, those that items bring included.
            continue
        if pictures and part.kind != "response":
            yield _shown(pictures)
            pictures = []
        if part.kind == "think" and not (part.text and form.reasoning):
            continue
        is_spoken = part.kind in ("think", "talk") or (part.kind == "call" and part.call_id)
        is_same_turn = is_spoken and spoken and (spoken[-1].kind, part.kind) in MODEL_TURN
        if spoken and not is_same_turn:
            yield _assistant(spoken, form, names)
            spoken = []
        if is_spoken:
            spoken.append(part)
            continue
        yield _other(item, part, form)
        pictures += _pictures(item, form) if part.call_id else []
    if spoken:
        yield _assistant(spoken, form, names)
    if pictures:
        yield _shown(pictures)


def _is_cut_call(item: wire.Item, part: Part, answered: Container[str]) -> bool:
    """Whether this is a call that a limit cut off and that has no output: endpoints refuse such a call."""
    is_cut = part.kind == "call" and getattr(item.value, "status", None) == "incomplete"
    return is_cut and part.call_id not in answered


def _other(item: wire.Item, part: Part, form: MessageForm) -> JsonObject:
    """A message of its own."""
    match part.kind:
        case "response" if part.call_id:
            text = _output(item) if _pictures(item, form) else part.text
            return {"role": "tool", "tool_call_id": part.call_id, "content": text}
        case "response":
            return _message("user", f"[answer: {part.text}]")
        case "call":
            return _message("assistant", f"[{part.name}: {part.text}]")
        case "system":
            return _message("system", part.text)
        case _:
            return {"role": "user", "content": _content(item, part, form)}


def _pictures(item: wire.Item, form: MessageForm) -> list[wire.InputImage]:
    """Pictures in a tool's output, where the model sees them. A tool's message has no place for them, so that they
    follow the outputs in a message of their own."""
    value = item.value
    if not (
        form.sees_images and isinstance(value, wire.FunctionCallOutput | wire.CustomToolCallOutput)
    ):
        return []
    parts = value.output if isinstance(value.output, list) else []
    return [inner for inner in parts if _is_shown(inner)]


def _content(item: wire.Item, part: Part, form: MessageForm) -> str | list[JsonObject]:
    """What a user wrote; with pictures where the model sees them."""
    content = item.value.content if isinstance(item.value, wire.Message) else ""
    if not form.sees_images or isinstance(content, str) or not any(map(_is_shown, content)):
        return part.text
    return [
        {"type": "image_url", "image_url": _image(inner)}
        if _is_shown(inner)
        else {"type": "text", "text": words_of(inner)}
        for inner in content
    ]


def _estimate(size: int) -> int:
    return int(size / BYTES_PER_TOKEN)


def _tokens(message: JsonObject, encoded: bytes) -> int:
    """About how many tokens a message is. A picture has as many as one of a usual size."""
    content = message["content"]
    if not isinstance(content, list):
        return _estimate(len(encoded))
    pictures = [part for part in content if part["type"] == "image_url"]
    texts = [part for part in content if part["type"] != "image_url"]
    return len(pictures) * PICTURE_TOKENS + _estimate(len(_encode({**message, "content": texts})))


def _message(role: str, text: str) -> JsonObject:
    return {"role": role, "content": text}


def _output(item: wire.Item) -> str:
    """A tool's output with pictures in it: its words, and where a picture stands."""
    assert isinstance(item.value, wire.FunctionCallOutput | wire.CustomToolCallOutput)
    assert not isinstance(item.value.output, str)
    note = "[image: shown after the outputs]"
    return "\n".join(note if _is_shown(inner) else words_of(inner) for inner in item.value.output)


def _shown(pictures: Sequence[wire.InputImage]) -> JsonObject:
    content: list[JsonObject] = [{"type": "text", "text": "Images from the tool outputs:"}]
    content += [{"type": "image_url", "image_url": _image(picture)} for picture in pictures]
    return {"role": "user", "content": content}


def _is_shown(part: object) -> TypeGuard[wire.InputImage]:
    """Whether the picture itself is here."""
    return isinstance(part, wire.InputImage) and part.data_url is not None


def _image(part: wire.InputImage) -> JsonObject:
    image: JsonObject = {"url": part.image_url}
    if isinstance(part.detail, str):
        image["detail"] = part.detail
    return image


def _assistant(parts: Sequence[Part], form: MessageForm, names: PlainNames) -> JsonObject:
    """One model turn: its reasoning, its text and its calls."""
    text = "".join(part.text for part in parts if part.kind == "talk")
    calls = [_call(part, names) for part in parts if part.kind == "call"]
    message: JsonObject = {"role": "assistant", "content": text if text or not calls else None}
    thoughts = "\n\n".join(part.text for part in parts if part.kind == "think")
    if thoughts or form.needs_thoughts:
        message.update(_thoughts(thoughts or " ", text, form))
    if calls:
        message["tool_calls"] = calls
        if form.signs_calls:
            calls[0]["extra_content"] = UNSIGNED
    return message


def _thoughts(thoughts: str, text: str, form: MessageForm) -> JsonObject:
    """What the model thought, where the endpoint itself has it."""
    match form.reasoning:
        case "content":
            return {"content": f"<think>\n{thoughts}\n</think>\n\n{text}"}
        case "thinking":
            thinking = {"type": "thinking", "thinking": [{"type": "text", "text": thoughts}]}
            said = [{"type": "text", "text": text}] if text else []
            return {"content": [thinking, *said]}
        case "reasoning_details":
            return {"reasoning_details": [{"type": "reasoning.text", "text": thoughts}]}
        case str() as name:
            return {name: thoughts}
        case None:
            return {}


def _call(part: Part, names: PlainNames) -> JsonObject:
    """Endpoints decode arguments: arguments that are no object are put into an object."""
    bare = part.text.strip()
    arguments = bare if is_object(bare) else dumps({"arguments": part.text}) if bare else "{}"
    function = {"name": names.name(part.name), "arguments": arguments}
    return {"id": part.call_id, "type": "function", "function": function}


_encode = msgspec.json.encode


# --- reading --------------------------------------------------------------------------------------


class MessagesReader:
    """A `Reader`: the endpoint has parsed already, what is left is where items begin and end.

    Blank text opens nothing: templates leave newlines between a thought and a call. There are no ids to keep.
    """

    def __init__(self, scene: Scene, names: PlainNames) -> None:
        self._scene = scene
        self._names = names
        self._items = ItemWriter(is_single=not scene.head.parallel_tool_calls)
        self._blank = ""
        self._blank_logprobs: tuple[wire.Logprob, ...] = ()
        self._has_thought = False
        self._index: int | None = None
        self._closed_indexes: set[int] = set()

    @property
    def is_over(self) -> bool:
        """Whether the only call that is allowed is whole."""
        return self._items.is_over

    def feed(self, piece: Piece) -> list[Parsed]:
        assert isinstance(piece, Deltas), "this dialect reads deltas"
        items = self._items
        parsed = items.parsed = []
        for delta in piece.deltas:
            if items.is_over:
                break
            if delta.reasoning:
                self._think(delta.reasoning)
            if text := delta.text:
                if items.open is not None and items.open.kind == "message":
                    parsed.append(ItemText(text, delta.logprobs))
                else:
                    self._begin_to_talk(text, delta.logprobs)
            if delta.call_index is not None and not items.is_over:
                self._call(delta.call_index, delta.call_name, delta.call_arguments)
        return parsed

    def close(self, *, is_cut: bool) -> list[Parsed]:
        self._items.parsed = []
        self._close(is_cut=is_cut and not self.is_over)
        return [*self._items.parsed, TurnClosed(NO_IDS)]

    def _think(self, text: str) -> None:
        opened = self._items.open
        if opened is None or opened.kind != "reasoning":
            if not text.strip():
                return
            self._open(ItemOpened("reasoning"))
            if self.is_over:
                return
            self._has_thought = True
            text = text.lstrip("\n")
        self._items.write(text)

    def _begin_to_talk(self, text: str, logprobs: tuple[wire.Logprob, ...]) -> None:
        text = self._blank + text
        logprobs = self._blank_logprobs + logprobs
        if not text.strip():
            self._blank = text
            self._blank_logprobs = logprobs
            return
        # Newlines after a thought belong to its mark; at the very beginning they are the model's own.
        text = text.lstrip("\n") if self._has_thought else text
        self._open(ItemOpened("message"))
        if not self.is_over:
            self._items.parsed.append(ItemText(text, logprobs))

    def _call(self, index: int, name: str, arguments: str) -> None:
        if index != self._index:
            if index in self._closed_indexes:
                raise EngineFailed("The engine mixed the arguments of two calls.")
            if not name:
                raise EngineFailed("The engine sent arguments for a call without a name.")
            opened = call_of(self._scene, self._names.offer(name), name)
            if opened is None:
                raise EngineFailed("The engine called a tool that it was not allowed to call.")
            self._open(opened)
            if self.is_over:
                return
            self._index = index
        if arguments:
            self._items.write_arguments(arguments)

    def _open(self, opened: ItemOpened) -> None:
        self._close()
        if not self.is_over:
            self._items.open_item(opened)

    def _close(self, *, is_cut: bool = False) -> None:
        self._blank = ""
        self._blank_logprobs = ()
        if self._items.open is None:
            return
        self._items.end_arguments()
        self._items.close(is_cut=is_cut)
        if self._index is not None:
            self._closed_indexes.add(self._index)
            self._index = None
