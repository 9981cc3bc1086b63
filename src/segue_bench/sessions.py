"""What do coding agents really send? Recorded sessions as numbers, and requests with exactly their sharing.

`agent_sessions.json` (with its notice) has the shapes of 120 sessions: how long each prompt was, and how much of an
earlier one it began with. `plan` makes steps of a session: what a client that sends its whole history sends, what one
sends that names the response before it, and what kind of step it is. Texts are words drawn by seed, so that the same
source is the same text; `tokens_per` divides all lengths. Values only: no socket, no clock.

    root          nothing of an earlier prompt
    continuation  all of its parent, which has no other continuation yet
    fork          all of its parent, which has one
    reset         a part of its parent: a compaction, an edited history, changed instructions
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

# Sharing was measured in blocks of so many tokens: no more than one is missing where all was shared.
BLOCK = 64
# What a chat template writes around a message, about.
MESSAGE_TOKENS = 5
# The least that a client or a model says, in tokens.
SAID_TOKENS_MIN = 4
ANSWER_TOKENS_MIN = 4

StepKind = Literal["root", "continuation", "fork", "reset"]


class SessionTurn(Struct, frozen=True, array_like=True):
    """One request: the earlier one that it shares most with (-1: none), the shared tokens, all tokens, the answer."""

    parent: int
    shared: int
    input: int
    output: int
    at_s: float


class Session(Struct, frozen=True):
    """One session; `tools` and `system` are the tokens of its head."""

    id: str
    tools: int
    system: int
    turns: list[SessionTurn]


class _Sessions(Struct, frozen=True):
    sessions: list[Session]


class Said(Struct, frozen=True):
    """The first words of a source, as a message of the user."""

    source: str
    tokens: int


class Answered(Struct, frozen=True):
    """What the model answered at this step."""

    step: int
    tokens: int


Part = Said | Answered


class Step(Struct, frozen=True, kw_only=True):
    """One request of a session; lengths are divided already."""

    number: int
    kind: StepKind
    # The instructions and tools, as a source of words: they are sent with every request.
    head: Said
    # The step that a chain goes on from; None: the request stands alone.
    parent: int | None
    # All that the model reads after the head, and what of it comes after the parent and its answer.
    history: tuple[Part, ...]
    new: tuple[Part, ...]
    output_tokens: int
    at_s: float


def load_sessions(path: Path | None = None) -> list[Session]:
    """All sessions of a file; without one, of the file that is shipped."""
    source = files("segue_bench") / "agent_sessions.json" if path is None else path
    return msgspec.json.decode(source.read_bytes(), type=_Sessions).sessions


def plan(session: Session, tokens_per: int = 1, turns_max: int | None = None) -> list[Step]:
    """The steps of a session, in order."""
    turns = session.turns[:turns_max]
    steps: list[Step] = []
    continued: set[int] = set()
    for number, turn in enumerate(turns):
        source = f"{session.id} {number}"
        prompt_tokens = max(SAID_TOKENS_MIN, turn.input // tokens_per)
        output = _output_tokens(turns, number, tokens_per)
        parent = steps[turn.parent] if turn.parent >= 0 else None
        kind: StepKind = "reset"
        at: int | None = None
        history: tuple[Part, ...] = ()
        if parent is None:
            kind = "root"
            head = Said(
                source, min((session.tools + session.system) // tokens_per, prompt_tokens * 4 // 5)
            )
        elif turns[turn.parent].input - turn.shared <= BLOCK:
            kind = "fork" if parent.number in continued else "continuation"
            continued.add(parent.number)
            history = (*parent.history, Answered(parent.number, parent.output_tokens))
            head = parent.head
            at = parent.number
        else:
            head, history = _kept(parent, turn.shared // tokens_per, source)
            at = _ancestor(steps, parent, head, history)
        said = prompt_tokens - head.tokens - sum(part.tokens + MESSAGE_TOKENS for part in history)
        new = Said(source, max(SAID_TOKENS_MIN, said - MESSAGE_TOKENS))
        before = 0 if at is None else len(steps[at].history) + 1
        steps.append(
            Step(
                number=number,
                kind=kind,
                head=head,
                parent=at,
                history=(*history, new),
                new=(*history[before:], new),
                output_tokens=output,
                at_s=turn.at_s,
            )
        )
    return steps


def _output_tokens(turns: Sequence[SessionTurn], number: int, tokens_per: int) -> int:
    """What was answered, cut to what the next prompt kept of it: reasoning is often dropped."""
    turn = turns[number]
    grown = [
        child.input - turn.input
        for child in turns
        if child.parent == number and child.input > turn.input
    ]
    room = min(grown, default=turn.output) // tokens_per - 2 * MESSAGE_TOKENS - SAID_TOKENS_MIN
    return max(ANSWER_TOKENS_MIN, min(turn.output // tokens_per, room))


def _kept(parent: Step, shared: int, source: str) -> tuple[Said, tuple[Part, ...]]:
    """The head and the parts that are left of the parent when only so many tokens of its beginning are kept."""
    left = shared - parent.head.tokens
    if left < 0:
        # The instructions themselves changed.
        return Said(source, parent.head.tokens), ()
    kept: list[Part] = []
    for part in parent.history:
        if left < part.tokens + MESSAGE_TOKENS:
            if isinstance(part, Said) and left > SAID_TOKENS_MIN + MESSAGE_TOKENS:
                kept.append(Said(part.source, left - MESSAGE_TOKENS))
            break
        kept.append(part)
        left -= part.tokens + MESSAGE_TOKENS
    return parent.head, tuple(kept)


def _ancestor(
    steps: Sequence[Step], parent: Step, head: Said, history: tuple[Part, ...]
) -> int | None:
    """The latest step of the parent's chain that is kept as a whole, with its answer."""
    at: int | None = parent.number
    while at is not None:
        step = steps[at]
        whole = (*step.history, Answered(at, step.output_tokens))
        if step.head == head and history[: len(whole)] == whole:
            return at
        at = step.parent
    return None


class SeededText:
    """Words by source; with words that are one token each, a text has as many tokens as it was asked for."""

    def __init__(self, words: Sequence[str]) -> None:
        self._words = words

    def text(self, said: Said) -> str:
        """The first words of this source."""
        draw = random.Random(said.source)
        return " ".join(draw.choices(self._words, k=said.tokens))
