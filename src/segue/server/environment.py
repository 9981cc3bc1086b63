"""Where do the commands of models run? In sandboxes of a keeper process, which this server or its parent starts."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from segue.aio import in_background
from segue.settings.values import Settings

if TYPE_CHECKING:
    from segue.listener.api import Api
    from segue.sandbox.client import KeeperClient
    from segue.server.files import LateFiles


@asynccontextmanager
async def open_environment(
    settings: Settings, socket: str = ""
) -> AsyncIterator[KeeperClient | None]:
    """The way to the keeper, if the operator has switched it on. `socket`: that of a keeper which runs already."""
    if settings.environment == "off":
        yield None
        return
    from segue.sandbox.client import KeeperClient, KeeperProcess

    if socket:
        yield KeeperClient(socket)
        return
    process = KeeperProcess(settings.environment_root, settings.environments_max)
    await asyncio.to_thread(process.start)
    try:
        async with in_background("sandbox_keeper", process.keep_running):
            yield KeeperClient(process.socket)
    finally:
        process.close()


def environment_apis(client: KeeperClient | None, files: LateFiles) -> tuple[Api, ...]:
    """The APIs that there are only with sandboxes."""
    if client is None:
        return ()
    from segue.containers.api import containers_api
    from segue.skills.api import skills_api

    return (containers_api(client, files), skills_api(files.load_skills))


def try_environment(settings: Settings) -> str:
    """What a sandbox on this machine is, in words; refused with the reason where none can be made."""
    from segue.sandbox.client import KeeperProcess

    process = KeeperProcess(settings.environment_root, settings.environments_max)
    try:
        process.start()
        return f"bwrap: isolation {process.ready.isolation}, limits by {process.ready.held_by}"
    finally:
        process.close()
