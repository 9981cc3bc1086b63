"""Which words does a replica without a model say? Words that are one token each, wherever they stand.

A text of such words has as many tokens as words, and what a client sends back as text becomes the ids that were
sampled, as the answers of real models nearly always do. The vocabulary is the one that comes with the package.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from pathlib import Path

from msgspec import Struct

from segue.vocabularies.load import vocabulary_from_gguf
from segue_fleet.replica import Words

WORD = re.compile(rb" [a-z]{4,9}")
WORDS_MAX = 4_000


class KnownWords(Struct, frozen=True):
    """The words as text, for clients, and as ids, for replicas."""

    texts: list[str]
    words: Words


def tokenizer_path() -> Path:
    """The vocabulary that comes with the package."""
    return Path(str(files("segue.vocabularies") / "smollm2.gguf"))


@cache
def known_words() -> KnownWords:
    """Those words of the vocabulary that are one token with a space before them and one without."""
    vocabulary = vocabulary_from_gguf(tokenizer_path())
    texts = []
    ids = []
    first = []
    for id in range(vocabulary.size):
        if not WORD.fullmatch(vocabulary.bytes_of(id)):
            continue
        text = vocabulary.bytes_of(id).decode()
        alone = vocabulary.encode(text[1:])
        if len(alone) == 1 and list(vocabulary.encode(text)) == [id]:
            texts.append(text[1:])
            ids.append(id)
            first.append(alone[0])
        if len(ids) == WORDS_MAX:
            break
    return KnownWords(texts, Words(ids, first, vocabulary.special("<|im_end|>")))
