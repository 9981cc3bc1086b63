"""Who produces tokens inside this process? llama.cpp, through `xllamacpp`: a GGUF file, no compiler, no hub.

    event loop                      worker threads, one a slot          llama.cpp's own thread
    sample(job) ---- submit ------> handle_completions(prompt ids) ---> batches all slots
        ^                                   | callback: ids, progress        |
        +--- one wake-up for all that waits +<-------------------------------+

The pool of workers is the queue: as many jobs run as there are slots, the others wait in the order in which they came.
llama.cpp gives a job the slot that shares the longest beginning with its prompt; what a slot held before is
copied to memory and comes back when that conversation goes on, so conversations may outnumber slots.

A job is cancelled by its callback's answer. In a long prompt llama.cpp calls back only between batches, which are
therefore small. Closing the generator returns at once; the slot is free after the batch that runs. A job that begins as
one that was just left waits that long, and finds what was read: a client that lost patience comes back with the same.

Ids wait for a slow loop in an array of at most `output_tokens_max`, four bytes each. The callback does not block: that
would not slow the model, whose own queue has no limit, and would keep the slot (docs/decisions/0006).
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import secrets
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple, Protocol

import msgspec
from msgspec import Raw, Struct

from segue.engines.grammars import LLGUIDANCE, forbidden_id, guidance, unreadable
from segue.engines.hidden_tokens import Spelling, Words
from segue.engines.llamacpp import SEEDS
from segue.engines.logprobs import Likely, ids_with, odds_of_likely
from segue.errors import (
    ApiError,
    EngineFailed,
    InvalidRequest,
    Misconfigured,
    Unavailable,
    context_overflow,
)
from segue.turn.values import (
    Finish,
    Grammar,
    IdArray,
    Job,
    JobStarted,
    Piece,
    TokenLogprob,
    Tokens,
    id_array,
)

log = logging.getLogger(__name__)

# Tokens of a prompt between two callbacks, and so how soon a cancel is heard: about half a second for SmolLM2 on one
# core. It costs about a tenth of the speed that a batch of 512 has.
BATCH = 32
# Of a job's JSON, which begins with its prompt: about a hundred tokens.
BEGINNING_BYTES = 512
# What a slot may take to be left: a batch, on a busy machine.
LEAVE_S_MAX = 5.0
# Prompts that left their slot. SmolLM2 needs 22.5 KiB a token.
KEPT_MIB = 1_024
# Jobs that may wait for a slot: what a caller sees as a long wait, not as a queue without end.
WAITING_MAX = 1_000
# Schemas and grammars that are known to hold; each is asked once.
SCHEMAS_MAX = 1_000
# More than any model's logits differ.
CERTAIN = 1_000.0
# What the wheel is compiled for. Without these the first token ends the process.
X86_FLAGS = ("avx2", "bmi2", "f16c", "fma")
# JSON as templates and models write it, and no endless white space, which small models like.
GUIDANCE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Server(Protocol):
    """What we use of `xllamacpp.Server`. JSON goes in as bytes and comes back as bytes."""

    def handle_completions(self, request: bytes, callback: Callable[[bytes], bool]) -> None:
        """Blocks until the answer is complete or a callback returns True."""


class EmbeddedEngine:
    """One model in this process, shared by all its turns."""

    def __init__(
        self,
        path: Path,
        words: Words,
        *,
        context_tokens: int,
        parallel: int = 4,
        threads: int | None = None,
    ) -> None:
        """Load the model, which takes a moment, or say what is missing."""
        self._server: Server | None = load_server(
            path, context_tokens=context_tokens, parallel=parallel, threads=threads or spare_cores()
        )
        self._words = words
        self._spelling = Spelling(words)
        self._parallel = parallel
        self._workers = ThreadPoolExecutor(parallel, thread_name_prefix="segue-embedded")
        self._answers: set[Answer] = set()
        self._schemas: dict[bytes, bool] = {}
        # The jobs in llama.cpp's hands, and how they begin.
        self._inside: dict[Answer, bytes] = {}
        self._has_left = threading.Condition()

    @property
    def can_constrain(self) -> bool:
        """Yes: llama.cpp allows only tokens that go on with the schema."""
        return True

    @property
    def grammars(self) -> frozenset[str]:
        """Both: it is built with llguidance."""
        return LLGUIDANCE

    async def is_ready(self) -> bool:
        """Whether a job would be taken now."""
        return self._server is not None and not self._is_full

    @property
    def _is_full(self) -> bool:
        return len(self._answers) >= self._parallel + WAITING_MAX

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        """The ids as they are sampled, then the finish. No output tokens means: only read the prompt."""
        answer, work = self._begin(job)
        try:
            while True:
                begun, ids, logprobs, end = await answer.take()
                if begun is not None:
                    yield begun
                if ids and job.output_tokens_max:
                    yield ids_with(ids, logprobs, job)
                if isinstance(end, Finish):
                    yield end
                    return
                if end is not None:
                    raise end
        finally:
            answer.leave()
            work.cancel()
            self._answers.discard(answer)

    def _begin(self, job: Job) -> tuple[Answer, Future[None]]:
        if self._server is None:
            raise Unavailable("The engine is shutting down. Please retry elsewhere or later.")
        if self._is_full:
            raise Unavailable("Too many requests wait for the engine. Please retry later.")
        answer = Answer(asyncio.get_running_loop())
        work = self._workers.submit(self._work, self._server, job, answer)
        self._answers.add(answer)
        return answer, work

    async def close(self) -> None:
        """End what runs, wait for the threads, unload the model."""
        # In a list, so that the thread holds the last reference: freeing the model takes a moment.
        held, self._server = [self._server], None
        for answer in tuple(self._answers):
            answer.end(Unavailable("The engine was stopped."))
            answer.leave()

        def unload() -> None:
            self._workers.shutdown(cancel_futures=True)
            held.clear()

        await asyncio.to_thread(unload)

    # In a worker's thread.

    def _work(self, server: Server, job: Job, answer: Answer) -> None:
        """One job from beginning to end; whatever goes wrong becomes the answer's end."""
        if answer.is_left:
            return
        try:
            if job.schema is not None and not self._can_hold(server, job):
                raise _unheld(job.schema)
            body = request(job)
            with self._entered(answer, body[:BEGINNING_BYTES]):
                server.handle_completions(body, Reading(job, answer, self._spelling))
            answer.end(EngineFailed("The engine broke off."))
        except ApiError as error:
            answer.end(error)
        except Exception:
            log.exception("the embedded engine failed")
            answer.end(EngineFailed("The engine failed."))

    @contextmanager
    def _entered(self, answer: Answer, beginning: bytes) -> Iterator[None]:
        """Behind those that begin alike and are being left."""

        def is_free() -> bool:
            return not any(one.is_left and how == beginning for one, how in self._inside.items())

        with self._has_left:
            self._has_left.wait_for(is_free, LEAVE_S_MAX)
            self._inside[answer] = beginning
        try:
            yield
        finally:
            with self._has_left:
                del self._inside[answer]
                self._has_left.notify_all()

    def _can_hold(self, server: Server, job: Job) -> bool:
        """Whether the schema or grammar binds. llama.cpp drops one that it cannot read, and says so only in its log.

        So it is asked for one token while a token is made certain that may not come: if it comes, nothing was in its
        way. For a schema that is a stop; a grammar may allow nothing at all, so that it is a special token there.
        """
        assert job.schema is not None
        key = blake2b(msgspec.json.encode(job.schema), digest_size=16).digest()
        if key not in self._schemas:
            likely = sorted(job.stops)
            if isinstance(job.schema, Grammar):
                id = forbidden_id(job, self._words.bytes_of)
                likely = likely if id is None else [id]
            heard = Answer(None)
            probe = request(job, likely=likely)
            server.handle_completions(probe, Reading(job, heard, self._spelling))
            if len(self._schemas) >= SCHEMAS_MAX:
                self._schemas.clear()
            _, ids, _, end = heard.taken()
            if isinstance(end, ApiError):
                raise end
            # The first token of a grammar may be part of a character, which llama.cpp does not show yet.
            is_silent = isinstance(job.schema, Grammar) and not ids
            self._schemas[key] = is_silent or (bool(ids) and ids[0] not in likely)
        return self._schemas[key]


class Taken(NamedTuple):
    """How it has begun, ids, their odds where those were asked for, and the last word if it was said."""

    begun: JobStarted | None
    ids: IdArray[int]
    logprobs: list[TokenLogprob | None]
    end: Finish | ApiError | None


class Answer:
    """What was sampled and not yet taken: filled in a worker's thread, emptied in the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        self.is_left = False
        self._loop = loop
        self._lock = threading.Lock()
        self._begun: JobStarted | None = None
        self._ids = id_array()
        self._logprobs: list[TokenLogprob | None] = []
        self._end: Finish | ApiError | None = None
        self._is_woken = False
        self._filled = asyncio.Event()

    async def take(self) -> Taken:
        """Everything that is there, as soon as there is something."""
        await self._filled.wait()
        self._filled.clear()
        return self.taken()

    def taken(self) -> Taken:
        """Everything that is there."""
        with self._lock:
            ids, self._ids = self._ids, id_array()
            logprobs, self._logprobs = self._logprobs, []
            begun, self._begun = self._begun, None
            self._is_woken = False
            return Taken(begun, ids, logprobs, self._end)

    def leave(self) -> None:
        """Nobody listens any more."""
        self.is_left = True

    def begin(self, begun: JobStarted) -> None:
        """Say what is known before the first id."""
        with self._lock:
            self._begun = begun
        self._wake()

    def put(self, ids: list[int], logprobs: list[TokenLogprob | None]) -> None:
        """Say these ids, and where it was asked for, how likely they were."""
        with self._lock:
            self._ids.extend(ids)
            self._logprobs.extend(logprobs)
        self._wake()

    def end(self, end: Finish | ApiError) -> None:
        """Say the last word; only the first one counts."""
        with self._lock:
            self._end = self._end or end
        self._wake()

    def _wake(self) -> None:
        """One call into the loop for everything that comes before it looks."""
        with self._lock:
            if self._loop is None or self._is_woken:
                return
            self._is_woken = True
        try:
            self._loop.call_soon_threadsafe(self._filled.set)
        except RuntimeError:
            # The loop is closed: whoever listened is gone.
            self.leave()


class Logprobs(Struct, frozen=True):
    content: list[Likely] = []


class Choice(Struct, frozen=True):
    text: str = ""
    logprobs: Logprobs | None = None
    finish_reason: str | None = None


class Sampled(Struct, frozen=True):
    tokens: list[int] = []
    tokens_predicted: int = 0


class Progress(Struct, frozen=True):
    cache: int = 0


class Failure(Struct, frozen=True):
    type: str = ""
    message: str = ""
    n_prompt_tokens: int = 0
    n_ctx: int = 0


class Chunk(Struct, frozen=True):
    """One callback: progress of the prompt, or a token, or the last word, or an error."""

    choices: list[Choice] = []
    sampled: Sampled = msgspec.field(default=Sampled(), name="__verbose")
    prompt_progress: Progress | None = None
    error: Failure | None = None


decode_chunk = msgspec.json.Decoder(Chunk).decode


class Reading:
    """The callback of one job. Returns True to stop it, and never raises into C++."""

    def __init__(self, job: Job, answer: Answer, spelling: Spelling) -> None:
        self._stops = job.stops
        self._tokens_max = job.output_tokens_max
        self._sampling = job.sampling
        self._answer = answer
        self._spelling = spelling
        self._count = 0
        self._begun: JobStarted | None = None

    def __call__(self, data: bytes) -> bool:
        if self._answer.is_left:
            return True
        try:
            return self._read(decode_chunk(data))
        except Exception:
            log.exception("the embedded engine said something unreadable")
            self._answer.end(EngineFailed("The engine said something unreadable."))
            return True

    def _read(self, chunk: Chunk) -> bool:
        if chunk.error is not None:
            self._answer.end(failed(chunk.error))
            return True
        if chunk.prompt_progress is not None:
            begun = JobStarted(chunk.prompt_progress.cache)
            if begun != self._begun:
                self._begun = begun
                self._answer.begin(begun)
            return False
        count = chunk.sampled.tokens_predicted
        reason = chunk.choices[0].finish_reason
        if reason is not None:
            return self._finish("length" if reason == "length" else "stop", count)
        ids = self._ids(chunk)
        self._count = count
        self._answer.put(ids, self._logprobs(chunk, len(ids)))
        # llama.cpp knows stops of its own; the dialect may know more.
        return ids[-1] in self._stops and self._finish("stop", count)

    def _ids(self, chunk: Chunk) -> list[int]:
        """The ids of a chunk: one, or those of a character that took several."""
        sampled = chunk.sampled
        count = sampled.tokens_predicted - self._count
        if count <= len(sampled.tokens):
            return sampled.tokens
        return self._spelling.find(chunk.choices[0].text, count, sampled.tokens[-1])

    def _logprobs(self, chunk: Chunk, count: int) -> list[TokenLogprob | None]:
        """Of a character that took several tokens llama.cpp tells only the last one's."""
        found = chunk.choices[0].logprobs
        if not self._sampling.wants_logprobs or found is None:
            return []
        logprobs = [odds_of_likely(one, self._sampling) for one in found.content]
        return [*[None] * (count - len(logprobs)), *logprobs]

    def _finish(self, reason: Literal["stop", "length"], count: int) -> bool:
        # Tokens at the very end that make no whole character were never seen; they are counted.
        count = min(count, self._tokens_max)
        cached = self._begun.cached_tokens if self._begun else 0
        self._answer.end(Finish(reason, cached_tokens=cached, output_tokens=count))
        return True


def request(job: Job, *, likely: Sequence[int] = ()) -> bytes:
    """The job in llama.cpp's words; a probe of its constraint, if there are tokens to be made `likely`."""
    is_probe = bool(likely)
    assert isinstance(job.prompt, Tokens), "this engine takes tokens"
    ids = job.prompt.flat().tolist()
    sampling = job.sampling
    fields: dict[str, object] = {
        "prompt": ids[:1] if is_probe else ids,
        "max_tokens": 1 if is_probe else job.output_tokens_max,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        # What was not asked for must not bend the distribution.
        "top_k": 0,
        "min_p": 0.0,
        "stream": True,
        "cache_prompt": not is_probe,
        "return_progress": True,
        # The only cheap way to the ids.
        "verbose": True,
    }
    if isinstance(job.schema, Grammar) and job.output_tokens_max:
        fields["grammar"] = guidance(job.schema)
    elif isinstance(job.schema, bytes) and job.output_tokens_max:
        fields["json_schema"] = constraint(job.schema)
    if sampling.seed is not None:
        fields["seed"] = sampling.seed % SEEDS
    if sampling.wants_logprobs:
        # None at all would be none of the sampled token either.
        fields["n_probs"] = max(sampling.top_logprobs, 1)
    if is_probe:
        fields["logit_bias"] = [[id, CERTAIN] for id in likely]
    return msgspec.json.encode(fields)


def constraint(schema: bytes) -> object:
    """The schema, with how its JSON is to be spaced."""
    decoded = msgspec.json.decode(schema, type=bool | dict[str, Raw])
    if isinstance(decoded, bool):
        return decoded
    return {"x-guidance": GUIDANCE} | decoded


def _unheld(schema: bytes | Grammar) -> InvalidRequest:
    if isinstance(schema, Grammar):
        return unreadable(schema)
    return InvalidRequest(
        "The engine cannot hold an answer to this JSON schema: it uses a keyword that is "
        "not supported, or it contradicts itself.",
        code="unsupported_schema",
    )


def failed(failure: Failure) -> ApiError:
    """The engine's error as ours."""
    if failure.type == "exceed_context_size_error":
        return context_overflow(failure.n_prompt_tokens, failure.n_ctx)
    if failure.type == "unavailable_error":
        return Unavailable("The engine is not ready. Please retry later.")
    log.warning("the embedded engine refused a request: %s", failure.type)
    return EngineFailed(f"The engine refused the request: {failure.message[:200]}")


# --- starting ---------------------------------------------------------------------------------------


def spare_cores() -> int:
    """The cores that this process may use, but for one: the server and its neighbours need it."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, cores - 1)


def check_cpu(info: Path = Path("/proc/cpuinfo")) -> None:
    """Refuse a CPU on which the wheel would end the process with an illegal instruction."""
    if platform.machine() not in ("x86_64", "AMD64") or not info.exists():
        return
    lines = (line for line in info.read_text().splitlines() if line.startswith("flags"))
    flags = next(lines, "").split()
    missing = [flag for flag in X86_FLAGS if flag not in flags]
    if flags and missing:
        raise Misconfigured(
            f"engine: the embedded engine's wheel needs a CPU with {', '.join(missing)}, which this "
            "one lacks. Use another engine: `--engine llamacpp --engine-url …` with a llama-server "
            "built for this CPU, or `--engine scripted`."
        )


def load_server(path: Path, *, context_tokens: int, parallel: int, threads: int) -> Server:
    """A llama.cpp server in this process. Its listener cannot be switched off: it gets loopback and a key."""
    if not path.is_file():
        raise Misconfigured(f"engine: there are no weights at {path}.")
    check_cpu()
    # Threads that spin while they wait come to a near standstill when somebody else wants their core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import xllamacpp  # type: ignore[import-untyped]
    except ImportError as error:
        raise Misconfigured(
            "engine: the embedded engine needs the package xllamacpp, which cannot be loaded here "
            f"({error}). Run `make setup`, or `pip install --no-deps xllamacpp`."
        ) from None
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.model_alias = {"m"}
    # Each slot has a context of its own, so that no conversation can crowd out another.
    params.n_ctx = context_tokens * parallel
    params.n_parallel = parallel
    params.kv_unified = False
    params.cache_ram_mib = KEPT_MIB
    params.n_batch = params.n_ubatch = max(BATCH, parallel)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.fit_params = False
    params.verbosity = -1
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [secrets.token_urlsafe(32)]
    params.n_threads_http = 1
    params.ui = False
    params.endpoint_slots = False
    try:
        server: Server = xllamacpp.Server(params)
    except RuntimeError:
        raise Misconfigured(
            f"engine: {path.name} cannot be loaded: it is no GGUF file that llama.cpp knows, or the "
            "memory is too small for it. Try a smaller --context-tokens or --engine-parallel."
        ) from None
    return server
