"""`segue models derive` and `segue doctor --family`: how a model writes, printed and written to a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue.derivation.family import from_toml
from segue_cli.cli import main
from tests.models.families import model_folder

# A template whose calls begin with plain words.
WORDS_ONLY = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}{{ '\\nAction: ' + c.function.name + c.function.arguments | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""


def test_file_is_written_that_the_server_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, file = str(model_folder("Qwen3.5")), tmp_path / "new.toml"

    assert main(["models", "derive", folder, "-o", str(file)]) == 0

    printed = capsys.readouterr().out
    assert f"--dialect {file}" in printed
    assert "calls: proven, thoughts: proven" in printed
    family = from_toml(file.read_text(), file.name)
    assert family.calls is not None
    assert family.calls.header == "<tool_call>\n<function=%name%>\n"
    words = ["doctor", "--family", "--engine", "scripted", "--tokenizer", folder]
    assert main([*words, "--dialect", str(file)]) == 0
    assert "# calls: proven, thoughts: proven" in capsys.readouterr().out


def test_calls_that_are_not_read_are_said_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    template = tmp_path / "words.jinja"
    template.write_text(WORDS_ONLY)

    status = main(["models", "derive", str(model_folder("Qwen3.5")), "--template", str(template)])

    assert status == 1
    printed = capsys.readouterr().out
    assert "calls: not read" in printed
    assert "begin without a mark" in printed


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["nothing-here"], "neither a GGUF file nor one of"),
        (["smollm2", "-o", "new.yaml"], "has to end in .toml"),
        (["smollm2", "--template", "nothing.jinja"], "nothing.jinja cannot be read"),
    ],
)
def test_what_cannot_be_derived_is_said(
    words: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "derive", *words]) == 2
    assert why in capsys.readouterr().err
