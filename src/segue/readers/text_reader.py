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
most one `ItemText` for an item. Text is held back only where it may still be a mark, or newlines before a mark.

What `tool_choice` forbids is no call but text, as it was written. Where calls may not be parallel, the first call ends
the model's turn: what follows is not read.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache

from segue.readers.bound import BoundFamily
from segue.readers.call_json import Braces, header_of, may_begin_call, whole_call
from segue.readers.item_writer import ItemWriter, feed_tokens, plain_token
from segue.readers.offers import call_in, forced
from segue.turn.values import ItemOpened, Parsed, Scene, TokenLogprob, TurnClosed
from segue.vocabularies.vocabulary import Own

THINK, THOUGHT = "<think>", "</think>"
FENCE = "```"
# What may stand after a fence before the JSON of a call.
FENCED = ("json", "tool_call")
# Between two calls that no mark separates.
SEPARATOR = ";"


@dataclass(frozen=True, slots=True)
class TextMarks:
    """How a family marks a call inside its text."""

    # Stand before and after a call. Without them a call is a bare object.
    call: str = ""
    called: str = SEPARATOR
    # Special tokens that stand before a call, or before a list of calls, and are never text. The first that the
    # vocabulary has is read.
    signals: tuple[str, ...] = ()
    # Whether what closes a forced call is ours: the engine writes only the JSON of the call and stops after it.
    is_mended: bool = False


@dataclass(slots=True)
class _Call:
    """A call that is being read, or what looks like a call."""

    # The mark before it: nothing for a bare object, or after a signal.
    mark: str
    # Whether only a call can follow the mark; it is not certain after a fence, or for a bare object.
    is_certain: bool
    # What stands between the text before and the mark.
    gap: str = ""
    is_listed: bool = False
    braces: Braces = field(default_factory=Braces)
    # How much of the text the braces have seen.
    scanned: int = 0


class TextReader:
    """A `Reader`: see the table of states at the top.

    A state takes the text that is not used up and returns what it leaves for the next state, or None to wait.
    """

    def __init__(
        self, bound: BoundFamily, scene: Scene, marks: TextMarks, *, is_thinking: bool = False
    ) -> None:
        """`is_thinking`: the cue has begun a thought already."""
        self._bound = bound
        self._vocabulary = vocabulary = bound.vocabulary
        self._scene = scene
        self._family_marks = marks
        head, effects = scene.head, scene.effects
        may_call = head.tool_choice != "none"
        is_free = head.tool_choice == "auto" or not may_call
        self._mends = (
            marks.is_mended and not is_free and scene.can_constrain and bool(forced(scene))
        )
        # Which marks mean something in this scene.
        signals = [text for text in marks.signals if vocabulary.has_special(text)]
        self._signal = vocabulary.special(signals[0]) if signals and may_call else None
        wanted = effects.format or head.text.format
        is_json = wanted is not None and wanted.type != "text"
        is_offering = may_call and bool(head.tools.offers or effects.offers)
        self._is_bare_read = is_offering and (not is_json or scene.can_constrain)
        self._marks = (
            *((marks.call,) if marks.call and may_call else ()),
            *((FENCE,) if is_offering and not is_json else ()),
        )
        self._decode = getincrementaldecoder("utf-8")("replace")
        self._items = ItemWriter(is_single=not head.parallel_tool_calls)
        # Whether the only call that is allowed is whole.
        self.is_over = False
        self._state: Callable[[str], str | None] = self._thinking if is_thinking else self._between
        self._is_passing = False
        self._stop: int | None = None
        # Text that waits for more, and how many of its characters came with the last token.
        self._held = ""
        self._fresh = 0
        self._is_after_mark = False
        self._call = _Call("", is_certain=False)

    feed = feed_tokens

    def close(self, *, is_cut: bool) -> list[Parsed]:
        items = self._items
        parsed = items.parsed = []
        items.joined_from = 0
        is_cut = is_cut and self._stop is None and not items.is_over
        self._release(is_cut=is_cut)
        is_whole_call = self._state in (self._trailing, self._ending)
        items.close(is_cut=is_cut and not is_whole_call)
        ids = items.ids
        if self._mends and is_whole_call:
            brace = "}" if self._state == self._trailing else ""
            end = f"\n{self._family_marks.called}" if self._call.mark else ""
            ids = ids + self._vocabulary.ids(Own(brace + end))
        ids.append(self._bound.seal[0] if self._stop is None else self._stop)
        parsed.append(TurnClosed(ids + self._bound.seal[1:]))
        return parsed

    def _take(self, id: int, logprobs: TokenLogprob | None = None) -> None:
        """One token on the slow way."""
        items = self._items
        if self._stop is not None or items.is_over:
            return
        if id in self._bound.stops:
            self._stop = id
            self._is_passing = False
            return
        if id == self._signal:
            self._take_signal(id)
            return
        data = self._vocabulary.bytes_of(id)
        if id not in self._bound.plain_tokens:
            # It can neither begin a mark nor stand before a mark.
            is_plain = b"<" not in data and b"`" not in data and data[-1:] != b"\n"
            self._bound.plain_tokens[id] = plain_token(data) if is_plain else None
        items.ids.append(id)
        text = self._decode.decode(data)
        self._fresh = len(text)
        if items.pending is not None:
            items.pending.take(id, logprobs, len(text))
        items.joined_from = len(items.parsed)
        self._read(text)
        self._is_passing = (
            items.open is not None
            and not self._held
            and self._state in (self._talking, self._thinking)
            and not self._decode.getstate()[0]
        )

    def _take_signal(self, id: int) -> None:
        """What went before is whole, and a call follows."""
        items = self._items
        items.joined_from = len(items.parsed)
        self._release()
        self._close()
        if items.is_over:
            return
        items.ids.append(id)
        self._call, self._state = _Call("", is_certain=True), self._heading
        self._is_passing = False

    def _read(self, text: str) -> None:
        rest: str | None = self._held + text
        self._held = ""
        while rest is not None:
            rest = self._state(rest)

    # Text and thoughts.

    def _between(self, text: str) -> str | None:
        bare = text.lstrip()
        if bare.startswith(THINK):
            self._state = self._thinking
            return bare[len(THINK) :]
        is_bare = self._is_bare_read and bare.startswith("{")
        # The mark of a bare object is empty.
        mark = "" if is_bare else next(filter(bare.startswith, self._marks), None)
        if mark is None and any(known.startswith(bare) for known in (THINK, *self._marks)):
            self._held = text
            return None
        # Newlines after a mark belong to the mark; at the very beginning they are the model's own.
        own = text.lstrip("\n") if self._is_after_mark else text
        if mark is not None:
            is_certain = bool(mark) and mark == self._family_marks.call
            self._call = _Call(mark, is_certain, gap=own[: len(own) - len(bare)])
            self._state = self._heading
            return bare[len(mark) :]
        self._items.begin_message(len(own))
        self._state = self._talking
        return own

    def _talking(self, text: str) -> str | None:
        items = self._items
        found = [(at, mark) for mark in self._marks if (at := text.find(mark)) >= 0]
        at, mark = min(found, default=(len(text), ""))
        held = len(text) - len(text[:at].rstrip("\n")) if mark else _held_back(text, self._marks)
        # With which token begins what is not written.
        if held < len(text):
            items.held_from = len(items.ids) - (1 if held >= self._fresh else 0)
        elif held == self._fresh:
            items.held_from = len(items.ids) - 1
        end = len(text) - held
        items.write(text[:end])
        if not mark:
            self._held = text[end:]
            return None
        self._call = _Call(mark, mark == self._family_marks.call, gap=text[end:at])
        self._state = self._heading
        return text[at + len(mark) :]

    def _thinking(self, text: str) -> str | None:
        items = self._items
        at = text.find(THOUGHT)
        held = _held_back(text, (THOUGHT,)) if at < 0 else len(text) - len(text[:at].rstrip("\n"))
        own = text[: len(text) - held]
        if items.open is None and own.strip():
            items.begin(ItemOpened("reasoning"))
            own = own.lstrip("\n")
        if items.open is not None:
            items.write(own)
        if at < 0:
            self._held = text[len(text) - held :] if items.open is not None else text
            return None
        self._close()
        return text[at + len(THOUGHT) :]

    # Calls.

    def _heading(self, text: str) -> str | None:
        bare, call = text.lstrip(), self._call
        if call.mark == FENCE:
            bare = _after_word(bare)
        elif call.is_certain and not call.mark and bare.startswith("["):
            call.is_listed = True
            bare = bare[1:].lstrip()
        if bare[:1] not in ("", "{") or not (call.is_certain or may_begin_call(bare)):
            return self._was_text(text)
        header = header_of(bare)
        if header is not None:
            if not self._begin_call(header[0]):
                return self._was_text(text)
            self._state = self._arguing
            call.braces = Braces()
            return bare[header[1] :]
        end = call.braces.end_in(text, call.scanned)
        call.scanned = len(text)
        if end is None:
            self._held = text
            return None
        return self._whole_heading(text, end)

    def _whole_heading(self, text: str, end: int) -> str:
        """Another order of keys, arguments that are no object, or no call at all."""
        call = whole_call(text[text.find("{") : end])
        if call is None or not self._begin_call(call.name):
            return self._was_text(text)
        self._items.write_arguments(call.arguments_text())
        self._items.end_arguments()
        self._state = self._ending
        return text[end:]

    def _begin_call(self, name: str) -> bool:
        """Begin a call of this tool, if it is a call and allowed."""
        opened = call_in(self._scene, name, is_known=not self._call.is_certain)
        if opened is not None:
            # A message before it ends where the call was first suspected.
            self._items.close(self._items.held_from)
            self._items.begin(opened)
        return opened is not None

    def _was_text(self, text: str) -> str:
        items = self._items
        before = self._call.gap + self._call.mark
        if items.open is None:
            items.begin_message(len(before) + len(text))
        items.write(before)
        items.held_from = len(items.ids)
        self._state = self._talking
        return text

    def _arguing(self, text: str) -> str | None:
        braces = self._call.braces
        end = braces.end_in(text)
        self._items.write_arguments(text[:end])
        if end is None:
            return None
        self._items.end_arguments()
        self._state = self._trailing if braces.depth == 0 else self._ending
        self._call.braces = Braces(depth=1)
        return text[end:]

    def _trailing(self, text: str) -> str | None:
        end = self._call.braces.end_in(text)
        if end is None:
            return None
        self._state = self._ending
        return text[end:]

    def _ending(self, text: str) -> str | None:
        # A brace too many is a common slip of small models and means nothing.
        bare = text.lstrip("} \t\r\n")
        if self._call.is_listed:
            return self._ending_in_list(bare)
        mark = self._call.mark
        closing = FENCE if mark == FENCE else self._family_marks.called if mark else SEPARATOR
        if closing.startswith(bare) and bare != closing:
            self._held = bare
            return None
        self._close()
        return None if self._items.is_over else bare.removeprefix(closing)

    def _ending_in_list(self, bare: str) -> str | None:
        if not bare:
            return None
        self._close()
        if self._items.is_over:
            return None
        if bare[0] == ",":
            self._call, self._state = _Call("", is_certain=True, is_listed=True), self._heading
            return bare[1:]
        return bare.removeprefix("]")

    # The end.

    def _close(self) -> None:
        self._items.close()
        self._is_after_mark = True
        self._state = self._between

    def _release(self, *, is_cut: bool = False) -> None:
        """At the end nothing can become a mark any more, and unless it is cut, no character whole."""
        items = self._items
        rest = "" if is_cut else self._decode.decode(b"", final=True)
        if items.pending is not None:
            items.pending.add(len(rest))
        self._read(rest)
        while self._state == self._heading:
            held, self._held = self._held, ""
            if items.open is None and not (self._call.gap + self._call.mark + held).strip():
                self._state = self._between
                break
            self._read(self._was_text(held))
        held, self._held = self._held, ""
        if self._state == self._arguing:
            items.end_arguments()
        elif held and self._state in (self._between, self._thinking, self._talking):
            self._write_last(held)

    def _write_last(self, held: str) -> None:
        items = self._items
        if items.open is None and held.strip():
            is_thought = self._state == self._thinking
            held = held.lstrip("\n") if is_thought or self._is_after_mark else held
            if is_thought:
                items.begin(ItemOpened("reasoning"))
            else:
                items.begin_message(len(held))
        if items.open is not None:
            items.write(held)


@cache
def _starts(marks: tuple[str, ...]) -> tuple[str, ...]:
    """All parts with which these marks begin, the longest first. Marks are constants, so that there are few."""
    starts = {mark[:n] for mark in marks for n in range(1, len(mark))}
    return tuple(sorted(starts, key=len, reverse=True))


def _held_back(text: str, marks: tuple[str, ...]) -> int:
    """How many characters at the end may still be newlines before a mark, and a part of it."""
    begun = next((len(start) for start in _starts(marks) if text.endswith(start)), 0)
    return len(text) - len(text[: len(text) - begun].rstrip("\n"))


def _after_word(text: str) -> str:
    """After the word at a fence, as far as it has come."""
    for word in FENCED:
        if text.startswith(word) or word.startswith(text):
            return text[len(word) :].lstrip()
    return text
