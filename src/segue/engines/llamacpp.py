"""How is a llama.cpp server asked for tokens? Through its own `/completion`.

The server keeps the prefix of each slot and chooses the slot itself. It ends its turn at the model's own end marks and
sends the mark's id; closing the connection frees the slot. Other samplers (top_k, min_p) are as the operator of the
server set them.

Grammars are Lark, or a regular expression as one terminal of a Lark grammar, and need llguidance: llama.cpp reads a
grammar that begins with `%llguidance` that way, in the dialect that OpenAI's own documentation describes. A server
that was built without it ends its process when it gets such a grammar, so it is asked first: a server that has it
shows a JSON schema back as such a grammar. And a grammar that cannot be read is ignored without an error, so each
grammar is tried first. A structural tag is written as Lark, or as GBNF for a server without llguidance.

A prompt with images goes as text, because the server takes images no other way: it makes the ids again, from the same
text. What it puts around an image is its own, so that a marker stands for the whole placeholder.
"""

from __future__ import annotations

import asyncio
import re
from base64 import b64encode
from collections.abc import Sequence
from hashlib import blake2b
from itertools import groupby
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.border.believed import check_ids
from segue.border.numbers import context_size, count_in, slots_of
from segue.border.refusals import UNREADABLE, unreadable
from segue.engines.hidden_tokens import TokenVocabulary
from segue.engines.token_engine import (
    SamplingFields,
    TokenAnswer,
    TokenCodec,
    TokenLikelihood,
    TokenRequest,
    counts_in,
    images_of,
)
from segue.engines.upstream import Upstream
from segue.errors import EngineFailed, InvalidRequest
from segue.schemas.structural_tags import gbnf, lark
from segue.seams.model import EngineFacts, Grammar, Job, Sampling, TokenLogprob
from segue.seams.prompt import Tokens

PATH = "/completion"
# The last event would otherwise repeat the whole prompt as text.
LAST_FIELDS = ["stop", "stop_type", "tokens", "tokens_evaluated", "timings"]
# As many seeds as llama.cpp has: one more would mean a random one.
SAMPLING = SamplingFields(seed_values=2**32 - 1)
# A bias that makes a token certain: more than any model's logits differ.
CERTAIN = 1_000.0
# What stands for an image in a text where a server names nothing else, as older ones; and how long a name may be, which
# is looked for in every text.
MARKER, MARKER_CHARS_MAX = "<__media__>", 256
# Grammars that were tried; each is tried once.
GRAMMARS_MAX = 1_000

GRAMMARS = frozenset({"lark", "regex", "structural_tag"})
LLGUIDANCE = "%llguidance"
ZERO_WIDTH_SPACE = "\u200b"
# What may not stand in a terminal as it is. A backslash keeps what follows it.
IN_REGEX = re.compile(r"(\\.)|([/\n\r])", re.DOTALL)
ESCAPES = {"/": r"\/", "\n": r"\n", "\r": r"\r"}


class _Timings(Struct, frozen=True):
    cache_n: object = None


class _Progress(Struct, frozen=True):
    cache: object = 0


class _Event(Struct, frozen=True):
    content: str = ""
    tokens: list[int] = []
    # How many by now; of a character that took several tokens only the last one is shown.
    tokens_predicted: int = 0
    # How many tokens the prompt has.
    tokens_evaluated: object = None
    stop: bool = False
    stop_type: str = ""
    timings: Raw | UnsetType = UNSET
    prompt_progress: _Progress | None = None
    completion_probabilities: list[TokenLikelihood] = []
    error: Raw | UnsetType = UNSET


class _Settings(Struct, frozen=True):
    grammar: str = ""


class _Probe(Struct, frozen=True):
    tokens: list[int] = []
    generation_settings: _Settings = _Settings()


_probe = msgspec.json.Decoder(_Probe)
_event = msgspec.json.Decoder(_Event)


# --- request and answer -----------------------------------------------------------------------------


def _request(job: Job, model: str, known: KnownGrammars) -> TokenRequest:
    fields: dict[str, object] = {
        "stream": True,
        "cache_prompt": True,
        "return_tokens": True,
        # Reports early how much of the prompt was cached. A server that does not know this field reports it at the end.
        "return_progress": True,
        "response_fields": LAST_FIELDS,
        # With 0 it still samples one token; with -1 all that fit.
        "n_predict": -1 if job.output_tokens_max is None else job.output_tokens_max,
        **sampling_fields(job.sampling),
    }
    if isinstance(job.schema, Grammar) and job.output_tokens_max:
        fields["grammar"] = known.written
    elif isinstance(job.schema, bytes) and job.output_tokens_max:
        fields["json_schema"] = Raw(job.schema)
    return TokenRequest(PATH, "prompt", fields)


def sampling_fields(sampling: Sampling) -> dict[str, object]:
    """How to sample, and how many logprobs to return."""
    fields = SAMPLING.of(sampling)
    if sampling.wants_logprobs:
        # With 0 the logprob of the sampled token would be missing too.
        fields["n_probs"] = max(sampling.top_logprobs, 1)
    return fields


def _read(event: _Event, answer: TokenAnswer) -> None:
    answer.is_reading_prompt = event.prompt_progress is not None
    if event.prompt_progress is not None:
        # The id in this event was never sampled.
        answer.start(count_in(event.prompt_progress.cache))
        return
    ids = _ids(event, answer)
    if event.stop:
        answer.is_over = True
        answer.reason = "stop" if event.stop_type in ("eos", "word") else "length"
        answer.cached_tokens = count_in(counts_in(event.timings, _Timings).cache_n)
        answer.input_tokens = count_in(event.tokens_evaluated)
    answer.count = event.tokens_predicted or answer.count
    if not ids:
        return
    stops = answer.job.stops
    if answer.last_id in stops:
        # The server does not know this end mark and goes on after it.
        answer.reason, answer.is_over, answer.is_still_sampling = "stop", True, not event.stop
        return
    logprobs = _logprobs(event, len(ids), answer.job)
    if not stops.isdisjoint(ids):
        ids = ids[: 1 + next(n for n, id in enumerate(ids) if id in stops)]
    answer.add(ids, logprobs)


def _ids(event: _Event, answer: TokenAnswer) -> list[int]:
    """The ids of an event: one, or all of a character that took several."""
    check_ids(event.tokens)
    count = event.tokens_predicted - answer.count
    if answer.hidden_tokens is None or not event.tokens or count <= len(event.tokens):
        return event.tokens
    return answer.hidden_tokens.find(event.content, count, event.tokens[-1])


def _logprobs(event: _Event, count: int, job: Job) -> Sequence[TokenLogprob | None]:
    """Of a character that took several tokens, only the last one's are sent."""
    if not job.sampling.wants_logprobs:
        return ()
    known = event.completion_probabilities[:count]
    logprobs: list[TokenLogprob | None] = [None] * (count - len(known))
    return logprobs + [token.logprobs(job.sampling) for token in known]


# --- grammars -----------------------------------------------------------------------------------------


class KnownGrammars(Struct):
    """What was found out about one server."""

    # What stands for an image in a text, and the ids that the server itself puts before every text.
    marker: str = ""
    added_ids: list[int] = []

    has_llguidance: bool | None = None
    # Whether the server follows a grammar, by its digest; and the last one as the server takes it.
    followed: dict[bytes, bool] = {}
    written: str = ""


async def _prepare(upstream: Upstream, job: Job, known: KnownGrammars | None) -> KnownGrammars:
    """Find out whether this server follows the grammar of the job, and how it wants images."""
    known = known or KnownGrammars()
    if images_of(job):
        # Asked each time: a server that was started again has another one.
        marker = (await _read_props(upstream)).media_marker
        known.marker = marker if 0 < len(marker) <= MARKER_CHARS_MAX else MARKER
        known.added_ids = await _added_ids(upstream)
    grammar = job.schema
    if not isinstance(grammar, Grammar) or job.output_tokens_max == 0:
        return known
    if known.has_llguidance is None:
        probe = await _ask(upstream, {"prompt": [0], "n_predict": 1, "json_schema": {}})
        known.has_llguidance = probe.generation_settings.grammar.startswith(LLGUIDANCE)
    if not known.has_llguidance and grammar.syntax != "structural_tag":
        raise InvalidRequest(
            "The engine cannot follow a grammar: its llama.cpp was built without llguidance.",
            code="unsupported_grammar",
            param="tool_choice",
        )
    # A large structural tag takes a moment.
    write = llguidance if known.has_llguidance else lambda one: gbnf(one.definition)
    written = await asyncio.to_thread(write, grammar)
    key = blake2b(written.encode(), digest_size=16).digest()
    if key not in known.followed:
        if len(known.followed) >= GRAMMARS_MAX:
            known.followed.clear()
        known.followed[key] = await _is_followed(upstream, job, written)
    if not known.followed[key]:
        raise refused_grammar(grammar)
    # The request is made of this before any other job is prepared.
    known.written = written
    return known


async def _is_followed(upstream: Upstream, job: Job, grammar: str) -> bool:
    """Whether the grammar is followed: a grammar that llama.cpp cannot read is ignored without an error.

    It is asked for one token while the first token of the prompt, a special one, is made certain: that token is
    sampled only if no grammar forbids it.
    """
    assert isinstance(job.prompt, Tokens)
    first = next(id for chunk in job.prompt.chunks() for id in chunk)
    bias = [[first, CERTAIN]]
    fields = {"prompt": [first], "n_predict": 1, "grammar": grammar, "logit_bias": bias}
    return first not in (await _ask(upstream, fields)).tokens


async def _ask(upstream: Upstream, fields: dict[str, object]) -> _Probe:
    body = msgspec.json.encode(fields | {"return_tokens": True, "cache_prompt": False})
    status, answer = await upstream.call("POST", PATH, body)
    if status != 200:
        raise EngineFailed("The engine could not be asked about grammars.")
    try:
        return _probe.decode(answer)
    except UNREADABLE as error:
        raise unreadable(error) from None


def llguidance(grammar: Grammar) -> str:
    """The grammar as llama.cpp takes it."""
    definition = grammar.definition
    if grammar.syntax == "structural_tag":
        definition = lark(definition)
    if grammar.syntax == "regex":
        escaped = IN_REGEX.sub(lambda found: found[1] or ESCAPES[found[2]], definition)
        return f"{LLGUIDANCE} {{}}\nstart: /{escaped}/\n"
    return definition if definition.startswith(LLGUIDANCE) else f"{LLGUIDANCE} {{}}\n{definition}\n"


def refused_grammar(grammar: Grammar) -> InvalidRequest:
    """The refusal of a grammar that the engine cannot read."""
    if grammar.syntax == "structural_tag":
        return unsupported_schema()
    return InvalidRequest(
        f"The engine cannot read the {grammar.syntax} grammar of this tool, or supports it only in part.",
        code="unsupported_grammar",
        param="tools",
    )


def unsupported_schema() -> InvalidRequest:
    """The refusal of a JSON schema that the engine cannot follow."""
    return InvalidRequest(
        "The engine cannot follow this JSON schema: it uses a keyword that is not supported, "
        "or it contradicts itself.",
        code="unsupported_schema",
    )


# --- what it says of itself ---------------------------------------------------------------------------


class _Defaults(Struct, frozen=True):
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class _SlotSettings(Struct, frozen=True):
    # Of one slot.
    n_ctx: int | None = None
    params: _Defaults = _Defaults()


class _Modalities(Struct, frozen=True):
    vision: bool | None = None


class _Props(Struct, frozen=True):
    default_generation_settings: _SlotSettings = _SlotSettings()
    total_slots: int | None = None
    model_alias: str = ""
    modalities: _Modalities = _Modalities()
    media_marker: str = MARKER


_props = msgspec.json.Decoder(_Props)


async def _read_props(upstream: Upstream) -> _Props:
    status, body = await upstream.call("GET", "/props")
    try:
        return _props.decode(body if status == 200 else b"{}")
    except UNREADABLE:
        return _Props()


async def _facts(upstream: Upstream, model: str) -> EngineFacts:
    props = await _read_props(upstream)
    slot = props.default_generation_settings
    return EngineFacts(
        context_tokens=context_size(slot.n_ctx),
        slots=slots_of(props.total_slots),
        models=(props.model_alias,) if props.model_alias else (),
        sees_images=props.modalities.vision,
        sampling=Sampling(**msgspec.structs.asdict(slot.params)),
    )


# --- images -------------------------------------------------------------------------------------------


async def _added_ids(upstream: Upstream) -> list[int]:
    body = msgspec.json.encode({"content": "", "add_special": True})
    status, answer = await upstream.call("POST", "/tokenize", body)
    try:
        return _probe.decode(answer if status == 200 else b"{}").tokens
    except UNREADABLE:
        return []


def image_prompt(prompt: Tokens, vocabulary: TokenVocabulary, known: KnownGrammars) -> object:
    """A prompt with images: a text, with a marker in place of each placeholder, and the images."""
    ids, images = prompt.flat().tolist(), prompt.all_images()
    added = known.added_ids
    begins = [len(added) if ids[: len(added)] == added else 0, *(at.end for at in images)]
    ends = [*(at.begin for at in images), len(ids)]
    parts = (ids[begin:end] for begin, end in zip(begins, ends, strict=True))
    return {
        "prompt_string": known.marker.join(_text(part, vocabulary, known) for part in parts),
        "multimodal_data": [_base64(at.url) for at in images],
    }


def _text(ids: Sequence[int], vocabulary: TokenVocabulary, known: KnownGrammars) -> str:
    """The text of these ids. The server reads special tokens and markers in it, so that text which only looks like
    one is broken up."""
    names = {vocabulary.special(name): name for name in vocabulary.specials}
    longest_first = sorted((known.marker, *vocabulary.specials), key=len, reverse=True)
    spelt = re.compile("|".join(map(re.escape, longest_first)))
    texts: list[str] = []
    for name, run in groupby(ids, names.get):
        if name is not None:
            texts.extend(name for _ in run)
            continue
        plain = b"".join(map(vocabulary.bytes_of, run)).decode(errors="replace")
        texts.append(spelt.sub(lambda found: found[0][0] + ZERO_WIDTH_SPACE + found[0][1:], plain))
    return "".join(texts)


def _base64(url: str) -> str:
    """The data of a data URL."""
    kind, _, data = url.partition(",")
    is_encoded = kind.endswith(";base64")
    return data if is_encoded else b64encode(unquote_to_bytes(data)).decode()


LLAMACPP = TokenCodec(
    _prepare,
    _request,
    _event,
    _read,
    GRAMMARS,
    hides_tokens=True,
    image_prompt=image_prompt,
    facts=_facts,
)
