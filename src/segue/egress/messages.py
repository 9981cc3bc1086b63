"""What do the keeper of sandboxes and the proxy say to each other? JSON in packets, some with a listening socket."""

from __future__ import annotations

from msgspec import Struct


class StartProxy(Struct, frozen=True, tag=True):
    """The first message: what the operator allows."""

    domains: tuple[str, ...]


class OpenProxyDoor(Struct, frozen=True, tag=True):
    """Serve the listening socket that comes along."""

    number: int
    container_id: str
    domains: tuple[str, ...]


class CloseProxyDoor(Struct, frozen=True, tag=True):
    number: int


class ProxyCounts(Struct, frozen=True, array_like=True):
    """What went through a door since the last report."""

    number: int
    sent_bytes: int
    received_bytes: int
    requests: int
    refused: int


ProxyOrder = StartProxy | OpenProxyDoor | CloseProxyDoor
