"""Which skills do clients keep here? One row for each version; its zip is elsewhere, under the id of the version.

Rows and zips are written as those of files are (`seams/files.py`). A version never changes, and its number is not
given again after it was deleted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from segue.seams.files import FileQuota
from segue.seams.history import Owner


class SkillVersion(Struct, frozen=True):
    """A version of a skill."""

    id: str
    owner: Owner
    skill_id: str
    name: str
    description: str
    bytes: int
    created_at: int
    # Given by the store: its number, when its skill was made, and the place among the versions that were made the
    # default one: the last of them is it.
    version: int = 0
    skill_created_at: int = 0
    rank: int = 0


class SkillRows(Protocol):
    """The rows of all versions."""

    async def add(
        self, version: SkillVersion, quota: FileQuota, *, is_new: bool, is_default: bool
    ) -> bool:
        """Write the row, durably, with the next number of its skill; False if its owner would then have more than
        this, or the skill is not there. `is_new`: it is the first version of a new skill, and its default."""

    async def versions(self, owner: Owner, skill_id: str | None = None) -> Sequence[SkillVersion]:
        """All versions of this owner's skills, or of one of them, the newest first."""

    async def make_default(self, owner: Owner, skill_id: str, version: int) -> bool:
        """Make this version the default; False if it is not there."""

    async def delete(self, owner: Owner, skill_id: str, version: int | None = None) -> bool:
        """Delete a version that is not the default, or with all its versions the skill; False if there was none."""

    async def is_present(self, version_id: str) -> bool:
        """Whether this version has a row, whosever."""
