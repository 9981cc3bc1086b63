"""A power cut of a real file system: its image as it is on the disk, copied while the server's writes are under way.

The store lies on an ext4 in a file, mounted by a loop device. The server is stopped between two instructions and the
file is copied: it has what was synced, and what the kernel has happened to write; what is only in its memory is lost,
as in a power cut. Mounting needs root; where that is not to be had `test_power_cuts.py` simulates the disk instead.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.crashes import Book, check, halves, writing
from tests.kills import LOAD_S, new_seed
from tests.support import served_process

pytestmark = [pytest.mark.reliability, pytest.mark.timeout(1_800)]

CUTS = 10
IMAGE_BYTES = 48 * 1024 * 1024
RUN_S = 60


def run(*words: str | Path) -> None:
    subprocess.run(words, check=True, timeout=RUN_S, capture_output=True)


@contextmanager
def mounted(image: Path, folder: Path) -> Iterator[Path]:
    """The file system in this file. It stays in use for a moment after its last process was killed."""
    folder.mkdir()
    run("mount", "-o", "loop", image, folder)
    try:
        yield folder
    finally:
        run("umount", "--lazy", folder)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """An empty file system in a file."""
    found = tmp_path / "image"
    with found.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    try:
        run("mkfs.ext4", "-q", "-F", found)
        with mounted(found, tmp_path / "try"):
            pass
    except (OSError, subprocess.SubprocessError) as error:
        pytest.skip(f"no file system can be mounted here ({error}); test_power_cuts.py needs none")
    return found


async def cut(image: Path, folder: Path, durability: str, load_s: float) -> list[str]:
    """Lose the power of a server under load; what is missing afterwards."""
    book, left = Book(), folder / "left"
    os.mkdir(folder)
    empty = folder / "before"
    shutil.copyfile(image, empty)
    words = ["--durability", durability, "--tps", "3000", "--store"]
    with mounted(empty, folder / "disk") as disk:
        store = f"sqlite:///{disk / 'turns.db'}"
        with served_process(*words, store, cwd=folder) as served:
            async with writing(served, book) as writers:
                await asyncio.sleep(load_s)
                served.process.send_signal(signal.SIGSTOP)
                shutil.copyfile(empty, left)
                served.process.kill()
                await asyncio.to_thread(served.process.wait, RUN_S)
                await asyncio.gather(*writers)
    with mounted(left, folder / "again") as disk:
        store = f"sqlite:///{disk / 'turns.db'}"
        with served_process(*words, store, cwd=folder) as served:
            found = [*halves(disk / "turns.db"), *await check(served, book.facts)]
            assert served.stop() == 0
    assert book.facts
    return found


async def test_file_system_has_all_that_was_acknowledged(tmp_path: Path, image: Path) -> None:
    chance = random.Random(new_seed())
    for number in range(CUTS):
        found = await cut(image, tmp_path / str(number), "full", chance.uniform(*LOAD_S) + 0.2)
        assert found == [], f"cut {number}"


async def test_file_system_lacks_what_relaxed_durability_acknowledged(
    tmp_path: Path, image: Path
) -> None:
    chance = random.Random(new_seed())
    for number in range(CUTS):
        found = await cut(image, tmp_path / str(number), "relaxed", chance.uniform(*LOAD_S) + 0.2)
        if any(word.startswith("lost: ") for word in found):
            return
    pytest.fail("nothing was lost")
