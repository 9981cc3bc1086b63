"""Which conversations are stored, and in which of them was something said?

One route, `/dashboard/stored`, for the caller's own responses: the newest first, a page at a time. Without
words it lists the last response of each conversation; with words every response whose question, answer, model or id has
them. Stores keep rows compressed, so they are read one by one: a request looks at a bounded number and says where to go
on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec import Struct

from segue.aio import off_loop
from segue.listener.api import Route
from segue.listener.exchange import Exchange
from segue.seams.history import Turn
from segue.seams.store import Listing, Turns
from segue.wire.codec import encode

PAGE_ROWS = 25
# A response that is looked through costs a fraction of a millisecond; longer ones more.
SEARCHED_MAX = 300
WORDS_CHARS_MAX = 200
# Above this the event loop does not wait for it.
LONG_BYTES = 256 * 1024
# What is shown of a question and of an answer.
SHOWN_CHARS = 240


class _Part(Struct):
    text: str | None = None


class _Said(Struct):
    """What of an item a reader would look for; other types of items have nothing of it."""

    type: str = "message"
    role: str | None = None
    content: str | list[_Part] | None = None
    # Of a tool.
    output: str | list[_Part] | None = None
    name: str | None = None

    @property
    def text(self) -> str:
        said = self.content or self.output
        if isinstance(said, str):
            return said
        return "\n".join(part.text for part in said or () if part.text)


class StoredRow(Struct, frozen=True):
    """A stored response as the list shows it."""

    id: str
    created_at: int
    model: str
    status: str
    question: str
    answer: str
    input_tokens: int = 0
    output_tokens: int = 0


class StoredPage(Struct, frozen=True):
    """Some of them; `next` is where the following page begins, and null after the last one."""

    data: Sequence[StoredRow]
    next: str | None


@dataclass(frozen=True, slots=True)
class StoredRoutes:
    """The route of the list."""

    listing: Listing
    turns: Turns

    @property
    def routes(self) -> Sequence[Route]:
        # Who may not read a response may not read about it.
        return (Route("GET", "/dashboard/stored", self._list, "responses"),)

    async def _list(self, exchange: Exchange) -> None:
        words = exchange.query.get("q", "").strip()[:WORDS_CHARS_MAX].casefold()
        before = exchange.query.get("before") or None
        count = SEARCHED_MAX if words else PAGE_ROWS
        owner = exchange.owner
        ids = await self.listing.newest(owner, before, count + 1, is_tips=not words)
        rows: list[StoredRow] = []
        last = None
        for last in ids[:count]:
            turn = await self.turns.read(owner, last)
            # None: deleted since.
            if turn is not None:
                rows += await off_loop(turn.bytes > LONG_BYTES, _row_of, turn, words)
            # Turns in memory are read without a pause.
            await asyncio.sleep(0)
            if len(rows) == PAGE_ROWS:
                break
        is_all = not ids or last == ids[-1]
        await exchange.answer(200, encode(StoredPage(rows, None if is_all else last)))


def _row_of(turn: Turn, words: str) -> list[StoredRow]:
    """The row of a turn; none if the words are not in it."""
    response = turn.response
    given = _said(item.raw for round_ in turn.rounds for item in round_.given)
    asked = [item.text for item in given if item.role == "user"]
    question = asked[-1] if asked else " ".join(f"[{item.type}] {item.text}" for item in given[-1:])
    wrote = _said(map(bytes, response.output))
    answer = "\n".join(item.text for item in wrote if item.role == "assistant")
    calls = ", ".join(item.name for item in wrote if item.name)
    answer = answer or (f"calls {calls}" if calls else "")
    searched = "\n".join((response.id, response.model, question, answer)).casefold()
    if words not in searched:
        return []
    usage = response.usage
    row = StoredRow(
        response.id,
        response.created_at,
        response.model,
        response.status,
        question[:SHOWN_CHARS],
        answer[:SHOWN_CHARS],
        usage.input_tokens if usage else 0,
        usage.output_tokens if usage else 0,
    )
    return [row]


def _said(raws: Iterable[bytes]) -> list[_Said]:
    found = []
    for raw in raws:
        try:
            found.append(msgspec.json.decode(raw, type=_Said))
        except msgspec.MsgspecError:
            # An item of another form.
            found.append(_Said(type="item"))
    return found
