"""How does this template write thoughts, calls and what stands around them? Found out by marked words.

In: samples of one template. Out: a `DerivedFamily`. Nothing is known of any family here: what stands between two marked
words is what the template has written there. What cannot be kept apart is refused, with the reason.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from segue.derivation.atoms import Atoms, Lexer, common_prefix, common_suffix, counted
from segue.derivation.family import TEXT_CHARS_MAX, Arguments, Calls, DerivedFamily, Thoughts
from segue.derivation.samples import (
    FIRST_KEY,
    FIRST_TOOL,
    IDS,
    ONE,
    OTHER_KEY,
    OTHER_TOOL,
    OTHER_VALUE,
    QUESTION,
    RESULT,
    THOUGHT,
    VALUE,
    WORDS,
    SaidCall,
    Samples,
)
from segue.readers.call_json import Braces
from segue.vocabularies.chat_template import Chat

PAIRED = re.compile(
    r"(<(?:[\w:｜|]*:)?(\w*(?:think|thought|reason)\w*)>|\[(THINK\w*)\])", re.IGNORECASE
)
# A value that could be taken for tags.
ODD_VALUE = "qzodd <qz> & qz"
SPEECH = re.compile(r"\w{2,}")


ENDING = "a thought ends with"


class NotDerived(Exception):
    """Why a part cannot be worked out, in words."""


def derived_family(samples: Samples, lexer: Lexer, text: str) -> DerivedFamily:
    """How this template writes. What cannot be worked out is in `refused`."""
    return _Derivation(samples, lexer, text).family()


class _Derivation:
    def __init__(self, samples: Samples, lexer: Lexer, text: str) -> None:
        self._samples = samples
        self._lexer = lexer
        self._text = text
        self._dropped: list[str] = []
        # What stands at the end of every answer, before the token that ends it.
        self._every = ""
        self._refused: dict[str, str] = {}

    def family(self) -> DerivedFamily:
        thoughts = self._thoughts()
        self._around_words(thoughts)
        calls = None
        if not self._samples.has_calls:
            self._refused["calls"] = "the template has no words for calls."
        else:
            try:
                if self._refused.get("thoughts", "").startswith(ENDING):
                    raise NotDerived(
                        "a call may follow a thought, and the end of a thought ends the turn."
                    )
                calls = self._calls(thoughts)
            except NotDerived as why:
                self._refused["calls"] = str(why)
        return DerivedFamily(
            thoughts=thoughts,
            calls=calls,
            dropped=tuple(dict.fromkeys(self._dropped)),
            result=self._result(calls),
            refused=self._refused,
        )

    # --- thoughts -------------------------------------------------------------------------------------

    def _thoughts(self) -> Thoughts | None:
        samples = self._samples
        found = None
        if samples.thought_field is not None:
            found = self._thought_in_field()
        found = found or self._thought_in_text()
        return found

    def _thought_in_field(self) -> Thoughts | None:
        samples = self._samples
        for words, calls in ((WORDS, []), ("", [SaidCall(FIRST_TOOL, {FIRST_KEY: VALUE})])):
            said = samples.said(words, calls, THOUGHT) if words or samples.has_calls else None
            if not said or THOUGHT not in said:
                continue
            before, _, after = said.partition(THOUGHT)
            without = samples.said(words, calls) or ""
            if words:
                end = after.partition(WORDS)[0]
            else:
                # What stands in front of the call without a thought belongs to the call.
                bare = without.partition(FIRST_TOOL)[0]
                end = after.partition(FIRST_TOOL)[0]
                bare = self._without_empty(bare, before, end)
                end = end[: len(end) - common_suffix(end, bare)]
            atoms = self._lexer.atoms(end)
            end = self._closing_mark(atoms)
            if words:
                self._drop_parts("".join(atoms).removeprefix(end))
            begin = before if before.strip() else self._tail(words, calls, end)
            if not begin.strip() or not end.strip():
                self._refused["thoughts"] = f"no mark stands around a thought in {said[:120]!r}."
                return None
            marks = (begin.strip(), end.strip())
            if not all(map(self._lexer.begins_with_mark, marks)):
                self._refused["thoughts"] = f"a thought stands between words, not marks: {marks}."
                return None
            if any(stop in marks[1] for stop in samples.stops):
                self._refused["thoughts"] = (
                    f"{ENDING} {marks[1]!r}, which also ends the turn of the model."
                )
                return None
            return Thoughts(begin, end, self._kept())
        return None

    @staticmethod
    def _without_empty(bare: str, begin: str, end: str) -> str:
        """What stands before a call, without an empty thought."""
        at = bare.find(end.strip()[:12]) if end.strip() else -1
        return bare[at + len(end.strip()) :] if at >= 0 else bare

    def _closing_mark(self, atoms: Atoms) -> str:
        """Up to the first mark, or compound of marks and words, and the white space after it."""
        first = next((n for n, atom in enumerate(atoms) if self._lexer.is_mark(atom)), None)
        if first is None:
            return ""
        end = first + 1
        # `<|close|>think<|sep|>` is one mark: words between two special tokens.
        if atoms[end : end + 1] and SPEECH.fullmatch(atoms[end]):
            rest = atoms[end + 1 :]
            if rest and self._lexer.is_mark(rest[0]):
                end += 2
        while end < len(atoms) and atoms[end].isspace():
            end += 1
        return "".join(atoms[:end])

    def _tail(self, words: str, calls: Sequence[SaidCall], end: str) -> str:
        """The mark before a thought that the cue has begun: the shortest that has a word of the mark that ends it."""
        written = self._samples.written([*QUESTION, self._samples.answer(words, calls, THOUGHT)])
        atoms = self._lexer.atoms((written or "").partition(THOUGHT)[0])
        ending = self._lexer.atoms(end)
        plain = [atom for atom in ending if not self._lexer.is_mark(atom)]
        known = _words_of("".join(plain)) or _words_of(end)
        for n in range(len(atoms) - 1, max(len(atoms) - 12, -1), -1):
            tail = "".join(atoms[n:])
            if (
                self._lexer.is_mark(atoms[n])
                and end.strip() not in tail
                and known & _words_of(tail)
            ):
                return tail
        return ""

    def _thought_in_text(self) -> Thoughts | None:
        """A template that has no field for thoughts, but knows their marks: its cue begins one, or it takes them out of
        what an answer was."""
        cue = self._samples.cue()
        for found in PAIRED.finditer(self._text):
            begin = found[1]
            end = f"</{begin[1:]}" if begin[0] == "<" else f"[/{begin[1:]}"
            if end not in self._text:
                continue
            if cue.rstrip().endswith(begin):
                return Thoughts(
                    begin + cue[len(cue.rstrip()) :], f"{end}\n\n", self._kept_in_text(begin, end)
                )
            thinking = f"{begin}\n{THOUGHT}\n{end}\n\n{WORDS}"
            said = self._samples.said(thinking) or ""
            if said.startswith(begin) or (WORDS in said and THOUGHT not in said):
                return Thoughts(f"{begin}\n", f"\n{end}\n\n", self._kept_in_text(begin, end))
        return None

    def _kept_in_text(self, begin: str, end: str) -> str:
        content = f"{begin}\n{THOUGHT}\n{end}\n\n{WORDS}"
        thinking: dict[str, object] = {"role": "assistant", "content": content}
        return self._kept_after([thinking], [thinking])

    def _kept(self) -> str:
        samples = self._samples
        spoken: Chat = [samples.answer(WORDS, thought=THOUGHT)]
        called: Chat = []
        if samples.has_calls:
            called = samples.result(RESULT)
            called[0] = samples.answer("", [SaidCall(FIRST_TOOL, {FIRST_KEY: VALUE})], THOUGHT)
        return self._kept_after(spoken, called or spoken)

    def _kept_after(self, spoken: Chat, called: Chat) -> str:
        later = self._samples.written([*QUESTION, *spoken, *QUESTION])
        inside = self._samples.written([*QUESTION, *called])
        if later is None:
            return "unknown"
        if THOUGHT in later:
            return "all"
        return "until the user speaks" if inside and THOUGHT in inside else "none"

    # --- what stands around an answer -------------------------------------------------------------------

    def _around_words(self, thoughts: Thoughts | None) -> None:
        """Marks before and after the words of an answer say nothing. What also ends a call stands at the end of every
        answer."""
        said = self._samples.said(WORDS) or ""
        before, _, after = said.partition(WORDS)
        self._drop(self._without_thought(before, thoughts))
        self._drop(self._before_words(thoughts))
        every = ""
        if self._samples.has_calls and after.strip():
            called = self._lexer.atoms(self._samples.said("", [ONE]) or "")
            atoms = self._lexer.atoms(after)
            count = self._unbound(common_suffix(atoms, called), atoms, called)
            every = "".join(atoms[len(atoms) - count :])
        self._drop(after.removesuffix(every))
        self._drop(every)
        self._every = every.strip()

    def _before_words(self, thoughts: Thoughts | None) -> str:
        """What stands before the words that stand before a call, and before a call without words, too."""
        if not self._samples.has_calls:
            return ""
        called = self._samples.said("", [ONE]) or ""
        before, found, _ = (self._samples.said(WORDS, [ONE]) or "").partition(WORDS)
        before = self._without_thought(before, thoughts)
        is_common = self._without_thought(called, thoughts).startswith(before)
        return before if found and is_common and FIRST_TOOL not in before else ""

    def _unbound(self, count: int, atoms: Atoms, other: Atoms) -> int:
        """How many of the same atoms at the end are not part of a mark or a word before them."""
        while count:
            first = atoms[len(atoms) - count]
            before = atoms[: len(atoms) - count][-1:] + other[: len(other) - count][-1:]
            is_bound = len(before) == 2 and not any(
                atom.isspace() or self._lexer.is_mark(atom) for atom in before
            )
            if not first.isspace() and not (is_bound and self._lexer.is_mark(first)):
                return count
            count -= 1
        return 0

    def _without_thought(self, text: str, thoughts: Thoughts | None) -> str:
        """Without an empty thought, or its end."""
        if thoughts is None:
            return text
        begin, end = thoughts.begin.strip(), thoughts.end.strip()
        before, found, rest = text.partition(begin)
        if found and rest.lstrip().startswith(end):
            return before + rest.lstrip().removeprefix(end)
        if text.lstrip().startswith(end):
            rest = text.lstrip().removeprefix(end)
            if not self._samples.cue().rstrip().endswith(begin):
                # An answer without a thought begins with the end of one.
                self._dropped.append(end)
            return rest
        return text

    def _drop_parts(self, text: str) -> None:
        """Marks, each with the words after it: the header of the next part of an answer."""
        part = ""
        for atom in self._lexer.atoms(text):
            if self._lexer.is_mark(atom):
                self._drop(part)
                part = ""
            part += atom
        self._drop(part)

    def _drop(self, text: str) -> None:
        bare = text.strip()
        is_end = any(stop in bare for stop in self._samples.stops)
        if bare and not is_end and self._lexer.begins_with_mark(bare) and bare not in self._dropped:
            self._dropped.append(bare)

    def _result(self, calls: Calls | None) -> str:
        """How the output of a tool is written, between the call and the next answer."""
        if not self._samples.has_calls:
            return ""
        written = self._samples.written([*QUESTION, *self._samples.result(RESULT)])
        if written is None or RESULT not in written:
            return ""
        before, _, after = written.rpartition(RESULT)
        before = before[before.rfind(VALUE) + len(VALUE) :]
        ended = f"{calls.end}{calls.section_end}".strip().replace("%id%", IDS[0]) if calls else ""
        before = (
            before.partition(ended)[2] if ended and ended in before else before.lstrip("\"'})]")
        )
        return f"{before}%result%{after}"[-TEXT_CHARS_MAX:]

    # --- calls ------------------------------------------------------------------------------------------

    def _calls(self, thoughts: Thoughts | None) -> Calls:
        single = self._call({FIRST_KEY: VALUE, OTHER_KEY: OTHER_VALUE}, thoughts)
        arguments = single.arguments
        lexer = self._lexer
        head = lexer.atoms(single.before)
        two = self._second(single, thoughts)
        if two is None:
            header = single.before + single.name + single.between
            return Calls(
                header=header.lstrip(), end=single.after, arguments=arguments, is_parallel=False
            )
        # Some templates write the end of all calls only after several.
        is_longer = bool(single.after) and two.after.startswith(single.after)
        tail = lexer.atoms(two.after if is_longer else single.after)
        middle = lexer.atoms(two.middle)
        same = self._unbound(common_suffix(head, middle), head, middle)
        end = min(common_prefix(middle, tail), len(middle) - same)
        header = counted(head[len(head) - same :], middle[len(middle) - same :])
        between = counted(lexer.atoms(single.between), lexer.atoms(two.between))
        first = _first_index(
            (*head[len(head) - same :], *lexer.atoms(single.between)), header + between
        )
        section_end = "".join(tail[end:])
        closing = "".join(tail[:end])
        section = "".join(head[: len(head) - same]).lstrip()
        separator = "".join(middle[end : len(middle) - same])
        if not section.strip() and not section_end.strip():
            closing, section_end = closing + section_end, ""
        return Calls(
            header=header + single.name + between,
            end=closing,
            arguments=arguments,
            section_begin=section,
            separator=separator,
            section_end=section_end,
            first_index=first,
        )

    def _second(self, single: _Said, thoughts: Thoughts | None) -> _Said | None:
        """The same with a second call after the first."""
        first = SaidCall(FIRST_TOOL, {FIRST_KEY: VALUE, OTHER_KEY: OTHER_VALUE})
        said = self._samples.said(
            "", [first, SaidCall(OTHER_TOOL, {FIRST_KEY: VALUE, OTHER_KEY: OTHER_VALUE})]
        )
        if said is None or OTHER_TOOL not in said:
            return None
        said = self._bared(said, thoughts)
        begun = (
            single.before
            + single.name.replace("%name%", FIRST_TOOL)
            + single.between
            + single.written
        )
        at = said.find(begun)
        if at < 0:
            raise NotDerived("the first of two calls is written otherwise than a single.")
        rest = said[at + len(begun) :]
        middle, found, after = rest.partition(single.name.replace("%name%", OTHER_TOOL))
        if not found:
            raise NotDerived("the second of two calls is written otherwise than the first.")
        between, found, after = after.partition(single.written)
        if not found:
            raise NotDerived("the arguments of the second of two calls are written otherwise.")
        return _Said(
            single.before, single.name, between, single.written, after, single.arguments, middle
        )

    def _call(self, arguments: dict[str, object], thoughts: Thoughts | None) -> _Said:
        """One call, cut at its name and its arguments."""
        said = self._said(arguments, thoughts)
        before, name, after = self._around_name(said)
        written = _written_json(arguments, after)
        if written is not None:
            between, _, rest = after.partition(written)
            return _Said(before, name, between, written, rest, Arguments("json"))
        if json.dumps(json.dumps(arguments))[1:-1] in after:
            raise NotDerived("the arguments are JSON inside a string.")
        return self._noted(said, before, name, after, thoughts)

    def _said(self, arguments: Mapping[str, object], thoughts: Thoughts | None) -> str:
        said = self._samples.said("", [SaidCall(FIRST_TOOL, arguments)])
        if said is None or FIRST_TOOL not in said:
            raise NotDerived("the template does not write the name of the tool after its cue.")
        return self._bared(said, thoughts)

    def _bared(self, said: str, thoughts: Thoughts | None) -> str:
        """Without what stands around every answer, with a slot for ids."""
        text = self._without_thought(said, thoughts)
        while mark := next(
            (mark for mark in self._dropped if text.lstrip().startswith(mark)), None
        ):
            rest = text.lstrip().removeprefix(mark)
            if not (self._lexer.begins_with_mark(rest.lstrip()) or rest.lstrip()[:1] in "{["):
                # With the words after it this begins the call.
                break
            text = rest
        if self._every and text.rstrip().endswith(self._every):
            text = text.rstrip().removesuffix(self._every)
        return _slotted(text)

    def _around_name(self, said: str) -> tuple[str, str, str]:
        """What stands before the atom with the name of the tool, the atom, and what stands after it."""
        atoms = self._lexer.atoms(said)
        at = next((n for n, atom in enumerate(atoms) if FIRST_TOOL in atom), None)
        if at is None:
            raise NotDerived("the name of the tool is not written as it is.")
        first_value = next((n for n, atom in enumerate(atoms) if VALUE in atom), len(atoms))
        if first_value <= at:
            raise NotDerived("the arguments stand before the name of the tool.")
        name = atoms[at].replace(FIRST_TOOL, "%name%")
        if any(FIRST_TOOL in atom for atom in atoms[at + 1 :]) or name.count("%name%") > 1:
            raise NotDerived("the name of the tool is written more than once.")
        return "".join(atoms[:at]), name, "".join(atoms[at + 1 :])

    # --- arguments that are not JSON ----------------------------------------------------------------------

    def _noted(
        self, said: str, before: str, name: str, after: str, thoughts: Thoughts | None
    ) -> _Said:
        pieces = self._pieces(after, FIRST_KEY, VALUE, OTHER_KEY, OTHER_VALUE)
        numbers = self._said({FIRST_KEY: 4711, OTHER_KEY: 4712}, thoughts)
        _, _, bare_after = self._around_name(
            numbers.replace("4711", VALUE).replace("4712", OTHER_VALUE)
        )
        bare = self._pieces(bare_after, FIRST_KEY, VALUE, OTHER_KEY, OTHER_VALUE)
        if bare.equals.strip() in (":", "=") and bare.between.strip() == ",":
            return self._notation(said, before, name, pieces, bare, thoughts)
        return self._tags(before, name, after, pieces, bare, thoughts)

    def _pieces(self, text: str, key: str, value: str, other_key: str, other_value: str) -> _Pieces:
        """What stands between the names and the values of two parameters."""
        texts: list[str] = []
        rest = text
        for word in (key, value, other_key, other_value):
            found_before, found, rest = rest.partition(word)
            if not found:
                raise NotDerived(
                    "the parameters of a call are not all written, or in another order."
                )
            texts.append(found_before)
        first, equals, between, other_equals = texts
        return _Pieces(first, equals, between, other_equals, rest)

    def _notation(
        self,
        said: str,
        before: str,
        name: str,
        pieces: _Pieces,
        bare: _Pieces,
        thoughts: Thoughts | None,
    ) -> _Said:
        quote = pieces.equals.removeprefix(bare.equals)
        if not quote or not pieces.between.startswith(quote) or not pieces.last.startswith(quote):
            raise NotDerived(f"no quotes stand around a string: {pieces.equals!r}.")
        bracket = pieces.first[-1:]
        if bracket not in ("{", "(") or not pieces.last.removeprefix(quote).startswith(
            {"{": "}", "(": ")"}[bracket]
        ):
            raise NotDerived(
                f"parameters stand in {pieces.first!r}, which is neither an object nor a call."
            )
        after = pieces.last.removeprefix(quote)[1:]
        quotes, has_escapes = self._quotes(quote, thoughts)
        arguments = Arguments(
            "notation",
            opening=f"{bracket}%key%{bare.equals}",
            separator=bare.between,
            quotes=quotes,
            has_escapes=has_escapes,
            booleans=self._booleans(thoughts),
            is_sorted=self._is_sorted(thoughts),
        )
        between = pieces.first[:-1]
        written = said[said.index(FIRST_TOOL) :]
        at = written.index(f"{bracket}{FIRST_KEY}")
        written = written[at : written.rindex(OTHER_VALUE) + len(OTHER_VALUE) + len(quote) + 1]
        return _Said(before, name, between, written, after, arguments)

    def _quotes(self, quote: str, thoughts: Thoughts | None) -> tuple[tuple[str, ...], bool]:
        """With what strings are quoted, and whether a quote in them is escaped."""
        if len(quote) > 1:
            return (quote,), False
        said = self._said({FIRST_KEY: f"{VALUE}'x\"y\\z"}, thoughts)
        has_escapes = "\\\\z" in said
        is_python = f"\"{VALUE}'x" in said or f"'{VALUE}\\'x" in said
        other = "'" if quote == '"' else '"'
        return ((quote, other) if is_python or quote == "'" else (quote,)), has_escapes

    def _booleans(self, thoughts: Thoughts | None) -> tuple[str, ...]:
        said = self._said({FIRST_KEY: VALUE, OTHER_KEY: True}, thoughts)
        return ("True", "False") if "True" in said.partition(OTHER_KEY)[2] else ("true", "false")

    def _is_sorted(self, thoughts: Thoughts | None) -> bool:
        said = self._said({OTHER_KEY: OTHER_VALUE, FIRST_KEY: VALUE}, thoughts)
        return said.index(FIRST_KEY) < said.index(OTHER_KEY)

    def _tags(
        self,
        before: str,
        name: str,
        after: str,
        pieces: _Pieces,
        bare: _Pieces,
        thoughts: Thoughts | None,
    ) -> _Said:
        lexer = self._lexer
        atoms = lexer.atoms(after)
        keys = [n for n, atom in enumerate(atoms) if FIRST_KEY in atom]
        values = [n for n, atom in enumerate(atoms) if VALUE in atom]
        other_keys = [n for n, atom in enumerate(atoms) if OTHER_KEY in atom]
        other_values = [n for n, atom in enumerate(atoms) if OTHER_VALUE in atom]
        if not (keys and values and other_keys and other_values):
            raise NotDerived("the parameters of a call are not written as they are.")
        if (
            len(keys) > 2
            or len(values) != 1
            or not keys[0] < values[0] < other_keys[0] < other_values[0]
        ):
            raise NotDerived("a parameter is written more than once.")
        slot = "%key%" if len(keys) == 1 else "%tag%"
        lead = atoms[: keys[0]]
        c_end = other_keys[0]
        closing_1 = [atom.replace(FIRST_KEY, slot) for atom in atoms[values[0] + 1 : c_end]]
        closing_2 = [atom.replace(OTHER_KEY, slot) for atom in atoms[other_values[0] + 1 :]]
        same = self._unbound(common_suffix(lead, closing_1), lead, tuple(closing_1))
        opening = "".join(lead[len(lead) - same :]) + "".join(
            atom.replace(FIRST_KEY, slot) for atom in atoms[keys[0] : values[0]]
        )
        c = closing_1[: len(closing_1) - same]
        shared = common_prefix(c, closing_2)
        if not any(map(lexer.is_mark, c[:shared])):
            raise NotDerived(f"no mark stands after a value: {''.join(c)!r}.")
        # The first mark closes the value; another belongs to what comes after it.
        closing = "".join(c[:shared])
        separator = "".join(c[shared:])
        opening, string_type, other_type = self._typed(opening, slot, bare, bool(pieces), thoughts)
        arguments = Arguments(
            "tags",
            opening=opening,
            closing=closing,
            separator=separator,
            nested=self._nested(opening, slot, thoughts),
            booleans=self._booleans(thoughts),
            string_type=string_type,
            other_type=other_type,
            raw=self._raw(opening, closing, slot, thoughts),
        )
        between = "".join(lead[: len(lead) - same])
        written = "".join(atoms[len(lead) - same : other_values[0] + 1 + shared])
        return _Said(
            before,
            name,
            between,
            written,
            "".join(atoms[other_values[0] + 1 + shared :]),
            arguments,
        )

    def _raw(
        self, opening: str, closing: str, slot: str, thoughts: Thoughts | None
    ) -> tuple[str, str] | None:
        """What stands around a value that has letters of tags in it, and around no other."""
        said = self._said({FIRST_KEY: ODD_VALUE, OTHER_KEY: OTHER_VALUE}, thoughts)
        before, found, after = said.partition(ODD_VALUE)
        begin = before.rpartition(opening.rpartition(slot)[2].rpartition("%")[2])[2]
        end = after.partition(closing.replace(slot, FIRST_KEY))[0]
        return (begin, end) if found and begin and end else None

    def _typed(
        self, opening: str, slot: str, bare: _Pieces, is_known: bool, thoughts: Thoughts | None
    ) -> tuple[str, str, str]:
        """The opening with a slot for the type of a value, if the template says it."""
        said = self._said({FIRST_KEY: 4711, OTHER_KEY: 4712}, thoughts)
        wanted = opening.replace(slot, FIRST_KEY)
        if wanted in said:
            return opening, "", ""
        # The word that differs.
        before, _, after = wanted.partition(FIRST_KEY)
        found = re.search(re.escape(before + FIRST_KEY) + r"(.*?)4711", said, re.DOTALL)
        if found is None:
            raise NotDerived("a parameter that is a number is written otherwise than a text.")
        of_text, of_number = self._lexer_words(after), self._lexer_words(found[1])
        differing = [n for n, (a, b) in enumerate(zip(of_text, of_number, strict=False)) if a != b]
        if (
            len(of_text) != len(of_number)
            or len(differing) != 1
            or not of_text[differing[0]].isalnum()
        ):
            raise NotDerived(
                f"a parameter that is a number is written as {found[1]!r}, a text as {after!r}."
            )
        at = differing[0]
        string_type, other_type = of_text[at], of_number[at]
        typed = "".join(
            (
                *of_text[:at],
                "%type%" if string_type in ("true", "string") else "%any%",
                *of_text[at + 1 :],
            )
        )
        return before + slot + typed, string_type, other_type

    @staticmethod
    def _lexer_words(text: str) -> list[str]:
        return re.findall(r"\w+|\W", text)

    def _nested(self, opening: str, slot: str, thoughts: Thoughts | None) -> str:
        """How a list or an object in a tag is written: as JSON or Python, or as tags, with a mark before each."""
        value = {"qzinner": "qzdeep", "qzlist": [1, 2]}
        said = self._said({FIRST_KEY: value}, thoughts)
        begins = [found.start() for found in re.finditer(r"\{", said)]
        ends = [found.end() for found in re.finditer(r"\}", said)]
        if any(_value_of(said[begin:end]) == value for begin in begins for end in ends):
            return ""
        mark = opening.partition(f"<{slot}")[0].strip()
        if mark and f"{mark}<qzinner>qzdeep" in said:
            return mark
        raise NotDerived("lists and objects in a call are written neither as JSON nor as Python.")


def _value_of(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            return None


@dataclass(frozen=True, slots=True)
class _Pieces:
    """What stands around two parameters."""

    first: str
    equals: str
    between: str
    other_equals: str
    last: str


@dataclass(frozen=True, slots=True)
class _Said:
    """A call, cut: before the atom with the name, that atom, between it and the arguments, these, and after them."""

    before: str
    name: str
    between: str
    written: str
    after: str
    arguments: Arguments
    # Between the arguments of the first call and the name of the second.
    middle: str = ""


def _written_json(arguments: Mapping[str, object], text: str) -> str | None:
    """The arguments as JSON, as they stand in this text, whatever white space is in them."""
    begin = text.find("{")
    while begin >= 0:
        end = Braces().end_in(text, begin)
        try:
            if end is not None and json.loads(text[begin:end]) == arguments:
                return text[begin:end]
        except ValueError:
            pass
        begin = text.find("{", begin + 1)
    return None


def _words_of(text: str) -> set[str]:
    """The words in the marks that begin and end something, without those that say which."""
    return {word.lower() for word in re.findall(r"[^\W\d_]+", text)} - {
        "start",
        "begin",
        "open",
        "end",
        "close",
    }


def _slotted(text: str) -> str:
    for id in IDS:
        text = text.replace(id, "%id%")
    return text


def _first_index(atoms: Sequence[str], text: str) -> int:
    if "%index%" not in text:
        return 0
    return next((int(atom) for atom in atoms if atom.isdigit()), 0)
