"""Where are statements and migrations, and which processes may use a database together?

In `sql/` there is a file of named statements for each backend, and numbered scripts. A database says what a process
must know to use it (`Abilities`), and a process says in its lease what it knows. So each version runs beside the one
before it, and a process that cannot read what the others write is refused at its start (docs/how-to/upgrade.md).

And the error of a database that fails, for the client and in the log.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from importlib.resources import files
from pathlib import Path
from traceback import extract_tb
from typing import Self

import msgspec
from msgspec import Struct

from segue import __version__
from segue.errors import Outdated, StoreFailed

log = logging.getLogger(__name__)

# Their messages may quote what was to be stored, and so may those of PostgreSQL's class of data exceptions.
QUOTING = (ValueError, KeyError, msgspec.MsgspecError)
DATA_EXCEPTIONS = "22"
ROOM = str(Path(__file__).parent)

SQL = files("segue.stores") / "sql"

# The format of the rows of turns, events and keys. A row that the version before cannot read has a new format: one
# version reads it (`ROWS_READ`), and only the next one writes it (`ROWS_WRITTEN`).
ROWS_READ = 1
ROWS_WRITTEN = 1


class Abilities(Struct, frozen=True):
    """What a process knows, or what a database needs: the number of a migration, and a format of rows."""

    schema: int
    rows: int
    version: str = ""

    @classmethod
    def of_this_version(cls, backend: str) -> Self:
        return cls(load_migrations(backend)[-1][0], ROWS_READ, __version__)

    def are_enough(self, needed: Abilities) -> bool:
        """Whether who knows this may use a database that needs the other."""
        return needed.schema <= self.schema and needed.rows <= self.rows


def load_queries(backend: str) -> dict[str, str]:
    """Statements by name, from two files in which each begins with `-- name: …`: one is for both databases."""
    found: dict[str, str] = {}
    for name in ("shared", backend):
        text = (SQL / f"{name}_queries.sql").read_text("utf-8")
        pieces = re.split(r"^-- name: (\w+)$", text, flags=re.MULTILINE)
        found |= zip(pieces[1::2], (piece.strip() for piece in pieces[2::2]), strict=True)
    return found


def load_migrations(backend: str) -> list[tuple[int, str]]:
    """Numbered scripts in order."""
    scripts: list[tuple[int, str]] = []
    for file in SQL.iterdir():
        if match := re.fullmatch(rf"{backend}_(\d{{4}})_\w+\.sql", file.name):
            scripts.append((int(match[1]), file.read_text("utf-8")))
    return sorted(scripts)


def newer_database(needed: Abilities, known: Abilities) -> Outdated:
    """The refusal of a database whose rows this version could not read."""
    return Outdated(
        f"this database was written by a newer Segue (it needs schema {needed.schema} and row format {needed.rows}; "
        f"this one knows {known.schema} and {known.rows}). Start that version again, or restore the "
        "backup from before the upgrade"
    )


def older_processes(versions: Iterable[str], hint: str = "") -> StoreFailed:
    """The refusal to start beside processes that could not read what this one writes."""
    names = sorted({version or "0.2.0 or older" for version in versions})
    return StoreFailed(
        f"a process of Segue {', '.join(names)} uses it, which cannot run beside {__version__}. Stop it, then start "
        f"this one{hint}"
    )


def store_failed(cause: BaseException, *, is_logged: bool = True) -> StoreFailed:
    """The refusal of what the database did not do, for a reason that will not pass."""
    if is_logged:
        log_failure(cause)
    return StoreFailed("The store failed; the log of the server has the reason.")


def log_failure(cause: BaseException | None) -> None:
    """Log why the store failed, and where; nothing of what was to be stored."""
    if cause is None:
        return
    state = getattr(cause, "sqlstate", None) or ""
    is_quoting = isinstance(cause, QUOTING) or state.startswith(DATA_EXCEPTIONS)
    # The lines after the first are details, which quote rows.
    message = "" if is_quoting else str(cause).partition("\n")[0]
    places = [
        frame.name for frame in extract_tb(cause.__traceback__) if frame.filename.startswith(ROOM)
    ]
    words = [type(cause).__name__, state, f"in {places[-1]}" if places else "", message]
    log.warning("the store failed: %s", " ".join(filter(None, words)))
