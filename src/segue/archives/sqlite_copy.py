"""How is a SQLite file copied while servers write to it, and is a copy whole?

In: paths. Out: a second file, and what is in it. The copy is one state of the database: everything that was committed
before it began. SQLite's own backup interface makes it, inside a read transaction, so that writers neither wait for it
nor make it begin again. The original is never changed: not even its tables are brought up to date.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from functools import cache, partial
from pathlib import Path

from msgspec import Struct

from segue.errors import Misconfigured, StoreFailed
from segue.stores import records
from segue.stores.records import TurnColumns
from segue.stores.sql_files import Abilities, newer_database
from segue.stores.sqlite import load_field
from segue.stores.sqlite_database import QUERIES, border, needed_by
from segue.stores.sqlite_lease import has_live_lease

# Of a step of the copy, after which the progress is reported: 4 MiB with SQLite's usual pages.
STEP_PAGES = 1_024
# The scripts that make the tables of what is outside of the database.
OUTSIDE = {10: "every_file", 11: "every_skill_version"}
# Turns that are named in a report; the others are only counted.
NAMED_MAX = 10

Note = Callable[[int, int], None]


class Contents(Struct, frozen=True):
    """What a database holds."""

    schema: int
    turns: int
    conversations: int
    keys: int
    # The names of the seal keys that the valid API keys were hashed with.
    rings: tuple[str, ...]
    # Turns whose rows cannot be decoded; the first few by name.
    unreadable: int = 0
    unreadable_ids: tuple[str, ...] = ()
    # Files that clients have uploaded, and versions of their skills, by their ids.
    file_ids: tuple[str, ...] = ()


def is_in_use(path: Path) -> bool:
    """Whether a process has this database open."""
    return path.parent.is_dir() and has_live_lease(path)


def copy_database(source: Path, target: Path, note: Note) -> None:
    """Copy the database to a new file that only its owner may read; `note` gets the pages done, and all."""
    if not source.is_file():
        raise Misconfigured(f"store: there is no database {source}.")
    os.close(os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    with _opened(source) as reader, closing(sqlite3.connect(target)) as copy, _named(source):
        # From the first read on, this connection sees one state, whatever is written meanwhile.
        reader.execute("BEGIN")
        reader.execute(QUERIES["version"]).fetchone()
        reader.backup(
            copy, pages=STEP_PAGES, progress=lambda status, left, total: note(total - left, total)
        )


def check_database(path: Path, note: Note) -> Contents:
    """Read everything: SQLite's own check of the file, then each turn as a server would."""
    with _opened(path) as reader, _named(path):
        (schema,) = reader.execute(QUERIES["version"]).fetchone()
        abilities = Abilities.of_this_version("sqlite")
        if not abilities.are_enough(needed := needed_by(reader)):
            raise newer_database(needed, abilities)
        (problem,) = reader.execute(QUERIES["check_file"]).fetchone()
        if problem != "ok":
            raise StoreFailed(f"the file is damaged: {problem}")
        turns, conversations, keys = reader.execute(QUERIES["count_all"]).fetchone()
        rings = tuple(ring for (ring,) in reader.execute(QUERIES["rings"]))
        unreadable = list(_unreadable(reader, turns, note))
        return Contents(
            schema,
            turns,
            conversations,
            keys,
            rings,
            len(unreadable),
            tuple(unreadable[:NAMED_MAX]),
            _file_ids(reader, schema),
        )


def _file_ids(reader: sqlite3.Connection, schema: int) -> tuple[str, ...]:
    """Older databases have no files, or no skills."""
    queries = [QUERIES[name] for number, name in OUTSIDE.items() if schema >= number]
    return tuple(file_id for query in queries for (file_id,) in reader.execute(query))


def _unreadable(reader: sqlite3.Connection, total: int, note: Note) -> Iterator[str]:
    fields = cache(lambda owner: cache(partial(load_field, reader, owner)))
    for done, (owner, *row) in enumerate(reader.execute(QUERIES["every_turn"]), 1):
        columns: TurnColumns[int] = TurnColumns(*row)
        try:
            with border(is_logged=False):
                records.link(owner, columns.id, [columns], fields(owner))
        except (StoreFailed, TypeError):
            yield columns.id
        note(done, total)


@contextmanager
def _opened(path: Path) -> Iterator[sqlite3.Connection]:
    """A connection that changes nothing. Not `mode=ro`: that cannot read a log that no process has open."""
    address = f"{path.absolute().as_uri()}?mode=rw"
    with closing(sqlite3.connect(address, uri=True, isolation_level=None)) as connection:
        connection.execute(QUERIES["read_only"])
        connection.execute(QUERIES["wait_long"])
        yield connection


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """An error inside names the file and the reason: an operator reads it."""
    try:
        yield
    except (sqlite3.Error, StoreFailed) as error:
        raise Misconfigured(f"store: {path}: {error}.") from error
