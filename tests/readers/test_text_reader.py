"""What small models write where a call is meant, and what only looks like one."""

import pytest

from segue.dialects.chatml import PLAIN, SMOLLM2
from segue.dialects.family import TokenDialect
from segue.seams.model import Ids, ItemText, Scene
from segue.seams.prompt import Head
from segue.vocabularies.vocabulary import Vocabulary
from tests.contracts.dialect import OFFERING, Heard, heard, read, smollm2

CALL = '{"name": "look", "arguments": {"q": "<b>"}}'
FOUND = Heard("function", '{"q": "<b>"}', "look")
BARE = Scene(Head(), None, ())


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return smollm2()


@pytest.fixture(scope="module")
def dialect(vocabulary: Vocabulary) -> TokenDialect:
    return TokenDialect(SMOLLM2, vocabulary)


def parsed(text: str) -> Heard:
    return Heard("message", text)


# (what the model writes, what is heard)
STORIES: list[tuple[str, list[Heard]]] = [
    # An object as the whole answer, or several.
    (CALL, [FOUND]),
    (f"{CALL}; {CALL}", [FOUND, FOUND]),
    (f"{CALL}\n{CALL}", [FOUND, FOUND]),
    (CALL.replace("arguments", "parameters"), [FOUND]),
    ('{"type": "function", ' + CALL[1:], [FOUND]),
    ('{"type": "function", "function": ' + CALL + "}", [FOUND]),
    ("<think>\nHm.\n</think>\n\n" + CALL, [Heard("reasoning", "Hm."), FOUND]),
    # In a fence.
    (f"```json\n{CALL}\n```", [FOUND]),
    (f"```\n{CALL}\n```\n", [FOUND]),
    (f"```json\n{CALL}\n{CALL}\n```", [FOUND, FOUND]),
    (f"```json\n{CALL}", [FOUND]),
    (f"```json\n{CALL[:-1]}\n```", [FOUND]),
    # Not calls: given back as they were. Something else is said, too.
    (f"{CALL}\n\nSo.", [parsed(f"{CALL}\n\nSo.")]),
    (f"I look:\n```json\n{CALL}\n```", [parsed(f"I look:\n```json\n{CALL}\n```")]),
    (f"```\n{CALL}\n```\nSo.", [parsed(f"```\n{CALL}\n```\nSo.")]),
    (
        f"```json\n{CALL}\n``` is in the README.",
        [parsed(f"```json\n{CALL}\n``` is in the README.")],
    ),
    (CALL.replace("look", "other"), [parsed(CALL.replace("look", "other"))]),
    (f"So: {CALL}", [parsed(f"So: {CALL}")]),
    ('{"answer": 1}', [parsed('{"answer": 1}')]),
    ('{"name": "Ada"}', [parsed('{"name": "Ada"}')]),
    ('{"name": "lo', [parsed('{"name": "lo')]),
    ("{1, 2}", [parsed("{1, 2}")]),
    ("```python\nx = {}\n```", [parsed("```python\nx = {}\n```")]),
    ('```json\n{"a": 1}\n```', [parsed('```json\n{"a": 1}\n```')]),
    ("a `b` ``", [parsed("a `b` ``")]),
]


@pytest.mark.parametrize("text, expected", STORIES)
def test_answer_is_heard(
    vocabulary: Vocabulary, dialect: TokenDialect, text: str, expected: list[Heard]
) -> None:
    ids = vocabulary.encode(text)

    assert heard(read(dialect, OFFERING, [ids])) == expected
    assert heard(read(dialect, OFFERING, [[id] for id in ids])) == expected


@pytest.mark.parametrize("text", [CALL, f"```json\n{CALL}\n```"])
def test_json_is_text_where_no_tools_are_offered(
    vocabulary: Vocabulary, dialect: TokenDialect, text: str
) -> None:
    assert heard(read(dialect, BARE, [vocabulary.encode(text)])) == [parsed(text)]


QUOTED = f"So:\n```\n<tool_call>\n{CALL}\n</tool_call>\n```\n"


@pytest.mark.parametrize(
    "text, expected",
    [
        (QUOTED, [parsed(QUOTED)]),
        (f"{QUOTED}<tool_call>\n{CALL}\n</tool_call>", [parsed(QUOTED.rstrip()), FOUND]),
        (f"a `b` <tool_call>\n{CALL}\n</tool_call>", [parsed("a `b` "), FOUND]),
    ],
)
def test_call_in_a_fence_is_a_quotation(
    vocabulary: Vocabulary, dialect: TokenDialect, text: str, expected: list[Heard]
) -> None:
    ids = vocabulary.encode(text)

    assert heard(read(dialect, OFFERING, [ids])) == expected
    assert heard(read(dialect, OFFERING, [[id] for id in ids])) == expected


@pytest.mark.parametrize("text", [f"<tool_call>\n{CALL}\n</tool_call>", f"```\n{CALL}\n```"])
def test_no_mark_makes_a_call_where_no_tools_are_offered(
    vocabulary: Vocabulary, dialect: TokenDialect, text: str
) -> None:
    assert heard(read(dialect, BARE, [vocabulary.encode(text)])) == [parsed(text)]


@pytest.mark.parametrize("text", [CALL, f"```json\n{CALL}\n```"])
def test_family_that_writes_its_marks_is_not_guessed_at(vocabulary: Vocabulary, text: str) -> None:
    ids = vocabulary.encode(text)

    assert heard(read(TokenDialect(PLAIN, vocabulary), OFFERING, [ids])) == [parsed(text)]


def test_object_that_is_no_call_is_not_held_back(
    vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    """Its first key tells."""
    reader = dialect.reader(OFFERING)

    found = reader.feed(Ids(vocabulary.encode('{"answer": [1, 2')))

    told = "".join(one.text for one in found if isinstance(one, ItemText))
    assert told == '{"answer": [1, 2'
