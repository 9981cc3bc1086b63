"""How does a turn join a conversation?

Before it begins, it is given what it has not seen: nothing but the newest items if the conversation's last turn can be
continued, else all of them. When it is saved, what it was given and what it wrote are added to the conversation, and it
is the turn that the next one continues. Nothing of this is known to the turn itself: a joined turn has `Turns` that add
to the conversation as well.

One turn at a time speaks in a conversation. Which one is written down with the conversation, by compare and set, so
that it holds for all who share the store; with what the turn adds it is struck out again.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace

from msgspec import structs

from segue.errors import ID_CHARS_MAX, ApiError, Conflict, InvalidRequest, conversation_not_found
from segue.ids import given_id
from segue.turn.resolve import is_continuable
from segue.turn.seams import Conversations, Turns
from segue.turn.values import Conversation, ConversationItem, Owner, Turn
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


async def speak(joined: Joined, turn_id: str, conversations: Conversations) -> Joined | None:
    """The same, with this turn as the one that speaks; None if somebody has written it meanwhile: then join again."""
    conversation = joined.conversation
    if conversation.speaker == turn_id:
        # Written before, and not heard of.
        return joined
    if conversation.speaker is not None:
        raise Conflict(
            f"Another response runs in the conversation '{conversation.id[:ID_CHARS_MAX]}'.",
            code="conversation_locked",
            param="conversation",
        )
    spoken = structs.replace(conversation, speaker=turn_id)
    if not await conversations.save(spoken):
        return None
    return replace(joined, conversation=structs.replace(spoken, version=spoken.version + 1))


async def fall_silent(named: Conversation, turn_id: str, conversations: Conversations) -> None:
    """This turn speaks no more."""
    for _ in range(ATTEMPTS_MAX):
        found = await conversations.find(named.owner, named.id)
        if found is None or found.speaker != turn_id:
            return
        if await conversations.save(structs.replace(found, speaker=None)):
            return
    raise too_many_writers(named.id)


def too_many_writers(conversation_id: str) -> Conflict:
    """Others were always faster."""
    return Conflict(
        f"Conversation with id '{conversation_id[:ID_CHARS_MAX]}' is written by too many at once.",
        code="conversation_locked",
        param="conversation",
    )


class JoinedTurns:
    """`Turns` for one turn of a conversation: what is saved is added to the conversation too."""

    def __init__(self, turns: Turns, conversations: Conversations, joined: Joined) -> None:
        self._turns = turns
        self._conversations = conversations
        self._joined = joined
        # Whether the turn has been struck out as the one that speaks.
        self._is_silent = False

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
                speaker=None if conversation.speaker == turn.id else conversation.speaker,
            )
            if await self._conversations.save(moved, added, turn):
                self._is_silent = True
                return True
            found = await self._conversations.find(turn.owner, conversation.id)
            if found is None:
                self._is_silent = True
                return False
            if found.tip_id == turn.id:
                # Written, and not heard of.
                self._is_silent = True
                return True
            conversation, is_alone = found, False
        raise too_many_writers(conversation.id)

    async def fall_silent(self, turn_id: str) -> None:
        """The turn is over, or was never begun: another one may speak."""
        if not self._is_silent:
            await fall_silent(self._joined.conversation, turn_id, self._conversations)
            self._is_silent = True

    def _added(self, turn: Turn) -> list[ConversationItem]:
        """What this turn brings: its own input, not what the conversation gave it, and its output."""
        own = list(enumerate(turn.given))[len(self._joined.unseen) :]
        given = [
            ConversationItem(item.value.id or given_id(turn.id, index), item) for index, item in own
        ]
        return [*given, *(ConversationItem(item.value.id or "", item) for item in turn.output)]
