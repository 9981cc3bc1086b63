"""How does a person start it? The `segue` command."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from segue import __version__
from segue.commands import doctor
from segue.commands.keys import Verbs, add_keys_verb, keys
from segue.errors import ApiError, Misconfigured
from segue.models import add_model, list_models
from segue.observe.logs import set_up_logging
from segue.server import serve
from segue.settings import FIELDS, HELP, REPEATED, Settings, choices_of, load_settings
from segue.storage import read_usage, rotate_seals


class ClientVerb(NamedTuple):
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _connect() -> ClientVerb:
    from segue.commands import connect

    return ClientVerb(connect.add_arguments, connect.run)


def _chat() -> ClientVerb:
    from segue.commands import chat

    return ClientVerb(chat.add_arguments, chat.run)


def _bench() -> ClientVerb:
    from segue_bench import command

    return ClientVerb(command.add_verb, command.run)


# Commands that talk to a running server; the others take a server's settings. What they need is imported for them
# alone, so that a server starts sooner.
CLIENT_VERBS: dict[str, tuple[str, Callable[[], ClientVerb]]] = {
    "connect": ("configure a client: print a snippet, or edit Codex's config.toml", _connect),
    "chat": ("chat with a model in the terminal, over WebSocket", _chat),
    "bench": ("measure agent loops over each transport", _bench),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser(arguments[:1]).parse_args(arguments)
    # As typed, for a report that says how to repeat it.
    options.arguments = arguments[1:]
    try:
        if options.verb == "models":
            return _models(options)
        if options.verb == "index":
            return _index(options)
        if options.verb in CLIENT_VERBS:
            return CLIENT_VERBS[options.verb][1]().run(options)
        settings = load_settings(vars(options))
        if options.verb == "usage":
            return _usage(options, settings)
        if options.verb == "seals":
            return _rotate_seals(settings)
        if options.verb == "keys":
            return keys(options, settings)
        set_up_logging(settings)
        if options.verb == "doctor":
            return doctor.run(settings)
        return _serve(settings)
    except (Misconfigured, ApiError) as error:
        print(f"segue: {error}", file=sys.stderr)
        return 2


def _serve(settings: Settings) -> int:
    if settings.workers == 1:
        return serve(settings)
    # Imported here: one process needs no supervisor.
    from segue.workers import serve_workers

    return serve_workers(settings)


def _models(options: argparse.Namespace) -> int:
    if options.action == "list":
        print("\n".join(list_models()))
    else:
        print(f"{options.name} is ready: {add_model(options.name)}")
    return 0


def _rotate_seals(settings: Settings) -> int:
    count = rotate_seals(settings)
    print(
        f"There are {count} keys now. After a restart servers encrypt with the new one; "
        "all of them stay valid for decryption."
    )
    return 0


def _index(options: argparse.Namespace) -> int:
    from segue.builders.tools import index_folder

    folder, into = Path(options.folder), Path(options.into)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"Reading {folder}", total=None)
        report = index_folder(
            folder,
            into,
            options.url,
            lambda done, total: progress.update(bar, completed=done, total=total),
        )
    print(
        f"{into}: {report.added} added, {report.changed} changed, {report.same} unchanged, "
        f"{report.removed} removed, {report.unread} without text."
    )
    return 0


def _usage(options: argparse.Namespace, settings: Settings) -> int:
    path = settings.store_path
    if path is not None and not path.exists():
        # Opening it would create it.
        raise Misconfigured(f"store: there is no file {path}.")
    rows = asyncio.run(read_usage(settings, options.owner, options.days))
    if options.json:
        print(msgspec.json.encode(rows).decode())
        return 0
    table = Table("day", "owner", "model", title="Usage (days in UTC)", show_footer=True)
    for name in ("turns", "input_tokens", "cached_tokens", "output_tokens", "tool_calls"):
        total = sum(getattr(row, name) for row in rows)
        shown = name.removesuffix("_tokens").replace("_", " ")
        table.add_column(shown, f"{total:,}", justify="right")
    for row in rows:
        words = [row.day, row.owner, row.model]
        tokens = (row.input_tokens, row.cached_tokens, row.output_tokens)
        numbers = (row.turns, *tokens, row.tool_calls)
        table.add_row(*words, *(f"{number:,}" for number in numbers))
    Console().print(table)
    return 0


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _parser(asked: Sequence[str]) -> argparse.ArgumentParser:
    """The whole command line; a client command gets its flags only if it is the one that was asked for."""
    parser = argparse.ArgumentParser(
        prog="segue",
        description="A Responses API server for people who run their own models.",
        epilog="Every flag is also a key in segue.toml and an environment variable SEGUE_….",
    )
    parser.add_argument("--version", action="version", version=f"segue {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    _add_settings(
        verbs.add_parser(
            "serve",
            help="serve models over HTTP and WebSocket",
            description="Serve models over HTTP and WebSocket, on one port.",
        )
    )
    _add_store_verbs(verbs)
    add_keys_verb(verbs)
    _add_file_verbs(verbs)
    _add_settings(
        verbs.add_parser(
            "doctor", help=doctor.ABOUT, description=f"{doctor.ABOUT}; takes the flags of `serve`"
        )
    )
    for name, (about, load) in CLIENT_VERBS.items():
        client = verbs.add_parser(name, help=about, description=about)
        if name in asked:
            load().add_arguments(client)
    return parser


def _add_store_verbs(verbs: Verbs) -> None:
    usage = verbs.add_parser("usage", help="print token usage by day, owner and model")
    usage.add_argument("--config", metavar="FILE", help="TOML file that names the store")
    usage.add_argument("--store", metavar="STORE", help="the store to read")
    usage.add_argument("--owner", metavar="OWNER", help="only this owner")
    usage.add_argument(
        "--days", type=_positive, default=30, help="number of days, today included (default: 30)"
    )
    usage.add_argument("--json", action="store_true", help="print JSON")
    seals = verbs.add_parser(
        "seals", help="manage the keys that encrypt compactions and reasoning and hash API keys"
    )
    actions = seals.add_subparsers(dest="action", required=True, metavar="ACTION")
    rotate = actions.add_parser(
        "rotate", help="add a new encryption key; old ones stay valid for decryption"
    )
    rotate.add_argument(
        "--config", metavar="FILE", help="TOML file that names the store or the key file"
    )
    rotate.add_argument("--store", metavar="STORE", help="the store that the keys belong to")
    rotate.add_argument("--seal-keys", metavar="FILE", help="the key file")


def _add_file_verbs(verbs: Verbs) -> None:
    models = verbs.add_parser("models", help="download and list models for the embedded engine")
    actions = models.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="list the models that can be downloaded by name")
    add = actions.add_parser("add", help="download a model and verify it")
    add.add_argument("name", help="such as smollm2 or qwen2.5-coder-1.5b")
    index = verbs.add_parser(
        "index",
        help="make local documents searchable for the web search tool, without a network",
        description="Index text, Markdown, HTML and PDF files; unchanged files are skipped.",
    )
    index.add_argument("folder", metavar="DIR", help="folder with the documents")
    index.add_argument(
        "--into", metavar="FILE", default="segue.index", help="index file (default: segue.index)"
    )
    index.add_argument(
        "--url", metavar="PREFIX", default="", help="URL of the folder, for citations"
    )


def _add_settings(verb: argparse.ArgumentParser) -> None:
    """A flag for every setting, in groups. Values stay text: the settings validate all sources alike."""
    verb.add_argument("--config", metavar="FILE", help="TOML file with any of these settings")
    for title, texts in HELP.items():
        group = verb.add_argument_group(title)
        for name, text in texts.items():
            group.add_argument(
                "--" + name.replace("_", "-"),
                action="append" if name in REPEATED else "store",
                metavar=_metavar(FIELDS[name]),
                help=f"{text} (default: {_shown(FIELDS[name].default)})",
            )


def _shown(default: object) -> str:
    if default in ("", (), None):
        return "none"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _metavar(field: msgspec.structs.FieldInfo) -> str:
    """What may stand after a flag: the choices, the unit, or the last word of its name."""
    if choices := choices_of(field):
        return "|".join(choices)
    if field.type is bool:
        return "true|false"
    word = field.name.removesuffix("_max").removesuffix("_per_s").split("_")[-1]
    return {"s": "SECONDS", "cert": "FILE", "keys": "FILE"}.get(word, word.upper())


if __name__ == "__main__":
    sys.exit(main())
