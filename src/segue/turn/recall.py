"""What was rendered before, for clients that resend everything?

A client on plain HTTP sends its whole history each turn. The render cache knows the leading items of earlier
requests by their digest and gives back the prompt that they became, so that only what is new is rendered and
tokenized. It is warmth under another key: token ids in memory, per owner, bounded in bytes, and with it or without it
the prompt is the same.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

from segue.turn.values import Head, Messages, Owner, Prompt, Tokens, Warm
from segue.wire.items import Item, is_model_written

Key = tuple[Owner, str, bytes]

# What an entry costs beside its ids: key, digest, dictionary slot.
ENTRY_BYTES = 500


class RenderCache:
    """Digests of leading items, and what they were rendered to. `bytes_max` of 0 switches it off."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._entries: OrderedDict[Key, tuple[Warm, int]] = OrderedDict()
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """What it holds; shared beginnings are counted once."""
        return self._bytes

    def find(
        self, owner: Owner, fingerprint: str, head: Head, given: Sequence[Item]
    ) -> tuple[Warm | None, int]:
        """The longest beginning of these items that was rendered before, and how many items that is."""
        if not self._bytes_max or not self._entries:
            return None, 0
        digests = _digests(head, given)
        for count in reversed(_cuts(given)):
            key = (owner, fingerprint, digests[count])
            entry = self._entries.get(key)
            if entry is not None:
                self._entries.move_to_end(key)
                return entry[0], count
        return None, 0

    def keep(
        self,
        owner: Owner,
        fingerprint: str,
        head: Head,
        given: Sequence[Item],
        context: Prompt,
        reused: int,
    ) -> None:
        """Remember what these items became; `reused` is how much of it was known before."""
        if not self._bytes_max or not given or is_model_written(given[-1].value):
            return
        key = (owner, fingerprint, _digests(head, given)[len(given)])
        if key in self._entries:
            return
        size = ENTRY_BYTES + _bytes(context) - reused * _width(context)
        self._entries[key] = (Warm(fingerprint, head, context), size)
        self._bytes += size
        while self._bytes > self._bytes_max:
            _, (_, freed) = self._entries.popitem(last=False)
            self._bytes -= freed


def _cuts(given: Sequence[Item]) -> list[int]:
    """Where an earlier request may have ended: before something that the model wrote, behind something it did not.

    Only there is it certain for every family that what follows does not join what went before.
    """
    is_models = [is_model_written(item.value) for item in given]
    return [n for n in range(1, len(given)) if is_models[n] and not is_models[n - 1]]


def _digests(head: Head, given: Sequence[Item]) -> list[bytes]:
    """One digest for each beginning of the items, the empty one included; each builds on the one before."""
    first = blake2b(head.tools.raw, digest_size=16)
    first.update(b"\0" if head.instructions is None else b"\1" + head.instructions.encode())
    found = [first.digest()]
    for item in given:
        found.append(blake2b(found[-1] + item.raw, digest_size=16).digest())
    return found


def _width(context: Prompt) -> int:
    return 1 if isinstance(context, Messages) else 4


def _bytes(context: Prompt) -> int:
    assert isinstance(context, Tokens | Messages)
    return context.length * _width(context)
