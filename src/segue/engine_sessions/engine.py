"""How is a vLLM asked that keeps conversations? As any other vLLM, but for what it knows already.

A vLLM with the plugin `segue-vllm` says so at `/segue/session`. Then jobs go over one connection: a handle, the length
and the digest of what the engine has, and the ids that are new. Where that cannot be (no plugin, no connection, images,
logprobs), or anything fails before the first token, the job is asked over HTTP with its whole prompt, as without the
plugin. After the first token a failure ends the answer, in words.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections import Counter, deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from hashlib import blake2b

import msgspec
from msgspec import Struct, structs

from segue.border.numbers import events_max
from segue.border.refusals import EngineLost, error_for_status
from segue.engine_sessions.frames import (
    PROTOCOL,
    SessionAsk,
    SessionEnd,
    SessionFailed,
    SessionForget,
    SessionRefused,
    SessionTaken,
    SessionTokens,
    new_key,
)
from segue.engine_sessions.known import Beginning, KnownTurn, KnownTurns, unknown
from segue.engine_sessions.link import SessionAnswered, SessionLink
from segue.engines.facts import fitted
from segue.engines.token_engine import TokenAnswer, TokenCodec, TokenEngine, TokenJson, images_of
from segue.engines.upstream import Upstream
from segue.engines.vllm import VLLM, VllmEvent, VllmOffer
from segue.errors import ApiError, EngineFailed
from segue.seams.history import Owner
from segue.seams.model import Finish, Job, Piece
from segue.seams.prompt import Tokens

log = logging.getLogger(__name__)

ABOUT = "/segue/session"
# As the plugin's, and nothing that ends a line of a request.
PATH = re.compile(r"(?:/[A-Za-z0-9_.-]+)+")
# How long it is not asked again whether it has the plugin, or answers: twice as long each time.
PAUSE_S, PAUSE_S_MAX = 1.0, 60.0
OPEN_S_MAX = 5.0
# An engine that cannot be reached while so many owners are erased has most likely forgotten everything.
ERASED_MAX = 10_000
# Of an answer whose engine has ended.
UNAVAILABLE = 503
# What of a refusal is counted by its own word.
REASONS = frozenset(("unknown", "evicted", "owner", "model", "adapter", "salt", "length", "digest"))


class SessionOffer(Struct, frozen=True):
    """What the plugin says of itself; what is missing says nothing."""

    package: str = ""
    version: str = ""
    protocol: int = 0
    vllm: str = ""
    step: int = 1
    # Why it is not step two.
    reason: str = ""
    path: str = ""


_offer = msgspec.json.Decoder(SessionOffer)


async def session_offer(upstream: Upstream) -> SessionOffer | None:
    """What this server offers; None where it has no such plugin. Raises where it does not answer."""
    status, body = await upstream.call("GET", ABOUT)
    if status != 200:
        return None
    try:
        offer = _offer.decode(body)
    except msgspec.MsgspecError:
        return None
    is_ours = offer.package == "segue-vllm" and PATH.fullmatch(offer.path)
    return offer if is_ours else None


class _Heard:
    """One answer, as it comes."""

    def __init__(self, answer: TokenAnswer, turn: KnownTurn, known: KnownTurns) -> None:
        self.answer, self._turn, self._known = answer, turn, known
        self._left = events_max(answer.job)
        self._waiter: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()
        self.heard_at = self._loop.time()
        self.has_tokens = self.is_lost = False
        self.refused: SessionRefused | None = None
        self.failed: SessionFailed | None = None
        self.error: Exception | None = None

    @property
    def is_over(self) -> bool:
        """Whether there is nothing more to wait for."""
        found = (self.answer.reason, self.refused, self.failed, self.error)
        return self.is_lost or any(one is not None for one in found)

    def hear(self, said: Sequence[SessionAnswered]) -> None:
        if self.error is not None:
            return
        self.heard_at = self._loop.time()
        try:
            for one in said:
                self._read(one)
        except Exception as error:
            self.error = error
            self._wake()

    def _read(self, said: SessionAnswered) -> None:
        answer = self.answer
        if isinstance(said, SessionTokens):
            ids = said.ids
            self._left -= len(ids) or 1
            if self._left < 0:
                raise EngineFailed("The engine sent more events than its answer can have.")
            self._turn.sampled.extend(ids)
            self._known.grown(self._turn, len(ids))
            is_first = not self.has_tokens
            self.has_tokens = True
            answer.add(ids, ())
            if is_first:
                answer.start(said.cached)
                self._wake()
            elif answer.ids and not answer.is_taken():
                self._wake()
        elif isinstance(said, SessionTaken):
            self._turn.handle = said.handle
            if not answer.job.is_ahead:
                self._known.add(self._turn)
        elif isinstance(said, SessionEnd):
            stop = said.stop
            if stop is not None and stop in answer.job.stops and answer.last_id != stop:
                answer.add([stop], ())
            answer.reason = "stop" if said.reason == "stop" else "length"
            if answer.job.is_ahead:
                # One that is given up is worth nothing, and what was read before it is.
                self._known.add(self._turn)
            self._wake()
        elif isinstance(said, SessionRefused):
            self.refused = said
            self._wake()
        else:
            self.failed = said
            self._wake()

    def lost(self) -> None:
        self.is_lost = True
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def something(self, first_s: float, silence_s: float) -> None:
        """Wait for ids that were not taken, or for the end."""
        while not self.answer.ids and not self.is_over:
            limit_s = silence_s if self.has_tokens else first_s
            left_s = self.heard_at + limit_s - self._loop.time()
            if left_s <= 0:
                raise EngineLost(f"The engine sent nothing for {limit_s:g} seconds.")
            self._waiter = self._loop.create_future()
            await asyncio.wait((self._waiter,), timeout=left_s)


class SessionEngine(TokenEngine[VllmOffer, VllmEvent]):
    """A vLLM, with its plugin or without."""

    def __init__(
        self,
        upstream: Upstream,
        model: str = "",
        token_json: TokenJson | None = None,
        codec: TokenCodec[VllmOffer, VllmEvent] = VLLM,
    ) -> None:
        super().__init__(codec, upstream, model, token_json)
        self.known = KnownTurns()
        # Since the last page of metrics: jobs by how their prompts came, and refusals by reason.
        self.session_counts: tuple[Counter[str], Counter[str]] = Counter(), Counter()
        self._link: SessionLink | None = None
        self._instance = ""
        self._opening: asyncio.Task[SessionLink | None] | None = None
        self._failures = 0
        self._retry_at = 0.0
        self._logged = ""
        # Owners who were erased, of whom the engine has not heard.
        self._erased: deque[str] = deque(maxlen=ERASED_MAX)

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        link = await self._open_link() if _may_go(job) else None
        if link is not None:
            is_over = False
            async with aclosing(self._session(link, job)) as pieces:
                async for piece in pieces:
                    is_over = is_over or isinstance(piece, Finish)
                    yield piece
            if is_over:
                return
            self.session_counts[0]["http"] += 1
        async with aclosing(super().sample(job)) as pieces:
            async for piece in pieces:
                yield piece

    def forget_owner(self, owner: Owner) -> None:
        """Everything of the owner was erased: neither side knows its prompts any longer; where there is no connection
        just now, as soon as there is one."""
        self.known.forget_owner(owner)
        self._erased.append(_name_of(owner))
        if self._link is not None and not self._link.is_lost:
            self._send_erased(self._link)
        else:
            self._reconnect()

    def _send_erased(self, link: SessionLink) -> None:
        while self._erased:
            link.send(SessionForget(self._erased.popleft()))

    # --- a job -----------------------------------------------------------------------------------------

    async def _session(self, link: SessionLink, job: Job) -> AsyncGenerator[Piece, None]:
        """The pieces, with a `Finish`; without one where the job must be asked in another way."""
        try:
            offer = await self._prepare(job)
        except ApiError:
            return
        job = fitted(job, self.facts)
        assert isinstance(job.prompt, Tokens), "this engine takes tokens"
        scope = (job.owner, job.cache_salt)
        begins = self.known.find(job.prompt, scope)
        while True:
            heard = self._ask(link, job, offer, begins)
            try:
                async with aclosing(self._pieces(heard)) as pieces:
                    async for piece in pieces:
                        yield piece
            finally:
                link.end(heard.stream)
            refused = heard.refused
            if refused is None:
                return
            self._note_refusal(refused.why)
            if begins.of is None:
                return
            self.known.forget(begins.of)
            begins = unknown(job.prompt)

    def _ask(self, link: SessionLink, job: Job, offer: VllmOffer, begins: Beginning) -> _Asked:
        fields = self._codec.request(
            job, self._model, structs.replace(offer, has_generate=True)
        ).fields
        assert isinstance(job.prompt, Tokens)
        scope = job.owner, job.cache_salt
        turn = KnownTurn(job.prompt, scope, begins, is_ahead=job.is_ahead)
        heard = _Asked(TokenAnswer(job), turn, self.known)
        heard.stream = link.begin(heard)
        priority = fields.get("priority", 0)
        assert isinstance(priority, int)
        link.send(
            SessionAsk(
                stream=heard.stream,
                handle=begins.handle,
                length=begins.length,
                digest=begins.state.digest() if begins.handle else b"",
                ids=begins.data,
                owner=_name_of(job.owner),
                model=self._model,
                salt=job.cache_salt,
                priority=priority,
                sampling=msgspec.json.encode(fields["sampling_params"]),
            )
        )
        self.session_counts[0]["kept" if begins.handle else "whole"] += 1
        return heard

    async def _pieces(self, heard: _Asked) -> AsyncGenerator[Piece, None]:
        answer, timeouts = heard.answer, self._upstream.timeouts
        has_started = False
        while True:
            await heard.something(timeouts.first_s, timeouts.silence_s)
            if answer.started is not None and not has_started:
                has_started = True
                yield answer.started
            if answer.ids:
                yield answer.pop_ids()
            if not answer.ids and heard.is_over:
                break
        if heard.error is not None:
            raise heard.error
        if answer.reason is not None:
            is_stop = answer.reason == "stop" or answer.last_id in answer.job.stops
            yield Finish("stop" if is_stop else answer.reason, answer.cached_tokens)
        elif heard.has_tokens:
            failed = heard.failed
            # The plugin itself lives longer than the engine core beside it.
            if failed is None or failed.status == UNAVAILABLE:
                raise EngineLost("The engine broke off in the middle of its answer.")
            words = msgspec.json.encode({"error": {"message": failed.words}})
            raise error_for_status(failed.status, words, engine=self._upstream.name)

    def _note_refusal(self, why: str) -> None:
        self.session_counts[1][why if why in REASONS else "other"] += 1

    # --- the connection --------------------------------------------------------------------------------

    async def _open_link(self) -> SessionLink | None:
        """The connection; None where there is none now. All jobs wait for the same attempt."""
        link = self._link
        if link is not None and not link.is_lost:
            return link
        opening = self._reconnect()
        return None if opening is None else await asyncio.shield(opening)

    def _reconnect(self) -> asyncio.Task[SessionLink | None] | None:
        """The attempt to open a connection; None where the last one has failed just now."""
        if self._opening is None:
            if self._link is not None:
                self._note("the connection to its plugin broke: %s", self._link.reason)
                self._link = None
            loop = asyncio.get_running_loop()
            if loop.time() >= self._retry_at:
                self._opening = loop.create_task(self._open())
                self._opening.add_done_callback(self._opened)
        return self._opening

    def _opened(self, task: asyncio.Task[SessionLink | None]) -> None:
        self._opening = None

    async def _open(self) -> SessionLink | None:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(OPEN_S_MAX):
                offer = await session_offer(self._upstream)
                if offer is None or offer.protocol != PROTOCOL:
                    if offer is not None:
                        self._note("its plugin speaks protocol %s, not ours", str(offer.protocol))
                    self._retry_at = loop.time() + PAUSE_S_MAX
                    return None
                key = new_key()
                link = await self._upstream.upgrade(offer.path, key, lambda: SessionLink(key))
                try:
                    hello = await link.hello
                except BaseException:
                    link.close()
                    raise
        except (OSError, ApiError) as error:
            self._failures = min(self._failures + 1, 10)
            self._retry_at = loop.time() + min(PAUSE_S * 2.0 ** (self._failures - 1), PAUSE_S_MAX)
            if not isinstance(error, ApiError):
                self._note("its plugin cannot be reached: %s", str(error) or type(error).__name__)
            return None
        self._failures = 0
        if hello.instance != self._instance:
            self.known.clear()
            self._instance = hello.instance
        self._link = link
        self._send_erased(link)
        self._note("keeps conversations (segue-vllm %s)", f"{offer.version}, step {hello.step}")
        return link

    def _note(self, words: str, value: str) -> None:
        """Say it, unless that was the last thing said."""
        if self._logged != words:
            self._logged = words
            log.info(f"engine %s {words}", self._upstream.name, value)


class _Asked(_Heard):
    """With its number on the connection."""

    stream = 0


def _name_of(owner: Owner) -> str:
    """What the engine hears in its place."""
    return blake2b(owner.encode(), digest_size=16).hexdigest()


def _may_go(job: Job) -> bool:
    """Whether the plugin can serve it: images and logprobs it cannot, and a prompt must be there."""
    is_plain = not job.sampling.wants_logprobs and not images_of(job)
    return is_plain and isinstance(job.prompt, Tokens) and job.prompt.length > 0
