"""Would an engine let a model write this? Structural tags, followed by llguidance, the library inside llama.cpp."""

import importlib
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from segue.schemas.structural_tags import lark
from segue.seams.model import Grammar
from segue.vocabularies.vocabulary import Vocabulary

library: Any = importlib.import_module("llguidance")


class _Tokens:
    """A vocabulary as the library takes it, with one more token that ends a text."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        names = {vocabulary.special(text): text.encode() for text in vocabulary.specials}
        known = [vocabulary.bytes_of(id) for id in range(vocabulary.size)]
        hidden = [id for id, data in enumerate(known) if not data]
        shown = [data or names.get(id, b"<%d>" % id) for id, data in enumerate(known)]
        self.tokens = [*shown, b"<end of the text>"]
        self.eos_token_id = vocabulary.size
        self.special_token_ids = [*hidden, vocabulary.size]
        self.bos_token_id = None
        self._encode = vocabulary.encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text).tolist()


@lru_cache(maxsize=2)
def _tokenizer(vocabulary: Vocabulary) -> Any:
    return library.LLTokenizer(library.TokenizerWrapper(_Tokens(vocabulary)))


def is_accepted(schema: bytes | Grammar | None, vocabulary: Vocabulary, ids: Sequence[int]) -> bool:
    """Whether the tag allows these ids, and an end after them."""
    assert isinstance(schema, Grammar)
    assert schema.syntax == "structural_tag"
    matcher = library.LLMatcher(_tokenizer(vocabulary), lark(schema.definition))
    assert not matcher.is_error(), matcher.get_error()
    taken: int = matcher.try_consume_tokens(list(ids))
    return taken == len(ids) and bool(matcher.is_accepting())
