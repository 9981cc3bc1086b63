"""Ids that llama.cpp does not show are found again from their bytes."""

from __future__ import annotations

import pytest

from segue.engines.hidden_tokens import HiddenTokens
from segue.vocabularies.load import vocabulary_from_gguf
from segue.vocabularies.vocabulary import Vocabulary
from segue_embedded.weights import find_weights


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    path = find_weights("smollm2")
    return vocabulary_from_gguf(path)


@pytest.fixture(scope="module")
def hidden_tokens(vocabulary: Vocabulary) -> HiddenTokens:
    return HiddenTokens(vocabulary)


@pytest.mark.parametrize("text", ["🎉", " 🎉", "🦜", "日", "語", "☃", "é", "\U0001f3f4", "ﷺ", "𝒳"])
def test_character_of_several_tokens_is_found_whole(
    vocabulary: Vocabulary, hidden_tokens: HiddenTokens, text: str
) -> None:
    ids = list(vocabulary.encode(text))

    assert hidden_tokens.find(text, len(ids), ids[-1]) == ids


def test_model_that_spells_in_its_own_way_is_followed(
    vocabulary: Vocabulary, hidden_tokens: HiddenTokens
) -> None:
    """A character in single bytes, though the vocabulary has longer pieces for it."""
    by_byte = {vocabulary.bytes_of(id): id for id in range(vocabulary.size)}
    ids = [by_byte[bytes([byte])] for byte in "🎉".encode()]
    assert list(vocabulary.encode("🎉")) != ids

    assert hidden_tokens.find("🎉", 4, ids[-1]) == ids


@pytest.mark.parametrize("count", [2, 5, 500])
def test_bytes_that_are_no_text_are_written_anew(
    vocabulary: Vocabulary, hidden_tokens: HiddenTokens, count: int
) -> None:
    """What was said stays the same, whatever the ids were."""
    last = vocabulary.encode(" a")[-1]

    found = hidden_tokens.find("\ufffd\ufffd a", count, last)

    assert b"".join(map(vocabulary.bytes_of, found)).decode() == "\ufffd\ufffd a"
