"""SmolLM2's vocabulary, as its GGUF has it."""

import json
import threading
import time
from array import array
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from segue.errors import ServerFault
from segue.seams.prompt import IdArray
from segue.vocabularies.cuts import ASCII_CUTS
from segue.vocabularies.gguf import read_gguf
from segue.vocabularies.load import (
    vocabulary_from_file,
    vocabulary_from_gguf,
    vocabulary_from_metadata,
)
from segue.vocabularies.vocabulary import (
    CUT_CHARS,
    PIECE,
    SLICE_CHARS,
    Vocabulary,
    extend,
    pieces_of,
    slices_of,
)
from segue_embedded.weights import find_weights
from tests.contracts.dialect import special_ids

ORACLE = Path(__file__).parents[1] / "golden" / "smollm2-llamacpp-tokens.json"


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    path = find_weights("smollm2")
    return vocabulary_from_gguf(path)


def test_text_becomes_the_ids_that_llamacpp_gives(vocabulary: Vocabulary) -> None:
    """Recorded from llama.cpp's tokenizer on the same file, special tokens not parsed."""
    for text, ids in json.loads(ORACLE.read_text()):
        assert vocabulary.encode(text).tolist() == ids, text


@settings(deadline=None)
@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Cc"], max_codepoint=0x3FFFF)))
def test_bytes_of_the_ids_are_the_text(vocabulary: Vocabulary, text: str) -> None:
    assert b"".join(map(vocabulary.bytes_of, vocabulary.encode(text))).decode() == text


@settings(deadline=None)
@given(text=st.text(st.characters()))
def test_what_cannot_be_spelt_is_replaced_and_not_dropped(
    vocabulary: Vocabulary, text: str
) -> None:
    """Also halves of surrogate pairs, which no UTF-8 has."""
    spelt = b"".join(map(vocabulary.bytes_of, vocabulary.encode(text))).decode()

    assert len(spelt) == len(text)
    assert all(a == b or b == "\ufffd" for a, b in zip(text, spelt, strict=True))


@settings(deadline=None)
@given(text=st.text(st.characters(codec="ascii")))
def test_pieces_that_are_remembered_change_no_ids(vocabulary: Vocabulary, text: str) -> None:
    assert vocabulary.without_pieces().encode(text) == vocabulary.encode(text)


@given(text=st.text("ab01 '\n?slvre"), slice_chars=st.integers(1, 20))
def test_long_text_is_cut_in_slices_as_it_would_be_whole(text: str, slice_chars: int) -> None:
    cut = ASCII_CUTS["smollm"]
    assert list(pieces_of(text, cut, slice_chars)) == cut.findall(text)


@given(
    words=st.lists(
        st.sampled_from(["a", "bb ", "\n", " c", "d\n", "\u00e9", "=", "12 "]), max_size=60
    ),
    slice_chars=st.integers(2, 20),
    at=st.integers(0, 120),
)
def test_texts_that_begin_alike_have_the_same_slices(
    words: list[str], slice_chars: int, at: int
) -> None:
    text = "".join(words)
    slices, begun = ([*slices_of(one, 64, slice_chars)] for one in (text, text[:at]))
    assert "".join(slices) == text
    assert max(map(len, slices)) <= 128
    assert begun[:-1] == slices[: len(begun) - 1]


def test_text_that_grows_is_encoded_at_its_end_and_has_the_ids_of_the_whole(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = "".join(f"line {n} of {n * n} is\n\tlong, don't you say?\n" for n in range(3_000))
    encoded: list[int] = []
    plain = vocabulary._encode_part

    def counting(spelt: str) -> "IdArray[int]":
        encoded.append(len(spelt))
        return plain(spelt)

    monkeypatch.setattr(vocabulary, "_encode_part", counting)
    monkeypatch.setattr(vocabulary, "_slices", {})
    for end in range(20_000, len(text), 3_000):
        encoded.clear()
        assert vocabulary.encode(text[:end]) == plain(text[:end])
        assert sum(encoded) <= (end if end == 20_000 else SLICE_CHARS + 3_000)
    assert len(text) > 10 * SLICE_CHARS


def test_token_that_is_not_spelt_in_bytes_is_its_own_text(vocabulary: Vocabulary) -> None:
    """Command R's file has a joiner as it is among tokens that are spelt byte by byte."""
    path = find_weights("smollm2")
    head = read_gguf(path)
    tokens, kinds = head["tokenizer.ggml.tokens"], head["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    head["tokenizer.ggml.tokens"] = [*map(str, tokens), "\u200d"]
    head["tokenizer.ggml.token_type"] = [*(one for one in kinds if isinstance(one, int)), 1]
    longer = vocabulary_from_metadata(head, path.name)
    assert longer.bytes_of(len(tokens)) == "\u200d".encode()


def test_word_that_is_too_long_is_encoded_in_parts() -> None:
    cut = ASCII_CUTS["smollm"]
    pieces = [*pieces_of("x " + "a" * 1_000 + " y", cut, 10, 40)]
    assert "".join(pieces) == "x " + "a" * 1_000 + " y"
    assert max(map(len, pieces)) <= 80


@pytest.mark.parametrize("text", ["über den Wolken\n", "😀", "\n", "\u200b\x01x\u200d", "слово "])
def test_long_text_that_is_not_ascii_has_the_ids_of_its_words(
    vocabulary: Vocabulary, text: str
) -> None:
    """Cut where words begin, nothing changes; without words, a few more ids, and the same text."""
    long = ("é" + text) * (200_000 // (1 + len(text)))
    ids, whole = vocabulary.encode(long), vocabulary._tokenize(vocabulary._spelt(long))

    assert [*ids] == [*whole] or " " not in text
    assert len(ids) <= len(whole) + 4 * (1 + len(long) // CUT_CHARS)
    spelt = b"".join(map(vocabulary.bytes_of, ids)).decode()
    assert spelt == vocabulary._spelt(long)


@pytest.mark.parametrize("text", ["a", " ", "word ", "é "], ids=["letters", "spaces", "words", "é"])
def test_long_text_is_encoded_while_other_threads_run(vocabulary: Vocabulary, text: str) -> None:
    """docs/inside/hazards.md F7: whoever sends megabytes must not hold the event loop up."""
    lags = []
    is_over = threading.Event()

    def beat() -> None:
        while not is_over.is_set():
            began = time.perf_counter()
            time.sleep(0.001)
            lags.append(time.perf_counter() - began)

    beating = threading.Thread(target=beat)
    beating.start()
    began = time.perf_counter()
    vocabulary.encode(text * (600_000 // len(text)))
    took = time.perf_counter() - began
    is_over.set()
    beating.join()
    # Held up by one long call, the other thread would have had one beat of that length.
    assert max(lags) < took * 0.8


def test_special_tokens_are_known_by_name_only(vocabulary: Vocabulary) -> None:
    ids = [vocabulary.special(text) for text in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")]

    assert ids == [0, 1, 2]
    assert all(vocabulary.bytes_of(id) == b"" for id in ids)
    typed = vocabulary.encode("<|endoftext|><|im_start|><|im_end|><filename>")
    assert special_ids(vocabulary).isdisjoint(typed)
    assert b"".join(map(vocabulary.bytes_of, typed)).endswith(b"<|im_end|><filename>")


def test_vocabulary_without_a_special_token_does_not_fit(vocabulary: Vocabulary) -> None:
    with pytest.raises(ServerFault, match=r"no <\|channel\|>"):
        vocabulary.special("<|channel|>")


def test_vocabulary_has_a_size_and_a_name_that_stay(vocabulary: Vocabulary) -> None:
    path = find_weights("smollm2")

    assert vocabulary.size == 49152
    assert vocabulary.fingerprint == vocabulary_from_gguf(path).fingerprint


# --- a tokenizer.json -----------------------------------------------------------------------------


def tokenizer(*specials: str) -> Tokenizer:
    letters = {letter: n for n, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}
    made = Tokenizer(models.BPE(letters | {"ab": len(letters)}, [("a", "b")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(list(specials))
    made.add_tokens(["<tool_call>"])
    return made


def test_tokenizer_json_is_read_from_file_or_folder(tmp_path: Path) -> None:
    tokenizer("<|im_end|>").save(str(tmp_path / "tokenizer.json"))

    for path in (tmp_path, tmp_path / "tokenizer.json"):
        read = vocabulary_from_file(path)
        typed = read.encode("ab é<|im_end|><tool_call>")
        assert b"".join(map(read.bytes_of, typed)).decode() == "ab é<|im_end|><tool_call>"
        assert read.special("<|im_end|>") not in typed
        assert len(typed) < len("ab é<|im_end|><tool_call>")


def test_another_vocabulary_has_another_name(tmp_path: Path) -> None:
    names = set()
    for n, specials in enumerate([("<|im_end|>",), ("<|end|>",), ()]):
        tokenizer(*specials).save(str(tmp_path / f"{n}.json"))
        names.add(vocabulary_from_file(tmp_path / f"{n}.json").fingerprint)

    assert len(names) == 3


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"pre_tokenizer":{"type":"ByteLevel"}}'])
def test_file_that_is_no_byte_level_tokenizer_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(data)

    with pytest.raises(ServerFault):
        vocabulary_from_file(path)


@settings(deadline=None, max_examples=200)
@given(text=st.text(st.characters(max_codepoint=127), max_size=60))
def test_pieces_of_ascii_text_that_are_looked_up_are_what_the_tokenizer_makes(
    vocabulary: Vocabulary, text: str
) -> None:
    """Against the same text made non-ASCII by a last character, which goes through the tokenizer as a whole."""
    whole = vocabulary.encode(text + "x\u20ac").tolist()
    looked_up = vocabulary.encode(text + "x").tolist()
    end = vocabulary.encode("\u20ac").tolist()
    assert looked_up + end == whole


def test_long_rows_of_ids_are_put_behind_each_other() -> None:
    ids = array("I", [1])
    for size in (0, 1, PIECE, 3 * PIECE + 1):
        more, expected = array("I", range(size)), ids[:]
        expected.extend(more)
        extend(ids, more)
        assert ids == expected
