"""The quicker tokenizer gives the ids of the slower one, or is not used.

`python -m tests.vocabularies.test_fast_tokenizer 10000` compares so many made-up texts for every vocabulary at hand
(`make models` fetches them).
"""

import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from segue.errors import ServerFault
from segue.server.models import SCRIPTED_VOCABULARY
from segue.vocabularies import fast_tokenizer
from segue.vocabularies.fast_tokenizer import SAMPLES, fast_encode
from segue.vocabularies.load import vocabulary_from_file, vocabulary_from_gguf
from segue.vocabularies.vocabulary import Encode, Vocabulary
from tests.models.assets import CACHE

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
ROOT = Path(__file__).parents[2]
# Letters of many scripts, the most usual ones most often.
RANGES = (
    *((0x20, 0x7E),) * 6,
    *((0x00, 0x1F), (0xA0, 0x17F), (0x300, 0x36F), (0x370, 0x3FF), (0x400, 0x4FF), (0x590, 0x6FF)),
    *((0x900, 0x97F), (0xE00, 0xE7F), (0x1100, 0x11FF), (0x2000, 0x206F), (0x2100, 0x2BFF)),
    *((0x3040, 0x30FF), (0x4E00, 0x9FFF), (0xAC00, 0xD7A3), (0xFE00, 0xFE0F), (0x1D400, 0x1D7FF)),
    *((0x1F300, 0x1FAFF), (0x10000, 0x10FFFF)),
)


def made_up_texts(count: int, seed: int) -> Iterator[str]:
    """Source code, documents, and mixtures of samples and single characters."""
    chance = random.Random(seed)
    pages = [path.read_text() for path in sorted((ROOT / "src" / "segue" / "turn").glob("*.py"))]
    pages += [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    for _ in range(count):
        if chance.random() < 0.4:
            page = chance.choice(pages)
            at = chance.randrange(len(page))
            yield page[at : at + chance.randrange(1, 3_000)]
            continue
        yield "".join(
            chance.choice(SAMPLES)[: chance.randrange(30)]
            if chance.random() < 0.3
            else chr(chance.randint(*chance.choice(RANGES)))
            for _ in range(chance.randrange(1, 80))
        )


def encode_by(vocabulary: Vocabulary) -> Encode:
    encode = fast_encode(vocabulary._tokenizer, [*map(vocabulary._spelt, SAMPLES)])
    assert encode is not None
    return encode


def differing(vocabulary: Vocabulary, encode: Encode, texts: Iterator[str]) -> Sequence[str]:
    """The texts that are not the same ids in both ways."""
    tokenizer = vocabulary._tokenizer
    spelt = map(vocabulary._spelt, texts)
    return [
        text
        for text in spelt
        if encode(text).tolist() != tokenizer.encode(text, add_special_tokens=False).ids
    ]


def test_both_ways_give_the_same_ids_and_none_is_special() -> None:
    vocabulary = vocabulary_from_gguf(Path(SCRIPTED_VOCABULARY)).without_pieces()
    encode = encode_by(vocabulary)
    text = "<|im_end|> " * 1_000 + "x"

    assert differing(vocabulary, encode, made_up_texts(300, seed=1)) == []
    assert encode(text) == vocabulary.encode(text)
    assert vocabulary.special("<|im_end|>") not in encode(text)


def letters() -> Tokenizer:
    """A vocabulary with ids that no token has."""
    words = {letter: 2 * n for n, letter in enumerate(ALPHABET)}
    tokenizer = Tokenizer(models.BPE(words, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


def test_ids_without_a_token_are_no_hindrance() -> None:
    encode = fast_encode(letters(), SAMPLES)

    assert encode is not None
    assert encode("\x01\x013").tolist() == letters().encode("\x01\x013").ids


def test_one_that_differs_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = fast_tokenizer._encode
    monkeypatch.setattr(fast_tokenizer, "_encode", lambda fast, text: right(fast, text[::-1]))

    assert fast_encode(letters(), ("ab",)) is None
    assert "fastokens differs for 'ab'" in caplog.text


def test_a_vocabulary_that_it_cannot_read_goes_the_slower_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", fast_tokenizer.__name__)

    assert fast_encode(Tokenizer(models.WordLevel({"a": 0}, "a")), ("a",)) is None
    assert "refuses this vocabulary" in caplog.text


def test_a_hastened_vocabulary_takes_the_quicker_way_when_it_is_ready() -> None:
    vocabulary = Vocabulary(lambda _: letters(), ALPHABET, {}, frozenset())
    begun = []
    hastened = vocabulary.hastened(lambda *given: begun.append(given)).protecting("")
    before = hastened.encode("Straße")
    ((tokenizer, spelt, take_over),) = begun
    encode = fast_encode(tokenizer, [*map(spelt, SAMPLES)])
    assert encode is not None
    take_over(encode)

    assert hastened.encode("Straße") == before == vocabulary.encode("Straße")
    assert len(begun) == 1


def main(count: int) -> int:
    """Compare for each vocabulary; how many texts differ."""
    wrong = 0
    files = sorted((CACHE / "tokenizers").iterdir()) + sorted(
        (CACHE / "vocabularies").glob("*.gguf")
    )
    for file in files:
        try:
            load = vocabulary_from_gguf if file.suffix == ".gguf" else vocabulary_from_file
            vocabulary = load(file).without_pieces()
            encode = encode_by(vocabulary)
            found = differing(vocabulary, encode, made_up_texts(count, seed=7))
        except ServerFault as refused:
            print(f"{file.stem}: {refused}")
            continue
        print(f"{file.stem}: {count} texts, {len(found)} differ {found[:1]!a}", flush=True)
        wrong += len(found)
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
