"""gpt-oss's vocabulary and OpenAI's own package for it, `openai-harmony`, without its download.

The package reads the ranks of its vocabulary from a file whose digest it checks. GPT-4o has the same ranks, so the
file is written from its tokenizer.
"""

import importlib
import json
import os
from base64 import b64encode
from pathlib import Path
from typing import Any

from segue.vocabularies.cuts import GPT4O
from segue.vocabularies.ranked import ranked_vocabulary
from segue.vocabularies.vocabulary import BYTE_OF_LETTER, LETTER_OF_BYTE, Vocabulary
from tests.models.assets import tokenizer_folder


def harmony_package() -> Any:
    """The package, which knows where its vocabulary is."""
    tokenizer = tokenizer_folder("gpt4o")
    folder = tokenizer.parents[1] / "o200k_base"
    if not (ranks := folder / "o200k_base.tiktoken").exists():
        folder.mkdir(exist_ok=True)
        # Another test process may do the same at the same time.
        own = folder / f"{os.getpid()}.part"
        own.write_bytes(_ranks_in(tokenizer / "tokenizer.json"))
        own.rename(ranks)
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(folder)
    return importlib.import_module("openai_harmony")


def harmony_encoding() -> Any:
    package = harmony_package()
    return package.load_harmony_encoding(package.HarmonyEncodingName.HARMONY_GPT_OSS)


def _ranks_in(tokenizer: Path) -> bytes:
    """One line for each token: its bytes, and its rank, which is its id."""
    file = json.loads(tokenizer.read_bytes())
    special = {one["id"] for one in file["added_tokens"]}
    tokens = sorted(
        (id, token) for token, id in file["model"]["vocab"].items() if id not in special
    )
    lines = (b"%s %d\n" % (b64encode(_bytes_of(token)), id) for id, token in tokens)
    return b"".join(lines)


def _bytes_of(token: str) -> bytes:
    return bytes(BYTE_OF_LETTER[letter] for letter in token)


def vocabulary_from_harmony() -> Vocabulary:
    encoding = harmony_encoding()
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
