"""What has become of a turn so far? The one value that changes while it is performed."""

from __future__ import annotations

from dataclasses import dataclass, field

from segue.guards.gate import Gate
from segue.tools.hosted import HostedCalls
from segue.turn.compose import Composed
from segue.turn.plan import Plan
from segue.turn.running import Running
from segue.turn.values import Finish, JobStarted, Round, Scene
from segue.wire.items import Call, Item
from segue.wire.response import InputDetails, OutputDetails, Usage

NOT_BEGUN = JobStarted()
NO_USAGE = Usage(0, InputDetails(), 0, OutputDetails(), 0)


@dataclass(slots=True)
class Play:
    """What has become of a turn so far."""

    plan: Plan
    running: Running
    hosted_calls: HostedCalls
    scene: Scene
    # What this round was given, for the record; the scene may show it in another way.
    given: tuple[Item, ...]
    open_calls: dict[str, Call]
    # Rounds that are over.
    rounds: list[Round] = field(default_factory=list)
    composed: Composed | None = None
    finish: Finish | None = None
    usage: Usage = NO_USAGE
    # What the client's limit counts of it: the tokens of the answer, in all rounds; a summary is none of them.
    answered: int = 0
    # Which engine has the job of this round, and how much of the prompt it had before.
    begun: JobStarted = NOT_BEGUN
    # Where the items of this round begin in the output, and how many tokens it has sampled.
    items_before: int = 0
    sampled: int = 0
    # Whether this round ended before one of the client's stop strings.
    has_stopped: bool = False
    # Whether history begins anew with what this round was given.
    is_fresh: bool = False
    # The first prompt, which the render cache may keep.
    first: Composed | None = None
    # Who holds back what guards have not let pass; None where nobody guards.
    gate: Gate | None = None
