"""What can change in a process that runs, and how?

In: settings. Out: the same process with other models, engines, guards, limits. First everything that is new is built
beside what runs (`check`), which may fail and then changes nothing; then the process changes over in one step without a
pause (`apply`). Turns that run keep what they began with. What is no longer used is closed when the last turn that ran
at the change has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from msgspec import structs

from segue.aio import in_background
from segue.listener.services import Services
from segue.process.runner import Runner
from segue.server.control import Reloaded
from segue.server.discovery import lookup_of
from segue.server.models import Closer, ServedModels, build_models
from segue.server.served import served_models
from segue.settings.values import FIELDS, ModelSettings, Settings

# How often it is looked whether something removed can be closed.
LOOK_S = 1.0

# What describes models, their engines and their guards.
MODELS = frozenset({*ModelSettings.__struct_fields__, "model", "models"})
GUARDS = frozenset(name for name in FIELDS if name.startswith("guard_"))
LIMITS = frozenset({"websocket", "connection_age_s", "append_s_max", "background_s_max"})
# Everything else needs a restart.
RELOADED = MODELS | GUARDS | LIMITS | {"check_rendering", "log_level", "grace_s", "config"}


def compare(old: Settings, new: Settings) -> tuple[Settings, Reloaded]:
    """The old settings with what can change while a server runs; and what differs, in the words of the settings."""
    differing = [name for name in FIELDS if getattr(old, name) != getattr(new, name)]
    wanted = structs.replace(
        old, **{name: getattr(new, name) for name in differing if name in RELOADED}
    )
    changed = [name for name in differing if name in RELOADED - MODELS]
    changed += _compare_models(old, new)
    return wanted, Reloaded(changed, [name for name in differing if name not in RELOADED])


def _compare_models(old: Settings, new: Settings) -> list[str]:
    before = {model.name: model for model in served_models(old)}
    after = {model.name: model for model in served_models(new)}
    found = [f"model {name} (removed)" for name in before if name not in after]
    for name, model in after.items():
        if name not in before:
            found.append(f"model {name} (added)")
            continue
        fields = ModelSettings.__struct_fields__
        old_model = before[name]
        differing = [key for key in fields if getattr(old_model, key) != getattr(model, key)]
        if differing:
            found.append(f"model {name} ({', '.join(differing)})")
    return found


@dataclass(frozen=True, slots=True)
class _Prepared:
    settings: Settings
    models: ServedModels


@dataclass(frozen=True, slots=True)
class _Retired:
    """What was removed, and the turns that may still use it."""

    turns: frozenset[str]
    closers: list[Closer]


class Reload:
    """Changes the settings of this process."""

    def __init__(
        self, served: ServedModels, runner: Runner, services: Services, shared: str
    ) -> None:
        """`shared` as for `build_models`."""
        self._served = served
        self._runner = runner
        self._services = services
        self._shared = shared
        self._prepared: _Prepared | None = None
        self._retired: list[_Retired] = []
        self._has_retired = asyncio.Event()

    async def check(self, wanted: Settings) -> None:
        """Build what is new; raises `Misconfigured` where that is not possible."""
        await self.drop()
        for model in served_models(wanted):
            if model.engine_discovery != "off":
                # Imported here: most servers look nothing up.
                from segue.replicas.kubernetes import LookupFailed
                from segue.replicas.lookup import look_up

                with suppress(LookupFailed):
                    await asyncio.to_thread(look_up, lookup_of(model))
        models = await asyncio.to_thread(build_models, wanted, self._shared, self._served)
        self._prepared = _Prepared(wanted, models)

    async def drop(self) -> None:
        """Forget what was checked: it will not be applied."""
        prepared, self._prepared = self._prepared, None
        if prepared is not None:
            await _close(prepared.models.closers_beside(self._served))

    def apply(self) -> Settings:
        """Change over to what was checked, and return it. New turns have it; those that run do not notice."""
        assert self._prepared is not None, "checked before"
        settings, models = self._prepared.settings, self._prepared.models
        self._prepared = None
        closers = self._served.become(models)
        runner, services = self._runner, self._services
        resources = replace(
            runner.resources,
            models=models.models,
            guards=models.owners,
            open_gate=models.open_gate,
            append_s_max=settings.append_s_max,
        )
        runner.reload(resources, settings.background_s_max)
        services.limits = replace(
            services.limits,
            websocket=settings.websocket,
            connection_age_s=settings.connection_age_s,
        )
        logging.getLogger().setLevel(settings.log_level.upper())
        self.retire(closers)
        return settings

    def retire(self, closers: list[Closer]) -> None:
        """Close this when the turns that run now have ended."""
        self._retired.append(_Retired(frozenset(self._runner.registry.running), closers))
        self._has_retired.set()

    @asynccontextmanager
    async def closing_retired(self) -> AsyncIterator[None]:
        """While inside, close what was removed once no turn uses it any more; all of it at the end."""
        try:
            async with in_background("retired_engines", self._close_retired):
                yield
        finally:
            await self.drop()
            for retired in self._retired:
                await _close(retired.closers)

    async def _close_retired(self) -> None:
        while True:
            await self._has_retired.wait()
            await asyncio.sleep(LOOK_S)
            running = self._runner.registry.running.keys()
            for retired in tuple(self._retired):
                if not retired.turns & running:
                    self._retired.remove(retired)
                    await _close(retired.closers)
            if not self._retired:
                self._has_retired.clear()


async def _close(closers: list[Closer]) -> None:
    for close in closers:
        await close()
