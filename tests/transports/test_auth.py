"""Where a request carries its API key."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.transports.auth import bearer, offered


@pytest.mark.parametrize(
    "header, secret",
    [
        ("", None),
        ("Bearer abc", "abc"),
        ("bearer   abc ", "abc"),
        ("Bearer", ""),
        ("Bearer a b", ""),
        ("Basic abc", ""),
        ("Bearer abc, Bearer def", ""),
    ],
)
def test_bearer_is_read(header: str, secret: str | None) -> None:
    assert bearer(header) == secret


def test_offered_key_is_read_among_other_protocols() -> None:
    assert offered(["segue.v1, segue-key.abc"]) == "abc"
    assert offered(["segue.v1", "segue-key.abc"]) == "abc"
    assert offered(["segue.v1"]) is None
    assert offered([]) is None


@given(st.text())
def test_any_header_is_read_without_complaint(text: str) -> None:
    bearer(text)
    offered([text])
