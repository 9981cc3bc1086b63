"""How does a person back up a store and restore it? `segue backup` and `segue restore`."""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

from segue.printable import say
from segue.settings.checks import load_settings
from segue.settings.values import Settings
from segue_cli.commands.archive import Manifest, back_up, is_transfer, read_backup, restore
from segue_cli.commands.flags import add_store
from segue_cli.terminal import progress_bar

POSTGRES = """\
PostgreSQL is backed up and restored with its own tools, while servers run or not:
  pg_dump --format=custom --file={dump} '{address}'
  pg_restore --clean --if-exists --no-owner --dbname='{address}' {dump}
Stop all servers before pg_restore. Set PGPASSWORD or ~/.pgpass where the database asks for a password.
The dump holds all responses{and_seals}: keep it secret."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of both commands."""
    parser.add_argument("file", metavar="FILE", help="the backup, one file; it holds secrets")
    add_store(parser, has_seal_keys=True)
    parser.add_argument("--force", action="store_true", help="replace what exists already")
    about = "folder of uploaded files, where that is not beside the SQLite file"
    parser.add_argument("--files-dir", metavar="DIR", help=about)
    if parser.prog.endswith("backup"):
        about = "of PostgreSQL: write a backup that `segue restore` puts into SQLite or another PostgreSQL"
        parser.add_argument("--portable", action="store_true", help=about)


def run(options: argparse.Namespace) -> int:
    """Back up or restore; returns the exit status: 1 if some responses cannot be read."""
    settings, file = load_settings(vars(options)), Path(options.file)
    is_backup = options.verb == "backup"
    is_portable = is_backup and options.portable and settings.store_kind == "postgresql"
    is_moved = is_portable or (not is_backup and is_transfer(settings, read_backup(file)))
    if settings.store_kind == "postgresql" and not is_moved:
        say(_postgres(settings))
        if settings.is_ring_stored:
            # Nothing was written: a script must notice.
            return 2
    with progress_bar() as steps:
        if is_backup:
            manifest = back_up(
                settings, file, steps, is_forced=options.force, is_portable=is_portable
            )
        else:
            manifest = restore(settings, file, steps, is_forced=options.force)
    say(_report(options.verb, settings, file, manifest))
    return 1 if manifest.contents is not None and manifest.contents.unreadable else 0


def _report(verb: str, settings: Settings, file: Path, manifest: Manifest) -> str:
    held, size = manifest.contents, file.stat().st_size / 1e6
    if held is None:
        return f"{file}: the seal keys (the file is secret: readable by its owner only)."
    made_at = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.created_at))
    counts = (
        f"responses: {held.turns:,}, conversations: {held.conversations:,}, API keys: {held.keys:,}"
        + f", files: {len(held.file_ids):,}" * bool(held.file_ids)
    )
    if verb == "backup":
        words = f"{file}: {counts}; {size:,.1f} MB, checked. It is secret: not encrypted, with the seal keys in it."
    else:
        words = f"{settings.shown_store}: {counts}; as of {made_at} (Segue {manifest.version})."
    if held.unreadable:
        names = ", ".join(held.unreadable_ids)
        words += (
            f"\nWarning: {held.unreadable} responses cannot be read, as in the original: {names}."
        )
    return words


def _postgres(settings: Settings) -> str:
    address = re.sub(r":…@", "@", settings.shown_store).replace("password=…", "")
    and_seals = " and the seal keys" if settings.is_ring_stored else ""
    return POSTGRES.format(address=address, dump="segue.dump", and_seals=and_seals)
