"""Where do the commands of models run? In sandboxes of a keeper process, which this server or its parent starts."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from segue.aio import in_background
from segue.errors import ApiError, Misconfigured, need_package
from segue.observe.metrics import Metrics
from segue.seams.store import Ledger, SandboxUsage
from segue.settings.values import Settings

if TYPE_CHECKING:
    from segue.listener.api import Api
    from segue.sandbox.client import KeeperClient, KeeperProcess
    from segue.tools.inputs import ReadFile

log = logging.getLogger(__name__)

# How often what containers use is written down; a keeper that is killed loses as much.
BOOKS_S = 10.0


@asynccontextmanager
async def open_environment(
    settings: Settings, socket: str = ""
) -> AsyncIterator[KeeperClient | None]:
    """The way to the keeper, if the operator has switched it on. `socket`: that of a keeper which runs already."""
    if settings.environment == "off":
        if settings.environment_domains:
            raise Misconfigured(
                "environment_domains: there are no containers; set environment too."
            )
        yield None
        return
    from segue.sandbox.client import KeeperClient

    domains = allowed_domains(settings)
    if socket:
        yield KeeperClient(socket, domains)
        return
    process = keeper_of(settings, domains)
    await asyncio.to_thread(process.start)
    try:
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


class SandboxBooks:
    """Writes down what containers use: into the ledger, and into the metrics."""

    def __init__(self, client: KeeperClient, ledger: Ledger, metrics: Metrics) -> None:
        self._client = client
        self._ledger = ledger
        self._metrics = metrics
        # What a store that was away has not taken yet.
        self._unwritten: list[SandboxUsage] = []

    async def keep_forever(self) -> None:
        """Write it down now and then."""
        while True:
            await asyncio.sleep(BOOKS_S)
            await self.write()

    async def write(self) -> None:
        """Write down what was used since the last time."""
        found = await self._client.take_usage()
        day = time.strftime("%Y-%m-%d", time.gmtime())
        used = [
            SandboxUsage(
                day=day,
                owner=each.owner,
                container_s=each.container_s,
                cpu_s=each.cpu_s,
                egress_bytes=each.sent_bytes,
                ingress_bytes=each.received_bytes,
            )
            for each in found.usage
        ]
        self._metrics.note_containers(found.alive, found.isolation, found.held_by)
        self._metrics.count_sandboxes(used)
        self._unwritten += used
        if self._unwritten:
            writing, self._unwritten = self._unwritten, []
            try:
                await self._ledger.settle_sandboxes(writing)
            except ApiError:
                self._unwritten = writing
                raise


@asynccontextmanager
async def keeping_books(
    client: KeeperClient | None, ledger: Ledger, metrics: Metrics
) -> AsyncIterator[None]:
    """What containers use is written down while inside, and once more on the way out."""
    if client is None:
        yield
        return
    books = SandboxBooks(client, ledger, metrics)
    async with in_background("sandbox_usage", books.keep_forever):
        yield
    try:
        await books.write()
    except ApiError as error:
        log.warning("the last use of containers was not written down: %s", error.message)


def environment_apis(client: KeeperClient | None, read_file: ReadFile) -> tuple[Api, ...]:
    """The APIs that there are only with sandboxes."""
    if client is None:
        return ()
    from segue.containers.api import containers_api

    return (containers_api(client, read_file),)


def try_environment(settings: Settings) -> str:
    """What a sandbox on this machine is, in words; refused with the reason where none can be made."""
    domains = allowed_domains(settings)
    process = keeper_of(settings, domains)
    try:
        process.start()
        network = f"network to {', '.join(domains)}" if domains else "no network"
        ready = process.ready
        words = f"isolation {ready.isolation}, limits by {ready.held_by}, {network}"
        return ". ".join(filter(None, (f"{process.adapter}: {words}", ready.warning)))
    finally:
        process.close()
