"""What did the model say? Reads text with marks in it, as it is sampled.

Inside the model's turn everything is text: `<think>`, then what it says, then each call as JSON between marks. The
reader finds these marks again, one token after the other:

    state       waits for                                    and then
    between     a mark, or a letter                          thinking, heading, or opens a message
    talking     the mark of a call                           heading
    thinking    </think>                                     closes, between
    heading     the name and the `{` of its arguments        opens a call, arguing; else it was text: talking
    arguing     the `}` of the arguments                     trailing
    trailing    the `}` of the call                          ending
    ending      the end mark, or anything else               closes, between

A call begins with the family's own mark. Where tools are offered, what small models write instead is understood too:
a fenced block of JSON, and a bare object as the whole answer; those count only if they call a tool that there is.
A message stays open while heading, since what looks like a call may turn out to be text. Each token gives at
most one `ItemText` for an item. Text is held back only where it may still be a mark, or newlines before one.

What `tool_choice` forbids is no call but text, as it was written. Where calls may not be parallel, the first one ends
the model's turn: what follows is not read.
"""

from __future__ import annotations

import re
from array import array
from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.dialects.family import BoundFamily
from segue.dialects.inputs import InputReader
from segue.dialects.logprobs import PendingLogprobs
from segue.dialects.offers import may_call, offer_in, opened_call
from segue.turn.values import (
    IdArray,
    Ids,
    ItemClosed,
    ItemOpened,
    ItemText,
    Parsed,
    Piece,
    Scene,
    TokenLogprob,
    TurnClosed,
)
from segue.wire.items import Logprob
from segue.wire.tools import Offer

THINK, THOUGHT = "<think>", "</think>"
FENCE = "```"
# What may stand behind a fence before the JSON of a call.
FENCED = ("json", "tool_call")

HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)',
    re.DOTALL,
)
# A name is at most 128 characters; a longer header is read when it is whole.
HEADER_CHARS_MAX = 1024
# With which key an object may begin that is a call though no mark says so.
FIRST_KEY = re.compile(r'\{\s*"(\w*)(")?')
KEYS = ("name", "type", "id", "function", "arguments", "parameters")
IN_STRING = re.compile(r'[\\"]')
IN_OBJECT = re.compile(r'["{}<`]')


@dataclass(frozen=True, slots=True)
class TextMarks:
    """How a family marks a call inside its text."""

    # Stand before and after a call. Without them a call is a bare object, and a `;` may separate it from the next.
    call: str = ""
    called: str = ";"
    # Special tokens that stand before a call, or before a list of calls, and are never text. The first that the
    # vocabulary has is read.
    signals: tuple[str, ...] = ()


class _Called(Struct):
    name: str
    arguments: Raw | UnsetType = UNSET
    parameters: Raw | UnsetType = UNSET


class _Wrapped(Struct):
    function: _Called


class _Braces:
    """Finds the end of a JSON object that arrives in pieces."""

    __slots__ = ("depth", "is_escaped", "is_quoted")

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.is_quoted = False
        self.is_escaped = False

    def end_in(self, text: str, at: int = 0) -> int | None:
        """Behind the brace that closes the object, or before a `<` that cannot be JSON; None: not in here."""
        if self.is_escaped and at < len(text):
            self.is_escaped = False
            at += 1
        while found := (IN_STRING if self.is_quoted else IN_OBJECT).search(text, at):
            at = found.end()
            match found[0]:
                case '"':
                    self.is_quoted = not self.is_quoted
                case "\\":
                    self.is_escaped = at == len(text)
                    at += 1
                case "{":
                    self.depth += 1
                case "}":
                    self.depth -= 1
                    if self.depth == 0:
                        return at
                case _:
                    return found.start()
        return None


class TextReader:
    """A `Reader`: see the table of states at the top.

    A state takes the text that is not used up and returns what it leaves for the next one, or None to wait.
    """

    def __init__(
        self,
        bound: BoundFamily,
        scene: Scene,
        marks: TextMarks,
        *,
        mends: bool = False,
        is_thinking: bool = False,
    ) -> None:
        """`mends`: the engine is held to the JSON of a call and stops behind it, so that what closes it is ours.
        `is_thinking`: the cue has begun a thought already."""
        self._bound = bound
        self._call = marks
        self._vocabulary = bound.vocabulary
        self._stops = bound.stops
        may_call_any = scene.head.tool_choice != "none"
        signals = [text for text in marks.signals if bound.vocabulary.has_special(text)]
        self._signal = bound.vocabulary.special(signals[0]) if signals and may_call_any else None
        self._flows = bound.plain_tokens
        self._scene = scene
        self._mends = mends
        is_json = scene.format is not None
        is_offering = bool(scene.offers) and may_call_any
        self._is_bare_read = is_offering and (not is_json or scene.can_constrain)
        self._marks = (
            *((marks.call,) if marks.call and may_call_any else ()),
            *((FENCE,) if is_offering and not is_json else ()),
        )
        self._decode = getincrementaldecoder("utf-8")("replace")
        self._state: Callable[[str], str | None]
        self._state = self._thinking if is_thinking else self._between
        # Whether text tokens may pass as they are: an item of text is open and nothing is held back.
        self._is_flowing = False
        self._parsed: list[Parsed] = []
        self._said_before = 0
        # Sampled since the last closed item, and the stop behind them.
        self._ids = array("I")
        self._stop: int | None = None
        self._held = ""
        self._fresh = 0
        self._held_from = 0
        self._open: ItemOpened | None = None
        self._is_behind_mark = False
        self._mark = ""
        self._is_certain = False
        self._is_listed = False
        self._gap = ""
        self._braces = _Braces()
        self._scanned = 0
        self._input = InputReader()
        self._is_single = not scene.head.parallel_tool_calls
        # Whether the one call that there may be is whole.
        self.is_over = False
        # Where odds are asked for: those of the token that is read, and of those whose text is not said yet.
        self._logprobs: TokenLogprob | None = None
        self._margin: PendingLogprobs | None = None

    def feed(self, piece: Piece) -> list[Parsed]:
        """What has become certain with these ids."""
        assert isinstance(piece, Ids), "this dialect reads tokens"
        parsed = self._parsed = []
        if piece.logprobs or self._margin is not None:
            self._feed_with_odds(piece)
            return parsed
        flows = self._flows
        for id in piece.ids:
            if self._is_flowing:
                wrote = flows.get(id)
                if wrote is not None:
                    self._ids.append(id)
                    parsed.append(wrote)
                    continue
            self._take(id)
        return parsed

    def _feed_with_odds(self, piece: Ids) -> None:
        """The slow way for every token. The beginning of a forced answer has no odds."""
        if self._margin is None:
            self._margin = PendingLogprobs(self._vocabulary)
        for id, logprobs in zip(piece.ids, piece.logprobs or [None] * len(piece.ids), strict=True):
            self._logprobs = logprobs
            self._take(id)

    def close(self, *, is_cut: bool) -> list[Parsed]:
        """Say what was held back, close the open item, and seal the block."""
        parsed = self._parsed = []
        self._said_before = 0
        is_cut = is_cut and self._stop is None and not self.is_over
        self._read("" if is_cut else self._rest())
        self._let_go()
        is_whole_call = self._state in (self._trailing, self._ending)
        mended = self._mended()
        self._close(len(self._ids), is_cut=is_cut and not is_whole_call)
        ids = self._ids + mended
        ids.append(self._bound.seal[0] if self._stop is None else self._stop)
        parsed.append(TurnClosed(ids + self._bound.seal[1:]))
        return parsed

    def _mended(self) -> IdArray[int]:
        """What is missing behind the JSON of a call."""
        is_trailing = self._state == self._trailing
        if not self._mends or not (is_trailing or self._state == self._ending):
            return array("I")
        end = f"\n{self._call.called}" if self._mark else ""
        return self._vocabulary.encode(("}" if is_trailing else "") + end)

    def _take(self, id: int) -> None:
        """One token on the slow way."""
        if self._stop is not None or self.is_over:
            return
        if id in self._stops:
            self._stop = id
            self._is_flowing = False
            return
        if id == self._signal:
            self._take_signal(id)
            return
        if id not in self._flows:
            self._flows[id] = _flow(self._vocabulary.bytes_of(id))
        self._ids.append(id)
        text = self._decode.decode(self._vocabulary.bytes_of(id))
        self._fresh = len(text)
        if self._margin is not None:
            self._margin.take(id, self._logprobs, len(text))
        self._said_before = len(self._parsed)
        self._read(text)
        self._is_flowing = (
            self._open is not None
            and not self._held
            and self._state in (self._talking, self._thinking)
            and not self._decode.getstate()[0]
        )

    def _take_signal(self, id: int) -> None:
        """What went before is whole, and a call follows."""
        self._said_before = len(self._parsed)
        self._read(self._rest())
        self._let_go()
        self._close(len(self._ids))
        if self.is_over:
            return
        self._ids.append(id)
        self._gap = ""
        self._is_listed = False
        self._head("", "", is_certain=True)
        self._is_flowing = False

    def _rest(self) -> str:
        """What stands for a character that will not become whole."""
        rest = self._decode.decode(b"", final=True)
        if self._margin is not None:
            self._margin.add(len(rest))
        return rest

    def _read(self, text: str) -> None:
        rest: str | None = self._held + text
        self._held = ""
        while rest is not None:
            rest = self._state(rest)

    def _between(self, text: str) -> str | None:
        bare = text.lstrip()
        if bare.startswith(THINK):
            self._state = self._thinking
            return bare[len(THINK) :]
        mark = self._mark_at(bare)
        if mark is None and any(one.startswith(bare) for one in (THINK, *self._marks)):
            self._held = text
            return None
        # Newlines behind a mark belong to the mark; at the very beginning they are the model's own.
        own = text.lstrip("\n") if self._is_behind_mark else text
        if mark is not None:
            self._gap = own[: len(own) - len(bare)]
            is_certain = bool(mark) and mark == self._call.call
            return self._head(mark, bare[len(mark) :], is_certain=is_certain)
        self._begin_message(len(own))
        self._state = self._talking
        return own

    def _mark_at(self, bare: str) -> str | None:
        """The mark of a call with which this text begins; nothing at all is the mark of a bare object."""
        if self._is_bare_read and bare.startswith("{"):
            return ""
        return next((mark for mark in self._marks if bare.startswith(mark)), None)

    def _talking(self, text: str) -> str | None:
        found = [(at, mark) for mark in self._marks if (at := text.find(mark)) >= 0]
        if not found:
            self._write_but(text, _held_back(text, self._marks))
            return None
        at, mark = min(found)
        own = text[:at].rstrip("\n")
        self._write_but(text, len(text) - len(own))
        self._held = ""
        self._gap = text[len(own) : at]
        return self._head(mark, text[at + len(mark) :], is_certain=mark == self._call.call)

    def _thinking(self, text: str) -> str | None:
        at = text.find(THOUGHT)
        held = _held_back(text, (THOUGHT,)) if at < 0 else len(text) - len(text[:at].rstrip("\n"))
        own = text[: len(text) - held]
        if self._open is None and own.strip():
            self._begin(ItemOpened("reasoning"))
            own = own.lstrip("\n")
        if self._open is not None:
            self._write(own)
        if at < 0:
            self._held = text[len(text) - held :] if self._open is not None else text
            return None
        self._close(len(self._ids))
        return text[at + len(THOUGHT) :]

    def _head(self, mark: str, text: str, *, is_certain: bool) -> str:
        """Behind a mark: a call begins, or what looks like one; it is certain only behind the family's own mark."""
        self._mark = mark
        self._is_certain = is_certain
        self._state = self._heading
        self._braces = _Braces()
        self._scanned = 0
        return text

    def _heading(self, text: str) -> str | None:
        bare = text.lstrip()
        is_certain = self._is_certain
        if self._mark == FENCE:
            bare = _behind_word(bare)
        elif is_certain and not self._mark and bare.startswith("["):
            self._is_listed = True
            bare = bare[1:].lstrip()
        if bare[:1] not in ("", "{") or not (is_certain or _may_be_call(bare)):
            return self._was_text(text)
        header = HEADER.match(bare) if len(bare) <= HEADER_CHARS_MAX else None
        if header is not None:
            name = _string(header[1])
            offer = offer_in(self._scene, name)
            if (offer is None and not is_certain) or not may_call(self._scene, offer):
                return self._was_text(text)
            self._begin_call(name, offer)
            self._state = self._arguing
            self._braces = _Braces()
            return bare[header.end() :]
        end = self._braces.end_in(text, self._scanned)
        self._scanned = len(text)
        if end is None:
            self._held = text
            return None
        # Another order of keys, arguments that are no object, or no call at all.
        call = _called(text[text.find("{") : end])
        offer = offer_in(self._scene, call.name) if call is not None else None
        is_call = call is not None and (offer is not None or is_certain)
        if call is None or not is_call or not may_call(self._scene, offer):
            return self._was_text(text)
        self._begin_call(call.name, offer)
        self._argue(_arguments(call))
        self._end_arguments()
        self._state = self._ending
        return text[end:]

    def _was_text(self, text: str) -> str:
        before = self._gap + self._mark
        if self._open is None:
            self._begin_message(len(before) + len(text))
        self._is_listed = False
        self._write(before)
        self._held_from = len(self._ids)
        self._state = self._talking
        return text

    def _arguing(self, text: str) -> str | None:
        end = self._braces.end_in(text)
        if end is None:
            self._argue(text)
            return None
        self._argue(text[:end])
        self._end_arguments()
        self._state = self._trailing if self._braces.depth == 0 else self._ending
        self._braces = _Braces(depth=1)
        return text[end:]

    def _trailing(self, text: str) -> str | None:
        end = self._braces.end_in(text)
        if end is None:
            return None
        self._state = self._ending
        return text[end:]

    def _ending(self, text: str) -> str | None:
        # A brace too many is a common slip of small models and means nothing.
        bare = text.lstrip("} \t\r\n")
        if self._is_listed:
            return self._ending_in_list(bare)
        closing = FENCE if self._mark == FENCE else self._call.called if self._mark else ";"
        if closing.startswith(bare) and bare != closing:
            self._held = bare
            return None
        self._close(len(self._ids))
        return None if self.is_over else bare.removeprefix(closing)

    def _ending_in_list(self, bare: str) -> str | None:
        if not bare:
            return None
        self._close(len(self._ids))
        if self.is_over:
            return None
        if bare[0] == ",":
            return self._head("", bare[1:], is_certain=True)
        self._is_listed = False
        return bare.removeprefix("]")

    def _let_go(self) -> None:
        """At the end nothing can become a mark any more."""
        while self._state == self._heading:
            held, self._held = self._held, ""
            if self._open is None and not (self._gap + self._mark + held).strip():
                self._state = self._between
                break
            rest: str | None = self._was_text(held)
            while rest is not None:
                rest = self._state(rest)
        held, self._held = self._held, ""
        if self._state == self._arguing:
            self._end_arguments()
        elif self._state in (self._between, self._thinking, self._talking):
            if self._open is None and held.strip():
                is_thought = self._state == self._thinking
                held = held.lstrip("\n") if is_thought or self._is_behind_mark else held
                if is_thought:
                    self._begin(ItemOpened("reasoning"))
                else:
                    self._begin_message(len(held))
            if self._open is not None:
                self._write(held)

    # Leaves: what is said, and which ids belong to it.

    def _begin(self, opened: ItemOpened) -> None:
        self._open = opened
        self._parsed.append(opened)

    def _begin_message(self, rest: int) -> None:
        """A message begins so many characters before the end of what was decoded."""
        if self._margin is not None:
            self._margin.begin(rest)
        self._begin(ItemOpened("message"))

    def _begin_call(self, name: str, offer: Offer | None) -> None:
        if self._open is not None:
            self._close(self._held_from)
        self._begin(opened_call(name, offer))

    def _close(self, count: int, *, is_cut: bool = False) -> None:
        """Close what is open, if anything is; the first ids so far are its own."""
        if self._open is not None:
            self.is_over = self._is_single and self._open.is_call
            self._parsed.append(ItemClosed(self._ids[:count], is_cut))
            self._ids = self._ids[count:]
            self._held_from = 0
            self._open = None
        self._is_behind_mark = True
        self._state = self._between

    def _write(self, text: str) -> None:
        if not text:
            return
        parsed = self._parsed
        logprobs: tuple[Logprob, ...] = ()
        if self._margin is not None and self._open is not None and self._open.kind == "message":
            logprobs = self._margin.say(len(text))
        last = parsed[-1] if len(parsed) > self._said_before else None
        if isinstance(last, ItemText):
            parsed[-1] = ItemText(last.text + text, last.logprobs + logprobs)
        else:
            parsed.append(ItemText(text, logprobs))

    def _write_but(self, text: str, held: int) -> None:
        """Write all but the end, and note with which token that end begins."""
        if held < len(text):
            self._held_from = len(self._ids) - (1 if held >= self._fresh else 0)
        elif held == self._fresh:
            self._held_from = len(self._ids) - 1
        self._write(text[: len(text) - held])
        self._held = text[len(text) - held :]

    def _argue(self, text: str) -> None:
        assert self._open is not None
        self._write(self._input.feed(text) if self._open.kind == "custom" else text)

    def _end_arguments(self) -> None:
        self._write(self._input.close())
        self._input = InputReader()


def _flow(data: bytes) -> ItemText | None:
    """The token as said, if it is whole characters and can neither begin a mark nor stand before one."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    is_plain = text and "<" not in text and "`" not in text and text[-1] != "\n"
    return ItemText(text) if is_plain else None


def _held_back(text: str, marks: Sequence[str]) -> int:
    """How many characters at the end may still be newlines before a mark, and a part of it."""
    begun = max((_begun(text, mark) for mark in marks), default=0)
    return len(text) - len(text[: len(text) - begun].rstrip("\n"))


def _begun(text: str, mark: str) -> int:
    """How much of this mark stands at the end."""
    return next((n for n in range(len(mark) - 1, 0, -1) if text.endswith(mark[:n])), 0)


def _behind_word(text: str) -> str:
    """Behind the word at a fence, as far as it has come."""
    for word in FENCED:
        if text.startswith(word) or word.startswith(text):
            return text[len(word) :].lstrip()
    return text


def _may_be_call(text: str) -> bool:
    """Whether an object that begins like this may be a call."""
    if not text[1:].lstrip():
        return True
    key = FIRST_KEY.match(text)
    if key is None:
        return False
    return key[1] in KEYS if key[2] else any(one.startswith(key[1]) for one in KEYS)


def _called(text: str) -> _Called | None:
    try:
        return msgspec.json.decode(text, type=_Called)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return msgspec.json.decode(text, type=_Wrapped).function
    except (msgspec.DecodeError, RecursionError):
        return None


def _arguments(call: _Called) -> str:
    """Verbatim; some models write the object into a string."""
    found = call.parameters if call.arguments is UNSET else call.arguments
    text = "{}" if found is UNSET else bytes(found).decode()
    return _string(text) if text.startswith('"') else text


def _string(text: str) -> str:
    return msgspec.json.decode(text, type=str)
