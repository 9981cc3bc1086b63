"""Where are statements and migrations? In `sql/`: for each backend a file of named statements, and numbered scripts."""

from __future__ import annotations

import re
from importlib.resources import files

from segue.errors import StoreFailed

SQL = files("segue.stores") / "sql"


def load_queries(backend: str) -> dict[str, str]:
    """Statements by name, from a file in which each begins with `-- name: …`."""
    text = (SQL / f"{backend}_queries.sql").read_text("utf-8")
    pieces = re.split(r"^-- name: (\w+)$", text, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], (piece.strip() for piece in pieces[2::2]), strict=True))


def load_migrations(backend: str) -> list[tuple[int, str]]:
    """Numbered scripts in order."""
    found: list[tuple[int, str]] = []
    for file in SQL.iterdir():
        if match := re.fullmatch(rf"{backend}_(\d{{4}})_\w+\.sql", file.name):
            found.append((int(match[1]), file.read_text("utf-8")))
    return sorted(found)


def newer_database(found: int, known: int) -> StoreFailed:
    """The refusal of a database that a later version of Segue has changed."""
    return StoreFailed(
        f"this database was made by a newer Segue (schema {found}; this one knows {known}). "
        "Start that version again, or restore the backup from before the upgrade"
    )
