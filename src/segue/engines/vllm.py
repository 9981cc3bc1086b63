"""How is a vLLM server asked for tokens?

It has two endpoints. `/inference/v1/generate` takes and sends only ids and is used where it is offered
(`--enable-scale-out`); else `/v1/completions` with a prompt of ids and `return_token_ids`, which repeats the prompt in
its first event. Which endpoint it has, and what a constraint is called there, is asked once. Closing the connection
aborts the request.

Images stand beside the ids (`content_parts` of `/inference/v1/generate`, since 0.32): the server finds the placeholders
among the ids and puts the tokens of each image in their place.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, structs

from segue.border.numbers import LOGPROBS_MAX, count_in
from segue.border.refusals import UNREADABLE, RequestRefused
from segue.engines.facts import listed_facts
from segue.engines.token_engine import (
    SamplingFields,
    TokenAnswer,
    TokenCodec,
    TokenLikelihood,
    TokenRequest,
    counts_in,
    id_in,
    images_of,
    session_headers,
    token_logprob,
)
from segue.engines.upstream import Upstream
from segue.errors import EngineFailed, InvalidRequest
from segue.seams.model import EngineFacts, Grammar, Job, Sampling, TokenLogprob

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
RENDER = "/v1/completions/render"
TOKENIZE = "/tokenize"
# White, 32 by 32.
SMALL_IMAGE = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAACAAAAAgCAIAAAD8GO2jAAAAJklEQVR42u3NMQ0AAAwDoPo33arYsQQMkB6LQ"
    "CAQCAQCgUAg+BIMi1X0ptsIcT0AAAAASUVORK5CYII="
)
SAMPLING = SamplingFields(top_p_min=1e-6)
# Where the context is unknown: without a limit it would write 16 tokens; when it refuses this one, it names its own.
NO_LIMIT_TOKENS = 2**31 - 1
DYNAMO_REFUSAL = "Bad Request"
# Of the likeliest tokens in the place of one; some of them with their texts.
TOP_BYTES_MAX, NO_TOP = 16 * 1024, Raw(b"null")
# Before this version a JSON schema was called `guided_json`, and after the next one it no longer is.
STRUCTURED_SINCE = (0, 11)


class _Details(Struct, frozen=True):
    cached_tokens: object = None


class _Usage(Struct, frozen=True):
    """How long the prompt was, and how much of it was cached."""

    prompt_tokens: object = None
    prompt_tokens_details: Raw | UnsetType = UNSET


class _Logprobs(Struct, frozen=True):
    """In the shape of `/inference/v1/generate`, or of `/v1/completions`, where tokens are written as `token_id:42`."""

    content: list[TokenLikelihood] | None = None
    token_logprobs: list[float | None] = []
    # Each an object, with the twenty likeliest at most.
    top_logprobs: list[Raw] | None = None


class VllmChoice(Struct, frozen=True):
    """What was sampled together."""

    index: int = 0
    # Null in a chunk that only ends; left out by a server that does not know `return_token_ids`.
    token_ids: list[int] | None = None
    text: str | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    # The id of the stop that was sampled, if it is not the model's own end mark.
    stop_reason: int | str | None = None


class VllmEvent(Struct, frozen=True):
    """One event of either endpoint."""

    id: Raw | UnsetType = UNSET
    choices: list[VllmChoice] = []
    usage: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


class _Refused(Struct, frozen=True):
    type: str = ""


class _Version(Struct, frozen=True):
    version: str = ""


class _Samplers(Struct, frozen=True):
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class _Rendered(Struct, frozen=True):
    sampling_params: _Samplers = _Samplers()


class VllmOffer(Struct, frozen=True):
    """What this server offers."""

    has_generate: bool
    has_structured: bool
    # Whether images may stand beside the ids.
    takes_images: bool = False
    # How the model samples by itself: a request to `/inference/v1/generate` must say it, the other endpoint knows it.
    own: dict[str, float] = {}
    # With `--scheduling-policy priority`; a priority is sent until the server refuses it.
    takes_priority: bool = True


_event = msgspec.json.Decoder(VllmEvent)
_likeliest = msgspec.json.Decoder(dict[str, float] | None)
_version = msgspec.json.Decoder(_Version)
_refused = msgspec.json.Decoder(_Refused)
_rendered = msgspec.json.Decoder(list[_Rendered])


async def _prepare(upstream: Upstream, job: Job, known: VllmOffer | None) -> VllmOffer:
    return known or await _offer(upstream)


async def _offer(upstream: Upstream) -> VllmOffer:
    """A bad request is refused with 400 or 422 where the endpoint exists, with 403 or 404 where it does not. Dynamo has
    the endpoint too, but does not stream there; its refusals have another shape."""
    status, refusal = await upstream.call("POST", GENERATE, b'{"content_parts": 0}')
    _, body = await upstream.call("GET", "/version")
    try:
        version = _version.decode(body).version
    except msgspec.MsgspecError:
        version = ""
    has_generate = status in (400, 422) and _kind(refusal) != DYNAMO_REFUSAL
    # A field that is not known is ignored.
    takes_images = has_generate and b"valid list" in refusal
    own = await _own_sampling(upstream) if has_generate else {}
    return VllmOffer(has_generate, _numbers(version) >= STRUCTURED_SINCE, takes_images, own)


def _kind(refusal: bytes) -> str:
    """What a refusal is called beside its message; vLLM puts both into an `error`."""
    try:
        return _refused.decode(refusal).type
    except UNREADABLE:
        return ""


async def _own_sampling(upstream: Upstream) -> dict[str, float]:
    """What the model's generation_config says; a server that has `generate` shows it when it renders a prompt."""
    status, body = await upstream.call("POST", RENDER, b'{"prompt":[0]}')
    try:
        (rendered,) = _rendered.decode(body if status == 200 else b"[{}]")
    except (*UNREADABLE, ValueError):
        return {}
    told = structs.asdict(rendered.sampling_params)
    return {name: value for name, value in told.items() if value is not None}


def _numbers(version: str) -> tuple[int, ...]:
    """`0.32.0+cpu` as (0, 32); a version that cannot be read is taken to be new."""
    try:
        return tuple(int(part) for part in version.split(".")[:2])
    except ValueError:
        return STRUCTURED_SINCE


def _request(job: Job, model: str, offer: VllmOffer) -> TokenRequest:
    sampling = job.sampling
    settings: dict[str, object] = {
        # It refuses to sample no token at all.
        "max_tokens": NO_LIMIT_TOKENS
        if job.output_tokens_max is None
        else max(job.output_tokens_max, 1),
        "stop_token_ids": sorted(job.stops),
        **SAMPLING.of(sampling),
    }
    if sampling.wants_logprobs:
        settings["logprobs"] = sampling.top_logprobs
    if job.schema is not None:
        settings |= _constraint(job.schema, offer)
    fields: dict[str, object] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if images := images_of(job):
        if not offer.takes_images:
            raise InvalidRequest(
                "The engine takes no images: it must be vLLM 0.32 or newer with --enable-scale-out.",
                code="unsupported_value",
                param="input",
            )
        fields["content_parts"] = [{"type": "image_url", "url": at.url} for at in images]
    if job.cache_salt is not None:
        fields["cache_salt"] = job.cache_salt
    if job.lineage.priority and offer.takes_priority:
        # Here the lowest goes first.
        fields["priority"] = -job.lineage.priority
    headers = session_headers(job, "x-session-id")
    if offer.has_generate:
        fields["sampling_params"] = offer.own | settings | {"detokenize": False}
        return TokenRequest(GENERATE, "token_ids", fields, headers=headers)
    fields |= settings | {"return_token_ids": True}
    if sampling.wants_logprobs:
        fields["return_tokens_as_token_ids"] = True
    return TokenRequest(COMPLETIONS, "prompt", fields, headers=headers)


def _learned(offer: VllmOffer, refusal: RequestRefused) -> VllmOffer | None:
    """A server that schedules in order of arrival refuses every priority."""
    if "`return_token_ids`" in refusal.words:
        raise EngineFailed(
            "The engine does not return token ids. For NVIDIA Dynamo, use --engine dynamo."
        )
    if not offer.takes_priority or "Priority scheduling is not enabled" not in refusal.words:
        return None
    return structs.replace(offer, takes_priority=False)


def _constraint(schema: bytes | Grammar, offer: VllmOffer) -> dict[str, object]:
    """What the answer must follow, by the names of this version."""
    kind, value = constraint(schema)
    if offer.has_structured or kind == "structural_tag":
        return {"structured_outputs": {kind: value}}
    return {f"guided_{kind}": value}


def constraint(schema: bytes | Grammar) -> tuple[str, Raw]:
    """What the answer must follow: its kind, and its JSON."""
    if isinstance(schema, bytes):
        return "json", Raw(schema)
    kind = "grammar" if schema.syntax == "lark" else schema.syntax
    return kind, Raw(msgspec.json.encode(schema.definition))


def _read(event: VllmEvent, answer: TokenAnswer) -> None:
    if not answer.is_ours(event.id):
        return
    if event.usage is not UNSET:
        read_usage(event.usage, answer)
    for choice in event.choices:
        if choice.text and choice.token_ids is None:
            raise EngineFailed("This vLLM gives no token ids. It must be 0.10.2 or newer.")
        read_choice(choice, choice.token_ids, choice.stop_reason, answer)


def read_usage(said: Raw, answer: TokenAnswer) -> None:
    """Add how the prompt was counted."""
    if bytes(said) == b"null":
        # As in every event but the last.
        return
    usage = counts_in(said, _Usage)
    details = counts_in(usage.prompt_tokens_details, _Details)
    answer.input_tokens = count_in(usage.prompt_tokens)
    answer.cached_tokens = count_in(details.cached_tokens)


def read_choice(
    choice: VllmChoice, token_ids: list[int] | None, stop: int | str | None, answer: TokenAnswer
) -> None:
    """Add what was sampled; `stop` is the id of the stop that ended it, where that is known."""
    if choice.index or answer.reason is not None:
        # There is one answer, and nothing of it after its end.
        return
    ids = token_ids or []
    if isinstance(stop, int) and stop in answer.job.stops and token_ids is not None:
        ids = ids if stop == (ids[-1] if ids else answer.last_id) else [*ids, stop]
    logprobs = choice.logprobs
    answer.add(ids, () if logprobs is None else _logprobs(logprobs, answer.job.sampling))
    match choice.finish_reason:
        case None:
            pass
        case "stop" | "length" | "content_filter" as reason:
            answer.reason = answer.reason or reason
        case _:
            raise EngineFailed("The engine gave the request up.")


def _logprobs(logprobs: _Logprobs, sampling: Sampling) -> list[TokenLogprob | None]:
    if logprobs.content is not None:
        return [token.logprobs(sampling) for token in logprobs.content[:LOGPROBS_MAX]]
    values = logprobs.token_logprobs[:LOGPROBS_MAX]
    tops = logprobs.top_logprobs or [NO_TOP] * len(values)
    sampled = zip(values, tops[:LOGPROBS_MAX], strict=True)
    return [token_logprob(logprob, _top(top), sampling) for logprob, top in sampled]


def _top(raw: Raw) -> list[tuple[int, float]]:
    if len(bytes(raw)) > TOP_BYTES_MAX:
        raise ValueError("more tokens than anybody wants")
    told = _likeliest.decode(raw) or {}
    return [(id_in(key), value) for key, value in told.items() if key.startswith("token_id:")]


async def _facts(upstream: Upstream, model: str) -> EngineFacts:
    """The list of models does not say how the model samples, which a rendered prompt shows."""
    facts = await listed_facts(upstream, model)
    offer = await _offer(upstream)
    sees = offer.takes_images and await _sees(upstream, model)
    own = msgspec.convert(offer.own, Sampling)
    return structs.replace(facts, sees_images=sees, sampling=own, ids_alone=offer.has_generate)


async def _sees(upstream: Upstream, model: str) -> bool:
    """A server whose model sees counts the tokens of an image. One that takes no images beside ids is not asked: the
    Rust front end would call it an error of its own, and log it."""
    image = {"type": "image_url", "image_url": {"url": SMALL_IMAGE}}
    asked = {"model": model, "messages": [{"role": "user", "content": [image]}]}
    status, _ = await upstream.call("POST", TOKENIZE, msgspec.json.encode(asked))
    return status == 200


GRAMMARS = frozenset({"lark", "regex", "structural_tag"})
VLLM = TokenCodec(_prepare, _request, _event, _read, GRAMMARS, facts=_facts, learned=_learned)
