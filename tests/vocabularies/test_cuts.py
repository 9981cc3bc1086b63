"""A vocabulary from a GGUF cuts text as the model's own tokenizer does, for the families beyond SmolLM2 and Qwen."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from segue.vocabularies.cuts import CUTS, cutter
from segue.vocabularies.gguf import GgufValue
from segue.vocabularies.load import CONTROL, vocabulary_from_file, vocabulary_from_metadata
from segue.vocabularies.vocabulary import BYTE_OF_LETTER, Vocabulary
from tests.dialects import templates
from tests.vocabularies.gpt_oss import harmony_encoding, vocabulary_from_harmony

FRAGMENTS = [
    "Hello", "hELLO", " World", "'s", "'LL", "don't", "DON'T", "123", "4567", "\n", "\r\n", " ", "  ", "\t",
    "漢字", "かな", "😀", "é", "e\u0301", "/", "//\n", ".", "!?\n\n", "_", "ǅ", "ʰa", "अ", "ि", "\u00a0", "\u2028",
    "<|end|>", "<|eot_id|>", "x'Re",
]  # fmt: skip
GOLDEN = Path(__file__).parents[1] / "golden"
LETTERS = {byte: letter for letter, byte in BYTE_OF_LETTER.items()}


def texts() -> list[str]:
    rng = random.Random(10)
    return ["".join(rng.choices(FRAGMENTS, k=rng.randint(1, 12))) for _ in range(500)]


def from_metadata(cut: str, tokens: list[str], specials: set[int], merges: list[str]) -> Vocabulary:
    kinds = [CONTROL if id in specials else 1 for id in range(len(tokens))]
    head: dict[str, GgufValue] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": cut,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": kinds,
        "tokenizer.ggml.merges": merges,
    }
    return vocabulary_from_metadata(head, "test")


def test_llama3_is_cut_as_its_tokenizer_does() -> None:
    data: dict[str, Any] = json.loads((templates.folder("llama3_2") / "tokenizer.json").read_text())
    specials = {one["id"]: one["content"] for one in data["added_tokens"]}
    by_id = {id: token for token, id in data["model"]["vocab"].items()} | specials
    tokens = [by_id[id] for id in range(len(by_id))]
    merges = [one if isinstance(one, str) else " ".join(one) for one in data["model"]["merges"]]
    ours = from_metadata("llama-bpe", tokens, set(specials), merges)
    theirs = templates.vocabulary("llama3_2")

    assert [text for text in texts() if ours.encode(text) != theirs.encode(text)] == []
    assert ours.fingerprint == theirs.fingerprint


def test_gpt_oss_is_cut_as_its_library_does() -> None:
    """Both with the library's words and from a file of them; the library itself is too slow for long words."""
    theirs = harmony_encoding()
    ours = vocabulary_from_harmony()
    specials = {ours.special(text): text for text in ours.specials}
    spelt = [ours.bytes_of(id) for id in range(ours.size)]
    tokens = [specials.get(id) or _letters(data) for id, data in enumerate(spelt)]
    from_file = from_metadata("gpt-4o", tokens, set(specials), _merges(spelt))

    for text in [*texts(), "ACGT" * 300, " " * 2_000 + "x"]:
        ids = theirs.encode(text, disallowed_special=())
        assert ours.encode(text).tolist() == from_file.encode(text).tolist() == ids, text
    assert from_file.fingerprint == ours.fingerprint


def test_mistral_is_cut_as_its_own_file_says() -> None:
    theirs = vocabulary_from_file(GOLDEN / "mistral" / "tekken.json")
    specials = {theirs.special(text): text for text in theirs.specials}
    spelt = [theirs.bytes_of(id) for id in range(theirs.size)]
    tokens = [specials.get(id) or _letters(data) for id, data in enumerate(spelt)]
    ours = from_metadata("tekken", tokens, set(specials), _merges(spelt))

    assert [text for text in texts() if ours.encode(text) != theirs.encode(text)] == []
    assert ours.fingerprint == theirs.fingerprint


@pytest.mark.parametrize(
    "patterns", sorted(set(CUTS.values())), ids=lambda patterns: patterns[0][:20]
)
def test_every_cut_keeps_every_letter(patterns: tuple[str, ...]) -> None:
    cut = cutter(*patterns)
    for text in texts()[:200]:
        words = [word for word, _ in cut.pre_tokenize_str(text)]
        assert bytes(BYTE_OF_LETTER[letter] for letter in "".join(words)).decode() == text


def test_numbers_are_cut_from_the_right() -> None:
    words = [word for word, _ in cutter(*CUTS["superbpe"]).pre_tokenize_str("a1234567b12")]

    assert words == ["a", "1", "234", "567", "b", "12"]


def _letters(data: bytes) -> str:
    return "".join(LETTERS[byte] for byte in data)


def _merges(spelt: list[bytes]) -> list[str]:
    """The merges behind a list of ranks: of each token, the last two parts that it is made of."""
    ranks = {data: id for id, data in enumerate(spelt) if data}
    pairs = [_last_pair(ranks, data) for data in ranks if len(data) > 1]
    return [f"{_letters(pair[0])} {_letters(pair[1])}" for pair in pairs if len(pair) == 2]


def _last_pair(ranks: dict[bytes, int], data: bytes) -> list[bytes]:
    parts = [bytes([byte]) for byte in data]
    while len(parts) > 2:
        joins = [(ranks.get(parts[n] + parts[n + 1], len(ranks)), n) for n in range(len(parts) - 1)]
        rank, at = min(joins)
        if rank >= ranks[data]:
            return parts
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return parts
