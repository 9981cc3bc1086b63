"""How is a prompt made from what is kept, in every family that writes item by item?

A prompt is a head, then rounds: what was given, and if the model spoke, its cue and what it said. What a
turn keeps warm stands for everything up to its end, so rendering begins after the last ancestor that is
still warm under the same head, and with nothing warm at the head itself. There is one walk, not two: only its
beginning differs. That is why warmth cannot change a token.

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

from segue.dialects.family import BoundFamily
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
from segue.vocabularies.vocabulary import Vocabulary
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


def sampled_ids(round: Round) -> IdArray[int]:
    """What the model said in this round, to the id, with what closed its turn."""
    joined = id_array()
    for ids in (*round.ids, round.tail):
        joined.extend(ids)
    return joined


def _all_kept(vocabulary: Vocabulary, round: Round, forgotten: int) -> IdArray[int]:
    assert not forgotten, "this family forgets nothing"
    return sampled_ids(round)


def is_alike_by_words(head: Head, other: Head) -> bool:
    """For families in which only instructions and tools are written into the prompt.

    The choice of a tool is not: tools stay in the prompt also where none may be called, so that its beginning stays.
    """
    return head.instructions == other.instructions and head.tools.is_told_like(other.tools)


@dataclass(frozen=True, slots=True)
class Writing:
    """How one family writes items; the rest is the same for all."""

    # The head and the first items of a chain, together: some families write a first system message as the head.
    # The number is the time at which the chain began.
    begin: Callable[[Vocabulary, Head, Sequence[Item], int, NameOf], IdArray[int]]
    # Items that are not the first of a chain.
    given: Callable[[Vocabulary, Sequence[Item], NameOf], IdArray[int]]
    # What stands after the cue where no ids were kept for these items, up to where history goes on.
    wrote: Callable[[Vocabulary, Sequence[Item]], IdArray[int]]
    # Whether two heads are written alike.
    is_alike: Callable[[Head, Head], bool] = is_alike_by_words
    # How many of these items stand up to the last turning among them; 0: there is none.
    turning: Callable[[Sequence[Item]], int] = never
    # The kept ids of a round, less the thoughts among its first items.
    kept: Callable[[Vocabulary, Round, int], IdArray[int]] = _all_kept
    # Whether the kept ids of a round begin with a thought that is no item, because it is empty.
    has_empty_thought: Callable[[Vocabulary, Round], bool] = lambda vocabulary, round: False

    def render(self, bound: BoundFamily, scene: Scene) -> Rendered:
        """The prompt for this scene, encoding only what was never encoded or sampled before."""
        base = _base(self, bound, scene)
        rounds = [*base.later, Round(scene.given)]
        context = base.prompt or NO_TOKENS
        reused = context.length
        tokenized = 0
        for n, (round, counts) in enumerate(zip(rounds, self._forgotten(rounds), strict=True)):
            given = without_thoughts(round.given, counts[0])
            name_of = _names(rounds, n, base.turn)
            new = (
                self.begin(bound.vocabulary, scene.head, given, scene.root_at, name_of)
                if base.prompt is None and n == 0
                else self.given(bound.vocabulary, given, name_of)
            )
            context = context.plus(new)
            tokenized += len(new)
            if round.did_sample:
                is_kept = round.fingerprint == bound.fingerprint
                written = (
                    self.kept(bound.vocabulary, round, counts[1])
                    if is_kept
                    else self.wrote(bound.vocabulary, without_thoughts(round.wrote, counts[1]))
                )
                spoken = bound.cue + written
                context = context.plus(spoken)
                reused += len(spoken) if is_kept else 0
                tokenized += 0 if is_kept else len(spoken)
        return Rendered(context, bound.cue, tokenized, reused)

    def _forgotten(self, rounds: Sequence[Round]) -> list[tuple[int, int]]:
        """In each round, up to where thoughts are forgotten: in what was given, and in what was written."""
        counts: list[tuple[int, int]] = []
        is_turned = False
        for round in reversed(rounds):
            wrote = len(round.wrote) if is_turned else self.turning(round.wrote)
            is_turned = is_turned or wrote > 0
            given = len(round.given) if is_turned else self.turning(round.given)
            is_turned = is_turned or given > 0
            counts.append((given, wrote))
        counts.reverse()
        return counts


def without_thoughts(items: Sequence[Item], forgotten: int) -> Sequence[Item]:
    """These items, without the reasoning among the first `forgotten`."""
    if not forgotten:
        return items
    return [
        item
        for n, item in enumerate(items)
        if n >= forgotten or not isinstance(item.value, Reasoning)
    ]


def _names(rounds: Sequence[Round], count: int, turn: Past | None) -> NameOf:
    """Finds a call by its id, the last call first: in the first `count` rounds, then in the turns before."""

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
    """A prompt that still holds, the rounds after it, and the turn that it was kept with."""

    prompt: Tokens | None
    later: Sequence[Round]
    turn: Past | None = None


def _base(writing: Writing, bound: BoundFamily, scene: Scene) -> _Base:
    """The longest prompt that is still warm and of which nothing is forgotten."""
    later: list[Past] = []
    turn = scene.past
    is_turned = writing.turning(scene.given) > 0 or _is_turned(writing, scene.rounds)
    while turn is not None:
        prompt = _usable(writing, bound, scene.head, turn.warm)
        if prompt is not None:
            rounds = [*rounds_of(later), *scene.rounds]
            last = turn.rounds[-1]
            is_turned = is_turned or writing.turning(last.wrote) > 0
            if not is_turned:
                return _Base(prompt, rounds, turn)
            is_held = not _is_forgetful(writing, bound, turn)
            if is_held and not _thinks(writing, bound, last):
                return _Base(prompt, rounds, turn)
            if is_held and last.did_sample and prompt.before is not None:
                # All but what the model said last, which `warm_after` has put after the rest as one chunk.
                return _Base(prompt.before, [replace(last, given=()), *rounds], turn)
        is_turned = is_turned or _is_turned(writing, turn.rounds)
        later.append(turn)
        turn = turn.above
    prompt = _usable(writing, bound, scene.head, scene.recalled)
    if prompt is not None and not _is_recall_forgotten(writing, scene):
        return _Base(prompt, scene.rounds[1:])
    return _Base(None, since_fresh([*rounds_of(later), *scene.rounds]))


def _is_turned(writing: Writing, rounds: Sequence[Round]) -> bool:
    return any(writing.turning(round.given) or writing.turning(round.wrote) for round in rounds)


def _is_forgetful(writing: Writing, bound: BoundFamily, turn: Past) -> bool:
    """Whether a turning that comes now would take a thought out of the prompt that this turn was given.

    What was thought before the last turning is gone already.
    """
    is_last = True
    node: Past | None = turn
    while node is not None:
        for round in reversed(node.rounds):
            wrote = 0 if is_last else writing.turning(round.wrote)
            if not is_last and (
                has_thought(round.wrote[wrote:]) if wrote else _thinks(writing, bound, round)
            ):
                return True
            given = 0 if wrote else writing.turning(round.given)
            if not wrote and has_thought(round.given[given:]):
                return True
            if wrote or given or round.is_fresh:
                return False
            is_last = False
        node = node.parent
    return False


def _thinks(writing: Writing, bound: BoundFamily, round: Round) -> bool:
    """Whether the model left a thought in this round, even an empty thought that is no item."""
    if has_thought(round.wrote):
        return True
    is_kept = round.fingerprint == bound.fingerprint
    return is_kept and writing.has_empty_thought(bound.vocabulary, round)


def _is_recall_forgotten(writing: Writing, scene: Scene) -> bool:
    given = scene.rounds[0].given
    is_turned = writing.turning(scene.given) > 0 or _is_turned(writing, scene.rounds[1:])
    return is_turned and has_thought(given[writing.turning(given) :])


def rounds_of(turns: Sequence[Past]) -> list[Round]:
    """The rounds of these turns, of which the last is the oldest."""
    return [round for turn in reversed(turns) for round in turn.rounds]


def _usable(writing: Writing, bound: BoundFamily, head: Head, warm: Warm | None) -> Tokens | None:
    """The prompt that was kept, if it was made by the same dialect under a head that is written alike."""
    if warm is None or warm.fingerprint != bound.fingerprint or not isinstance(warm.prompt, Tokens):
        return None
    return warm.prompt if warm.head is head or writing.is_alike(warm.head, head) else None
