"""How does this process reach the other processes that share its store?

With one process and a SQLite or memory store there are none: then the cluster room is not even imported.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from segue.seams.access import SharedLimits
from segue.seams.bus import Bus
from segue.server.models import ServedModels
from segue.settings.values import Settings

if TYPE_CHECKING:
    from segue.cluster.peers import Peers


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """Where a worker stands among the workers of one parent process; a server of one process has none."""

    # The same for all workers of one parent.
    group: str = ""
    # The Unix socket where the workers meet, unless they meet in the database.
    hub: str = ""
    # The folder with the sockets of embedded engines that another process runs.
    engines: str = ""
    # The Unix socket where it takes orders from its parent.
    control: str = ""
    # The Unix socket of the keeper of sandboxes, where the parent has one.
    keeper: str = ""
    # How often the worker in this place has been replaced because it hung.
    replaced: int = 0


ALONE = WorkerPlace()


@dataclass(frozen=True, slots=True)
class Cluster:
    """The bus to the other processes, and this process among them."""

    bus: Bus
    peers: Peers
    # The parent process that this worker belongs to; empty where there is none.
    group: str


@asynccontextmanager
async def share_routes(
    cluster: Cluster | None, shared_limits: SharedLimits, served: ServedModels
) -> AsyncIterator[None]:
    """While inside, this process and the others know what each of them has at the servers of its engines."""
    if cluster is None:
        yield
        return
    # Imported here: one process alone shares nothing.
    from segue.replicas.fleet import Fleet

    fleet = Fleet(cluster.peers, shared_limits, lambda: served.engines)
    served.on_change = fleet.join
    async with fleet.running():
        yield


@asynccontextmanager
async def open_cluster(settings: Settings, place: WorkerPlace) -> AsyncIterator[Cluster | None]:
    """Through the database (PostgreSQL), through the parent's hub (several workers), or None (one process)."""
    opening: AbstractAsyncContextManager[Bus]
    if settings.store_kind == "postgresql":
        from segue.cluster.notify import open_notify_bus

        opening = open_notify_bus(settings.direct_store)
    elif place.hub:
        from segue.cluster.hub import open_hub_bus

        opening = open_hub_bus(place.hub)
    else:
        yield None
        return
    from segue.cluster.peers import Peers

    async with opening as bus:
        yield Cluster(bus, Peers(bus, place.group), place.group)
