"""How does the engine read a tool's output before the tool has ended? What is there of it goes to the engine's cache.

In: what a tool shows of its result while it works. Out: jobs of the next prompt up to a place from which on nothing
changes what stands before it, and no more than one sampled token, which nobody reads. The prompt of the next round is
made as ever, from the whole result: what was read ahead only saves the engine work, and where it does not fit, it was
work in vain. It never changes an answer, delays a tool, or takes the last slot from a job that somebody waits for.

That place is before a single space after the last whole word: text is cut there by every vocabulary that we know. The
prompt is made twice, with the text up to there and with all that there is; what both begin with is read.
"""

from __future__ import annotations

import asyncio
import logging
import re
from bisect import bisect_left
from collections.abc import Callable
from contextlib import aclosing
from time import perf_counter

from msgspec import structs

from segue.errors import ApiError
from segue.seams.prompt import NO_IDS, IdArray, Tokens
from segue.turn.plan import Plan, Span
from segue.turn.resources import NextRound
from segue.wire.codec import encode
from segue.wire.items import Item

log = logging.getLogger(__name__)

# So much more must be there before it is read: a block of an engine's cache has up to 128 tokens. What is not read
# when the tool ends is what the first token waits for, so it is read as often as it may: after a read, half as long as
# it took nothing is read. An engine that keeps conversations gets many small parts, another one few and long ones.
STEP_CHARS = 1_024
PAUSE_SHARE = 0.5
# How long the request of the turn waits at most for a read that is under way: as long as the last one took, and no
# longer than this. The engine is about to have what is needed anyway.
WAIT_S_MAX = 0.1
# Beyond this it is read with the rest: making the prompt takes longer than it saves.
CHARS_MAX = 1 << 20
# No break in so much text: then there is no place to cut it.
LOOK_BACK = 2_048
_BREAK = re.compile(r"\S (?=\S)")


# The answers of a round, with this text where the unfinished output stands.
MakeItems = Callable[[str], tuple[Item, ...]]


def stable_end(text: str) -> int:
    """How much of this text is cut into tokens alike whatever follows; 0: nothing that we know of."""
    breaks = [found.start() for found in _BREAK.finditer(text, max(0, len(text) - LOOK_BACK))]
    return breaks[-1] + 1 if breaks else 0


def common_beginning(prompt: Tokens, other: Tokens) -> Tokens:
    """What both prompts begin with."""
    chunks, others = _nodes(prompt), _nodes(other)
    shared: Tokens | None = None
    for node, same in zip(chunks, others, strict=False):
        if node is not same:
            break
        shared = node
    length = 0 if shared is None else shared.length
    ids, other_ids = _since(chunks, length), _since(others, length)
    most = min(len(ids), len(other_ids))
    # Many are compared at once.
    count = bisect_left(range(1, most + 1), True, key=lambda n: ids[:n] != other_ids[:n])
    return Tokens(shared, ids[:count], length + count)


def _nodes(prompt: Tokens) -> list[Tokens]:
    found: list[Tokens] = []
    node: Tokens | None = prompt
    while node is not None:
        found.append(node)
        node = node.before
    found.reverse()
    return found


def _since(nodes: list[Tokens], length: int) -> IdArray[int]:
    joined = NO_IDS[:]
    for node in nodes:
        if node.length > length:
            joined.extend(node.ids)
    return joined


class ReadAhead:
    """Of the calls of one round: the text of the first call that has not ended is read."""

    def __init__(self, plan: Plan, following: NextRound) -> None:
        self._plan = plan
        self._following = following
        # The text that was shown last, and what makes the answers of it; and the characters of outputs before it.
        self._shown: tuple[str, MakeItems] = ("", lambda text: ())
        self._chars_before = self._read_chars = 0
        # What the engine has read: up to where, how much of it is new, which text of which answer that is.
        self._length = self._tokens = self._place = 0
        self._text = ""
        # When it may read again, and how long the last read took; whether one is at the engine, and whether the tool
        # has ended.
        self._read_at = self._took_s = 0.0
        self._is_asking = self._is_over = False
        self._task: asyncio.Task[None] | None = None

    def show(self, text: str, make: MakeItems) -> None:
        """This is there of an output; `make` gives the answers of the round with such a text in its place."""
        if len(text) < len(self._shown[0]):
            # The next output has begun.
            self._chars_before += len(self._shown[0])
        self._shown = (text, make)
        if self._task is None and self._is_due():
            self._task = asyncio.create_task(self._follow(), name="read ahead")

    def _is_due(self) -> bool:
        chars = self._chars_before + len(self._shown[0])
        return not self._is_over and self._read_chars + STEP_CHARS <= chars <= CHARS_MAX

    async def _follow(self) -> None:
        """Read what was shown, and again as long as there is more meanwhile."""
        try:
            while self._is_due():
                if (pause_s := self._read_at - perf_counter()) > 0:
                    await asyncio.sleep(pause_s)
                text, make = self._shown
                self._read_chars = self._chars_before + len(text)
                began = perf_counter()
                if not await self._read(text, make):
                    self._read_chars = CHARS_MAX
                self._took_s = perf_counter() - began
                self._read_at = began + (1 + PAUSE_SHARE) * self._took_s
        except ApiError as error:
            # The job of the turn itself will say it again, if it is still true.
            log.info("turn %s: nothing is read ahead: %s", self._plan.id, error.message)
            self._read_chars = CHARS_MAX
        except Exception:
            log.exception("turn %s: reading ahead failed", self._plan.id)
            self._read_chars = CHARS_MAX
        finally:
            self._task = None

    async def _read(self, text: str, make: MakeItems) -> bool:
        """Let the engine read the answers up to the last stable place; False where that is not possible."""
        end = stable_end(text)
        if not end:
            return True
        items = make(text)
        begun, all_there = await self._prompt(make(text[:end])), await self._prompt(items)
        if begun is None or all_there is None:
            return False
        prompt = common_beginning(begun, all_there)
        known = max(self._length, self._before(prompt))
        if prompt.length <= known:
            return True
        job = structs.replace(
            self._following.job,
            prompt=prompt,
            output_tokens_max=0,
            schema=None,
            is_ahead=True,
            route=self._plan.tally.started.route,
        )
        began, was_asked = perf_counter(), False
        self._is_asking = True
        try:
            async with aclosing(self._plan.model.engine.sample(job)) as pieces:
                async for _ in pieces:
                    was_asked = True
        finally:
            self._is_asking = False
        if was_asked:
            self._tokens += prompt.length - known
            self._plan.tally.tokens_ahead += prompt.length - known
            self._length, self._text, self._place = prompt.length, text[:end], len(items) - 1
            self._plan.tally.spans.append(Span("ahead", began, perf_counter()))
        return True

    def _before(self, prompt: Tokens) -> int:
        """How much of it the engine has read with the round before."""
        before = self._following.job.prompt
        return min(before.length, prompt.length) if isinstance(before, Tokens) else 0

    async def _prompt(self, items: tuple[Item, ...]) -> Tokens | None:
        """The next prompt if these are the answers, without the cue; None where there are no ids."""
        scene = self._following.scene(items)
        rendered = await asyncio.to_thread(self._plan.model.dialect.render, scene)
        context = rendered.context
        return context if isinstance(context, Tokens) and not context.all_images() else None

    async def stop(self) -> None:
        """Nothing more is read; what the engine has read by now, it keeps."""
        if (task := self._task) is not None:
            self._is_over = True
            try:
                if self._is_asking:
                    await asyncio.wait((task,), timeout=min(self._took_s, WAIT_S_MAX))
            finally:
                task.cancel()
            # Not the task itself: what cancels this one must not be taken for what has ended that one.
            await asyncio.wait((task,))

    def settle(self, answers: tuple[Item, ...]) -> None:
        """What these answers do not go on from was read in vain."""
        said = encode(self._text)[1:-1]
        if self._place >= len(answers) or said not in bytes(answers[self._place].raw):
            self._plan.tally.tokens_ahead_lost += self._tokens


def reads_ahead(following: NextRound) -> bool:
    """Whether the engine gains by it: it takes ids, and says that it keeps what it has read."""
    return isinstance(following.job.prompt, Tokens) and following.finish.cached_tokens is not None
