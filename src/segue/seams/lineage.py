"""Where does a job stand among others: in which chain, and who goes first? Names of ours only, never a client's own."""

from __future__ import annotations

from msgspec import Struct

# The tiers that there are, by who goes first.
PRIORITIES = {"flex": -1, "default": 0, "priority": 1}


class Lineage(Struct, frozen=True):
    """What is known of a job's chain when the job is made."""

    # The first turn of the chain: the same for all its turns and forks, and for a history that is resent as a whole.
    chain: str = ""
    # The turn that this one continues.
    parent: str | None = None
    # Tells a second child of a turn, and all that continue it, from the first; empty for those.
    fork: str = ""
    # Whether the chain goes on with the output of a tool.
    is_resumed: bool = False
    # What was said before the model first answered, as a digest, where the client may send it again with each turn.
    beginning: str = ""
    # Higher goes first.
    priority: int = 0


NO_LINEAGE = Lineage()
