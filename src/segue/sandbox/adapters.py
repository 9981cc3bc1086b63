"""Which adapters are there? One row for each; the keeper loads the one that it is told to use."""

from __future__ import annotations

from pathlib import Path

from segue.sandbox.adapter import Adapter, FindAdapter


def _bwrap(folder: Path, root: str) -> Adapter:
    from segue.sandbox.bwrap import find_bwrap

    return find_bwrap(folder, root)


# By the value of `--environment`.
ADAPTERS: dict[str, FindAdapter] = {"bwrap": _bwrap}
