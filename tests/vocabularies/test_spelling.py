"""Vocabularies in SentencePiece's spelling: a letter for the space, a token for each byte of what has no token."""

import random
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

from segue.errors import ServerFault
from segue.vocabularies.load import (
    load_vocabulary,
    vocabulary_from_file,
    vocabulary_from_gguf,
)
from segue.vocabularies.vocabulary import Own, Vocabulary
from tests.models import assets
from tests.vocabularies.test_cuts import texts

# Every kind of cut that llama.cpp has a vocabulary for, those of the same kind once.
GGUFS = (
    "deepseek-coder", "deepseek-llm", "falcon", "gemma-4", "gpt-2", "llama-spm", "mpt", "phi-3", "qwen35", "refact",
    "starcoder",
)  # fmt: skip
MORE = [
    "<0x0A>",
    "\x00\x1b",
    "\u2581",
    "<b>bold</b>",
    "👩‍👩‍👧",
    "\U00013000",
    "<start_of_turn>",
    "</s>",
]


@pytest.mark.parametrize("name", GGUFS)
def test_gguf_has_the_ids_that_llamacpp_gives(name: str) -> None:
    path = assets.vocabulary_gguf(name)
    vocabulary = vocabulary_from_gguf(path)
    given = Path(f"{path}.inp").read_text().split("\n__ggml_vocab_test__\n")
    wanted = Path(f"{path}.out").read_text().split("\n")

    for text, ids in zip(given, wanted, strict=False):
        found = vocabulary.encode(text).tolist()
        assert found == [*map(int, ids.split())], text
        # Where words begin with a space, so does the first.
        assert spelt(vocabulary, found) in (text, f" {text}")


def test_gguf_is_known_by_its_first_letters_where_its_name_says_nothing(tmp_path: Path) -> None:
    """Ollama's blobs are named after their sum."""
    blob = tmp_path / "sha256-12"
    blob.write_bytes(assets.vocabulary_gguf("gpt-2").read_bytes())
    assert load_vocabulary(blob).encode("a").tolist() == [64]


def test_gguf_of_another_kind_is_refused_in_words() -> None:
    with pytest.raises(ServerFault, match=r"bert-bge.gguf has a vocabulary of an unknown kind"):
        vocabulary_from_gguf(assets.vocabulary_gguf("bert-bge"))


@pytest.fixture(scope="module")
def gemma() -> Vocabulary:
    return vocabulary_from_file(assets.tokenizer_folder("gemma3"))


def test_bytes_of_the_ids_are_the_text(gemma: Vocabulary) -> None:
    for text in [*texts()[:500], *MORE, "a" * 3_000 + "\n" * 70]:
        assert spelt(gemma, gemma.encode(text).tolist()) == text.replace("\u2581", " ")


def test_letters_of_several_tokens_come_as_their_bytes(gemma: Vocabulary) -> None:
    ids = gemma.encode("\U00013000").tolist()

    assert [gemma.bytes_of(id) for id in ids] == [bytes([byte]) for byte in "\U00013000".encode()]
    assert gemma.encode("\ud800") == gemma.encode("\ufffd"), "half of a pair is no text"


def test_text_that_reads_like_a_token_is_spelt(gemma: Vocabulary) -> None:
    protected = gemma.protecting("<start_of_turn>")
    typed = "<start_of_turn>user\n<0x0A><bos>"

    ids = protected.encode(typed).tolist()
    assert not {protected.special(text) for text in protected.specials}.intersection(ids)
    assert all(len(protected.bytes_of(id)) > 0 for id in ids)
    assert spelt(protected, ids) == typed
    assert protected.ids(Own(typed)).tolist()[0] == protected.special("<start_of_turn>")


def sentencepiece(prepend: str) -> Tokenizer:
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = ["<unk>", *bytes_, "\u2581", "a", "b", "\u2581a", "ab", "\u2581ab"]
    merges = [("\u2581", "a"), ("a", "b"), ("\u2581a", "b")]
    vocab = {word: id for id, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>"))
    if prepend == "normalizer":
        steps = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        made.normalizer = normalizers.Sequence(steps)
    else:
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend, split=False)
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<s>", "[INST]"])
    return made


@pytest.mark.parametrize("prepend", ["normalizer", "first", "always", "never"])
def test_prompt_is_cut_as_the_whole_text_would_be(tmp_path: Path, prepend: str) -> None:
    """Some vocabularies put a space before each text, some only before the very first."""
    made = sentencepiece(prepend)
    made.save(str(tmp_path / "tokenizer.json"))
    vocabulary = vocabulary_from_file(tmp_path)
    rng = random.Random(7)
    for _ in range(100):
        parts = [
            "".join(rng.choices(["ab", "a", " ", "é", "b"], k=rng.randint(1, 6))) for _ in "12"
        ]
        whole = f"<s>[INST]{parts[0]}[INST]{parts[1]}"

        assert vocabulary.ids(Own(whole)).tolist() == made.encode(whole).ids


@pytest.mark.parametrize(
    "model",
    [
        '{"type": "Unigram", "vocab": [["a", 0.5]]}',
        '{"type": "WordPiece", "vocab": {"a": 0}}',
        '{"type": "BPE", "vocab": {"a": 0}, "merges": []}',
        '{"type": "BPE", "vocab": {"a": 0}, "merges": [], "byte_fallback": true}',
    ],
)
def test_other_spellings_are_refused(tmp_path: Path, model: str) -> None:
    (tmp_path / "tokenizer.json").write_text(f'{{"model": {model}}}')

    with pytest.raises(ServerFault, match="vocabulary"):
        vocabulary_from_file(tmp_path)


def spelt(vocabulary: Vocabulary, ids: list[int]) -> str:
    return b"".join(map(vocabulary.bytes_of, ids)).decode()
