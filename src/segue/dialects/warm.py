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

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from msgspec.structs import replace

from segue.dialects.parts import in_call_order
from segue.readers.bound import BoundFamily
from segue.seams.history import Past, Round, Warm, above, since_fresh
from segue.seams.model import Rendered, Scene
from segue.seams.prompt import NO_TOKENS, Head, IdArray, Tokens
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.items import Item, Reasoning
from segue.wire.kinds import call_of, called, hosted_call_of

# Who was called, by the id of the call, before the items that are written; nothing for an unknown id.
NameOf = Callable[[str], str]
# How many of these items stand up to the last turning among them; 0: there is none.
Turning = Callable[[Sequence[Item]], int]


def has_thought(items: Sequence[Item]) -> bool:
    """Whether there is reasoning among these items."""
    return any(isinstance(item.value, Reasoning) for item in items)


def sampled_ids(round: Round) -> IdArray[int]:
    """What the model said in this round, to the id, with what closed its turn."""
    joined = array("I")
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
    # None: nothing is forgotten.
    turning: Turning | None = None
    # The kept ids of a round, less the thoughts among its first items.
    kept: Callable[[Vocabulary, Round, int], IdArray[int]] = _all_kept
    # Whether the kept ids of a round begin with a thought that is no item, because it is empty.
    has_empty_thought: Callable[[Vocabulary, Round], bool] = lambda vocabulary, round: False

    def render(self, bound: BoundFamily, scene: Scene) -> Rendered:
        """The prompt for this scene, encoding only what was never encoded or sampled before."""
        base = _base(self, bound, scene)
        rounds = [*base.later, Round(scene.given)]
        forgotten = [(0, 0)] * len(rounds)
        if self.turning is not None:
            forgotten = _forgotten(self.turning, rounds)
        vocabulary = bound.vocabulary
        context = base.prompt or NO_TOKENS
        reused = context.length
        chunks: list[IdArray[int]] = []
        for n, (round, (given, wrote)) in enumerate(zip(rounds, forgotten, strict=True)):
            items = without_thoughts(round.given, given) if given else round.given
            items = in_call_order(items, rounds[n - 1].wrote if n else base.wrote)
            name_of = partial(_name_of, rounds, n, base.turn)
            if base.prompt is None and n == 0:
                new = self.begin(vocabulary, scene.head, items, scene.root_at, name_of)
            else:
                new = self.given(vocabulary, items, name_of)
            chunks.append(new)
            if round.did_sample and round.fingerprint == bound.fingerprint:
                chunks.append(bound.cue + self.kept(vocabulary, round, wrote))
                reused += len(chunks[-1])
            elif round.did_sample:
                said = self.wrote(vocabulary, without_thoughts(round.wrote, wrote))
                chunks.append(bound.cue + said)
        for ids in filter(None, chunks):
            context = Tokens(context, ids, context.length + len(ids))
        return Rendered(context, bound.cue, context.length - reused, reused)


def _forgotten(turning: Turning, rounds: Sequence[Round]) -> list[tuple[int, int]]:
    """In each round, up to where thoughts are forgotten: in what was given, and in what was written."""
    counts: list[tuple[int, int]] = []
    is_turned = False
    for round in reversed(rounds):
        wrote = len(round.wrote) if is_turned else turning(round.wrote)
        is_turned = is_turned or wrote > 0
        given = len(round.given) if is_turned else turning(round.given)
        is_turned = is_turned or given > 0
        counts.append((given, wrote))
    counts.reverse()
    return counts


def without_thoughts(items: Sequence[Item], forgotten: int) -> Sequence[Item]:
    """These items, without the reasoning among the first `forgotten`."""
    later = items[forgotten:]
    return [*(item for item in items[:forgotten] if not isinstance(item.value, Reasoning)), *later]


def _name_of(rounds: Sequence[Round], count: int, turn: Past | None, call_id: str) -> str:
    """Finds a call by its id, the last call first: in the first `count` rounds, then in the turns before."""
    for item in _backwards(rounds, count, turn):
        if hosted_call_of(item.value) == call_id:
            return called(item.value)
        call = call_of(item.value)
        if call is not None and call.call_id == call_id:
            return called(item.value) or call.kind
    return ""


def _backwards(rounds: Sequence[Round], count: int, turn: Past | None) -> Iterator[Item]:
    rounds = rounds[:count]
    while rounds or turn is not None:
        for round in reversed(rounds):
            yield from reversed(round.wrote)
            yield from reversed(round.given)
            if round.is_fresh:
                # History begins here: a call before it is unknown to those who render without warmth.
                return
        rounds, turn = (turn.rounds, turn.parent) if turn is not None else ((), None)


# --- where to begin -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Base:
    """A prompt that still holds, the rounds after it, and the turn that it was kept with."""

    prompt: Tokens | None
    later: Sequence[Round]
    turn: Past | None = None

    @property
    def wrote(self) -> Sequence[Item]:
        """What the model wrote at its end."""
        return self.turn.rounds[-1].wrote if self.turn is not None else ()


def _base(writing: Writing, bound: BoundFamily, scene: Scene) -> _Base:
    """The longest prompt that is still warm and of which nothing is forgotten."""
    # The last is the oldest.
    later = [*reversed(scene.rounds)]
    turn = scene.past
    turning = writing.turning
    is_turned = turning is not None and _is_turned(turning, [*scene.rounds, Round(scene.given)])
    while turn is not None:
        prompt = _usable(writing, bound, scene.head, turn.warm)
        if prompt is not None:
            last = turn.rounds[-1]
            is_turned = is_turned or (turning is not None and turning(last.wrote) > 0)
            if turning is None or not is_turned:
                return _Base(prompt, later[::-1], turn)
            is_held = not _is_forgetful(writing, turning, bound, turn)
            if is_held and not _thinks(writing, bound, last):
                return _Base(prompt, later[::-1], turn)
            if is_held and last.did_sample and prompt.before is not None:
                # All but what the model said last, which `warm_after` has put after the rest as one chunk.
                return _Base(prompt.before, [replace(last, given=()), *later[::-1]], turn)
        is_turned = is_turned or (turning is not None and _is_turned(turning, turn.rounds))
        later.extend(reversed(turn.rounds))
        turn = above(turn)
    return _Base(None, since_fresh(later[::-1]))


def _is_turned(turning: Turning, rounds: Sequence[Round]) -> bool:
    return any(turning(round.given) or turning(round.wrote) for round in rounds)


def _is_forgetful(writing: Writing, turning: Turning, bound: BoundFamily, turn: Past) -> bool:
    """Whether a turning that comes now would take a thought out of the prompt that this turn was given.

    What was thought before the last turning is gone already.
    """
    is_last = True
    node: Past | None = turn
    while node is not None:
        for round in reversed(node.rounds):
            wrote = 0 if is_last else turning(round.wrote)
            if not is_last and (
                has_thought(round.wrote[wrote:]) if wrote else _thinks(writing, bound, round)
            ):
                return True
            given = 0 if wrote else turning(round.given)
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


def _usable(writing: Writing, bound: BoundFamily, head: Head, warm: Warm | None) -> Tokens | None:
    """The prompt that was kept, if it was made by the same dialect under a head that is written alike."""
    if warm is None or warm.fingerprint != bound.fingerprint or not isinstance(warm.prompt, Tokens):
        return None
    return warm.prompt if warm.head is head or writing.is_alike(warm.head, head) else None
