"""How are conversations made, read and changed by HTTP? The routes of `/v1/conversations` (docs/protocol.md 1)."""

from __future__ import annotations

import time
from collections.abc import Sequence

from msgspec import Raw, structs

from segue.errors import Conflict, InvalidRequest, NotFound, conversation_not_found
from segue.ids import new_id
from segue.transports.exchange import Exchange
from segue.transports.paging import distinct, page_of
from segue.transports.services import Services
from segue.turn.plan import Tally
from segue.turn.prepare import decode_items
from segue.turn.values import Conversation, ConversationItem, Owner
from segue.wire.codec import decode_added, decode_conversation, encode, list_object, listed_item
from segue.wire.items import CompactionTrigger, ItemReference
from segue.wire.response import ConversationDeleted, ConversationObject

# What one request may bring (docs/protocol.md 1).
ADDED_MAX = 20
# How often a change is tried again that another one has overtaken.
ATTEMPTS_MAX = 5
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "custom_tool_call": "ctc"}


class ConversationRoutes:
    """The handlers of `/v1/conversations`."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._conversations = services.conversations

    async def create(self, exchange: Exchange) -> None:
        """A new conversation, with its first items."""
        asked = decode_conversation(await exchange.text(self._services.limits.body_bytes_max))
        conversation = Conversation(
            new_id("conv"), exchange.owner, int(time.time()), asked.metadata or {}
        )
        added = await _shelved(asked.items or [])
        await self._conversations.save(conversation, added)
        await exchange.answer(200, _object(conversation))

    async def get(self, exchange: Exchange) -> None:
        """One conversation, without its items."""
        await exchange.answer(200, _object(await self._find(exchange)))

    async def update(self, exchange: Exchange) -> None:
        """New metadata."""
        asked = decode_conversation(await exchange.text(self._services.limits.body_bytes_max))
        for _ in range(ATTEMPTS_MAX):
            found = await self._find(exchange)
            changed = structs.replace(found, metadata=asked.metadata or {})
            if await self._conversations.save(changed):
                await exchange.answer(200, _object(changed))
                return
        raise _crowded(exchange.arguments["id"])

    async def delete(self, exchange: Exchange) -> None:
        """Erase it; responses that were made in it stay."""
        name = exchange.arguments["id"]
        if not await self._conversations.delete(exchange.owner, name):
            raise conversation_not_found(name)
        await exchange.answer(200, encode(ConversationDeleted(id=name)))

    async def list_items(self, exchange: Exchange) -> None:
        """A page of its items."""
        found = await self._find(exchange)
        items = await self._conversations.read(found.owner, found.id)
        await exchange.answer(200, page_of([(one.id, one.item) for one in items], exchange.query))

    async def add_items(self, exchange: Exchange) -> None:
        """More items at its end."""
        asked = decode_added(await exchange.text(self._services.limits.body_bytes_max))
        added = await _shelved(asked.items)
        for _ in range(ATTEMPTS_MAX):
            if await self._conversations.save(await self._find(exchange), added):
                listed = [listed_item(one.item, one.id) for one in added]
                ids = [one.id for one in added]
                await exchange.answer(200, list_object(listed, ids, has_more=False))
                return
        raise _crowded(exchange.arguments["id"])

    async def get_item(self, exchange: Exchange) -> None:
        """One item."""
        found, name = await self._find(exchange), exchange.arguments["item_id"]
        items = await self._conversations.read(found.owner, found.id)
        one = dict(distinct([(one.id, one.item) for one in items])).get(name)
        if one is None:
            raise _item_not_found(name)
        await exchange.answer(200, listed_item(one, name))

    async def delete_item(self, exchange: Exchange) -> None:
        """Erase one item; the next response reads the conversation anew."""
        found, name = await self._find(exchange), exchange.arguments["item_id"]
        if not await self._conversations.delete(found.owner, found.id, name):
            raise _item_not_found(name)
        await exchange.answer(200, _object(found))

    async def _find(self, exchange: Exchange) -> Conversation:
        owner: Owner = exchange.owner
        found = await self._conversations.find(owner, exchange.arguments["id"])
        if found is None:
            raise conversation_not_found(exchange.arguments["id"])
        return found


async def _shelved(raws: Sequence[Raw]) -> list[ConversationItem]:
    """Items for a conversation, each under a name."""
    if len(raws) > ADDED_MAX:
        raise InvalidRequest(
            f"Too many items: {len(raws)}, at most {ADDED_MAX} at once.", param="items"
        )
    items = await decode_items(raws, Tally(), "items")
    for index, item in enumerate(items):
        if isinstance(item.value, ItemReference | CompactionTrigger):
            kind = str(item.value.__struct_config__.tag)
            raise InvalidRequest(
                f"'{kind}' is nothing that a conversation could hold.",
                code="unsupported_value",
                param=f"items[{index}].type",
            )
    kinds = [str(item.value.__struct_config__.tag) for item in items]
    return [
        ConversationItem(item.value.id or new_id(PREFIXES.get(kind, "item")), item)
        for item, kind in zip(items, kinds, strict=True)
    ]


def _object(conversation: Conversation) -> bytes:
    shown = ConversationObject(
        id=conversation.id,
        created_at=conversation.created_at,
        metadata=conversation.metadata,
    )
    return encode(shown)


def _item_not_found(item_id: str) -> NotFound:
    return NotFound(
        f"Item with id '{item_id[:256]}' not found.", code="item_not_found", param="item_id"
    )


def _crowded(conversation_id: str) -> Conflict:
    return Conflict(
        f"Conversation with id '{conversation_id}' is written by too many at once.",
        code="conversation_locked",
        param="conversation",
    )
