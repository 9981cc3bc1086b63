"""What is known of a prompt, so that another prompt can be compared with it?

In: a turn that has ended, or a plan with its rendered prompt. Out: a `KnownPrompt`. What a response echoes of its
request (tools, instructions, format, effort, key) is read there, so that a turn from the store is known as well as one
that has just run; only its token ids are missing. Pure.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain

from segue.reports.texts import digest, type_of
from segue.seams.history import Round, Turn, ancestors, since_fresh
from segue.seams.model import Scene
from segue.seams.prompt import Messages, Prompt, Tokens
from segue.turn.plan import Plan
from segue.wire.items import Item
from segue.wire.response import Response

# What a request without a tier, and what `auto`, means here.
USUAL_TIER = "default"
COMPACTIONS = ("compaction", "compaction_summary")
# What it takes to compare an item, as bytes of text that take as long.
ITEM_SIZE = 100


@dataclass(frozen=True, slots=True)
class KnownPrompt:
    """The prompt of one turn."""

    # Echoes the settings of the request.
    response: Response
    # As it is served: the response may have an alias of it.
    model: str
    # The tier that was requested: the response does not say it.
    tier: str
    items: tuple[Item, ...]
    # None where it is not in memory any more.
    prompt: Prompt | None
    fingerprint: str | None
    # How many tokens the model was given; about how many, where only the endpoint knows.
    tokens: int
    route: str | None = None
    is_truncated: bool = False
    is_compacted: bool = False
    _digests: array[int] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def digests(self) -> array[int]:
        """What the items say, in a number each: made once, when they are first compared."""
        made = self._digests
        if made is None:
            made = array("q", map(digest, self.items))
            object.__setattr__(self, "_digests", made)
        return made

    @property
    def size(self) -> int:
        """About how many bytes of text it takes as long to compare."""
        beside = len(self.response.tools) + len(self.response.instructions)
        return 4 * self.tokens + ITEM_SIZE * len(self.items) + beside

    @property
    def has_compaction(self) -> bool:
        """Whether a summary stands for what came before."""
        return self.is_compacted or any(
            # Few items have the word in them: only these are decoded.
            b"compaction" in item.raw and type_of(item) in COMPACTIONS
            for item in self.items
        )


def tier_of(requested: str | None) -> str:
    """The tier that was requested, by one name."""
    return USUAL_TIER if requested in (None, "auto") else requested or USUAL_TIER


def of_plan(
    plan: Plan, scene: Scene, prompt: Prompt, tokens: int, route: str | None, *, is_cut: bool
) -> KnownPrompt:
    """The first prompt of a turn that runs; `is_cut`: its oldest items were dropped."""
    resolved = plan.resolved
    is_whole = resolved.parent is None and not resolved.earlier
    is_replaced = scene.past is None and not scene.rounds and scene.given is not resolved.given
    rounds = list(scene.history())
    is_fresh = bool(rounds) and rounds[0].is_fresh
    is_compacted = bool(resolved.earlier) or is_fresh or (is_replaced and not is_cut)
    items = resolved.given if is_whole else tuple(chain(items_of(rounds), scene.given))
    return KnownPrompt(
        response=plan.response,
        model=plan.model.name,
        tier=tier_of(resolved.create.service_tier),
        items=items,
        prompt=prompt,
        fingerprint=plan.model.dialect.fingerprint,
        # Without the cue that makes the model speak.
        tokens=prompt.length if isinstance(prompt, Tokens) else tokens,
        route=route,
        is_truncated=is_cut,
        is_compacted=is_compacted,
    )


def of_turn(turn: Turn, tier: str) -> KnownPrompt:
    """The prompt of a turn that has ended, up to what the model said last."""
    warm, last = turn.warm, turn.rounds[-1]
    prompt = warm.prompt if warm is not None else None
    if isinstance(prompt, Tokens):
        # What the model said last is one chunk after the rest.
        given = prompt.before if last.did_sample and prompt.before is not None else prompt
        tokens = given.length
    elif isinstance(prompt, Messages):
        tokens = prompt.tokens
    else:
        tokens = turn.response.usage.input_tokens if turn.response.usage else 0
    rounds = since_fresh([one for link in ancestors(turn) for one in link.rounds])
    return KnownPrompt(
        response=turn.response,
        model=turn.usage.model if turn.usage else turn.response.model,
        tier=tier,
        items=tuple(items_of(rounds)),
        prompt=prompt,
        fingerprint=warm.fingerprint if warm is not None else None,
        tokens=tokens,
        route=warm.route if warm is not None else None,
        is_compacted=rounds[0].is_fresh,
    )


def items_of(rounds: Iterable[Round]) -> Iterable[Item]:
    """What was given and written in these rounds, in order."""
    return chain.from_iterable((*one.given, *one.wrote) for one in rounds)


def extends(prompt: Prompt, earlier: Prompt) -> bool:
    """Whether a prompt was made by adding to an earlier one: true at a glance, and only then."""
    node: Prompt | None = prompt
    while node is not None and node.length >= earlier.length:
        if node is earlier:
            return True
        node = node.before
    return False
