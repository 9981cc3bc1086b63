"""What every `SkillRows` promises: numbers that grow and never come back, one default, an owner, a quota."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from segue.seams.files import FileQuota
from segue.seams.skills import SkillVersion
from tests.contracts.stores import KINDS, SHARED, Stores, open_stores

PLENTY = FileQuota(files_max=100, bytes_max=1 << 40)


@pytest.fixture(params=KINDS)
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    async with open_stores(request.param, request, tmp_path) as open_one:
        yield await open_one()


async def add(
    stores: Stores,
    number: int,
    skill: str = "skill_a",
    owner: str = "ada",
    quota: FileQuota = PLENTY,
    *,
    is_new: bool = False,
    is_default: bool = False,
) -> bool:
    version = SkillVersion(f"skill-{number}", owner, skill, "cŝv", "Sums. 📎", 10, 900 + number)
    return await stores.store.skills.add(version, quota, is_new=is_new, is_default=is_default)


async def seen(stores: Stores, owner: str = "ada", skill: str | None = None) -> list[object]:
    return [
        (one.skill_id, one.version, one.id, one.rank)
        for one in await stores.store.skills.versions(owner, skill)
    ]


async def test_versions_are_numbered_and_found_by_their_owner_alone(stores: Stores) -> None:
    assert await add(stores, 1, is_new=True)
    assert await add(stores, 2)
    assert await add(stores, 3, is_default=True)
    assert await add(stores, 4, "skill_b", is_new=True)
    assert await seen(stores, skill="skill_a") == [
        ("skill_a", 3, "skill-3", 2),
        ("skill_a", 2, "skill-2", 0),
        ("skill_a", 1, "skill-1", 1),
    ]
    assert [one[0] for one in await seen(stores)] == ["skill_b", *["skill_a"] * 3]  # type: ignore[index]
    first = (await stores.store.skills.versions("ada", "skill_a"))[-1]
    assert (first.name, first.description, first.bytes) == ("cŝv", "Sums. 📎", 10)
    assert (first.created_at, first.skill_created_at) == (901, 901)
    assert await seen(stores, "bob") == await seen(stores, "bob", "skill_a") == []
    assert await seen(stores, skill="skill_\0") == []


async def test_version_is_added_to_a_skill_that_is_there(stores: Stores) -> None:
    assert not await add(stores, 1)
    assert await add(stores, 2, is_new=True)
    assert not await add(stores, 3, is_new=True)
    assert not await add(stores, 4, owner="bob")


async def test_number_of_a_deleted_version_does_not_come_back(stores: Stores) -> None:
    skills = stores.store.skills
    for number in (1, 2):
        assert await add(stores, number, is_new=number == 1)
    # The default is not deleted.
    assert not await skills.delete("ada", "skill_a", 1)
    assert not await skills.delete("bob", "skill_a", 2)
    assert await skills.delete("ada", "skill_a", 2)
    assert not await skills.delete("ada", "skill_a", 2)
    assert not await skills.make_default("ada", "skill_a", 2)
    assert not await skills.is_present("skill-2")
    assert await add(stores, 3)
    assert [one[1] for one in await seen(stores)] == [3, 1]  # type: ignore[index]


async def test_last_default_counts(stores: Stores) -> None:
    skills = stores.store.skills
    for number in (1, 2, 3):
        assert await add(stores, number, is_new=number == 1)
    assert await skills.make_default("ada", "skill_a", 3)
    assert await skills.make_default("ada", "skill_a", 2)
    assert not await skills.make_default("bob", "skill_a", 1)
    assert not await skills.make_default("ada", "skill_a", 9)
    assert max(await skills.versions("ada"), key=lambda one: one.rank).version == 2
    assert await skills.delete("ada", "skill_a", 3)


async def test_deleted_skill_is_gone(stores: Stores) -> None:
    skills = stores.store.skills
    assert await add(stores, 1, is_new=True)
    assert await add(stores, 2)
    assert not await skills.delete("bob", "skill_a")
    assert await skills.is_present("skill-1")
    assert await skills.delete("ada", "skill_a")
    assert not await skills.delete("ada", "skill_a")
    assert await seen(stores) == []
    assert not await skills.is_present("skill-1")


async def test_owner_has_a_quota_that_others_do_not_fill(stores: Stores) -> None:
    quota = FileQuota(files_max=2, bytes_max=25)
    assert await add(stores, 1, is_new=True, quota=quota)
    assert await add(stores, 2, quota=quota)
    assert not await add(stores, 3, quota=quota)
    assert await add(stores, 4, "skill_b", "bob", is_new=True, quota=quota)
    assert await stores.store.skills.delete("ada", "skill_a", 2)
    assert not await add(stores, 5, quota=FileQuota(files_max=9, bytes_max=19))
    assert await add(stores, 5, quota=quota)


async def test_versions_that_come_at_the_same_time_get_numbers_of_their_own(
    stores: Stores,
) -> None:
    assert await add(stores, 0, is_new=True)
    assert all(await asyncio.gather(*(add(stores, number) for number in range(1, 6))))
    assert sorted(one[1] for one in await seen(stores)) == [1, 2, 3, 4, 5, 6]  # type: ignore[index]


@pytest.mark.parametrize("kind", SHARED)
async def test_version_outlives_the_process_that_took_it(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with open_stores(kind, request, tmp_path) as open_one:
        first = await open_one()
        assert await add(first, 1, is_new=True)
        await first.crash()
        assert len(await seen(await open_one())) == 1
