"""How is a vocabulary made from a list of words by rank?

In: Mistral's `tekken.json` or Kimi's `tiktoken.model`. Out: a `Vocabulary`. Such files have no merges: the pair that
makes the word with the lowest rank is merged first.
"""

from __future__ import annotations

from base64 import b64decode
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer, models

from segue.errors import ServerFault
from segue.vocabularies.cuts import KIMI, cutter
from segue.vocabularies.vocabulary import LETTER_OF_BYTE, Vocabulary

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
    return ranked_vocabulary([*specials, *map(_letters, spelt)], specials, data.config.pattern)


# --- from a tiktoken.model ------------------------------------------------------------------------

TIKTOKEN = "tiktoken.model"
# Kimi has so many ids after its words, with a name or without.
RESERVED_TOKENS = 256


class _NamedToken(msgspec.Struct):
    content: str
    special: bool = False


class _TokenizerConfig(msgspec.Struct):
    added_tokens_decoder: dict[int, _NamedToken] = {}


def vocabulary_from_tiktoken(file: Path) -> Vocabulary:
    """The vocabulary in a file of Kimi's: a line for each word, with its rank; the tokens beside them have their names
    in the tokenizer_config.json."""
    config = file.parent / "tokenizer_config.json"
    try:
        lines = (line.split() for line in file.read_bytes().splitlines() if line)
        ranks = {int(rank): b64decode(word) for word, rank in lines}
        words = [_letters(ranks[rank]) for rank in range(len(ranks))]
        named = msgspec.json.decode(config.read_bytes(), type=_TokenizerConfig).added_tokens_decoder
    except (OSError, ValueError, KeyError) as wrong:
        raise ServerFault(f"{file.name} cannot be read as a tokenizer: {wrong}") from wrong
    end = max(len(words) + RESERVED_TOKENS, *(id + 1 for id in named), 0)
    added = {
        id: named.get(id) or _NamedToken(f"<|reserved_token_{id}|>", special=True)
        for id in range(len(words), end)
    }
    return ranked_vocabulary(
        [*words, *(token.content for token in added.values())],
        {token.content: id for id, token in added.items() if token.special},
        KIMI,
        frozenset(id for id, token in added.items() if not token.special),
    )


# --- both -----------------------------------------------------------------------------------------


def _letters(word: bytes) -> str:
    return "".join(LETTER_OF_BYTE[byte] for byte in word)


def ranked_vocabulary(
    tokens: list[str], specials: dict[str, int], pattern: str, texts: frozenset[int] = frozenset()
) -> Vocabulary:
    """A vocabulary in which the order of the tokens is the order of the merges; text is cut by this pattern."""
    others = texts.union(specials.values())
    words = {token: id for id, token in enumerate(tokens) if id not in others}

    def tokenizer_without(special_ids: frozenset[int]) -> Tokenizer:
        plain = {tokens[id]: id for id in sorted(texts - special_ids)}
        model = models.BPE(words | plain, merges_of(words), ignore_merges=True)
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = cutter(pattern)
        tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
        return tokenizer

    return Vocabulary(tokenizer_without, tokens, specials, texts)


def merges_of(ranks: dict[str, int]) -> list[tuple[str, str]]:
    """All pairs that make a token, in the order of what they make, as there is no other order in such a file."""
    merges: list[tuple[str, str]] = []
    for word in ranks:
        halves = ((word[:at], word[at:]) for at in range(1, len(word)))
        found = [pair for pair in halves if pair[0] in ranks and pair[1] in ranks]
        if len(found) > 1:
            found.sort(key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
        merges += found
    return merges
