"""Which adapters are there? One row for each; the keeper loads the one that it is told to use."""

from __future__ import annotations

from pathlib import Path

from segue.isolation.adapter import Adapter, FindAdapter


def _bwrap(folder: Path, root: str, runsc: str) -> Adapter:
    from segue.isolation.bwrap import find_bwrap

    return find_bwrap(folder, root)


def _gvisor(folder: Path, root: str, runsc: str) -> Adapter:
    from segue.isolation.gvisor import find_gvisor

    return find_gvisor(folder, root, runsc)


# By the value of `--environment`.
ADAPTERS: dict[str, FindAdapter] = {"bwrap": _bwrap, "gvisor": _gvisor}
