"""Who produces tokens? A vLLM server: ids in, ids out.

Two ways lead in. `/inference/v1/generate` speaks only ids and is taken where it is offered (`--enable-scale-out`); else
`/v1/completions` with a prompt of ids and `return_token_ids`, which repeats the prompt in its first event. Which
one, and what a constraint is called there, is asked once. Closing the connection aborts the request.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.engines.logprobs import Likely, id_in, ids_with, odds_of, odds_of_likely
from segue.engines.token_json import TokenJson
from segue.engines.upstream import Stream, Upstream, read, told
from segue.errors import ApiError, EngineFailed
from segue.turn.values import Finish, Grammar, Job, Piece, Sampling, TokenLogprob, Tokens

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
DONE = b"[DONE]"
# It refuses a plain zero.
TOP_P_MIN = 1e-6
# Before this version a JSON schema was called `guided_json`, and after the next one it no longer is.
STRUCTURED_SINCE = (0, 11)


class _Details(Struct, frozen=True):
    cached_tokens: int | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens_details: _Details | None = None


class _Logprobs(Struct, frozen=True):
    """In the shape of `/inference/v1/generate`, or of `/v1/completions`, where tokens are written as `token_id:42`."""

    content: list[Likely] | None = None
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None


class _Choice(Struct, frozen=True):
    # Null in a chunk that only ends; left out by a server that does not know `return_token_ids`.
    token_ids: list[int] | None = None
    text: str | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    # The id of the stop that was sampled, if it is not the model's own end mark.
    stop_reason: int | str | None = None


class _Event(Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Raw | UnsetType = UNSET


class _Version(Struct, frozen=True):
    version: str = ""


class Ways(Struct, frozen=True):
    """What this server offers."""

    has_generate: bool
    has_structured: bool


_event = msgspec.json.Decoder(_Event)
_version = msgspec.json.Decoder(_Version)


class VllmEngine:
    """An `Engine` for token prompts; `model` is the name under which vLLM serves it."""

    def __init__(self, upstream: Upstream, model: str, token_json: TokenJson | None = None) -> None:
        self._upstream = upstream
        self._model = model
        # Shared by all replicas of a model, where there are several.
        self._token_json = token_json or TokenJson()
        self._ways: Ways | None = None

    @property
    def can_constrain(self) -> bool:
        """Yes, by structured outputs."""
        return True

    @property
    def grammars(self) -> frozenset[str]:
        """Both, by structured outputs."""
        return frozenset({"lark", "regex"})

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
        if self._ways is None:
            self._ways = await self._ask_ways()
        path = GENERATE if self._ways.has_generate else COMPLETIONS
        is_warm_up = job.output_tokens_max == 0
        last: int | None = None
        reason: str | None = None
        cached = 0
        async with await self._listen(path, self._body(job, self._ways)) as stream:
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
                    if event.usage and event.usage.prompt_tokens_details:
                        cached = event.usage.prompt_tokens_details.cached_tokens or 0
                    for choice in event.choices:
                        ids += _ids(choice, job)
                        logprobs += _logprobs(choice.logprobs, job.sampling)
                        logprobs += [None] * (len(ids) - len(logprobs))
                        reason = choice.finish_reason or reason
                if ids and not is_warm_up:
                    last = ids[-1]
                    yield ids_with(ids, logprobs, job)
                if fault is not None:
                    raise fault
                if stream.is_over:
                    break
            if reason is None:
                raise stream.broke_off()
            if reason not in ("stop", "length"):
                raise EngineFailed("The engine gave the request up.")
            is_stop = last in job.stops or reason == "stop"
            yield Finish("stop" if is_stop else "length", cached)

    async def _listen(self, path: str, body: bytes) -> Stream:
        try:
            return await self._upstream.listen(path, body)
        except EngineFailed:
            # It may have been started anew, in another way.
            self._ways = None
            raise

    async def _ask_ways(self) -> Ways:
        """An empty request is refused as such where the way exists: 403 or 404 where it does not."""
        status, _ = await self._upstream.call("POST", GENERATE, b"{}")
        _, body = await self._upstream.call("GET", "/version")
        try:
            version = _version.decode(body).version
        except msgspec.MsgspecError:
            version = ""
        return Ways(status in (400, 422), _numbers(version) >= STRUCTURED_SINCE)

    def _body(self, job: Job, ways: Ways) -> bytes:
        assert isinstance(job.prompt, Tokens), "this engine takes tokens"
        sampling = job.sampling
        settings: dict[str, object] = {
            # One is the least that it takes; a warm-up's token is not heard by anybody.
            "max_tokens": max(job.output_tokens_max, 1),
            "temperature": sampling.temperature,
            "top_p": sampling.top_p or TOP_P_MIN,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            "stop_token_ids": sorted(job.stops),
        }
        if sampling.seed is not None:
            settings["seed"] = sampling.seed
        if sampling.wants_logprobs:
            settings["logprobs"] = sampling.top_logprobs
        if job.schema is not None:
            settings |= _constraint(job.schema, ways)
        request: dict[str, object] = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ways.has_generate:
            key = b"token_ids"
            request["sampling_params"] = settings | {"detokenize": False}
        else:
            key = b"prompt"
            request |= settings | {"return_token_ids": True}
            if sampling.wants_logprobs:
                request["return_tokens_as_token_ids"] = True
        ids = self._token_json.text(job.prompt)
        return b"".join((b'{"', key, b'":[', ids, b"],", msgspec.json.encode(request)[1:]))


def _constraint(schema: bytes | Grammar, ways: Ways) -> dict[str, object]:
    """What the answer is held to, by the names of this version."""
    kind, value = "json", Raw(schema) if isinstance(schema, bytes) else Raw()
    if isinstance(schema, Grammar):
        kind = "regex" if schema.syntax == "regex" else "grammar"
        value = Raw(msgspec.json.encode(schema.definition))
    return (
        {"structured_outputs": {kind: value}} if ways.has_structured else {f"guided_{kind}": value}
    )


def _logprobs(told: _Logprobs | None, sampling: Sampling) -> list[TokenLogprob | None]:
    if told is None:
        return []
    if told.content is not None:
        return [odds_of_likely(one, sampling) for one in told.content]
    tops = told.top_logprobs or [None] * len(told.token_logprobs)
    return [
        odds_of(logprob, ((id_in(key), value) for key, value in (top or {}).items()), sampling)
        for logprob, top in zip(told.token_logprobs, tops, strict=True)
    ]


def _ids(choice: _Choice, job: Job) -> list[int]:
    if choice.token_ids is None:
        if choice.text:
            raise EngineFailed("This vLLM gives no token ids. It must be 0.10.2 or newer.")
        return []
    ids = choice.token_ids
    stop = choice.stop_reason
    if isinstance(stop, int) and stop in job.stops and stop not in ids[-1:]:
        return [*ids, stop]
    return ids


def _numbers(version: str) -> tuple[int, ...]:
    """`0.32.0+cpu` as (0, 32); what cannot be read is taken to be new."""
    try:
        return tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return STRUCTURED_SINCE
