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

Where an answer is held to a schema or a grammar, llama.cpp drops it without a word when its library gives up, in the
middle of the answer too. So a token that no grammar allows is made certain in each such job: it is sampled in that
moment, and the answer ends as a failure instead of going on as anything.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import shutil
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import blake2b
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Literal
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
    Unavailable,
    context_overflow,
)
from segue.schemas.structural_tags import JSON_STYLE
from segue.seams.model import EngineFacts, Finish, Grammar, Ids, Job, JobStarted, TokenLogprob
from segue.seams.prompt import Tokens, id_array
from segue_embedded.loading import LlamaServer, load_server
from segue_embedded.trial import Trial

log = logging.getLogger(__name__)

# Of a job's JSON, which begins with its prompt: about a hundred tokens.
PREFIX_BYTES = 512
# How long a cancelled job may take to free its slot: a batch, on a busy machine.
CANCEL_S_MAX = 5.0
# How long a slot may take to be saved or restored, with a job that ends first.
SLOT_S_MAX = 60.0
# Jobs that may wait for a slot: a caller waits long, but not for ever.
WAITING_MAX = 1_000
# Schemas and grammars that were tried; each is tried once.
SCHEMAS_MAX = 1_000
# What a schema or grammar may have: the library takes about a second for so much, in which no other answer goes on.
HELD_BYTES_MAX = 256 * 1024
# A special token in a structural tag or in a Lark grammar.
NAMED_TOKEN = re.compile(r'(?:"token":|<\[)\s*(\d+)')


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
        self._trial = Trial(path)
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
            self._trial.close()
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
            if job.schema is not None:
                if not self._is_followed(job):
                    raise _unsupported(job.schema)
                answer.forbidden = self._forbidden_ids(job)
            body = _request(job, certain=answer.forbidden)
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

    def _is_followed(self, job: Job) -> bool:
        """Whether the schema or grammar is followed: llama.cpp ignores one that it cannot read, with a line in its log,
        and one that it cannot hold ends its process, which is therefore another one (`trial.py`).

        It is asked for one token while a forbidden token is made certain: that token is sampled only if nothing forbids
        it. For a schema that is a stop; a grammar may allow the empty text, so there it is a special token.
        """
        assert job.schema is not None
        key = blake2b(msgspec.json.encode(job.schema), digest_size=16).digest()
        if key not in self._schemas:
            if _size(job.schema) > HELD_BYTES_MAX:
                raise _too_large()
            likely = sorted(job.stops)
            if isinstance(job.schema, Grammar):
                likely = self._forbidden_ids(job) or likely
            answer = _Answer(job, self._hidden_tokens)
            if len(self._schemas) >= SCHEMAS_MAX:
                self._schemas.clear()
            said = self._trial.run(_request(job, certain=likely, is_probe=True))
            if said is None:
                log.warning("a schema or grammar ended the process that tries them; it is refused")
                self._schemas[key] = False
                return False
            any(map(answer, said))
            _, ids, _, end = answer.take()
            if isinstance(end, ApiError):
                raise end
            # The first token of a grammar may be part of a character, which llama.cpp does not send yet.
            is_hidden = isinstance(job.schema, Grammar) and not ids
            self._schemas[key] = is_hidden or (bool(ids) and ids[0] not in likely)
        return self._schemas[key]

    def _forbidden_ids(self, job: Job) -> list[int]:
        """A token that the grammar does not allow: a special token that is no stop, and that a structural tag does not
        name. The prompt has one, as a rule."""
        assert isinstance(job.prompt, Tokens)
        allowed = {*job.stops}
        if isinstance(job.schema, Grammar):
            allowed |= {int(named[1]) for named in NAMED_TOKEN.finditer(job.schema.definition)}
        ids = (id for chunk in job.prompt.chunks() for id in chunk)
        special = (id for id in ids if id not in allowed and not self._vocabulary.bytes_of(id))
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
        # What is sampled once nothing holds the answer any more.
        self.forbidden: Sequence[int] = ()
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
        if self.forbidden and not set(self.forbidden).isdisjoint(ids):
            assert self._job.schema is not None
            self.add(end=_given_up(self._job.schema))
            return True
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


def _request(job: Job, *, certain: Sequence[int] = (), is_probe: bool = False) -> bytes:
    """The job as llama.cpp takes it, or a probe of its constraint; with tokens that are made `certain`, so that they
    are sampled where nothing forbids them."""
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
    if certain:
        fields["logit_bias"] = [[id, CERTAIN] for id in certain]
    return msgspec.json.encode(fields)


def _spaced(schema: bytes) -> object:
    """The schema, with how its JSON is to be spaced."""
    decoded = msgspec.json.decode(schema, type=bool | dict[str, Raw])
    if isinstance(decoded, bool):
        return decoded
    return {"x-guidance": JSON_STYLE} | decoded


def _unsupported(schema: bytes | Grammar) -> InvalidRequest:
    return refused_grammar(schema) if isinstance(schema, Grammar) else unsupported_schema()


def _given_up(schema: bytes | Grammar) -> InvalidRequest:
    """The end of an answer that was no longer held to its schema: what would have followed is anything."""
    is_grammar = isinstance(schema, Grammar) and schema.syntax != "structural_tag"
    return InvalidRequest(
        f"The engine could not follow this {'grammar' if is_grammar else 'JSON schema'} to the end of the answer: it "
        "is too large or too ambiguous. Use a smaller one: shorter repeats, patterns and constants.",
        code="unsupported_grammar" if is_grammar else "unsupported_schema",
        param="tools" if is_grammar else None,
    )


def _size(schema: bytes | Grammar) -> int:
    return len(schema if isinstance(schema, bytes) else schema.definition.encode())


def _too_large() -> InvalidRequest:
    return InvalidRequest(
        "The engine cannot follow this JSON schema or grammar: it may have at most "
        f"{HELD_BYTES_MAX // 1024} KiB, tools included.",
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


def spare_cores() -> int:
    """The cores that this process may use, less one for the server itself."""
    has_affinity = hasattr(os, "sched_getaffinity")
    cores = len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1
    return max(1, cores - 1)


def _fingerprint(path: Path, context_tokens: int) -> str:
    """What the state of a slot fits: these weights, this context, this version of llama.cpp."""
    stat = path.stat()
    parts = (path.name, stat.st_size, stat.st_mtime_ns, context_tokens, version("xllamacpp"))
    return blake2b(repr(parts).encode(), digest_size=16).hexdigest()
