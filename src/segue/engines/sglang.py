"""How is an SGLang server asked for tokens? Through its own `/generate`.

Its events repeat all ids so far, unless the server was started to stream only the new ones; `completion_tokens` is how
many there are by now, and so tells which of them are new, in both cases. A request has an id of ours, so that it can
be aborted by that id: while a prompt is read, a closed connection is noticed late.
"""

from __future__ import annotations

import secrets
from typing import TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.border.numbers import count_in
from segue.border.refusals import UNREADABLE, error_for_status
from segue.engines.facts import listed_facts
from segue.engines.token_engine import (
    SamplingFields,
    TokenAnswer,
    TokenCodec,
    TokenRequest,
    images_of,
    session_headers,
    token_logprob,
)
from segue.engines.upstream import Upstream
from segue.ids import new_id
from segue.seams.model import EngineFacts, Grammar, Job, Sampling, TokenLogprob

A = TypeVar("A", bound=Struct)

PATH = "/generate"
ABORT = "/abort_request"
SERVER_INFO = "/get_server_info"
# Servers draft a few tokens ahead. Brackets of an event that repeats the logprobs of 20,000 tokens with twenty others,
# where a client wants logprobs.
DRAFTS_MAX, REPEATED = 1_024, 524_288
SAMPLING = SamplingFields(top_p_min=1e-6, seed="sampling_seed")


class _Reason(Struct, frozen=True):
    type: str
    matched: int | str | list[int] | None = None
    message: str | None = None
    status_code: int | None = None


# The logprob of a token, its id, and its text, which is not requested.
_Likelihood = tuple[float | None, int, str | None]


class _Meta(Struct, frozen=True):
    id: Raw | UnsetType = UNSET
    finish_reason: _Reason | None = None
    completion_tokens: int = 0
    cached_tokens: object = None
    prompt_tokens: object = None
    # As many as there are ids: all so far, or only the new ones.
    output_token_logprobs: list[_Likelihood] = []
    output_top_logprobs: list[list[_Likelihood] | None] | None = None


class _Event(Struct, frozen=True):
    output_ids: list[int] = []
    meta_info: _Meta = _Meta()
    error: Raw | UnsetType = UNSET


_event = msgspec.json.Decoder(_Event)


class _Server(Struct, frozen=True):
    """How it was started."""

    speculative_algorithm: str | None = None
    speculative_num_draft_tokens: int | None = None
    # Without it a priority is ignored, or refused.
    enable_priority_scheduling: bool | None = None
    schedule_low_priority_values_first: bool | None = None


async def _prepare(upstream: Upstream, job: Job, known: _Server | None) -> _Server:
    return known or await _asked(upstream, SERVER_INFO, _Server)


def _request(job: Job, model: str, known: _Server) -> TokenRequest:
    sampling = job.sampling
    settings: dict[str, object] = {
        # It refuses to sample no token at all; null is all that fits.
        "max_new_tokens": job.output_tokens_max if job.output_tokens_max != 0 else 1,
        "stop_token_ids": sorted(job.stops),
        **SAMPLING.of(sampling),
    }
    if isinstance(job.schema, Grammar):
        settings[job.schema.syntax] = job.schema.definition
    elif job.schema is not None:
        # Here a schema is a string that holds JSON.
        settings["json_schema"] = job.schema.decode()
    id = {"rid": _request_id(job)}
    fields: dict[str, object] = {**id, "stream": True, "sampling_params": settings}
    if images := images_of(job):
        fields["image_data"] = [at.url for at in images]
    if job.cache_salt is not None:
        # Older servers have no field for a salt of its own.
        fields["extra_key"] = job.cache_salt
    if sampling.wants_logprobs:
        fields |= {"return_logprob": True, "top_logprobs_num": sampling.top_logprobs}
    if job.lineage.priority and known.enable_priority_scheduling:
        fields["priority"] = (
            -job.lineage.priority
            if known.schedule_low_priority_values_first
            else job.lineage.priority
        )
    headers = session_headers(job, "x-session-id", "x-smg-routing-key")
    abort = (ABORT, msgspec.json.encode(id))
    return TokenRequest(PATH, "input_ids", fields, abort, headers)


def _request_id(job: Job) -> str:
    """An id of its own for each request. SGLang's router takes what stands before `_t` for the conversation."""
    chain = job.lineage.chain
    return f"{chain}_t{secrets.randbits(48)}" if chain else new_id("req")


def _read(event: _Event, answer: TokenAnswer) -> None:
    meta = event.meta_info
    if not answer.is_ours(meta.id):
        return
    if answer.started is None:
        answer.start(count_in(meta.cached_tokens))
    count = meta.completion_tokens - answer.count
    if count > 0 and answer.reason is None:
        # The new ids are the last ones of the list, whether it holds all or only the new ones.
        ids = event.output_ids[-count:]
        answer.count += len(ids)
        answer.add(ids, _logprobs(meta, len(ids), answer.job.sampling))
    reason = meta.finish_reason
    if reason is None:
        return
    if reason.type == "abort":
        body = msgspec.json.encode({"message": reason.message or ""})
        raise error_for_status(reason.status_code or 503, body)
    answer.reason = answer.reason or ("stop" if reason.type == "stop" else "length")
    answer.cached_tokens = count_in(meta.cached_tokens)
    answer.input_tokens = count_in(meta.prompt_tokens)


def _logprobs(meta: _Meta, count: int, sampling: Sampling) -> list[TokenLogprob | None]:
    """Those of the new ids, which are the last ones here too."""
    if not sampling.wants_logprobs or not count:
        return []
    sampled = meta.output_token_logprobs[-count:]
    tops = (meta.output_top_logprobs or [])[-count:]
    logprobs: list[TokenLogprob | None] = [None] * (count - len(sampled))
    for n, (logprob, *_) in enumerate(sampled):
        top = (tops[n] if len(tops) == len(sampled) else None) or []
        pairs = ((id, value) for value, id, _ in top if value is not None)
        logprobs.append(token_logprob(logprob, pairs, sampling))
    return logprobs


# --- what it says of itself ---------------------------------------------------------------------------


class _Model(Struct, frozen=True):
    has_image_understanding: bool | None = None


async def _facts(upstream: Upstream, model: str) -> EngineFacts:
    """The list of models, and two endpoints of its own."""
    listed = await listed_facts(upstream, model)
    server = await _asked(upstream, SERVER_INFO, _Server)
    about = await _asked(upstream, "/get_model_info", _Model)
    # A speculating server counts its drafts to the prompt; and older ones want one token less than all.
    drafts = (server.speculative_algorithm and server.speculative_num_draft_tokens) or 0
    drafts = min(max(0, drafts), DRAFTS_MAX)
    return msgspec.structs.replace(
        listed, reserved_tokens=drafts + 1, sees_images=about.has_image_understanding
    )


async def _asked(upstream: Upstream, path: str, kind: type[A]) -> A:
    """What it answers there; nothing, if this version does not have it."""
    status, body = await upstream.call("GET", path)
    try:
        return msgspec.json.decode(body if status == 200 else b"{}", type=kind)
    except UNREADABLE:
        return kind()


# It has other grammars too, but they are not Lark.
GRAMMARS = frozenset({"regex", "structural_tag"})
SGLANG = TokenCodec(
    _prepare, _request, _event, _read, GRAMMARS, facts=_facts, brackets_max=REPEATED
)
