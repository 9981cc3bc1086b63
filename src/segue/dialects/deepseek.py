"""How do DeepSeek V3.2 and V4 write? Their repositories have no chat template, so these are ours.

They say what the makers' own programs for these models do (`encoding_dsv32.py`, `encoding_dsv4.py`): the same words and
marks, as Jinja, for the conversations that `template_messages.py` makes. `template.py` runs them as any other template.

V3.2 forgets its thoughts when the user speaks again. V4 does so only where there are no tools; to it an output of a
tool is something that the user says. The answer of a model that is not to think begins with the end of a thought.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import msgspec

from segue.dialects.family import TokenDialect
from segue.dialects.template import template_dialect
from segue.vocabularies.chat_template import decoded, template_in
from segue.vocabularies.vocabulary import Mark, Vocabulary

# What a vocabulary must have.
ROLES = ("<｜User｜>", "<｜Assistant｜>")
# By `model_type` in the model's `config.json`, the names that the settings have for them.
NAMES = {"deepseek_v32": "deepseek-v3.2", "deepseek_v4": "deepseek-v4"}
JINJA = files("segue.dialects") / "jinja"
TEMPLATES = {name: (JINJA / f"{name}.jinja").read_text("utf-8") for name in NAMES.values()}


class _Config(msgspec.Struct):
    model_type: str = ""


def name_of(path: Path) -> str | None:
    """Which of them the model with this tokenizer is, by the `config.json` beside it."""
    folder = path if path.is_dir() else path.parent
    return NAMES.get(decoded(folder / "config.json", _Config).model_type)


def deepseek_dialect(
    name: str, path: Path, vocabulary: Vocabulary, values: Mapping[str, object]
) -> TokenDialect:
    """The dialect with this name; refused if the vocabulary is of another family."""
    template = template_in(path, TEMPLATES[name], values)
    assert template is not None
    vocabulary.protecting(template.text).ids(*map(Mark, ROLES))
    return template_dialect(vocabulary, template, name)
