"""Which ids are this text, and which bytes is this id?

A `Vocabulary` is BPE with special tokens beside it. Words are spelt in GPT-2's alphabet of bytes, or as SentencePiece
does: a letter for the space, and a token for each byte of what has no token.

`encode` is plain: whatever a user or a tool writes, `<|im_end|>` included, becomes ordinary tokens; special ids are
only ever put in by a dialect, as a `Mark` or in its `Own` words. Special is what the files say is special, and after
`protecting` also every other added token that the model's chat template writes, as `<tool_call>`. `load.py` makes
vocabularies from files.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, NamedTuple

from segue.errors import ServerFault
from segue.rests import PIECE, Rests, joined, rested
from segue.seams.prompt import IdArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: each byte as one visible letter."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(256 + n): byte for n, byte in enumerate(hidden)}


BYTE_OF_LETTER = _byte_letters()
LETTER_OF_BYTE = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
# SentencePiece's spelling of a space, and of a byte.
SPACE_LETTER = "▁"
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")
NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
# For characters that a vocabulary cannot spell: SmolLM2's lacks six control bytes and two planes without letters.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


# An added token of this form is a mark, also where a template puts it together of parts. No tag of HTML looks like it.
MARK_FORM = re.compile(r"<.*[|｜:_].*>|\[/?[A-Z_]+\]", re.DOTALL)
# What many vocabularies have as added tokens for runs of white space, which are no marks.
BLANK = " \t\r\n▁"

# Pieces in the cache: a few megabytes, and more words than a project has.
PIECES_MAX = 65_536
PIECE_CHARS_MAX = 64
# Longer texts are encoded while other threads run; for a word that would take longer than the word.
BESIDE_CHARS_MIN = 1024
# How much text is looked at before other threads may go on, and how much is cut into pieces, which takes ten times as
# long: a fraction of a millisecond.
CUT_CHARS, PIECES_CHARS = 64 * 1024, 2 * 1024
# Beside a longer text, which few prompts have, others go first.
RESTED_CHARS = 256 * 1024
# A cut may have broken up this many pieces: a contraction at its end is two, and another may be next to it.
BROKEN_PIECES = 4
# A longer word is encoded in parts: its ids are handed over in one step, a millisecond for 30,000 letters, in which no
# other thread goes on.
WORD_CHARS_MAX = 16 * 1024
# Where every vocabulary begins a new word, and how far back such a place is looked for. One that does not (it has
# tokens of several words) makes something else of this text.
WORD_BEGINS = re.compile(r"\w(?=[ \n]\w)")
SEARCHED_CHARS = 4 * 1024
WORDS = "word word of the people in the end of a day,\nit is as well as it can be one of 12 34\nof those"
# A long text is encoded in slices of this size, cut at such places. So many are remembered, some megabytes: of a text
# that has grown only the end is encoded, as of the output of a tool that is read while the tool runs.
SLICE_CHARS = 8 * 1024
SLICES_MAX = 256


class Mark(NamedTuple):
    """A special token, and text that always follows it and is encoded on its own: the same ids wherever it stands."""

    special: str
    text: str = ""


class Own(NamedTuple):
    """Words of the dialect itself, in which special tokens are recognised."""

    text: str


# What a dialect writes: special tokens, its own words, and text in which nothing is special.
Chunk = Mark | Own | str
# Makes a tokenizer in which text never becomes one of these ids.
TokenizerMaker = Callable[[frozenset[int]], "Tokenizer"]
# The ids of a text that can be spelt.
Encode = Callable[[str], "IdArray[int]"]
# Makes a quicker way to the same ids beside other work, and hands it over when it is ready. It may try texts, once the
# second function has replaced in them what cannot be spelt.
Hasten = Callable[["Tokenizer", Callable[[str], str], Callable[[Encode], None]], None]


class Vocabulary:
    """The tokens of one model."""

    def __init__(
        self,
        tokenizer_without: TokenizerMaker,
        tokens: list[str],
        specials: dict[str, int],
        texts: frozenset[int],
        ascii_cut: re.Pattern[str] | None = None,
        *,
        is_byte_level: bool = True,
        hasten: Hasten | None = None,
    ) -> None:
        """`tokens` by id, spelt in GPT-2's alphabet (`is_byte_level`) or as SentencePiece does; `texts` are the ids
        whose token is written as it reads; `ascii_cut` finds the pieces of ASCII text that are encoded each for
        itself."""
        self._tokenizer_without = tokenizer_without
        self._pieces: dict[str, IdArray[int]] = {}
        self._slices: dict[str, IdArray[int]] = {}
        # Marks are constants of the dialects, so that there are few.
        self._marks: dict[Mark, IdArray[int]] = {}
        self._tokens = tokens
        self._specials = specials
        self._special_ids = frozenset(specials.values())
        self._texts = texts
        self._ascii_cut = None if texts - self._special_ids else ascii_cut
        self._bytes: list[bytes | None] = [None] * len(tokens)
        self._is_byte_level = is_byte_level
        self._hasten = hasten
        self._quick: Encode | None = None
        self._unspellable = _unspellable(tokens, is_byte_level=is_byte_level)
        self._spells_ascii = self._unspellable.search("".join(map(chr, range(128)))) is None
        self.fingerprint = _fingerprint(tokens, self._special_ids)

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        tokenizer = self._tokenizer_without(self._special_ids)
        tokenizer.encode_special_tokens = True
        typed = tokenizer.encode_batch([*self._specials], add_special_tokens=False)
        for text, id, spelt in zip(self._specials, self._specials.values(), typed, strict=True):
            if id in spelt.ids:
                raise ServerFault(f"In this vocabulary, text that reads {text} becomes a mark.")
        if self._hasten is not None:
            self._hasten(tokenizer, self._spelt, self._use_quick)
        return tokenizer

    def _use_quick(self, quick: Encode) -> None:
        self._quick = quick

    @cached_property
    def _special(self) -> re.Pattern[str]:
        longest_first = sorted(self._specials, key=len, reverse=True)
        return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")

    def protecting(self, template: str) -> Vocabulary:
        """The same, but text never becomes an added token that stands in this chat template."""
        added = {self._tokens[id]: id for id in self._texts}
        marks = {
            token: id
            for token, id in added.items()
            if (token in template or MARK_FORM.fullmatch(token)) and len(token.strip(BLANK)) > 1
        }
        if marks.keys() <= self._specials.keys():
            return self
        specials = self._specials | marks
        return Vocabulary(
            self._tokenizer_without,
            self._tokens,
            specials,
            self._texts,
            self._ascii_cut,
            is_byte_level=self._is_byte_level,
            hasten=self._hasten,
        )

    def hastened(self, hasten: Hasten) -> Vocabulary:
        """The same, with a quicker way that is made with the first use. Not where words are looked up, which is quick
        enough and takes no memory."""
        other = copy(self)
        other._hasten = hasten if self._ascii_cut is None else None
        return other

    @property
    def size(self) -> int:
        """How many ids there are."""
        return len(self._tokens)

    def encode(self, text: str) -> IdArray[int]:
        """The ids of this text, none of them special. What cannot be spelt is replaced, never dropped."""
        spelt = self._spelt(text)
        if len(spelt) <= SLICE_CHARS or not self._joins_words:
            return self._encode_part(spelt)
        ids, known, rests = array("I"), self._slices, Rests()
        is_rested = len(spelt) > RESTED_CHARS
        for part in slices_of(spelt, len(spelt) if self._looks_up(spelt) else WORD_CHARS_MAX):
            ids_of_part = known.get(part)
            if ids_of_part is None:
                ids_of_part = self._encode_part(part)
                if len(part) <= SLICE_CHARS:
                    if len(known) >= SLICES_MAX:
                        known.clear()
                    known[part] = ids_of_part
            extend(ids, ids_of_part)
            if is_rested:
                rests.take()
        return ids

    def _looks_up(self, spelt: str) -> bool:
        return self._quick is None and self._ascii_cut is not None and spelt.isascii()

    def _encode_part(self, spelt: str) -> IdArray[int]:
        cut = self._ascii_cut
        if cut is None or not self._looks_up(spelt):
            return self._encode_whole(spelt)
        # Words repeat, in source code above all: each is encoded once and then looked up, five times as fast.
        known = self._pieces
        ids = array("I")
        for piece in cut.findall(spelt) if len(spelt) <= SLICE_CHARS else pieces_of(spelt, cut):
            ids_of_piece = known.get(piece)
            if ids_of_piece is None:
                ids_of_piece = array("I", self._tokenize(piece))
                if len(piece) <= PIECE_CHARS_MAX:
                    if len(known) >= PIECES_MAX:
                        known.clear()
                    known[piece] = ids_of_piece
            ids.extend(ids_of_piece)
        return ids

    def _spelt(self, text: str) -> str:
        """The text without what cannot be spelt. In slices: one call for a long text would hold up every thread."""
        if self._spells_ascii and text.isascii():
            return text
        for at in rested(range(0, len(text), CUT_CHARS)):
            if self._unspellable.search(text, at, at + CUT_CHARS):
                return joined(self._unspellable.sub(REPLACEMENT, part) for part in _cut_up(text))
        return text

    @cached_property
    def _joins_words(self) -> bool:
        """Whether the ids of a text are those of its words in a row: not where each text gets a space before it, nor
        where a token may be of several words."""
        begins = [0, *(found.end() for found in WORD_BEGINS.finditer(WORDS)), len(WORDS)]
        words = [WORDS[a:b] for a, b in itertools.pairwise(begins)]
        return [*self._tokenize(WORDS)] == [id for word in words for id in self._tokenize(word)]

    def _encode_whole(self, spelt: str) -> IdArray[int]:
        return array("I", self._tokenize(spelt)) if self._quick is None else self._quick(spelt)

    def _tokenize(self, text: str) -> Sequence[int]:
        if len(text) < BESIDE_CHARS_MIN:
            return self._tokenizer.encode(text, add_special_tokens=False).ids
        # Only a batch, even of a single text, is encoded without holding up the interpreter.
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def ids(self, *chunks: Chunk) -> IdArray[int]:
        """The ids of these chunks in a row. Text and own words next to each other are encoded together."""
        ids = array("I")
        text = ""
        for part in self.parts(chunks):
            if isinstance(part, str):
                is_long = text and len(part) > CUT_CHARS
                text = joined(itertools.chain((text,), _cut_up(part))) if is_long else text + part
                continue
            if text:
                extend(ids, self.encode(text))
                text = ""
            mark_ids = self._marks.get(part)
            if mark_ids is None:
                mark_ids = array("I", [self.special(part.special)])
                if part.text:
                    mark_ids.extend(self.encode(part.text))
                self._marks[part] = mark_ids
            ids.extend(mark_ids)
        if text:
            extend(ids, self.encode(text))
        return ids

    def parts(self, chunks: Iterable[Chunk]) -> Iterator[Mark | str]:
        """The same chunks, with own words cut at their special tokens."""
        for chunk in chunks:
            if isinstance(chunk, Own):
                for n, part in enumerate(self._special.split(chunk.text)):
                    yield Mark(part) if n % 2 else part
            else:
                yield chunk

    def without_pieces(self) -> Vocabulary:
        """The same vocabulary without a cache of pieces: to measure what the cache gives."""
        bare = copy(self)
        bare._ascii_cut, bare._slices = None, {}
        return bare

    def special(self, text: str) -> int:
        """The id of a special token that the dialect cannot do without."""
        id = self._specials.get(text)
        if id is None:
            raise ServerFault(f"This vocabulary has no {text}: model and dialect do not fit.")
        return id

    def has_special(self, text: str) -> bool:
        """Whether there is such a special token."""
        return text in self._specials

    @property
    def specials(self) -> frozenset[str]:
        """All special tokens by their text."""
        return frozenset(self._specials)

    def bytes_of(self, id: int) -> bytes:
        """The exact bytes of a token, perhaps a part of a character. Nothing for what the files call special or for
        an id beyond them: engines have rows that no token uses."""
        if id >= len(self._bytes):
            return b""
        data = self._bytes[id]
        if data is None:
            data = self._bytes[id] = self._spell(id)
        return data

    def _spell(self, id: int) -> bytes:
        token = self._tokens[id]
        if id in self._special_ids and id not in self._texts:
            return b""
        if not self._is_byte_level:
            byte = BYTE_TOKEN.fullmatch(token)
            return bytes.fromhex(byte[1]) if byte else token.replace(SPACE_LETTER, " ").encode()
        if id in self._texts:
            return token.encode()
        try:
            return bytes(BYTE_OF_LETTER[letter] for letter in token)
        except KeyError:
            # Some files have a few tokens as they are, among those of bytes.
            return token.encode()


def _cut_up(text: str) -> Iterator[str]:
    return (text[at : at + CUT_CHARS] for at in range(0, len(text), CUT_CHARS))


def extend(ids: IdArray[int], more: IdArray[int]) -> None:
    """Put these after the others."""
    if len(more) <= PIECE:
        ids.extend(more)
        return
    for at in rested(range(0, len(more), PIECE)):
        ids.extend(more[at : at + PIECE])


def pieces_of(
    text: str,
    cut: re.Pattern[str],
    slice_chars: int = PIECES_CHARS,
    word_chars_max: int = WORD_CHARS_MAX,
) -> Iterator[str]:
    """What `cut.findall` finds, slice by slice, longer words in parts: one call for a long text would hold up every
    other thread."""
    at, rests = 0, Rests()
    is_rested, width = len(text) > RESTED_CHARS, slice_chars
    while at + width < len(text):
        # What stands at the end of a slice may look otherwise in the whole, and begins the next.
        found = cut.findall(text, at, at + width)
        whole = found[:-BROKEN_PIECES] or (found if width >= word_chars_max else [])
        yield from whole
        at += sum(map(len, whole))
        if is_rested:
            rests.take()
        width = slice_chars if whole else 2 * width
    yield from cut.findall(text, at)


def slices_of(
    text: str, slice_chars_max: int = WORD_CHARS_MAX, slice_chars: int = SLICE_CHARS
) -> Iterator[str]:
    """This text in slices, cut where a word begins, or anywhere in words that are too long. Two texts that begin alike
    have the same slices up to there."""
    at, width = 0, slice_chars
    while len(text) - at > width:
        end = at + width
        begin = max(at, end - SEARCHED_CHARS)
        begins = [found.end() for found in WORD_BEGINS.finditer(text, begin, end)]
        if not begins and width < slice_chars_max:
            width *= 2
            continue
        end = begins[-1] if begins else end
        yield text[at:end]
        at, width = end, slice_chars
    yield text[at:]


def _unspellable(tokens: Iterable[str], *, is_byte_level: bool) -> re.Pattern[str]:
    """The characters that need a byte which is not among the tokens, and halves of surrogate pairs."""
    known = set(tokens)
    spelt = LETTER_OF_BYTE if is_byte_level else {byte: f"<0x{byte:02X}>" for byte in range(256)}
    missing = {byte for byte, token in spelt.items() if token not in known}
    if not is_byte_level:
        missing = {byte for byte in missing if byte >= 0x80 or chr(byte) not in known}
    ranges = ["\ud800-\udfff"]
    for byte in sorted(missing - NEVER_IN_UTF8):
        if byte < 0x80:
            ranges.append(re.escape(chr(byte)))
        elif byte >= 0xF0:
            first = (byte & 0x07) << 18
            ranges.append(f"{chr(max(first, 0x10000))}-{chr(min(first + 0x3FFFF, 0x10FFFF))}")
        else:
            raise ServerFault("This vocabulary cannot spell the bytes of ordinary letters.")
    return re.compile(f"[{''.join(ranges)}]")


def _fingerprint(tokens: list[str], special_ids: frozenset[int]) -> str:
    """Names what the ids mean. How text is cut into them is left out: kept ids hold without it."""
    digest = blake2b("\0".join(tokens).encode(), digest_size=6)
    digest.update(repr(sorted(special_ids)).encode())
    return digest.hexdigest()
