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

from segue import __version__, connect, doctor
from segue.app import index_folder
from segue.errors import ApiError, Misconfigured
from segue.keys import add_keys_verb, keys
from segue.logs import set_up_logging
from segue.models import add_model, list_models
from segue.server import serve
from segue.settings import FLAGS, REPEATED, Settings, load_settings
from segue.storage import read_usage, rotate_seals
from segue.workers import serve_workers


class ClientVerb(NamedTuple):
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def _connect() -> ClientVerb:
    return ClientVerb(connect.add_arguments, connect.run)


def _chat() -> ClientVerb:
    from segue import chat

    return ClientVerb(chat.add_arguments, chat.run)


def _bench() -> ClientVerb:
    from segue_bench import command

    return ClientVerb(command.add_verb, command.run)


# Verbs that speak to a server that runs; the others have a server's settings. What they need is imported for them
# alone, so that a server starts sooner.
CLIENT_VERBS: dict[str, tuple[str, Callable[[], ClientVerb]]] = {
    "connect": (connect.ABOUT, _connect),
    "chat": ("talk to a model in the terminal, over the socket", _chat),
    "bench": ("measure agent loops by each way of talking", _bench),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a verb; the exit status says whether it worked."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = _parser(arguments[:1]).parse_args(arguments)
    # As they were typed, for a report that says how to repeat it.
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
        return serve_workers(settings) if settings.workers > 1 else serve(settings)
    except (Misconfigured, ApiError) as error:
        print(f"segue: {error}", file=sys.stderr)
        return 2


def _models(options: argparse.Namespace) -> int:
    if options.action == "list":
        print("\n".join(list_models()))
    else:
        print(f"{options.name} is here: {add_model(options.name)}")
    return 0


def _rotate_seals(settings: Settings) -> int:
    count = rotate_seals(settings)
    print(f"The ring has {count} keys now. The new one seals from the next start on; all open.")
    return 0


def _index(options: argparse.Namespace) -> int:
    """Bring an index up to date, with a bar for those who watch."""
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
        f"{into}: {report.added} added, {report.changed} changed, {report.same} as before, "
        f"{report.removed} removed, {report.unread} without text."
    )
    return 0


def _usage(options: argparse.Namespace, settings: Settings) -> int:
    """Usage as a table, or as JSON for programs."""
    path = settings.store_path
    if path is not None and not path.exists():
        # Opening would make it.
        raise Misconfigured(f"store: there is no file {path}.")
    rows = asyncio.run(read_usage(settings, options.owner, options.days))
    if options.json:
        print(msgspec.json.encode(rows).decode())
        return 0
    table = Table("day", "owner", "model", title="Usage (days of UTC)", show_footer=True)
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
    """A number of days."""
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _parser(asked: Sequence[str]) -> argparse.ArgumentParser:
    """The whole command; of a client's verb only what is asked for has its flags."""
    parser = argparse.ArgumentParser(
        prog="segue",
        description="A Responses API server for people who run their own models.",
        epilog="Every flag is also a key in segue.toml and an environment variable SEGUE_….",
    )
    parser.add_argument("--version", action="version", version=f"segue {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    verb = verbs.add_parser(
        "serve",
        help="serve models over HTTP and WebSocket",
        description="Serve models over HTTP and WebSocket, on one port.",
    )
    verb.add_argument("--config", metavar="FILE", help="a TOML file with any of these settings")
    for field in msgspec.structs.fields(Settings):
        if field.name in FLAGS:
            _add_flag(verb, field)
    usage = verbs.add_parser("usage", help="print who used how much, by day, owner and model")
    usage.add_argument("--config", metavar="FILE", help="a TOML file that names the store")
    usage.add_argument("--store", metavar="STORE", help="where turns and usage are kept")
    usage.add_argument("--owner", metavar="OWNER", help="only this owner's")
    usage.add_argument("--days", type=_positive, default=30, help="how many, today included (30)")
    usage.add_argument("--json", action="store_true", help="as JSON")
    seals = verbs.add_parser("seals", help="change the key that seals compactions and reasoning")
    rings = seals.add_subparsers(dest="action", required=True, metavar="ACTION")
    rotate = rings.add_parser("rotate", help="put a fresh key in front; the older ones still open")
    rotate.add_argument("--config", metavar="FILE", help="a TOML file that names store or ring")
    rotate.add_argument("--store", metavar="STORE", help="the store whose ring it is")
    rotate.add_argument("--seal-keys", metavar="FILE", help="the file with the ring")
    add_keys_verb(verbs)
    models = verbs.add_parser("models", help="fetch and list models that can run inside")
    actions = models.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="the models that can be fetched by name")
    add = actions.add_parser("add", help="fetch a model and check it")
    add.add_argument("name", help="such as smollm2 or qwen2.5-coder-1.5b")
    index = verbs.add_parser(
        "index",
        help="make documents searchable for the web search, without a network",
        description="Read text, Markdown, HTML and PDF into an index; files that have not changed are not read again.",
    )
    index.add_argument("folder", metavar="DIR", help="the documents")
    index.add_argument("--into", metavar="FILE", default="segue.index", help="(segue.index)")
    index.add_argument(
        "--url", metavar="PREFIX", default="", help="where the folder is published, for citations"
    )
    _add_verbs_of_clients(verbs, asked)
    return parser


def _add_verbs_of_clients(
    verbs: argparse._SubParsersAction[argparse.ArgumentParser], asked: Sequence[str]
) -> None:
    """What speaks to a server that runs, and what looks whether one would."""
    check = verbs.add_parser(
        "doctor", help=doctor.ABOUT, description=f"{doctor.ABOUT}; takes the flags of `serve`"
    )
    check.add_argument("--config", metavar="FILE", help="a TOML file with any of these settings")
    for field in msgspec.structs.fields(Settings):
        if field.name in FLAGS:
            _add_flag(check, field)
    for name, (about, load) in CLIENT_VERBS.items():
        client = verbs.add_parser(name, help=about, description=about)
        if name in asked:
            load().add_arguments(client)


def _add_flag(verb: argparse.ArgumentParser, field: msgspec.structs.FieldInfo) -> None:
    """A flag for a setting; its value stays text, because the settings check all places alike."""
    kind = msgspec.inspect.type_info(field.type)
    text = getattr(kind, "extra_json_schema", None) or {}
    described = text.get("description", "")
    shown = f"{described} (default: {_shown(field.default)})" if described else None
    verb.add_argument(
        "--" + field.name.replace("_", "-"),
        action="append" if field.name in REPEATED else "store",
        metavar=field.name.rsplit("_", 1)[-1].upper(),
        help=shown,
        default=None,
    )


def _shown(value: object) -> str:
    return "none" if value in ("", (), None) else str(value)


if __name__ == "__main__":
    sys.exit(main())
