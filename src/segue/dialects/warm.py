"""How is a prompt made from what is kept, in every family?

A prompt is a head, then rounds: what was given, and if the model spoke, its cue and what it said. What a
turn keeps warm stands for everything up to its end, so rendering begins behind the last ancestor that is
still warm under the same head, and with nothing warm at the head itself. It is one way, not two: the
walk is the same, only its beginning differs. That is why warmth cannot change a token.

What the model said is never encoded again: its kept ids are put in place, unless another dialect or
vocabulary made them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from segue.turn.values import (
    NO_TOKENS,
    Head,
    IdArray,
    Rendered,
    Round,
    Scene,
    Tokens,
    Turn,
    Warm,
    id_array,
)
from segue.wire.items import Item


@dataclass(frozen=True, slots=True)
class Hand:
    """How one family writes; the rest is the same for all."""

    fingerprint: str
    # Makes the model speak.
    cue: IdArray[int]
    # The head and the first items of a chain, together: some families write a first system message as the head.
    begin: Callable[[Head, Sequence[Item], int], IdArray[int]]
    # Items that are not the first of a chain.
    given: Callable[[Sequence[Item]], IdArray[int]]
    # What stands behind the cue where no ids were kept for these items, up to where history goes on.
    wrote: Callable[[Sequence[Item]], IdArray[int]]
    # Whether two heads are written alike.
    is_alike: Callable[[Head, Head], bool]


def render(hand: Hand, scene: Scene) -> Rendered:
    """The prompt for this scene, encoding only what was never encoded or sampled before."""
    warm, later = _last_warm(hand, scene)
    context = warm or NO_TOKENS
    reused = context.length
    tokenized = 0
    for n, round in enumerate([*later, Round(scene.given)]):
        new = (
            hand.begin(scene.head, round.given, scene.root_at)
            if warm is None and n == 0
            else hand.given(round.given)
        )
        context = context.plus(new)
        tokenized += len(new)
        if round.did_sample:
            is_kept = round.fingerprint == hand.fingerprint
            said = kept_ids(round) if is_kept else hand.wrote(round.wrote)
            context = context.plus(hand.cue + said)
            reused += len(said) if is_kept else 0
            tokenized += 0 if is_kept else len(said)
    return Rendered(context, hand.cue, tokenized, reused)


def _last_warm(hand: Hand, scene: Scene) -> tuple[Tokens | None, list[Round]]:
    """The longest prompt that is still warm, and the rounds behind it."""
    later: list[Turn] = []
    turn = scene.past
    while turn is not None:
        if (tokens := _usable(hand, scene.head, turn.warm)) is not None:
            return tokens, [*_rounds(later), *scene.rounds]
        later.append(turn)
        turn = turn.parent
    if (tokens := _usable(hand, scene.head, scene.recalled)) is not None:
        return tokens, list(scene.rounds[1:])
    return None, [*_rounds(later), *scene.rounds]


def _rounds(turns: list[Turn]) -> list[Round]:
    return [round for turn in reversed(turns) for round in turn.rounds]


def _usable(hand: Hand, head: Head, warm: Warm | None) -> Tokens | None:
    """The prompt that was kept, if it was made by the same hand under a head that is written alike."""
    if warm is None or warm.fingerprint != hand.fingerprint or not isinstance(warm.prompt, Tokens):
        return None
    return warm.prompt if warm.head is head or hand.is_alike(warm.head, head) else None


def is_alike_by_words(one: Head, other: Head) -> bool:
    """For families in which only instructions and tools are written into the prompt.

    The choice of a tool is not: tools stay in the prompt also where none may be called, so that its beginning stays.
    """
    return one.instructions == other.instructions and (
        one.tools is other.tools or one.tools.raw == other.tools.raw
    )


def kept_ids(round: Round) -> IdArray[int]:
    """What the model said in this round, to the id, with what closed its turn."""
    joined = id_array()
    for ids in (*round.ids, round.tail):
        joined.extend(ids)
    return joined
