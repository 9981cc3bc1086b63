"""How does a long list leave by HTTP? In pages (docs/protocol.md 1).

A page is chosen by the names of all items alone; only its own items are read and decoded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from segue.errors import InvalidRequest
from segue.wire.codec import list_object
from segue.wire.items import Item

PAGE_MAX = 100
PAGE_DEFAULT = 20


@dataclass(frozen=True, slots=True)
class ListPage:
    """The items of a page: their positions in the list, oldest first, and their unique names."""

    positions: range
    names: Sequence[str]
    has_more: bool
    is_descending: bool


def distinct(names: Sequence[str]) -> Sequence[str]:
    """These names, made unique: a client may send the same id twice, and the page after such an item must be found.
    The second one is `msg_1~2`."""
    taken = set(names)
    if len(taken) == len(names):
        return names
    times: dict[str, int] = {}
    unique: list[str] = []
    for name in names:
        own, count = name, times.get(name, 0) + 1
        while count > 1 and (own := f"{name}~{count}") in taken:
            count += 1
        times[name] = count
        unique.append(own)
    return unique


def choose_page(names: Sequence[str], query: Mapping[str, str]) -> ListPage:
    """The page of a list with these names (oldest first) that the query asks for."""
    limit = query.get("limit", str(PAGE_DEFAULT))
    order = query.get("order", "desc")
    if not re.fullmatch("[0-9]{1,3}", limit) or not 1 <= int(limit) <= PAGE_MAX:
        raise InvalidRequest(f"'limit' must be from 1 to {PAGE_MAX}.", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("'order' must be 'asc' or 'desc'.", param="order")
    names = distinct(names)
    after = query.get("after")
    start, stop = 0, len(names)
    if after is not None:
        if after not in names:
            raise InvalidRequest(f"No item with id '{after[:128]}' found.", param="after")
        at = names.index(after)
        start, stop = (at + 1, stop) if order == "asc" else (start, at)
    page = range(start, stop)
    page = page[: int(limit)] if order == "asc" else page[-int(limit) :]
    has_more = len(page) < stop - start
    return ListPage(page, names[page.start : page.stop], has_more, is_descending=order == "desc")


def within(page: ListPage, sizes: Sequence[int], bytes_max: int) -> ListPage:
    """As much of the page as may leave at once, and one item at least; `sizes`: of all items of the list, in bytes."""
    order = reversed(page.positions) if page.is_descending else page.positions
    sums = accumulate(sizes[at] for at in order)
    count = max(1, sum(size <= bytes_max for size in sums))
    if count >= len(page.positions):
        return page
    part = slice(-count, None) if page.is_descending else slice(count)
    return ListPage(page.positions[part], page.names[part], True, page.is_descending)


def encode_page(page: ListPage, items: Sequence[Item]) -> bytes:
    """The list object of a page with these items, oldest first."""
    rows = list(zip(page.names, items, strict=True))
    if page.is_descending:
        rows.reverse()
    return list_object(rows, has_more=page.has_more)
