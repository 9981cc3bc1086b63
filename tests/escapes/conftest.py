"""Where a machine forbids namespaces, no sandbox can be made: the suite says so at the end of the run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from segue.isolation.adapter import SandboxFailed
from segue.isolation.bwrap import NO_NAMESPACES
from tests.escapes.places import ADAPTERS, containers_with, runsc

FORBIDDEN = "escapes: this machine forbids namespaces, and nothing was tried"
ABSENT = "escapes: there is no gVisor (runsc) on this machine, and it was not tried"


@cache
def forbidden() -> str:
    """Why no sandbox can be made on this machine: it forbids namespaces. Any other reason is a failure."""

    async def attempt() -> str:
        with TemporaryDirectory() as folder:
            os.chmod(folder, 0o755)
            async with containers_with(Path(folder, "own"), ADAPTERS[1]) as containers:
                try:
                    place = await containers._start("1g", is_volatile=True)
                except SandboxFailed as error:
                    return str(error)
                await place.close()
                return ""

    return asyncio.run(attempt())


def can_make_sandboxes() -> bool:
    """Whether this machine lets them be made."""
    return NO_NAMESPACES not in forbidden()


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder of the host that every user may look into: nothing but the sandbox hides it."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


@pytest.fixture(autouse=True)
def sandboxes_can_be_made(request: pytest.FixtureRequest) -> None:
    if not can_make_sandboxes():
        pytest.skip(f"{FORBIDDEN}: {forbidden()}")
    values = getattr(getattr(request.node, "callspec", None), "params", {}).values()
    if not runsc() and any("gvisor" in str(value) for value in values):
        pytest.skip(ABSENT)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    skipped = [str(report.longrepr) for report in terminalreporter.stats.get("skipped", ())]
    for words in (FORBIDDEN, ABSENT):
        if any(words in reason for reason in skipped):
            terminalreporter.write_line(f"{words}.", red=True)
