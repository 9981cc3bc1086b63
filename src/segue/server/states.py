"""Which embedded models go on where they were after a restart?"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from segue.aio import in_background
from segue.server.models import ServedModels
from segue.server.state import Eraser, State
from segue.stores.seals import RingSeals


@asynccontextmanager
async def open_slot_states(
    served: ServedModels, state: State, eraser: Eraser
) -> AsyncIterator[None]:
    """Restore what was saved, save while inside and on the way out."""
    path = state.settings.store_path
    async with AsyncExitStack() as stack:
        for built in served.built.values():
            engine, bytes_max = built.embedded, built.settings.embedded_state_bytes_max
            if engine is None or engine.memory is None or path is None:
                continue
            # Imported here: most servers have no model inside.
            from segue_embedded.states import SlotStates

            folder = Path(f"{path}.states")
            ciphers = RingSeals(state.ring)
            tips = state.store.state.tips
            states = SlotStates(engine, folder, engine.memory, ciphers, bytes_max, tips)
            await states.restore(state.store.turns)
            eraser.caches.append(states.forget)
            stack.push_async_callback(states.save)
            await stack.enter_async_context(in_background("embedded_states", states.keep))
        yield
