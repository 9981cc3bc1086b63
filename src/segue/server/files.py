"""Where are the files and skills of clients? In the place that the settings name, opened by the first request that
needs it."""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from functools import cached_property
from typing import TYPE_CHECKING

from segue.errors import ApiError, Refused, need_package
from segue.seams.files import FileQuota, FileRows
from segue.seams.history import Owner
from segue.seams.skills import SkillRows, SkillVersion
from segue.settings.values import Settings

if TYPE_CHECKING:
    from segue.files.depot import Depot, Uploads
    from segue.files.objects import Objects
    from segue.skills.shelf import Shelf

log = logging.getLogger(__name__)

# Files of one owner; a list of them is one answer.
OWNER_FILES_MAX = 10_000
OWNER_SKILLS_MAX = 1_000
SWEEP_EVERY_S = 3_600.0
NO_PLACE = (
    "This server has no place for files: with PostgreSQL, name a folder that all machines share (--files-dir) "
    "or a bucket (--files-url s3://BUCKET)."
)


def has_place(settings: Settings) -> bool:
    """Whether files can be kept."""
    is_shared = settings.store_kind == "postgresql"
    return bool(settings.files_dir or settings.files_url) or not is_shared


class LateFiles(AsyncExitStack):
    """The files of clients; what holds them is loaded late, and closed on the way out."""

    def __init__(self, settings: Settings, rows: FileRows, skills: SkillRows) -> None:
        super().__init__()
        self._settings = settings
        self._rows = rows
        self._skills = skills
        if settings.files_url:
            need_package("files_url", "obstore", "s3")

    def load(self) -> Depot:
        """The files; an error where there is no place for them."""
        return self._depot

    def load_skills(self) -> Shelf:
        """The skills; the same error where there is no place for them."""
        return self._shelf

    @cached_property
    def _depot(self) -> Depot:
        from segue.files.depot import Depot, FileLimits

        settings = self._settings
        quota = FileQuota(OWNER_FILES_MAX, settings.owner_files_bytes_max)
        limits = FileLimits(settings.file_bytes_max, quota)
        return Depot(self._rows, self._objects, limits, uploads=self._uploads)

    @cached_property
    def _shelf(self) -> Shelf:
        from segue.skills.shelf import Shelf

        quota = FileQuota(OWNER_SKILLS_MAX, self._settings.owner_files_bytes_max)
        return Shelf(self._skills, self._objects, quota, uploads=self._uploads)

    @cached_property
    def _uploads(self) -> Uploads:
        from segue.files.depot import Uploads

        return Uploads()

    @property
    def waiting_bytes(self) -> int:
        """What of uploads waits in memory for the rest of them."""
        return self._uploads.waiting_bytes if "_uploads" in self.__dict__ else 0

    @cached_property
    def _objects(self) -> Objects:
        settings = self._settings
        if not has_place(settings):
            raise Refused(NO_PLACE, status=501, code="files_not_set_up")
        if settings.files_url:
            from segue.files.bucket import open_bucket

            return open_bucket(settings.files_url)
        from segue.files.objects import FolderObjects, temporary_folder

        path = settings.files_path
        if path is None:
            path = temporary_folder()
            self.callback(shutil.rmtree, path, ignore_errors=True)
        return FolderObjects(path)

    async def delete_object(self, object_id: str) -> None:
        """Delete the bytes of a file or a skill, whose row is gone."""
        await self._objects.delete(object_id)

    # --- for inputs and containers ---

    async def open_file(
        self, owner: Owner, file_id: str
    ) -> tuple[str, int, AsyncGenerator[bytes, None]]:
        file = await self.load().find(owner, file_id)
        return file.filename, file.bytes, self.load().read(file)

    async def find_skill(self, owner: Owner, skill_id: str, version: str | None) -> SkillVersion:
        return await self.load_skills().version(owner, skill_id, version)

    def read_skill(self, version: SkillVersion) -> AsyncGenerator[bytes, None]:
        return self.load_skills().read(version)

    async def sweep_forever(self) -> None:
        """Delete what has expired, and what crashes have left."""
        while has_place(self._settings):
            try:
                # Most servers have no files, and load nothing for them.
                if self._has_files() or await self._rows.expired(int(time.time()), 1):
                    await self.load().sweep()
                    if self._settings.environment != "off":
                        await self.load_skills().sweep()
            except ApiError:
                log.exception(
                    "expired files could not be deleted; trying again in %s s", SWEEP_EVERY_S
                )
            await asyncio.sleep(SWEEP_EVERY_S)

    def _has_files(self) -> bool:
        """Whether something was kept before, or is now."""
        path = self._settings.files_path
        return "_depot" in self.__dict__ or (path is not None and path.is_dir())
