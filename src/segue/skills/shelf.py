"""How is a skill kept? Each version is a zip and a row: the zip first, then the row; and deleted the other way round.

In: a form as it arrives. Out: versions, durable once they are returned, and their zips in parts. Every skill is its
owner's alone: an absent and a foreign id are the same error. A version never changes. One version is the default; it
cannot be deleted, unless it is the last one: then the skill is gone.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import groupby
from secrets import token_hex
from tempfile import TemporaryFile
from typing import IO

from msgspec import Struct

from segue.bundles.bundle import Bundle, stored_bundle
from segue.bundles.zips import ZIP_BYTES_MAX
from segue.errors import ID_CHARS_MAX, ApiError, InvalidRequest, NotFound, Refused
from segue.files.depot import ORPHANED_S, BufferedUpload, Uploads
from segue.files.form import FileForm
from segue.files.objects import PART_BYTES, Objects, exactly
from segue.ids import new_id
from segue.seams.files import FileQuota
from segue.seams.history import Owner
from segue.seams.skills import SkillRows, SkillVersion
from segue.skills.packing import PARAM, Packing

# The SDKs send several files as a list, and a zip alone.
FIELDS = ("files", "files[]")
# The ids that we make; what else is in the folder or the bucket is not ours.
_OWN_ID = re.compile("skill-[0-9a-f]{32}")
FLAGS = {"": False, "false": False, "true": True}


class KeptSkill(Struct, frozen=True):
    """A skill: the version that counts where none is named, and the newest one."""

    default: SkillVersion
    latest: SkillVersion


class Shelf:
    """The skills of all owners."""

    def __init__(
        self,
        rows: SkillRows,
        objects: Objects,
        quota: FileQuota,
        clock: Callable[[], float] = time.time,
        uploads: Uploads | None = None,
    ) -> None:
        self._rows = rows
        self._objects = objects
        self._quota = quota
        self._clock = clock
        self._uploads = uploads or Uploads()

    # --- in ---

    async def receive(
        self, owner: Owner, content_type: str, body: AsyncIterator[bytes], skill_id: str | None
    ) -> SkillVersion:
        """Keep the skill of a form, or another version of one. Nothing of it stays if it is refused, or its client
        leaves before its end."""
        if skill_id is not None:
            await self.find(owner, skill_id)
        with self._uploads.one_of(owner), ExitStack() as stack:
            first = stack.enter_context(TemporaryFile())
            packing = Packing(first, stack.enter_context(TemporaryFile()))
            stack.callback(packing.close)
            form = FileForm(content_type, FIELDS, packing.begin)
            await form.read(body, packing.write)
            flag = form.fields.get("default", "").lower()
            if flag not in FLAGS:
                raise InvalidRequest("'default' must be 'true' or 'false'.", param="default")
            file = await packing.finish()
            bundle = await asyncio.to_thread(stored_bundle, file, PARAM)
            files = stack.pop_all()
        # From here on it is kept or refused, whether its client is still there or not: a row has its zip.
        keeping = self._keep(owner, skill_id, file, bundle, files, is_default=FLAGS[flag])
        return await asyncio.shield(keeping)

    async def _keep(
        self,
        owner: Owner,
        skill_id: str | None,
        file: IO[bytes],
        bundle: Bundle,
        files: ExitStack,
        *,
        is_default: bool,
    ) -> SkillVersion:
        """Keep a zip that was looked at; `files` closes it."""
        with files:
            version_id = f"skill-{token_hex(16)}"
            upload = BufferedUpload(
                await self._objects.begin(version_id), ZIP_BYTES_MAX, self._uploads
            )
            try:
                file.seek(0)
                while part := await asyncio.to_thread(file.read, PART_BYTES):
                    await upload.write(part)
                await upload.finish()
                version = SkillVersion(
                    id=version_id,
                    owner=owner,
                    skill_id=skill_id or new_id("skill"),
                    name=bundle.name,
                    description=bundle.description,
                    bytes=upload.bytes,
                    created_at=int(self._clock()),
                )
                return await self._add(version, is_new=skill_id is None, is_default=is_default)
            except BaseException:
                await upload.abort()
                # A row may be written, though the answer was lost; where that cannot be seen now, the sweep sees it.
                with suppress(ApiError):
                    if not await self._rows.is_present(version_id):
                        await self._objects.delete(version_id)
                raise

    async def _add(self, version: SkillVersion, *, is_new: bool, is_default: bool) -> SkillVersion:
        """The version with what the store has given it."""
        owner, skill_id = version.owner, version.skill_id
        if not await self._rows.add(version, self._quota, is_new=is_new, is_default=is_default):
            if not is_new:
                await self.find(owner, skill_id)
            raise _over_quota(self._quota)
        found = await self._rows.versions(owner, skill_id)
        return next((each for each in found if each.id == version.id), version)

    # --- out ---

    async def newest(self, owner: Owner) -> list[KeptSkill]:
        """The skills of this owner, the newest first."""
        found = await self._rows.versions(owner)
        return [_kept([*own]) for _, own in groupby(found, lambda version: version.skill_id)]

    async def find(self, owner: Owner, skill_id: str) -> KeptSkill:
        """A skill, or the error that there is none."""
        return _kept(await self.versions(owner, skill_id))

    async def versions(self, owner: Owner, skill_id: str) -> Sequence[SkillVersion]:
        """The versions of a skill, the newest first; never none."""
        found = await self._rows.versions(owner, skill_id)
        if not found:
            raise _not_found(f"Skill with id '{skill_id[:ID_CHARS_MAX]}' not found.")
        return found

    async def version(self, owner: Owner, skill_id: str, wanted: str | None) -> SkillVersion:
        """A version by its number or as "latest"; where none is named, the default one."""
        found = await self.versions(owner, skill_id)
        kept = _kept(found)
        if wanted in (None, "latest"):
            return kept.default if wanted is None else kept.latest
        for version in found:
            if str(version.version) == wanted:
                return version
        message = f"Skill '{skill_id[:ID_CHARS_MAX]}' has no version '{(wanted or '')[:64]}'."
        raise _not_found(message)

    def read(self, version: SkillVersion) -> AsyncGenerator[bytes, None]:
        """The zip of a version, part by part."""
        return exactly(version.bytes, self._objects.read(version.id))

    # --- changes ---

    async def make_default(self, owner: Owner, skill_id: str, wanted: str) -> KeptSkill:
        """Choose the version that counts where none is named."""
        version = await self.version(owner, skill_id, wanted)
        await self._rows.make_default(owner, skill_id, version.version)
        return await self.find(owner, skill_id)

    async def delete(self, owner: Owner, skill_id: str) -> None:
        """Delete a skill with all its versions: their bytes are gone when this returns."""
        found = await self.versions(owner, skill_id)
        await self._rows.delete(owner, skill_id)
        for version in found:
            await self._objects.delete(version.id)

    async def delete_version(self, owner: Owner, skill_id: str, wanted: str) -> SkillVersion:
        """Delete a version; with the last one the skill is deleted."""
        version = await self.version(owner, skill_id, wanted)
        found = await self.versions(owner, skill_id)
        if len(found) == 1:
            await self.delete(owner, skill_id)
            return version
        if not await self._rows.delete(owner, skill_id, version.version):
            # It is the default, or somebody else was faster.
            await self.version(owner, skill_id, str(version.version))
            message = "The default version of a skill cannot be deleted: make another one the default first."
            raise InvalidRequest(message, code="default_version", param="version")
        await self._objects.delete(version.id)
        return version

    async def sweep(self) -> None:
        """Delete the zips that crashes have left without a row."""
        for version_id in await self._objects.ids(self._clock() - ORPHANED_S):
            if _OWN_ID.fullmatch(version_id) and not await self._rows.is_present(version_id):
                await self._objects.delete(version_id)


def _kept(versions: Sequence[SkillVersion]) -> KeptSkill:
    default = max(versions, key=lambda version: (version.rank, version.version))
    return KeptSkill(default, versions[0])


def _not_found(message: str) -> NotFound:
    """The same for an absent skill and for another owner's."""
    return NotFound(message, code="skill_not_found", param="id")


def _over_quota(quota: FileQuota) -> Refused:
    message = (
        f"The skills of this owner would be too many: at most {quota.files_max:,} versions with "
        f"{quota.bytes_max:,} bytes together. Delete some first."
    )
    return Refused(message, status=413, code="skill_quota_exceeded", param=PARAM)
