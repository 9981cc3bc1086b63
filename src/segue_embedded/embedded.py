"""Who produces tokens inside this process? llama.cpp, through `xllamacpp`: a GGUF file, no compiler, no hub.

    event loop                      worker threads, one a slot          llama.cpp's own thread
    sample(job) ---- submit ------> handle_completions(prompt ids) ---> batches all slots
        ^                                   | callback: ids, progress        |
        +--- one wake-up for all that waits +<-------------------------------+

The pool of workers is the queue: as many jobs run as there are slots, the others wait in the order in which they came.
llama.cpp gives a job the slot that shares the longest prefix with its prompt; what a slot held before is
copied to memory and restored when that conversation goes on, so conversations may outnumber slots.

A job is cancelled by the return value of its callback. In a long prompt llama.cpp calls back only between batches,
which are therefore small. Closing the generator returns at once; the slot is free after the batch that runs. A job
with the same prefix as a job that was just cancelled waits for that, and finds the prefix cached: clients that time
out retry the same.

Ids wait for a slow loop in an array of at most `output_tokens_max`, four bytes each. The callback does not block: that
would not slow the model, whose own queue has no limit, and would keep the slot (docs/decisions/0006).
"""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import secrets
import shutil
import sys
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Literal, Protocol
from urllib.request import Request, urlopen

import msgspec
from msgspec import Raw, Struct

from segue.engines.facts import fitted
from segue.engines.hidden_tokens import HiddenTokens, TokenVocabulary
from segue.engines.llamacpp import (
    CERTAIN,
    GRAMMARS,
    llguidance,
    refused_grammar,
    sampling_fields,
    unsupported_schema,
)
from segue.engines.token_engine import TokenLikelihood
from segue.errors import (
    ApiError,
    EngineFailed,
    InvalidRequest,
    Misconfigured,
    Unavailable,
    context_overflow,
)
from segue.schemas.structural_tags import JSON_STYLE
from segue.seams.model import EngineFacts, Finish, Grammar, Ids, Job, JobStarted, TokenLogprob
from segue.seams.prompt import Tokens, id_array
from segue.vocabularies.gguf import GgufValue, trained_tokens
from segue_embedded.unrolled import UNROLLED_MAX, unrolled

log = logging.getLogger(__name__)

# What small machines can hold.
CONTEXT_TOKENS = 8_192
# Tokens of a prompt between two callbacks, and so how soon a cancel is noticed: about half a second for SmolLM2 on one
# core. It costs about a tenth of the speed that a batch of 512 has.
BATCH = 32
# Of a job's JSON, which begins with its prompt: about a hundred tokens.
PREFIX_BYTES = 512
# How long a cancelled job may take to free its slot: a batch, on a busy machine.
CANCEL_S_MAX = 5.0
# Cached prompts that have no slot now. SmolLM2 needs 22.5 KiB a token.
CACHE_MIB = 1_024
# How long a slot may take to be saved or restored, with a job that ends first.
SLOT_S_MAX = 60.0
# Jobs that may wait for a slot: a caller waits long, but not for ever.
WAITING_MAX = 1_000
# Schemas and grammars that were tried; each is tried once.
SCHEMAS_MAX = 1_000
# What the wheel is compiled for. Without these the first token ends the process.
X86_FLAGS = ("avx2", "bmi2", "f16c", "fma")


class LlamaServer(Protocol):
    """What we use of `xllamacpp.Server`. JSON goes in as bytes and comes back as bytes."""

    # Of its HTTP port, which only this process has the key of.
    listening_address: str

    def handle_completions(self, request: bytes, callback: Callable[[bytes], bool]) -> None:
        """Blocks until the answer is complete or a callback returns True."""


class EmbeddedEngine:
    """One model in this process, shared by all its turns."""

    can_constrain = True
    grammars = GRAMMARS

    def __init__(
        self,
        path: Path,
        vocabulary: TokenVocabulary,
        *,
        context_tokens: int,
        parallel: int = 4,
        threads: int | None = None,
        memory: Path | None = None,
    ) -> None:
        """Load the model, which takes a moment; `Misconfigured` says what is missing. Slots are saved to files in
        `memory`, and restored from there."""
        self._key = secrets.token_urlsafe(32)
        self._server: LlamaServer | None = load_server(
            path,
            context_tokens=context_tokens,
            parallel=parallel,
            threads=threads or spare_cores(),
            key=self._key,
            memory=memory,
        )
        self.memory = memory
        self.slots = parallel
        self.fingerprint = _fingerprint(path, context_tokens)
        self.jobs_ended = 0
        self.facts = EngineFacts(context_tokens=context_tokens, slots=parallel)
        self._vocabulary = vocabulary
        self._hidden_tokens = HiddenTokens(vocabulary)
        self._parallel = parallel
        self._workers = ThreadPoolExecutor(parallel, thread_name_prefix="segue-embedded")
        self._answers: set[_Answer] = set()
        self._schemas: dict[bytes, bool] = {}
        # The jobs that llama.cpp works on, and their prefixes.
        self._running: dict[_Answer, bytes] = {}
        self._has_ended = threading.Condition()

    async def is_ready(self) -> bool:
        return self._server is not None and not self._is_full

    @property
    def load(self) -> tuple[int, int]:
        """How many jobs run, and how many wait."""
        running = min(len(self._answers), self._parallel)
        return running, len(self._answers) - running

    @property
    def _is_full(self) -> bool:
        return len(self._answers) >= self._parallel + WAITING_MAX

    async def sample(self, job: Job) -> AsyncGenerator[JobStarted | Ids | Finish, None]:
        if self._server is None:
            raise Unavailable("The engine is shutting down. Please retry elsewhere or later.")
        if self._is_full:
            raise Unavailable("Too many requests wait for the engine. Please retry later.")
        job = fitted(job, self.facts)
        answer = _Answer(job, self._hidden_tokens, asyncio.get_running_loop())
        work = self._workers.submit(self._work, self._server, job, answer)
        self._answers.add(answer)
        try:
            while True:
                await answer.filled.wait()
                started, ids, logprobs, end = answer.take()
                if started is not None:
                    yield started
                if ids and job.output_tokens_max:
                    yield Ids(ids, logprobs)
                if isinstance(end, Finish):
                    yield end
                    return
                if end is not None:
                    raise end
        finally:
            answer.is_cancelled = True
            work.cancel()
            self._answers.discard(answer)
            self.jobs_ended += 1

    async def close(self) -> None:
        """Stop the jobs, wait for the threads, unload the model."""
        # In a list, so that the thread has the last reference: freeing the model takes a moment.
        servers, self._server = [self._server], None
        for answer in tuple(self._answers):
            answer.add(end=Unavailable("The engine was stopped."))
            answer.is_cancelled = True

        def unload() -> None:
            self._workers.shutdown(cancel_futures=True)
            servers.clear()

        await asyncio.to_thread(unload)
        if self.memory is not None:
            shutil.rmtree(self.memory, ignore_errors=True)

    # In a worker thread.

    def save_slot(self, slot: int, name: str) -> None:
        """Write what this slot holds to a file of this name in `memory`; waits for a job that runs there."""
        self._ask_slot(slot, "save", name)

    def restore_slot(self, slot: int, name: str) -> None:
        """Read such a file into this slot."""
        self._ask_slot(slot, "restore", name)

    def _ask_slot(self, slot: int, action: str, name: str) -> None:
        if self._server is None:
            raise OSError("the engine is closed")
        request = Request(
            f"{self._server.listening_address}/slots/{slot}?action={action}",
            msgspec.json.encode({"filename": name}),
            {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"},
        )
        with urlopen(request, timeout=SLOT_S_MAX) as answer:
            answer.read()

    def _work(self, server: LlamaServer, job: Job, answer: _Answer) -> None:
        """One job from beginning to end; every error becomes the end of the answer."""
        if answer.is_cancelled:
            return
        try:
            if job.schema is not None and not self._is_followed(server, job):
                raise _unsupported(job.schema)
            body = _request(job)
            with self._registered(answer, body[:PREFIX_BYTES]):
                server.handle_completions(body, answer)
            answer.add(end=EngineFailed("The engine broke off."))
        except ApiError as error:
            answer.add(end=error)
        except Exception:
            log.exception("the embedded engine failed")
            answer.add(end=EngineFailed("The engine failed."))

    @contextmanager
    def _registered(self, answer: _Answer, prefix: bytes) -> Iterator[None]:
        """A running job; it waits for cancelled jobs with the same prefix."""

        def is_free() -> bool:
            jobs = self._running.items()
            return not any(job.is_cancelled and other == prefix for job, other in jobs)

        with self._has_ended:
            self._has_ended.wait_for(is_free, CANCEL_S_MAX)
            self._running[answer] = prefix
        try:
            yield
        finally:
            with self._has_ended:
                del self._running[answer]
                self._has_ended.notify_all()

    def _is_followed(self, server: LlamaServer, job: Job) -> bool:
        """Whether the schema or grammar is followed: llama.cpp ignores one that it cannot read, with a line in its log.

        It is asked for one token while a forbidden token is made certain: that token is sampled only if nothing forbids
        it. For a schema that is a stop; a grammar may allow the empty text, so there it is a special token.
        """
        assert job.schema is not None
        key = blake2b(msgspec.json.encode(job.schema), digest_size=16).digest()
        if key not in self._schemas:
            if unrolled(job.schema) > UNROLLED_MAX:
                raise _too_large()
            likely = sorted(job.stops)
            if isinstance(job.schema, Grammar):
                likely = self._forbidden_ids(job) or likely
            answer = _Answer(job, self._hidden_tokens)
            server.handle_completions(_request(job, likely=likely), answer)
            if len(self._schemas) >= SCHEMAS_MAX:
                self._schemas.clear()
            _, ids, _, end = answer.take()
            if isinstance(end, ApiError):
                raise end
            # The first token of a grammar may be part of a character, which llama.cpp does not send yet.
            is_hidden = isinstance(job.schema, Grammar) and not ids
            self._schemas[key] = is_hidden or (bool(ids) and ids[0] not in likely)
        return self._schemas[key]

    def _forbidden_ids(self, job: Job) -> list[int]:
        """A token that no grammar allows: a special token that is no stop. The prompt has one, as a rule."""
        assert isinstance(job.prompt, Tokens)
        ids = (id for chunk in job.prompt.chunks() for id in chunk)
        special = (id for id in ids if id not in job.stops and not self._vocabulary.bytes_of(id))
        return list(islice(special, 1))


class _Logprobs(Struct, frozen=True):
    content: list[TokenLikelihood] = []


class _Choice(Struct, frozen=True):
    text: str = ""
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _Sampled(Struct, frozen=True):
    tokens: list[int] = []
    tokens_predicted: int = 0


class _Progress(Struct, frozen=True):
    cache: int = 0


class _Failure(Struct, frozen=True):
    type: str = ""
    message: str = ""
    n_prompt_tokens: int = 0
    n_ctx: int = 0


class _Chunk(Struct, frozen=True):
    """One callback: progress of the prompt, or a token, or the end, or an error."""

    choices: list[_Choice] = []
    sampled: _Sampled = msgspec.field(default=_Sampled(), name="__verbose")
    prompt_progress: _Progress | None = None
    error: _Failure | None = None


_decode_chunk = msgspec.json.Decoder(_Chunk).decode


_End = Finish | ApiError | None


class _Answer:
    """What was sampled and not yet taken: filled in a worker thread, by the callbacks of one job, and emptied in the
    event loop. A probe has no event loop."""

    def __init__(
        self, job: Job, hidden: HiddenTokens, loop: asyncio.AbstractEventLoop | None = None
    ) -> None:
        self._job = job
        self._hidden_tokens = hidden
        self._loop = loop
        # Stops the job at its next callback.
        self.is_cancelled = False
        self._lock = threading.Lock()
        self._started: JobStarted | None = None
        self._ids = id_array()
        self._logprobs: list[TokenLogprob | None] = []
        self._end: _End = None
        self.filled = asyncio.Event()
        self._is_woken = False
        # What was reported before.
        self._cached_tokens: int | None = None
        self._count = 0

    def take(self) -> tuple[JobStarted | None, Sequence[int], list[TokenLogprob | None], _End]:
        """The start, ids, their logprobs where the job wants them, and the end if it was reached."""
        with self._lock:
            taken = self._started, self._ids, self._logprobs, self._end
            self._started, self._ids, self._logprobs = None, id_array(), []
            self._is_woken = False
            self.filled.clear()
        return taken

    def add(
        self,
        ids: Sequence[int] = (),
        logprobs: Sequence[TokenLogprob | None] = (),
        started: JobStarted | None = None,
        end: _End = None,
    ) -> None:
        """Add something, and wake the reader once for all that is added before it takes. The first end counts."""
        with self._lock:
            self._ids.extend(ids)
            self._logprobs.extend(logprobs)
            self._started = started or self._started
            self._end = self._end or end
            if self._loop is None or self._is_woken:
                return
            self._is_woken = True
        try:
            self._loop.call_soon_threadsafe(self.filled.set)
        except RuntimeError:
            # The event loop is closed.
            self.is_cancelled = True

    def __call__(self, data: bytes) -> bool:
        """The callback of the job. Returns True to stop it, and never raises into C++."""
        if self.is_cancelled:
            return True
        try:
            return self._read(_decode_chunk(data))
        except Exception:
            log.exception("the embedded engine sent something that cannot be read")
            self.add(end=EngineFailed("The engine sent something that cannot be read."))
            return True

    def _read(self, chunk: _Chunk) -> bool:
        if chunk.error is not None:
            self.add(end=_error(chunk.error))
            return True
        if chunk.prompt_progress is not None:
            cached_tokens = chunk.prompt_progress.cache
            if cached_tokens != self._cached_tokens:
                self._cached_tokens = cached_tokens
                self.add(started=JobStarted(cached_tokens))
            return False
        choice, count = chunk.choices[0], chunk.sampled.tokens_predicted
        if choice.finish_reason is not None:
            return self._finish("length" if choice.finish_reason == "length" else "stop", count)
        ids = chunk.sampled.tokens
        if count - self._count > len(ids):
            # A character that took several tokens, of which llama.cpp sends only the last one.
            ids = self._hidden_tokens.find(choice.text, count - self._count, ids[-1])
        self._count = count
        self.add(ids, self._read_logprobs(choice, len(ids)))
        # llama.cpp has stops of its own; the dialect may have more.
        return ids[-1] in self._job.stops and self._finish("stop", count)

    def _read_logprobs(self, choice: _Choice, count: int) -> list[TokenLogprob | None]:
        """Of a character that took several tokens llama.cpp sends only the last one's."""
        if not self._job.sampling.wants_logprobs:
            return []
        content = (choice.logprobs or _Logprobs()).content
        logprobs = [token.logprobs(self._job.sampling) for token in content]
        return [*[None] * (count - len(logprobs)), *logprobs]

    def _finish(self, reason: Literal["stop", "length"], count: int) -> bool:
        # Tokens at the very end that make no whole character were never sent; they are counted.
        count = min(count, self._job.output_tokens_max or 0)
        self.add(end=Finish(reason, cached_tokens=self._cached_tokens, output_tokens=count))
        return True


def _request(job: Job, *, likely: Sequence[int] = ()) -> bytes:
    """The job as llama.cpp takes it; with tokens that are made `likely`, a probe of its constraint."""
    is_probe = bool(likely)
    assert isinstance(job.prompt, Tokens), "this engine takes tokens"
    ids = job.prompt.flat().tolist()
    fields: dict[str, object] = {
        "prompt": ids[:1] if is_probe else ids,
        "max_tokens": 1 if is_probe else job.output_tokens_max,
        **sampling_fields(job.sampling),
        # Samplers that the request does not have must not change the distribution.
        "top_k": 0,
        "min_p": 0.0,
        "stream": True,
        "cache_prompt": not is_probe,
        "return_progress": True,
        # The only cheap way to the ids.
        "verbose": True,
    }
    if isinstance(job.schema, Grammar) and job.output_tokens_max:
        fields["grammar"] = llguidance(job.schema)
    elif isinstance(job.schema, bytes) and job.output_tokens_max:
        fields["json_schema"] = _spaced(job.schema)
    if is_probe:
        fields["logit_bias"] = [[id, CERTAIN] for id in likely]
    return msgspec.json.encode(fields)


def _spaced(schema: bytes) -> object:
    """The schema, with how its JSON is to be spaced."""
    decoded = msgspec.json.decode(schema, type=bool | dict[str, Raw])
    if isinstance(decoded, bool):
        return decoded
    return {"x-guidance": JSON_STYLE} | decoded


def _unsupported(schema: bytes | Grammar) -> InvalidRequest:
    return refused_grammar(schema) if isinstance(schema, Grammar) else unsupported_schema()


def _too_large() -> InvalidRequest:
    return InvalidRequest(
        "The engine cannot follow this JSON schema: written out item by item, its lists ('minItems', 'maxItems', "
        f"'prefixItems') and what 'allOf' joins would have more than {UNROLLED_MAX:,} parts.",
        code="unsupported_schema",
    )


def _error(failure: _Failure) -> ApiError:
    if failure.type == "exceed_context_size_error":
        return context_overflow(failure.n_prompt_tokens, failure.n_ctx)
    if failure.type == "unavailable_error":
        return Unavailable("The engine is not ready. Please retry later.")
    log.warning("the embedded engine refused a request: %s", failure.type)
    return EngineFailed(f"The engine refused the request: {failure.message[:200]}")


# --- starting ---------------------------------------------------------------------------------------


def tell_memory(
    name: str, weights_bytes: int, head: Mapping[str, object], context_tokens: int, parallel: int
) -> None:
    """Log how much memory a model will take, before it is taken, and warn where there is less."""
    cache_bytes = token_bytes(head) * context_tokens * parallel
    needed = weights_bytes + cache_bytes
    log.info(
        "loading %s: at least %s of memory (weights %s, context %s for %d x %s tokens)",
        name,
        _shown(needed),
        _shown(weights_bytes),
        _shown(cache_bytes),
        parallel,
        f"{context_tokens:,}",
    )
    free = available_bytes()
    if free is not None and needed > free:
        log.warning(
            "%s needs more memory than is free (%s): expect swapping, or a smaller "
            "--context-tokens or --engine-parallel",
            name,
            _shown(free),
        )


def context_for(head: Mapping[str, GgufValue]) -> int:
    """The context of a model where the operator has not said."""
    return min(trained_tokens(head), CONTEXT_TOKENS)


def token_bytes(head: Mapping[str, object]) -> int:
    """What one token of context takes, by the metadata of a GGUF file: a key and a value for each layer and head."""

    def number(key: str, default: int) -> int:
        found = head.get(f"{head.get('general.architecture')}.{key}")
        if isinstance(found, list):
            # One number for each layer.
            found = max(found, default=default)
        return found if isinstance(found, int) else default

    heads = number("attention.head_count", 1)
    width = number("embedding_length", 0) // max(heads, 1)
    widths = number("attention.key_length", width) + number("attention.value_length", width)
    return number("block_count", 0) * number("attention.head_count_kv", heads) * widths * 2


def available_bytes(info: Path = Path("/proc/meminfo")) -> int | None:
    """The memory that programs can still take; None where the system does not say."""
    lines = info.read_text().splitlines() if info.exists() else []
    found = next((line.split()[1] for line in lines if line.startswith("MemAvailable:")), None)
    return None if found is None else int(found) * 1024


def _shown(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def spare_cores() -> int:
    """The cores that this process may use, less one for the server itself."""
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


def load_advice(error: ImportError) -> str:
    """What to do where the engine's library cannot be loaded; minimal systems lack OpenMP's."""
    if "libgomp" in str(error):
        return "Install the library; on Debian and Ubuntu: apt install libgomp1"
    return f"Run: {sys.executable} -m pip install --no-deps xllamacpp"


def _fingerprint(path: Path, context_tokens: int) -> str:
    """What the state of a slot fits: these weights, this context, this version of llama.cpp."""
    stat = path.stat()
    parts = (path.name, stat.st_size, stat.st_mtime_ns, context_tokens, version("xllamacpp"))
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()


def load_server(
    path: Path,
    *,
    context_tokens: int,
    parallel: int,
    threads: int,
    key: str,
    memory: Path | None = None,
) -> LlamaServer:
    """A llama.cpp server in this process. Its HTTP port cannot be switched off: it gets loopback and a random key."""
    if not path.is_file():
        raise Misconfigured(
            f"engine: there are no weights at {path}. Name a GGUF file, or run `segue models list`."
        )
    check_cpu()
    # Threads that spin while they wait nearly stop when another process needs their core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import xllamacpp  # type: ignore[import-untyped]
    except ImportError as error:
        raise Misconfigured(
            "engine: the embedded engine needs the package xllamacpp, which cannot be loaded here "
            f"({error}). {load_advice(error)}"
        ) from None
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.model_alias = {"m"}
    # Each slot has a context of its own, so that no conversation can crowd out another.
    params.n_ctx = context_tokens * parallel
    params.n_parallel = parallel
    params.kv_unified = False
    params.cache_ram_mib = CACHE_MIB
    params.n_batch = params.n_ubatch = max(BATCH, parallel)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.fit_params = False
    params.verbosity = -1
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [key]
    params.n_threads_http = 1
    params.ui = False
    params.endpoint_slots = False
    if memory is not None:
        params.slot_save_path = f"{memory}/"
    try:
        server: LlamaServer = xllamacpp.Server(params)
    except RuntimeError:
        raise Misconfigured(
            f"engine: {path.name} cannot be loaded: it is no GGUF file that llama.cpp knows, or the "
            "memory is too small for it. Try a smaller --context-tokens or --engine-parallel."
        ) from None
    return server
