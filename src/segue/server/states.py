"""Which embedded models go on where they were after a restart?"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from segue.server.models import ServedModels
from segue.server.state import Eraser, State
from segue.stores.seals import RingSeals


@asynccontextmanager
async def open_slot_states(
    served: ServedModels, state: State, eraser: Eraser
) -> AsyncIterator[None]:
    """Restore what was saved, save while inside and on the way out."""
    path, store = state.settings.store_path, state.store
    async with AsyncExitStack() as stack:
        for built in served.built.values():
            if built.keep_states is None or path is None:
                continue
            folder = Path(f"{path}.states")
            keeping = built.keep_states(
                folder, RingSeals(state.ring), store.state.tips, store.turns
            )
            eraser.caches.append(await stack.enter_async_context(keeping))
        yield
