"""How does Codex learn of this server? A change to its `config.toml`, shown before it is made.

In: the text of the file, a server and a model. Out: the text with Segue as the provider. Other keys are not touched, a
value that is replaced stays as a comment, and the file is copied first. A file that cannot be edited safely is left
alone.
"""

from __future__ import annotations

import difflib
import os
import shutil
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

import tomlkit
from tomlkit import TOMLDocument
from tomlkit.container import OutOfOrderTableProxy
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Item, Table

from segue.errors import Misconfigured
from segue.printable import say
from segue_cli.client.talk import ModelEndpoint

BACKUPS_MAX = 1_000
PROVIDER = "segue"
# The comments on lines that are written for a small or text-only model, and removed for another one.
SMALL_MARK, TEXT_MARK = MARKS = ("# for a small model", "# for a model that sees no images")
SMALL_PROMPT = "segue-small-model.md"
SMALL_PROMPT_TEXT = (
    "You are a coding agent in a terminal. Use the tools where they help. Answer in few words.\n"
)
SMALL_FEATURES = ("multi_agent", "goals")

CodexValue = str | bool | int
# A document or one of its tables: both are containers of items.
TomlTable = TOMLDocument | Table


class _Row(NamedTuple):
    """A key that a table of Codex's file must contain; a value of None is left out."""

    table: tuple[str, ...]
    key: str
    value: CodexValue | None
    # For which models only.
    mark: str = ""


def codex_home() -> Path:
    """The folder of Codex's configuration."""
    return Path(os.environ.get("CODEX_HOME") or Path.home() / ".codex")


def _rows(endpoint: ModelEndpoint) -> list[_Row]:
    provider = ("model_providers", PROVIDER)
    rows = [
        _Row((), "model", endpoint.model),
        _Row((), "model_context_window", endpoint.context_tokens),
        _Row((), "model_provider", PROVIDER),
        _Row((), "model_instructions_file", SMALL_PROMPT, SMALL_MARK),
        _Row((), "web_search", "disabled", SMALL_MARK),
        _Row(provider, "name", PROVIDER),
        _Row(provider, "base_url", endpoint.base_url),
        _Row(provider, "wire_api", "responses"),
        _Row(provider, "supports_websockets", True),
        _Row(provider, "env_key", endpoint.key_env),
        *(_Row(("features",), name, False, SMALL_MARK) for name in SMALL_FEATURES),
        _Row(("features",), "view_image", False, TEXT_MARK),
    ]
    marks = {"": True, SMALL_MARK: endpoint.is_small, TEXT_MARK: endpoint.sees_images is False}
    return [row for row in rows if marks[row.mark] and row.value is not None]


def codex_block(endpoint: ModelEndpoint) -> str:
    """The lines of a new `config.toml`."""
    return with_provider("", endpoint).rstrip("\n")


def with_provider(text: str, endpoint: ModelEndpoint) -> str:
    """Codex's file with Segue as its provider, and with everything else unchanged."""
    rows = _rows(endpoint)
    try:
        document = tomlkit.parse(text if text.endswith("\n") or not text else text + "\n")
        _drop_marked(document, {row.key for row in rows if row.mark})
        for row in rows:
            _set(_table(document, row), row)
        changed = tomlkit.dumps(document)
        if tomllib.loads(changed) == document.unwrap():
            return changed
    except tomllib.TOMLDecodeError:
        pass
    except TOMLKitError as error:
        raise Misconfigured(f"Codex's config.toml cannot be edited: {error}.") from None
    raise _unsafe()


def _set(table: TomlTable, row: _Row) -> None:
    """Set a key; an old value stays as a comment above the new line."""
    if row.key not in table:
        table[row.key] = row.value
    elif (old := _item(table, row.key)).unwrap() != row.value:
        line = f"{row.key} = {old.as_string()}{old.trivia.comment_ws}{old.trivia.comment}"
        table[row.key] = row.value
        trivia = _item(table, row.key).trivia
        trivia.indent = "".join(f"# {part}\n" for part in line.splitlines())
        trivia.comment_ws = trivia.comment = ""
    if row.mark:
        _mark(_item(table, row.key), row.mark)


def _drop_marked(document: TOMLDocument, wanted: set[str]) -> None:
    """Remove what another model needed and this one does not."""
    features = document.get("features")
    for table in (features, document) if isinstance(features, Table) else (document,):
        for key in list(table):
            item = table.item(key)
            is_marked = isinstance(item, Item) and item.trivia.comment in MARKS
            is_full = isinstance(item, Table) and len(item) > 0
            if is_marked and key not in wanted and not is_full:
                del table[key]


def _mark(item: Item, mark: str) -> None:
    item.trivia.comment_ws, item.trivia.comment = "  ", mark


def _item(table: TomlTable, key: str) -> Item:
    item = table.item(key)
    if not isinstance(item, Item):
        raise _unsafe()
    return item


def _table(document: TOMLDocument, row: _Row) -> TomlTable:
    """The table of a row, made if it is not there."""
    table: object = document
    for name in row.table:
        if not isinstance(table, TOMLDocument | Table | OutOfOrderTableProxy):
            raise _unsafe()
        if name not in table:
            table[name] = fresh = tomlkit.table(is_super_table=name != row.table[-1])
            if row.mark:
                _mark(fresh, row.mark)
        table = table[name]
    if not isinstance(table, TOMLDocument | Table):
        raise _unsafe()
    return table


def _unsafe() -> Misconfigured:
    return Misconfigured(
        "Codex's config.toml is written in a way that cannot be edited safely. "
        "Add by hand what `segue connect codex --print` shows."
    )


def write_codex(endpoint: ModelEndpoint, path: Path, *, is_agreed: bool) -> int:
    """Show the change, ask, and write it; returns the exit status."""
    path = path.resolve()
    try:
        before = path.read_text() if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured(f"cannot read {path}: {error}.") from None
    after = with_provider(before, endpoint)
    if after == before:
        say(f"{path} is up to date already.")
        return 0
    if not before:
        say(f"{path} will be:\n\n{after}")
    else:
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2)
        changes = [line for line in lines if not line.startswith(("---", "+++"))]
        say("\n".join((f"{path} will change:\n", *changes, "")))
    if endpoint.is_small:
        say(
            f"The context window of {endpoint.model} is {endpoint.context_tokens} tokens; Codex's own prompt and tools "
            f"are about 9,000. So this configures a short prompt ({SMALL_PROMPT}) and few tools.\n"
        )
    if not is_agreed:
        say("Write this? [y/N] ", end="")
        # Without an answer it is no.
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            say("Nothing was written.")
            return 1
    backup = _back_up(path)
    _replace(path, after)
    if endpoint.is_small:
        _replace(path.with_name(SMALL_PROMPT), SMALL_PROMPT_TEXT)
    say(f"Wrote {path}." + (f" The old file is {backup.name}." if backup else ""))
    say('Try it: codex exec --skip-git-repo-check "say hello"')
    return 0


def _back_up(path: Path) -> Path | None:
    """Copy the file next to itself, under a free name."""
    if not path.exists():
        return None
    for number in range(BACKUPS_MAX):
        backup = path.with_name(f"{path.name}.before-segue" + (f"-{number}" if number else ""))
        if not backup.exists():
            shutil.copy2(path, backup)
            return backup
    raise Misconfigured(f"{path.parent} already has {BACKUPS_MAX} copies of {path.name}.")


def _replace(path: Path, text: str) -> None:
    """Write the whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fresh = path.with_name(f".{path.name}.new")
    fresh.write_text(text)
    if path.exists():
        shutil.copymode(path, fresh)
    os.replace(fresh, path)
