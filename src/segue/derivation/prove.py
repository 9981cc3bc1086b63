"""Is what was worked out true? Every part is tried on the template's own words before it is used.

In: a `DerivedFamily`, samples of its template, and the vocabulary. What the template writes for calls, thoughts and
words is read back: token by token, letter by letter and in one piece, and each time the same items must come, with all
their values. What only looks like a call must stay text. Out: the family with what holds; what does not is taken out,
with the reason, so that it stays text.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import msgspec
from msgspec import structs

from segue.derivation.atoms import Lexer
from segue.derivation.derive import derived_family
from segue.derivation.family import DerivedFamily, Readable, readable
from segue.derivation.samples import (
    FIRST_KEY,
    FIRST_TOOL,
    IDS,
    THOUGHT,
    VALUE,
    WORDS,
    SaidCall,
    Samples,
)
from segue.errors import Misconfigured
from segue.readers.bound import BoundFamily
from segue.readers.call_tags import Spelling, form_of, spelt_form
from segue.readers.forced import CallForm
from segue.readers.formats import HERMES, CallFormat
from segue.readers.text_reader import TextReader
from segue.seams.model import Ids, ItemOpened, ItemText, Scene
from segue.seams.prompt import NO_IDS, Head, id_array
from segue.vocabularies.chat_template import ChatTemplate, TemplateRunner
from segue.vocabularies.vocabulary import Mark, Own, Vocabulary
from segue.wire.tools import FunctionTool, Tools, offers_of

NESTED: Mapping[str, object] = {
    "qzobject": {"kind": "open", "sizes": [1, 2.5], "inner": {"deep": "yes"}},
    "qzlist": ["a b", "c"],
    "qzint": 3,
    "qzfloat": 0.25,
    "qzbool": False,
    "qztext": "12",
}
# Texts that a call must bring as they are.
TEXTS = (
    "Grüße, 漢字 und 😀", "1 < 2 & 3 > 2", "line\nother line", 'say "hi"', "C:\\data", "{\"a\": [1]}",
    "a, b = c) [d]", "true", "", "<b>bold</b>", "half a <mark", "`code`", "# title", "'single'",
)  # fmt: skip
# White space at the edges, which many templates trim.
EDGES = (" spaced ", "\nlines\n")
OTHER = SaidCall("qz_other-tool.x", {"qz_key": "other value", FIRST_KEY: "7"})
PLAIN = SaidCall(FIRST_TOOL, {FIRST_KEY: "some value"})
# Words around what only looks like a call.
QUOTED = "Look:\n```\n{}\n```\nThat is all."


@dataclass(frozen=True, slots=True)
class Derived:
    """What is known of a template: its data, the format by which its answers are read, and how a call is forced."""

    family: DerivedFamily
    format: CallFormat
    call: CallForm
    # Whether the template writes calls at all.
    has_calls: bool


def derived(
    template: ChatTemplate,
    vocabulary: Vocabulary,
    ends: Sequence[str],
    written: DerivedFamily | None = None,
) -> Derived:
    """How this template writes, worked out or as it is `written` in a file, and proven in either case."""
    text = template.text
    samples = Samples(TemplateRunner(template, is_limited=True), text, ends)
    lexer = Lexer(vocabulary.specials)
    family = written or derived_family(samples, lexer, text)
    family, made = proven(family, samples, lexer, vocabulary, ends)
    if samples.has_calls:
        return Derived(family, made.format, spelt_form(made.spelling), has_calls=True)
    # Tools and calls are described in words of ours, which are Hermes'.
    known = made.format if made.format.think else HERMES
    format = replace(HERMES, think=known.think, thought=known.thought, dropped=made.format.dropped)
    return Derived(family, format, form_of(HERMES, ""), has_calls=False)


class _Wrong(Exception):
    """What was read otherwise than it was meant."""


@dataclass(frozen=True, slots=True)
class _Heard:
    """What a reader made of an answer."""

    thought: str
    words: str
    calls: tuple[tuple[str, str], ...]


def proven(
    family: DerivedFamily,
    samples: Samples,
    lexer: Lexer,
    vocabulary: Vocabulary,
    stops: Sequence[str],
) -> tuple[DerivedFamily, Readable]:
    """The family with the parts that hold on this template and this vocabulary."""
    refused = dict(family.refused)
    try:
        made = readable(family, lexer)
    except Misconfigured as wrong:
        refused["calls"] = f"calls are not read, because {wrong}"
        family = structs.replace(family, calls=None, refused=refused)
        made = readable(family, lexer)
    bound = BoundFamily(
        vocabulary,
        "",
        NO_IDS,
        frozenset(map(vocabulary.special, stops)),
        vocabulary.ids(Own(stops[0])),
    )
    proof = _Proof(samples, bound, made.format)
    if family.thoughts is not None and (why := proof.failing_thoughts()):
        refused["thoughts"] = why
        family = structs.replace(family, thoughts=None, refused=refused)
        made = readable(family, lexer)
        proof = _Proof(samples, bound, made.format)
    if family.calls is not None and (
        why := proof.failing_calls(is_parallel=family.calls.is_parallel)
    ):
        refused["calls"] = why
        family = structs.replace(family, calls=None, refused=refused)
        made = readable(family, lexer)
        proof = _Proof(samples, bound, made.format)
    if family.calls is not None:
        if texts := proof.changed_texts():
            refused["texts"] = (
                f"these texts come otherwise out of the template's own calls: {texts}."
            )
        if made.spelling is None or not _is_spelt(made.spelling, samples):
            refused["forced"] = (
                "a forced call is written as an object, and not in the words of the template."
            )
            made = Readable(made.format, None)
        if why := proof.failing_calls_after_words():
            refused["words"] = why
    if why := proof.failing_words():
        refused["words"] = why
    return structs.replace(family, refused=refused), made


class _Proof:
    """Reads what a template writes."""

    def __init__(self, samples: Samples, bound: BoundFamily, format: CallFormat) -> None:
        self._samples = samples
        self._bound = bound
        self._format = format

    # --- the parts --------------------------------------------------------------------------------------

    def failing_thoughts(self) -> str:
        cases: list[tuple[str, Sequence[SaidCall]]] = [(WORDS, ())]
        try:
            for words, calls in cases:
                self._try(words, calls, THOUGHT, [])
                self._try(words, calls, "Two lines\n\nof a thought.", [])
        except _Wrong as wrong:
            return f"thoughts are not read, because {wrong}."
        return ""

    def failing_words(self) -> str:
        try:
            for text in ("Some words.", "Two\n\nlines, and a <tag> or {braces} [1].", "7"):
                self._try(text, (), "", [])
        except _Wrong as wrong:
            return f"{wrong}."
        return ""

    def failing_calls(self, *, is_parallel: bool) -> str:
        nested = SaidCall("qzsearch", NESTED)
        try:
            self._try("", [PLAIN], "", [PLAIN])
            self._try("", [SaidCall(OTHER.name, OTHER.arguments)], "", [OTHER])
            self._try("", [nested], "", [nested])
            if is_parallel:
                self._try("", [PLAIN, OTHER], "", [PLAIN, OTHER])
            if not self._format.is_bare:
                self._try(WORDS, [PLAIN], "", [PLAIN])
            if self._format.thought:
                self._try("", [PLAIN], THOUGHT, [PLAIN])
            if self._format.thought and not self._format.is_bare:
                self._try(WORDS, [PLAIN], THOUGHT, [PLAIN])
            empty = SaidCall("qzempty", {})
            if self._said("", [empty], "") is not None:
                self._try("", [empty], "", [empty])
            self._must_be_text()
        except _Wrong as wrong:
            return f"calls are not read, because {wrong}."
        return ""

    def failing_calls_after_words(self) -> str:
        """A call without a mark is one only where it begins an answer."""
        try:
            self._try(WORDS, [PLAIN], "", [PLAIN])
        except _Wrong:
            return "a call without a mark stays text where words stand before it."
        return ""

    def changed_texts(self) -> list[str]:
        """Texts that do not come back as they were."""
        changed: list[str] = []
        for text in (*TEXTS, *EDGES):
            call = SaidCall(FIRST_TOOL, {FIRST_KEY: text, "qzlast": "end"})
            try:
                self._try("", [call], "", [call])
            except _Wrong:
                changed.append(text)
        return changed

    def _must_be_text(self) -> None:
        """What only looks like a call is none: without tools, in a fence, without its mark, only begun."""
        said = self._said("", [PLAIN], "")
        assert said is not None
        call, is_thinking = said
        begins = self._format.begins
        looks = [QUOTED.format(call[call.find("{") :])] if not self._format.is_bare else []
        looks += [f"{mark} is how a call begins." for mark in begins]
        looks += [f"It is {mark[: len(mark) // 2]} and no more." for mark in begins]
        if begins and not any(map(self._is_token, begins)):
            looks.append(QUOTED.format(call.strip()))
        for text in looks:
            heard = self._heard(text, [PLAIN], is_thinking=False)
            if heard.calls:
                raise _Wrong(f"{text!r} is read as a call")
        if self._heard(call, [], is_thinking=is_thinking).calls:
            raise _Wrong("a call is read where no tool is offered")

    def _is_token(self, mark: str) -> bool:
        """Whether a mark begins with a token that has no text: it means itself wherever it stands."""
        vocabulary = self._bound.vocabulary
        first = next((part for part in vocabulary.parts((Own(mark),)) if part), "")
        return isinstance(first, Mark) and not vocabulary.bytes_of(
            vocabulary.special(first.special)
        )

    # --- reading ----------------------------------------------------------------------------------------

    def _said(self, words: str, calls: Sequence[SaidCall], thought: str) -> tuple[str, bool] | None:
        """What the model says, and whether its cue has begun a thought."""
        sampled = self._samples.sampled(words, calls, thought)
        if sampled is None or any(call.name not in sampled.text for call in calls):
            return None
        think, ended = self._format.think, self._format.thought
        text = sampled.text
        if think and ended in text and sampled.common.rstrip().endswith(think):
            # Also where the cue ends the thought at once.
            return text, True
        if not think or not sampled.cued.rstrip().endswith(think):
            return text, False
        bare = text.lstrip()
        if bare.startswith(think):
            return text, False
        # History has no thought where the cue begins one, or only its end: the model has ended it.
        return f"{thought}{'' if bare.startswith(ended) else ended}{text}", True

    def _try(
        self, words: str, calls: Sequence[SaidCall], thought: str, expected: Sequence[SaidCall]
    ) -> None:
        said = self._said(words, calls, thought)
        if said is None:
            if calls and not words and not thought:
                raise _Wrong(f"the template does not write {_shown(calls)}")
            return
        text, is_thinking = said
        if words and calls and any(stop in text for stop in self._samples.stops):
            # Two messages, of which the model says one.
            return
        heard = self._heard(text, calls, is_thinking=is_thinking)
        if heard.thought.strip() != (thought.strip() if thought in text else ""):
            raise _Wrong(f"of {text[:200]!r} the thought {heard.thought[:80]!r} is read")
        if heard.words.strip() != (words.strip() if words in text else ""):
            raise _Wrong(f"of {text[:200]!r} the words {heard.words[:80]!r} are read")
        found = [(name, _value_of(arguments)) for name, arguments in heard.calls]
        if found != [(call.name, dict(call.arguments)) for call in expected]:
            raise _Wrong(f"{text[:200]!r} is read as {found}")

    def _heard(self, text: str, calls: Sequence[SaidCall], *, is_thinking: bool) -> _Heard:
        """What is read of this text, however it is cut."""
        vocabulary = self._bound.vocabulary
        end = min(self._bound.stops)
        whole = [*vocabulary.ids(Own(text)), end]
        letters = [*_letters(vocabulary, text), end]
        pieces = ([[id] for id in whole], [whole], [[id] for id in letters])
        heard = [self._read(cut, calls, is_thinking=is_thinking) for cut in pieces]
        if any(other != heard[0] for other in heard):
            raise _Wrong(f"{text[:200]!r} is read otherwise where it is cut otherwise")
        return heard[0]

    def _read(
        self, pieces: Sequence[Sequence[int]], calls: Sequence[SaidCall], *, is_thinking: bool
    ) -> _Heard:
        scene = Scene(Head(tools=_tools(calls)), None, ())
        reader = TextReader(self._bound, scene, format=self._format, is_thinking=is_thinking)
        parsed = [value for ids in pieces for value in reader.feed(Ids(id_array(ids)))]
        thought: list[str] = []
        words: list[str] = []
        made: list[tuple[str, list[str]]] = []
        into = words
        for value in (*parsed, *reader.close(is_cut=False)):
            match value:
                case ItemOpened(kind="reasoning"):
                    into = thought
                case ItemOpened(kind="message"):
                    into = words
                case ItemOpened(name=name):
                    made.append((name, []))
                    into = made[-1][1]
                case ItemText(text=text):
                    into.append(text)
                case _:
                    pass
        return _Heard(
            "".join(thought), "".join(words), tuple((name, "".join(text)) for name, text in made)
        )


def _letters(vocabulary: Vocabulary, text: str) -> Iterator[int]:
    """The ids of this text, one letter after the other; its marks are whole."""
    for part in vocabulary.parts((Own(text),)):
        if isinstance(part, str):
            for letter in part:
                yield from vocabulary.encode(letter)
        else:
            yield vocabulary.special(part.special)


def _tools(calls: Sequence[SaidCall]) -> Tools:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array"}
    offered = tuple(
        FunctionTool(
            name=call.name,
            parameters=msgspec.Raw(
                msgspec.json.encode(
                    {
                        "type": "object",
                        "properties": {
                            key: {"type": kinds.get(type(value), "object")}
                            for key, value in call.arguments.items()
                        },
                    }
                )
            ),
        )
        for call in calls
    )
    return Tools(b"proof", offered, b"", offers_of(offered))


def _value_of(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _shown(calls: Sequence[SaidCall]) -> str:
    return ", ".join(f"{call.name}({', '.join(call.arguments)})" for call in calls)


# --- forced calls -------------------------------------------------------------------------------------


def _is_spelt(spelling: Spelling, samples: Samples) -> bool:
    """Whether the template writes a call as it would be forced."""
    for arguments in (
        {FIRST_KEY: VALUE},
        {FIRST_KEY: VALUE, "qzlast": "end"},
        {FIRST_KEY: True, "qzlast": 3},
    ):
        said = samples.said("", [SaidCall(FIRST_TOOL, arguments)])
        if said is None:
            return False
        wanted = [
            _spelt(spelling, arguments, booleans)
            for booleans in (("true", "false"), ("True", "False"))
        ]
        if not any(text in said.replace(IDS[0], "%id%") for text in wanted):
            return False
    return True


def _spelt(spelling: Spelling, arguments: Mapping[str, object], booleans: tuple[str, str]) -> str:
    begun = (spelling.begin + spelling.header).replace("%name%", FIRST_TOOL)
    if spelling.argument is None:
        return f"{begun}{json.dumps(arguments)}{spelling.end}"
    opening, closing = spelling.argument
    quote = spelling.quote or ""
    written = []
    for key in sorted(arguments) if spelling.is_sorted else arguments:
        value = arguments[key]
        is_text = isinstance(value, str)
        text = f"{quote}{value}{quote}" if is_text else json.dumps(value)
        if isinstance(value, bool):
            text = booleans[0 if value else 1]
        before = opening.replace("%key%", key).replace("%string%", "true" if is_text else "false")
        written.append(f"{before}{text}{closing.replace('%key%', key)}")
    return f"{begun}{spelling.separator.join(written)}{spelling.end}"
