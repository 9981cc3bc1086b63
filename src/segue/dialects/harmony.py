"""How does gpt-oss write and read? Harmony: messages with a channel, and tools in namespaces.

A message is `<|start|>`, who speaks, `<|channel|>` and its name, `<|message|>`, the text, `<|end|>`. The model thinks
in the channel `analysis`, calls tools in `commentary` (there the header says `to=functions.name`, and `<|call|>` ends
the message), and answers in `final`, which `<|return|>` ends; in history that is an `<|end|>`. All marks are special
tokens, so that no text can be mistaken for one:

    state      at                                            goes to
    header     text; <|channel|>, <|constrain|>              stays, noting what it says
    header     <|message|>                                   body, and opens a call; text is opened by its first letter
    body       text                                          stays, and says it
    any        <|end|>, <|start|>                            closes what is open, header
    any        <|call|>, <|return|>                          the turn is over

A message to a tool that `tool_choice` forbids is text. Where calls may not be parallel, the first one ends the turn.

The system message says what day it is (the day on which the chain began), how much to think, and which channels there
are; instructions and tools are the developer's message. What was thought before the last final answer is forgotten.
"""

from __future__ import annotations

import re
from array import array
from codecs import getincrementaldecoder
from collections.abc import Sequence
from datetime import UTC, datetime

from segue.dialects.family import BoundFamily, Family, system_of
from segue.dialects.forced import CallForm
from segue.dialects.inputs import InputReader
from segue.dialects.logprobs import PendingLogprobs
from segue.dialects.offers import added_by, may_call, offer_in, opened_call
from segue.dialects.parts import Part, part_of
from segue.dialects.typescript import FUNCTIONS, tools_section
from segue.dialects.warm import NameOf, Writing, is_alike_by_words
from segue.turn.values import (
    Head,
    IdArray,
    Ids,
    ItemClosed,
    ItemOpened,
    ItemText,
    Parsed,
    Piece,
    Round,
    Scene,
    TokenLogprob,
    TurnClosed,
    id_array,
)
from segue.vocabularies.vocabulary import Chunk, Mark, Vocabulary
from segue.wire.items import (
    AdditionalTools,
    ConfigurationUpdate,
    Item,
    Message,
    Reasoning,
    ReasoningUpdate,
    ToolSearchOutput,
)
from segue.wire.kinds import is_model_written

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
# A change of this file that changes what kept ids mean needs a new number.
VERSION = "harmony1"
CUE = Mark(START, "assistant")

# The words of the family's own library.
SYSTEM = (
    "You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: {day}\n\nReasoning: {effort}\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
CALLS = "\nCalls to these tools must go to the commentary channel: 'functions'."
# How much to think, where that is not "medium".
EFFORTS = {
    "none": "low", "minimal": "low", "low": "low", "high": "high", "xhigh": "high", "max": "high",
}  # fmt: skip
RECIPIENT = re.compile(r"\bto=(\S+)")
# Whom the model may speak to without calling anything.
PEOPLE = {"assistant", "user", "all"}


# --- writing --------------------------------------------------------------------------------------


def _begin(
    vocabulary: Vocabulary, head: Head, items: Sequence[Item], root_at: int, name_of: NameOf
) -> IdArray[int]:
    instructions, items = system_of(head, items)
    offers = head.tools.offers
    day = datetime.fromtimestamp(root_at, UTC).date().isoformat()
    system = SYSTEM.format(day=day, effort=_effort(head))
    if any(offer.namespace is None for offer in offers):
        system += CALLS
    sections = [] if instructions is None else [_instructions(instructions)]
    sections.extend([tools_section(offers)] if offers else [])
    chunks = _plain("system", system)
    if sections:
        chunks += _plain("developer", "\n\n".join(sections))
    return vocabulary.ids(*chunks) + _given(vocabulary, items, name_of)


def _given(vocabulary: Vocabulary, items: Sequence[Item], name_of: NameOf) -> IdArray[int]:
    chunks: list[Chunk] = []
    finals = _finals(items)
    names: dict[str, str] = {}
    for n, item in enumerate(items):
        if isinstance(item.value, AdditionalTools | ConfigurationUpdate):
            chunks += _update(item)
            continue
        part = part_of(item)
        if part.kind == "call":
            names[part.call_id] = part.name
        name = part.kind == "response" and (names.get(part.call_id) or name_of(part.call_id))
        if isinstance(item.value, ToolSearchOutput):
            name = "tool_search"
            if added := added_by(item):
                part = part._replace(text=tools_section(added))
        chunks += _message(part, name or "tool", is_final=n in finals)
    return vocabulary.ids(*chunks)


def _update(item: Item) -> tuple[Chunk, ...]:
    """Tools and settings that come on the way, where they come, so that nothing before them changes."""
    match item.value:
        case ConfigurationUpdate(reasoning=ReasoningUpdate(effort=str() as effort), text=text):
            # As the family has it in its first message.
            written = _plain("system", f"Reasoning: {EFFORTS.get(effort, 'medium')}")
            return written + _message(part_of(item), "", is_final=False) if text else written
        case AdditionalTools():
            added = added_by(item)
            return _plain("developer", tools_section(added)) if added else ()
        case _:
            return _message(part_of(item), "", is_final=False)


def _message(part: Part, name: str, *, is_final: bool) -> tuple[Chunk, ...]:
    """One message; `name` is who was called, where this is the answer."""
    match part.kind:
        case "user":
            return _plain("user", part.text)
        case "response":
            header = _channel("commentary to=assistant")
            return Mark(START), _recipient(name), *header, part.text, Mark(END)
        case "think" if not part.text:
            return ()
        case "think" | "talk" | "call":
            return CUE, *_model_message(part, is_final=is_final)
        case _:
            return _plain("developer", _instructions(part.text))


def _plain(role: str, text: str) -> tuple[Chunk, ...]:
    return Mark(START, role), Mark(MESSAGE), text, Mark(END)


def _wrote(vocabulary: Vocabulary, items: Sequence[Item]) -> IdArray[int]:
    """A model turn after the cue, as it stands in history. Only the last call ends as a call, since a reader
    stops there."""
    return vocabulary.ids(*_model_turn(items))


def _write(vocabulary: Vocabulary, items: Sequence[Item]) -> IdArray[int]:
    chunks = _model_turn(items)
    return vocabulary.ids(*chunks[:-1], Mark(CALL if chunks[-1] == Mark(CALL) else RETURN))


def _model_turn(items: Sequence[Item]) -> list[Chunk]:
    finals = _finals(items)
    chunks: list[Chunk] = []
    for n, item in enumerate(items):
        part = part_of(item)
        if part.kind in ("think", "talk", "call") and (part.text or part.kind != "think"):
            if chunks and chunks[-1] == Mark(CALL):
                chunks[-1] = Mark(END)
            chunks += [CUE] if chunks else []
            chunks += _model_message(part, is_final=n in finals)
    return chunks or [Mark(END)]


def _model_message(part: Part, *, is_final: bool) -> tuple[Chunk, ...]:
    """What the model says in one message, after the cue."""
    if part.kind == "call":
        return *_call_header(part.name), part.text, Mark(CALL)
    channel = "analysis" if part.kind == "think" else "final" if is_final else "commentary"
    return *_channel(channel), part.text, Mark(END)


def _call_header(name: str) -> tuple[Chunk, ...]:
    to = f"commentary to={_recipient(name)} "
    return Mark(CHANNEL), to, Mark(CONSTRAIN, "json"), Mark(MESSAGE)


def _channel(name: str) -> tuple[Chunk, ...]:
    return Mark(CHANNEL, name), Mark(MESSAGE)


def _kept(vocabulary: Vocabulary, round: Round, forgotten: int) -> IdArray[int]:
    """What was sampled, less what is forgotten; what is first then needs no `<|start|>` after the cue."""
    joined = id_array()
    for n, (item, ids) in enumerate(zip(round.wrote, round.ids, strict=True)):
        if n >= forgotten or not isinstance(item.value, Reasoning):
            joined.extend(ids)
    joined.extend(round.tail)
    cue = vocabulary.ids(CUE)
    return joined[len(cue) :] if joined[: len(cue)] == cue else joined


def _instructions(text: str) -> str:
    return f"# Instructions\n\n{text}"


def _recipient(name: str) -> str:
    return name if "." in name else f"{FUNCTIONS}.{name}"


def _effort(head: Head) -> str:
    return EFFORTS.get(head.reasoning.effort or "", "medium")


def _is_alike(one: Head, other: Head) -> bool:
    return _effort(one) == _effort(other) and is_alike_by_words(one, other)


def _finals(items: Sequence[Item]) -> set[int]:
    """Which of these are final answers: what the model says to the user with no call behind it in the same turn."""
    found: set[int] = set()
    is_calling = False
    for n in range(len(items) - 1, -1, -1):
        value = items[n].value
        if isinstance(value, Message) and value.role == "assistant":
            if not is_calling and value.phase != "commentary":
                found.add(n)
        elif is_model_written(value):
            is_calling = is_calling or not isinstance(value, Reasoning)
        else:
            is_calling = False
    return found


def _last_final(items: Sequence[Item]) -> int:
    """Up to the last final answer."""
    return max(_finals(items), default=-1) + 1


# --- reading --------------------------------------------------------------------------------------


class HarmonyReader:
    """A `Reader`: see the table of states at the top."""

    def __init__(self, bound: BoundFamily, scene: Scene) -> None:
        self._vocabulary = vocabulary = bound.vocabulary
        self._plain_tokens = bound.plain_tokens
        self._scene = scene
        names = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
        self._marks = {vocabulary.special(name): name for name in names}
        self._decode = getincrementaldecoder("utf-8")("replace")
        # Whether text tokens may pass as they are.
        self._is_flowing = False
        self._parsed: list[Parsed] = []
        # Sampled since the last closed item.
        self._ids = array("I")
        self._is_stopped = False
        # Whether nothing was sampled behind the last `<|end|>`.
        self._is_ended = False
        # The header so far: who speaks, and behind each mark what it says.
        self._header = {"": ""}
        self._section = ""
        # What the body is; None in a header. Text is opened by its first letter.
        self._body: ItemOpened | None = None
        self._is_open = False
        self._input = InputReader()
        # Whether the one call that there may be is whole.
        self.is_over = False
        # Where odds are asked for: those of tokens whose text is not said yet.
        self._pending: PendingLogprobs | None = None

    def feed(self, piece: Piece) -> list[Parsed]:
        """What has become certain with these ids."""
        assert isinstance(piece, Ids), "this dialect reads tokens"
        parsed = self._parsed = []
        if piece.logprobs or self._pending is not None:
            self._pending = self._pending or PendingLogprobs(self._vocabulary)
            for id, logprobs in zip(
                piece.ids, piece.logprobs or [None] * len(piece.ids), strict=True
            ):
                self._take(id, logprobs)
            return parsed
        plain = self._plain_tokens
        for id in piece.ids:
            if self._is_flowing:
                wrote = plain.get(id)
                if wrote is not None:
                    self._ids.append(id)
                    parsed.append(wrote)
                    continue
            self._take(id)
        return parsed

    def close(self, *, is_cut: bool) -> list[Parsed]:
        """Close the open item, and seal the turn."""
        parsed = self._parsed = []
        is_call = self._body is not None and self._body.is_call
        self._end(is_cut=is_cut and not (self._is_stopped or self.is_over))
        if not self._is_ended:
            self._ids.append(self._id_of(CALL if is_call else END))
        parsed.append(TurnClosed(self._ids))
        return parsed

    def _take(self, id: int, logprobs: TokenLogprob | None = None) -> None:
        if self._is_done():
            return
        mark = self._marks.get(id)
        if mark in (CALL, RETURN):
            self._is_stopped = True
            self._is_flowing = False
            return
        if mark == START or (mark == CHANNEL and self._body is not None):
            # The message before it has no end of its own.
            self._end()
            if self._is_done():
                return
        self._ids.append(id)
        self._is_ended = mark == END
        if mark == END:
            self._end()
        elif self._body is not None:
            self._take_text(id, logprobs)
        elif mark == MESSAGE:
            self._open_body()
        elif mark in (CHANNEL, CONSTRAIN):
            self._section = mark
            self._header[mark] = ""
        else:
            self._header[self._section] += self._decode.decode(self._vocabulary.bytes_of(id))

    def _is_done(self) -> bool:
        return self._is_stopped or self.is_over

    def _take_text(self, id: int, logprobs: TokenLogprob | None) -> None:
        data = self._vocabulary.bytes_of(id)
        if id not in self._plain_tokens:
            self._plain_tokens[id] = _plain_token(data)
        text = self._decode.decode(data)
        if self._pending is not None:
            self._pending.take(id, logprobs, len(text))
        self._say(text)
        self._is_flowing = (
            self._is_open
            and self._body is not None
            and self._body.kind != "custom"
            and not self._decode.getstate()[0]
        )

    def _open_body(self) -> None:
        """The header is whole: it says what follows."""
        channel = self._header.get(CHANNEL, "")
        found = RECIPIENT.search(self._header[""]) or RECIPIENT.search(channel)
        name = "" if found is None else found[1].removeprefix(f"{FUNCTIONS}.")
        if (
            found is not None
            and found[1] not in PEOPLE
            and may_call(self._scene, offer_in(self._scene, name))
        ):
            self._body = opened_call(name, offer_in(self._scene, name))
            self._open(self._body)
        else:
            is_thought = channel.split()[:1] == ["analysis"]
            self._body = ItemOpened("reasoning" if is_thought else "message")
            if self._pending is not None:
                self._pending.begin(0)

    def _say(self, text: str) -> None:
        assert self._body is not None
        if not text:
            return
        if not self._is_open:
            self._open(self._body)
        if self._body.kind == "custom":
            if text := self._input.feed(text):
                self._parsed.append(ItemText(text))
        elif self._pending is not None and self._body.kind == "message":
            self._parsed.append(ItemText(text, self._pending.say(len(text))))
        else:
            self._parsed.append(ItemText(text))

    def _open(self, body: ItemOpened) -> None:
        self._is_open = True
        self._parsed.append(body)

    def _end(self, *, is_cut: bool = False) -> None:
        """The message is over, whether it said so or not."""
        rest = "" if is_cut else self._decode.decode(b"", final=True)
        self._decode.reset()
        if self._pending is not None:
            self._pending.add(len(rest))
        stray = "" if CHANNEL in self._header else self._header[""].removeprefix("assistant")
        if self._body is None and stray.strip():
            # No message at all, only text: an untrained model, or a broken prompt. Nobody kept its odds.
            self._body, rest = ItemOpened("message"), stray + rest
        if self._body is not None:
            self._say(rest)
        if self._is_open:
            if text := self._input.close():
                self._parsed.append(ItemText(text))
            self._parsed.append(ItemClosed(self._ids, is_cut))
            self._ids = array("I")
            is_call = self._body is not None and self._body.is_call
            self.is_over = is_call and not self._scene.head.parallel_tool_calls
        self._header, self._section, self._input = {"": ""}, "", InputReader()
        self._body, self._is_open, self._is_flowing = None, False, False

    def _id_of(self, mark: str) -> int:
        return self._vocabulary.special(mark)


def _plain_token(data: bytes) -> ItemText | None:
    """The token as said, if it is whole characters."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return ItemText(text) if text else None


HARMONY = Family(
    version=VERSION,
    specials=(START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN),
    stops=(CALL, RETURN),
    seal=(Mark(CALL),),
    cue=(CUE,),
    render=Writing(
        begin=_begin,
        given=_given,
        wrote=_wrote,
        is_alike=_is_alike,
        turning=_last_final,
        kept=_kept,
    ).render,
    write=_write,
    reader=HarmonyReader,
    call=CallForm(named=_call_header, arguments_key=None, before_text=_channel("final")),
    # Its template calls functions of its own, and differs from what the model was trained on in small things.
    is_known_by_tokens=True,
)
