"""How does a turn join a conversation?

Before it begins, it is given what it has not seen: nothing but the newest items if the conversation's last turn can be
continued, else all of them. When it is saved, its input and output are added to the conversation, and it becomes the
turn that the next one continues. The turn itself knows nothing of this: a `LockedConversation` saves it.

A conversation is locked by one turn at a time. Which one is written with the conversation (`speaker`), by compare and
set, so that it holds for all who share the store; the write that adds the turn's items releases the lock.
"""

from __future__ import annotations

from contextlib import suppress

from msgspec import structs

from segue.errors import (
    ID_CHARS_MAX,
    ApiError,
    Conflict,
    InvalidRequest,
    ServerFault,
    conversation_not_found,
)
from segue.ids import given_id
from segue.memory.budget import Memory, sent_bytes
from segue.seams.history import Owner, Turn
from segue.seams.store import ConversationItem, Conversations, Turns
from segue.turn.plan import Joined
from segue.turn.resolve import is_continuable
from segue.wire.requests import Create

# How often concurrent writers may conflict.
ATTEMPTS_MAX = 5


async def join(
    create: Create, owner: Owner, turns: Turns, conversations: Conversations, memory: Memory
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
    if since >= conversation.count:
        return Joined(conversation, tip, ())
    rows = await conversations.names(owner, name)
    sizes = [size for position, _, size in rows if position >= since]
    # Once as it is read, and once more as it is saved.
    async with memory.reading(2 * sent_bytes(sum(sizes), len(sizes)), "conversation"):
        unseen = await conversations.read(owner, name, since)
    return Joined(conversation, tip, tuple(added.item for added in unseen))


async def acquire(
    create: Create,
    owner: Owner,
    turns: Turns,
    conversations: Conversations,
    memory: Memory,
    turn_id: str,
) -> LockedConversation:
    """The conversation that the request names, locked by this turn."""
    for _ in range(ATTEMPTS_MAX):
        joined = await join(create, owner, turns, conversations, memory)
        assert joined is not None, "the request names a conversation"
        locked = await _lock(joined, turn_id, conversations)
        if locked is not None:
            return LockedConversation(turns, conversations, locked)
    assert create.conversation_id is not None
    raise too_many_writers(create.conversation_id)


async def _lock(joined: Joined, turn_id: str, conversations: Conversations) -> Joined | None:
    """The same, locked by this turn; None if it was written meanwhile: then join again."""
    conversation = joined.conversation
    if conversation.speaker == turn_id:
        # An earlier write went through, though its answer was lost.
        return joined
    if conversation.speaker is not None:
        raise Conflict(
            f"Another response runs in the conversation '{conversation.id[:ID_CHARS_MAX]}'.",
            code="conversation_locked",
            param="conversation",
        )
    locked = structs.replace(conversation, speaker=turn_id)
    if not await conversations.save(locked):
        return None
    return structs.replace(joined, conversation=structs.replace(locked, version=locked.version + 1))


async def unlock(owner: Owner, name: str, turn_id: str, conversations: Conversations) -> None:
    """Unlock the conversation, if this turn has locked it."""
    for _ in range(ATTEMPTS_MAX):
        conversation = await conversations.find(owner, name)
        if conversation is None or conversation.speaker != turn_id:
            return
        if await conversations.save(structs.replace(conversation, speaker=None)):
            return
    raise too_many_writers(name)


def too_many_writers(conversation_id: str) -> Conflict:
    return Conflict(
        f"Too many concurrent writes to the conversation '{conversation_id[:ID_CHARS_MAX]}'.",
        code="conversation_locked",
        param="conversation",
    )


class LockedConversation:
    """A conversation while a turn has its lock: what that turn saves is added to the conversation too."""

    def __init__(self, turns: Turns, conversations: Conversations, joined: Joined) -> None:
        self._turns = turns
        self._conversations = conversations
        self.joined = joined
        self._is_released = False

    async def save(self, turn: Turn) -> None:
        """Save the turn; once it can be continued, its items belong to the conversation, and no crash comes between."""
        if not is_continuable(turn) or not await self._add(turn):
            await self._turns.save(turn)
            return
        # It is durable by now; the caches are still to know it.
        with suppress(ApiError):
            await self._turns.save(turn)

    async def _add(self, turn: Turn) -> bool:
        """Add its items to the conversation, and save the turn with them; False if the conversation is gone."""
        added = self._added(turn)
        conversation = self.joined.conversation
        is_alone = True
        for _ in range(ATTEMPTS_MAX):
            # Where others have added items meanwhile, this turn has not seen all of them.
            moved = structs.replace(
                conversation,
                tip_id=turn.id if is_alone else None,
                tip_items=conversation.count + len(added) if is_alone else 0,
                speaker=None if conversation.speaker == turn.id else conversation.speaker,
            )
            if await self._conversations.save(moved, added, turn):
                self._is_released = True
                return True
            found = await self._conversations.find(turn.owner, conversation.id)
            self._is_released = found is None or found.speaker != turn.id
            if found is None:
                return False
            if found.tip_id == turn.id:
                # Written, though the answer was lost.
                return True
            if self._is_released:
                # The process stood still, and others took the conversation from this turn. The turn itself may be
                # saved, as failed: it may have been stored after that.
                raise ServerFault("The conversation was given to another response.")
            conversation = found
            is_alone = False
        raise too_many_writers(conversation.id)

    async def release(self, turn_id: str) -> None:
        """The turn is over, or has never begun: another one may lock the conversation."""
        if not self._is_released:
            locked = self.joined.conversation
            await unlock(locked.owner, locked.id, turn_id, self._conversations)
            self._is_released = True

    def _added(self, turn: Turn) -> list[ConversationItem]:
        """What this turn adds: its own input, not what the conversation gave it, and its output."""
        own = list(enumerate(turn.given))[len(self.joined.new_items) :]
        given = [
            ConversationItem(item.value.id or given_id(turn.id, index), item) for index, item in own
        ]
        return [*given, *(ConversationItem(item.value.id or "", item) for item in turn.output)]
