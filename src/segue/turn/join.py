"""How does a turn join a conversation?

Before it begins, it is given what it has not seen: nothing but the newest items if the conversation's last turn can be
continued, else all of them. When it is saved, what it was given and what it wrote are added to the conversation, and it
is the turn that the next one continues. Nothing of this is known to the turn itself: a joined turn has `Turns` that add
to the conversation as well.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

from msgspec import structs

from segue.errors import ApiError, Conflict, InvalidRequest, conversation_not_found
from segue.ids import given_id
from segue.turn.resolve import is_continuable
from segue.turn.seams import Conversations, Turns
from segue.turn.values import Conversation, Owner, Shelved, Turn
from segue.wire.items import Item
from segue.wire.requests import Create

# How often two who add at once may get in each other's way.
ATTEMPTS_MAX = 5


@dataclass(frozen=True, slots=True)
class Joined:
    """A conversation as a turn meets it: the turn to continue, and the items that it has not seen."""

    conversation: Conversation
    tip: Turn | None
    unseen: tuple[Item, ...]


async def join(
    create: Create, owner: Owner, turns: Turns, conversations: Conversations
) -> Joined | None:
    """The conversation that this request names; None if it names none."""
    name = create.conversation_id
    if name is None:
        return None
    if create.previous_response_id is not None:
        raise InvalidRequest(
            "'previous_response_id' and 'conversation' exclude each other.",
            code="unsupported_parameter",
            param="conversation",
        )
    if create.store is False:
        raise InvalidRequest(
            "A response that joins a conversation is stored with it.",
            code="unsupported_value",
            param="store",
        )
    conversation = await conversations.find(owner, name)
    if conversation is None:
        raise conversation_not_found(name)
    tip = await turns.find(owner, conversation.tip_id) if conversation.tip_id else None
    if tip is not None and not is_continuable(tip):
        tip = None
    since = conversation.tip_items if tip is not None else 0
    unseen = await conversations.read(owner, name, since)
    return Joined(conversation, tip, tuple(one.item for one in unseen))


class JoinedTurns:
    """`Turns` for one turn of a conversation: what is saved is added to the conversation too."""

    def __init__(self, turns: Turns, conversations: Conversations, joined: Joined) -> None:
        self._turns = turns
        self._conversations = conversations
        self._joined = joined

    async def find(self, owner: Owner, turn_id: str) -> Turn | None:
        """As without a conversation."""
        return await self._turns.find(owner, turn_id)

    async def read(self, owner: Owner, turn_id: str) -> Turn | None:
        """As without a conversation."""
        return await self._turns.read(owner, turn_id)

    async def delete(self, owner: Owner, turn_id: str) -> bool:
        """As without a conversation."""
        return await self._turns.delete(owner, turn_id)

    async def save(self, turn: Turn) -> None:
        """Save the turn; once it can be continued, its items belong to the conversation, and no crash comes between."""
        if not is_continuable(turn) or not await self._add(turn):
            await self._turns.save(turn)
            return
        # It is kept by now; what is left is that caches know it, and memory.
        with suppress(ApiError):
            await self._turns.save(turn)

    async def _add(self, turn: Turn) -> bool:
        """Add its items to the conversation, and save the turn with them; False if the conversation is gone."""
        added = self._added(turn)
        conversation = self._joined.conversation
        is_alone = True
        for _ in range(ATTEMPTS_MAX):
            # Where others have added meanwhile, this turn has not seen all there is.
            moved = structs.replace(
                conversation,
                tip_id=turn.id if is_alone else None,
                tip_items=conversation.count + len(added) if is_alone else 0,
            )
            if await self._conversations.save(moved, added, turn):
                return True
            found = await self._conversations.find(turn.owner, conversation.id)
            if found is None:
                return False
            if found.tip_id == turn.id:
                # Written, and not heard of.
                return True
            conversation, is_alone = found, False
        raise Conflict(
            f"Conversation with id '{conversation.id}' is written by too many at once.",
            code="conversation_locked",
            param="conversation",
        )

    def _added(self, turn: Turn) -> list[Shelved]:
        """What this turn brings: its own input, not what the conversation gave it, and its output."""
        own = list(enumerate(turn.given))[len(self._joined.unseen) :]
        given = [Shelved(item.value.id or given_id(turn.id, index), item) for index, item in own]
        return [*given, *(Shelved(item.value.id or "", item) for item in turn.output)]
