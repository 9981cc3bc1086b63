"""What clients put into a container from outside is held to its limits, also while nothing runs inside."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest

from segue.errors import ApiError
from segue.isolation.limits import MIB, Limits
from segue.sandbox.client import KeeperClient
from segue.sandbox.containers import Containers
from segue.sandbox.keeper import TRANSFERS_MAX, Keeper
from segue.sandbox.messages import FileEntry, RunCommand
from tests.escapes.conftest import outside, sandboxes_can_be_made
from tests.escapes.places import ADAPTERS, SMALL, Shell, containers_with
from tests.support import until

__all__ = ["outside", "sandboxes_can_be_made"]


class OpenContainer(NamedTuple):
    """A container of a keeper in this process."""

    containers: Containers
    client: KeeperClient
    id: str

    async def write(self, path: str, size: int) -> None:
        await self.client.write_file("me", self.id, path, bytes(size))

    async def entries(self) -> list[FileEntry]:
        return await self.client.list_files("me", self.id)

    async def paths(self) -> list[str]:
        return [entry.path for entry in await self.entries()]


@asynccontextmanager
async def opened(outside: Path, limits: Limits = SMALL) -> AsyncIterator[OpenContainer]:
    async with containers_with(outside / "own", ADAPTERS[1], limits=limits) as containers:
        socket = str(outside / "keeper")
        server = await asyncio.start_unix_server(Keeper(containers).on_connection, socket)
        async with server:
            yield OpenContainer(containers, KeeperClient(socket), Shell(containers).id)


async def test_uploads_together_are_not_larger_than_the_disk_of_a_container(outside: Path) -> None:
    async with opened(outside) as place:
        await place.write("a", 16 * MIB)
        for _ in range(3):
            with pytest.raises(ApiError) as refused:
                await place.write("b", 16 * MIB)
            assert (refused.value.status, refused.value.code) == (413, "container_full")
        # What was refused is not there in part.
        assert await place.paths() == ["a"]
        await place.client.delete_file("me", place.id, "a")
        await place.write("b", 16 * MIB)
        # The container has ended for none of this.
        run = RunCommand("me", place.id, "cat b | wc -c", 10.0, 100)
        said = [piece.stdout async for piece in place.client.run(run)]
        assert "".join(said) == f"{16 * MIB}\n"


async def test_upload_that_is_refused_leaves_the_file_of_its_name_as_it_was(outside: Path) -> None:
    async with opened(outside) as place:
        await place.write("a", 5)
        with pytest.raises(ApiError, match="full"):
            await place.write("a", 64 * MIB)
        assert [(entry.path, entry.size) for entry in await place.entries()] == [("a", 5)]
        await place.write("a", 7)
        assert [(entry.path, entry.size) for entry in await place.entries()] == [("a", 7)]


async def test_uploads_beside_each_other_share_what_is_free(outside: Path) -> None:
    async with opened(outside) as place:

        async def write(path: str) -> str:
            try:
                await place.write(path, 10 * MIB)
            except ApiError as error:
                return error.code
            return "kept"

        said = await asyncio.gather(*map(write, "abcd"))
        assert {*said} <= {"container_full", "kept"}
        assert len(await place.paths()) == said.count("kept") <= 2
        # What was refused has given its room back.
        assert await write("e") == ("kept" if said.count("kept") < 2 else "container_full")


async def test_small_files_count_as_files_and_as_what_they_take(outside: Path) -> None:
    async with opened(outside, replace(SMALL, files=6)) as place:
        # A folder is a file.
        for name in ("a/1", "a/2", "3", "4", "5"):
            await place.write(name, 1)
        with pytest.raises(ApiError, match="full"):
            await place.write("6", 1)
        assert len(await place.paths()) == 5
    async with opened(outside, replace(SMALL, disk_bytes=16 * 1024)) as place:
        for name in "abc":
            await place.write(name, 1)
        with pytest.raises(ApiError, match="full"):
            await place.write("d", 10_000)


async def test_names_of_uploads_are_forgotten_with_their_files(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segue.sandbox.keeper.UPLOADED_MAX", 3)
    async with opened(outside) as place:
        held = place.containers.find("me", place.id)
        for number in range(10):
            await place.write(str(number), 1)
            assert len(held.uploaded) <= 3
        assert "9" in held.uploaded
        await place.client.delete_file("me", place.id, "9")
        assert "9" not in held.uploaded


async def test_client_that_moves_many_files_slowly_is_refused_more(outside: Path) -> None:
    async with opened(outside) as place, AsyncExitStack() as open:
        held = place.containers.find("me", place.id)
        for number in range(TRANSFERS_MAX):
            write = await open.enter_async_context(
                place.client.writing("me", place.id, str(number))
            )
            await write(b"first")
        await until(lambda: held.transfers == TRANSFERS_MAX)
        with pytest.raises(ApiError, match="files of this container") as refused:
            await place.write("more", 1)
        assert refused.value.status == 429
        await open.aclose()
        await place.write("more", 1)
        assert held.transfers == 0


async def test_slow_upload_keeps_its_container(outside: Path) -> None:
    async with opened(outside) as place:
        held = place.containers.find("me", place.id)
        async with place.client.writing("me", place.id, "a") as write:
            await write(b"first")
            async with asyncio.timeout(5):
                while not await place.paths():
                    pass
            held.last_active_at = 0.0
            await write(b"second")
            await until(lambda: held.last_active_at > 0)
