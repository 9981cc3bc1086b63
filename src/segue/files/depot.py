"""How is a file kept? Its bytes first, then its row; and deleted the other way round.

In: an upload as it arrives. Out: a `StoredFile`, durable once it is returned, and its bytes in parts. Every file is its
owner's alone: an absent, expired or foreign id is the same error.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import contextmanager, suppress
from secrets import token_hex

from msgspec import Struct

from segue.errors import (
    ID_CHARS_MAX,
    ApiError,
    InvalidRequest,
    NotFound,
    Refused,
    TooMany,
    too_large,
)
from segue.files.form import FileForm
from segue.files.objects import PART_BYTES, Objects, ObjectUpload, exactly
from segue.seams.files import FileQuota, FileRows, StoredFile
from segue.seams.history import Owner

PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
EXPIRY_S_MIN, EXPIRY_S_MAX = 3_600, 2_592_000
# The ids that we make; what else is in the folder or the bucket is not ours.
_OWN_ID = re.compile("file-[0-9a-f]{32}")
# Uploads of one owner at once; and how much of all that are on their way may wait in memory for more of it.
OWNER_UPLOADS_MAX = 32
WAITING_BYTES_MAX = 16 * 1024 * 1024
UPLOAD_WAIT_S = 5.0
# Files in one step of a sweep.
BATCH = 100
# Bytes without a row: an upload that is being answered has no row yet.
ORPHANED_S = 3_600


class FileLimits(Struct, frozen=True):
    """How large one file may be, and what an owner may have."""

    file_bytes_max: int
    quota: FileQuota


class Uploads:
    """The uploads that are on their way into this process, whose clients may take their time."""

    def __init__(self) -> None:
        self._by_owner: Counter[Owner] = Counter()
        # What of them waits in memory.
        self.waiting_bytes = 0

    @property
    def part_bytes(self) -> int:
        """So much of each is written at once."""
        return min(PART_BYTES, WAITING_BYTES_MAX // max(1, self._by_owner.total()))

    @contextmanager
    def one_of(self, owner: Owner) -> Iterator[None]:
        """An upload of this owner, while inside; refused where it has too many."""
        if self._by_owner[owner] >= OWNER_UPLOADS_MAX:
            message = f"Too many uploads at once: at most {OWNER_UPLOADS_MAX} of one owner."
            raise TooMany(message, wait_s=UPLOAD_WAIT_S)
        self._by_owner[owner] += 1
        try:
            yield
        finally:
            self._by_owner[owner] -= 1
            # Owners who upload nothing are not kept.
            self._by_owner += Counter()


class Depot:
    """The files of all owners."""

    def __init__(
        self,
        rows: FileRows,
        objects: Objects,
        limits: FileLimits,
        clock: Callable[[], float] = time.time,
        uploads: Uploads | None = None,
    ) -> None:
        self._rows = rows
        self._objects = objects
        self._limits = limits
        self._clock = clock
        self._uploads = uploads or Uploads()
        self.file_bytes_max = limits.file_bytes_max

    # --- in ---

    async def receive(
        self, owner: Owner, content_type: str, body: AsyncIterator[bytes]
    ) -> StoredFile:
        """Keep the file of a form. Nothing of it stays if the form is refused, or its client leaves before its end."""
        with self._uploads.one_of(owner):
            return await self._receive(owner, content_type, body)

    async def _receive(
        self, owner: Owner, content_type: str, body: AsyncIterator[bytes]
    ) -> StoredFile:
        form = FileForm(content_type)
        file_id = f"file-{token_hex(16)}"
        upload = await self._objects.begin(file_id)
        writer = BufferedUpload(upload, self._limits.file_bytes_max, self._uploads)
        try:
            await form.read(body, writer.write)
            purpose, lifetime_s = _purpose(form.fields), _lifetime_s(form.fields)
            if not writer.bytes:
                raise InvalidRequest("The file is empty.", param="file")
        except BaseException:
            await writer.abort()
            raise
        now = int(self._clock())
        file = StoredFile(
            id=file_id,
            owner=owner,
            filename=form.filename or "file",
            purpose=purpose,
            bytes=writer.bytes,
            created_at=now,
            expires_at=None if lifetime_s is None else now + lifetime_s,
        )
        # From here on it is kept or refused, whether its client is still there or not: a row has its bytes.
        return await asyncio.shield(self._keep(file, writer))

    async def _keep(self, file: StoredFile, writer: BufferedUpload) -> StoredFile:
        try:
            await writer.finish()
            if not await self._rows.add(file, self._limits.quota):
                raise over_quota(self._limits.quota)
        except BaseException:
            await writer.abort()
            # A row may be written, though the answer was lost; where that cannot be seen now, the sweep sees it.
            with suppress(ApiError):
                if not await self._rows.present([file.id]):
                    await self._objects.delete(file.id)
            raise
        return file

    # --- out ---

    async def find(self, owner: Owner, file_id: str) -> StoredFile:
        """The row of a file, or the error that there is none."""
        file = await self._rows.find(owner, file_id, int(self._clock()))
        if file is None:
            raise file_not_found(file_id)
        return file

    async def newest(self, owner: Owner, purpose: str | None) -> list[StoredFile]:
        """The files of this owner, the newest first."""
        return [*await self._rows.newest(owner, purpose, int(self._clock()))]

    def read(self, file: StoredFile) -> AsyncGenerator[bytes, None]:
        """The bytes of a file, part by part."""
        return exactly(file.bytes, self._objects.read(file.id))

    # --- away ---

    async def delete(self, owner: Owner, file_id: str) -> None:
        """Delete a file: its bytes are gone when this returns."""
        await self.find(owner, file_id)
        await self._remove(owner, file_id)

    async def sweep(self) -> None:
        """Delete what has expired, and what crashes have left without a row."""
        now = self._clock()
        while expired := await self._rows.expired(int(now), BATCH):
            for file in expired:
                await self._remove(file.owner, file.id)
        await self._objects.tidy()
        kept = [*filter(_OWN_ID.fullmatch, await self._objects.ids(now - ORPHANED_S))]
        for at in range(0, len(kept), BATCH):
            ids = kept[at : at + BATCH]
            for file_id in {*ids} - await self._rows.present(ids):
                await self._objects.delete(file_id)

    async def _remove(self, owner: Owner, file_id: str) -> None:
        await self._rows.delete(owner, file_id)
        await self._objects.delete(file_id)


class BufferedUpload:
    """Writes a file in large parts, up to its largest size."""

    def __init__(self, upload: ObjectUpload, bytes_max: int, uploads: Uploads) -> None:
        self._upload = upload
        self._bytes_max = bytes_max
        self._uploads = uploads
        self._waiting = bytearray()
        self.bytes = 0

    async def write(self, data: bytes) -> None:
        self.bytes += len(data)
        if self.bytes > self._bytes_max:
            raise too_large(self.bytes, self._bytes_max)
        self._waiting += data
        self._uploads.waiting_bytes += len(data)
        if len(self._waiting) >= self._uploads.part_bytes:
            await self._flush()

    async def finish(self) -> None:
        await self._flush()
        await self._upload.finish()

    async def abort(self) -> None:
        self._take()
        await self._upload.abort()

    async def _flush(self) -> None:
        await self._upload.write(self._take())

    def _take(self) -> bytes:
        waiting, self._waiting = bytes(self._waiting), bytearray()
        self._uploads.waiting_bytes -= len(waiting)
        return waiting


def _purpose(fields: dict[str, str]) -> str:
    purpose = fields.get("purpose")
    if not purpose:
        raise InvalidRequest("Missing required parameter: 'purpose'.", param="purpose")
    if purpose not in PURPOSES:
        known = ", ".join(PURPOSES)
        raise InvalidRequest(
            f"Invalid value: '{purpose[:64]}'. Choose one of: {known}.", param="purpose"
        )
    return purpose


def _lifetime_s(fields: dict[str, str]) -> int | None:
    anchor, seconds = fields.get("expires_after[anchor]"), fields.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    if anchor != "created_at":
        param = "expires_after[anchor]"
        raise InvalidRequest(f"'{param}' must be 'created_at'.", param=param)
    is_number = (
        seconds is not None and seconds.isascii() and seconds.isdigit() and len(seconds) < 16
    )
    if seconds is None or not is_number or not EXPIRY_S_MIN <= int(seconds) <= EXPIRY_S_MAX:
        param = "expires_after[seconds]"
        message = f"'{param}' must be from {EXPIRY_S_MIN} to {EXPIRY_S_MAX}."
        raise InvalidRequest(message, param=param)
    return int(seconds)


def file_not_found(file_id: str) -> NotFound:
    """The same message for an absent file, an expired one and another owner's."""
    message = f"No such File object: {file_id[:ID_CHARS_MAX]}"
    return NotFound(message, code="file_not_found", param="id")


def over_quota(quota: FileQuota) -> Refused:
    message = (
        f"The files of this owner would be too many: at most {quota.files_max:,} files with "
        f"{quota.bytes_max:,} bytes together. Delete some first."
    )
    return Refused(message, status=413, code="file_quota_exceeded", param="file")
