"""Where do the jobs of a turn stand among others: in which chain, on which fork?"""

from __future__ import annotations

from collections import OrderedDict
from hashlib import blake2b
from itertools import takewhile

from segue.lineage import PRIORITIES, Lineage
from segue.turn.plan import Plan
from segue.wire.kinds import is_model_written

# Parents whose first child is remembered.
PARENTS_MAX = 10_000
# How the names of chains begin that are named by their beginning.
BEGINNING = "chain_"


class Lineages:
    """Knows which turn was the first to continue each parent, as far as this process has seen lately: another one that
    continues it is a fork. A turn that ended without an answer does not count."""

    def __init__(self) -> None:
        self._first: OrderedDict[str, str] = OrderedDict()

    def trace(self, plan: Plan) -> Lineage:
        """The chain of the parent, or a new one."""
        parent = plan.resolved.parent
        if parent is None:
            return Lineage(_chain_of(plan), priority=PRIORITIES[plan.response.service_tier])
        first = self._first.setdefault(parent.id, plan.id)
        if len(self._first) > PARENTS_MAX:
            self._first.popitem(last=False)
        fork = parent.fork if first == plan.id else plan.id
        # A parent from before chains had names is where this one begins.
        chain = parent.chain or parent.id
        return Lineage(chain, parent.id, fork, priority=PRIORITIES[plan.response.service_tier])

    def drop(self, plan: Plan) -> None:
        """The turn has ended without an answer: the next one to continue its parent is no fork."""
        parent = plan.resolved.parent
        if parent is not None and self._first.get(parent.id) == plan.id:
            del self._first[parent.id]


def is_resendable(lineage: Lineage) -> bool:
    """Whether its chain has the name that it will have when its client sends the whole history again."""
    return lineage.parent is None and lineage.chain.startswith(BEGINNING)


def _chain_of(plan: Plan) -> str:
    """The name of a new chain. Over HTTP a client may send its whole history with each turn: then the chain is named by
    what was said before the model first spoke, because that is the same each time. On a WebSocket it is named after
    its first turn, unless it begins with a history."""
    resolved = plan.resolved
    if plan.lane and not resolved.model_turns:
        return plan.id
    digest = blake2b(plan.owner.encode(), digest_size=16)
    digest.update((resolved.create.prompt_cache_key or "").encode("utf-8", "surrogatepass"))
    given = (item for one in resolved.earlier if one.is_fresh for item in one.given)
    for item in takewhile(lambda item: not is_model_written(item.value), (*given, *resolved.given)):
        digest.update(item.raw)
    return BEGINNING + digest.hexdigest()
