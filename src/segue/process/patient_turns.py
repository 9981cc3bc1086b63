"""When may the end of a response in the background be announced? When the store has it: until then others would read
that it still runs. So it waits while the store is away, and while those who took this process for dead have still to
write the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from segue.errors import Fenced, TryLater, Unavailable
from segue.seams.history import Owner, Turn
from segue.seams.store import Turns
from segue.wire.response import ENDED

RETRY_S = 1.0


@dataclass(frozen=True, slots=True)
class PatientTurns:
    """Turns of a store that is waited for, unless the process is stopping."""

    turns: Turns
    is_stopping: Callable[[], bool]

    async def find(self, owner: Owner, turn_id: str) -> Turn | None:
        return await self.turns.find(owner, turn_id)

    async def read(self, owner: Owner, turn_id: str) -> Turn | None:
        return await self.turns.read(owner, turn_id)

    async def save(self, turn: Turn) -> None:
        while True:
            try:
                await self._save(turn)
                return
            except TryLater:
                if self.is_stopping():
                    raise
            await asyncio.sleep(RETRY_S)

    async def _save(self, turn: Turn) -> None:
        """Save it; `Fenced` once others have ended it, `Unavailable` if they have still to do that."""
        try:
            await self.turns.save(turn)
        except Fenced:
            if turn.response.status not in ENDED:
                raise
            found = await self.turns.read(turn.owner, turn.id)
            if found is not None and found.response.status not in ENDED:
                raise Unavailable(
                    "The response has still to be ended by another process."
                ) from None
            # Others end turns only as failed: any other end is this process's own, whose answer was lost before it got
            # a new name.
            status = None if found is None else found.response.status
            if status == "failed" or status != turn.response.status:
                raise

    async def delete(self, owner: Owner, turn_id: str) -> bool:
        return await self.turns.delete(owner, turn_id)
