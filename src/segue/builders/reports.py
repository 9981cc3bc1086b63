"""Where is the report on a turn's prompt, when several workers serve one port?"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec

from segue.builders.state import State
from segue.turn.values import Owner
from segue.wire.response import CacheReport

TOPIC = "cache_report"
_key = msgspec.msgpack.Decoder(tuple[str, str]).decode
_report = msgspec.msgpack.Decoder(CacheReport | None).decode
encode = msgspec.msgpack.encode


def report_finder(state: State) -> Callable[[Owner, str], Awaitable[CacheReport | None]]:
    """Finds the report in this worker, or else in the other workers of the same parent process."""
    reuse = state.reuse
    peers = None if state.cluster is None else state.cluster.peers

    async def answer(worker: str, body: bytes) -> bytes:
        return encode(reuse.find(*_key(body)))

    async def find(owner: Owner, turn_id: str) -> CacheReport | None:
        found = reuse.find(owner, turn_id)
        if found is not None or peers is None:
            return found
        answers = await peers.ask(TOPIC, encode((owner, turn_id)), peers.siblings)
        return next(filter(None, map(_report, answers.values())), None)

    if peers is not None:
        peers.answer(TOPIC, answer)
    return find
