"""Ids of turns are in the order of time, name their worker, and cannot be guessed."""

from __future__ import annotations

import time

import pytest

from segue.ids import new_turn_id, tag_of


@pytest.mark.parametrize("home", ["", "0123abcd"])
def test_ids_of_turns_are_in_the_order_of_time(home: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = []
    for now in (1_794_827_440, 1_794_827_441, 4_000_000_000):
        monkeypatch.setattr(time, "time", lambda now=now: now + 0.5)
        ids.append(new_turn_id(home))
    assert ids == sorted(ids)
    assert {len(one) for one in ids} == {37}
    assert not home or {tag_of(one) for one in ids} == {home}


def test_ids_of_one_second_differ() -> None:
    ids = {new_turn_id("0123abcd") for _ in range(10_000)}
    assert len(ids) == 10_000
