"""Who produces tokens? A llama.cpp server: ids in, ids out, through its own `/completion`.

The server keeps the prefix of each slot and chooses the slot itself. It ends its turn at the model's own end marks and
sends the mark's id; closing the connection frees the slot. Which other samplers it uses (top_k, min_p) is the
choice of whoever started it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.engines.digits import Digits
from segue.engines.upstream import Upstream, read, told
from segue.turn.values import Finish, Ids, Job, Piece, Tokens

PATH = "/completion"
# The last event would otherwise repeat the whole prompt as text.
LAST_FIELDS = ["stop", "stop_type", "tokens", "timings"]


class _Timings(Struct, frozen=True):
    cache_n: int = 0


class _Event(Struct, frozen=True):
    tokens: list[int] = []
    stop: bool = False
    stop_type: str = ""
    timings: _Timings = _Timings()
    error: Raw | UnsetType = UNSET


_event = msgspec.json.Decoder(_Event)


class LlamacppEngine:
    """An `Engine` for token prompts."""

    def __init__(self, upstream: Upstream, digits: Digits | None = None) -> None:
        self._upstream = upstream
        # Shared by all replicas of a model, where there are several.
        self._digits = digits or Digits()

    @property
    def can_constrain(self) -> bool:
        """Yes: it turns a JSON schema into a grammar."""
        return True

    async def is_ready(self) -> bool:
        """Whether the model is loaded."""
        return await self._upstream.is_up("/health")

    async def close(self) -> None:
        """Close the connections."""
        await self._upstream.close()

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        """The ids as they are sampled, then why it stopped and how much of the prompt was kept from before."""
        if job.prompt.length == 0:
            yield Finish("length")
            return
        is_warm_up = job.output_tokens_max == 0
        has_stopped = False
        async with await self._upstream.listen(PATH, self._body(job)) as stream:
            async for batch in stream:
                ids: list[int] = []
                end: _Event | None = None
                for data in batch:
                    event = read(_event, data)
                    if event.error is not UNSET:
                        raise told(event.error)
                    ids += event.tokens
                    if event.stop:
                        end = event
                        stream.is_over = True
                if has_stopped and ids:
                    # It does not know this end mark and talks on.
                    end, ids = _Event(), []
                for n, id in enumerate(ids):
                    if id in job.stops:
                        has_stopped, ids = True, ids[: n + 1]
                        break
                if ids and not is_warm_up:
                    yield Ids(ids)
                if end is not None:
                    is_stop = has_stopped or end.stop_type in ("eos", "word")
                    yield Finish("stop" if is_stop else "length", end.timings.cache_n)
                    return
            raise stream.broke_off()

    def _body(self, job: Job) -> bytes:
        assert isinstance(job.prompt, Tokens), "this engine takes tokens"
        sampling = job.sampling
        settings: dict[str, object] = {
            "stream": True,
            "cache_prompt": True,
            "return_tokens": True,
            "response_fields": LAST_FIELDS,
            # A warm-up still gives one token, which nobody hears.
            "n_predict": job.output_tokens_max,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }
        if job.schema is not None:
            settings["json_schema"] = Raw(job.schema)
        ids = self._digits.text(job.prompt)
        return b"".join((b'{"prompt":[', ids, b"],", msgspec.json.encode(settings)[1:]))
