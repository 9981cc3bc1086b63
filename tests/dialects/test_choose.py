"""A model is known by its own files."""

import json
import re
import shutil
from pathlib import Path

import pytest

from segue.dialects.chatml import PLAIN, QWEN2, QWEN2_CODER, QWEN3, SMOLLM2
from segue.dialects.choose import FAMILIES, choose, dialect_for
from segue.dialects.deepseek import TEMPLATES
from segue.dialects.family import Family
from segue.dialects.harmony import HARMONY
from segue.dialects.llama3 import LLAMA3
from segue.dialects.mistral import AROUND, MISTRAL
from segue.errors import Misconfigured, ServerFault
from segue.seams.model import Dialect, Scene
from segue.seams.prompt import Head
from segue.settings.values import DIALECTS
from segue.vocabularies.chat_template import template_in
from segue.vocabularies.gguf import read_gguf
from segue.vocabularies.load import (
    vocabulary_from_file,
    vocabulary_from_gguf,
    vocabulary_from_metadata,
)
from segue.wire.requests import Effort, ReasoningConfig
from segue_embedded.weights import find_weights
from tests.contracts.dialect import flat, message, smollm2
from tests.dialects import templates
from tests.dialects.test_template import CHATML

GOLDEN = Path(__file__).parents[1] / "golden"


def folder_with(path: Path, template: object, end: object = "<|im_end|>") -> Path:
    config = {"chat_template": template, "eos_token": end}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def is_written_by(dialect: Dialect, family: Family) -> bool:
    return dialect.fingerprint.startswith(f"{family.version}-")


def is_template(dialect: Dialect) -> bool:
    return dialect.fingerprint.startswith("template")


def test_smollm2_is_known_by_its_gguf() -> None:
    path = find_weights("smollm2")
    vocabulary = vocabulary_from_gguf(path)

    assert is_written_by(choose(path, vocabulary), SMOLLM2)


def test_qwen3_is_known_by_its_folder() -> None:
    vocabulary = templates.vocabulary("qwen3")

    dialect = choose(templates.folder("qwen3"), vocabulary)

    assert is_written_by(dialect, QWEN3)


def test_llama3_is_known_by_its_folder() -> None:
    dialect = choose(templates.folder("llama3_2"), templates.vocabulary("llama3_2"))

    assert is_written_by(dialect, LLAMA3)


# The format of Mistral's newer models in few words, with what it says where nobody instructs it.
MISTRAL_TEMPLATE = (
    "{{- bos_token }}"
    "{%- if messages[0].role == 'system' %}{{- '[SYSTEM_PROMPT]' + messages[0].content + '[/SYSTEM_PROMPT]' }}"
    "{%- else %}{{- DEFAULT }}{%- endif %}"
    "{%- if tools %}{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}{%- endif %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'user' %}{{- '[INST]' + m.content + '[/INST]' }}"
    "{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}"
    "{%- elif m.role == 'assistant' %}{{- m.content }}"
    "{%- for c in m.tool_calls or [] %}"
    "{{- '[TOOL_CALLS]' + c.function.name + '[ARGS]' + (c.function.arguments | tojson) }}"
    "{%- endfor %}{{- eos_token }}{%- endif %}"
    "{%- endfor %}"
)
SYSTEM = "[SYSTEM_PROMPT]Be [THINK]kind[/THINK].[/SYSTEM_PROMPT]"


def mistral_in(path: Path, template: str | None = None) -> Path:
    """A folder with Mistral's own vocabulary, and this template if any."""
    shutil.copy(GOLDEN / "mistral" / "tekken.json", path)
    if template is not None:
        config = {"chat_template": template, "bos_token": "<s>", "eos_token": "</s>"}
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("template", [None, MISTRAL_TEMPLATE.replace("DEFAULT", "''")])
def test_mistral_is_known_by_its_tokens_and_its_template(
    tmp_path: Path, template: str | None
) -> None:
    path = mistral_in(tmp_path, template)

    assert is_written_by(choose(path, vocabulary_from_file(path)), MISTRAL)


def test_mistral_says_what_its_template_says_where_nobody_instructs_it(tmp_path: Path) -> None:
    path = mistral_in(tmp_path, MISTRAL_TEMPLATE.replace("DEFAULT", f"'{SYSTEM}'"))
    vocabulary = vocabulary_from_file(path)

    dialect = choose(path, vocabulary)

    assert is_written_by(dialect, MISTRAL)
    for head, system in ((Head(), "Be [THINK]kind[/THINK]."), (Head(instructions="So."), "So.")):
        prompt = flat(dialect.render(Scene(head, None, (message("user", "Hi"),))).prompt)
        marks = ["<s>", *(mark for kind in ("system", "user", "think") for mark in AROUND[kind])]
        expected = f"<s>[SYSTEM_PROMPT]{system}[/SYSTEM_PROMPT][INST]Hi[/INST]"
        assert prompt.tolist() == templates.encoded_whole(vocabulary, expected, marks)


def test_mistral_of_an_older_format_without_a_template_is_refused(tmp_path: Path) -> None:
    file = mistral_in(tmp_path) / "tekken.json"
    file.write_text(file.read_text().replace('"v13"', '"v11"'))

    with pytest.raises(ServerFault, match="--dialect"):
        choose(tmp_path, vocabulary_from_file(tmp_path))


def test_mistral_with_another_template_is_run_by_it(tmp_path: Path) -> None:
    path = mistral_in(
        tmp_path, MISTRAL_TEMPLATE.replace("DEFAULT", "''").replace("'[INST]'", "'[INST] '")
    )

    assert is_template(choose(path, vocabulary_from_file(path)))


def test_qwen2_is_known_by_its_template(tmp_path: Path) -> None:
    """The instruct models' template, and the coder models', which doubles two braces."""
    coder = (GOLDEN / "qwen2.5-coder.jinja").read_text()
    instruct = coder.replace('{{\\"name', '{\\"name').replace("object>}}", "object>}")
    vocabulary = smollm2()

    assert is_written_by(choose(folder_with(tmp_path, instruct), vocabulary), QWEN2)
    assert is_written_by(choose(folder_with(tmp_path, coder), vocabulary), QWEN2_CODER)


def test_gpt_oss_is_known_by_its_special_tokens(tmp_path: Path) -> None:
    assert is_written_by(choose(tmp_path, smollm2(*HARMONY.specials)), HARMONY)


def test_template_that_no_family_writes_is_run(tmp_path: Path) -> None:
    odd = CHATML.replace("{{ m.role }}\n", "{{ m.role }}:")

    assert is_template(choose(folder_with(tmp_path, odd), smollm2()))


def test_several_templates_give_the_one_with_tools(tmp_path: Path) -> None:
    both = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    found = template_in(folder_with(tmp_path, both, {"content": "<|im_end|>"}))

    assert found is not None
    assert (found.text, found.end) == ("b", "<|im_end|>")


def test_template_in_a_file_of_its_own_is_found(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text(CHATML)

    found = template_in(tmp_path / "tokenizer.json")

    assert found is not None
    assert found.text == CHATML


def test_model_without_a_template_is_believed_by_its_tokens(tmp_path: Path) -> None:
    assert is_written_by(choose(tmp_path, smollm2()), PLAIN)


def test_model_that_says_nothing_is_refused(tmp_path: Path) -> None:
    path = find_weights("smollm2")
    head = read_gguf(path)
    tokens = head["tokenizer.ggml.tokens"]
    assert isinstance(tokens, list)
    head["tokenizer.ggml.tokens"] = [str(one).replace("<|im_", "<|odd_") for one in tokens]
    bare = vocabulary_from_metadata(head, "odd")

    with pytest.raises(ServerFault, match="--dialect"):
        choose(tmp_path, bare)


def test_file_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    (tmp_path / "tokenizer_config.json").write_text("{")

    with pytest.raises(ServerFault):
        choose(tmp_path, smollm2())


def test_every_name_of_the_settings_is_a_dialect() -> None:
    """Three names are no family: they look at the model's own files. Templates of ours are run like any other."""
    assert {"auto", "template", "derived", *(family.name for family in FAMILIES), *TEMPLATES} == {
        *DIALECTS
    }


def test_dialect_is_called_as_the_flag_calls_it(tmp_path: Path) -> None:
    path = find_weights("smollm2")
    names = ["chatml", "smollm2", "qwen2", "qwen3", "template"]

    assert [dialect_for(name, path, smollm2()).name for name in names] == names
    assert dialect_for("auto", path, smollm2()).name == "smollm2"


def test_every_dialect_of_the_matrix_has_a_name_of_the_flag() -> None:
    page = (Path(__file__).parents[2] / "docs" / "inside" / "families.md").read_text()
    matrix = page.partition("<!-- matrix -->")[2].partition("<!-- end -->")[0]
    rows = re.findall(r"^\|[^|]+\|[^|]+\| ([\w.-]+) \|", matrix, re.MULTILINE)

    assert {"template", "llama3"} <= {*rows} - {"dialect", "---"} <= {*DIALECTS}


def test_every_name_is_a_dialect_on_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs" / "dialects.md").read_text()
    rows = re.findall(r"^\| `([\w.-]+)` \|", page.partition("## How")[0], re.MULTILINE)

    assert rows == [name for name in DIALECTS if name != "auto"]


def test_name_alone_means_the_first_variant() -> None:
    path = find_weights("smollm2")
    vocabulary = vocabulary_from_gguf(path)

    assert is_written_by(dialect_for("qwen2", path, vocabulary), QWEN2)
    assert is_template(dialect_for("template", path, vocabulary))


def test_model_without_a_template_cannot_be_run_by_it(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="no chat template"):
        dialect_for("template", tmp_path, smollm2())


def test_operator_replaces_the_template_and_tells_it_values(tmp_path: Path) -> None:
    path = folder_with(tmp_path, CHATML)
    told = CHATML.replace("assistant\n{% endif", "assistant {{ mode }}\n{% endif")

    dialect = dialect_for("auto", path, smollm2(), told, {"mode": "calm"})

    assert is_written_by(dialect_for("auto", path, smollm2()), PLAIN)
    cue = dialect.render(Scene(Head(), None, (message("user", "Hi"),))).cue
    assert b"".join(map(smollm2().bytes_of, cue)) == b"assistant calm\n"
    with pytest.raises(Misconfigured, match="runs no template"):
        dialect_for("qwen2", path, smollm2(), told)


@pytest.mark.parametrize(
    "values, effort, cue",
    [
        ({}, None, b"assistant\n"),
        ({}, "none", b"assistant\n<think>\n\n</think>\n\n"),
        ({"enable_thinking": False}, None, b"assistant\n<think>\n\n</think>\n\n"),
        ({"enable_thinking": False}, "high", b"assistant\n"),
    ],
)
def test_effort_of_a_request_wins_over_the_operators_values(
    values: dict[str, object], effort: Effort | None, cue: bytes
) -> None:
    vocabulary = templates.vocabulary("qwen3")
    dialect = dialect_for("template", templates.folder("qwen3"), vocabulary, values=values)
    head = Head(reasoning=ReasoningConfig(effort=effort))

    rendered = dialect.render(Scene(head, None, (message("user", "Hi"),)))

    assert b"".join(map(vocabulary.bytes_of, rendered.cue)) == cue
