"""How do Mistral's newer models write and read (their format v13: Ministral 3, Devstral 2, Magistral)?

Everything stands between special tokens: `[SYSTEM_PROMPT]`, the tools once before the first `[INST]` of the user,
`[TOOL_RESULTS]`. The answer follows `[/INST]` with no cue and ends with `</s>`. Older formats are no part of this: they
move the tools to the last message of the user each turn, so that nothing behind the first could stay.

In an answer only special tokens are marks. Text between them goes through a `TextReader`, which also knows the older
way to call, `[TOOL_CALLS]` and JSON, and what small models write instead:

    state       waits for                           and then
    talking     [THINK] or [TOOL_CALLS]             thinking or naming
    thinking    [/THINK], or any of those           closes, talking
    naming      [ARGS], or `{` behind a known name  opens a call, arguing
                `[` or `{` at once, any other mark  it was text: talking
    arguing     any mark                            closes

Where `tool_choice` forbids all calls, their marks mean nothing; a call of a tool that it forbids was text. Where calls
may not be parallel, the first one ends the model's turn.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Sequence

import msgspec
from msgspec.structs import replace

from segue.dialects.grammar import QUOTE, UNQUOTE, Held, HeldReader, held_offer
from segue.dialects.inputs import InputReader
from segue.dialects.offers import (
    added_by,
    arguments_schema,
    call_schema,
    forced,
    format_schema,
    function_of,
    may_call,
    offer_in,
    opened_call,
)
from segue.dialects.parts import Part, dumps, is_object, object_or_string, parts_of
from segue.dialects.speech import Speech, TextReader
from segue.dialects.vocabulary import Vocabulary
from segue.dialects.warm import Hand, NameOf, is_alike_by_words, render
from segue.turn.values import (
    NO_IDS,
    Grammar,
    Head,
    IdArray,
    Ids,
    ItemClosed,
    ItemOpened,
    ItemText,
    Parsed,
    Piece,
    Rendered,
    Scene,
    TokenLogprob,
    TurnClosed,
    id_array,
)
from segue.wire.items import AdditionalTools, Item, Message
from segue.wire.tools import Offer

BEGIN, END = "<s>", "</s>"
THINK, THOUGHT, CALL, CALL_ID, ARGS = "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
# What stands around a part, by its kind.
AROUND = {
    "system": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "tools": ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    "user": ("[INST]", "[/INST]"),
    "response": ("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    "think": (THINK, THOUGHT),
}
# What the family's own files call this format.
FORMAT = "v13"
# A change of this file that changes what kept ids mean needs a new number.
VERSION = "mistral1"
# What is longer is no name of a tool, which has at most 128 characters.
NAME_CHARS_MAX = 256
# What goes on in the same block: a model turn in the order in which the model writes it, and texts of one speaker.
JOINS = {
    ("think", "think"),
    ("think", "talk"),
    ("think", "call"),
    ("talk", "talk"),
    ("talk", "call"),
    ("call", "call"),
    ("user", "user"),
}


class MistralDialect:
    """A `Dialect` for token engines."""

    def __init__(self, vocabulary: Vocabulary, system: str = "") -> None:
        """`system` is said where nobody else instructs the model: some of their templates have such words."""
        self._vocabulary = vocabulary
        self._system = system
        self._around = {
            kind: (vocabulary.special(before), vocabulary.special(behind))
            for kind, (before, behind) in AROUND.items()
        }
        self._call = id_array([vocabulary.special(CALL)])
        self._args = id_array([vocabulary.special(ARGS)])
        self._end = id_array([vocabulary.special(END)])
        self._stops = frozenset(self._end)
        self._speech = Speech(vocabulary, self._stops, self._end, signal=self._call[0])
        self._hand = Hand(
            fingerprint=f"{VERSION}-{vocabulary.fingerprint}",
            cue=NO_IDS,
            begin=self._begin,
            given=self._given,
            wrote=self.write,
            is_alike=is_alike_by_words,
        )

    @property
    def fingerprint(self) -> str:
        """Names this format and the vocabulary."""
        return self._hand.fingerprint

    @property
    def stops(self) -> frozenset[int]:
        """Ids that end the model's turn."""
        return self._stops

    def render(self, scene: Scene) -> Rendered:
        """The prompt: head, history, what is given now, and where the answer is forced, its beginning."""
        rendered = render(self._hand, scene)
        lead, schema = self._lead(scene)
        return replace(rendered, lead=lead, schema=schema) if lead or schema else rendered

    def write(self, items: Sequence[Item]) -> IdArray[int]:
        """What the model would sample to say these items, its end mark included."""
        return self._parsed(parts_of(items))

    def reader(self, scene: Scene) -> MistralReader | HeldReader:
        """A reader for the answer to this scene, which knows the tools by name."""
        if (held := self._held(scene)) is not None:
            return HeldReader(self._vocabulary, self._stops, held)
        return MistralReader(self._speech, scene)

    def _held(self, scene: Scene) -> Held | None:
        """A call that is held to a grammar, if there is to be one."""
        if (found := held_offer(scene)) is None:
            return None
        offer, grammar = found
        lead = self._called(offer.qualified_name) + self._vocabulary.encode(QUOTE)
        return Held(offer, grammar, lead, self._vocabulary.encode(UNQUOTE), self._end)

    def _lead(self, scene: Scene) -> tuple[IdArray[int], bytes | Grammar | None]:
        if not scene.can_constrain:
            return NO_IDS, None
        if (held := self._held(scene)) is not None:
            return held.lead, held.grammar
        offers = forced(scene)
        if not offers:
            return NO_IDS, format_schema(scene, "arguments")
        if len(offers) > 1:
            # A name and `[ARGS]` are no JSON, to which alone the engine can be held: so the older way to call.
            return self._call, call_schema(offers, "arguments")
        return self._called(offers[0].qualified_name), arguments_schema(offers[0])

    def _begin(
        self, head: Head, items: Sequence[Item], root_at: int, name_of: NameOf
    ) -> IdArray[int]:
        """The system's blocks, then the tools, then the rest."""
        ids = id_array([self._vocabulary.special(BEGIN)])
        count = next((n for n, item in enumerate(items) if not _is_system(item)), len(items))
        system = head.instructions or ("" if count else self._system)
        if system:
            ids.extend(self._block(Part("system", system)))
        ids.extend(self._given(items[:count], name_of))
        if head.tools.offers:
            ids.extend(self._block(Part("tools", _tools(head.tools.offers))))
        return ids + self._given(items[count:], name_of)

    def _given(self, items: Sequence[Item], name_of: NameOf) -> IdArray[int]:
        ids = id_array()
        for parts in _blocks(items):
            match parts[0].kind:
                case "think" | "talk" | "call":
                    ids.extend(self._parsed(parts))
                case kind:
                    ids.extend(self._block(Part(kind, _joined(parts))))
        return ids

    def _parsed(self, parts: Sequence[Part]) -> IdArray[int]:
        """A turn of the model. Spaces at the end of its text go, unless it has thought: so its library has it."""
        ids = id_array()
        texts = [part for part in parts if part.kind == "talk"]
        is_thoughtful = any(part.kind == "think" for part in parts)
        for part in parts:
            match part.kind:
                case "call":
                    arguments = self._vocabulary.encode(object_or_string(part.text or "{}"))
                    ids.extend(self._called(part.name) + arguments)
                case "talk" if part is texts[0]:
                    text = _joined(texts)
                    ids.extend(self._vocabulary.encode(text if is_thoughtful else text.rstrip(" ")))
                case "think":
                    ids.extend(self._block(part))
                case _:
                    pass
        return ids + self._end

    def _called(self, name: str) -> IdArray[int]:
        return self._call + self._vocabulary.encode(name) + self._args

    def _block(self, part: Part) -> IdArray[int]:
        before, behind = self._around[part.kind]
        return id_array([before, *self._vocabulary.encode(part.text), behind])


def _blocks(items: Sequence[Item]) -> list[list[Part]]:
    blocks: list[list[Part]] = []
    for item in items:
        for part in _parts(item):
            if blocks and (blocks[-1][-1].kind, part.kind) in JOINS:
                blocks[-1].append(part)
            else:
                blocks.append([part])
    return blocks


def _parts(item: Item) -> list[Part]:
    if isinstance(item.value, AdditionalTools):
        added = added_by(item)
        return [Part("tools", _tools(added))] if added else []
    return parts_of((item,))


def _joined(parts: Sequence[Part]) -> str:
    return "\n\n".join(part.text for part in parts if part.text)


def _is_system(item: Item) -> bool:
    return isinstance(item.value, Message) and item.value.role in ("system", "developer")


def _tools(tools: Sequence[Offer]) -> str:
    return dumps([_definition(tool) for tool in tools])


def _definition(tool: Offer) -> object:
    """As the family's library writes it: nothing is left out."""
    function = {"description": "", "parameters": {}, **function_of(tool)}
    ordered = {key: function[key] for key in ("name", "description", "parameters")}
    return {"type": "function", "function": ordered}


# --- reading --------------------------------------------------------------------------------------


class MistralReader:
    """A `Reader`: see the table of states at the top."""

    def __init__(self, speech: Speech, scene: Scene) -> None:
        self._speech = speech
        self._vocabulary = speech.vocabulary
        self._scene = scene
        calls = (CALL, CALL_ID, ARGS) if scene.head.tool_choice != "none" else ()
        names = [name for name in (THINK, THOUGHT, *calls, END)
                 if self._vocabulary.has_special(name)]  # fmt: skip
        self._marks = {self._vocabulary.special(name): name for name in names}
        self._decode = getincrementaldecoder("utf-8")("replace")
        self._parsed: list[Parsed] = []
        # The mark behind which we are; nothing while talking.
        self._state = ""
        # Reads the text of this stretch; None: there was none yet.
        self._text: TextReader | None = None
        # Sampled since the last closed item.
        self._ids = id_array()
        self._is_stopped = False
        # Whether the one call that there may be is whole.
        self.is_over = False
        self._open: ItemOpened | None = None
        # A name as far as it has come, or blanks before a thought.
        self._held = ""
        # The arguments, and whether they are told as they come; None: their first letter is not here yet.
        self._arguments: list[str] = []
        self._input = InputReader()
        self._is_told: bool | None = None
        # From where on the ids are the name of a call, and what their odds were.
        self._named_from = 0
        self._named_odds: list[TokenLogprob | None] = []

    def feed(self, piece: Piece) -> list[Parsed]:
        """What has become certain with these ids."""
        assert isinstance(piece, Ids), "this dialect reads tokens"
        self._parsed = []
        is_read = not (self._is_stopped or self.is_over)
        if not self._state and is_read and self._marks.keys().isdisjoint(piece.ids):
            self._talk(piece)
            return self._parsed
        for n, id in enumerate(piece.ids):
            if not (self._is_stopped or self.is_over):
                self._take(id, piece.logprobs[n : n + 1])
        return self._parsed

    def close(self, *, is_cut: bool) -> list[Parsed]:
        """Close the open item, and seal the turn."""
        self._parsed = []
        self._finish(is_cut=is_cut and not (self._is_stopped or self.is_over))
        self._parsed.append(TurnClosed(self._ids + self._speech.seal))
        return self._parsed

    def _take(self, id: int, logprobs: Sequence[TokenLogprob | None]) -> None:
        mark = self._marks.get(id)
        if self._state in (CALL, CALL_ID):
            self._named_odds.extend(logprobs or [None])
        if mark == END:
            self._finish()
            self._is_stopped = True
        elif mark == CALL_ID and self._state == CALL:
            self._ids.append(id)
            self._state = CALL_ID
        elif mark == ARGS and self._state in (CALL, CALL_ID) and self._held.strip():
            self._ids.append(id)
            self._begin_call_or_text(self._held.strip())
        elif mark == THOUGHT and self._state == THINK:
            self._ids.append(id)
            self._finish()
        elif mark in (THINK, CALL):
            self._finish()
            if self.is_over:
                return
            self._state = mark
            self._named_from = len(self._ids)
            self._named_odds = list(logprobs or [None])
            self._ids.append(id)
        elif not self._state:
            self._talk(Ids([id], logprobs))
        else:
            self._ids.append(id)
            self._take_text(self._decode.decode(self._vocabulary.bytes_of(id)))

    def _take_text(self, text: str) -> None:
        match self._state:
            case "[THINK]":
                self._think(text)
            case "[TOOL_CALLS]":
                self._name(text)
            case "[ARGS]":
                self._argue(text)
            case _:
                pass

    # Talking.

    def _talk(self, piece: Ids) -> None:
        if self._text is None:
            self._text = TextReader(self._speech, self._scene)
        self._pass(self._text.feed(piece))
        self.is_over = self._text.is_over

    def _pass(self, parsed: Sequence[Parsed]) -> None:
        """What the reader of text has read; the ids before it are the first item's."""
        for value in parsed:
            match value:
                case ItemClosed():
                    self._parsed.append(ItemClosed(self._ids + value.ids, value.is_cut))
                    self._ids = id_array()
                case TurnClosed():
                    self._ids.extend(value.ids[: -len(self._speech.seal)])
                case _:
                    self._parsed.append(value)

    def _was_text(self) -> None:
        """Behind the mark of a call stands no name."""
        ids = self._ids[self._named_from :]
        self._ids = self._ids[: self._named_from]
        self._state, self._held = "", ""
        self._decode.reset()
        self._talk(Ids(ids, self._named_odds[: len(ids)] if any(self._named_odds) else ()))

    # Thinking and calling.

    def _think(self, text: str) -> None:
        self._held += text
        if self._open is None and self._held.strip():
            self._begin(ItemOpened("reasoning"))
        if self._open is not None:
            self._write(self._held)
            self._held = ""

    def _name(self, text: str) -> None:
        self._held += text
        name, brace, rest = self._held.partition("{")
        if self._held.lstrip()[:1] in ("[", "{") or len(self._held) > NAME_CHARS_MAX:
            self._was_text()
        elif brace and offer_in(self._scene, name.strip()) is not None:
            # The mark before the arguments is missing.
            self._begin_call_or_text(name.strip())
            if self._open is not None and self._state == ARGS:
                self._argue(brace + rest)

    def _begin_call_or_text(self, name: str) -> None:
        if may_call(self._scene, offer_in(self._scene, name)):
            self._decode.reset()
            self._begin_call(name)
        else:
            self._was_text()

    def _begin_call(self, name: str) -> None:
        self._held, self._arguments, self._input = "", [], InputReader()
        self._state = ARGS
        opened = opened_call(name, offer_in(self._scene, name))
        self._is_told = False if opened.kind == "custom" else None
        self._begin(opened)

    def _argue(self, text: str) -> None:
        self._arguments.append(text)
        if self._is_told is None:
            text = "".join(self._arguments)
            begun = text.lstrip()
            # A string may hold the object, as some models write it.
            self._is_told = begun[0] != '"' if begun else None
        if self._is_told:
            self._write(text)
        elif self._open is not None and self._open.kind == "custom":
            self._write(self._input.feed(text))

    def _begin(self, opened: ItemOpened) -> None:
        self._open = opened
        self._parsed.append(opened)

    def _write(self, text: str) -> None:
        if text:
            self._parsed.append(ItemText(text))

    def _finish(self, *, is_cut: bool = False) -> None:
        """What we are in is over, whether it said so or not."""
        if self._state in (CALL, CALL_ID):
            self._was_text()
        if self._text is not None:
            self._pass(self._text.close(is_cut=is_cut))
            self._text = None
        rest = "" if is_cut else self._decode.decode(b"", final=True)
        self._decode.reset()
        self._take_text(rest)
        if self._open is not None:
            if self._state == ARGS:
                arguments = "".join(self._arguments)
                self._write(self._untold(arguments, is_cut=is_cut))
                is_cut = is_cut and not is_object(arguments.strip())
            self._parsed.append(ItemClosed(self._ids, is_cut))
            self._ids = id_array()
            self.is_over = self._state == ARGS and not self._scene.head.parallel_tool_calls
        self._state, self._held, self._open = "", "", None

    def _untold(self, arguments: str, *, is_cut: bool) -> str:
        """What is told of the arguments when they are whole."""
        assert self._open is not None
        if self._open.kind == "custom":
            return self._input.close()
        if self._is_told is None:
            return "" if is_cut else "{}"
        try:
            return "" if self._is_told else msgspec.json.decode(arguments, type=str)
        except msgspec.DecodeError:
            return arguments
