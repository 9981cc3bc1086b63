"""How is a conversation written as chat messages, and how are an endpoint's deltas read?

For engines that render and parse themselves. A prompt is a row of JSON messages, each serialized once and chained: the
next turn adds what the model wrote and what is given now, and nothing before that is touched. Instructions are
the first message; only if they change is everything written again. Tools are not part of it: the engine has a field for
them.

A model turn is one assistant message: reasoning, text and calls together. Calls and their outputs are paired by
`call_id`; a call or an output without an id is written as text, because endpoints refuse either without the other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeGuard

import msgspec

from segue.dialects.parts import MODEL_TURN, Part, dumps, part_of, words_of
from segue.errors import EngineFailed
from segue.readers.call_json import is_object
from segue.readers.item_writer import ItemWriter
from segue.readers.offers import call_in
from segue.turn import values
from segue.wire import items as wire
from segue.wire.tools import plain_name

# A change of this file that changes what is written needs a new number.
VERSION = "messages3"

JsonObject = dict[str, object]


class MessagesDialect:
    """A `Dialect` for chat endpoints.

    `sees_images`: pictures are sent; otherwise they are described in words. `sends_reasoning`: what the model thought
    goes back as `reasoning_content`, and the endpoint's template decides what to keep of it.
    """

    def __init__(self, *, sees_images: bool = False, sends_reasoning: bool = True) -> None:
        self._sees_images = sees_images
        self._sends_reasoning = sends_reasoning
        self.fingerprint = f"{VERSION}-{sees_images:d}{sends_reasoning:d}"
        # None: the endpoint ends the model's turn itself.
        self.stops: frozenset[int] = frozenset()

    def render(self, scene: values.Scene) -> values.Rendered:
        """The messages. Their counts are in bytes, as the length of the prompt is."""
        warm, rounds = self._last_warm(scene)
        context = warm or values.NO_MESSAGES
        if warm is None and scene.head.instructions is not None:
            context = context.plus(_encode(_message("system", scene.head.instructions)))
        for round in (*rounds, values.Round(scene.given)):
            context = context.plus(self._row(round.given)).plus(self._row(round.wrote))
        reused = 0 if warm is None else warm.length
        return values.Rendered(context, values.NO_IDS, context.length - reused, reused)

    def write(self, items: Sequence[wire.Item]) -> values.IdArray[int]:
        """Nothing: a chat endpoint takes no ids."""
        return values.NO_IDS

    def reader(self, scene: values.Scene) -> MessagesReader:
        return MessagesReader(scene)

    def _last_warm(
        self, scene: values.Scene
    ) -> tuple[values.Messages | None, Sequence[values.Round]]:
        """The longest row that still holds, and the rounds after it. What a turn keeps ends before its last words."""
        # The last is the oldest.
        later = [*reversed(scene.rounds)]
        turn = scene.past
        while turn is not None:
            row = self._usable(scene.head, turn.warm)
            if row is not None:
                return row, [values.Round((), turn.rounds[-1].wrote), *reversed(later)]
            later.extend(reversed(turn.rounds))
            turn = turn.above
        row = self._usable(scene.head, scene.recalled)
        if row is not None:
            return row, scene.rounds[1:]
        return None, values.since_fresh(later[::-1])

    def _usable(self, head: values.Head, warm: values.Warm | None) -> values.Messages | None:
        """The row that was kept, if it was made in this format under the same instructions."""
        if warm is None or warm.fingerprint != self.fingerprint:
            return None
        is_alike = warm.head.instructions == head.instructions
        return warm.prompt if is_alike and isinstance(warm.prompt, values.Messages) else None

    def _row(self, items: Sequence[wire.Item]) -> bytes:
        """These items as messages, joined by commas."""
        return b",".join(map(_encode, self._messages(items)))

    def _messages(self, items: Sequence[wire.Item]) -> Iterator[JsonObject]:
        spoken: list[Part] = []
        pictures: list[wire.InputImage] = []
        for item in items:
            part = part_of(item)
            if part.kind == "tools":
                # The engine has a field for tools, those that items bring included.
                continue
            if pictures and part.kind != "response":
                yield _shown(pictures)
                pictures = []
            if part.kind == "think" and not (part.text and self._sends_reasoning):
                continue
            is_spoken = part.kind in ("think", "talk") or (part.kind == "call" and part.call_id)
            is_same_turn = is_spoken and spoken and (spoken[-1].kind, part.kind) in MODEL_TURN
            if spoken and not is_same_turn:
                yield _assistant(spoken)
                spoken = []
            if is_spoken:
                spoken.append(part)
                continue
            yield self._other(item, part)
            pictures += self._pictures(item) if part.call_id else []
        if spoken:
            yield _assistant(spoken)
        if pictures:
            yield _shown(pictures)

    def _other(self, item: wire.Item, part: Part) -> JsonObject:
        """A message of its own."""
        match part.kind:
            case "response" if part.call_id:
                text = _output(item) if self._pictures(item) else part.text
                return {"role": "tool", "tool_call_id": part.call_id, "content": text}
            case "response":
                return _message("user", f"[answer: {part.text}]")
            case "call":
                return _message("assistant", f"[{part.name}: {part.text}]")
            case "system":
                return _message("system", part.text)
            case _:
                return {"role": "user", "content": self._content(item, part)}

    def _pictures(self, item: wire.Item) -> list[wire.InputImage]:
        """Pictures in a tool's output, where the model sees them. A tool's message has no place for them, so that they
        follow the outputs in a message of their own."""
        value = item.value
        if not (
            self._sees_images
            and isinstance(value, wire.FunctionCallOutput | wire.CustomToolCallOutput)
        ):
            return []
        parts = value.output if isinstance(value.output, list) else []
        return [inner for inner in parts if _is_shown(inner)]

    def _content(self, item: wire.Item, part: Part) -> str | list[JsonObject]:
        """What a user wrote; with pictures where the model sees them."""
        content = item.value.content if isinstance(item.value, wire.Message) else ""
        if not self._sees_images or isinstance(content, str) or not any(map(_is_shown, content)):
            return part.text
        return [
            {"type": "image_url", "image_url": _image(inner)}
            if _is_shown(inner)
            else {"type": "text", "text": words_of(inner)}
            for inner in content
        ]


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
    """Whether the picture itself is here. An address is not handed on: the engine would follow it, in the operator's
    network, for the author of the request (docs/hazards.md T10)."""
    url = part.image_url if isinstance(part, wire.InputImage) else None
    return isinstance(url, str) and url.startswith("data:")


def _image(part: wire.InputImage) -> JsonObject:
    image: JsonObject = {"url": part.image_url}
    if isinstance(part.detail, str):
        image["detail"] = part.detail
    return image


def _assistant(parts: Sequence[Part]) -> JsonObject:
    """One model turn: its reasoning, its text and its calls."""
    text = "".join(part.text for part in parts if part.kind == "talk")
    calls = [_call(part) for part in parts if part.kind == "call"]
    message: JsonObject = {"role": "assistant", "content": text if text or not calls else None}
    if thoughts := [part.text for part in parts if part.kind == "think"]:
        message["reasoning_content"] = "\n\n".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return message


def _call(part: Part) -> JsonObject:
    """Endpoints decode arguments: arguments that are no object are put into an object."""
    bare = part.text.strip()
    arguments = bare if is_object(bare) else dumps({"arguments": part.text}) if bare else "{}"
    function = {"name": plain_name(part.name), "arguments": arguments}
    return {"id": part.call_id, "type": "function", "function": function}


_encode = msgspec.json.encode


# --- reading --------------------------------------------------------------------------------------


class MessagesReader:
    """A `Reader`: the endpoint has parsed already, what is left is where items begin and end.

    Blank text opens nothing: templates leave newlines between a thought and a call. There are no ids to keep.
    """

    def __init__(self, scene: values.Scene) -> None:
        self._scene = scene
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

    def feed(self, piece: values.Piece) -> list[values.Parsed]:
        assert isinstance(piece, values.Deltas), "this dialect reads deltas"
        parsed = self._items.parsed = []
        for delta in piece.deltas:
            if self.is_over:
                break
            if delta.reasoning:
                self._think(delta.reasoning)
            if delta.text:
                self._talk(delta.text, delta.logprobs)
            if delta.call_index is not None and not self.is_over:
                self._call(delta.call_index, delta.call_name, delta.call_arguments)
        return parsed

    def close(self, *, is_cut: bool) -> list[values.Parsed]:
        self._items.parsed = []
        self._close(is_cut=is_cut and not self.is_over)
        return [*self._items.parsed, values.TurnClosed(values.NO_IDS)]

    def _think(self, text: str) -> None:
        if not self._is_open("reasoning"):
            if not text.strip():
                return
            self._begin(values.ItemOpened("reasoning"))
            if self.is_over:
                return
            self._has_thought = True
            text = text.lstrip("\n")
        self._items.write(text)

    def _talk(self, text: str, logprobs: tuple[wire.Logprob, ...]) -> None:
        if not self._is_open("message"):
            text, logprobs = self._blank + text, self._blank_logprobs + logprobs
            if not text.strip():
                self._blank, self._blank_logprobs = text, logprobs
                return
            # Newlines after a thought belong to its mark; at the very beginning they are the model's own.
            text = text.lstrip("\n") if self._has_thought else text
            self._begin(values.ItemOpened("message"))
            if self.is_over:
                return
        self._items.parsed.append(values.ItemText(text, logprobs))

    def _call(self, index: int, name: str, arguments: str) -> None:
        if index != self._index:
            if index in self._closed_indexes:
                raise EngineFailed("The engine mixed the arguments of two calls.")
            if not name:
                raise EngineFailed("The engine sent arguments for a call without a name.")
            opened = call_in(self._scene, name, plain_name)
            if opened is None:
                raise EngineFailed("The engine called a tool that it was not allowed to call.")
            self._begin(opened)
            if self.is_over:
                return
            self._index = index
        if arguments:
            self._items.write_arguments(arguments)

    def _is_open(self, kind: str) -> bool:
        return self._items.open is not None and self._items.open.kind == kind

    def _begin(self, opened: values.ItemOpened) -> None:
        self._close()
        if not self.is_over:
            self._items.begin(opened)

    def _close(self, *, is_cut: bool = False) -> None:
        self._blank, self._blank_logprobs = "", ()
        if self._items.open is None:
            return
        self._items.end_arguments()
        self._items.close(is_cut=is_cut)
        if self._index is not None:
            self._closed_indexes.add(self._index)
            self._index = None
