"""How do Mistral's newer models write and read (their format v13: Ministral 3, Devstral 2, Magistral)?

Everything stands between special tokens: `[SYSTEM_PROMPT]`, the tools once before the first `[INST]` of the user,
`[TOOL_RESULTS]`. The answer follows `[/INST]` with no cue and ends with `</s>`. Older formats are no part of this: they
move the tools to the last message of the user each turn, so that nothing after the first could stay.

In an answer only special tokens are marks. Text between them goes through a `TextReader`, which also knows the older
way to call, `[TOOL_CALLS]` and JSON, and what small models write instead:

    state       waits for                           and then
    talking     [THINK] or [TOOL_CALLS]             thinking or naming
    thinking    [/THINK], or any of those           closes, talking
    naming      [ARGS], or `{` after a known name   opens a call, arguing
                `[` or `{` at once, any other mark  it was text: talking
    arguing     any mark                            closes

Where `tool_choice` forbids all calls, their marks mean nothing; a call of a tool that it forbids was text. Where calls
may not be parallel, the first call ends the model's turn.
"""

from __future__ import annotations

import re
from array import array
from codecs import getincrementaldecoder
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import msgspec

from segue.dialects.family import Family, is_from
from segue.dialects.parts import MODEL_TURN, Part, blocks_of, dumps, object_or_string, parts_of
from segue.dialects.warm import NameOf, Writing
from segue.readers.bound import BoundFamily
from segue.readers.call_json import INPUT_KEYS, is_object
from segue.readers.call_tags import MISTRAL_CALL, tagged_calls
from segue.readers.forced import QUOTE, UNQUOTE, CallForm
from segue.readers.formats import MISTRAL_LIST
from segue.readers.item_writer import ItemWriter
from segue.readers.offers import call_in, function_of, offer_in
from segue.readers.text_reader import TextReader
from segue.seams.model import (
    Ids,
    ItemClosed,
    ItemOpened,
    Parsed,
    Piece,
    Scene,
    TokenLogprob,
    TurnClosed,
)
from segue.seams.prompt import Head, IdArray
from segue.vocabularies.ranked import TEKKEN
from segue.vocabularies.vocabulary import Chunk, Mark, Own, Vocabulary, extend
from segue.wire.items import Item
from segue.wire.tools import Offer

BEGIN = "<s>"
END = "</s>"
THINK = "[THINK]"
THOUGHT = "[/THINK]"
CALL = "[TOOL_CALLS]"
CALL_ID = "[CALL_ID]"
ARGS = "[ARGS]"
# What stands around a part, by its kind.
AROUND = {
    "system": ("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]"),
    "tools": ("[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    "user": ("[INST]", "[/INST]"),
    "response": ("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
    "think": (THINK, THOUGHT),
}
SYSTEM = re.compile(r"\[SYSTEM_PROMPT\](.*)\[/SYSTEM_PROMPT\]", re.DOTALL)
# What the family's own files call this format.
FORMAT = "v13"
# A change of this file that changes what kept ids mean needs a new number.
VERSION = "mistral1"
# A longer text is no name of a tool, which has at most 128 characters.
NAME_CHARS_MAX = 256
# In the same block stand a model turn, and texts of one speaker.
JOINS = MODEL_TURN | {("talk", "talk"), ("user", "user")}


# --- writing --------------------------------------------------------------------------------------


def _write_head(
    default_system: str,
    vocabulary: Vocabulary,
    head: Head,
    items: Sequence[Item],
    root_at: int,
    name_of: NameOf,
) -> IdArray[int]:
    """The system's blocks, then the tools, then the rest."""
    ids = vocabulary.ids(Mark(BEGIN))
    others = (n for n in range(len(items)) if not is_from(items[n:], "system", "developer"))
    count = next(others, len(items))
    if head.instructions:
        ids.extend(vocabulary.ids(*_block("system", head.instructions)))
    elif default_system and not count:
        ids.extend(vocabulary.ids(*_block("system", Own(default_system))))
    ids.extend(_given(vocabulary, items[:count], name_of))
    if head.tools.offers:
        ids.extend(vocabulary.ids(*_block("tools", _tools(head.tools.offers))))
    extend(ids, _given(vocabulary, items[count:], name_of))
    return ids


def _given(vocabulary: Vocabulary, items: Sequence[Item], name_of: NameOf) -> IdArray[int]:
    chunks: list[Chunk] = []
    for parts in blocks_of(items, JOINS, _tools):
        match parts[0].kind:
            case "think" | "talk" | "call":
                chunks += _model_turn(parts)
            case kind:
                chunks += _block(kind, _joined(parts))
    return vocabulary.ids(*chunks)


def _write(vocabulary: Vocabulary, items: Sequence[Item]) -> IdArray[int]:
    return vocabulary.ids(*_model_turn(parts_of(items)))


def _model_turn(parts: Sequence[Part]) -> list[Chunk]:
    """Spaces at the end of the text go, unless the model has thought: its own library does the same."""
    chunks: list[Chunk] = []
    texts = [part for part in parts if part.kind == "talk"]
    has_thought = any(part.kind == "think" for part in parts)
    for part in parts:
        match part.kind:
            case "call":
                chunks += [*_called(part.name), object_or_string(part.text or "{}")]
            case "talk" if part is texts[0]:
                text = _joined(texts)
                chunks.append(text if has_thought else text.rstrip(" "))
            case "think":
                chunks += _block("think", part.text)
            case _:
                pass
    return [*chunks, Mark(END)]


def _called(name: str) -> tuple[Chunk, ...]:
    return Mark(CALL), name, Mark(ARGS)


def _block(kind: str, text: Chunk) -> tuple[Chunk, ...]:
    before, after = AROUND[kind]
    return Mark(before), text, Mark(after)


def _joined(parts: Sequence[Part]) -> str:
    return "\n\n".join(part.text for part in parts if part.text)


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

    def __init__(self, bound: BoundFamily, scene: Scene) -> None:
        self._bound = bound
        self._vocabulary = bound.vocabulary
        self._scene = scene
        calls = (CALL, CALL_ID, ARGS) if scene.head.tool_choice != "none" else ()
        names = [name for name in (THINK, THOUGHT, *calls, END)
                 if self._vocabulary.has_special(name)]  # fmt: skip
        self._marks = {self._vocabulary.special(name): name for name in names}
        self._decode = getincrementaldecoder("utf-8")("replace")
        self._items = ItemWriter(is_single=not scene.head.parallel_tool_calls)
        # The last mark; nothing while talking.
        self._state = ""
        # Reads the text of this stretch; None: there was none yet.
        self._text: TextReader | None = None
        self._is_stopped = False
        # A name as far as it has come, or blanks before a thought.
        self._held = ""
        # The arguments, and whether they are sent as they come; None: their first letter is not here yet.
        self._arguments: list[str] = []
        self._is_streamed: bool | None = None
        # From where on the ids are the name of a call, and their logprobs.
        self._name_from = 0
        self._name_logprobs: list[TokenLogprob | None] = []

    @property
    def is_over(self) -> bool:
        """Whether the only call that is allowed is whole."""
        return self._items.is_over

    def feed(self, piece: Piece) -> list[Parsed]:
        assert isinstance(piece, Ids), "this dialect reads tokens"
        items = self._items
        items.parsed = []
        is_read = not (self._is_stopped or items.is_over)
        if not self._state and is_read and self._marks.keys().isdisjoint(piece.ids):
            self._talk(piece)
            return items.parsed
        for n, id in enumerate(piece.ids):
            if not (self._is_stopped or items.is_over):
                self._feed_token(id, piece.logprobs[n : n + 1])
        return items.parsed

    def close(self, *, is_cut: bool) -> list[Parsed]:
        items = self._items
        items.parsed = []
        self._finish(is_cut=is_cut and not (self._is_stopped or items.is_over))
        return [*items.parsed, TurnClosed(items.ids + self._bound.seal)]

    def _feed_token(self, id: int, logprobs: Sequence[TokenLogprob | None]) -> None:
        mark = self._marks.get(id)
        if self._state in (CALL, CALL_ID):
            self._name_logprobs.extend(logprobs or [None])
        if mark == END:
            self._finish()
            self._is_stopped = True
        elif mark == CALL_ID and self._state == CALL:
            self._items.ids.append(id)
            self._state = CALL_ID
        elif mark == ARGS and self._state in (CALL, CALL_ID) and self._held.strip():
            self._items.ids.append(id)
            self._open_call_or_text(self._held.strip())
        elif mark == THOUGHT and self._state == THINK:
            self._items.ids.append(id)
            self._finish()
        elif mark in (THINK, CALL):
            self._finish()
            if self._items.is_over:
                return
            self._state = mark
            self._name_from = len(self._items.ids)
            self._name_logprobs = list(logprobs or [None])
            self._items.ids.append(id)
        elif not self._state:
            self._talk(Ids([id], logprobs))
        else:
            self._items.ids.append(id)
            self._feed_text(self._decode.decode(self._vocabulary.bytes_of(id)))

    def _feed_text(self, text: str) -> None:
        if self._state == THINK:
            self._think(text)
        elif self._state == CALL:
            self._name(text)
        elif self._state == ARGS:
            self._argue(text)

    # Talking.

    def _talk(self, piece: Ids) -> None:
        if self._text is None:
            self._text = TextReader(self._bound, self._scene, MISTRAL_LIST)
        self._pass(self._text.feed(piece))
        self._items.is_over = self._text.is_over

    def _pass(self, parsed: Sequence[Parsed]) -> None:
        """What the reader of text has read; the ids before it are the first item's."""
        items = self._items
        for value in parsed:
            match value:
                case ItemClosed():
                    items.parsed.append(ItemClosed(items.ids + value.ids, value.is_cut))
                    items.ids = array("I")
                case TurnClosed():
                    items.ids.extend(value.ids[: -len(self._bound.seal)])
                case _:
                    items.parsed.append(value)

    def _was_text(self) -> None:
        """There is no name after the mark of a call."""
        ids = self._items.ids[self._name_from :]
        self._items.ids = self._items.ids[: self._name_from]
        self._state = ""
        self._held = ""
        self._decode.reset()
        self._talk(Ids(ids, self._name_logprobs[: len(ids)] if any(self._name_logprobs) else ()))

    # Thinking and calling.

    def _think(self, text: str) -> None:
        self._held += text
        if self._items.open is None and self._held.strip():
            self._items.open_item(ItemOpened("reasoning"))
        if self._items.open is not None:
            self._items.write(self._held)
            self._held = ""

    def _name(self, text: str) -> None:
        self._held += text
        name, brace, rest = self._held.partition("{")
        if self._held.lstrip()[:1] in ("[", "{") or len(self._held) > NAME_CHARS_MAX:
            self._was_text()
        elif brace and offer_in(self._scene, name.strip()) is not None:
            # The mark before the arguments is missing.
            self._open_call_or_text(name.strip())
            if self._items.open is not None and self._state == ARGS:
                self._argue(brace + rest)

    def _open_call_or_text(self, name: str) -> None:
        opened = call_in(self._scene, name)
        if opened is None:
            self._was_text()
            return
        self._decode.reset()
        self._held = ""
        self._arguments = []
        self._state = ARGS
        self._is_streamed = True if opened.kind in INPUT_KEYS else None
        self._items.open_item(opened)

    def _argue(self, text: str) -> None:
        self._arguments.append(text)
        if self._is_streamed is None:
            text = "".join(self._arguments)
            begun = text.lstrip()
            # A string may hold the object, as some models write it.
            self._is_streamed = begun[0] != '"' if begun else None
        if self._is_streamed:
            self._items.write_arguments(text)

    def _finish(self, *, is_cut: bool = False) -> None:
        """The item is over, with or without an end mark."""
        if self._state in (CALL, CALL_ID):
            self._was_text()
        if self._text is not None:
            self._pass(self._text.close(is_cut=is_cut))
            self._text = None
        rest = "" if is_cut else self._decode.decode(b"", final=True)
        self._decode.reset()
        self._feed_text(rest)
        if self._state == ARGS:
            arguments = "".join(self._arguments)
            self._items.write(self._unsent(arguments, is_cut=is_cut))
            self._items.end_arguments()
            is_cut = is_cut and not is_object(arguments.strip())
        self._items.close(is_cut=is_cut)
        self._state = ""
        self._held = ""

    def _unsent(self, arguments: str, *, is_cut: bool) -> str:
        """What is left to send of the arguments when they are whole, unless they were sent as they came."""
        if self._is_streamed is None:
            return "" if is_cut else "{}"
        try:
            return "" if self._is_streamed else msgspec.json.decode(arguments, type=str)
        except msgspec.DecodeError:
            return arguments


# --- the family -----------------------------------------------------------------------------------


class _TekkenConfig(msgspec.Struct):
    version: str = ""


class _Tekken(msgspec.Struct):
    config: _TekkenConfig


def _is_format_known(path: Path) -> bool:
    """Whether Mistral's own file, if it is there, is of the format that is written here."""
    file = (path if path.is_dir() else path.parent) / TEKKEN
    if not file.is_file():
        return True
    return msgspec.json.decode(file.read_bytes(), type=_Tekken).config.version == FORMAT


def _with_prompt(prompt: str) -> Family:
    system = SYSTEM.search(prompt)
    return _family(system[1] if system else "")


def _family(default_system: str = "") -> Family:
    """`default_system`: the system text where a request has none, as some of the models' templates have it."""
    return Family(
        name="mistral",
        version=VERSION,
        specials=(BEGIN, END, CALL, ARGS, *(mark for pair in AROUND.values() for mark in pair)),
        stops=(END,),
        seal=(Mark(END),),
        cue=(),
        render=Writing(
            begin=partial(_write_head, default_system), given=_given, wrote=_write
        ).render,
        write=_write,
        reader=MistralReader,
        call=CallForm(
            named=_called,
            # A name and `[ARGS]` are no JSON: an engine that can follow nothing else gets the older way to call.
            before_object=(Mark(CALL),),
            around_input=(QUOTE, UNQUOTE),
            tagged=partial(tagged_calls, MISTRAL_CALL),
        ),
        is_format_known=_is_format_known,
        with_prompt=_with_prompt,
    )


MISTRAL = _family()
