"""How does a long list leave by HTTP? In pages (docs/protocol.md 1)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from segue.errors import InvalidRequest
from segue.wire.codec import list_object, listed_item
from segue.wire.items import Item

NamedItems = Sequence[tuple[str, Item]]

PAGE_MAX = 100
PAGE_DEFAULT = 20


def distinct(named: NamedItems) -> NamedItems:
    """These items with unique names: a client may send the same id twice, and the page after such an item must be
    found. The second one is `msg_1~2`."""
    taken = {name for name, _ in named}
    times: dict[str, int] = {}
    rows: list[tuple[str, Item]] = []
    for name, item in named:
        own, count = name, times.get(name, 0) + 1
        while count > 1 and (own := f"{name}~{count}") in taken:
            count += 1
        times[name] = count
        rows.append((own, item))
    return rows


def page_of(named: NamedItems, query: Mapping[str, str]) -> bytes:
    """The page of these items (oldest first) that the query asks for."""
    limit = query.get("limit", str(PAGE_DEFAULT))
    order = query.get("order", "desc")
    if not re.fullmatch("[0-9]{1,3}", limit) or not 1 <= int(limit) <= PAGE_MAX:
        raise InvalidRequest(f"'limit' must be from 1 to {PAGE_MAX}.", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("'order' must be 'asc' or 'desc'.", param="order")
    rows = distinct(named)
    rows = rows if order == "asc" else rows[::-1]
    ids = [item_id for item_id, _ in rows]
    after = query.get("after")
    if after is not None and after not in ids:
        raise InvalidRequest(f"No item with id '{after[:128]}' found.", param="after")
    start = 0 if after is None else ids.index(after) + 1
    page = rows[start : start + int(limit)]
    return list_object(
        [listed_item(item, item_id) for item_id, item in page],
        [item_id for item_id, _ in page],
        has_more=start + len(page) < len(rows),
    )
