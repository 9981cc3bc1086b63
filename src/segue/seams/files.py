"""Which files do clients keep here? One row for each; the bytes are elsewhere, under the id of the file.

Rows and bytes are written in this order: the bytes of a file are whole and durable before its row exists, and the row
is gone before its bytes are. So a row always has its bytes, and bytes without a row are what a crash has left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from segue.seams.history import Owner


class StoredFile(Struct, frozen=True):
    """A file that a client has uploaded."""

    id: str
    owner: Owner
    filename: str
    purpose: str
    bytes: int
    created_at: int
    # None: until it is deleted.
    expires_at: int | None = None


class FileQuota(Struct, frozen=True):
    """How many files one owner may have, and how large they may be together."""

    files_max: int
    bytes_max: int


class FileRows(Protocol):
    """The rows of all files. `now` is the caller's clock: what has expired by then is not found."""

    async def add(self, file: StoredFile, quota: FileQuota) -> bool:
        """Write the row, durably; False if its owner would then have more than this."""

    async def find(self, owner: Owner, file_id: str, now: int) -> StoredFile | None:
        """The file; None if it is absent, expired or another owner's."""

    async def newest(self, owner: Owner, purpose: str | None, now: int) -> Sequence[StoredFile]:
        """The files of this owner, the newest first; with a purpose, those that have it."""

    async def delete(self, owner: Owner, file_id: str) -> bool:
        """Delete the row; False if there is none."""

    async def expired(self, now: int, count_max: int) -> Sequence[StoredFile]:
        """Some of the files that have expired, of all owners."""

    async def present(self, file_ids: Sequence[str]) -> set[str]:
        """Those of these ids that have a row, whosever."""
