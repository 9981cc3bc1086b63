"""What did the model say? Reads text with marks in it, as it is sampled.

Inside the model's turn everything is text: a thought, then what it says, then calls between marks. How a family marks
them is a `CallFormat` (`formats.py`). The reader finds these marks again, one token after the other:

    state       waits for                                    and then
    between     a mark, or a letter                          thinking, heading, or opens a message
    talking     the mark of calls                            heading
    thinking    the end of the thought                       closes, between
    heading     the name, up to the arguments                opens a call, arguing; else it was text: talking
    arguing     the end of the arguments (`arguments.py`)    trailing
    trailing    the `}` of a call that is an object          ending
    ending      the next call, the end mark, anything else   closes; heading, between
    guessing    the end of the answer                        calls, or it was text

Only the family's own marks make a call, only where tools are offered, and not inside a fence, where a call is quoted.
Some families forget their marks (`is_guessed`): then an answer that is nothing but the JSON of calls of known tools, in
a fence or not, is meant as these calls. It is held back up to its end. A message stays open while heading, since what
looks like a call may turn out to be text. Each token gives at most one `ItemText` for an item. Text is held back only
where it may still be a mark, or newlines before a mark.

What `tool_choice` forbids is no call but text, as it was written; a special token has no text. Where calls may not be
parallel, the first call ends the model's turn: what follows is not read.
"""

from __future__ import annotations

import re
from codecs import getincrementaldecoder
from collections.abc import Callable
from dataclasses import dataclass, field

from segue.readers.arguments import ArgumentsReader, JsonArguments, arguments_reader
from segue.readers.bound import BoundFamily
from segue.readers.call_json import Braces, may_begin_call, only_calls, whole_call
from segue.readers.formats import OBJECTS, CallFormat, CallShape
from segue.readers.item_writer import ItemWriter, feed_tokens, plain_token
from segue.readers.marks import (
    HEADER_CHARS_MAX,
    any_of,
    header,
    held_back,
    is_special,
    marks_and_fences,
    spelt_format,
)
from segue.readers.offers import call_in, forced, offer_in, parameters_of
from segue.schemas.json_schema import JsonSchema
from segue.seams.model import ItemOpened, Parsed, Scene, TokenLogprob, TurnClosed
from segue.vocabularies.vocabulary import Own

BLANKS = " \t\r\n"
# Around calls in a list, and between calls.
LISTED = BLANKS + "[,;"
# The end of a list. A brace too many is a common slip of small models and means nothing.
SLACK = re.compile(r"\A[\s}]*}")
LIST_SLACK = re.compile(r"\A[\s}\]]*[}\]]")
# An answer that may be calls without marks: a fence or none, then objects.
GUESSED = re.compile(
    r"\s*(?:`{0,2}|```[a-z_]{0,9}\s*|(?:```(?:json|tool_call)?\s*)?(?P<object>\{.*))", re.DOTALL
)
# Between two calls that no mark separates.
SEPARATOR = ";"


@dataclass(slots=True)
class _Call:
    """A call that is being read, or what looks like a call."""

    # The mark before it: nothing for a bare object, or for another call before the end mark.
    mark: str
    # Whether only a call can follow the mark; it is not certain for a bare object.
    is_certain: bool
    # What stands between the text before and the mark.
    gap: str = ""
    # Whether the tool must be one that there is.
    is_known: bool = False
    shape: CallShape | None = None
    is_closed: bool = False
    braces: Braces = field(default_factory=Braces)
    # How much of the text the braces have seen.
    scanned: int = 0


def _closed(text: str) -> None:
    """The state after the last one."""


class TextReader:
    """A `Reader`: see the table of states at the top.

    A state takes the text that is not used up and returns what it leaves for the next state, or None to wait.
    """

    def __init__(
        self, bound: BoundFamily, scene: Scene, format: CallFormat, *, is_thinking: bool = False
    ) -> None:
        """`is_thinking`: the cue has begun a thought already."""
        self._bound = bound
        self._vocabulary = bound.vocabulary
        self._scene = scene
        self._spelt = spelt = spelt_format(format, bound.vocabulary)
        self._format = spelt.format
        head = scene.head
        effects = scene.effects
        is_forced = head.tool_choice not in ("auto", "none") and bool(forced(scene))
        self._mends = format.is_mended and is_forced and scene.can_constrain
        # Which marks mean something in this scene: without tools, none.
        wanted = effects.format or head.text.format
        is_json = wanted is not None and wanted.type != "text"
        is_offering = head.tool_choice != "none" and bool(head.tools.offers or effects.offers)
        is_held = scene.can_constrain and (is_forced or is_json)
        self._is_bare_read = is_offering and (is_held or (format.is_bare and not is_json))
        self._is_guessing = is_offering and format.is_guessed and not is_json
        self._begins = self._format.begins if is_offering else ()
        self._skipped = LISTED if format.is_listed else BLANKS
        self._bare_begins = ("{", "[") if format.is_bare and format.is_listed else ("{",)
        self._loose = self._format.loose if is_offering else ""
        self._marks = (*self._begins, *self._format.dropped, *filter(None, (self._loose,)))
        # A mark that is a token ends a thought, too.
        # A family without thoughts has no marks for them.
        tokens = filter(is_special, (*self._begins, *self._format.dropped))
        self._thought_ends = tuple(filter(None, (self._format.thought, *tokens)))
        self._decode = getincrementaldecoder("utf-8")("replace")
        self._items = ItemWriter(is_single=not head.parallel_tool_calls, hidden=spelt.hidden)
        # Whether the only call that is allowed is whole.
        self.is_over = False
        self._state: Callable[[str], str | None] = self._thinking if is_thinking else self._between
        self._is_passing = False
        self._is_ended = False
        self._stop: int | None = None
        # Text that waits for more, and how many of its characters came with the last token.
        self._held = ""
        self._fresh = 0
        self._is_after_mark = False
        self._is_fenced = False
        self._call = _Call("", is_certain=False)
        # Of the tools that were called.
        self._schemas: dict[str, JsonSchema] = {}
        self._arguments: ArgumentsReader = JsonArguments()

    feed = feed_tokens

    def close(self, *, is_cut: bool) -> list[Parsed]:
        items = self._items
        parsed = items.parsed = []
        items.joined_from = 0
        is_cut = is_cut and self._stop is None and not items.is_over
        self._flush(is_cut=is_cut)
        is_whole_call = self._state in (self._trailing, self._ending)
        items.close(is_cut=is_cut and not is_whole_call)
        ids = items.ids
        if self._mends and is_whole_call:
            brace = "}" if self._state == self._trailing else ""
            end = f"\n{self._format.ends[0]}" if self._call.mark else ""
            ids = ids + self._vocabulary.ids(Own(brace + end))
        ids.append(self._bound.seal[0] if self._stop is None else self._stop)
        parsed.append(TurnClosed(ids + self._bound.seal[1:]))
        # A method of its own would keep it, and the whole scene, until the garbage collector comes.
        self._state = _closed
        return parsed

    def _feed_token(self, id: int, logprobs: TokenLogprob | None = None) -> None:
        """One token on the slow way."""
        items = self._items
        if self._stop is not None or items.is_over:
            return
        if id in self._bound.stops:
            self._stop = id
            self._is_passing = False
            return
        data = self._vocabulary.bytes_of(id)
        if id not in self._bound.plain_tokens:
            # It can neither begin a mark nor stand before a mark.
            is_plain = self._spelt.first_bytes.isdisjoint(data) and data[-1:] != b"\n"
            self._bound.plain_tokens[id] = plain_token(data) if is_plain else None
        items.ids.append(id)
        letter = self._spelt.letters.get(id, "")
        text = self._decode.decode(data, final=bool(letter)) + letter
        self._fresh = len(text)
        if items.pending is not None:
            items.pending.add_token(id, logprobs, len(text))
        items.joined_from = len(items.parsed)
        self._read(text)
        self._is_passing = (
            items.open is not None
            and not self._held
            and self._state in (self._talking, self._thinking)
            and not self._decode.getstate()[0]
        )

    def _read(self, text: str) -> None:
        rest: str | None = self._held + text
        self._held = ""
        while rest is not None:
            rest = self._state(rest)

    # Text and thoughts.

    def _between(self, text: str) -> str | None:
        bare = text.lstrip()
        known = tuple(filter(None, (self._format.think, self._format.thought, *self._marks)))
        mark = max(filter(bare.startswith, known), key=len, default=None)
        is_bare = self._is_bare_read and bare.startswith(self._bare_begins)
        if not is_bare and self._may_be_longer(bare, known):
            self._held = text
            return None
        if mark is not None and mark not in (*self._begins, self._loose):
            self._is_after_mark = True
            self._state = self._thinking if mark == self._format.think else self._between
            return bare[len(mark) :]
        # Newlines after a mark belong to the mark; at the very beginning they are the model's own.
        own = text.lstrip("\n") if self._is_after_mark else text.removeprefix(self._format.gap)
        is_guessing = self._is_guessing
        self._is_guessing = False
        if mark is not None or is_bare:
            # The mark of a bare object is empty.
            return self._suspect(mark or "", own[: len(own) - len(bare)], bare)
        if is_guessing and bare[0] in "{`":
            self._call = _Call("", is_certain=False)
            self._state = self._guessing
            return own
        self._items.open_message(len(own))
        self._is_fenced = False
        self._state = self._talking
        return own

    def _talking(self, text: str) -> str | None:
        items = self._items
        at, mark = self._next_mark(text)
        held = len(text) - len(text[:at].rstrip("\n")) if mark else self._unsure(text)
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
        if mark in (*self._begins, self._loose):
            return self._suspect(mark, text[end:at], text[at:])
        self._close()
        return text[at + len(mark) :]

    def _suspect(self, mark: str, gap: str, text: str) -> str:
        """A call may begin with this mark, which begins the text."""
        self._call = _Call(mark, bool(mark), gap, is_known=mark in ("", self._loose))
        self._state = self._heading
        return text[len(mark) :]

    def _next_mark(self, text: str) -> tuple[int, str]:
        """The next mark that is not quoted in a fence, and where it stands; or else nothing, at the end."""
        if self._marks:
            for mark in marks_and_fences(self._marks).finditer(text):
                if mark[0][0] != "`":
                    if not self._is_fenced or is_special(mark[0]):
                        if self._may_be_longer(text[mark.start() :], self._marks):
                            break
                        return mark.start(), mark[0]
                elif mark.end() < len(text):
                    self._is_fenced = not self._is_fenced
        return len(text), ""

    def _may_be_longer(self, text: str, marks: tuple[str, ...]) -> bool:
        """Whether more text can make this a mark, or a mark a longer one; nothing comes after the end."""
        return any(
            len(mark) > len(text)
            and mark.startswith(text)
            and not (self._is_ended and text in marks)
            for mark in marks
        )

    def _unsure(self, text: str) -> int:
        """How many characters at the end may belong to a mark, or to a fence, or are not said at the very end."""
        if not self._marks:
            return len(text) - len(text.rstrip("\n")) if self._format.tail else 0
        return max(held_back(text, self._marks), len(text) - len(text.rstrip("`")))

    def _thinking(self, text: str) -> str | None:
        items = self._items
        end_mark = any_of(self._thought_ends).search(text)
        at = len(text) if end_mark is None else end_mark.start()
        held = len(text) - len(text[:at].rstrip("\n"))
        if end_mark is None:
            held = held_back(text, self._thought_ends)
        own = text[: len(text) - held]
        if items.open is None and own.strip():
            items.open_item(ItemOpened("reasoning"))
            own = own.lstrip("\n")
        if items.open is not None:
            items.write(own)
        if end_mark is None:
            self._held = text[len(text) - held :] if items.open is not None else text
            return None
        if end_mark[0] == self._format.thought:
            self._close()
            return text[end_mark.end() :]
        # The token of the mark is not part of the thought.
        self._close(len(items.ids) - 1)
        return text[at:]

    # Calls.

    def _heading(self, text: str) -> str | None:
        call = self._call
        # A loose mark is part of the header.
        loose = call.mark if call.is_known else ""
        bare = loose + text.lstrip(self._skipped)
        shapes = self._format.shapes if call.is_certain else OBJECTS
        headers = [(shape, header(shape.header, shape.ahead)) for shape in shapes]
        if call.is_certain or may_begin_call(bare):
            is_short = len(bare) <= HEADER_CHARS_MAX
            for shape, pattern in headers if is_short else ():
                if header_match := pattern.whole.match(bare):
                    return self._named(shape, header_match, text)
            if bare.startswith("{") and any(shape.closing[:1] == "}" for shape in shapes):
                return self._whole_heading(text)
            if any(pattern.may_begin(bare) for _, pattern in headers):
                self._held = text
                return None
        return self._was_text(text)

    def _named(self, shape: CallShape, found: re.Match[str], text: str) -> str:
        name = re.sub(shape.noise, "", found["name"]) if shape.noise else found["name"]
        if not self._open_call(name):
            return self._was_text(text)
        self._call.shape = shape
        if name not in self._schemas:
            offer = offer_in(self._scene, name)
            self._schemas[name] = JsonSchema(offer and parameters_of(offer))
        following = (*self._format.ends, *self._format.begins)
        self._arguments = arguments_reader(shape, self._schemas[name], following)
        self._state = self._arguing
        return found.string[found.end() :]

    def _whole_heading(self, text: str) -> str | None:
        """Another order of keys, arguments that are no object, or no call at all: seen when the object is whole."""
        call = self._call
        end = call.braces.end_in(text, call.scanned)
        call.scanned = len(text)
        if end is None:
            self._held = text
            return None
        whole = whole_call(text[text.find("{") : end])
        if whole is None or not self._open_call(whole.name):
            return self._was_text(text)
        self._items.write_arguments(whole.arguments_text())
        self._items.end_arguments()
        self._state = self._ending
        return text[end:]

    def _open_call(self, name: str) -> bool:
        """Begin a call of this tool, if it is a call and allowed."""
        opened = call_in(self._scene, name, is_known=self._call.is_known)
        if opened is not None:
            # A message before it ends where the call was first suspected.
            self._items.close(self._items.held_from)
            self._items.open_item(opened)
        return opened is not None

    def _was_text(self, text: str) -> str:
        items = self._items
        # A mark that says nothing in other places says nothing here.
        is_dropped = self._call.mark in self._format.dropped
        before = self._call.gap + ("" if is_dropped else self._call.mark)
        if is_dropped and items.open is None and not text.strip():
            self._state = self._between
            return text
        if items.open is None:
            items.open_message(len(before) + len(text))
            self._is_fenced = False
        items.write(before)
        items.held_from = len(items.ids)
        self._state = self._talking
        return text

    def _arguing(self, text: str) -> str | None:
        parsed, rest = self._arguments.feed(text)
        self._items.write_arguments(parsed)
        if rest is not None:
            self._items.end_arguments()
            assert self._call.shape is not None
            closing = self._call.shape.closing
            # An object may stand in another.
            depth = len(closing) - len(closing.lstrip("}"))
            is_object = depth > 0
            self._call.braces = Braces(depth=depth)
            self._state = self._trailing if is_object else self._ending
        return rest

    def _trailing(self, text: str) -> str | None:
        end = self._call.braces.end_in(text)
        if end is None:
            return None
        self._state = self._ending
        return text[end:]

    def _ending(self, text: str) -> str | None:
        call = self._call
        format = self._format
        slack = LIST_SLACK if format.is_listed else SLACK
        rest = slack.sub("", text)
        bare = rest.lstrip()
        closing = "" if call.shape is None or call.is_closed else call.shape.closing.strip("}")
        if closing != bare and closing.startswith(bare):
            self._held = rest
            return None
        call.is_closed = True
        if closing and bare.startswith(closing):
            rest = slack.sub("", bare[len(closing) :])
            bare = rest.lstrip()
        ends = format.ends if call.is_certain else (SEPARATOR,)
        end = next(filter(bare.startswith, ends), "")
        if not end and (not bare or any(other.startswith(bare) for other in ends)):
            self._held = rest
            return None
        self._close()
        if self._items.is_over:
            return None
        if not end and (call.is_certain or self._is_next_bare(bare)) and self._is_next(bare):
            self._call = _Call("", call.is_certain, is_known=not call.is_certain)
            self._state = self._heading
        return bare[len(end) :] if end else rest

    def _is_next_bare(self, text: str) -> bool:
        """Whether a list without a mark goes on."""
        return self._format.is_bare and self._format.is_listed and text[0] == ","

    def _is_next(self, text: str) -> bool:
        """Whether another call may begin, before the end mark."""
        if self._format.is_listed and text[0] in ",;":
            return True
        headers = (header(shape.header, shape.ahead) for shape in self._format.shapes
                   if self._format.is_lined or not shape.header.lstrip().startswith("%"))  # fmt: skip
        return any(shape.may_begin(text) or shape.whole.match(text) for shape in headers)

    # Calls without marks.

    def _guessing(self, text: str) -> str | None:
        guess = GUESSED.fullmatch(text)
        call = self._call
        if guess is None or (guess["object"] and not may_begin_call(guess["object"])):
            return self._was_text(text)
        if not call.is_closed:
            end = call.braces.end_in(text, call.scanned) if guess["object"] else None
            call.is_closed = end is not None
            call.scanned = len(text) if end is None else end
        if call.is_closed and text[call.scanned :].lstrip(BLANKS + "};")[:1] not in (
            "",
            "{",
            "`",
        ):
            return self._was_text(text)
        self._held = text
        return None

    def _end_guess(self, text: str) -> None:
        """The answer is whole: it is nothing but calls of tools that there are, or it is text."""
        items = self._items
        calls = only_calls(text)
        opened = [call_in(self._scene, call.name, is_known=True) for call in calls]
        if not calls or None in opened:
            self._read(self._was_text(text))
            return
        for call, item in zip(calls, opened, strict=True):
            if item is not None and not items.is_over:
                items.open_item(item)
                items.write_arguments(call.arguments_text())
                items.end_arguments()
                items.close()

    # The end.

    def _close(self, count: int | None = None) -> None:
        self._items.close(count)
        self._is_after_mark = True
        self._state = self._between

    def _flush(self, *, is_cut: bool = False) -> None:
        """At the end nothing can become a mark any more, and unless it is cut, no character whole."""
        items = self._items
        rest = "" if is_cut else self._decode.decode(b"", final=True)
        self._is_ended = True
        if items.pending is not None:
            items.pending.add_chars(len(rest))
        self._read(rest)
        if self._state == self._guessing:
            held = self._held
            self._held = ""
            self._end_guess(held)
        while self._state == self._heading:
            held = self._held
            self._held = ""
            shown = (self._call.gap + self._call.mark + held).translate(self._spelt.hidden)
            if items.open is None and not shown.strip(
                self._skipped if self._call.mark or self._call.is_certain else BLANKS
            ):
                self._state = self._between
                break
            self._read(self._was_text(held))
        held = self._held
        self._held = ""
        if self._state == self._arguing:
            items.write_arguments("" if is_cut else self._arguments.close())
            items.end_arguments()
        elif held and self._state in (self._between, self._thinking, self._talking):
            self._write_last(held)

    def _write_last(self, held: str) -> None:
        items = self._items
        if self._stop is not None and self._state == self._talking:
            held = held.removesuffix(self._format.tail)
        if items.open is None and held.strip():
            is_thought = self._state == self._thinking
            held = held.lstrip("\n") if is_thought or self._is_after_mark else held
            if is_thought:
                items.open_item(ItemOpened("reasoning"))
            else:
                items.open_message(len(held))
        if items.open is not None:
            items.write(held)
