"""What every `FileRows` promises: a row is found by its owner until it is deleted or expires, within a quota."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from segue.seams.files import FileQuota, StoredFile
from tests.contracts.stores import KINDS, SHARED, Stores, open_stores

PLENTY = FileQuota(files_max=100, bytes_max=1 << 40)
NOW = 1_000


@pytest.fixture(params=KINDS)
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    async with open_stores(request.param, request, tmp_path) as open_one:
        yield await open_one()


def file(number: int = 0, owner: str = "ada", **more: object) -> StoredFile:
    fields: dict[str, object] = {
        "filename": "Отчёт 📎.pdf",
        "purpose": "user_data",
        "bytes": 10,
        "created_at": 900 + number,
    }
    return StoredFile(id=f"file-{number}", owner=owner, **(fields | more))  # type: ignore[arg-type]


async def test_file_is_found_by_its_owner_alone(stores: Stores) -> None:
    assert await stores.files.add(file(), PLENTY)
    assert await stores.files.find("ada", "file-0", NOW) == file()
    assert await stores.files.find("bob", "file-0", NOW) is None
    assert await stores.files.find("ada", "file-1", NOW) is None
    assert await stores.files.find("ada", "file-\0", NOW) is None


async def test_files_are_listed_newest_first_and_by_purpose(stores: Stores) -> None:
    for number, purpose in enumerate(("vision", "user_data", "vision")):
        assert await stores.files.add(file(number, purpose=purpose), PLENTY)
    assert await stores.files.add(file(7, owner="bob"), PLENTY)
    assert [row.id for row in await stores.files.newest("ada", None, NOW)] == [
        "file-2",
        "file-1",
        "file-0",
    ]
    assert [row.id for row in await stores.files.newest("ada", "vision", NOW)] == [
        "file-2",
        "file-0",
    ]


async def test_deleted_file_is_gone_and_is_deleted_once(stores: Stores) -> None:
    assert await stores.files.add(file(), PLENTY)
    assert not await stores.files.delete("bob", "file-0")
    assert await stores.files.delete("ada", "file-0")
    assert not await stores.files.delete("ada", "file-0")
    assert await stores.files.find("ada", "file-0", NOW) is None
    assert await stores.files.newest("ada", None, NOW) == []


async def test_expired_file_is_not_found_and_is_named_for_deletion(stores: Stores) -> None:
    assert await stores.files.add(file(0, expires_at=NOW), PLENTY)
    assert await stores.files.add(file(1, expires_at=NOW + 1), PLENTY)
    assert await stores.files.find("ada", "file-0", NOW - 1) is not None
    assert await stores.files.find("ada", "file-0", NOW) is None
    assert [row.id for row in await stores.files.newest("ada", None, NOW)] == ["file-1"]
    assert [row.id for row in await stores.files.expired(NOW, 10)] == ["file-0"]
    assert len(await stores.files.expired(NOW + 1, 10)) == 2
    assert len(await stores.files.expired(NOW + 1, 1)) == 1


async def test_owner_has_a_quota_that_others_do_not_fill(stores: Stores) -> None:
    quota = FileQuota(files_max=3, bytes_max=25)
    assert await stores.files.add(file(0), quota)
    assert await stores.files.add(file(1), quota)
    assert not await stores.files.add(file(2), quota)
    assert await stores.files.add(file(2, bytes=5), quota)
    assert not await stores.files.add(file(3, bytes=0), quota)
    assert await stores.files.add(file(4, owner="bob"), quota)
    await stores.files.delete("ada", "file-0")
    assert await stores.files.add(file(5), quota)


async def test_what_has_expired_does_not_fill_the_quota(stores: Stores) -> None:
    quota = FileQuota(files_max=1, bytes_max=10)
    assert await stores.files.add(file(0, expires_at=905), quota)
    assert not await stores.files.add(file(1), quota)
    assert await stores.files.add(file(6), quota)


@pytest.mark.parametrize("kind", SHARED)
async def test_file_outlives_the_process_that_took_it(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with open_stores(kind, request, tmp_path) as open_one:
        first = await open_one()
        assert await first.files.add(file(), PLENTY)
        await first.crash()
        assert await (await open_one()).files.find("ada", "file-0", NOW) == file()


async def test_ids_with_a_row_are_told_from_those_without(stores: Stores) -> None:
    assert await stores.files.add(file(0), PLENTY)
    assert await stores.files.add(file(1, owner="bob"), PLENTY)
    assert await stores.files.present(["file-0", "file-1", "file-2"]) == {"file-0", "file-1"}
    assert await stores.files.present([]) == set()
