"""Where do the jobs of a turn stand among others: in which chain, on which fork?

A chain is named after its first turn. A client that sends its whole history each time names that turn too: the ids of
the items and calls that the model wrote first contain it, at every worker and after a restart. A history without such
ids is known by what was said before the model first answered, in this process; elsewhere that gives it its name.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from itertools import dropwhile, takewhile

from segue.ids import turn_of
from segue.seams.lineage import PRIORITIES, Lineage
from segue.turn.plan import Plan
from segue.wire.items import InputText, Item, Message
from segue.wire.kinds import call_of, is_model_written

# Parents whose first child is remembered, and beginnings whose first turn is.
PARENTS_MAX = 10_000
# So much of a beginning is looked at: a long request must not hold the loop.
ITEMS_MAX, WORDS_MAX = 1_000, 1_000_000


class Lineages:
    """Knows which turn was the first to continue each parent, as far as this process has seen lately: another one that
    continues it is a fork. A turn that ended without an answer does not count."""

    def __init__(self) -> None:
        self._first: OrderedDict[str, str] = OrderedDict()
        # The newest turn that began with these words.
        self._begun: OrderedDict[str, str] = OrderedDict()

    def trace(self, plan: Plan) -> Lineage:
        """The chain of the parent, or a new one."""
        parent = plan.resolved.parent
        if parent is None:
            return self._begin(plan)
        first = self._first.setdefault(parent.id, plan.id)
        _limit(self._first)
        fork = parent.fork if first == plan.id else plan.id
        # A parent from before chains had names is where this one begins.
        chain = parent.chain or parent.id
        return Lineage(chain, parent.id, fork, priority=PRIORITIES[plan.response.service_tier])

    def _begin(self, plan: Plan) -> Lineage:
        """A chain without a parent: a new one, or a history that is resent."""
        resolved, priority = plan.resolved, PRIORITIES[plan.response.service_tier]
        fresh = (item for round in resolved.earlier if round.is_fresh for item in round.given)
        items = (*fresh, *resolved.given)[:ITEMS_MAX]
        count = _first_answer(items)
        beginning = _name_of(plan, items[:count])
        if count == len(items):
            chain = self._begun[beginning] = plan.id
            self._begun.move_to_end(beginning)
            _limit(self._begun)
        else:
            chain = _first_turn(items[count:]) or self._begun.get(beginning, beginning)
        return Lineage(chain, beginning=beginning, priority=priority)

    def drop(self, plan: Plan) -> None:
        """The turn has ended without an answer: the next one to continue its parent is no fork."""
        parent = plan.resolved.parent
        if parent is not None and self._first.get(parent.id) == plan.id:
            del self._first[parent.id]


def _limit(known: OrderedDict[str, str]) -> None:
    if len(known) > PARENTS_MAX:
        known.popitem(last=False)


def _first_answer(items: Sequence[Item]) -> int:
    """Where the model first answers; messages of the assistant at the very beginning are no answer."""
    numbered = enumerate(items)
    said = dropwhile(lambda place: is_model_written(place[1].value), numbered)
    return next((n for n, item in said if is_model_written(item.value)), len(items))


def _first_turn(items: Sequence[Item]) -> str | None:
    """The turn that wrote the first answer of a history, which these items begin with."""
    for item in takewhile(lambda item: is_model_written(item.value), items):
        call = call_of(item.value)
        for name in (item.value.id, call and call.call_id):
            if name and (turn := turn_of(name)):
                return turn
    return None


def _name_of(plan: Plan, beginning: Sequence[Item]) -> str:
    """The name of what was said first: the same for the same words, in whichever form they are sent."""
    digest = blake2b(plan.owner.encode(), digest_size=16)
    digest.update((plan.resolved.create.prompt_cache_key or "").encode("utf-8", "surrogatepass"))
    left = WORDS_MAX
    for item in beginning:
        words = _words(item)[:left]
        digest.update(words)
        left -= len(words)
    return "chain_" + digest.hexdigest()


def _words(item: Item) -> bytes:
    value = item.value
    if not isinstance(value, Message):
        return item.raw
    parts = value.content if isinstance(value.content, list) else [InputText(text=value.content)]
    texts = [part.text for part in parts if isinstance(part, InputText)]
    if len(texts) < len(parts):
        return item.raw
    said = (text[:WORDS_MAX] for text in texts)
    return "\0".join((value.role, *said, "")).encode("utf-8", "surrogatepass")
