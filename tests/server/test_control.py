"""Orders over a control socket: answers, errors in words, a server that hangs, and folders that are not safe."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from segue.errors import Misconfigured
from segue.server.control import NotRunning, control_path, open_control
from segue.workers.orders import find_control, give_order


async def echo(body: bytes) -> bytes:
    return body * 2


async def refuse(body: bytes) -> bytes:
    raise Misconfigured("port: wrong.")


async def fail(body: bytes) -> bytes:
    raise KeyError("x")


async def hang(body: bytes) -> bytes:
    await asyncio.Event().wait()
    return b""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path / "run"))
    return control_path("127.0.0.1", 8080)


async def test_order_is_answered_or_its_error_is_said(path: Path) -> None:
    answers = {"echo": echo, "refuse": refuse, "fail": fail, "hang": hang}
    async with open_control(path, answers):
        assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
        assert await give_order(path, "echo", b"ab") == b"abab"
        for verb, words in {
            "refuse": r"port: wrong\.",
            "fail": "fail failed: KeyError",
            "other": "does not know the order 'other'",
        }.items():
            with pytest.raises(Misconfigured, match=words):
                await give_order(path, verb)
        with pytest.raises(Misconfigured, match=rf"kill -KILL {os.getpid()}"):
            await give_order(path, "hang", s_max=0.01)
        # It goes on with the next one.
        assert await give_order(path, "echo", b"c") == b"cc"
    with pytest.raises(NotRunning):
        await give_order(path, "echo")


async def test_server_is_found_by_its_address(path: Path) -> None:
    assert find_control("127.0.0.1", 8080) is None
    async with open_control(path, {}):
        assert find_control("127.0.0.1", 8080) == find_control("localhost", 8080) == path
        assert find_control("127.0.0.1", 8081) is None
        assert find_control("segue.example.org", 8080) is None
    everywhere = control_path("0.0.0.0", 8080)
    # What a process that was killed has left is replaced.
    everywhere.write_bytes(b"")
    async with open_control(everywhere, {}):
        assert find_control("localhost", 8080) == everywhere
        assert find_control("segue.example.org", 8080) is None


async def test_folder_that_others_may_enter_is_not_used(path: Path) -> None:
    async with open_control(path, {}):
        path.parent.chmod(0o755)
        with pytest.raises(PermissionError, match="not a private folder"):
            control_path("127.0.0.1", 8080)
        # Nor does a command send an order there.
        assert find_control("127.0.0.1", 8080) is None
