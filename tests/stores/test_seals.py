"""What is sealed can be read by us alone, for its owner alone, and for as long as its key is in the ring."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.errors import Misconfigured
from segue.seams.access import RingKey
from segue.stores.seals import RingSeals, new_key, open_ring, read_ring, rotate_ring
from tests.cuts import WAYS, cut_at
from tests.disk import recorded

RING = RingSeals([new_key()])


@given(owner=st.text(max_size=20).filter(lambda text: text.isprintable()), body=st.binary())
def test_what_was_sealed_is_opened_for_its_owner(owner: str, body: bytes) -> None:
    assert RING.open(owner, RING.seal(owner, body)) == body


def test_nobody_else_opens_it() -> None:
    sealed = RING.seal("ada", b"secret")
    assert RING.open("eve", sealed) is None
    assert RingSeals([new_key()]).open("ada", sealed) is None


@given(place=st.integers(0, 60), letter=st.sampled_from("AQgw_-0z"))
def test_changed_seal_is_no_seal(place: int, letter: str) -> None:
    sealed = RING.seal("ada", b"a body of some length")
    changed = sealed[:place] + letter + sealed[place + 1 :]
    assert RING.open("ada", changed) in (
        (b"a body of some length",) if changed == sealed else (None,)
    )


@given(st.text(max_size=80))
def test_any_text_is_answered(text: str) -> None:
    assert RING.open("ada", text) is None


def test_two_seals_of_the_same_differ() -> None:
    assert RING.seal("ada", b"x") != RING.seal("ada", b"x")


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
