"""Who produces tokens? An SGLang server: ids in, ids out, through its own `/generate`.

Its events repeat all ids so far, unless the server was started to stream only the new ones; `completion_tokens` tells
how many there are by now, and so which of them are new, in both cases. A request has a name of our own, so
that it can be aborted by that name, also while its prompt is read.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing, suppress
from typing import Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.engines.logprobs import ids_with, odds_of
from segue.engines.token_json import TokenJson
from segue.engines.upstream import Upstream, read, refusal, told
from segue.errors import ApiError
from segue.ids import new_id
from segue.turn.values import (
    Finish,
    Grammar,
    Job,
    JobStarted,
    Piece,
    Sampling,
    TokenLogprob,
    Tokens,
)

PATH = "/generate"
ABORT = "/abort_request"
DONE = b"[DONE]"
# It refuses a plain zero.
TOP_P_MIN = 1e-6


class _Reason(Struct, frozen=True):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


# How likely a token was, its id, and its text, which nobody asks for.
_Likely = tuple[float | None, int, str | None]


class _Meta(Struct, frozen=True):
    finish_reason: _Reason | None = None
    completion_tokens: int = 0
    cached_tokens: int = 0
    # As many as there are ids: all so far, or only the new ones.
    output_token_logprobs: list[_Likely] = []
    output_top_logprobs: list[list[_Likely] | None] | None = None


class _Event(Struct, frozen=True):
    output_ids: list[int] = []
    meta_info: _Meta = _Meta()
    error: Raw | UnsetType = UNSET


_event = msgspec.json.Decoder(_Event)


class SglangEngine:
    """An `Engine` for token prompts."""

    def __init__(self, upstream: Upstream, token_json: TokenJson | None = None) -> None:
        self._upstream = upstream
        # Shared by all replicas of a model, where there are several.
        self._token_json = token_json or TokenJson()

    @property
    def can_constrain(self) -> bool:
        """Yes, by its grammar backend."""
        return True

    @property
    def grammars(self) -> frozenset[str]:
        """Regular expressions. Its other grammars are no Lark."""
        return frozenset({"regex"})

    async def is_ready(self) -> bool:
        """Whether the server takes jobs."""
        return await self._upstream.is_up("/health")

    async def close(self) -> None:
        """Close the connections."""
        await self._upstream.close()

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        """The ids as they are sampled, then why it stopped and how much of the prompt was kept from before."""
        if job.prompt.length == 0:
            yield Finish("length")
            return
        name = new_id("req")
        is_heard_out = False
        try:
            async with aclosing(self._listen(job, name)) as pieces:
                async for piece in pieces:
                    is_heard_out = isinstance(piece, Finish)
                    yield piece
        finally:
            if not is_heard_out:
                await self._abort(name)

    async def _listen(self, job: Job, name: str) -> AsyncGenerator[Piece, None]:
        is_warm_up = job.output_tokens_max == 0
        heard = 0
        last: int | None = None
        begun: JobStarted | None = None
        end: _Meta | None = None
        async with await self._upstream.listen(PATH, self._body(job, name)) as stream:
            async for batch in stream:
                ids: list[int] = []
                logprobs: list[TokenLogprob | None] = []
                fault: ApiError | None = None
                for data in batch:
                    if data == DONE:
                        stream.is_over = True
                        break
                    event = read(_event, data)
                    if event.error is not UNSET:
                        # What was said before it counts.
                        fault = told(event.error)
                        break
                    if begun is None:
                        # It tells with every event how much it has kept.
                        begun = JobStarted(event.meta_info.cached_tokens)
                        yield begun
                    new = _new_ids(event, heard)
                    heard += len(new)
                    ids += new
                    logprobs += _new_odds(event.meta_info, len(new), job.sampling)
                    if event.meta_info.finish_reason is not None:
                        end = event.meta_info
                if ids and not is_warm_up:
                    last = ids[-1]
                    yield ids_with(ids, logprobs, job)
                if fault is not None:
                    raise fault
                if stream.is_over:
                    break
            if end is None:
                raise stream.broke_off()
            yield Finish(_why(end, last, job), end.cached_tokens)

    async def _abort(self, name: str) -> None:
        """Closing the connection is noticed late while a prompt is read; the name is not."""
        with suppress(ApiError):
            await self._upstream.call("POST", ABORT, msgspec.json.encode({"rid": name}))

    def _body(self, job: Job, name: str) -> bytes:
        assert isinstance(job.prompt, Tokens), "this engine takes tokens"
        sampling = job.sampling
        settings: dict[str, object] = {
            # A warm-up's one token is not heard by anybody.
            "max_new_tokens": max(job.output_tokens_max, 1),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p or TOP_P_MIN,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "stop_token_ids": sorted(job.stops),
        }
        if sampling.seed is not None:
            settings["sampling_seed"] = sampling.seed
        if isinstance(job.schema, Grammar):
            settings["regex"] = job.schema.definition
        elif job.schema is not None:
            # Here a schema is a string that holds JSON.
            settings["json_schema"] = job.schema.decode()
        request: dict[str, object] = {"rid": name, "stream": True, "sampling_params": settings}
        if sampling.wants_logprobs:
            request |= {"return_logprob": True, "top_logprobs_num": sampling.top_logprobs}
        ids = self._token_json.text(job.prompt)
        return b"".join((b'{"input_ids":[', ids, b"],", msgspec.json.encode(request)[1:]))


def _new_ids(event: _Event, heard: int) -> list[int]:
    """What this event adds: the last ones of its list, whether that holds all ids or only the new ones."""
    count = event.meta_info.completion_tokens - heard
    return event.output_ids[-count:] if count > 0 else []


def _new_odds(meta: _Meta, count: int, sampling: Sampling) -> list[TokenLogprob | None]:
    """Those of the new ids, which are the last ones here too; none where nobody asked."""
    if not sampling.wants_logprobs or not count:
        return []
    sampled = meta.output_token_logprobs[-count:]
    tops = (meta.output_top_logprobs or [])[-count:]
    logprobs: list[TokenLogprob | None] = [None] * (count - len(sampled))
    for n, (logprob, *_) in enumerate(sampled):
        top = (tops[n] if len(tops) == len(sampled) else None) or []
        pairs = ((id, value) for value, id, _ in top if value is not None)
        logprobs.append(odds_of(logprob, pairs, sampling))
    return logprobs


def _why(end: _Meta, last: int | None, job: Job) -> Literal["stop", "length"]:
    reason = end.finish_reason
    assert reason is not None
    if reason.type == "abort":
        body = msgspec.json.encode({"message": reason.message or ""})
        raise refusal(reason.status_code or 503, body)
    return "stop" if last in job.stops or reason.type == "stop" else "length"
