"""What was rendered before, for clients that resend everything?

A client on plain HTTP sends its whole history each turn. The render cache knows the leading items of earlier
requests by their digest and gives back the prompt that they became, so that only what is new is rendered and
tokenized. It is warmth under another key: token ids in memory, per owner, bounded in bytes, and with it or without it
the prompt is the same.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import Literal, assert_never

from segue.background import off_loop
from segue.turn.values import Messages, Owner, Prompt, Resent, Tokens, Warm
from segue.wire.items import AdditionalTools, Item, ItemValue, Reasoning
from segue.wire.kinds import shown_as

CacheKey = tuple[Owner, str, bytes]
Voice = Literal["others", "model", "none"]

# What an entry costs beside its ids: key, digest, dictionary slot.
ENTRY_BYTES = 500
DAY_S = 86_400


class RenderCache:
    """Digests of leading items, and what they were rendered to. `bytes_max` of 0 switches it off.

    A longer beginning of the same history takes the place of the one that it goes on from, so that a conversation has
    one entry, and what an entry counts is all that it keeps alive.
    """

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries: OrderedDict[CacheKey, Warm] = OrderedDict()
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
        for key in [one for one in self._entries if one[0] == owner]:
            self._drop(key)
            if self._owner_bytes[owner] <= bytes_max:
                return

    def shrink(self, size: int) -> None:
        """Let go of so many bytes, the longest unused first."""
        target = self._bytes - size
        while self._entries and self._bytes > target:
            self._drop(next(iter(self._entries)))

    async def find(self, resent: Resent) -> tuple[Warm | None, int]:
        """The longest beginning of these items that was rendered before, and how many items that is."""
        if not self._bytes_max or not self._entries:
            return None, 0
        return await off_loop(resent.is_long, self._find, resent)

    def _find(self, resent: Resent) -> tuple[Warm | None, int]:
        digests = _digests(resent)
        for count in range(len(resent.given), 0, -1):
            key = (resent.owner, resent.fingerprint, digests[count])
            warm = self._entries.get(key)
            if warm is not None and is_cut(resent.given, count):
                # It may have been dropped meanwhile, where this runs in a thread.
                with suppress(KeyError):
                    self._entries.move_to_end(key)
                return warm, count
        return None, 0

    async def keep(self, resent: Resent, context: Prompt, recalled_items: int) -> None:
        """Remember what these items became, in place of what was recalled for the first so many of them."""
        if not self._bytes_max or not is_cut(resent.given, len(resent.given)):
            return
        digests = await off_loop(resent.is_long, _digests, resent)
        key = (resent.owner, resent.fingerprint, digests[len(resent.given)])
        if key in self._entries:
            return
        before = (resent.owner, resent.fingerprint, digests[recalled_items])
        if before in self._entries:
            self._drop(before)
        warm = Warm(resent.fingerprint, resent.head, context)
        self._entries[key] = warm
        self._count(resent.owner, _measure(warm))
        self.shrink(self._bytes - self._bytes_max)

    def _drop(self, key: CacheKey) -> None:
        self._count(key[0], -_measure(self._entries.pop(key)))

    def _count(self, owner: Owner, change: int) -> None:
        self._bytes += change
        self._owner_bytes[owner] += change
        if not self._owner_bytes[owner]:
            del self._owner_bytes[owner]


def _measure(warm: Warm) -> int:
    head = warm.head
    text = 2 * len(head.tools.echo) + len(head.instructions or "")
    prompt = warm.prompt
    images = prompt.all_images() if isinstance(prompt, Tokens) else ()
    text += sum(len(at.url) for at in images)
    return ENTRY_BYTES + text + prompt.length * _width(prompt)


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


def _digests(resent: Resent) -> list[bytes]:
    """One digest for each beginning of the items, the empty one included; each builds on the one before."""
    head = resent.head
    first = blake2b(head.tools.echo, digest_size=16)
    first.update(head.tools.listed)
    first.update(b"\1" if head.tools.has_web else b"\0")
    first.update(b"\0" if head.instructions is None else b"\1" + head.instructions.encode())
    # Some families print the day on which a history began.
    first.update(b"%d" % (resent.root_at // DAY_S))
    found = [first.digest()]
    for item in resent.given:
        digest = blake2b(found[-1], digest_size=16)
        digest.update(item.raw)
        found.append(digest.digest())
    return found


def _width(context: Prompt) -> int:
    """Bytes of a unit of length: an id has four."""
    return 1 if isinstance(context, Messages) else 4
