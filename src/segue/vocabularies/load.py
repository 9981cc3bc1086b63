"""How is a vocabulary made from a model's own files?

In: a GGUF, a `tokenizer.json`, a `tekken.json`, or the folder of one of them. Out: a `Vocabulary`. What is not
byte-level, or cuts text in a way that is not known here, is refused. Nothing is fetched from a network.
"""

from __future__ import annotations

import re
from base64 import b64decode
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers

from segue.errors import ServerFault
from segue.vocabularies.gguf import GgufValue, read_gguf
from segue.vocabularies.vocabulary import LETTER_OF_BYTE, Vocabulary

T = TypeVar("T")


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
# Where a piece that is a token stays a token, whatever the merges would make of it.
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


def vocabulary_from_metadata(head: dict[str, GgufValue], name: str) -> Vocabulary:
    """The same from what `read_gguf` has read; errors name the file by `name`."""
    cut = head.get("tokenizer.ggml.pre")
    if head.get("tokenizer.ggml.model") != "gpt2" or cut not in CUTS:
        raise ServerFault(
            f"{name} has a vocabulary of an unknown kind (tokenizer.ggml.pre is {cut!r}). "
            "Name the model's tokenizer.json with --tokenizer instead."
        )
    tokens = _list_of(str, head, "tokenizer.ggml.tokens")
    kinds = _list_of(int, head, "tokenizer.ggml.token_type")
    merges = _list_of(str, head, "tokenizer.ggml.merges")
    specials = {tokens[id]: id for id, kind in enumerate(kinds) if kind == CONTROL}
    texts = {id for id, kind in enumerate(kinds) if kind == USER_DEFINED}

    def tokenizer_without(special_ids: frozenset[int]) -> Tokenizer:
        # Special tokens are left out: text cannot become a token that the tokenizer does not have.
        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        ids = {token: id for id, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(ids, pairs, ignore_merges=cut in WHOLE_PIECES))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(CUTS[str(cut)])
        plain = sorted(texts - special_ids)
        tokenizer.add_tokens([AddedToken(tokens[id], normalized=False) for id in plain])
        return tokenizer

    return Vocabulary(tokenizer_without, tokens, specials, texts, ASCII_CUTS.get(str(cut)))


def _list_of(kind: type[T], head: dict[str, GgufValue], key: str) -> list[T]:
    found = head.get(key)
    typed = [value for value in found if isinstance(value, kind)] if isinstance(found, list) else []
    if not isinstance(found, list) or len(typed) != len(found):
        raise ServerFault(f"The model file has no usable {key}.")
    return typed


# --- from a tokenizer.json ------------------------------------------------------------------------


class _PreTokenizer(msgspec.Struct):
    type: str = ""
    pretokenizers: list[_PreTokenizer] = []


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int]


class _File(msgspec.Struct):
    model: _Model
    pre_tokenizer: _PreTokenizer | None = None
    added_tokens: list[_Added] = []


def vocabulary_from_file(path: Path) -> Vocabulary:
    """The vocabulary in a tokenizer.json or a tekken.json, or in the folder that holds one."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if path.is_dir() and not file.exists() and (path / TEKKEN).exists():
        file = path / TEKKEN
    if file.name == TEKKEN:
        return vocabulary_from_tekken(file)
    try:
        data = msgspec.json.decode(file.read_bytes(), type=_File)
    except (OSError, ValueError) as wrong:
        raise ServerFault(f"{file.name} cannot be read as a tokenizer: {wrong}") from wrong
    if not _is_byte_level(data.pre_tokenizer):
        raise ServerFault(f"{file.name} is not a byte-level vocabulary.")
    added = {token.content: token.id for token in data.added_tokens}
    by_token = data.model.vocab | added
    tokens = [""] * (max(by_token.values()) + 1)
    for token, id in by_token.items():
        tokens[id] = token
    specials = {token.content: token.id for token in data.added_tokens if token.special}
    texts = {token.id for token in data.added_tokens if not token.special}
    return Vocabulary(partial(_tokenizer_in, file), tokens, specials, texts)


def _tokenizer_in(file: Path, special_ids: frozenset[int]) -> Tokenizer:
    """The tokenizer of this file, in which these added tokens are special."""
    try:
        fields = msgspec.json.decode(file.read_bytes(), type=dict[str, msgspec.Raw])
        added = msgspec.json.decode(fields.get("added_tokens", b"[]"), type=list[dict[str, object]])
        marked = [token | {"special": token["id"] in special_ids} for token in added]
        fields["added_tokens"] = msgspec.Raw(msgspec.json.encode(marked))
        return Tokenizer.from_buffer(msgspec.json.encode(fields))
    except (OSError, ValueError) as wrong:
        raise ServerFault(f"{file.name} cannot be read as a tokenizer: {wrong}") from wrong


def _is_byte_level(cut: _PreTokenizer | None) -> bool:
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
    """The vocabulary in a file of Mistral's: tokens by rank, after the special tokens."""
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
    words = ["".join(LETTER_OF_BYTE[byte] for byte in word) for word in spelt]
    return ranked_vocabulary([*specials, *words], specials, data.config.pattern)


def ranked_vocabulary(tokens: list[str], specials: dict[str, int], pattern: str) -> Vocabulary:
    """A vocabulary in which the order of the tokens is the order of the merges; text is cut by this pattern."""
    special_ids = set(specials.values())
    words = {token: id for id, token in enumerate(tokens) if id not in special_ids}

    def tokenizer_without(special_ids: frozenset[int]) -> Tokenizer:
        tokenizer = Tokenizer(models.BPE(words, _merges(words), ignore_merges=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(_split(pattern))
        return tokenizer

    return Vocabulary(tokenizer_without, tokens, specials, set())


def _merges(ranks: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs that make a token, in the order of what they make, as there is no other order in such a file."""
    merges: list[tuple[str, str]] = []
    for word in ranks:
        halves = ((word[:at], word[at:]) for at in range(1, len(word)))
        found = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        if len(found) > 1:
            found.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += found
    return merges
