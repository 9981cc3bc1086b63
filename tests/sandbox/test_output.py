"""What is shown of an output: the beginning as it comes, the end at the end, the same however it is cut."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.sandbox.output import CHARS_MAX, CHARS_USUAL, Excerpt, chars_of


def shown(data: bytes, chars_max: int, size: int) -> str:
    excerpt = Excerpt(chars_max)
    pieces = [data[start : start + size] for start in range(0, len(data), size)]
    return "".join([*map(excerpt.feed, pieces), excerpt.close()])


@pytest.mark.parametrize(
    "data, chars_max, text",
    [
        (b"short", 10, "short"),
        (b"0123456789", 10, "0123456789"),
        (
            b"0123456789A",
            10,
            "01234\n[\xe2\x80\xa6 1 characters left out \xe2\x80\xa6]\n6789A".encode(
                "latin-1"
            ).decode(),
        ),
        (b"anything", 0, "\n[… 8 characters left out …]\n"),
        ("äöü€𝄞".encode(), 5, "äöü€𝄞"),
        (b"a\xffb\0c\xe2\x82", 9, "a\ufffdb\ufffdc\ufffd"),
        (b"", 10, ""),
    ],
)
def test_text_is_the_same_however_it_is_cut(data: bytes, chars_max: int, text: str) -> None:
    for size in range(1, len(data) + 2):
        assert shown(data, chars_max, size) == text


@given(st.binary(max_size=60) | st.text(max_size=20).map(str.encode), st.integers(0, 12), st.data())
def test_any_bytes_are_the_same_text_however_they_are_cut(
    data: bytes, chars_max: int, cuts: st.DataObject
) -> None:
    excerpt, left, said = Excerpt(chars_max), data, ""
    while left:
        size = cuts.draw(st.integers(1, len(left)))
        said, left = said + excerpt.feed(left[:size]), left[size:]
    assert said + excerpt.close() == shown(data, chars_max, max(1, len(data)))


@given(st.text(max_size=40), st.integers(0, 12))
def test_characters_that_are_left_out_are_counted(text: str, chars_max: int) -> None:
    text = text.replace("\0", "")
    head, tail = chars_max - chars_max // 2, chars_max // 2
    expected = text
    if len(text) > chars_max:
        note = f"\n[… {len(text) - chars_max} characters left out …]\n"
        expected = text[:head] + note + text[len(text) - tail :]
    assert shown(text.encode(), chars_max, 7) == expected


def test_endless_output_is_held_in_little_memory() -> None:
    excerpt = Excerpt(100)
    for _ in range(1_000):
        assert len(excerpt.feed(b"y\n" * 1_000)) <= 50
        assert len(excerpt._tail) <= 2_100
    assert len(excerpt.close()) < 150


def test_limit_of_a_call_is_bounded() -> None:
    assert [chars_of(wanted) for wanted in (None, 10, -1, 10**9)] == [CHARS_USUAL, 10, 0, CHARS_MAX]
