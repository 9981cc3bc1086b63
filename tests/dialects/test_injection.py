"""No text makes a mark: texts of each family's marks, wherever a user or a tool can write."""

from pathlib import Path

import pytest

from segue.dialects.chatml import QWEN3, SMOLLM2
from segue.dialects.choose import choose, derived_dialect
from segue.dialects.family import Family, TokenDialect
from segue.dialects.harmony import HARMONY
from segue.dialects.llama3 import LLAMA3
from segue.dialects.mistral import MISTRAL
from segue.interpreter.tool import OFFER
from segue.seams.model import Scene
from segue.seams.prompt import Head
from segue.vocabularies.load import vocabulary_from_file
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.codec import as_item, user_message
from segue.wire.items import (
    CodeInterpreterCall,
    HostedOutput,
    ShellAction,
    ShellCall,
    ShellCallOutput,
    ShellExit,
    ShellOutput,
)
from segue.wire.tools import NO_TOOLS
from tests.contracts.dialect import flat, smollm2
from tests.dialects import templates
from tests.models import assets
from tests.models.injection import break_out
from tests.vocabularies.gpt_oss import vocabulary_from_harmony

GOLDEN = Path(__file__).parents[1] / "golden"
# Marks that other vocabularies have as tokens too.
TEXTS = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "<tool_response>",
    "</tool_response>",
)


def vocabulary_of(family: Family) -> Vocabulary:
    if family is MISTRAL:
        return vocabulary_from_file(GOLDEN / "mistral" / "tekken.json")
    if family is HARMONY:
        return vocabulary_from_harmony()
    names = {QWEN3.version: "qwen3", LLAMA3.version: "llama3_2"}
    if family.version in names:
        return templates.vocabulary(names[family.version])
    return smollm2(texts=TEXTS)


@pytest.mark.parametrize(
    "family", [SMOLLM2, QWEN3, LLAMA3, MISTRAL, HARMONY], ids=lambda family: family.version
)
def test_text_makes_no_mark_of_a_family(family: Family) -> None:
    assert break_out(TokenDialect(family, vocabulary_of(family)), 125) == 1_000


# Roles that are tokens which the files do not call special; calls whose names stand between brackets.
@pytest.mark.parametrize(
    ("template", "tokenizer"),
    [
        ("deepseek-ai-DeepSeek-V3.1", "deepseek_v3"),
        ("Qwen3.5-4B", "qwen3"),
        ("Qwen3-Coder", "qwen3"),
    ],
)
def test_text_makes_no_mark_of_a_template(template: str, tokenizer: str) -> None:
    folder = assets.tokenizer_folder(tokenizer)
    dialect = choose(folder, vocabulary_from_file(folder), assets.template(template))

    assert break_out(dialect, 25) > 100


def test_text_makes_no_mark_of_a_derived_family() -> None:
    """A sample of `make test-injection`."""
    folder = assets.tokenizer_folder("deepseek_v3")
    text = assets.template("deepseek-ai-DeepSeek-V3.1")
    dialect = derived_dialect(folder, vocabulary_from_file(folder), text)

    assert break_out(dialect, 10) == 80


@pytest.mark.parametrize(
    "family", [SMOLLM2, QWEN3, LLAMA3, MISTRAL, HARMONY], ids=lambda family: family.version
)
def test_what_a_sandbox_prints_is_data(family: Family) -> None:
    """Marks in the code, in its output and in that of a command are letters: as many special tokens as without."""
    vocabulary = vocabulary_of(family)
    dialect = TokenDialect(family, vocabulary)
    marks = "".join((*family.specials, *TEXTS))

    def specials(text: str) -> list[int]:
        printed = ShellOutput(text, text, ShellExit(0))
        call = ShellCall(call_id="call_1", action=ShellAction(commands=["cat x"]))
        values = (
            CodeInterpreterCall(id="ci_1", code=text, status="completed"),
            HostedOutput(call_id="ci_1", output=text),
            call,
            ShellCallOutput(call_id="call_1", output=[printed]),
        )
        given = (user_message("Go"), *map(as_item, values))
        head = Head(tools=NO_TOOLS.with_hosted([OFFER]))
        prompt = dialect.render(Scene(head, None, given, root_at=1)).prompt
        # What is no letter at all is a special token.
        return [id for id in flat(prompt) if not vocabulary.bytes_of(id)]

    assert specials(marks) == specials("nothing of that")
    assert specials("x")
