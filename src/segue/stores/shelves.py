"""What is remembered of the files and skills of clients, in whatever database?

The statements are the same for all databases, with numbered values; a store without a database runs them on tables in
memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import msgspec
from msgspec.structs import astuple

from segue.seams.files import FileQuota, StoredFile
from segue.seams.history import Owner
from segue.seams.skills import SkillVersion
from segue.stores.records import is_text
from segue.stores.sql_files import SQL, load_queries

T = TypeVar("T")

# Two that add a version at the same time get the same number; the second tries again.
TRIES_MAX = 8


class Tables(Protocol):
    """A database with these tables."""

    async def fetch(self, name: str, make: Callable[..., T], *values: object) -> list[T]:
        """What `make` makes of the columns of each row that the statement of this name finds."""

    async def execute(self, name: str, *values: object) -> int:
        """Run the statement of this name; how many rows it touched."""


def numbered(values: Sequence[object]) -> dict[str, object]:
    """The values of a statement as SQLite takes them."""
    return {str(number): value for number, value in enumerate(values, 1)}


class MemoryTables:
    """The tables of a store without a database; as many rows as there are files, whose bytes are not in memory."""

    def __init__(self) -> None:
        # Imported here: a server with PostgreSQL does not need it.
        import sqlite3

        self._connection = sqlite3.connect(
            ":memory:", isolation_level=None, check_same_thread=False
        )
        for name in ("sqlite_0010_files.sql", "sqlite_0011_skills.sql"):
            self._connection.executescript((SQL / name).read_text("utf-8"))
        self._queries = load_queries("sqlite")

    async def fetch(self, name: str, make: Callable[..., T], *values: object) -> list[T]:
        if not is_text(*(value for value in values if isinstance(value, str))):
            return []
        found = self._connection.execute(self._queries[name], numbered(values))
        return [make(*row) for row in found]

    async def execute(self, name: str, *values: object) -> int:
        return self._connection.execute(self._queries[name], numbered(values)).rowcount


@dataclass(frozen=True, slots=True)
class TurnList:
    tables: Tables

    async def newest(
        self, owner: Owner, before: str | None, count: int, *, is_tips: bool
    ) -> Sequence[str]:
        return await self.tables.fetch("newest_turns", str, owner, before, count, int(is_tips))

    async def stored_bytes(self, owner: Owner, turn_id: str, *, with_chain: bool) -> int:
        found = await self.tables.fetch("turn_bytes", int, owner, turn_id, int(with_chain))
        return sum(found)


@dataclass(frozen=True, slots=True)
class FileTable:
    tables: Tables

    async def add(self, file: StoredFile, quota: FileQuota) -> bool:
        return await self.tables.execute("add_file", *astuple(file), *astuple(quota)) > 0

    async def find(self, owner: Owner, file_id: str, now: int) -> StoredFile | None:
        found = await self.tables.fetch("find_file", StoredFile, owner, file_id, now)
        return next(iter(found), None)

    async def newest(self, owner: Owner, purpose: str | None, now: int) -> Sequence[StoredFile]:
        return await self.tables.fetch("newest_files", StoredFile, owner, purpose, now)

    async def delete(self, owner: Owner, file_id: str) -> bool:
        is_name = is_text(owner, file_id)
        return is_name and await self.tables.execute("delete_file", owner, file_id) > 0

    async def expired(self, now: int, count_max: int) -> Sequence[StoredFile]:
        return await self.tables.fetch("expired_files", StoredFile, now, count_max)

    async def present(self, file_ids: Sequence[str]) -> set[str]:
        wanted = msgspec.json.encode(file_ids).decode()
        return {*await self.tables.fetch("present_files", str, wanted)}


@dataclass(frozen=True, slots=True)
class SkillTable:
    tables: Tables

    async def add(
        self, version: SkillVersion, quota: FileQuota, *, is_new: bool, is_default: bool
    ) -> bool:
        # The rest is given by the statement.
        values = (*astuple(version)[:7], *astuple(quota), is_new, is_default)
        for _ in range(TRIES_MAX):
            if await self.tables.execute("add_skill_version", *values) > 0:
                return True
        return False

    async def versions(self, owner: Owner, skill_id: str | None = None) -> Sequence[SkillVersion]:
        return await self.tables.fetch("skill_versions", SkillVersion, owner, skill_id)

    async def make_default(self, owner: Owner, skill_id: str, version: int) -> bool:
        key = ("make_default_version", owner, skill_id, version)
        return is_text(owner, skill_id) and await self.tables.execute(*key) > 0

    async def delete(self, owner: Owner, skill_id: str, version: int | None = None) -> bool:
        name = "delete_skill" if version is None else "delete_skill_version"
        values = (owner, skill_id) if version is None else (owner, skill_id, version)
        return is_text(owner, skill_id) and await self.tables.execute(name, *values) > 0

    async def is_present(self, version_id: str) -> bool:
        return bool(await self.tables.fetch("present_skill_version", str, version_id))
