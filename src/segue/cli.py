"""How does a person start it? The `segue` command."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path

import msgspec
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from segue import __version__
from segue.commands import doctor
from segue.commands.first_model import person, with_first_model
from segue.commands.keys import Verbs, add_keys_verb, add_store, amount, existing, keys
from segue.errors import ApiError, Misconfigured
from segue.models import add_model, list_models
from segue.observe.logs import set_up_logging
from segue.server import serve
from segue.settings import FIELDS, HELP, REPEATED, Settings, choices_of, load_settings
from segue.storage import read_usage, rotate_seals

# Commands that talk to a running server, and their modules: imported for them alone, so that a server starts sooner.
CLIENT_VERBS = {
    "connect": (
        "segue.commands.connect",
        "configure a client: print a snippet, or edit Codex's config.toml",
    ),
    "chat": ("segue.commands.chat", "chat with a model in the terminal, over WebSocket"),
    "bench": ("segue_bench.command", "measure agent loops over each transport"),
}
COUNTS = ("turns", "input_tokens", "cached_tokens", "output_tokens", "tool_calls")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser(arguments[:1]).parse_args(arguments)
    # As typed, for a report that says how to repeat it.
    options.arguments = arguments[1:]
    try:
        if options.verb in CLIENT_VERBS:
            status: int = import_module(CLIENT_VERBS[options.verb][0]).run(options)
            return status
        if options.verb in FILE_VERBS:
            return FILE_VERBS[options.verb](options)
        return SERVER_VERBS[options.verb](options, load_settings(vars(options)))
    except (Misconfigured, ApiError) as error:
        print(f"segue: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, EOFError):
        # Ctrl-C or Ctrl-D at a question, or while something is fetched.
        print(file=sys.stderr)
        return 130


def _serve(options: argparse.Namespace, settings: Settings) -> int:
    set_up_logging(settings)
    settings = with_first_model(settings, person())
    if settings.workers == 1:
        return serve(settings)
    # Imported here: one process needs no supervisor.
    from segue.workers import serve_workers

    return serve_workers(settings)


def _doctor(options: argparse.Namespace, settings: Settings) -> int:
    set_up_logging(settings)
    return doctor.run(settings)


def _models(options: argparse.Namespace) -> int:
    if options.action == "list":
        print("\n".join(list_models()))
    else:
        print(f"{options.name} is ready: {add_model(options.name)}")
    return 0


def _rotate_seals(options: argparse.Namespace, settings: Settings) -> int:
    print(
        f"There are {rotate_seals(settings)} keys now. After a restart servers encrypt with the new one; "
        "all of them stay valid for decryption."
    )
    return 0


def _index(options: argparse.Namespace) -> int:
    from segue.builders.tools import index_folder

    folder, into = Path(options.folder), Path(options.into)
    with Progress(console=Console(stderr=True), transient=True) as progress:
        bar = progress.add_task(f"Reading {folder}", total=None)

        def note(done: int, total: int) -> None:
            progress.update(bar, completed=done, total=total)

        report = index_folder(folder, into, options.url, note)
    print(
        f"{into}: {report.added} added, {report.changed} changed, {report.same} unchanged, "
        f"{report.removed} removed, {report.unread} without text."
    )
    return 0


def _usage(options: argparse.Namespace, settings: Settings) -> int:
    rows = asyncio.run(read_usage(existing(settings), options.owner, options.days))
    if options.json:
        print(msgspec.json.encode(rows).decode())
        return 0
    table = Table("day", "owner", "model", title="Usage (days in UTC)", show_footer=True)
    for name in COUNTS:
        total = sum(getattr(row, name) for row in rows)
        shown = name.removesuffix("_tokens").replace("_", " ")
        table.add_column(shown, f"{total:,}", justify="right")
    for row in rows:
        counts = (f"{getattr(row, name):,}" for name in COUNTS)
        table.add_row(row.day, row.owner, row.model, *counts)
    Console().print(table)
    return 0


FILE_VERBS: dict[str, Callable[[argparse.Namespace], int]] = {"models": _models, "index": _index}
SERVER_VERBS: dict[str, Callable[[argparse.Namespace, Settings], int]] = {
    "serve": _serve,
    "usage": _usage,
    "seals": _rotate_seals,
    "keys": keys,
    "doctor": _doctor,
}


def _parser(asked: Sequence[str]) -> argparse.ArgumentParser:
    """The whole command line; a client command gets its flags only if it is the one that was asked for."""
    parser = argparse.ArgumentParser(
        prog="segue",
        description="A Responses API server for people who run their own models.",
        epilog="Every flag is also a key in segue.toml and an environment variable SEGUE_….",
    )
    parser.add_argument("--version", action="version", version=f"segue {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="COMMAND")
    about = "serve models over HTTP and WebSocket"
    _add_settings(verbs.add_parser("serve", help=about, description=f"{about}, on one port"))
    _add_store_verbs(verbs)
    add_keys_verb(verbs)
    _add_file_verbs(verbs)
    about = f"{doctor.ABOUT}; takes the flags of `serve`"
    _add_settings(verbs.add_parser("doctor", help=doctor.ABOUT, description=about))
    for name, (module, about) in CLIENT_VERBS.items():
        client = verbs.add_parser(name, help=about, description=about)
        if name in asked:
            import_module(module).add_arguments(client)
    return parser


def _add_store_verbs(verbs: Verbs) -> None:
    usage = verbs.add_parser("usage", help="print token usage by day, owner and model")
    add_store(usage)
    usage.add_argument("--owner", metavar="OWNER", help="only this owner")
    days = "number of days, today included (default: 30)"
    usage.add_argument("--days", type=amount, default=30, help=days)
    usage.add_argument("--json", action="store_true", help="print JSON")
    about = "manage the keys that encrypt compactions and reasoning and hash API keys"
    actions = verbs.add_parser("seals", help=about).add_subparsers(
        dest="action", required=True, metavar="ACTION"
    )
    about = "add a new encryption key; old ones stay valid for decryption"
    add_store(actions.add_parser("rotate", help=about), has_seal_keys=True)


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
    into = "index file (default: segue.index)"
    index.add_argument("--into", metavar="FILE", default="segue.index", help=into)
    prefix = "URL of the folder, for citations"
    index.add_argument("--url", metavar="PREFIX", default="", help=prefix)


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
    if field.type in (bool, bool | None):
        return "true|false"
    word = field.name.removesuffix("_max").removesuffix("_per_s").split("_")[-1]
    return {"s": "SECONDS", "cert": "FILE", "keys": "FILE", "template": "FILE"}.get(
        word, word.upper()
    )


if __name__ == "__main__":
    sys.exit(main())
