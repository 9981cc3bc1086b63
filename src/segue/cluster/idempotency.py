"""Does another worker hold this idempotency key, for a turn that is not to be stored?

The keys of stored turns are in the store, which all workers share. Those of unstored turns stay in memory, so a worker
that takes one asks the others first: whoever has taken it already says so, and the rest take note. Of two who ask at
the same time the one with the smaller turn id has it; both see that. Only digests leave the process. What cannot be
heard elsewhere is at least not run twice.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

import msgspec
from msgspec import Struct, structs

from segue.cluster.peers import Peers
from segue.turn.seams import IdempotencyKeys
from segue.turn.values import Claim, Owner

# As long as a key stands for its turn.
CLAIM_S = 86_400.0
# About 500 bytes each; the oldest go first.
BIDS_MAX = 20_000

Place = tuple[Owner, bytes]


class Bid(Struct, frozen=True, array_like=True):
    """A claim as other workers are told of it."""

    owner: Owner
    key: bytes
    turn_id: str
    digest: bytes
    # Whether all others have been asked.
    is_settled: bool = False

    @property
    def place(self) -> Place:
        """Where it lies."""
        return (self.owner, self.key)


_bid = msgspec.msgpack.Decoder(Bid).decode
_pack = msgspec.msgpack.encode


class Bids:
    """Bids by place, for a day, bounded in number."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # Who made it, and when.
        self._bids: OrderedDict[Place, tuple[Bid, str, float]] = OrderedDict()

    def put(self, bid: Bid, worker: str = "") -> None:
        """Remember it."""
        self._bids[bid.place] = (bid, worker, self._clock())
        if len(self._bids) > BIDS_MAX:
            self._bids.popitem(last=False)

    def get(self, place: Place) -> Bid | None:
        """The bid at this place, if its time is not over."""
        bid, _, made_at = self._bids.get(place, (None, "", 0.0))
        return bid if self._clock() - made_at < CLAIM_S else None

    def drop(self, place: Place, turn_id: str) -> None:
        """Forget the bid of this turn."""
        bid = self.get(place)
        if bid is not None and bid.turn_id == turn_id:
            del self._bids[place]

    def forget(self, worker: str) -> None:
        """Forget everything that this worker has bid."""
        for place, (_, whose, _) in tuple(self._bids.items()):
            if whose == worker:
                del self._bids[place]


class SharedIdempotencyKeys:
    """`IdempotencyKeys` that know what other workers hold in memory."""

    def __init__(
        self,
        idempotency_keys: IdempotencyKeys,
        peers: Peers,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._repeats = idempotency_keys
        self._peers = peers
        self._own, self._foreign = Bids(clock), Bids(clock)
        peers.answer("claim", self._hear_claim)
        peers.answer("unclaim", self._hear_unclaim)
        peers.when_gone(self._foreign.forget)

    async def claim(self, claim: Claim) -> Claim:
        """Take the key if it is free everywhere; returns whoever holds it now."""
        if claim.is_stored:
            return await self._repeats.claim(claim)
        bid = _bid_of(claim)
        foreign = self._foreign.get(bid.place)
        if foreign is not None:
            return _held(claim, foreign)
        held = await self._repeats.claim(claim)
        if held.turn_id != claim.turn_id or self._own.get(bid.place) is not None:
            return held
        self._own.put(bid)
        rival = await self._ask(bid)
        if rival is None:
            self._own.put(structs.replace(bid, is_settled=True))
            return held
        self._own.drop(bid.place, bid.turn_id)
        await self._repeats.release(claim)
        return _held(claim, rival)

    async def release(self, claim: Claim) -> None:
        """Let go of the key, here and elsewhere."""
        await self._repeats.release(claim)
        if not claim.is_stored:
            bid = _bid_of(claim)
            self._own.drop(bid.place, bid.turn_id)
            await self._peers.tell("unclaim", _pack(bid))

    async def _ask(self, bid: Bid) -> Bid | None:
        """The bid of another worker that goes before this one."""
        answers = await self._peers.ask("claim", _pack(bid), self._peers.others)
        for worker, body in answers.items():
            rival = _bid(body)
            if rival.is_settled or rival.turn_id < bid.turn_id:
                self._foreign.put(rival, worker)
                return rival
        return None

    async def _hear_claim(self, worker: str, body: bytes) -> bytes | None:
        bid = _bid(body)
        own = self._own.get(bid.place)
        if own is not None:
            return _pack(own)
        self._foreign.put(bid, worker)
        return None

    async def _hear_unclaim(self, _: str, body: bytes) -> None:
        bid = _bid(body)
        self._foreign.drop(bid.place, bid.turn_id)


def _bid_of(claim: Claim) -> Bid:
    key = blake2b(claim.key.encode("utf-8", "surrogatepass"), digest_size=32).digest()
    return Bid(claim.owner, key, claim.turn_id, claim.digest)


def _held(claim: Claim, bid: Bid) -> Claim:
    return structs.replace(claim, turn_id=bid.turn_id, digest=bid.digest)
