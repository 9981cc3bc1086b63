"""How is a client configured for this server? `segue connect CLIENT` prints a snippet, and for Codex edits its file.

In: the name of a client, the server's URL, a model. Out: a snippet that runs as it is; for Codex a change to its
`config.toml`, shown before it is made. Other keys are not touched, a value that is replaced stays as a comment, and the
file is copied first. A file that cannot be edited safely is left alone.
"""

from __future__ import annotations

import argparse
import difflib
import os
import re
import shutil
import sys
import tomllib
import urllib.error
import urllib.request
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import msgspec
import tomlkit
from tomlkit import TOMLDocument
from tomlkit.container import OutOfOrderTableProxy
from tomlkit.exceptions import TOMLKitError
from tomlkit.items import Item, Table

from segue.errors import Misconfigured
from segue.settings import codex_home

URL = "http://127.0.0.1:8080"
# A server on the same machine answers at once; over a slow network it may take a while.
ASK_S_MAX = 5.0
BACKUPS_MAX = 1_000
PROVIDER = "segue"
# Codex's own prompt and tools are about 9,000 tokens, before the conversation begins.
SMALL_TOKENS = 24_000
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


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """A server and one of its models."""

    base_url: str
    model: str
    # The environment variable with the API key, if the server needs one.
    key_env: str | None = None
    # The context window, if the server reports it.
    context_tokens: int | None = None
    # Whether the model sees images, if the server reports it.
    sees_images: bool | None = None

    @property
    def is_small(self) -> bool:
        """Whether Codex's usual prompt and tools leave too little of the context window."""
        return self.context_tokens is not None and self.context_tokens < SMALL_TOKENS


def add_endpoint(parser: argparse.ArgumentParser) -> None:
    """The flags that say which server and which model, of `segue chat` too."""
    parser.add_argument("--url", default=URL, help=f"URL of the server (default: {URL})")
    model = "name of the model (default: the first that the server lists)"
    parser.add_argument("--model", help=model)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `segue connect`."""
    parser.add_argument("client", choices=(*SNIPPETS, "codex"), help="the client to connect")
    add_endpoint(parser)
    key_env = "environment variable with the API key (Codex only)"
    parser.add_argument("--key-env", metavar="NAME", help=key_env)
    parser.add_argument("--print", action="store_true", help="only print, write nothing")
    parser.add_argument("--yes", action="store_true", help="write without asking")


def run(options: argparse.Namespace) -> int:
    """Print a snippet, or edit Codex's configuration; returns the exit status."""
    endpoint = find_endpoint(base_url_of(options.url), options.model, options.key_env)
    if options.client != "codex":
        print(snippet(options.client, endpoint))
    elif options.print:
        print(codex_block(endpoint))
    else:
        return _write_codex(endpoint, codex_home() / "config.toml", is_agreed=options.yes)
    return 0


def base_url_of(url: str) -> str:
    """The base URL for clients: with the version, without a slash at the end."""
    if not re.match(r"https?://[^/]", url):
        raise Misconfigured(f"url: '{url}' is not a URL such as {URL}.")
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


class _Model(msgspec.Struct):
    id: str
    context_window: int | None = None
    input_modalities: list[str] | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


def find_endpoint(base_url: str, model: str | None, key_env: str | None = None) -> ModelEndpoint:
    """The named model, or the first that the running server lists."""
    try:
        served = _served(base_url)
    except Misconfigured:
        if model is None:
            raise
        served = []
    if model is None and not served:
        raise Misconfigured(f"model: the server at {base_url} lists no model.")
    name = model or served[0].id
    card = next((listed for listed in served if listed.id == name), _Model(name))
    sees_images = None if card.input_modalities is None else "image" in card.input_modalities
    return ModelEndpoint(base_url, name, key_env, card.context_window, sees_images)


def _served(base_url: str) -> list[_Model]:
    try:
        with urllib.request.urlopen(f"{base_url}/models", timeout=ASK_S_MAX) as answer:
            return msgspec.json.decode(answer.read(), type=_Models).data
    except (OSError, urllib.error.URLError, msgspec.MsgspecError) as error:
        reason = getattr(error, "reason", None) or error
        raise Misconfigured(
            f"url: cannot list the models at {base_url}: {reason}. "
            "Start a server with `segue serve`, or give another --url, or name the --model yourself."
        ) from None


# --- snippets ----------------------------------------------------------------------------------------

SNIPPETS = ("python", "node", "agents-python", "agents-js", "ai-sdk", "curl")


def snippet(client: str, endpoint: ModelEndpoint) -> str:
    """A program for this client, from `snippets/`, that runs as it is."""
    text = (files("segue.commands") / "snippets" / f"{client}.txt").read_text().rstrip("\n")
    text = text.replace("{base_url}", endpoint.base_url).replace("{model}", endpoint.model)
    return text.replace("{socket_url}", endpoint.base_url.replace("http", "ws", 1))


# --- Codex -------------------------------------------------------------------------------------------


class _Row(NamedTuple):
    """A key that a table of Codex's file must contain; a value of None is left out."""

    table: tuple[str, ...]
    key: str
    value: CodexValue | None
    # For which models only.
    mark: str = ""


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


def _write_codex(endpoint: ModelEndpoint, path: Path, *, is_agreed: bool) -> int:
    path = path.resolve()
    try:
        before = path.read_text() if path.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured(f"cannot read {path}: {error}.") from None
    after = with_provider(before, endpoint)
    if after == before:
        print(f"{path} is up to date already.")
        return 0
    if not before:
        print(f"{path} will be:\n\n{after}")
    else:
        lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2)
        changes = [line for line in lines if not line.startswith(("---", "+++"))]
        print(f"{path} will change:\n", *changes, "", sep="\n")
    if endpoint.is_small:
        print(
            f"The context window of {endpoint.model} is {endpoint.context_tokens} tokens; Codex's own prompt and tools "
            f"are about 9,000. So this configures a short prompt ({SMALL_PROMPT}) and few tools.\n"
        )
    if not is_agreed:
        print("Write this? [y/N] ", end="", flush=True)
        # Without an answer it is no.
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            print("Nothing was written.")
            return 1
    backup = _back_up(path)
    _replace(path, after)
    if endpoint.is_small:
        _replace(path.with_name(SMALL_PROMPT), SMALL_PROMPT_TEXT)
    print(f"Wrote {path}." + (f" The old file is {backup.name}." if backup else ""))
    print('Try it: codex exec --skip-git-repo-check "say hello"')
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
