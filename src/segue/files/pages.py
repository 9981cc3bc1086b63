"""How does a list leave by HTTP, and how do the bytes of a file? Alike for files, containers and skills."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Protocol, TypeVar

import msgspec
from msgspec import Struct

from segue.errors import InvalidRequest, Refused
from segue.listener.exchange import Exchange, listening, text_header
from segue.listener.services import Services


class _Named(Protocol):
    @property
    def id(self) -> str: ...


N = TypeVar("N", bound=_Named)
R = TypeVar("R")


class DeletedObject(Struct, frozen=True, kw_only=True):
    """What was deleted, as clients see it."""

    id: str
    object: str
    deleted: bool = True


async def answer_page(
    exchange: Exchange, found: Sequence[R], show: Callable[[R], N], usual: int, most: int
) -> None:
    """A page of a list, as the query asks for it, and no more of the list; what was found comes the newest first."""
    query = exchange.query
    limit, order = query.get("limit", str(usual)), query.get("order", "desc")
    if not re.fullmatch("[0-9]{1,5}", limit) or not 1 <= int(limit) <= most:
        raise InvalidRequest(f"'limit' must be from 1 to {most}.", param="limit")
    if order not in ("asc", "desc"):
        raise InvalidRequest("'order' must be 'asc' or 'desc'.", param="order")
    rows = [*found] if order == "desc" else [*reversed(found)]
    if (after := query.get("after")) is not None:
        place = next((place for place, row in enumerate(rows) if show(row).id == after), None)
        if place is None:
            raise InvalidRequest(f"Nothing with id '{after[:128]}' found.", param="after")
        rows = rows[place + 1 :]
    page = [*map(show, rows[: int(limit)])]
    answer = {
        "object": "list",
        "data": page,
        "first_id": page[0].id if page else None,
        "last_id": page[-1].id if page else None,
        "has_more": len(rows) > len(page),
    }
    await exchange.answer(200, msgspec.json.encode(answer))


async def answer_file(
    exchange: Exchange,
    services: Services,
    name: str,
    parts: AsyncGenerator[bytes, None],
    size: int | None = None,
) -> None:
    """The bytes of a file, at the pace of the client; without a size where it may change meanwhile."""
    quoted = name.replace("\\", "_").replace('"', "_")
    headers = [
        (b"content-type", b"application/octet-stream"),
        text_header(b"content-disposition", f'attachment; filename="{quoted}"'),
        # It is a client's own, and no page of this server.
        (b"x-content-type-options", b"nosniff"),
    ]
    if size is not None:
        headers.append((b"content-length", str(size).encode()))
    async with listening(exchange), aclosing(parts):
        async for part in parts:
            if not exchange.has_started:
                await exchange.start(200, headers)
            async with asyncio.timeout(services.limits.write_s_max):
                await exchange.write(part, is_last=False)
        if not exchange.has_started:
            await exchange.start(200, headers)
        await exchange.write(b"", is_last=True)


def check_form(exchange: Exchange) -> str:
    """The content type of a form; refused where it is compressed."""
    if exchange.header(b"content-encoding") not in ("", "identity"):
        message = "Send the form without a content encoding."
        raise Refused(message, status=415, code="unsupported_encoding")
    return exchange.header(b"content-type")
