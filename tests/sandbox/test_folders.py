"""The folders of sandboxes: what they hold, also where they are closed, and how they go."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from segue.isolation.limits import unlinked_bytes
from segue.sandbox.folders import WAITING_MAX, Folders

# What it says is done as this user, who is nobody else's where there is one.
AS_USER = """
import ctypes, os, sys
from pathlib import Path
from segue.sandbox.counter import become_root_of_own, disk_use
from segue.sandbox.folders import remove_folder
if os.geteuid() == 0:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # may be looked at by itself
place = Path(sys.argv[1], "one")
(place / "closed/inner").mkdir(parents=True)
(place / "closed/inner/file").write_bytes(bytes(100_000))
(place / "link").symlink_to("/usr")
(place / "closed/inner").chmod(0)
(place / "closed").chmod(0)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        if os.geteuid() == 0:
            os.chown(name, 65534, 65534)
        yield Path(name)


def as_user(folder: Path, program: str) -> str:
    words = [sys.executable, "-c", AS_USER + program, folder]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def test_what_is_closed_to_everybody_is_counted(folder: Path) -> None:
    said = as_user(folder, "become_root_of_own(); print(*disk_use(str(place), 100))")
    size, files = map(int, said.split())
    assert (100_000 <= size < 200_000, files) == (True, 4)


def test_what_is_closed_and_may_not_be_opened_counts_as_too_much(folder: Path) -> None:
    assert as_user(folder, "print(disk_use(str(place), 100)[1])") == "101\n"


def test_what_is_closed_to_everybody_is_removed(folder: Path) -> None:
    assert as_user(folder, "remove_folder(place); print(place.exists())") == "False\n"
    assert Path("/usr").exists()


def test_files_without_a_name_are_counted_once(folder: Path) -> None:
    before = unlinked_bytes(os.getpid(), str(folder))
    with open(folder / "x", "wb", buffering=0) as file:
        file.write(bytes(1 << 20))
        assert unlinked_bytes(os.getpid(), str(folder)) == before
        os.unlink(folder / "x")
        with open(f"/proc/self/fd/{file.fileno()}", "rb") as again:
            assert again.fileno() != file.fileno()
            assert unlinked_bytes(os.getpid(), str(folder)) - before == 1 << 20
    assert unlinked_bytes(os.getpid(), str(folder / "gone")) == 0


async def test_folders_are_removed_one_after_the_other_and_their_names_are_free(
    folder: Path,
) -> None:
    folders = Folders()
    for kind in "ab":
        for name in [f"{kind}{number}" for number in range(WAITING_MAX)]:
            (folder / name / "inner").mkdir(parents=True)
            folders.remove(folder / name)
            assert name not in os.listdir(folder)
        assert len(os.listdir(folder)) >= WAITING_MAX
        await folders.room()
        assert len(os.listdir(folder)) <= WAITING_MAX
    await folders.close()
    assert os.listdir(folder) == []


async def test_counter_that_has_ended_is_started_again(folder: Path) -> None:
    folders = Folders()
    (folder / "a").write_text("x")
    for _ in range(2):
        assert (await folders.count(str(folder), 10))[1] == 1
        assert folders._counter is not None
        folders._counter.kill()
        await folders._counter.wait()
        assert await folders.count(str(folder), 10) == (0, 0)
    # Not more than a few above the limit; and a folder that is gone holds nothing.
    for name in "bcdefgh":
        (folder / name).mkdir()
    assert (await folders.count(str(folder), 3))[1] == 4
    assert await folders.count(str(folder / "gone"), 3) == (0, 0)
    await folders.close()
