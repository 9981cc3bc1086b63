"""What does this process know of where jobs should go?

A `RouteBook` belongs to the replicas of one model. It knows how fast they are and how much they have worked, which
heads are popular, and which replica has the history of a conversation whose client resends everything: a *hint*, by
the name of its chain and by its beginning. Where there are several processes, `fleet.py` adds what the others know.
Nothing here is durable, and nothing durable depends on it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable
from hashlib import blake2b

from segue.engines.queued import QueuedEngine
from segue.replicas.measures import Pace, Work
from segue.replicas.placement import Asked, Choice, ReplicaLoad
from segue.seams.history import Turn
from segue.seams.model import Job
from segue.seams.prompt import Head, Messages, Prompt

# About 200 bytes each; the longest unused go first.
HINTS_MAX = 50_000
HEADS_MAX = 1_000
# Replicas that were ever seen: where they come and go, their addresses differ.
REPLICAS_MAX = 10_000
# A shorter history says nothing when it is not found.
HELD_TOKENS_MIN = 512


class RouteBook:
    """Where the jobs of one model have gone, and how that went."""

    def __init__(self) -> None:
        self.paces: dict[str, Pace] = {}
        self._hints: OrderedDict[str, str] = OrderedDict()
        # When a replica came back without what it had read before, by the wall clock.
        self.forgot: dict[str, float] = {}
        self._heads: OrderedDict[bytes, Work] = OrderedDict()
        self._work = Work()
        # Called with each hint that is new here; and asks other processes for one.
        self.on_hint: Callable[[str, str], None] = lambda chain, name: None
        # Called with a replica and the tokens that a job on its way there will have to compute.
        self.on_work: Callable[[str, int], None] = lambda name, tokens: None
        self.find_hint: Callable[[str], Awaitable[str | None]] | None = None

    def pace(self, name: str) -> Pace:
        """What is known of this replica."""
        known = self.paces.get(name)
        if known is None:
            if len(self.paces) >= REPLICAS_MAX:
                del self.paces[next(iter(self.paces))]
            known = self.paces[name] = Pace()
        return known

    def load(self, server: QueuedEngine, now: float) -> ReplicaLoad:
        """A replica as the choice sees it."""
        pace, others, queue = self.pace(server.name), server.others, server.queue
        return ReplicaLoad(
            server.name,
            queue.running + others.running,
            queue.waiting + others.waiting,
            server.slots,
            pace.work.at(now) + others.work,
            pace.prefill_tokens_s or 0.0,
            pace.service_s or 0.0,
            pace.delay_s(now),
        )

    # --- jobs ---

    async def route(self, job: Job) -> str | None:
        """The replica that has read the history of this job: that of its parent, or by a hint."""
        if job.route is not None or not (job.model_turns and job.lineage.beginning):
            return job.route
        chain = job.lineage.chain
        name = self._hints.get(chain)
        if name is None and self.find_hint is not None:
            name = await self.find_hint(chain)
        return name

    def asked(self, job: Job, route: str | None, now: float, *, is_there: bool) -> Asked:
        """What the choice looks at; `is_there`: the replica with its history may take it."""
        lineage, tokens = job.lineage, tokens_of(job.prompt)
        beginning = (lineage.beginning or lineage.chain).encode()
        if is_there:
            return Asked(b"", beginning, route, held_tokens(job), tokens)
        head = head_digest(job.scene.head)
        self._note_head(head, tokens, now)
        share = self._heads[head].at(now) / max(1.0, self._work.at(now))
        return Asked(head, beginning, route, 0, tokens, share)

    def chose(self, job: Job, choice: Choice, asked: Asked, now: float) -> Visit:
        """The job goes there."""
        if beginning := job.lineage.beginning:
            # Its next turn may be known by either.
            for known_by in (job.lineage.chain, beginning):
                self.note_hint(known_by, choice.name, is_own=True)
        held = asked.held_tokens if choice.name == asked.route else 0
        self.on_work(choice.name, asked.prompt_tokens - held)
        return Visit(self.pace(choice.name), asked.prompt_tokens, held, now)

    def note_hint(self, chain: str, name: str, *, is_own: bool = False) -> None:
        """This replica has the history of this chain."""
        is_new = self._hints.get(chain) != name
        self._hints[chain] = name
        self._hints.move_to_end(chain)
        if len(self._hints) > HINTS_MAX:
            self._hints.popitem(last=False)
        if is_new and is_own:
            self.on_hint(chain, name)

    def note_forgot(self, name: str, at: float) -> None:
        """What this replica has read before that time is gone: it was restarted, or another one has its address."""
        if at > self.forgot.get(name, 0.0):
            self.forgot[name] = at
            for chain in [chain for chain, where in self._hints.items() if where == name]:
                del self._hints[chain]

    def has_forgotten(self, name: str | None, job: Job) -> bool:
        """Whether this replica has served the parent of the job, and lost it since."""
        at, past = self.forgot.get(name or ""), job.scene.past
        if at is None or not isinstance(past, Turn):
            return False
        return (past.response.completed_at or past.response.created_at) < at

    def hint(self, chain: str) -> str | None:
        """The replica that has the history of this chain, as far as this process knows."""
        return self._hints.get(chain)

    def _note_head(self, head: bytes, tokens: int, now: float) -> None:
        self._work.add(tokens, now)
        self._heads.setdefault(head, Work()).add(tokens, now)
        self._heads.move_to_end(head)
        if len(self._heads) > HEADS_MAX:
            self._heads.popitem(last=False)


class Visit:
    """A job on its way to a replica and there. What it is expected to compute counts as work from the start, so that
    others do not choose the same replica before its first token."""

    def __init__(self, pace: Pace, prompt_tokens: int, held_tokens: int, now: float) -> None:
        self._pace = pace
        self._prompt_tokens = prompt_tokens
        self._held_tokens = held_tokens
        self._expected = max(0, prompt_tokens - held_tokens)
        self._began_at = now
        self._first_at: float | None = None
        # As the replica says; None: not at all.
        self._cached_tokens: int | None = None
        pace.work.add(self._expected, now)

    @property
    def found_little(self) -> bool:
        """Whether the replica had next to nothing of a history that it should have."""
        held, cached = self._held_tokens, self._cached_tokens
        return held >= HELD_TOKENS_MIN and cached is not None and cached < held / 4

    def begin(self, now: float) -> None:
        """It has a slot."""
        self._began_at = now

    def note_first(self, now: float) -> None:
        """The first token has come."""
        self._first_at = now

    def note_cached(self, cached_tokens: int | None) -> None:
        """The replica says so; the last word counts."""
        self._cached_tokens = cached_tokens

    def end(self, now: float) -> None:
        """It is over, and what was expected becomes what was measured."""
        first_at, cached = self._first_at, self._cached_tokens
        if first_at is None:
            self._pace.work.add(-self._expected, now)
            return
        self._pace.note_end(now - self._began_at)
        if cached is not None:
            computed = max(0, self._prompt_tokens - cached)
            self._pace.work.add(computed - self._expected, now)
            self._pace.note_first_token(computed, first_at - self._began_at, now)


def head_digest(head: Head) -> bytes:
    """What prompts with the same instructions and tools have in common."""
    digest = blake2b(head.tools.echo, digest_size=16)
    digest.update(b"" if head.instructions is None else head.instructions.encode())
    return digest.digest()


def tokens_of(prompt: Prompt) -> int:
    """How long it is; of messages, about."""
    return prompt.tokens if isinstance(prompt, Messages) else prompt.length


def held_tokens(job: Job) -> int:
    """How many tokens of the prompt the replica with its history has read. After a compaction there is no such replica:
    what stands for the history is new."""
    past = job.scene.past
    if past is not None and past.warm is not None:
        return tokens_of(past.warm.prompt)
    is_fresh = past is None and job.route is not None
    return 0 if is_fresh else tokens_of(job.prompt)
