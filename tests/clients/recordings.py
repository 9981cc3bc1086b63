"""What real clients send, as `record.py` has recorded it: read from `tests/golden/wires`.

A recording is the requests of one run in their order, and what was answered to each. The texts of other people
(prompts, descriptions of tools, reminders) are not in it: a line of such a text is a mark with a number and a length,
and is read as filler of that length. The same line is the same filler wherever it stands, so sizes and sameness are
those of the client. What is sent several times stands once in the file, in `values`, and elsewhere as its number there.
"""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "golden" / "wires"
HEADS = ("tools", "system")
MARK = re.compile(r"§([0-9a-f]{8})\.(\d+)§")
PROSE = "of all the words that we know some are short and few are long but each of them will do its work here as well"
WORDS = tuple(PROSE.split())


@dataclass(frozen=True)
class Exchange:
    """A request of a client, and the turn of the model that answered it, in the words of a script."""

    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    turn: dict[str, Any] | None


def recordings() -> list[str]:
    """The names of all of them."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def read_recording(name: str) -> list[Exchange]:
    """The exchanges of a recording, with filler in the place of marks."""
    recorded = json.loads((FOLDER / f"{name}.json").read_text())
    values = filled(recorded["values"])
    exchanges = [Exchange(**filled(exchange)) for exchange in recorded["exchanges"]]
    for exchange in exchanges:
        body = exchange.body
        body["messages"] = [values[number] for number in body["messages"]]
        body |= {key: values[body[key]] for key in HEADS if key in body}
    return exchanges


def filled(value: Any) -> Any:
    """A recorded value with filler in the place of marks."""
    if isinstance(value, str):
        return MARK.sub(lambda found: filler(found[1], int(found[2])), value)
    if isinstance(value, list):
        return [filled(each) for each in value]
    if isinstance(value, dict):
        return {key: filled(each) for key, each in value.items()}
    return value


def filler(seed: str, length: int) -> str:
    """Words that look like prose, always the same for a seed and a length."""
    chance = random.Random(seed)
    words = ""
    while len(words) < length:
        words += chance.choice(WORDS) + " "
    return words[: length - 1] + "." if length else ""


def write_recording(name: str, client: str, exchanges: list[dict[str, Any]]) -> None:
    """Write a file that `read_recording` reads."""
    values: dict[str, int] = {}

    def number(value: Any) -> int:
        return values.setdefault(json.dumps(value, ensure_ascii=False), len(values))

    for exchange in exchanges:
        body = exchange["body"]
        body["messages"] = [number(message) for message in body["messages"]]
        body |= {key: number(body[key]) for key in HEADS if key in body}
    rows = [json.dumps(exchange, ensure_ascii=False) for exchange in exchanges]
    lists = {"values": ",\n".join(values), "exchanges": ",\n".join(rows)}
    text = "".join(f',\n"{key}": [\n{rows}\n]' for key, rows in lists.items())
    FOLDER.mkdir(exist_ok=True)
    (FOLDER / f"{name}.json").write_text(f'{{"client": {json.dumps(client)}{text}}}\n')


# --- what is recorded --------------------------------------------------------------------------------

# What names things or is our own, and stays as it is.
KEPT_KEYS = {
    "type",
    "role",
    "id",
    "tool_use_id",
    "tool_call_id",
    "name",
    "tool_name",
    "model",
    "media_type",
    "data",
}
KEPT_KEYS |= {"$schema", "input", "arguments", "stop_reason", "finish_reason"}
KEPT_LINES = ("x-anthropic-billing-header:", "<total_tokens>")
SHORT = 32
KEPT_HEADERS = ("anthropic-version", "anthropic-beta", "user-agent", "x-app")


def marked(value: Any, ours: frozenset[str], key: str = "") -> Any:
    """A value as it is recorded: lines of other people's texts are marks."""
    if isinstance(value, list):
        return [marked(each, ours, key if isinstance(each, str) else "") for each in value]
    if isinstance(value, dict):
        # A schema has properties of any name.
        if key == "properties":
            return {name: marked(each, ours) for name, each in value.items()}
        return {
            name: each if name in KEPT_KEYS and not is_schema(each) else marked(each, ours, name)
            for name, each in value.items()
        }
    if not isinstance(value, str) or len(value) <= SHORT or value in ours:
        return value
    if key == "user_id":
        return '{"device_id":"1","account_uuid":"","session_id":"2"}'
    return "\n".join(_line(line) for line in value.split("\n"))


def is_schema(value: Any) -> bool:
    """Whether this is the schema of a property that happens to have one of the kept names."""
    return isinstance(value, dict) and bool(
        {"description", "properties", "items", "anyOf"} & {*value}
    )


def _line(line: str) -> str:
    if len(line) < 4 or line.startswith(KEPT_LINES):
        return line
    return f"§{hashlib.sha256(line.encode()).hexdigest()[:8]}.{len(line)}§"
