"""The memo: what the same bytes became last time."""

from __future__ import annotations

import pytest

from segue.resent.memo import MEMO_BYTES, MEMO_PART, Memo

ENTRY = MEMO_BYTES + 3 + 100


def filled(*keys: bytes, entries: int = MEMO_PART) -> Memo[str]:
    memo = Memo[str](entries * ENTRY)
    for key in keys:
        memo.put("o", key, key.decode(), 100)
    return memo


def test_same_bytes_are_known_to_their_owner_alone() -> None:
    memo = filled(b"abc")
    assert memo.find("o", b"ab" + b"c") == "abc"
    assert memo.find("o", b"abd") is None
    assert memo.find("other", b"abc") is None
    assert (memo.bytes, memo.bytes_of("o"), memo.bytes_of("other")) == (ENTRY, ENTRY, 0)


def test_longest_unused_goes_first() -> None:
    keys = [b"%03d" % n for n in range(MEMO_PART)]
    memo = filled(*keys)
    assert memo.find("o", keys[0]) == "000"
    memo.put("other", b"new", "new", 100)
    assert memo.bytes == MEMO_PART * ENTRY
    assert memo.find("o", keys[1]) is None
    assert memo.find("o", keys[0]) == "000"


def test_value_that_is_put_again_counts_once() -> None:
    memo = filled(b"abc", b"abc")
    assert memo.bytes == ENTRY


@pytest.mark.parametrize("bytes_max", [0, MEMO_PART * ENTRY - 1])
def test_value_that_would_push_out_too_much_is_not_kept(bytes_max: int) -> None:
    memo = Memo[str](bytes_max)
    memo.put("o", b"abc", "abc", 100)
    assert memo.bytes == 0
    assert memo.find("o", b"abc") is None


def test_owner_is_trimmed_alone() -> None:
    memo = filled(b"abc", b"def")
    memo.put("other", b"abc", "abc", 100)
    memo.trim("o", ENTRY)
    assert (memo.bytes_of("o"), memo.bytes_of("other")) == (ENTRY, ENTRY)
    assert memo.find("o", b"def") == "def"
    memo.trim("o", 0)
    memo.shrink(1)
    assert memo.bytes == 0
