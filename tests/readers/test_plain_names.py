"""Is each tool called by a name of its own at a chat endpoint, and is that tool meant by it?"""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.readers.plain_names import PlainNames, plain_name
from segue.wire.tools import FunctionTool, Offer


def offer(name: str, namespace: str | None = None) -> Offer:
    return Offer(FunctionTool(name=name), namespace)


GITHUB = "github_enterprise_production_readonly"
# Tools that would be called alike by a chat endpoint: cut, with a dot, with letters that it does not know.
ALIKE = (
    (offer("get_pull_request_reviews_list", GITHUB), offer("get_pull_request_reviews_delete_all", GITHUB)),
    (offer("files__read"), offer("read", "files")),
    (offer("b.c", "a"), offer("b__c", "a")),
    (offer("rm é", "own"), offer("rm è", "own")),
    (offer("x" * 64), offer("x" * 65), offer("x" * 66)),
    (offer(""), offer("_")),
)  # fmt: skip


@pytest.mark.parametrize("offers", ALIKE)
def test_chat_endpoint_knows_each_tool_by_a_name_of_its_own(offers: tuple[Offer, ...]) -> None:
    for given_offers in (offers, offers[::-1]):
        names = PlainNames(given_offers)
        called = [names.name(one.qualified_name) for one in offers]

        assert len(set(called)) == len(offers)
        assert [names.offer(name) for name in called] == list(offers)
        assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", name) for name in called)


def test_name_is_respelled_only_beside_one_that_is_like_it() -> None:
    listing, deleting = ALIKE[0]
    alone, both = PlainNames([listing]), PlainNames([listing, deleting])

    assert alone.name(listing.qualified_name) == plain_name(listing.qualified_name)
    assert both.name(deleting.qualified_name).endswith("__get_pull_request_reviews_delete_all")
    # A third changes neither, and one that is written as it is keeps its name.
    more = PlainNames([offer("list", GITHUB), deleting, listing])
    assert more.respelled == both.respelled
    files = PlainNames(ALIKE[1])
    assert (files.name("files__read"), len(files.respelled)) == ("files__read", 1)


def test_tool_of_the_history_is_not_called_like_one_that_is_offered() -> None:
    names = PlainNames([offer("files__read")])

    assert names.name("files.read") not in ("files__read", "files.read")
    assert names.name("files.write") == "files__write"


@given(st.lists(st.tuples(st.text("ab._é-", max_size=70), st.sampled_from([None, "a", "a.b"]))))
def test_no_two_tools_have_one_name(pairs: list[tuple[str, str | None]]) -> None:
    offers = [offer(name, namespace) for name, namespace in pairs]
    names = PlainNames(offers)

    qualified = {one.qualified_name for one in offers}
    called = {name: names.name(name) for name in qualified}
    assert len(set(called.values())) == len(qualified)
    for name, plain in called.items():
        found = names.offer(plain)
        assert found is not None
        assert found.qualified_name == name
