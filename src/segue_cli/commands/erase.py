"""How is everything of an owner erased? `segue erase`."""

from __future__ import annotations

import argparse
import asyncio
import sys

from segue.archives.erasure import DeleteObject, NoteErased, OwnerCounts, count_owner, erase_owner
from segue.errors import Misconfigured
from segue.printable import printable, say
from segue.server.files import LateFiles, has_place
from segue.server.storage import ServerStore
from segue.settings.checks import load_settings
from segue.settings.validation import nearest
from segue.settings.values import Settings
from segue.stores.shelves import FileTable, Tables
from segue_cli.commands.durable import open_durable
from segue_cli.commands.flags import add_store, existing
from segue_cli.commands.keys import list_keys, notify_servers
from segue_cli.terminal import progress_bar

KINDS = {
    "responses": "responses",
    "conversations": "conversations",
    "files": "files",
    "skill_versions": "versions of skills",
    "idempotency_keys": "idempotency keys",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `segue erase`."""
    parser.add_argument("--owner", required=True, help="whose data: as `segue keys list` shows it")
    about = "revoke the owner's keys and remove their names and the owner's, too"
    parser.add_argument("--keys", action="store_true", help=about)
    about = "erase the rows of usage and the budgets' counts, too"
    parser.add_argument("--usage", action="store_true", help=about)
    parser.add_argument("--dry-run", action="store_true", help="count only")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    add_store(parser)
    parser.add_argument("--files-dir", metavar="DIR", help="folder of uploaded files")
    parser.add_argument("--files-url", metavar="URL", help="bucket of uploaded files")


def run(options: argparse.Namespace) -> int:
    """Count, ask, erase; returns the exit status."""
    settings = existing(load_settings(vars(options)))
    counts = asyncio.run(_count(settings, options.owner))
    if not counts.is_known:
        owners = sorted({key.owner for key in asyncio.run(list_keys(settings)) if key.owner})
        raise Misconfigured(
            f"erase: nothing is known of an owner '{options.owner}'.{nearest(options.owner, owners)} "
            "See `segue keys list`."
        )
    say(f"Owner '{printable(options.owner)}' in {settings.shown_store}:")
    for name, words in KINDS.items():
        say(f"  {getattr(counts, name):>10,} {words}")
    for count, words, is_erased in (
        (counts.keys, "API keys", options.keys),
        (counts.usage_rows, "rows of usage", options.usage),
    ):
        say(f"  {count:>10,} {words}{'' if is_erased else ' (kept)'}")
    if options.dry_run:
        return 0
    if not options.yes:
        _confirm(options.owner)
    with progress_bar() as note:
        asyncio.run(_erase(settings, options, note))
    left = asyncio.run(_count(settings, options.owner))
    if left.contents:
        say(
            f"{left.contents:,} have come meanwhile: the owner still writes. Revoke its keys, too: --keys.",
            file=sys.stderr,
        )
        return 1
    say("Erased. Running servers have closed the owner's connections and emptied their caches.")
    return 0


def _confirm(owner: str) -> None:
    if not sys.stdin.isatty():
        raise Misconfigured("erase: nothing was erased. Say --yes where nobody can be asked.")
    say(f"This cannot be undone. Type the owner's name ({printable(owner)}) to go on: ", end="")
    if input().strip() != owner:
        raise Misconfigured("erase: nothing was erased.")


async def _count(settings: Settings, owner: str) -> OwnerCounts:
    async with open_durable(settings, "data") as store:
        return await count_owner(_tables(store), owner)


async def _erase(settings: Settings, options: argparse.Namespace, note: NoteErased) -> None:
    async with (
        open_durable(settings, "data") as store,
        LateFiles(settings, store.files, store.skills) as files,
    ):
        delete: DeleteObject | None = files.delete_object if has_place(settings) else None
        await erase_owner(
            _tables(store),
            options.owner,
            delete,
            note,
            with_keys=options.keys,
            with_usage=options.usage,
            on_revoked=lambda: notify_servers(settings),
        )


def _tables(store: ServerStore) -> Tables:
    assert isinstance(store.files, FileTable)
    return store.files.tables
