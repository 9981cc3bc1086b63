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
# The comment on lines that are written for a small model, and removed for a larger one.
MARK = "for a small model"
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

    @property
    def is_small(self) -> bool:
        """Whether Codex's usual prompt and tools leave too little of the context window."""
        return self.context_tokens is not None and self.context_tokens < SMALL_TOKENS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `segue connect`."""
    parser.add_argument("client", choices=(*SNIPPETS, "codex"), help="the client to connect")
    parser.add_argument("--url", default=URL, help=f"URL of the server (default: {URL})")
    parser.add_argument(
        "--model", help="name of the model (default: the first that the server lists)"
    )
    parser.add_argument(
        "--key-env", metavar="NAME", help="environment variable with the API key (Codex only)"
    )
    parser.add_argument("--print", action="store_true", help="only print, write nothing")
    parser.add_argument("--yes", action="store_true", help="write without asking")


def run(options: argparse.Namespace) -> int:
    """Print a snippet, or edit Codex's configuration; returns the exit status."""
    base_url = base_url_of(options.url)
    endpoint = find_endpoint(base_url, options.model, options.key_env)
    if options.client != "codex":
        print(snippet(options.client, endpoint))
        return 0
    if options.print:
        print(codex_block(endpoint))
        return 0
    return _write_codex(endpoint, codex_home() / "config.toml", is_agreed=options.yes)


def base_url_of(url: str) -> str:
    """The base URL for clients: with the version, without a slash at the end."""
    if not re.match(r"https?://[^/]", url):
        raise Misconfigured(f"url: '{url}' is not a URL such as {URL}.")
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


class _Model(msgspec.Struct):
    id: str
    context_window: int | None = None


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
    contexts = {listed.id: listed.context_window for listed in served}
    return ModelEndpoint(base_url, name, key_env, contexts.get(name))


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


class _Section(NamedTuple):
    """Keys that one table of Codex's file must contain."""

    table: tuple[str, ...]
    values: dict[str, CodexValue]
    is_marked: bool = False


def _sections(endpoint: ModelEndpoint) -> list[_Section]:
    top: dict[str, CodexValue] = {"model": endpoint.model}
    if endpoint.context_tokens is not None:
        top["model_context_window"] = endpoint.context_tokens
    top["model_provider"] = PROVIDER
    provider: dict[str, CodexValue] = {
        "name": PROVIDER,
        "base_url": endpoint.base_url,
        "wire_api": "responses",
        "supports_websockets": True,
    }
    if endpoint.key_env is not None:
        provider["env_key"] = endpoint.key_env
    sections = [_Section((), top), _Section(("model_providers", PROVIDER), provider)]
    if endpoint.is_small:
        prompt = {"model_instructions_file": SMALL_PROMPT, "web_search": "disabled"}
        sections.insert(1, _Section((), {**prompt}, is_marked=True))
        features = dict.fromkeys(SMALL_FEATURES, False)
        sections.append(_Section(("features",), {**features}, is_marked=True))
    return sections


def codex_block(endpoint: ModelEndpoint) -> str:
    """The lines of a new `config.toml`."""
    return with_provider("", endpoint).rstrip("\n")


def with_provider(text: str, endpoint: ModelEndpoint) -> str:
    """Codex's file with Segue as its provider, and with everything else unchanged."""
    sections = _sections(endpoint)
    try:
        document = tomlkit.parse(text if text.endswith("\n") or not text else text + "\n")
        _drop_marked(document, {key for one in sections if one.is_marked for key in one.values})
        for section in sections:
            _set(_table(document, section), section)
        changed = tomlkit.dumps(document)
        if tomllib.loads(changed) == document.unwrap():
            return changed
    except tomllib.TOMLDecodeError:
        pass
    except TOMLKitError as error:
        raise Misconfigured(f"Codex's config.toml cannot be edited: {error}.") from None
    raise _unsafe()


def _set(table: TomlTable, section: _Section) -> None:
    """Set the keys of a section; an old value stays as a comment above the new line."""
    for key, value in section.values.items():
        if key not in table:
            table[key] = value
        elif (old := _item(table, key)).unwrap() != value:
            line = f"{key} = {old.as_string()}{old.trivia.comment_ws}{old.trivia.comment}"
            table[key] = value
            trivia = _item(table, key).trivia
            trivia.indent = "".join(f"# {part}\n" for part in line.splitlines())
            trivia.comment_ws = trivia.comment = ""
        if section.is_marked:
            _mark(_item(table, key))


def _drop_marked(document: TOMLDocument, wanted: set[str]) -> None:
    """Remove what a small model needed and this one does not."""
    features = document.get("features")
    for table in (features, document) if isinstance(features, Table) else (document,):
        for key in list(table):
            item = table.item(key)
            is_full = isinstance(item, Table) and len(item) > 0
            if _is_marked(item) and key not in wanted and not is_full:
                del table[key]


def _mark(item: Item) -> None:
    item.trivia.comment_ws, item.trivia.comment = "  ", f"# {MARK}"


def _is_marked(item: object) -> bool:
    return isinstance(item, Item) and item.trivia.comment == f"# {MARK}"


def _item(table: TomlTable, key: str) -> Item:
    item = table.item(key)
    if not isinstance(item, Item):
        raise _unsafe()
    return item


def _table(document: TOMLDocument, section: _Section) -> TomlTable:
    """The table of a section, made if it is not there."""
    table: object = document
    for name in section.table:
        if not isinstance(table, TOMLDocument | Table | OutOfOrderTableProxy):
            raise _unsafe()
        if name not in table:
            table[name] = fresh = tomlkit.table(is_super_table=name != section.table[-1])
            if section.is_marked:
                _mark(fresh)
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
    _show(before, after, path)
    if endpoint.is_small:
        print(
            f"The context window of {endpoint.model} is {endpoint.context_tokens} tokens; Codex's own prompt and tools "
            f"are about 9,000. So this configures a short prompt ({SMALL_PROMPT}) and few tools.\n"
        )
    if not is_agreed and not _is_confirmed():
        print("Nothing was written.")
        return 1
    backup = _back_up(path)
    _replace(path, after)
    if endpoint.is_small:
        _replace(path.with_name(SMALL_PROMPT), SMALL_PROMPT_TEXT)
    print(f"Wrote {path}." + (f" The old file is {backup.name}." if backup else ""))
    print('Try it: codex exec --skip-git-repo-check "say hello"')
    return 0


def _show(before: str, after: str, path: Path) -> None:
    if not before:
        print(f"{path} will be:\n\n{after}")
        return
    print(f"{path} will change:\n")
    for line in difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2):
        if not line.startswith(("---", "+++")):
            print(line)
    print()


def _is_confirmed() -> bool:
    """Ask on the terminal; without an answer it is no."""
    print("Write this? [y/N] ", end="", flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


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
