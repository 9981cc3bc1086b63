"""On which machine was it measured, and with which versions? Part of every output."""

from __future__ import annotations

import os
import platform
import re
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from msgspec import Struct

from segue import __version__

PACKAGES = ("uvicorn", "uvloop", "httptools", "websockets", "msgspec", "tokenizers")


class Machine(Struct, frozen=True):
    """Where and with what a run was made."""

    cpu: str
    cores: int
    memory_gb: float | None
    system: str
    python: str
    segue: str
    packages: dict[str, str]
    load_before: list[float]
    at: str


def describe() -> Machine:
    """This machine, now."""
    return Machine(
        cpu=_cpu(),
        cores=os.cpu_count() or 1,
        memory_gb=_memory_gb(),
        system=f"{platform.system()} {platform.release()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        segue=__version__,
        packages={name: version for name in PACKAGES if (version := _version(name))},
        load_before=[round(load, 2) for load in os.getloadavg()],
        at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    )


def in_words(machine: Machine) -> str:
    """One line for people."""
    load = machine.load_before[0]
    return (
        f"{machine.cpu}, {machine.cores} cores, {machine.system}, {machine.python}, "
        f"Segue {machine.segue}; load before {load:g}"
    )


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    model = re.search(r"^model name\s*: (.*)$", text, re.MULTILINE)
    return model[1] if model else platform.machine()


def _memory_gb() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (OSError, ValueError):
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
