"""What may leave, and when? Holds what the model wrote until the guards have let it pass.

Theory of operation. Each round of a turn brings something new for the model; `ask` shows that to the guards of the
input, in a task of its own, beside rendering, prefill and sampling. What is read meanwhile is held here, before it gets
a number, so that heartbeats go on and never overtake it. Once the verdict is in, an answer is watched in windows: a
window is full when it has enough new characters, or when they have waited long enough, or when the item is whole. It is
watched together with the end of the previous window, which was held back for that: so a text that is no longer than
this overlap is found wherever the windows are cut, and not even its beginning has left. Of JSON, the arguments of a
call above all, the guards see what it says as well: escapes hide nothing. The overlap is then as long in those words.

    the gate is    when                                  what the model writes
    closed         the input's verdict is awaited        is held, up to a limit; then the engine waits
    open           it has passed                         leaves window by window
    shut           something was blocked, or a guard     is dropped, and so is everything after it
                   failed

A call that a person has approved is made before its round: it waits for the verdict on the items that approve it.

When the gate is shut, the turn gets a notice with the reason, which also stops the engine; `decide` does the rest. Only
new characters are counted: an overlap counts once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Sequence
from time import monotonic

from msgspec import structs

from segue.errors import ApiError, InvalidRequest, ServerFault
from segue.guards.texts import (
    ESCAPE_CHARS_MAX,
    begins_json,
    chars_written,
    forms_of,
    has_passed,
    new_items,
    texts_of,
    texts_of_head,
)
from segue.seams.guard import Verdict
from segue.seams.model import ItemClosed, ItemOpened, ItemText, Parsed, Scene, TurnClosed
from segue.seams.prompt import NO_IDS
from segue.turn.notices import Abort, Filtered, Notice
from segue.turn.plan import Plan
from segue.turn.running import Running
from segue.wire.items import Item

log = logging.getLogger(__name__)

# What is held for a verdict at most: a long answer. Beyond it the engine is not read.
HELD_CHARS_MAX = 256 * 1024
# A slow model fills a window slowly; its text is not held longer than this while it goes on.
HELD_S_MAX = 1.0
# How much of a window is kept back and watched again with the next.
OVERLAP_SHARE = 4
# Items with more bytes than this are read for their texts in a thread.
INLINE_BYTES = 64 * 1024

PROBLEM = "The server had an error while it checked your request."


class GuardGate:
    """The `Gate` of one turn."""

    def __init__(self, plan: Plan, running: Running) -> None:
        self._plan = plan
        self._guards = guards = plan.guards
        self._running = running
        self._tally = plan.tally
        self._asking: asyncio.Task[None] | None = None
        # Items that the guards have seen before their round, because they approve a call or were found by one.
        self._shown: dict[int, Item] = {}
        self._is_head_shown = False
        self.is_shut = False
        # What was read and waits for the verdict, or for its place after what is watched.
        self._held: deque[Parsed] = deque()
        self._held_chars = 0
        # How many characters of a window are kept back and watched again with the next.
        self._overlap = guards.window_chars // OVERLAP_SHARE if guards.outputs else 0
        # With how many characters the model has written those; and whether the open item is JSON, once that is known.
        self._kept_chars = self._overlap
        self._is_json: bool | None = None
        # The open item as far as it has not left: its beginning, if that waits too, and its text.
        self._opened: ItemOpened | None = None
        self._window: deque[ItemText] = deque()
        self._window_chars = 0
        # How many of these characters no guard has seen, and since when the first of them waits.
        self._fresh_chars = 0
        self._fresh_at = 0.0
        # What may leave; and whether an item has begun to leave and not ended.
        self._passed: list[Parsed] = []
        self._is_item_out = False

    @property
    def names(self) -> tuple[str, ...]:
        # All of them have let it pass, or the turn has not come this far.
        return self._guards.names if self._asking is not None and self._asking.done() else ()

    # --- the input ---

    def ask(self, scene: Scene, *, is_first: bool) -> None:
        guards = self._guards
        resolved = self._plan.resolved
        if not guards.inputs:
            return
        items = self._unseen(scene, is_first=is_first)
        texts: list[str] = []
        if is_first and not self._is_head_shown:
            self._is_head_shown = True
            parent = resolved.parent
            passed = parent if parent is not None and has_passed(parent, guards.names) else None
            texts = texts_of_head(resolved.head, self._plan.response, passed)
        self._asking = asyncio.create_task(self._check(texts, items))

    async def clear(self, scene: Scene, *, is_first: bool) -> bool:
        """The guards check these items now; the round that follows shows them the rest."""
        self.ask(scene, is_first=is_first)
        self._shown |= {id(item): item for item in self._unseen(scene, is_first=is_first)}
        await self._verdict()
        return not self.is_shut

    async def admit(self, items: Sequence[Item]) -> bool:
        """The guards check these items now; the round that follows does not show them again."""
        if self._guards.inputs and not self.is_shut:
            self._shown |= {id(item): item for item in items}
            await self._check([], items)
        return not self.is_shut

    def _unseen(self, scene: Scene, *, is_first: bool) -> list[Item]:
        items = new_items(scene, self._guards.names) if is_first else scene.given
        return [item for item in items if id(item) not in self._shown]

    async def _check(self, head_texts: list[str], items: Sequence[Item]) -> None:
        try:
            if sum(len(item.raw) for item in items) <= INLINE_BYTES:
                texts = head_texts + texts_of(items)
            else:
                texts = head_texts + await asyncio.to_thread(texts_of, items)
            self._tally.guard_chars_checked += sum(map(len, texts))
            reason = await _first_objection(
                [guard.check(texts) for guard in self._guards.inputs if texts]
            )
        except Exception as fault:
            self._give_up(fault)
            return
        if reason is not None:
            log.info("turn %s: input blocked by a guard: %s", self._plan.id, reason)
            error = InvalidRequest(
                f"The input was blocked by a guard of this server: {reason}.",
                code="invalid_prompt",
                param="input",
            )
            self._shut(Abort(error))

    async def _verdict(self) -> None:
        """Wait until the guards of the input have decided."""
        if self._asking is not None and not self._asking.done():
            await asyncio.wait([self._asking])

    # --- the answer ---

    async def feed(self, parsed: list[Parsed]) -> list[Parsed]:
        """What may leave now. May be cancelled while it waits, and then loses nothing."""
        self._hold(parsed)
        is_asking = self._asking is not None and not self._asking.done()
        if is_asking and self._held_chars <= HELD_CHARS_MAX:
            return []
        return await self.close([])

    async def close(self, parsed: list[Parsed]) -> list[Parsed]:
        """What may leave of the rest, after the verdict."""
        self._hold(parsed)
        await self._verdict()
        await self._move_held()
        return self._pop_passed()

    def drop(self) -> list[Parsed]:
        self.is_shut = True
        return self._pop_passed()

    async def vet(self, text: str) -> bool:
        await self._verdict()
        if self.is_shut or not self._guards.outputs:
            return not self.is_shut
        self._tally.guard_chars_watched += len(text)
        return await _first_objection([guard.watch(text) for guard in self._guards.outputs]) is None

    async def leave(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
            await self._verdict()

    def _hold(self, parsed: Sequence[Parsed]) -> None:
        self._held.extend(parsed)
        self._held_chars += sum(len(part.text) for part in parsed if isinstance(part, ItemText))

    async def _move_held(self) -> None:
        """Move what is held through the window, in order; each step is whole before the next wait."""
        while self._held and not self.is_shut:
            match self._held[0]:
                case ItemOpened() as opened:
                    self._opened = opened
                    self._is_json = opened.is_call or None
                case ItemText() as wrote:
                    self._add(wrote)
                case ItemClosed():
                    if not await self._check_window():
                        return
                    self._pass_window(0)
                    self._passed.append(self._held[0])
                    self._is_item_out = False
                case TurnClosed() as end:
                    self._passed.append(end)
            self._held.popleft()
            if self._is_full and await self._check_window():
                self._pass_window(self._kept_chars)

    @property
    def _is_full(self) -> bool:
        if not self._guards.outputs:
            return bool(self._window)
        is_late = self._fresh_chars > 0 and monotonic() - self._fresh_at > HELD_S_MAX
        return is_late or self._fresh_chars >= self._guards.window_chars - self._overlap

    def _add(self, wrote: ItemText) -> None:
        if not self._fresh_chars:
            self._fresh_at = monotonic()
        self._held_chars -= len(wrote.text)
        self._window.append(wrote)
        self._window_chars += len(wrote.text)
        self._fresh_chars += len(wrote.text)

    async def _check_window(self) -> bool:
        """Show the window to the guards of the answer, if there is anything new in it; False if they block it."""
        if not self._fresh_chars or not self._guards.outputs:
            return True
        text = "".join(wrote.text for wrote in self._window)
        if self._is_json is None:
            self._is_json = begins_json(text)
        forms = forms_of(text) if self._is_json else [text]
        overlap = self._overlap + (ESCAPE_CHARS_MAX if self._is_json else 0)
        self._kept_chars = chars_written(forms, overlap)
        try:
            outputs = self._guards.outputs
            reason = await _first_objection(
                [guard.watch(form) for guard in outputs for form in forms]
            )
        except Exception as fault:
            self._give_up(fault)
            return False
        self._tally.guard_chars_watched += self._fresh_chars
        self._fresh_chars = 0
        if reason is not None:
            log.info("turn %s: answer blocked by a guard: %s", self._plan.id, reason)
            self._shut(Filtered())
        return reason is None

    def _pass_window(self, kept_chars: int) -> None:
        """Pass the window on, except its last characters, which are checked again with the next."""
        if self._opened is not None and (self._window_chars > kept_chars or not kept_chars):
            self._passed.append(self._opened)
            self._opened = None
            self._is_item_out = True
        while self._window and self._window_chars > kept_chars:
            first = self._window.popleft()
            spare = self._window_chars - kept_chars
            if spare < len(first.text):
                if first.logprobs:
                    # Its logprobs belong to it as a whole.
                    self._window.appendleft(first)
                    return
                self._window.appendleft(ItemText(first.text[spare:]))
                first = structs.replace(first, text=first.text[:spare])
            self._passed.append(first)
            self._window_chars -= len(first.text)

    def _pop_passed(self) -> list[Parsed]:
        """What may leave, once; of a gate that is shut, with an end to what has begun."""
        passed = self._passed
        self._passed = []
        if self.is_shut:
            self._held.clear()
            self._window.clear()
            self._opened = None
            self._held_chars = self._window_chars = self._fresh_chars = 0
            if self._is_item_out:
                passed += [ItemClosed(NO_IDS, is_cut=True), TurnClosed(NO_IDS)]
                self._is_item_out = False
        return passed

    def _give_up(self, fault: Exception) -> None:
        """A guard could not decide: nothing passes unchecked."""
        if not isinstance(fault, ApiError):
            log.exception("turn %s: a guard failed", self._plan.id, exc_info=fault)
            fault = ServerFault(PROBLEM)
        self._shut(Abort(fault))

    def _shut(self, why: Notice) -> None:
        self.is_shut = True
        self._running.notify(why)


async def _first_objection(checks: Sequence[Awaitable[Verdict]]) -> str | None:
    """The first reason to block; None if all pass. An error counts more than a pass, and less than a block."""
    if len(checks) == 1:
        return (await checks[0]).reason
    results = await asyncio.gather(*checks, return_exceptions=True)
    for result in results:
        if isinstance(result, Verdict) and result.reason is not None:
            return result.reason
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return None
