"""Which models can be downloaded, which are here, and how do they come and go? `segue models`."""

from __future__ import annotations

import argparse

import msgspec
from rich.console import Console
from rich.table import Table

from segue.printable import cell, say
from segue.vocabularies.gguf import read_gguf, trained_tokens
from segue_cli.commands.family import add_derive, derive
from segue_embedded.weights import (
    add_with_bar,
    find_weights,
    found_weights,
    list_weights,
    remove_weights,
    weights_bytes,
)

NAME = "such as smollm2, qwen2.5-coder-1.5b or hf:OWNER/NAME"
ABOUT = {
    "list": "list the models that can be downloaded by name, and those that are here",
    "add": "download a model and verify it",
    "show": "show size, licence, context and path of a model",
    "remove": "delete a downloaded model",
    "derive": "work out from a chat template how a model writes, prove it, and write that to a file",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `segue models`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for action, about in ABOUT.items():
        verb = actions.add_parser(action, help=about, description=about)
        if action == "derive":
            add_derive(verb)
        elif action != "list":
            file = (
                ", ollama:NAME, lmstudio:NAME, or the path of a GGUF file"
                if action == "show"
                else ""
            )
            verb.add_argument("name", metavar="NAME", help=NAME + file)
        if action in ("list", "show"):
            verb.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Do what was asked; returns the exit status."""
    match options.action:
        case "add":
            say(f"{options.name} is ready: {add_with_bar(options.name)}")
        case "derive":
            return derive(options)
        case "remove":
            say("\n".join(f"removed {path}" for path in remove_weights(options.name)))
        case "show":
            facts = show_model(options.name)
            text = "\n".join(
                f"{name.replace('_', ' '):<18} {_shown(name, value)}"
                for name, value in facts.items()
            )
            say(_json(facts) if options.json else text)
        case _:
            _list(options.json)
    return 0


def show_model(name: str) -> dict[str, object]:
    """What is known of a model: of a known one its row, and of a file what its head says."""
    row = next((one for one in list_weights() if one.name == name), None)
    path = row.path if row else find_weights(name)
    facts: dict[str, object] = msgspec.structs.asdict(row) if row else {"name": name, "path": path}
    if path is not None:
        head = read_gguf(path)
        facts |= {
            "bytes": weights_bytes(path),
            "architecture": head.get("general.architecture"),
            "title": head.get("general.name"),
            "context_tokens": trained_tokens(head),
            "has_chat_template": "tokenizer.chat_template" in head,
        }
    return facts


def _list(as_json: bool) -> None:
    models = [*list_weights(), *found_weights()]
    if as_json:
        say(_json(models))
        return
    table = Table("name", "download", "memory", "here", "about", box=None)
    for one in models:
        here = "yes" if one.path else "-"
        sizes = (_size(one.bytes), _size(one.memory_bytes))
        table.add_row(cell(one.name), *sizes, here, cell(one.about))
    Console().print(table)


def _json(value: object) -> str:
    return msgspec.json.encode(value, enc_hook=str).decode()


def _shown(name: str, value: object) -> str:
    if isinstance(value, int) and name.endswith("bytes"):
        return f"{value:,} ({_size(value)})"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str("not on this machine" if value is None and name == "path" else value)


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
