"""Who produces tokens? A llama.cpp server: ids in, ids out, through its own `/completion`.

The server keeps the prefix of each slot and chooses the slot itself. It ends its turn at the model's own end marks and
sends the mark's id; closing the connection frees the slot. Which other samplers it uses (top_k, min_p) is the
choice of whoever started it.

A server that was built without llguidance ends its process when it is given a Lark grammar. Whether it was is asked
first: one that has it shows a JSON schema back as such a grammar.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.engines.grammars import GUIDANCE, LLGUIDANCE, guidance, unreadable
from segue.engines.hidden_tokens import Spelling
from segue.engines.logprobs import Likely, ids_with, odds_of_likely
from segue.engines.token_json import TokenJson
from segue.engines.upstream import Upstream, read, told
from segue.errors import ApiError, EngineFailed, InvalidRequest
from segue.turn.values import Finish, Grammar, Job, JobStarted, Piece, TokenLogprob, Tokens

PATH = "/completion"
# The last event would otherwise repeat the whole prompt as text.
LAST_FIELDS = ["stop", "stop_type", "tokens", "timings"]
# As many as llama.cpp has: one more would mean a random one.
SEEDS = 2**32 - 1
# More than any model's logits differ.
CERTAIN = 1_000.0
# Grammars that are known to hold; each is asked once.
GRAMMARS_MAX = 1_000


class _Timings(Struct, frozen=True):
    cache_n: int = 0


class _Progress(Struct, frozen=True):
    cache: int = 0


class _Event(Struct, frozen=True):
    content: str = ""
    tokens: list[int] = []
    # How many by now; of a character that took several only the last one is shown.
    tokens_predicted: int = 0
    stop: bool = False
    stop_type: str = ""
    timings: _Timings = _Timings()
    prompt_progress: _Progress | None = None
    completion_probabilities: list[Likely] = []
    error: Raw | UnsetType = UNSET


class _Settings(Struct, frozen=True):
    grammar: str = ""


class _Probe(Struct, frozen=True):
    tokens: list[int] = []
    generation_settings: _Settings = _Settings()


_probe = msgspec.json.Decoder(_Probe)
_event = msgspec.json.Decoder(_Event)


class LlamacppEngine:
    """An `Engine` for token prompts. Without `spelling`, characters of several tokens do not arrive whole."""

    def __init__(
        self,
        upstream: Upstream,
        token_json: TokenJson | None = None,
        spelling: Spelling | None = None,
    ) -> None:
        self._upstream = upstream
        self._spelling = spelling
        # Shared by all replicas of a model, where there are several.
        self._token_json = token_json or TokenJson()
        self._has_guidance: bool | None = None
        self._grammars: dict[Grammar, bool] = {}

    @property
    def can_constrain(self) -> bool:
        """Yes: it turns a JSON schema into a grammar."""
        return True

    @property
    def grammars(self) -> frozenset[str]:
        """Both, if it was built with llguidance; that is asked when it is needed."""
        return LLGUIDANCE

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
        begun: JobStarted | None = None
        heard = 0
        if isinstance(job.schema, Grammar) and not is_warm_up:
            await self._check_grammar(job, job.schema)
        async with await self._upstream.listen(PATH, self._body(job)) as stream:
            async for batch in stream:
                ids: list[int] = []
                logprobs: list[TokenLogprob | None] = []
                end: _Event | None = None
                fault: ApiError | None = None
                for data in batch:
                    event = read(_event, data)
                    if event.error is not UNSET:
                        # What was said before it counts.
                        fault = told(event.error)
                        break
                    if event.prompt_progress is not None:
                        # It still reads the prompt, and shows an id that was never sampled.
                        stream.wait_on()
                        if begun is None:
                            begun = JobStarted(event.prompt_progress.cache)
                            yield begun
                        continue
                    ids += self._ids(event, heard)
                    heard = event.tokens_predicted or heard
                    likely = event.completion_probabilities[: len(ids) - len(logprobs)]
                    logprobs += [None] * (len(ids) - len(logprobs) - len(likely))
                    logprobs += [odds_of_likely(one, job.sampling) for one in likely]
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
                    yield ids_with(ids, logprobs, job)
                if fault is not None:
                    raise fault
                if end is not None:
                    is_stop = has_stopped or end.stop_type in ("eos", "word")
                    yield Finish("stop" if is_stop else "length", end.timings.cache_n)
                    return
            raise stream.broke_off()

    def _ids(self, event: _Event, heard: int) -> list[int]:
        """The ids of an event: one, or those of a character that took several."""
        count = event.tokens_predicted - heard
        if self._spelling is None or not event.tokens or count <= len(event.tokens):
            return event.tokens
        return self._spelling.find(event.content, count, event.tokens[-1])

    async def _check_grammar(self, job: Job, grammar: Grammar) -> None:
        """Refuse a grammar that this server cannot be held to."""
        if self._has_guidance is None:
            asked = await self._ask({"prompt": [0], "n_predict": 1, "json_schema": {}})
            self._has_guidance = asked.generation_settings.grammar.startswith(GUIDANCE)
        if not self._has_guidance:
            raise InvalidRequest(
                "The engine cannot be held to a grammar: its llama.cpp was built without llguidance.",
                code="unsupported_grammar",
                param="tool_choice",
            )
        if grammar not in self._grammars:
            if len(self._grammars) >= GRAMMARS_MAX:
                self._grammars.clear()
            self._grammars[grammar] = await self._can_hold(job, grammar)
        if not self._grammars[grammar]:
            raise unreadable(grammar)

    async def _can_hold(self, job: Job, grammar: Grammar) -> bool:
        """Whether the grammar binds: one that it cannot read is dropped in silence.

        So it is asked for one token while the first of the prompt, a special one, is made certain: that comes only if
        nothing is in its way.
        """
        assert isinstance(job.prompt, Tokens)
        first = next(id for chunk in job.prompt.chunks() for id in chunk)
        asked = await self._ask(
            {
                "prompt": [first],
                "n_predict": 1,
                "grammar": guidance(grammar),
                "logit_bias": [[first, CERTAIN]],
            }
        )
        return first not in asked.tokens

    async def _ask(self, settings: dict[str, object]) -> _Probe:
        body = msgspec.json.encode(settings | {"return_tokens": True, "cache_prompt": False})
        status, answer = await self._upstream.call("POST", PATH, body)
        if status != 200:
            raise EngineFailed("The engine could not be asked about grammars.")
        return read(_probe, answer)

    def _body(self, job: Job) -> bytes:
        assert isinstance(job.prompt, Tokens), "this engine takes tokens"
        sampling = job.sampling
        settings: dict[str, object] = {
            "stream": True,
            "cache_prompt": True,
            "return_tokens": True,
            # Says early how much of the prompt it has kept. A server that does not know it yet says so at the end.
            "return_progress": True,
            "response_fields": LAST_FIELDS,
            # A warm-up still gives one token, which nobody hears.
            "n_predict": job.output_tokens_max,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "presence_penalty": sampling.presence_penalty,
            "frequency_penalty": sampling.frequency_penalty,
        }
        if sampling.seed is not None:
            settings["seed"] = sampling.seed % SEEDS
        if sampling.wants_logprobs:
            # None at all would be none of the sampled token either.
            settings["n_probs"] = max(sampling.top_logprobs, 1)
        if isinstance(job.schema, Grammar):
            settings["grammar"] = guidance(job.schema)
        elif job.schema is not None:
            settings["json_schema"] = Raw(job.schema)
        ids = self._token_json.text(job.prompt)
        return b"".join((b'{"prompt":[', ids, b"],", msgspec.json.encode(settings)[1:]))
