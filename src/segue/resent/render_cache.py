"""What was sent and rendered before, for clients that resend everything?

A client on plain HTTP sends its whole history each turn. The render cache knows the beginnings of histories by what
their items mean, and gives back what they were decoded to and the prompt that they became, so that only what is new is
decoded, rendered and tokenized. An answer that comes back, in whatever spelling, is known by the very ids that were
sampled. It is warmth under another key: in memory, per owner, bounded in bytes.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Literal, assert_never

from msgspec import UNSET, structs

from segue.aio import off_loop
from segue.resent.answers import answer_length
from segue.resent.canonical import THOUGHT, digest_of, digest_of_json
from segue.resent.memo import Sent
from segue.resent.shared import RememberedHistory, SeenItem, SentHead, SharedHistories, shared_items
from segue.seams.history import (
    Owner,
    Past,
    Resent,
    Round,
    Unfinished,
    Warm,
)
from segue.seams.prompt import Tokens
from segue.turn.plan import Composed, Plan
from segue.wire.items import AdditionalTools, Item, ItemValue, Reasoning, weigh
from segue.wire.kinds import shown_as
from segue.wire.requests import Create

Voice = Literal["others", "model", "none"]

DAY_S = 86_400
# What is longer is decoded and rendered each time: to know it again would hold the loop, and fill the cache.
RESENT_BYTES_MAX = 16 * 1024 * 1024
# More than this is looked for beside the event loop: it takes a millisecond.
LOOKUP_BYTES = 1024 * 1024
# What is new is read: more than this beside the event loop.
DIGEST_BYTES_MAX = 64 * 1024
# Of tools with secrets only a digest is kept, as everywhere.
SECRET_DIGEST_BYTES = 32


class _Recognised(Resent, frozen=True):
    """A history, what it will be found by, and what its items mean."""

    beginning: RememberedHistory | None
    # How many of the items the beginning stands for.
    count: int
    key: int
    head: SentHead
    sent: tuple[Item, ...]
    digests: tuple[bytes, ...]

    def known_count(self, given: tuple[Item, ...]) -> int:
        known = self.beginning
        if known is None or known.is_direct:
            return self.count
        count = len(known.given)
        return count if given[:count] == known.given else 0

    def without_plain(self, sent: tuple[Item, ...]) -> tuple[Item, ...]:
        known = self.beginning
        return sent[self.count :] if known is not None and known.is_direct else sent


class RenderCache:
    """Beginnings of histories, and what they were rendered to. `bytes_max` of 0 switches it off.

    The last two ends of a conversation are kept: a request that is sent again with another last message still finds
    what went before it.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries: OrderedDict[int, RememberedHistory] = OrderedDict()
        # The entries by the turns that they were sent for.
        self._keys: dict[tuple[Owner, str], int] = {}
        # And by the last item that was sent, itself and not its value: an agent sends on what it has sent last.
        self._ends: dict[int, int] = {}
        self._shared = SharedHistories()

    @property
    def bytes(self) -> int:
        """What it holds."""
        return self._shared.size

    def bytes_of(self, owner: Owner) -> int:
        """What it holds of this owner."""
        return self._shared.sizes[owner]

    def trim(self, owner: Owner, bytes_max: int) -> None:
        """Let go of what this owner has beyond so much, the longest unused first."""
        if self.bytes_of(owner) <= bytes_max:
            return
        for key in [key for key, entry in self._entries.items() if entry.owner == owner]:
            self._drop(key)
            if self.bytes_of(owner) <= bytes_max:
                return

    def shrink(self, size: int) -> None:
        """Let go of so many bytes, the longest unused first."""
        target = self.bytes - size
        while self._entries and self.bytes > target:
            self._drop(next(iter(self._entries)))

    async def known_items(
        self, owner: Owner, create: Create, size: int
    ) -> Sequence[Item | None] | None:
        """The items of a history that comes as a whole, where the same bytes were sent before; None if it is not to be
        known."""
        is_chained = create.previous_response_id is not None or create.conversation is not None
        if is_chained or not isinstance(create.input, list):
            return None
        if not self._bytes_max or size > RESENT_BYTES_MAX:
            return None
        raws = create.input

        def find() -> list[Item | None]:
            found = map(self._shared.seen_of(owner).get, map(bytes, raws))
            return [None if known is None else known.item for known in found]

        return await off_loop(size > LOOKUP_BYTES, find)

    async def recognise(
        self, owner: Owner, create: Create, items: tuple[Item, ...], known: Sequence[Item | None]
    ) -> Resent:
        """What this history is known by, and its longest beginning that was sent before."""
        tools = b"" if create.tools is UNSET else bytes(create.tools)
        new = [item.raw for item, old in zip(items, known, strict=True) if old is None]
        if tools not in self._shared.seen_of(owner):
            new.append(tools)
        is_long = sum(map(len, new)) > DIGEST_BYTES_MAX
        resent = await off_loop(is_long, self._recognise, owner, create, tools, items)
        if (beginning := resent.beginning) is not None and beginning.key in self._entries:
            self._entries.move_to_end(beginning.key)
        return resent

    def _recognise(
        self, owner: Owner, create: Create, tools: Sent, items: tuple[Item, ...]
    ) -> _Recognised:
        all_seen = self._shared.seen_of(owner)
        day = int(time.time()) // DAY_S
        head = SentHead(create.model, create.instructions, _tools_digest(all_seen, tools), day)
        digests: list[bytes] = []
        found: list[RememberedHistory] = []
        key = hash((owner, head))
        if (last := self._sent_last(owner, head, items)) is not None:
            digests, found, key = [*last.digests], [last], last.key
        for item in items[len(digests) :]:
            seen = all_seen.get(item.raw)
            digest = digest_of(item) if seen is None else seen.digest
            digests.append(digest)
            if not digest.startswith(THOUGHT):
                key = hash((key, digest))
                known = self._entries.get(key)
                if known is not None:
                    found.append(known)
        # Hashes may be equal by accident.
        for known in reversed(found):
            is_alike = known.owner == owner and known.head == head
            if is_alike and (count := _covered(known.digests, digests)):
                return _Recognised(known, count, key, head, items, tuple(digests))
        return _Recognised(None, 0, key, head, items, tuple(digests))

    def _sent_last(
        self, owner: Owner, head: SentHead, items: tuple[Item, ...]
    ) -> RememberedHistory | None:
        """The history that these items begin with, if they are its very items."""
        for count in range(len(items), 0, -1):
            if (key := self._ends.get(id(items[count - 1]))) is not None:
                # This may be a thread, and the entry dropped meanwhile.
                known = self._entries.get(key)
                if known is None or known.owner != owner or known.head != head:
                    return None
                return known if known.sent == items[:count] else None
        return None

    def resume(self, plan: Plan) -> tuple[Past | None, int]:
        """The past that the items of this plan begin with, its prompt warm, and how many of them that is."""
        given = plan.resolved.given
        resent = plan.resolved.resent
        if not isinstance(resent, _Recognised) or resent.beginning is None:
            return None, 0
        known = resent.beginning
        count = resent.known_count(given)
        if not count:
            return None, 0
        past = known.past
        if past.warm is None or past.warm.fingerprint != plan.model.dialect.fingerprint:
            return None, 0
        last = past.rounds[-1]
        length = answer_length(last.wrote, given[count:]) if last.wrote else 0
        if length and _speaks_first(given[count + length :]) == "others":
            return past, count + length
        if is_cut(given, count):
            return (_without_answer(known) if last.wrote else past), count
        if past.parent is None or count < len(known.given):
            return None, 0
        # What was given last goes on without an answer; what stood before it still stands.
        return past.parent, count - len(last.given)

    def remember(
        self, plan: Plan, first: Composed, wrote: Sequence[Round], warm: Warm | None
    ) -> None:
        """Remember the history of this plan, beside the history that it goes on from."""
        resent = plan.resolved.resent
        given = plan.resolved.given
        if not isinstance(resent, _Recognised):
            return
        if first.is_truncated or not is_cut(given, len(given)):
            return
        # An answer of several rounds does not come back as the model wrote it.
        answer = wrote[0] if len(wrote) == 1 and wrote[0].did_sample else None
        new = _known_history(plan, resent, first, answer, warm)
        beginning = resent.beginning
        ended = None
        # The same request again stands in the same place.
        if beginning is not None and beginning.key == new.before and beginning.before is not None:
            ended = self._entries.get(beginning.before)
        shared = 0 if ended is None else shared_items(ended, new)
        self._shared.hold(new, shared)
        if ended is not None:
            self._drop(ended.key, shared)
        if new.key in self._entries:
            self._drop(new.key)
        self._entries[new.key] = new
        self._ends[id(new.sent[-1])] = new.key
        self._keys[plan.owner, plan.id] = new.key
        self.shrink(self.bytes - self._bytes_max)

    async def forget(self, owner: Owner, turn_id: str) -> None:
        """The turn is erased."""
        if (key := self._keys.get((owner, turn_id))) is not None:
            self._drop(key)

    def _drop(self, key: int, shared: int = 0) -> None:
        dropped = self._entries.pop(key)
        del self._keys[dropped.owner, dropped.turn_id]
        if self._ends.get(id(dropped.sent[-1])) == key:
            del self._ends[id(dropped.sent[-1])]
        self._shared.release(dropped, shared)


def _covered(known: tuple[bytes, ...], digests: list[bytes]) -> int:
    """How many of these items the known ones stand for, if they begin with them; thoughts may be missing."""
    count = len(known)
    if tuple(digests[:count]) == known:
        return count
    count = 0
    for digest in known:
        if digests[count : count + 1] == [digest]:
            count += 1
        elif not digest.startswith(THOUGHT):
            return 0
    return count


def _known_history(
    plan: Plan, resent: _Recognised, first: Composed, answer: Round | None, warm: Warm | None
) -> RememberedHistory:
    resolved = plan.resolved
    context = first.rendered.context
    if answer is None or warm is None:
        answer = Round(())
        route = plan.tally.started.route
        warm = Warm(plan.model.dialect.fingerprint, resolved.head, context, route)
    last = structs.replace(answer, given=first.scene.given)
    before = resent.beginning
    if before is not None and before.key == resent.key:
        before_key = before.before
    else:
        before_key = None if before is None else before.key
    prompt = context if isinstance(context, Tokens) else warm.prompt
    given = resolved.given
    if before is not None and not before.is_direct and resent.known_count(given):
        # What was read anew for this request, files above all, is the same: it is held once.
        given = (*before.given, *given[len(before.given) :])
    return RememberedHistory(
        turn_id=plan.id,
        owner=plan.owner,
        key=resent.key,
        before=before_key,
        head=resent.head,
        tools=b"" if resolved.create.tools is UNSET else resolved.head.tools.raw,
        sent=resent.sent,
        digests=resent.digests,
        unsent_bytes=_unsent_bytes(resent.sent, given),
        given=given,
        given_bytes=resolved.given_bytes,
        is_direct=not resolved.has_media and _is_direct(resent.sent, given),
        past=Unfinished(first.scene.past, (last,), warm),
        prompts=(prompt, warm.prompt),
        open_calls=resolved.open_calls,
        model_turns=resolved.model_turns,
    )


def _unsent_bytes(sent: tuple[Item, ...], given: tuple[Item, ...]) -> int:
    """What the given items hold that are not the very ones that were sent."""
    if given is sent:
        return 0
    known = set(map(id, sent))
    return weigh(item for item in given if id(item) not in known)


def _is_direct(sent: tuple[Item, ...], given: tuple[Item, ...]) -> bool:
    """Whether every item stands for itself, apart from thoughts, whose seals open to the same text each time."""
    if given is sent:
        return True
    return len(sent) == len(given) and all(
        given_item is item or isinstance(item.value, Reasoning)
        for item, given_item in zip(sent, given, strict=True)
    )


def _without_answer(known: RememberedHistory) -> Unfinished:
    past = known.past
    last = past.rounds[-1]
    assert past.warm is not None
    return Unfinished(
        past.parent, (Round(last.given),), structs.replace(past.warm, prompt=known.prompts[0])
    )


def _speaks_first(items: Sequence[Item]) -> Voice | None:
    return _first(_voice_before(item.value) for item in items)


def _tools_digest(all_seen: Mapping[bytes, SeenItem], raw: bytes) -> bytes:
    """What the tools of a request mean."""
    seen = all_seen.get(raw) or all_seen.get(_secret_digest(raw))
    return digest_of_json(raw) if seen is None else seen.digest


def _secret_digest(data: bytes) -> bytes:
    return blake2b(data, digest_size=SECRET_DIGEST_BYTES).digest()


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
