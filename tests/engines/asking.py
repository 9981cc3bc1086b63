"""What the tests of engines over HTTP share: jobs made by hand, and all pieces of an answer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import cast

import msgspec

from segue.engines.client import HttpResponse
from segue.engines.upstream import EventStream, Timeouts, Upstream
from segue.seams.model import (
    Engine,
    Finish,
    Ids,
    Job,
    JobStarted,
    Piece,
    Sampling,
    Scene,
    TokenLogprob,
)
from segue.seams.prompt import NO_TOKENS, Head, Tokens, id_array
from segue.wire.codec import as_item
from segue.wire.items import Item, Message, OutputText
from tests.contracts import engine as contract
from tests.contracts.engine import Bench, chatml

WAIT_S = 20
STOP = 2

PROMISES = [
    contract.streams_ids_then_one_finish,
    contract.ends_its_turn_with_a_stop,
    contract.honours_the_limit,
    contract.knows_its_own_room,
    contract.closing_frees_it,
    contract.cancelling_frees_it,
    contract.serves_jobs_beside_each_other,
    contract.says_whether_it_is_ready,
]
Promise = Callable[[Bench], Awaitable[None]]

TIMEOUTS = Timeouts(connect_s=2, first_s=20, silence_s=20, probe_s=2)


@asynccontextmanager
async def upstream(
    url: str, key: str | None = None, timeouts: Timeouts = TIMEOUTS
) -> AsyncIterator[Upstream]:
    """An address, closed at the end."""
    found = Upstream(url, key, timeouts)
    try:
        yield found
    finally:
        await found.close()


class PlayedResponse:
    """A response whose bytes arrive in these pieces."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = deque(pieces)

    async def read_until(self, use: Callable[[bytes], bool]) -> bool:
        return any(use(self._pieces.popleft()) for _ in range(len(self._pieces)))

    def close(self, linger_s: float = 0.0) -> None:
        pass


def played(pieces: Sequence[bytes]) -> EventStream:
    """The events of a response that arrives in these pieces."""
    return EventStream(cast(HttpResponse, PlayedResponse(pieces)), TIMEOUTS)


class Played(Upstream):
    """An engine that sends these bytes, in these pieces, and keeps what it was sent."""

    name = "played"

    def __init__(self, pieces: list[bytes]) -> None:
        self._pieces = pieces
        self.sent: list[tuple[str, bytes]] = []

    async def stream(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> EventStream:
        self.sent.append((path, body))
        return played(self._pieces)

    async def call(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        self.sent.append((path, body))
        return 404, b"{}"


def tokens(*chunks: Sequence[int]) -> Tokens:
    """A prompt made of these chunks."""
    prompt = NO_TOKENS
    for chunk in chunks:
        prompt = prompt.plus(id_array(chunk))
    return prompt


def job(prompt: Tokens, output_tokens_max: int | None = 100, **fields: object) -> Job:
    """A job for a token engine."""
    made = Job(
        prompt=prompt,
        scene=Scene(Head(), None, ()),
        sampling=Sampling(temperature=0),
        stops=frozenset({STOP}),
        output_tokens_max=output_tokens_max,
    )
    return msgspec.structs.replace(made, **fields)


async def heard(engine: Engine, wanted: Job) -> list[Piece]:
    """All pieces of the answer."""
    async with asyncio.timeout(WAIT_S), aclosing(engine.sample(wanted)) as pieces:
        return [piece async for piece in pieces]


def ids_of(pieces: Sequence[Piece]) -> list[int]:
    return [id for piece in pieces if isinstance(piece, Ids) for id in piece.ids]


def logprobs_of(pieces: Sequence[Piece]) -> list[TokenLogprob | None]:
    return [one for piece in pieces if isinstance(piece, Ids) for one in piece.logprobs]


def finish_of(pieces: Sequence[Piece]) -> Finish:
    last = pieces[-1]
    assert isinstance(last, Finish)
    return last


def route_of(pieces: Sequence[Piece]) -> str | None:
    return [piece.route for piece in pieces if isinstance(piece, JobStarted)][-1]


def reply(prompt: Sequence[int]) -> list[int]:
    """What a fake answers: a sentence in ChatML that depends on the prompt."""
    return chatml().write([assistant(f"I was given {sum(prompt)} in {len(prompt)} ids.")]).tolist()


def assistant(text: str) -> Item:
    return as_item(Message(role="assistant", content=[OutputText(text=text)]))


@dataclass(frozen=True)
class Greedy(Bench):
    """A bench whose jobs have one answer only, and a short one, because a real model gives it."""

    tokens_max: int = 12

    def job(self, *given: Item, **fields: object) -> Job:  # type: ignore[override]
        head = Head(instructions="Answer with one word.")
        made = Bench.job(self, *given, **{"head": head, **fields})  # type: ignore[arg-type]
        wanted = made.output_tokens_max
        limit = self.tokens_max if wanted is None else min(wanted, self.tokens_max)
        return msgspec.structs.replace(
            made, sampling=Sampling(temperature=0), output_tokens_max=limit
        )
