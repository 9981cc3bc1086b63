"""Text never becomes an added token that the model's chat template writes, whatever flags the token has."""

import pytest

from segue.vocabularies.load import vocabulary_from_file
from segue.vocabularies.vocabulary import Mark, Own, Vocabulary
from tests.contracts.dialect import smollm2
from tests.dialects import templates

WORDS = "{{ '<tool_call>\n' }}{{ '</tool_call>' }}{{ '<think>' }}"
MARKS = ("<tool_call>", "</tool_call>", "<think>")


@pytest.fixture(scope="module", params=["tokenizer.json", "GGUF"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    if request.param == "GGUF":
        return smollm2("<|special|>", texts=(*MARKS, "<b>", "\n\n\n\n\n"))
    return vocabulary_from_file(templates.folder("qwen3"))


def spelt(vocabulary: Vocabulary, ids: list[int]) -> str:
    return b"".join(map(vocabulary.bytes_of, ids)).decode()


def test_text_is_spelt_and_own_words_have_the_token(vocabulary: Vocabulary) -> None:
    protected = vocabulary.protecting(WORDS)
    for mark in MARKS:
        id = protected.special(mark)
        text = f"a {mark}{mark} b\n{mark[:4]}{mark}"
        assert vocabulary.encode(mark).tolist() == [id]
        assert id not in protected.encode(text)
        assert spelt(protected, protected.encode(text).tolist()) == text
        assert protected.ids(Own(mark)).tolist() == protected.ids(Mark(mark)).tolist() == [id]
        assert protected.bytes_of(id) == mark.encode(), "readers need its text"


def test_own_words_and_text_are_encoded_as_the_template_would_be(vocabulary: Vocabulary) -> None:
    protected = vocabulary.protecting(WORDS)
    chunks = ("user\n", " Hi\n", Own("\n<tool_call>\n"), '{"a": 1}', Own("\n</tool_call>"), "\n")
    whole = "".join(chunk if isinstance(chunk, str) else chunk.text for chunk in chunks)

    assert protected.ids(*chunks) == vocabulary.encode(whole)


def test_what_the_template_does_not_write_stays_a_token(vocabulary: Vocabulary) -> None:
    """Tags of HTML and runs of white space are how a model reads text, and no marks."""
    protected = vocabulary.protecting(WORDS + "\n\n\n\n\n")
    text = "<b>bold</b>\n\n\n\n\nx" + " <file_sep>"

    assert protected.encode(text) == vocabulary.encode(text)


def test_protection_changes_what_ids_mean_and_nothing_else_does(vocabulary: Vocabulary) -> None:
    protected = vocabulary.protecting(WORDS)

    assert protected.fingerprint != vocabulary.fingerprint
    assert protected.protecting(WORDS) is protected
    assert protected.protecting("<tool_call>") is protected


def test_mark_by_its_form_is_protected_where_the_template_puts_it_together() -> None:
    marks = ("<|user|>", "<think:fast>", "</tool_sep>", "[TOOL_CALLS]", "<｜User｜>")
    others = ("<b>", "</table>", "<h1>", "[x]", "::")
    vocabulary = smollm2(texts=(*marks, *others))
    protected = vocabulary.protecting("'<|' + role + '|>'")

    assert protected.specials - vocabulary.specials == {*marks}


def test_id_beyond_the_tokenizer_is_an_empty_token(vocabulary: Vocabulary) -> None:
    """Engines pad their tables, and may sample what is there."""
    assert vocabulary.bytes_of(vocabulary.size) == vocabulary.bytes_of(1 << 30) == b""
