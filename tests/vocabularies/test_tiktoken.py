"""Kimi's files: words by rank, and the names of the other tokens beside them. Kimi's own file is in no package that the
tests could take it from, so one is written of the first words of GPT-4o's."""

import json
from base64 import b64encode
from pathlib import Path

import pytest
from tokenizers import Regex, pre_tokenizers

from segue.errors import ServerFault
from segue.vocabularies.load import vocabulary_from_file
from segue.vocabularies.vocabulary import BYTE_OF_LETTER, Own, Vocabulary
from tests.models import assets
from tests.vocabularies.test_cuts import texts

COUNT = 20_000
# As the model's own code has it.
WORD = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
PATTERN = "|".join(
    [
        r"[\p{Han}]+",
        rf"[^\r\n\p{{L}}\p{{N}}]?{WORD[0]}*{WORD[1]}+{SUFFIX}",
        rf"[^\r\n\p{{L}}\p{{N}}]?{WORD[0]}+{WORD[1]}*{SUFFIX}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
NAMED = {
    COUNT: ("[BOS]", True),
    COUNT + 2: ("<|im_end|>", True),
    COUNT + 11: ("<|tool_call_begin|>", False),
    COUNT + 22: ("<think>", False),
    COUNT + 255: ("[PAD]", True),
}


@pytest.fixture(scope="module")
def ranks() -> dict[bytes, int]:
    data = json.loads((assets.tokenizer_folder("gpt4o") / "tokenizer.json").read_text())
    words = sorted(data["model"]["vocab"].items(), key=lambda word: int(word[1]))[:COUNT]
    return {bytes(BYTE_OF_LETTER[letter] for letter in word): id for word, id in words}


@pytest.fixture(scope="module")
def folder(ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("kimi")
    lines = [f"{b64encode(word).decode()} {rank}\n" for word, rank in ranks.items()]
    (made / "tiktoken.model").write_text("".join(lines))
    decoder = {
        str(id): {"content": content, "special": special}
        for id, (content, special) in NAMED.items()
    }
    (made / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": decoder}))
    return made


@pytest.fixture(scope="module")
def vocabulary(folder: Path) -> Vocabulary:
    return vocabulary_from_file(folder)


def test_text_is_cut_and_merged_as_tiktoken_does(
    vocabulary: Vocabulary, ranks: dict[bytes, int]
) -> None:
    cut = pre_tokenizers.Split(Regex(PATTERN), behavior="isolated")
    for text in [*texts()[:500], "漢字かな漢字abc", "can't 漢's I'LL x漢y /\n//\n"]:
        pieces = [piece for piece, _ in cut.pre_tokenize_str(text)]
        wanted = [id for piece in pieces for id in merged(ranks, piece.encode())]
        assert vocabulary.encode(text).tolist() == wanted, text
        assert b"".join(map(vocabulary.bytes_of, wanted)).decode() == text


def merged(ranks: dict[bytes, int], word: bytes) -> list[int]:
    """The pair with the lowest rank first, as long as there is one."""
    parts = [bytes([byte]) for byte in word]
    while len(parts) > 1:
        pairs = [(ranks.get(parts[n] + parts[n + 1], COUNT), n) for n in range(len(parts) - 1)]
        rank, at = min(pairs)
        if rank == COUNT:
            break
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [ranks[part] for part in parts]


def test_tokens_beside_the_words_have_their_names(vocabulary: Vocabulary) -> None:
    assert vocabulary.size == COUNT + 256
    assert vocabulary.special("<|im_end|>") == COUNT + 2
    assert vocabulary.special(f"<|reserved_token_{COUNT + 1}|>") == COUNT + 1
    assert vocabulary.encode("<think>").tolist() == [COUNT + 22]
    protected = vocabulary.protecting("{% if <think> %}")
    typed = protected.encode("<think><|tool_call_begin|><|im_end|>")
    assert max(typed) < COUNT, "a mark is a mark by its form, or because the template has it"
    assert protected.ids(Own("<think><|tool_call_begin|>")).tolist() == [COUNT + 22, COUNT + 11]


@pytest.mark.parametrize("data", ["", "YQ==", "YQ== x", "YQ== 5", "%% 0"])
def test_file_that_cannot_be_read_is_refused(tmp_path: Path, data: str) -> None:
    (tmp_path / "tiktoken.model").write_text(data)
    (tmp_path / "tokenizer_config.json").write_text("{}")

    with pytest.raises(ServerFault):
        vocabulary_from_file(tmp_path)


def test_file_without_its_names_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "tiktoken.model").write_bytes((folder / "tiktoken.model").read_bytes())

    with pytest.raises(ServerFault, match="tokenizer_config"):
        vocabulary_from_file(tmp_path)
