"""Where do the commands of models run? In sandboxes of a keeper process, which this server or its parent starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING

from segue.aio import in_background
from segue.errors import Misconfigured, need_package
from segue.observe.metrics import Metrics
from segue.seams.store import Ledger
from segue.settings.values import Settings

if TYPE_CHECKING:
    from segue.listener.api import Api
    from segue.sandbox.client import KeeperClient, KeeperProcess
    from segue.server.files import LateFiles


@asynccontextmanager
async def open_environment(
    settings: Settings, socket: str = ""
) -> AsyncIterator[KeeperClient | None]:
    """The way to the keeper, if the operator has switched it on. `socket`: that of a keeper which runs already."""
    if settings.environment == "off":
        if settings.environment_domains:
            raise Misconfigured("environment_domains: no containers; set environment too.")
        yield None
        return
    from segue.sandbox.client import KeeperClient, close_to_same_user

    close_to_same_user()
    domains = allowed_domains(settings)
    if socket:
        yield KeeperClient(socket, domains)
        return
    process = keeper_of(settings, domains)
    try:
        await asyncio.to_thread(process.start)
        async with in_background("sandbox_keeper", process.keep_running):
            yield KeeperClient(process.socket, domains)
    finally:
        process.close()


def keeper_of(settings: Settings, domains: tuple[str, ...]) -> KeeperProcess:
    """The keeper as the settings want it; `auto` is bubblewrap, what is stronger has to be named."""
    from segue.sandbox.client import KeeperProcess

    return KeeperProcess(
        settings.environment_root,
        settings.environments_max,
        adapter="bwrap" if settings.environment == "auto" else settings.environment,
        runsc=settings.environment_runsc,
        domains=domains,
    )


def allowed_domains(settings: Settings) -> tuple[str, ...]:
    """What the operator allows containers to reach, checked."""
    if not settings.environment_domains:
        return ()
    from segue.egress.domains import of_operator

    need_package("environment_domains", "h11", "sandbox")
    return of_operator(settings.environment_domains)


def counting(
    client: KeeperClient | None, metrics: Metrics, ledger: Ledger
) -> AbstractAsyncContextManager[object]:
    """What containers use is counted while inside."""
    if client is None:
        return nullcontext()
    from segue.sandbox.usage import counting

    return counting(client, metrics.note_sandboxes, ledger.settle)


def environment_apis(client: KeeperClient | None, files: LateFiles) -> tuple[Api, ...]:
    """The APIs that there are only with sandboxes."""
    if client is None:
        return ()
    from segue.containers.api import containers_api
    from segue.skills.api import skills_api

    return (containers_api(client, files), skills_api(files.load_skills))
