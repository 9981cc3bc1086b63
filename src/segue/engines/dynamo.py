"""How is NVIDIA Dynamo asked for tokens?

By its `/v1/completions`, as vLLM is, in another spelling: ids, worker and stop come in `nvext`, beside the one choice,
and only what `extra_fields` names; a constraint is a field `guided_…`; a field that it does not know is refused. Its
`/inference/v1/generate` does not stream.

Its router keeps a chain on one worker by a header of each request (`--router-session-affinity-ttl-secs`). A model that
no worker serves is unknown to it, and so not there for now.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.engines.token_engine import (
    TokenAnswer,
    TokenCodec,
    TokenRequest,
    images_of,
    no_preparation,
    session_headers,
)
from segue.engines.vllm import (
    COMPLETIONS,
    SAMPLING,
    VllmChoice,
    constraint,
    read_choice,
    read_usage,
)
from segue.errors import EngineFailed, InvalidRequest
from segue.seams.model import Job

READY = "/v1/models/{model}/ready"
EXTRA_FIELDS = ["completion_token_ids", "worker_id", "stop_reason"]
# The most that it takes; where the context is known, less is asked for.
NO_LIMIT_TOKENS = 1_048_576


class _Worker(Struct, frozen=True):
    decode_worker_id: int | None = None


class _Nvext(Struct, frozen=True):
    completion_token_ids: list[int] | None = None
    worker_id: _Worker | None = None
    stop_reason: int | str | None = None


class _Event(Struct, frozen=True):
    id: Raw | UnsetType = UNSET
    choices: list[VllmChoice] = []
    usage: Raw | UnsetType = UNSET
    nvext: _Nvext | None = None
    error: Raw | UnsetType = UNSET


_event = msgspec.json.Decoder(_Event)
_NO_NVEXT = _Nvext()


def _request(job: Job, model: str, known: None) -> TokenRequest:
    if images_of(job):
        raise InvalidRequest(
            "The engine takes no images: Dynamo has no place for them beside token ids.",
            code="unsupported_value",
            param="input",
        )
    wanted, sampling = job.output_tokens_max, job.sampling
    nvext: dict[str, object] = {"extra_fields": EXTRA_FIELDS}
    if job.lineage.priority:
        nvext["agent_hints"] = {"priority": job.lineage.priority}
    fields: dict[str, object] = {
        "model": model,
        "stream": True,
        "stream_options": {"include_usage": True},
        # It refuses to sample no token at all.
        "max_tokens": NO_LIMIT_TOKENS if wanted is None else max(wanted, 1),
        "stop_token_ids": sorted(job.stops),
        "nvext": nvext,
        **SAMPLING.of(sampling),
    }
    if sampling.wants_logprobs:
        fields |= {"logprobs": sampling.top_logprobs, "return_tokens_as_token_ids": True}
    if job.schema is not None:
        kind, value = constraint(job.schema)
        fields[f"guided_{kind}"] = value
    if job.cache_salt is not None:
        fields["cache_salt"] = job.cache_salt
    headers = session_headers(job, "x-dynamo-session-id")
    return TokenRequest(COMPLETIONS, "prompt", fields, headers=headers)


def _read(event: _Event, answer: TokenAnswer) -> None:
    if not answer.is_ours(event.id):
        return
    nvext = event.nvext or _NO_NVEXT
    if event.usage is not UNSET:
        read_usage(event.usage, answer)
    if nvext.worker_id is not None and answer.started is None:
        answer.start(None, str(nvext.worker_id.decode_worker_id))
    for choice in event.choices:
        if choice.text and nvext.completion_token_ids is None:
            raise EngineFailed("This Dynamo gives no token ids. It must be 1.6 or newer.")
        read_choice(choice, nvext.completion_token_ids, nvext.stop_reason, answer)


# It refuses structural tags.
GRAMMARS = frozenset({"lark", "regex"})
DYNAMO = TokenCodec(
    no_preparation, _request, _event, _read, GRAMMARS, health_path=READY, forgets_models=True
)
