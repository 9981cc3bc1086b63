"""What is sealed can be read for as long as its key is in the ring, whatever happens to the process or the machine."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from segue.errors import Misconfigured
from segue.seals.cipher import RingSeals
from segue.seals.ring import open_ring, read_ring, rotate_ring
from segue.seams.access import RingKey
from tests.cuts import WAYS, cut_at
from tests.disk import recorded


def test_ring_survives_a_restart_and_a_rotation(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    first = RingSeals(open_ring(path))
    old = first.seal("ada", b"old")
    assert rotate_ring(path) == 2
    second = RingSeals(open_ring(path))
    assert second.open("ada", old) == b"old"
    new = second.seal("ada", b"new")
    assert first.open("ada", new) is None
    assert os.stat(path).st_mode & 0o077 == 0


def test_processes_that_start_together_share_one_ring(tmp_path: Path) -> None:
    path = tmp_path / "ring"
    rings: list[list[RingKey]] = []
    starters = [threading.Thread(target=lambda: rings.append(open_ring(path))) for _ in range(8)]
    for one in starters:
        one.start()
    for one in starters:
        one.join()
    assert rings == rings[:1] * 8
    assert [found.name for found in tmp_path.iterdir()] == ["ring"]


@pytest.mark.parametrize("content", ["", "[]", "{}", '[{"name":"","secret":""}]', "not json"])
def test_broken_ring_stops_the_start(tmp_path: Path, content: str) -> None:
    path = tmp_path / "ring"
    path.write_text(content)
    with pytest.raises(Misconfigured, match="ring"):
        read_ring(path)


@pytest.mark.parametrize("way", WAYS)
def test_ring_in_use_is_still_there_after_a_power_cut(tmp_path: Path, way: str) -> None:
    """Whatever is sealed or hashed under a key is worth nothing without it."""
    path = tmp_path / "ring"
    with recorded(tmp_path) as recording:
        open_ring(path)
        made, after_making = read_ring(path), len(recording.steps)
        rotate_ring(path)
        rotated, after_rotating = read_ring(path), len(recording.steps)
    for place, keys in ((after_making, made), (after_rotating, rotated)):
        image = cut_at(recording.steps, place, random.Random(7), way)
        again = tmp_path / f"again-{len(keys)}"
        again.write_bytes(image["ring"])
        assert read_ring(again) == keys
