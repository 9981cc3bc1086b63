"""When may the end of a response in the background be announced? When the store has it: until then others would read
that it still runs. So it waits while the store is away, and while those who took this process for dead have still to
write the end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from segue.errors import Fenced, TryLater, Unavailable
from segue.seams.history import Owner, Turn
from segue.turn.loop import Save
from segue.wire.response import ENDED

RETRY_S = 1.0

Read = Callable[[Owner, str], Awaitable[Turn | None]]


async def save_patiently(
    save: Save, read: Read, is_stopping: Callable[[], bool], turn: Turn
) -> None:
    """Save the turn; a store that is away is waited for, unless the process is stopping."""
    while True:
        try:
            await _save(save, read, turn)
            return
        except TryLater:
            if is_stopping():
                raise
        await asyncio.sleep(RETRY_S)


async def _save(save: Save, read: Read, turn: Turn) -> None:
    """Save the turn; `Fenced` once others have ended it, `Unavailable` if they have still to do that."""
    try:
        await save(turn)
    except Fenced:
        if turn.response.status not in ENDED:
            raise
        found = await read(turn.owner, turn.id)
        if found is not None and found.response.status not in ENDED:
            raise Unavailable("The response has still to be ended by another process.") from None
        # Others end turns only as failed: any other end is this process's own, whose answer was lost before it got a
        # new name.
        status = None if found is None else found.response.status
        if status == "failed" or status != turn.response.status:
            raise
