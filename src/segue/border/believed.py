"""What of that which a server of an engine says is believed?

In: a job, and the pieces with which a server answers it. Out: pieces that can be true, and an end. Every piece of every
engine passes here, whichever protocol it came by: what a codec reads is the server's word, what leaves here is ours.

    counts     none is negative, none larger than the request can explain, no more is cached than was read. They are
               stored, added up and charged: one that cannot be true must not lose an answer or lock a key
    ids        only such as a vocabulary may have
    length     a server that does not keep to the limit is stopped there, and the answer is incomplete
    size       much that comes at once is handed on in parts, with pauses for others
    order      nothing after the end; a server that ends without one has failed
    surprises  an exception that only an odd answer can have caused is a failure of the server, not of ours

`Correction` names what was not believed: it is counted by replica, and logged once for each. No words are logged.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import aclosing
from typing import Literal

from msgspec import structs

from segue.border.numbers import (
    CHARS_MIN,
    EVENTS_MIN,
    ID_MAX,
    TOKEN_CHARS_MAX,
    TOKEN_EVENTS_MAX,
    C,
    are_ids,
    plausible,
)
from segue.errors import ApiError, EngineFailed
from segue.limits import UNSEEN_TOKENS_MAX
from segue.seams.model import Delta, Deltas, Engine, Finish, Ids, Job, JobStarted, Piece, Written

log = logging.getLogger(__name__)

Correction = Literal["counts", "length"]

BAD_ID = "The engine sent a token id that no vocabulary has."
# So much is read at once, a few milliseconds; then other turns have their time.
PIECE_IDS_MAX = 2_048
PIECE_CHARS_MAX = 16 * 1024
# Calls of one answer; agents make tens at once.
CALLS_MAX = 1_024
# How much of a name that a server gives is kept.
NAME_CHARS_MAX = 128


async def believed(
    engine: Engine, job: Job, name: str, note: Callable[[Correction], None]
) -> AsyncGenerator[Piece, None]:
    """The pieces of this engine, as far as they can be true; `name` is the replica, for the log."""
    answer = _Answer(job, note)
    asked = job if job.take is None else structs.replace(job, take=answer.take)
    try:
        async with aclosing(engine.sample(asked)) as pieces:
            async for piece in pieces:
                if isinstance(piece, JobStarted):
                    yield answer.plausible(piece)
                    continue
                if isinstance(piece, Finish):
                    yield answer.plausible(piece)
                    return
                is_first = True
                for part in answer.parts(piece):
                    if not is_first:
                        await asyncio.sleep(0)
                    is_first = False
                    yield part
                if answer.is_full:
                    note("length")
                    yield Finish("length")
                    return
        raise EngineFailed("The engine ended without an end of its answer.")
    except ApiError as error:
        if isinstance(error, EngineFailed):
            _log_failure(name, error)
        raise
    except Exception as error:
        if error is answer.own_fault:
            raise
        failure = EngineFailed("The engine sent something that cannot be read.")
        failure.__cause__ = error
        _log_failure(name, failure)
        raise failure from error


def _log_failure(name: str, failure: EngineFailed) -> None:
    """Where it happened, but not the message of the cause, which may quote an answer."""
    cause, place = failure.__cause__, ""
    if cause is not None:
        frames = traceback.extract_tb(cause.__traceback__)
        place = f" ({type(cause).__name__} in {frames[-1].name})" if frames else ""
    log.warning("engine %s failed: %s%s", name, failure.message[:NAME_CHARS_MAX], place)


class _Answer:
    """How much of an answer has come, by whichever way."""

    def __init__(self, job: Job, note: Callable[[Correction], None]) -> None:
        self._note = note
        self._job = job
        self._take = job.take
        limit = job.output_tokens_max
        most = UNSEEN_TOKENS_MAX if limit is None else limit
        self._ids_left = most
        self._deltas_left = most * TOKEN_EVENTS_MAX + EVENTS_MIN
        self._chars_left = most * TOKEN_CHARS_MAX + CHARS_MIN
        # Whether more came than may be.
        self.is_full = False
        # What the turn itself raised while it took a piece.
        self.own_fault: Exception | None = None

    def take(self, piece: Written) -> bool:
        """As the turn takes it, if it is a plain one; all others come through the iterator."""
        assert self._take is not None
        try:
            if isinstance(piece, Ids):
                ids = piece.ids
                count = len(ids)
                if count > self._ids_left or count > PIECE_IDS_MAX or not are_ids(ids):
                    return False
                if not self._take(piece):
                    return False
                self._ids_left -= count
                return True
            chars = self._chars_at_once(piece.deltas)
            if chars is None or not self._take(piece):
                return False
        except Exception as error:
            self.own_fault = error
            raise
        self._deltas_left -= len(piece.deltas)
        self._chars_left -= chars
        return True

    def parts(self, piece: Written) -> Iterable[Written]:
        """The piece, up to the limit, in parts of which each is read at once."""
        if isinstance(piece, Ids):
            return self._ids(piece)
        chars = self._chars_at_once(piece.deltas)
        if not chars:
            return self._deltas(piece)
        self._deltas_left -= len(piece.deltas)
        self._chars_left -= chars
        return (piece,)

    def _chars_at_once(self, deltas: Sequence[Delta]) -> int | None:
        """How long these are together, if all of them may be read and at once, as nearly always."""
        # Not by `_chars`: a call for each token would cost more than its words.
        chars = sum(
            [
                len(one.text) + len(one.reasoning) + len(one.call_arguments) + len(one.call_name)
                for one in deltas
            ]
        )
        calls = max([one.call_index or 0 for one in deltas], default=0)
        is_whole = chars <= min(self._chars_left, PIECE_CHARS_MAX)
        return (
            chars if is_whole and len(deltas) <= self._deltas_left and calls < CALLS_MAX else None
        )

    def _ids(self, piece: Ids) -> Iterator[Written]:
        ids, logprobs = piece.ids, piece.logprobs
        left, self._ids_left = self._ids_left, self._ids_left - len(ids)
        if self._ids_left < 0:
            self.is_full = True
            ids, logprobs = ids[:left], logprobs[:left]
        is_whole = are_ids(ids)
        if not is_whole:
            # What was sampled before it counts.
            bad = next(n for n, id in enumerate(ids) if not 0 <= id <= ID_MAX)
            ids, logprobs = ids[:bad], logprobs[:bad]
        for at in range(0, len(ids), PIECE_IDS_MAX):
            end = at + PIECE_IDS_MAX
            yield Ids(ids[at:end], logprobs[at:end])
        if not is_whole:
            raise EngineFailed(BAD_ID)

    def _deltas(self, piece: Deltas) -> Iterator[Written]:
        together: list[Delta] = []
        size = 0
        for delta in piece.deltas:
            if not self._has_room(delta):
                self.is_full = True
                break
            for part in _slices(delta):
                together.append(part)
                size += _chars(part)
                if size >= PIECE_CHARS_MAX:
                    yield Deltas(tuple(together))
                    together, size = [], 0
        if together:
            yield Deltas(tuple(together))

    def _has_room(self, delta: Delta) -> bool:
        self._deltas_left -= 1
        self._chars_left -= _chars(delta)
        is_call_too_many = delta.call_index is not None and delta.call_index >= CALLS_MAX
        return self._deltas_left >= 0 and self._chars_left >= 0 and not is_call_too_many

    def plausible(self, said: C) -> C:
        """What the server has counted, if it can be true."""
        counted = plausible(self._job, said)
        if counted is not said:
            self._note("counts")
        return counted


def _chars(delta: Delta) -> int:
    return len(delta.text) + len(delta.reasoning) + len(delta.call_arguments) + len(delta.call_name)


def _slices(delta: Delta) -> Iterator[Delta]:
    """A long delta as several; the first has everything but the rest of its words."""
    most = PIECE_CHARS_MAX
    if _chars(delta) <= most:
        yield delta
        return
    index = delta.call_index
    yield structs.replace(
        delta,
        text=delta.text[:most],
        reasoning=delta.reasoning[:most],
        call_name=delta.call_name[:NAME_CHARS_MAX],
        call_arguments=delta.call_arguments[:most],
    )
    for at in range(most, len(delta.reasoning), most):
        yield Delta(reasoning=delta.reasoning[at : at + most])
    for at in range(most, len(delta.text), most):
        yield Delta(text=delta.text[at : at + most])
    for at in range(most, len(delta.call_arguments), most):
        yield Delta(call_index=index, call_arguments=delta.call_arguments[at : at + most])


def check_ids(ids: Collection[int]) -> None:
    """Refuse ids that no vocabulary has: they could be neither read nor kept."""
    if not are_ids(ids):
        raise EngineFailed(BAD_ID)
