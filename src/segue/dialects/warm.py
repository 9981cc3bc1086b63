"""How is a prompt made from what is kept, in every family?

A prompt is a head, then rounds: what was given, and if the model spoke, its cue and what it said. What a
turn keeps warm stands for everything up to its end, so rendering begins behind the last ancestor that is
still warm under the same head, and with nothing warm at the head itself. It is one way, not two: the
walk is the same, only its beginning differs. That is why warmth cannot change a token.

What the model said is never encoded again: its kept ids are put in place, unless another dialect or
vocabulary made them.

Some families forget: at a *turning* (the user speaks again, or the model gave its final answer) what was thought
before it leaves the prompt. Then what is warm holds only up to the first thought that is forgotten, and everything
from there on is rendered again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from segue.turn.values import (
    NO_TOKENS,
    Head,
    IdArray,
    Past,
    Rendered,
    Round,
    Scene,
    Tokens,
    Warm,
    id_array,
    since_fresh,
)
from segue.wire.items import Item, Reasoning
from segue.wire.kinds import call_of, called, hosted_call_of

# Who was called, by the id of the call, before the items that are written; nothing for an unknown id.
NameOf = Callable[[str], str]


def never(items: Sequence[Item]) -> int:
    """For families that forget nothing."""
    return 0


def has_thought(items: Sequence[Item]) -> bool:
    """Whether there is reasoning among these items."""
    return any(isinstance(item.value, Reasoning) for item in items)


def kept_ids(round: Round, forgotten: int = 0) -> IdArray[int]:
    """What the model said in this round, to the id, with what closed its turn."""
    assert not forgotten, "this family forgets nothing"
    joined = id_array()
    for ids in (*round.ids, round.tail):
        joined.extend(ids)
    return joined


@dataclass(frozen=True, slots=True)
class Hand:
    """How one family writes; the rest is the same for all."""

    fingerprint: str
    # Makes the model speak.
    cue: IdArray[int]
    # The head and the first items of a chain, together: some families write a first system message as the head.
    begin: Callable[[Head, Sequence[Item], int, NameOf], IdArray[int]]
    # Items that are not the first of a chain.
    given: Callable[[Sequence[Item], NameOf], IdArray[int]]
    # What stands behind the cue where no ids were kept for these items, up to where history goes on.
    wrote: Callable[[Sequence[Item]], IdArray[int]]
    # Whether two heads are written alike.
    is_alike: Callable[[Head, Head], bool]
    # How many of these items stand up to the last turning among them; 0: there is none.
    turning: Callable[[Sequence[Item]], int] = never
    # The kept ids of a round, less the thoughts among its first items.
    kept: Callable[[Round, int], IdArray[int]] = kept_ids
    # Whether the model left a thought in this round, be it an empty one that is no item.
    thinks: Callable[[Round], bool] = lambda round: has_thought(round.wrote)


def render(hand: Hand, scene: Scene) -> Rendered:
    """The prompt for this scene, encoding only what was never encoded or sampled before."""
    base = _base(hand, scene)
    rounds = [*base.later, Round(scene.given)]
    context = base.prompt or NO_TOKENS
    reused = context.length
    tokenized = 0
    for n, (round, counts) in enumerate(zip(rounds, _forgotten(hand, rounds), strict=True)):
        given = without_thoughts(round.given, counts[0])
        name_of = _names(rounds, n, base.turn)
        new = (
            hand.begin(scene.head, given, scene.root_at, name_of)
            if base.prompt is None and n == 0
            else hand.given(given, name_of)
        )
        context = context.plus(new)
        tokenized += len(new)
        if round.did_sample:
            is_kept = round.fingerprint == hand.fingerprint
            parsed = (
                hand.kept(round, counts[1])
                if is_kept
                else hand.wrote(without_thoughts(round.wrote, counts[1]))
            )
            spoken = hand.cue + parsed
            context = context.plus(spoken)
            reused += len(spoken) if is_kept else 0
            tokenized += 0 if is_kept else len(spoken)
    return Rendered(context, hand.cue, tokenized, reused)


def without_thoughts(items: Sequence[Item], forgotten: int) -> Sequence[Item]:
    """These items, less the reasoning among the first so many."""
    if not forgotten:
        return items
    return [
        item
        for n, item in enumerate(items)
        if n >= forgotten or not isinstance(item.value, Reasoning)
    ]


def _forgotten(hand: Hand, rounds: Sequence[Round]) -> list[tuple[int, int]]:
    """In each round, up to where thoughts are forgotten: in what was given, and in what was written."""
    counts: list[tuple[int, int]] = []
    is_turned = False
    for round in reversed(rounds):
        wrote = len(round.wrote) if is_turned else hand.turning(round.wrote)
        is_turned = is_turned or wrote > 0
        given = len(round.given) if is_turned else hand.turning(round.given)
        is_turned = is_turned or given > 0
        counts.append((given, wrote))
    counts.reverse()
    return counts


def _names(rounds: Sequence[Round], count: int, turn: Past | None) -> NameOf:
    """Finds a call by its id, the last one first: in the first so many rounds, then in the turns before."""

    def name_of(call_id: str) -> str:
        for item in _backwards(rounds, count, turn):
            if hosted_call_of(item.value) == call_id:
                return called(item.value)
            call = call_of(item.value)
            if call is not None and call.call_id == call_id:
                return called(item.value) or call.kind
        return ""

    return name_of


def _backwards(rounds: Sequence[Round], count: int, turn: Past | None) -> Iterator[Item]:
    for n in range(count - 1, -1, -1):
        yield from reversed(rounds[n].wrote)
        yield from reversed(rounds[n].given)
    while turn is not None:
        for round in reversed(turn.rounds):
            yield from reversed(round.wrote)
            yield from reversed(round.given)
        turn = turn.parent


# --- where to begin -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Base:
    """A prompt that still holds, the rounds behind it, and the turn that it was kept with."""

    prompt: Tokens | None
    later: Sequence[Round]
    turn: Past | None = None


def _base(hand: Hand, scene: Scene) -> _Base:
    """The longest prompt that is still warm and of which nothing is forgotten."""
    later: list[Past] = []
    turn = scene.past
    is_turned = hand.turning(scene.given) > 0 or _is_turned(hand, scene.rounds)
    while turn is not None:
        prompt = _usable(hand, scene.head, turn.warm)
        if prompt is not None:
            rounds = [*_rounds(later), *scene.rounds]
            last = turn.rounds[-1]
            is_turned = is_turned or hand.turning(last.wrote) > 0
            if not is_turned:
                return _Base(prompt, rounds, turn)
            is_held = not _is_forgetful(hand, turn)
            if is_held and not hand.thinks(last):
                return _Base(prompt, rounds, turn)
            if is_held and last.did_sample and prompt.before is not None:
                # All but what the model said last, which `warm_after` has put behind the rest as one chunk.
                return _Base(prompt.before, [replace(last, given=()), *rounds], turn)
        is_turned = is_turned or _is_turned(hand, turn.rounds)
        later.append(turn)
        turn = turn.above
    prompt = _usable(hand, scene.head, scene.recalled)
    if prompt is not None and not _is_recall_forgotten(hand, scene):
        return _Base(prompt, scene.rounds[1:])
    return _Base(None, since_fresh([*_rounds(later), *scene.rounds]))


def _is_turned(hand: Hand, rounds: Sequence[Round]) -> bool:
    return any(hand.turning(round.given) or hand.turning(round.wrote) for round in rounds)


def _is_forgetful(hand: Hand, turn: Past) -> bool:
    """Whether a turning that comes now would take a thought out of the prompt that this turn was given.

    What was thought before the last turning is gone already.
    """
    is_last = True
    node: Past | None = turn
    while node is not None:
        for round in reversed(node.rounds):
            wrote = 0 if is_last else hand.turning(round.wrote)
            if not is_last and (has_thought(round.wrote[wrote:]) if wrote else hand.thinks(round)):
                return True
            given = 0 if wrote else hand.turning(round.given)
            if not wrote and has_thought(round.given[given:]):
                return True
            if wrote or given or round.is_fresh:
                return False
            is_last = False
        node = node.parent
    return False


def _is_recall_forgotten(hand: Hand, scene: Scene) -> bool:
    given = scene.rounds[0].given
    is_turned = hand.turning(scene.given) > 0 or _is_turned(hand, scene.rounds[1:])
    return is_turned and has_thought(given[hand.turning(given) :])


def _rounds(turns: Sequence[Past]) -> list[Round]:
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
    return one.instructions == other.instructions and one.tools.is_told_like(other.tools)
