"""How are conversations created, read and changed by HTTP? The handlers of `/v1/conversations` (docs/protocol.md 1)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import TypeVar

from msgspec import Raw, structs

from segue.aio import off_loop
from segue.errors import InvalidRequest, NotFound, conversation_not_found
from segue.ids import new_id
from segue.listener.exchange import Exchange
from segue.listener.services import Services
from segue.memory.budget import sent_bytes
from segue.process.conversations import too_many_writers
from segue.responses.paging import choose_page, distinct, encode_page, within
from segue.seams.store import Conversation, ConversationItem
from segue.turn.prepare import decode_items
from segue.wire.codec import (
    LARGE_BYTES,
    check_item_ids,
    decode_added,
    decode_conversation,
    encode,
    list_object,
    listed_item,
)
from segue.wire.items import Item
from segue.wire.response import ConversationDeleted, ConversationObject

T = TypeVar("T")
# Of an item: its position, its name, its bytes.
_Row = tuple[int, str, int]
# Items in one request (docs/protocol.md 1).
ADDED_MAX = 20
# A page of large items has fewer of them; where there is little memory, fewer still.
PAGE_BYTES_MAX = 16 * 1024 * 1024
# How often a change is tried again after a concurrent one.
ATTEMPTS_MAX = 5
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


class ConversationRoutes:
    """The handlers of `/v1/conversations`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._conversations = services.conversations

    async def create(self, exchange: Exchange) -> None:
        """A new conversation, with its first items."""
        request = await self._read(exchange, decode_conversation)
        conversation = Conversation(
            new_id("conv"), exchange.owner, int(time.time()), request.metadata or {}
        )
        with exchange.holding_body():
            added = await _decode_items(request.items or [])
            await self._conversations.save(conversation, added)
            await exchange.answer(200, _object(conversation))

    async def get(self, exchange: Exchange) -> None:
        """One conversation, without its items."""
        await exchange.answer(200, _object(await self._find(exchange)))

    async def update(self, exchange: Exchange) -> None:
        """Replace its metadata."""
        request = await self._read(exchange, decode_conversation)
        for _ in range(ATTEMPTS_MAX):
            conversation = await self._find(exchange)
            changed = structs.replace(conversation, metadata=request.metadata or {})
            if await self._conversations.save(changed):
                await exchange.answer(200, _object(changed))
                return
        raise too_many_writers(exchange.arguments["id"])

    async def delete(self, exchange: Exchange) -> None:
        """Erase it; responses that were made in it stay."""
        name = exchange.arguments["id"]
        if not await self._conversations.delete(exchange.owner, name):
            raise conversation_not_found(name)
        await exchange.answer(200, encode(ConversationDeleted(id=name)))

    async def list_items(self, exchange: Exchange) -> None:
        """A page of its items."""
        conversation = await self._find(exchange)
        for _ in range(ATTEMPTS_MAX):
            rows = await self._names(conversation)
            page = choose_page([name for _, name, _ in rows], exchange.query)
            bytes_max = min(PAGE_BYTES_MAX, self._services.memory.unread.bytes_max // 2)
            page = within(page, [size for _, _, size in rows], bytes_max)
            chosen = [rows[at] for at in page.positions]
            with self._reading(chosen):
                items = await self._items(conversation, chosen)
                # An item that was deleted meanwhile is missing.
                if len(items) == len(chosen):
                    await exchange.answer(200, encode_page(page, items))
                    return
        raise too_many_writers(conversation.id)

    async def add_items(self, exchange: Exchange) -> None:
        """More items at its end."""
        request = await self._read(exchange, decode_added)
        with exchange.holding_body():
            added = await _decode_items(request.items)
            for _ in range(ATTEMPTS_MAX):
                if await self._conversations.save(await self._find(exchange), added):
                    rows = [(entry.id, entry.item) for entry in added]
                    await exchange.answer(200, list_object(rows, has_more=False))
                    return
            raise too_many_writers(exchange.arguments["id"])

    async def get_item(self, exchange: Exchange) -> None:
        """One item of it."""
        conversation, name = await self._find(exchange), exchange.arguments["item_id"]
        rows = await self._names(conversation)
        names = distinct([name for _, name, _ in rows])
        chosen = [rows[names.index(name)]] if name in names else []
        with self._reading(chosen):
            items = await self._items(conversation, chosen)
            if not items:
                raise _item_not_found(name)
            await exchange.answer(200, listed_item(items[0], name))

    async def delete_item(self, exchange: Exchange) -> None:
        """Erase one item; the next response reads the conversation anew."""
        conversation, name = await self._find(exchange), exchange.arguments["item_id"]
        if not await self._conversations.delete(conversation.owner, conversation.id, name):
            raise _item_not_found(name)
        await exchange.answer(200, _object(conversation))

    async def _read(self, exchange: Exchange, decode: Callable[[bytes | bytearray], T]) -> T:
        """The body; a large one is decoded beside the event loop."""
        body = await exchange.text(self._services.limits.body_bytes_max)
        return await off_loop(len(body) > LARGE_BYTES, decode, body)

    async def _find(self, exchange: Exchange) -> Conversation:
        name = exchange.arguments["id"]
        conversation = await self._conversations.find(exchange.owner, name)
        if conversation is None:
            raise conversation_not_found(name)
        return conversation

    def _reading(self, chosen: Sequence[_Row]) -> AbstractContextManager[object]:
        """While items of these sizes are read and leave."""
        size = sum(size for _, _, size in chosen)
        return self._services.memory.preparing(sent_bytes(size, len(chosen)))

    async def _names(self, conversation: Conversation) -> Sequence[_Row]:
        return await self._conversations.names(conversation.owner, conversation.id)

    async def _items(self, conversation: Conversation, chosen: Sequence[_Row]) -> Sequence[Item]:
        """The items of these rows, which are neighbours."""
        if not chosen:
            return ()
        key = (conversation.owner, conversation.id)
        found = await self._conversations.read(*key, chosen[0][0], chosen[-1][0] + 1)
        return [entry.item for entry in found]


async def _decode_items(raws: Sequence[Raw]) -> list[ConversationItem]:
    """Items for a conversation, each with an id."""
    if len(raws) > ADDED_MAX:
        message = f"Too many items: {len(raws)}, at most {ADDED_MAX} at once."
        raise InvalidRequest(message, param="items")
    items = await decode_items(raws, "items")
    check_item_ids(items, "items")
    kinds = [str(item.value.__struct_config__.tag) for item in items]
    for index, kind in enumerate(kinds):
        if kind in ("item_reference", "compaction_trigger"):
            message = f"Items of type '{kind}' are not allowed in a conversation."
            raise InvalidRequest(message, code="unsupported_value", param=f"items[{index}].type")
    return [
        ConversationItem(item.value.id or new_id(PREFIXES.get(kind, "item")), item)
        for item, kind in zip(items, kinds, strict=True)
    ]


def _object(conversation: Conversation) -> bytes:
    created_at, metadata = conversation.created_at, conversation.metadata
    return encode(ConversationObject(id=conversation.id, created_at=created_at, metadata=metadata))


def _item_not_found(item_id: str) -> NotFound:
    return NotFound(
        f"Item with id '{item_id[:256]}' not found.", code="item_not_found", param="item_id"
    )
