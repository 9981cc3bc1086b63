"""Does a version of a skill have its zip, whatever the store answers?"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import pytest

from segue.errors import Unavailable
from segue.files.objects import FolderObjects
from segue.seams.files import FileQuota
from segue.seams.history import Owner
from segue.seams.skills import SkillVersion
from segue.skills.shelf import Shelf
from segue.stores.shelves import MemoryTables, SkillTable
from tests.bundles.bad import GOOD, packed
from tests.files.test_form import TYPE, form

QUOTA = FileQuota(10, 1 << 20)


async def upload() -> AsyncIterator[bytes]:
    yield form(('files"; filename="skill.zip"', packed(GOOD)))


class SilentRows(SkillTable):
    """A store that writes, and is away when it is asked for what it has given the version."""

    __slots__ = ()
    is_away = False

    async def versions(self, owner: Owner, skill_id: str | None = None) -> Sequence[SkillVersion]:
        if type(self).is_away:
            raise Unavailable("The store is away.")
        return await SkillTable.versions(self, owner, skill_id)


class LostRows(SkillTable):
    """A store that has written the row, and whose answer is lost."""

    __slots__ = ()

    async def add(
        self, version: SkillVersion, quota: FileQuota, *, is_new: bool, is_default: bool
    ) -> bool:
        await SkillTable.add(self, version, quota, is_new=is_new, is_default=is_default)
        raise Unavailable("The store is away.")


@pytest.mark.parametrize("rows", [SilentRows, LostRows])
async def test_version_that_has_a_row_has_its_zip(
    tmp_path: Path, rows: type[SkillTable], monkeypatch: pytest.MonkeyPatch
) -> None:
    shelf = Shelf(rows(MemoryTables()), FolderObjects(tmp_path), QUOTA)
    monkeypatch.setattr(SilentRows, "is_away", True)
    with pytest.raises(Unavailable):
        await shelf.receive("ada", TYPE, upload(), None)
    monkeypatch.setattr(SilentRows, "is_away", False)
    (skill,) = await shelf.newest("ada")
    assert b"".join([part async for part in shelf.read(skill.default)]) == packed(GOOD)
