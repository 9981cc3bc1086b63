"""Does another worker hold this idempotency key, for a turn that is not stored?

The keys of stored turns are in the store, which all workers share. The keys of unstored turns stay in memory, so a
worker that claims one asks the others first: a worker that holds it answers with its claim, and the rest take note. Of
two workers that claim a key at the same time, the one with the smaller turn id gets it; both see that. Only digests
leave the process. An unstored turn cannot be followed in another worker, but at least it does not run twice.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from hashlib import blake2b

import msgspec
from msgspec import Struct, structs

from segue.cluster.peers import Peers
from segue.seams.history import Owner
from segue.seams.store import Claim, IdempotencyKeys

# As long as an idempotency key is kept in the store.
CLAIM_S = 86_400.0
# About 500 bytes each; the oldest go first.
CLAIMS_MAX = 20_000

HashedKey = tuple[Owner, bytes]


class PeerClaim(Struct, frozen=True, array_like=True):
    """A claim as other workers see it."""

    owner: Owner
    key: bytes
    turn_id: str
    digest: bytes
    # Whether all other workers have been asked.
    is_settled: bool = False

    @property
    def hashed_key(self) -> HashedKey:
        """The owner and the digest of the key: what is claimed."""
        return (self.owner, self.key)


_decode = msgspec.msgpack.Decoder(PeerClaim).decode
_encode = msgspec.msgpack.encode


class PeerClaims:
    """Claims by key, for a day, bounded in number."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        # With the worker that made the claim, and when.
        self._claims: OrderedDict[HashedKey, tuple[PeerClaim, str, float]] = OrderedDict()

    def put(self, claim: PeerClaim, worker: str = "") -> None:
        self._claims[claim.hashed_key] = (claim, worker, self._clock())
        if len(self._claims) > CLAIMS_MAX:
            self._claims.popitem(last=False)

    def get(self, key: HashedKey) -> PeerClaim | None:
        """The claim of this key, if it has not expired."""
        claim, _, made_at = self._claims.get(key, (None, "", 0.0))
        return claim if self._clock() - made_at < CLAIM_S else None

    def remove(self, claim: PeerClaim) -> None:
        """Forget the claim of this turn."""
        held = self.get(claim.hashed_key)
        if held is not None and held.turn_id == claim.turn_id:
            del self._claims[claim.hashed_key]

    def remove_worker(self, worker: str) -> None:
        """Forget all claims of this worker."""
        for key, (_, claimant, _) in tuple(self._claims.items()):
            if claimant == worker:
                del self._claims[key]


class SharedIdempotencyKeys:
    """`IdempotencyKeys` that respect what other workers hold in memory."""

    def __init__(
        self,
        idempotency_keys: IdempotencyKeys,
        peers: Peers,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._keys = idempotency_keys
        self._peers = peers
        self._own = PeerClaims(clock)
        self._foreign = PeerClaims(clock)
        # Questions that wait for answers, and the turns whose keys were released meanwhile: an answer may still name
        # one of them.
        self._asking = 0
        self._released: set[str] = set()
        peers.on_message("claim", self._on_claim)
        peers.on_message("unclaim", self._on_unclaim)
        peers.when_gone(self._foreign.remove_worker)

    async def claim(self, claim: Claim) -> Claim:
        """Take the key if it is free in all workers; returns the claim that holds it now."""
        if claim.is_stored:
            return await self._keys.claim(claim)
        own = _peer_claim(claim)
        foreign = self._foreign.get(own.hashed_key)
        if foreign is not None:
            return _held_by(foreign, claim)
        holder = await self._keys.claim(claim)
        if holder.turn_id != claim.turn_id or self._own.get(own.hashed_key) is not None:
            return holder
        self._own.put(own)
        rival = await self._find_rival(own)
        if rival is None:
            self._own.put(structs.replace(own, is_settled=True))
            return holder
        await self.release(claim)
        return _held_by(rival, claim)

    async def release(self, claim: Claim) -> None:
        """Release the key in all workers."""
        await self._keys.release(claim)
        if not claim.is_stored:
            own = _peer_claim(claim)
            self._own.remove(own)
            await self._peers.send("unclaim", _encode(own))

    async def _find_rival(self, own: PeerClaim) -> PeerClaim | None:
        """The claim of another worker that goes before this one."""
        self._asking += 1
        try:
            answers = await self._peers.ask("claim", _encode(own), self._peers.others)
            for worker, body in answers.items():
                rival = _decode(body)
                if rival.is_settled or rival.turn_id < own.turn_id:
                    if rival.turn_id not in self._released:
                        self._foreign.put(rival, worker)
                    return rival
            return None
        finally:
            self._asking -= 1
            if not self._asking:
                self._released.clear()

    async def _on_claim(self, worker: str, body: bytes) -> bytes | None:
        claim = _decode(body)
        own = self._own.get(claim.hashed_key)
        if own is not None:
            return _encode(own)
        self._foreign.put(claim, worker)
        return None

    async def _on_unclaim(self, _: str, body: bytes) -> None:
        claim = _decode(body)
        self._foreign.remove(claim)
        if self._asking:
            self._released.add(claim.turn_id)


def _peer_claim(claim: Claim) -> PeerClaim:
    key = blake2b(claim.key.encode("utf-8", "surrogatepass"), digest_size=32).digest()
    return PeerClaim(claim.owner, key, claim.turn_id, claim.digest)


def _held_by(holder: PeerClaim, claim: Claim) -> Claim:
    return structs.replace(claim, turn_id=holder.turn_id, digest=holder.digest)
