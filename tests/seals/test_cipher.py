"""What is sealed can be read by us alone, and for its owner alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from segue.seals.cipher import RingSeals, new_key

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
