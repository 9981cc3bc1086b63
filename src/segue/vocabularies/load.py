"""How is a vocabulary made from a model's own files?

In: a GGUF, a `tokenizer.json`, one of the files that `ranked.py` reads, or the folder of one of them. Out: a
`Vocabulary`: BPE that is byte-level, or that has a token for each byte (SentencePiece's spelling). What spells text in
another way, or cuts it in a way that is not in `cuts.py`, is refused. Nothing is fetched from a network.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from tokenizers import AddedToken, Tokenizer, models, normalizers

from segue.errors import Misconfigured, ServerFault
from segue.vocabularies.cuts import ASCII_CUTS, CUTS, WHOLE_WORDS, cutter
from segue.vocabularies.gguf import GgufValue, is_gguf, read_gguf
from segue.vocabularies.ranked import (
    TEKKEN,
    TIKTOKEN,
    merges_of,
    vocabulary_from_tekken,
    vocabulary_from_tiktoken,
)
from segue.vocabularies.vocabulary import SPACE_LETTER, Vocabulary

T = TypeVar("T")


def load_vocabulary(path: Path) -> Vocabulary:
    """The vocabulary of a GGUF file, a tokenizer.json or its folder."""
    if not path.exists():
        raise Misconfigured(
            f"tokenizer: there is no file or folder {path}. Download it: `hf download NAME tokenizer.json "
            "tokenizer_config.json --local-dir DIR`, then --tokenizer DIR."
        )
    return (vocabulary_from_gguf if is_gguf(path) else vocabulary_from_file)(path)


# --- from a GGUF file -----------------------------------------------------------------------------

# What a token is, by `tokenizer.ggml.token_type`.
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
UNUSED = 5


def vocabulary_from_gguf(path: Path) -> Vocabulary:
    """The vocabulary that llama.cpp would use for this file."""
    return vocabulary_from_metadata(read_gguf(path), path.name)


def vocabulary_from_metadata(head: dict[str, GgufValue], name: str) -> Vocabulary:
    """The same from what `read_gguf` has read; errors name the file by `name`."""
    kind = head.get("tokenizer.ggml.model")
    cut = str(head.get("tokenizer.ggml.pre", "default"))
    if kind not in ("gpt2", "gemma4", "llama") or (kind == "gpt2" and cut not in CUTS):
        raise ServerFault(
            f"{name} has a vocabulary of an unknown kind (tokenizer.ggml.model is {kind!r}, "
            f"tokenizer.ggml.pre is {cut!r}). Name the model's tokenizer.json with --tokenizer instead."
        )
    tokens = _list_of(str, head, "tokenizer.ggml.tokens")
    kinds = _list_of(int, head, "tokenizer.ggml.token_type")
    specials = {
        tokens[id]: id for id, kind in enumerate(kinds) if kind in (UNKNOWN, CONTROL, UNUSED)
    }
    texts = frozenset(id for id, kind in enumerate(kinds) if kind == USER_DEFINED)

    def tokenizer_without(special_ids: frozenset[int]) -> Tokenizer:
        # Special tokens are left out: text cannot become a token that the tokenizer does not have.
        words = {token: id for id, token in enumerate(tokens) if id not in special_ids}
        if kind == "llama":
            scores = _list_of(float, head, "tokenizer.ggml.scores")
            best_first = sorted(words, key=lambda word: -scores[words[word]])
            merges = merges_of({word: rank for rank, word in enumerate(best_first)})
        else:
            pairs = (merge.split(" ", 1) for merge in _list_of(str, head, "tokenizer.ggml.merges"))
            merges = [(left, right) for left, right in pairs if left + right in words]
        is_whole = kind == "gpt2" and cut in WHOLE_WORDS
        model = models.BPE(words, merges, ignore_merges=is_whole, byte_fallback=kind != "gpt2")
        tokenizer = Tokenizer(model)
        if kind == "gpt2":
            tokenizer.pre_tokenizer = cutter(*CUTS[cut])
        else:
            has_prefix = kind == "llama" and head.get("tokenizer.ggml.add_space_prefix", True)
            before = [normalizers.Prepend(SPACE_LETTER)] if has_prefix else []
            replace = normalizers.Replace(" ", SPACE_LETTER)
            tokenizer.normalizer = normalizers.Sequence([*before, replace])
        plain = sorted(texts - special_ids)
        tokenizer.add_tokens([AddedToken(tokens[id], normalized=False) for id in plain])
        return tokenizer

    ascii_cut = ASCII_CUTS.get(cut)
    return Vocabulary(
        tokenizer_without, tokens, specials, texts, ascii_cut, is_byte_level=kind == "gpt2"
    )


def _list_of(kind: type[T], head: dict[str, GgufValue], key: str) -> list[T]:
    found = head.get(key)
    typed = [value for value in found if isinstance(value, kind)] if isinstance(found, list) else []
    if not isinstance(found, list) or len(typed) != len(found):
        raise ServerFault(f"The model file has no usable {key}.")
    return typed


# --- from a tokenizer.json ------------------------------------------------------------------------

READERS = {TEKKEN: vocabulary_from_tekken, TIKTOKEN: vocabulary_from_tiktoken}


class _PreTokenizer(msgspec.Struct):
    type: str = ""
    pretokenizers: list[_PreTokenizer] = []


class _Added(msgspec.Struct):
    id: int
    content: str
    special: bool = False


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[object]
    byte_fallback: bool = False


class _File(msgspec.Struct):
    model: _Model
    pre_tokenizer: _PreTokenizer | None = None
    added_tokens: list[_Added] = []


def vocabulary_from_file(path: Path) -> Vocabulary:
    """The vocabulary in a tokenizer.json, a tekken.json or a tiktoken.model, or in the folder that holds one."""
    file = path / "tokenizer.json" if path.is_dir() else path
    if not file.exists():
        file = next((path / name for name in READERS if (path / name).exists()), file)
    if file.name in READERS:
        return READERS[file.name](file)
    try:
        data = msgspec.json.decode(file.read_bytes(), type=_File)
    except (OSError, ValueError) as wrong:
        raise ServerFault(f"{file.name} cannot be read as a tokenizer: {wrong}") from wrong
    is_byte_level = _is_byte_level(data.pre_tokenizer)
    if isinstance(data.model.vocab, list) or not (is_byte_level or data.model.byte_fallback):
        raise ServerFault(
            f"{file.name} is no vocabulary that can be read here: BPE that is byte-level, or has a token for each byte."
        )
    added = {token.content: token.id for token in data.added_tokens}
    by_token = data.model.vocab | added
    tokens = [""] * (max(by_token.values()) + 1)
    for token, id in by_token.items():
        tokens[id] = token
    specials = {token.content: token.id for token in data.added_tokens if token.special}
    texts = frozenset(token.id for token in data.added_tokens if not token.special)
    maker = partial(_tokenizer_in, file)
    return Vocabulary(maker, tokens, specials, texts, is_byte_level=is_byte_level)


def _tokenizer_in(file: Path, special_ids: frozenset[int]) -> Tokenizer:
    """The tokenizer of this file, in which these added tokens are special."""
    try:
        fields = msgspec.json.decode(file.read_bytes(), type=dict[str, msgspec.Raw])
        added = msgspec.json.decode(fields.get("added_tokens", b"[]"), type=list[dict[str, object]])
        marked = [token | {"special": token["id"] in special_ids} for token in added]
        fields["added_tokens"] = msgspec.Raw(msgspec.json.encode(marked))
        # A space before the very first word: that word is a mark in every prompt.
        cut = msgspec.json.decode(fields.get("pre_tokenizer", b"null"))
        if isinstance(cut, dict) and cut.get("prepend_scheme") == "first":
            fields["pre_tokenizer"] = msgspec.Raw(
                msgspec.json.encode(cut | {"prepend_scheme": "never"})
            )
        return Tokenizer.from_buffer(msgspec.json.encode(fields))
    except (OSError, ValueError) as wrong:
        raise ServerFault(f"{file.name} cannot be read as a tokenizer: {wrong}") from wrong


def _is_byte_level(cut: _PreTokenizer | None) -> bool:
    return cut is not None and (
        cut.type == "ByteLevel" or any(_is_byte_level(inner) for inner in cut.pretokenizers)
    )
