"""One keeper of sandboxes for the scenarios of a file: to start one costs more than most of them.

A module that imports these fixtures has it: servers with `FLAGS` join it, as workers join that of their parent. Those
that end a keeper, or need one with limits of its own, have `OWN`.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from segue.accounts.account import LOCAL
from segue.sandbox.client import KeeperClient, KeeperProcess
from segue.server.app import WorkerPlace
from segue.server.hosted import HostedTools
from tests.escapes.conftest import can_make_sandboxes, sandboxes_can_be_made
from tests.support import Served

__all__ = ["containers_are_gone", "keeper_of_the_file", "sandboxes_can_be_made"]

OWN: dict[str, Any] = {"environment": "bwrap", "check_rendering": True}
# With the place where the keeper of the file is, while its tests run.
FLAGS = dict(OWN)
CONTAINERS_MAX = 256


@pytest.fixture(scope="module", autouse=True)
def keeper_of_the_file() -> Iterator[None]:
    if not can_make_sandboxes():
        yield
        return
    process = KeeperProcess("", CONTAINERS_MAX)
    process.start()
    FLAGS["place"] = WorkerPlace(keeper=process.socket)
    yield
    del FLAGS["place"]
    process.close()


@pytest.fixture(autouse=True)
async def containers_are_gone() -> AsyncIterator[None]:
    """What a test has left does not count in the next one."""
    yield
    if "place" in FLAGS:
        await KeeperClient(FLAGS["place"].keeper).delete_all(LOCAL)


def keeper_of(served: Served) -> KeeperClient:
    """The way to the keeper of a server."""
    hosted = served.app.runner.resources.hosted
    assert isinstance(hosted, HostedTools)
    assert hosted.environment is not None
    return hosted.environment


def keeper_pid(served: Served) -> int:
    """The process of the keeper of a server."""
    with socket.socket(socket.AF_UNIX) as near:
        near.connect(keeper_of(served).socket)
        pid, _, _ = struct.unpack("3i", near.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        return int(pid)
