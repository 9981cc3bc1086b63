"""Which adapters are there? One row for each; the keeper loads the one that it is told to use."""

from __future__ import annotations

from pathlib import Path

from segue.sandbox.adapter import Adapter, FindAdapter
from segue.sandbox.messages import KeeperOrders


def _bwrap(folder: Path, orders: KeeperOrders) -> Adapter:
    from segue.sandbox.bwrap import find_bwrap

    return find_bwrap(folder, orders.root)


def _gvisor(folder: Path, orders: KeeperOrders) -> Adapter:
    from segue.sandbox.gvisor import find_gvisor

    return find_gvisor(folder, orders.root, orders.runsc)


# By the value of `--environment`.
ADAPTERS: dict[str, FindAdapter] = {"bwrap": _bwrap, "gvisor": _gvisor}
