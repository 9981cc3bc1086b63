"""What does a response in the background do while the store is away? It waits, and its end is announced when the store
has it: until then others would read that it still runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from segue.errors import TryLater
from segue.turn.seams import Turns
from segue.turn.values import Owner, Turn

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
                await self.turns.save(turn)
                return
            except TryLater:
                if self.is_stopping():
                    raise
            await asyncio.sleep(RETRY_S)

    async def delete(self, owner: Owner, turn_id: str) -> bool:
        return await self.turns.delete(owner, turn_id)
