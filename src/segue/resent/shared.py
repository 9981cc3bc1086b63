"""What do several histories hold together, and how much is it?

The ends of a conversation share their items and the beginning of their prompts. Each thing is weighed once, and
goes with the last history that holds it. Items are found by their bytes: what was sent before is
not decoded again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from segue.seams.history import KnownHistory, Owner
from segue.seams.prompt import Prompt, Tokens
from segue.turn.running import ID_BYTES
from segue.wire.items import ITEM_BYTES, Item

# What a history costs beside what it shares with others, and what each of its items adds to that.
HISTORY_BYTES = 1_000
LISTED_BYTES = 24
# What a chunk of a prompt costs beside its ids or bytes.
CHUNK_BYTES = 300
# How often a text is in memory: as it came, as the value of an item, as the bytes of its answer.
TEXT_COST = 3


class SentHead(NamedTuple):
    """What stands before a history that came as a whole: two with equal heads begin alike."""

    model: str | None
    instructions: str | None
    # A digest of what the tools mean.
    tools: bytes
    # Some families print the day on which a history began.
    day: int


@dataclass(frozen=True, slots=True)
class RememberedHistory(KnownHistory):
    """What is kept of a history, so that it is known again."""

    owner: Owner
    # What it is found by, and what the history was found by that it goes on from.
    key: int
    before: int | None
    head: SentHead
    # The tools as they were sent; a digest where there are secrets in them.
    tools: bytes
    # The items as they were sent, with digests of what they mean.
    sent: tuple[Item, ...]
    digests: tuple[bytes, ...]
    # What items hold that were not sent as they are understood: with what was read for them, files above all.
    unsent_bytes: int
    # Whether items that mean the same are understood alike at any time: there are no references and no media.
    is_direct: bool
    # Its prompt without the answer, and with it.
    prompts: tuple[Prompt, Prompt]


@dataclass(slots=True)
class SeenItem:
    """What bytes became, and the digest of their meaning. A list of tools is no item."""

    digest: bytes
    item: Item | None = None
    holders: int = 0


NOTHING_SEEN: Mapping[bytes, SeenItem] = {}


class SharedHistories:
    """What the histories of all owners hold, each thing once."""

    def __init__(self) -> None:
        self.size = 0
        self.sizes: Counter[Owner] = Counter()
        self._seen: dict[Owner, dict[bytes, SeenItem]] = {}
        # Chunks of prompts by their identity, with how many histories and later chunks hold each.
        self._chunks: dict[tuple[Owner, int], tuple[Prompt, int]] = {}

    def seen_of(self, owner: Owner) -> Mapping[bytes, SeenItem]:
        """What bytes of this owner became when they were sent before."""
        return self._seen.get(owner, NOTHING_SEEN)

    def hold(self, history: RememberedHistory, shared: int = 0) -> None:
        """This history is remembered. `shared`: so many items it has from a history that is released now."""
        owner = history.owner
        self._weigh(owner, _own_bytes(history))
        self._hold_seen(owner, history.tools, history.head.tools)
        for item, digest in zip(history.sent[shared:], history.digests[shared:], strict=True):
            self._hold_seen(owner, item.raw, digest, item)
        for prompt in history.prompts:
            self._hold_chunks(owner, prompt)

    def release(self, history: RememberedHistory, shared: int = 0) -> None:
        """This history is forgotten. `shared`: another one has so many items from it."""
        owner = history.owner
        self._weigh(owner, -_own_bytes(history))
        self._release_seen(owner, history.tools)
        for item in history.sent[shared:]:
            self._release_seen(owner, item.raw)
        for prompt in history.prompts:
            self._release_chunks(owner, prompt)

    def _hold_seen(self, owner: Owner, raw: bytes, digest: bytes, item: Item | None = None) -> None:
        all_seen = self._seen.setdefault(owner, {})
        seen = all_seen.get(raw)
        if seen is None:
            seen = all_seen[raw] = SeenItem(digest, item)
            self._weigh(owner, _seen_bytes(raw))
        seen.holders += 1

    def _release_seen(self, owner: Owner, raw: bytes) -> None:
        all_seen = self._seen[owner]
        seen = all_seen[raw]
        seen.holders -= 1
        if not seen.holders:
            del all_seen[raw]
            self._weigh(owner, -_seen_bytes(raw))
            if not all_seen:
                del self._seen[owner]

    def _hold_chunks(self, owner: Owner, prompt: Prompt | None) -> None:
        """Hold the last chunk, and with it those before it: a chunk that is new holds the chunk before."""
        holders = 0
        while prompt is not None and not holders:
            _, holders = self._chunks.get((owner, id(prompt)), (prompt, 0))
            self._chunks[owner, id(prompt)] = (prompt, holders + 1)
            self._weigh(owner, 0 if holders else _chunk_bytes(prompt))
            prompt = prompt.before

    def _release_chunks(self, owner: Owner, prompt: Prompt | None) -> None:
        holders = 1
        while prompt is not None and holders == 1:
            _, holders = self._chunks.pop((owner, id(prompt)))
            if holders > 1:
                self._chunks[owner, id(prompt)] = (prompt, holders - 1)
            else:
                self._weigh(owner, -_chunk_bytes(prompt))
            prompt = prompt.before

    def _weigh(self, owner: Owner, change: int) -> None:
        self.size += change
        self.sizes[owner] += change
        if not self.sizes[owner]:
            del self.sizes[owner]


def shared_items(history: RememberedHistory, other: RememberedHistory) -> int:
    """With how many of the same items both begin."""
    fewer = min(len(history.sent), len(other.sent))
    # As a rule the one begins with all of the other.
    if history.sent[:fewer] == other.sent[:fewer]:
        return fewer
    pairs = zip(history.sent, other.sent, strict=False)
    return next((n for n, (item, same) in enumerate(pairs) if item is not same), fewer)


def _own_bytes(history: RememberedHistory) -> int:
    instructions = 2 * len(history.head.instructions or "")
    listed = LISTED_BYTES * len(history.sent)
    return HISTORY_BYTES + listed + instructions + history.unsent_bytes


def _seen_bytes(raw: bytes) -> int:
    return ITEM_BYTES + TEXT_COST * len(raw)


def _chunk_bytes(prompt: Prompt) -> int:
    """A token is in the prompt, and what was sampled among what was written as well."""
    held = 2 * ID_BYTES * len(prompt.ids) if isinstance(prompt, Tokens) else len(prompt.data)
    return CHUNK_BYTES + held
