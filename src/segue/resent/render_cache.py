"""What was sent and rendered before, for clients that resend everything?

A client on plain HTTP sends its whole history each turn. The render cache knows the beginnings of histories by the
bytes of their items, and gives back what they were decoded to and the prompt that they became, so that only what is
new is decoded, rendered and tokenized. An answer that comes back as the model wrote it is known by the very ids that
were sampled. It is warmth under another key: in memory, per owner, bounded in bytes.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal, assert_never

from msgspec import UNSET, Raw, structs

from segue.aio import off_loop
from segue.seams.history import KnownHistory, Owner, Past, Resent, Round, Unfinished, Warm
from segue.seams.prompt import Tokens
from segue.turn.plan import Composed, Plan
from segue.turn.running import ID_BYTES
from segue.wire.codec import LARGE_BYTES
from segue.wire.items import (
    ITEM_BYTES,
    AdditionalTools,
    InputText,
    Item,
    ItemValue,
    Message,
    OutputText,
    Reasoning,
)
from segue.wire.kinds import shown_as
from segue.wire.requests import Create

CacheKey = tuple[Owner, int]
Voice = Literal["others", "model", "none"]

# What an entry costs beside its texts, items and ids.
ENTRY_BYTES = 1_000
DAY_S = 86_400
# What is longer is decoded and rendered each time: to know it again would hold the loop, and fill the cache.
RESENT_BYTES_MAX = 16 * 1024 * 1024


class RenderCache:
    """Beginnings of histories, and what they were rendered to. `bytes_max` of 0 switches it off.

    A longer beginning of the same history takes the place of the one that it goes on from, so that a conversation has
    one entry, and what an entry counts is all that it keeps alive.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries: OrderedDict[CacheKey, KnownHistory] = OrderedDict()
        # The entries by the turns that they were sent for.
        self._keys: dict[tuple[Owner, str], CacheKey] = {}
        self._bytes = 0
        self._owner_bytes: Counter[Owner] = Counter()

    @property
    def bytes(self) -> int:
        """What it holds."""
        return self._bytes

    def bytes_of(self, owner: Owner) -> int:
        """What it holds of this owner."""
        return self._owner_bytes[owner]

    def trim(self, owner: Owner, bytes_max: int) -> None:
        """Let go of what this owner has beyond so much, the longest unused first."""
        if self._owner_bytes[owner] <= bytes_max:
            return
        for key in [key for key in self._entries if key[0] == owner]:
            self._drop(key)
            if self._owner_bytes[owner] <= bytes_max:
                return

    def shrink(self, size: int) -> None:
        """Let go of so many bytes, the longest unused first."""
        target = self._bytes - size
        while self._entries and self._bytes > target:
            self._drop(next(iter(self._entries)))

    async def recognise(self, owner: Owner, create: Create, size: int) -> Resent | None:
        """What the history of this request is known by, and its longest beginning that was sent before; None if it is
        not to be known. `size` is that of the request in bytes."""
        is_chained = create.previous_response_id is not None or create.conversation is not None
        if is_chained or not isinstance(create.input, list):
            return None
        if not self._bytes_max or size > RESENT_BYTES_MAX:
            return None
        resent = await off_loop(size > LARGE_BYTES, self._recognise, owner, create, create.input)
        if (beginning := resent.beginning) is not None and (owner, beginning.key) in self._entries:
            self._entries.move_to_end((owner, beginning.key))
        return resent

    def _recognise(self, owner: Owner, create: Create, raws: Sequence[Raw]) -> Resent:
        # Some families print the day on which a history began.
        day = int(time.time()) // DAY_S
        head = b"" if create.tools is UNSET else bytes(create.tools)
        key = hash((create.model, create.instructions, head, day))
        sent = [bytes(raw) for raw in raws]
        found: KnownHistory | None = None
        for data in sent:
            key = hash((key, data))
            found = self._entries.get((owner, key), found)
        # Hashes may be equal by accident.
        if found is None or any(
            item.raw != data for item, data in zip(found.sent, sent, strict=False)
        ):
            return Resent(key)
        return Resent(key, found.sent, found)

    def resume(self, plan: Plan) -> tuple[Past | None, int]:
        """The past that the items of this plan begin with, its prompt warm, and how many of them that is."""
        given = plan.resolved.given
        resent = plan.resolved.resent
        beginning = resent.known_beginning(given) if resent is not None else None
        if beginning is None:
            return None, 0
        count = len(beginning.given)
        past = beginning.past
        if past.warm is None or past.warm.fingerprint != plan.model.dialect.fingerprint:
            return None, 0
        last = past.rounds[-1]
        if last.wrote and _has_answer(last.wrote, given[count:]):
            return past, count + len(last.wrote)
        if is_cut(given, count):
            return (_without_answer(beginning) if last.wrote else past), count
        # What was given last goes on without an answer; what stood before it still stands.
        return past.parent, count - len(last.given) if past.parent is not None else 0

    def remember(
        self, plan: Plan, first: Composed, wrote: Sequence[Round], warm: Warm | None
    ) -> None:
        """Remember the history of this plan instead of the one that it goes on from."""
        resent = plan.resolved.resent
        given = plan.resolved.given
        owner = plan.owner
        if resent is None or first.is_truncated or not is_cut(given, len(given)):
            return
        # An answer of several rounds does not come back as the model wrote it.
        answer = wrote[0] if len(wrote) == 1 and wrote[0].did_sample else None
        new = _beginning(plan, resent, first, answer, warm)
        replaced = {new.key} if resent.beginning is None else {new.key, resent.beginning.key}
        for key in replaced:
            if (owner, key) in self._entries:
                self._drop((owner, key))
        self._entries[owner, new.key] = new
        self._keys[owner, plan.id] = (owner, new.key)
        self._count(owner, new.bytes)
        self.shrink(self._bytes - self._bytes_max)

    async def forget(self, owner: Owner, turn_id: str) -> None:
        """The turn is erased."""
        if (key := self._keys.get((owner, turn_id))) is not None:
            self._drop(key)

    def _drop(self, key: CacheKey) -> None:
        dropped = self._entries.pop(key)
        del self._keys[key[0], dropped.turn_id]
        self._count(key[0], -dropped.bytes)

    def _count(self, owner: Owner, change: int) -> None:
        self._bytes += change
        self._owner_bytes[owner] += change
        if not self._owner_bytes[owner]:
            del self._owner_bytes[owner]


def _beginning(
    plan: Plan, resent: Resent, first: Composed, answer: Round | None, warm: Warm | None
) -> KnownHistory:
    resolved = plan.resolved
    context = first.rendered.context
    if answer is None or warm is None:
        answer = Round(())
        route = plan.tally.started.route
        warm = Warm(plan.model.dialect.fingerprint, resolved.head, context, route)
    last = structs.replace(answer, given=first.scene.given)
    text = sum(len(item.raw) for item in resent.sent) + len(resolved.head.tools.echo)
    ids = context.length if isinstance(context, Tokens) else context.length // ID_BYTES
    return KnownHistory(
        turn_id=plan.id,
        key=resent.key,
        sent=resent.sent,
        given=resolved.given,
        past=Unfinished(first.scene.past, (last,), warm),
        prompt=context if isinstance(context, Tokens) else warm.prompt,
        open_calls=resolved.open_calls,
        model_turns=resolved.model_turns,
        bytes=ENTRY_BYTES + 3 * text + ITEM_BYTES * len(resent.sent) + 2 * ID_BYTES * ids,
    )


def _without_answer(beginning: KnownHistory) -> Unfinished:
    past = beginning.past
    last = past.rounds[-1]
    assert past.warm is not None
    return Unfinished(
        past.parent, (Round(last.given),), replace(past.warm, prompt=beginning.prompt)
    )


def _has_answer(answer: Sequence[Item], later: Sequence[Item]) -> bool:
    """Whether these items begin with an answer as the model wrote it, and go on with what others say."""
    if len(later) <= len(answer) or not all(map(_is_unchanged, later, answer)):
        return False
    return _first(_voice_before(item.value) for item in later[len(answer) :]) == "others"


def _is_unchanged(sent: Item, wrote: Item) -> bool:
    """Whether an item came back with every word that the model wrote, and none other."""
    returned = sent.value
    written = wrote.value
    if sent.raw == wrote.raw:
        return True
    if type(returned) is not type(written) or getattr(returned, "status", None) == "incomplete":
        return False
    match returned, written:
        case Message(), Message():
            is_alike = (
                returned.role == written.role and (returned.phase or written.phase) == written.phase
            )
            return is_alike and (text := _text(returned)) is not None and text == _text(written)
        case Reasoning(), Reasoning():
            thought = returned.content or returned.summary
            return bool(thought) and thought == (written.content or written.summary)
        case _:
            names = (name for name in returned.__struct_fields__ if name not in ("id", "status"))
            return all(
                (getattr(returned, name) or None) == (getattr(written, name) or None)
                for name in names
            )


def _text(message: Message) -> str | None:
    """The words of a message; None if it has more than words."""
    if isinstance(message.content, str):
        return message.content
    parts = [part for part in message.content if isinstance(part, InputText | OutputText)]
    return "".join(part.text for part in parts) if len(parts) == len(message.content) else None


def is_cut(given: Sequence[Item], count: int) -> bool:
    """Whether an earlier request may have ended after so many of these items: after text that the model did not
    write, and before words that it did, or before nothing at all.

    Only there is it certain for every family that what follows does not join what went before. Items that say nothing,
    or may say nothing, are no boundary: the item on their other side counts.
    """
    before = (_voice_before(given[n].value) for n in range(count - 1, -1, -1))
    after = (_voice_after(given[n].value) for n in range(count, len(given)))
    return _first(before) == "others" and (count == len(given) or _first(after) == "model")


def _first(voices: Iterator[Voice | None]) -> Voice | None:
    return next((voice for voice in voices if voice != "none"), None)


def _voice_before(value: ItemValue) -> Voice | None:
    """Tools from an item are shown as others' text, if at all."""
    return "none" if isinstance(value, AdditionalTools) else _voice(value)


def _voice_after(value: ItemValue) -> Voice | None:
    """A thought may be forgotten, and then what follows it stands in its place."""
    return "none" if isinstance(value, Reasoning) else _voice(value)


def _voice(value: ItemValue) -> Voice | None:
    """Whose text this item is: the model's, others', or none; None if that is not certain."""
    match shown_as(value):
        case "nothing":
            return "none"
        case "think" | "talk" | "call":
            return "model"
        case "user" | "system" | "response":
            return "others"
        case "tools":
            return None
        case shown:
            assert_never(shown)
