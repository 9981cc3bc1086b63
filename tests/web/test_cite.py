from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.seams.tools import Source
from segue.web.cite import CITATIONS_MAX, cite
from segue.wire.codec import encode

A = Source("https://a.com/rain", "Rain")
B = Source("https://b.org/snow_(weather)?q=1", "Snow")
C = Source("file:///docs/guide.md", "Guide")


def marks(text: str) -> list[tuple[str, str]]:
    """What each annotation covers, and what it names."""
    return [(text[one.start_index : one.end_index], one.title) for one in cite(text, [A, B, C])]


@pytest.mark.parametrize(
    "text, found",
    [
        ("It rains [1].", [("[1]", "Rain")]),
        ("It rains[1][2].", [("[1]", "Rain"), ("[2]", "Snow")]),
        (
            "Both [1, 2] and 【3】 and 【2†source】",
            [("[1, 2]", "Rain"), ("[1, 2]", "Snow"), ("【3】", "Guide"), ("【2†source】", "Snow")],
        ),
        ("🌧 héé [2]", [("[2]", "Snow")]),
        ("See [the page](https://a.com/rain).", [("[the page](https://a.com/rain)", "Rain")]),
        (
            "See [1](https://b.org/snow_(weather)?q=1)!",
            [("[1](https://b.org/snow_(weather)?q=1)", "Snow")],
        ),
        ("See https://a.com/rain.", [("https://a.com/rain", "Rain")]),
        ("(https://b.org/snow_(weather)?q=1)", [("https://b.org/snow_(weather)?q=1", "Snow")]),
        ("https://a.com/rain/#today", [("https://a.com/rain/#today", "Rain")]),
        ("in file:///docs/guide.md, there", [("file:///docs/guide.md", "Guide")]),
        ("[0] [4] [99999] [1a] [] [-1]", []),
        ("https://elsewhere.com/ and [x](https://elsewhere.com/)", []),
        ("`a[1]` and ```\nx[2] = 1\n``` but [3]", [("[3]", "Guide")]),
        ("```\nx[2] never closed", []),
        ("", []),
    ],
)
def test_marks_of_an_answer_are_found_where_they_stand(
    text: str, found: list[tuple[str, str]]
) -> None:
    assert marks(text) == found


def test_annotation_has_the_form_of_the_contract() -> None:
    (one,) = cite("So [1]", [A])
    assert encode(one) == (
        b'{"type":"url_citation","start_index":3,"end_index":6,"title":"Rain","url":"https://a.com/rain"}'
    )


def test_without_sources_nothing_is_cited() -> None:
    assert cite("[1] https://a.com/rain", []) == []


@given(st.text(alphabet="[]()【】†`1234, ahtps:/.#\n🌧", max_size=200))
def test_places_are_always_inside_the_text_and_in_order(text: str) -> None:
    found = cite(text, [A, B, C])
    assert all(0 <= one.start_index < one.end_index <= len(text) for one in found)
    assert [one.start_index for one in found] == sorted(one.start_index for one in found)


@pytest.mark.parametrize(
    "piece", ["[", "[x](", "https://", "`", "```", "[1", "http://(", "[1, ", "http://a.b)"]
)
def test_odd_texts_take_no_time(piece: str) -> None:
    began = time.process_time()
    cite(piece * 50_000, [A])
    assert time.process_time() - began < 5


def test_citations_are_bounded() -> None:
    assert len(cite("[1]" * 5_000, [A])) == CITATIONS_MAX


def test_brackets_behind_an_address_take_no_time() -> None:
    began = time.process_time()
    assert [one.end_index for one in cite(f"{A.url}{')' * 80_000}", [A])] == [len(A.url)]
    assert time.process_time() - began < 1
