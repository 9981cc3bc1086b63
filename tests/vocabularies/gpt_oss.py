"""gpt-oss's vocabulary, from the package `oss-harmony`, which carries it."""

import importlib
from typing import Any

from segue.vocabularies.load import GPT4O, ranked_vocabulary
from segue.vocabularies.vocabulary import LETTER_OF_BYTE, Vocabulary


def vocabulary_from_harmony() -> Vocabulary:
    harmony: Any = importlib.import_module("openai_harmony")
    encoding = harmony.load_harmony_encoding(harmony.HarmonyEncodingName.HARMONY_GPT_OSS)
    specials = {
        text: encoding.encode(text, allowed_special="all")[0]
        for text in encoding.special_tokens_set
    }
    tokens = [""] * (max(specials.values()) + 1)
    for text, id in specials.items():
        tokens[id] = text
    for id, known in enumerate(tokens):
        if not known:
            # The public way to decode replaces the parts of a character.
            data: bytes = encoding._inner.decode_bytes([id])
            tokens[id] = "".join(LETTER_OF_BYTE[byte] for byte in data)
    # The library's own way takes time by the square of a word's length, and nothing else runs meanwhile.
    return ranked_vocabulary(tokens, specials, GPT4O)
