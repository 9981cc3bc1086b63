"""Who produces tokens? A server that takes token ids and streams token ids back over HTTP.

One engine for all servers of this shape; what differs between them is a `TokenCodec`, one value in one file:

    prepare   asks the server what it offers, where the request depends on that; the result is kept for the next job
    request   a job becomes a path and JSON fields; the prompt's ids are added here, from a cache of their text
    read      one event of the stream, decoded by `decoder`, is added to a `TokenAnswer`

In: a job. Out: a `JobStarted` if the server reports cached tokens early, `Ids` as many together as arrived together,
one `Finish`. What was sampled before an error is still yielded. Here are also the parts that more engines share: the
fields of a request that choose how to sample, and the order of logprobs.
"""

from __future__ import annotations

import logging
import weakref
from array import array
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass
from functools import partial
from typing import Generic, Literal, Protocol, TypeVar
from urllib.parse import quote

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.border.believed import check_ids
from segue.border.numbers import BRACKETS_MAX, events_max, finite
from segue.border.refusals import (
    UNREADABLE,
    ContextRefused,
    NotServed,
    RequestRefused,
    error_in_stream,
    unreadable,
)
from segue.engines.client import HttpResponse
from segue.engines.facts import fitted, learned, listed_facts
from segue.engines.hidden_tokens import HiddenTokens, TokenVocabulary
from segue.engines.upstream import EventStream, Upstream
from segue.errors import ApiError, EngineFailed, Unavailable
from segue.seams.model import (
    EngineFacts,
    Finish,
    Ids,
    Job,
    JobStarted,
    Piece,
    Sampling,
    TokenLogprob,
)
from segue.seams.prompt import ImageAt, Tokens

log = logging.getLogger(__name__)

# The event that ends a stream. Servers that have an event of their own for that do not send it.
DONE = b"[DONE]"
# Six bytes a token: some forty histories of 100,000 tokens. Beyond it the oldest texts are dropped, and made again at
# need.
BYTES_MAX = 256 * 1024 * 1024
# How often a job is sent again after a refusal from which something was learned.
RETRIES_MAX = 3
# A shorter chunk is written faster than it is looked up and cached.
CACHED_IDS_MIN = 32


class TokenRequest(Struct, frozen=True):
    """A job as one server takes it."""

    path: str
    # The field that gets the ids of the prompt, and all other fields.
    prompt_field: str
    fields: dict[str, object]
    # Path and body that stop the job, for a server that notices a closed connection late.
    abort: tuple[str, bytes] | None = None
    # Of this job alone: which chain it belongs to, by the names that engines and routers in front of them read.
    headers: dict[str, str] = {}


class TokenEvent(Protocol):
    """An event of a stream, which may report an error instead."""

    @property
    def error(self) -> Raw | UnsetType: ...


# What a codec remembers about one server, and the event that it reads.
S = TypeVar("S")
E = TypeVar("E", bound=TokenEvent)
C = TypeVar("C", bound=Struct)


class TokenCodec(Struct, Generic[S, E], frozen=True):
    """How one kind of server is asked for tokens, and how its events are read."""

    # Called while nothing is known about the server, and for each job with a schema, a grammar or images.
    prepare: Callable[[Upstream, Job, S | None], Awaitable[S]]
    # The string is the name under which the server knows the model.
    request: Callable[[Job, str, S], TokenRequest]
    decoder: msgspec.json.Decoder[E]
    # Raises one of our errors where the event reports a failure in a way of its own.
    read: Callable[[E, TokenAnswer], None]
    grammars: frozenset[str] = frozenset()
    can_constrain: bool = True
    # `{model}` stands for the name of the model.
    health_path: str = "/health"
    # Whether the server forgets a model while no worker serves it, so that "unknown" may mean "not now".
    forgets_models: bool = False
    # What a refusal says about the server; None where that is no news, so that asking again is no use.
    learned: Callable[[S, RequestRefused], S | None] = lambda known, refusal: None
    # Whether only the last token of a character is sent, so that the others must be found (`HiddenTokens`).
    hides_tokens: bool = False
    # The prompt with images, for a server that does not take them beside the ids of their placeholders.
    image_prompt: Callable[[Tokens, TokenVocabulary, S], object] | None = None
    # How many values an event with logprobs may have: of a server that repeats all of them so far, many.
    brackets_max: int = BRACKETS_MAX
    # What the server says of itself, and of the model that it knows under this name.
    facts: Callable[[Upstream, str], Awaitable[EngineFacts]] = listed_facts


async def no_preparation(upstream: Upstream, job: Job, known: None) -> None:
    """For a server whose requests always look the same."""


@dataclass(slots=True)
class TokenAnswer:
    """What was read of one answer: the codec adds events, the engine takes what came together."""

    job: Job
    hidden_tokens: HiddenTokens | None = None
    # Not yet taken.
    ids: Sequence[int] = ()
    logprobs: Sequence[TokenLogprob | None] = ()
    # How many tokens the server has reported by now, for codecs that need it.
    count: int = 0
    last_id: int | None = None
    started: JobStarted | None = None
    # None where the server does not say.
    cached_tokens: int | None = None
    # How many tokens the prompt has, images included.
    input_tokens: int | None = None
    reason: Literal["stop", "length", "content_filter"] | None = None
    # The server still reads the prompt: the first token may take as long as before.
    is_reading_prompt: bool = False
    # No more events are needed.
    is_over: bool = False
    # The server goes on though the answer is over: it stops when the connection is closed.
    is_still_sampling: bool = False
    # What went wrong; what was sampled before it counts.
    error: ApiError | None = None
    # What the server calls the request, where it says that in each event.
    name: bytes | None = None

    def is_ours(self, name: Raw | UnsetType) -> bool:
        """Whether an event belongs to this answer: those of another request are nobody's business here."""
        if name is UNSET:
            return True
        if self.name is None:
            self.name = bytes(name)
        return self.name == bytes(name)

    def pop_ids(self) -> Ids:
        """What was not yet taken."""
        piece = Ids(self.ids, self.logprobs)
        self.ids = self.logprobs = ()
        return piece

    def is_taken(self) -> bool:
        """Whether the turn takes what there is at once."""
        if self.job.take is None or not self.job.take(Ids(self.ids, self.logprobs)):
            return False
        self.ids = self.logprobs = ()
        return True

    def start(self, cached_tokens: int | None, worker: str | None = None) -> None:
        """Report once, before the first token, how much of the prompt was cached, and by which worker."""
        if self.started is None:
            self.cached_tokens = cached_tokens
            self.started = JobStarted(cached_tokens, worker=worker)

    def add(self, ids: Sequence[int], logprobs: Sequence[TokenLogprob | None]) -> None:
        """Add sampled ids. `logprobs` count only where the job wants them; the last ids may have none."""
        if not ids:
            return
        self.last_id = ids[-1]
        # The one token of a warm-up is sampled only because servers refuse to sample none.
        if self.job.output_tokens_max == 0:
            return
        self.ids = [*self.ids, *ids] if self.ids else ids
        if self.job.sampling.wants_logprobs:
            known = [*self.logprobs, *logprobs[: len(ids)]]
            self.logprobs = known + [None] * (len(self.ids) - len(known))


class TokenEngine(Generic[S, E]):
    """An `Engine` for token prompts; `model` is the name under which the server knows the model."""

    def __init__(
        self,
        codec: TokenCodec[S, E],
        upstream: Upstream,
        model: str = "",
        token_json: TokenJson | None = None,
        hidden_tokens: HiddenTokens | None = None,
    ) -> None:
        self.can_constrain = codec.can_constrain
        self.grammars = codec.grammars
        self._codec = codec
        self._upstream = upstream
        self._model = model
        self._health_path = codec.health_path.format(model=quote(model))
        # Shared by all replicas of a model.
        self._token_json = token_json or TokenJson()
        self._hidden_tokens = hidden_tokens
        self._known: S | None = None
        self.facts = EngineFacts()
        self._has_facts = False

    async def is_ready(self) -> bool:
        is_up = await self._upstream.is_up(self._health_path)
        if not is_up:
            self._has_facts = False
        elif not self._has_facts:
            await self._fetch_facts()
        return is_up

    async def forward(self, path: str, body_for: Callable[[str], bytes]) -> HttpResponse:
        return await self._upstream.forward(path, body_for(self._model))

    async def _fetch_facts(self) -> None:
        """Fetch what the server says of itself; a server that does not answer now is asked before the next job."""
        with suppress(ApiError):
            self.facts = await self._codec.facts(self._upstream, self._model)
            self._has_facts = True

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        async with aclosing(self._attempt(job, RETRIES_MAX, None)) as pieces:
            async for piece in pieces:
                yield piece

    async def _attempt(
        self, job: Job, retries: int, told: EngineFacts | None
    ) -> AsyncGenerator[Piece, None]:
        """`told` is what a refusal of this job has said of the server. It is remembered only if the job is taken that
        way: a refusal may quote its request, and then it is the client who speaks."""
        if job.prompt.length == 0:
            yield Finish("length")
            return
        answer = TokenAnswer(job, self._hidden_tokens)
        has_started = is_refused = False
        request: TokenRequest | None = None
        stream: EventStream | None = None
        try:
            known = await self._prepare(job)
            answer.job = fitted(job, told or self.facts)
            request = self._codec.request(answer.job, self._model, known)
            stream = await self._send(job, request)
            stream.events_left = events_max(job)
            if job.sampling.wants_logprobs:
                stream.brackets_max = self._codec.brackets_max
            self.facts = told or self.facts
            read = partial(self._read, answer, stream)
            while not answer.is_over and await stream.read(read):
                if answer.started is not None and not has_started:
                    has_started = True
                    yield answer.started
                if answer.ids:
                    yield answer.pop_ids()
                if answer.error is not None:
                    raise answer.error
            if answer.reason is None:
                raise stream.broke_off()
            is_stop = answer.reason == "stop" or answer.last_id in job.stops
            given = answer.input_tokens if images_of(job) else None
            yield Finish("stop" if is_stop else answer.reason, answer.cached_tokens, given)
        except ContextRefused as error:
            told = learned(told or self.facts, error)
            if told is None or answer.last_id is not None or not retries:
                raise
            is_refused = True
        except RequestRefused as error:
            offer = None if self._known is None else self._codec.learned(self._known, error)
            if offer is None or answer.last_id is not None or not retries:
                raise
            self._known, is_refused = offer, True
        except (EngineFailed, Unavailable) as error:
            # It may come back with other options: ask again what it offers.
            self._known, self._has_facts = None, False
            if isinstance(error, NotServed) and self._codec.forgets_models:
                log.warning("engine %s has no worker for %s", self._upstream.name, self._model)
                raise Unavailable("No worker of the engine serves this model now.") from error
            raise
        finally:
            if stream is not None:
                stream.close()
            is_running = answer.reason is None or answer.is_still_sampling
            if request is not None and request.abort is not None and is_running:
                with suppress(ApiError):
                    await self._upstream.call("POST", *request.abort)
        if is_refused:
            # Once more with what it has just said.
            async with aclosing(self._attempt(job, retries - 1, told)) as pieces:
                async for other in pieces:
                    yield other

    async def _prepare(self, job: Job) -> S:
        """What the request depends on: the server's context, and what it offers."""
        if not self._has_facts:
            await self._fetch_facts()
        if self._known is None or job.schema is not None or images_of(job):
            self._known = await self._codec.prepare(self._upstream, job, self._known)
        return self._known

    async def _send(self, job: Job, request: TokenRequest) -> EventStream:
        assert isinstance(job.prompt, Tokens), "this engine takes tokens"
        write = self._codec.image_prompt
        if write is not None and self._hidden_tokens is not None and images_of(job):
            assert self._known is not None, "the server was asked"
            written = write(job.prompt, self._hidden_tokens.vocabulary, self._known)
            prompt = msgspec.json.encode(written)
        else:
            prompt = b"[%b]" % self._token_json.text(job.prompt)
        rest = msgspec.json.encode(request.fields)[1:]
        body = b'{"%b":%b,%b' % (request.prompt_field.encode(), prompt, rest)
        return await self._upstream.stream(request.path, body, request.headers)

    def _read(self, answer: TokenAnswer, stream: EventStream, events: list[bytes]) -> bool:
        """Add what came together; whether there is something to yield, because it was not taken."""
        had_started = answer.started is not None
        answer.error = self._decode(events, answer, stream)
        if answer.reason is not None:
            if answer.error is not None:
                # After its end nothing is wrong with it.
                answer.error, answer.is_over = None, True
            elif not answer.is_over:
                stream.note_whole()
        if answer.error or answer.is_over or had_started != (answer.started is not None):
            return True
        return bool(answer.ids) and not answer.is_taken()

    def _decode(
        self, events: list[bytes], answer: TokenAnswer, stream: EventStream
    ) -> ApiError | None:
        """An error is returned, because what was sampled before it counts."""
        codec = self._codec
        try:
            for data in events:
                if data == DONE:
                    answer.is_over = True
                else:
                    event = codec.decoder.decode(data)
                    if event.error is not UNSET:
                        return error_in_stream(event.error)
                    codec.read(event, answer)
                if answer.is_over:
                    # The end of the response is on the way: the connection can serve the next job.
                    stream.is_over = not answer.is_still_sampling
                    break
        except ApiError as error:
            return error
        except UNREADABLE as error:
            return unreadable(error)
        if answer.is_reading_prompt:
            stream.wait_on()
        return None


# --- the prompt -----------------------------------------------------------------------------------


class TokenJson:
    """A cache of the JSON text of chunks, each for as long as its chunk lives, within a budget.

    The text of a chunk is made once: the next turn writes only its own ids and copies the rest.
    """

    def __init__(self, bytes_max: int = BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        # By identity: an array has no hash.
        self._cached: dict[int, tuple[weakref.ref[array[int]], bytes]] = {}
        self.bytes = 0

    def text(self, prompt: Tokens) -> bytes:
        """All ids of the prompt in decimal, joined by commas."""
        texts = []
        node: Tokens | None = prompt
        while node is not None:
            chunk, node = node.ids, node.before
            cached = self._cached.get(id(chunk))
            if cached is not None and cached[0]() is chunk:
                texts.append(cached[1])
            elif chunk:
                texts.append(self._write(chunk))
        texts.reverse()
        return b",".join(texts)

    def _write(self, chunk: array[int]) -> bytes:
        text = msgspec.json.encode(chunk.tolist())[1:-1]
        if len(chunk) >= CACHED_IDS_MIN:
            key = id(chunk)
            self._cached[key] = (weakref.ref(chunk, lambda _: self._remove(key)), text)
            self.bytes += len(text)
            while self.bytes > self._bytes_max:
                self._remove(next(iter(self._cached)))
        return text

    def _remove(self, key: int) -> None:
        cached = self._cached.pop(key, None)
        if cached is not None:
            self.bytes -= len(cached[1])


def images_of(job: Job) -> list[ImageAt]:
    """The images in a prompt of ids."""
    return job.prompt.all_images() if isinstance(job.prompt, Tokens) else []


# --- what answers have in common ----------------------------------------------------------------------


def counts_in(said: Raw | UnsetType, kind: type[C]) -> C:
    """What a server has counted, in a place of its own; nothing where that is not there. Whatever it is, it must not
    cost an answer that is whole."""
    try:
        return kind() if said is UNSET else msgspec.json.decode(said, type=kind | None) or kind()
    except UNREADABLE:
        return kind()


# --- what requests have in common -------------------------------------------------------------------


def session_headers(job: Job, *names: str) -> dict[str, str]:
    """The chain of the job in headers of these names: those who route by it send all turns of a chain to one worker."""
    chain = job.lineage.chain
    return dict.fromkeys(names, chain) if chain else {}


class SamplingFields(Struct, frozen=True):
    """The fields of a request that choose how to sample. Engines agree on most names; here is what differs."""

    # Some refuse a plain zero.
    top_p_min: float = 0.0
    seed: str = "seed"
    # How many seeds there are; 0: no limit.
    seed_values: int = 0

    def of(self, sampling: Sampling) -> dict[str, object]:
        """Only what was chosen: the rest is as the engine has it."""
        top_p, seed = sampling.top_p, sampling.seed
        fields: dict[str, object] = {
            "temperature": sampling.temperature,
            "top_p": None if top_p is None else max(top_p, self.top_p_min),
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
            self.seed: seed % self.seed_values if seed is not None and self.seed_values else seed,
        }
        return {name: value for name, value in fields.items() if value is not None}


# --- logprobs -----------------------------------------------------------------------------------------


class TokenLikelihood(Struct, frozen=True):
    """A token and its logprob, as llama.cpp and vLLM's own endpoint write it."""

    id: int | None = None
    token_id: int | None = None
    token: str = ""
    logprob: float | None = None
    top_logprobs: list[TokenLikelihood] = []

    @property
    def number(self) -> int:
        """The id, whichever field it is in."""
        known = self.id if self.token_id is None else self.token_id
        return id_in(self.token) if known is None else known

    def logprobs(self, sampling: Sampling) -> TokenLogprob | None:
        top = ((alt.number, alt.logprob) for alt in self.top_logprobs if alt.logprob is not None)
        return token_logprob(self.logprob, top, sampling)


def id_in(token: str) -> int:
    """vLLM's way to write an id where a text is expected: `token_id:42`."""
    return int(token.rpartition(":")[2])


def token_logprob(
    logprob: float | None, top: Iterable[tuple[int, float]], sampling: Sampling
) -> TokenLogprob | None:
    """The likeliest first, as many as were asked for; None if the engine does not know.

    Each server has its own order, and some put the sampled token among the likeliest whether it belongs there or not.
    """
    if logprob is None:
        return None
    by_id, count = dict(top), sampling.top_logprobs
    check_ids(by_id)
    likeliest = sorted(by_id.items(), key=lambda pair: -pair[1])[:count] if count else ()
    top = tuple((id, finite(value)) for id, value in likeliest)
    return TokenLogprob(finite(logprob), top)
