"""How does a thread get to the worker that is to continue it?

A client may send its next turn to another worker than the last one. The id of a turn names the worker that made it;
that worker is asked for the turn with its whole chain, which is here from then on. What travels is sealed by the one
worker and opened by the other, beside their event loops. If the chain does not come in time, it is not found: its
worker is gone, has dropped it, or it is too long.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import msgspec

from segue.cluster.peers import Peers
from segue.errors import ID_CHARS_MAX
from segue.ids import tag_of
from segue.seams.history import Owner, Turn

# Chains that are on their way at once; further requests wait for a place.
FETCHED_MAX = 4
# How long a request waits for the place and the chain; a worker has less for its answer (`peers.ANSWER_S`).
FETCH_S = 5.0

HeldTurn = Callable[[Owner, str], Turn | None]
SealChain = Callable[[Turn], bytes | None]
OpenChain = Callable[[Owner, bytes], Turn | None]

_decode_name = msgspec.msgpack.Decoder(tuple[str, str]).decode


class RemoteThreads:
    """Threads that other workers have, and questions of other workers for those that are here."""

    def __init__(
        self, peers: Peers, held: HeldTurn, seal: SealChain, open_chain: OpenChain
    ) -> None:
        self._peers = peers
        self._held = held
        self._seal = seal
        self._open = open_chain
        self._places = asyncio.Semaphore(FETCHED_MAX)
        peers.on_message("thread", self._on_question)

    async def fetch(self, owner: Owner, turn_id: str) -> Turn | None:
        """The turn with its chain from the worker that made it; None if it is not available."""
        tag = tag_of(turn_id)
        home = [worker for worker in self._peers.others if tag_of(worker) == tag]
        if not home or len(turn_id) > ID_CHARS_MAX:
            return None
        question = msgspec.msgpack.encode((owner, turn_id))
        try:
            async with asyncio.timeout(FETCH_S), self._places:
                if (answer := await self._peers.find("thread", question, home)) is not None:
                    return await asyncio.to_thread(self._open, owner, answer[1])
        except TimeoutError:
            pass
        return None

    async def _on_question(self, _: str, body: bytes) -> bytes | None:
        turn = self._held(*_decode_name(body))
        return None if turn is None else await asyncio.to_thread(self._seal, turn)
