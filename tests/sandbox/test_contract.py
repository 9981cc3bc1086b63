"""What every kind of sandbox must do: one suite, run on each adapter with the keeper's own containers."""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import pytest

from segue.isolation.adapter import SandboxFailed, SandboxSpec
from segue.isolation.adapters import ADAPTERS as ROWS
from segue.isolation.limits import Group, Limits, processes_of
from segue.sandbox.beneath import new_file
from segue.sandbox.containers import run_command
from segue.sandbox.messages import Printed, RunCommand
from segue.settings.values import Settings
from tests.escapes.conftest import outside, sandboxes_can_be_made
from tests.escapes.places import KINDS, Shell, containers_with
from tests.support import until

__all__ = ["outside", "sandboxes_can_be_made"]


@pytest.mark.parametrize("adapter", KINDS)
async def test_every_kind_runs_commands_and_keeps_files(adapter: str, outside: Path) -> None:
    async with containers_with(outside / "own", adapter) as containers:
        stored, volatile = Shell(containers), Shell(containers, is_volatile=True)
        for shell in (stored, volatile):
            said, end = await shell.run(
                "id -u; pwd; echo $HOME; echo mine > x; echo bad >&2; exit 3"
            )
            assert sorted(said.split()) == ["/home/user", "/mnt/data", "1000", "bad"]
            assert end.exit_code == 3
            assert (await shell.run("cat x; cat"))[0] == "mine\n"
            devices = "echo lost > /dev/null; head -c 2 /dev/zero > /dev/shm/x; wc -c < /dev/shm/x"
            assert (await shell.run(devices))[0] == "2\n"
            _, place = await containers.place("me", shell.id)
            # The keeper sees the folder, and what it puts there is seen inside at once.
            assert _text(place.sandbox.data, "x") == "mine\n"
            _write(place.sandbox.home, "given", "words", place.sandbox.spec.uid)
            assert (await shell.run("cat /home/user/given"))[0] == "words"
            assert place.sandbox.memory_bytes() > 1 << 20
            await until(lambda place=place: place.is_idle)  # type: ignore[misc]
        assert Path(place.sandbox.data).as_posix().startswith("/proc/")
        assert {about.isolation for about in containers.list("me")} == {containers.isolation}


@pytest.mark.parametrize("adapter", KINDS)
async def test_every_kind_keeps_python_and_interrupts_it(adapter: str, outside: Path) -> None:
    async with containers_with(outside / "own", adapter) as containers:
        shell = Shell(containers)
        _, place = await containers.place("me", shell.id)
        seen: list[str] = []

        async def see(printed: Printed) -> None:
            seen.append(printed.stdout)

        for code, s_max in (("x = 40", 20.0), ("while True: pass", 0.5), ("x + 2", 20.0)):
            end = await run_command(
                place, RunCommand("me", shell.id, code, s_max, 1_000, "python"), see
            )
            assert (end.exit_code is None) == (s_max < 1)
        assert "".join(seen).endswith("42\n")


@pytest.mark.parametrize("adapter", KINDS)
async def test_nothing_is_left_of_a_sandbox(adapter: str, outside: Path) -> None:
    async with containers_with(outside / "own", adapter) as containers:
        shell = Shell(containers)
        await shell.run("setsid sleep 100 & (sleep 100 &)")
        _, place = await containers.place("me", shell.id)
        alive = processes_of(place.sandbox.pid)
        await containers.delete("me", shell.id)
        assert not any(map(_is_there, alive))
        assert not place.folder.exists()
        # The next sandbox, which is being made, stays.
        assert containers._spare is not None
        await containers._spare[1]
        # A start that is taken back leaves nothing either.
        data = outside / "data"
        data.mkdir()
        spec = SandboxSpec(str(data), Limits(1 << 30), Group(), None)
        before = _in_namespaces()
        for s_max in (0.001, 0.004, 0.01, 0.02):
            # On a fast machine the longest of these times is enough for it.
            with suppress(TimeoutError):
                sandbox = await asyncio.wait_for(containers._adapter.start(spec), s_max)
                await sandbox.close()
            # Also what has no parent any more.
            await until(lambda: _in_namespaces() <= before)


@pytest.mark.parametrize("adapter", KINDS)
async def test_start_that_fails_says_why_and_leaves_nothing(adapter: str, outside: Path) -> None:
    async with containers_with(outside / "own", adapter) as containers:
        before = set(processes_of(os.getpid()))
        for group in (Group(), Group((Path("/nowhere"),))):
            spec = SandboxSpec("/nowhere", Limits(1 << 30), group, None)
            with pytest.raises(SandboxFailed, match=r"nowhere|No such file"):
                await containers._adapter.start(spec)
        assert set(processes_of(os.getpid())) <= before


def _in_namespaces() -> set[int]:
    """The children of this process, and processes without a parent that are in a namespace of their own."""
    found = set(processes_of(os.getpid()))
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        is_orphan = "\nPPid:\t1\n" in status and b"/bwrap" in command
        if is_orphan and "\nState:\tZ" not in status:
            found.add(int(pid))
    return found


def _text(folder: str, name: str) -> str:
    return Path(folder, name).read_text()


def _is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _write(folder: str, name: str, text: str, uid: int | None) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        with new_file(fd, name, uid) as file:
            os.write(file, text.encode())
    finally:
        os.close(fd)


def test_every_kind_has_a_row_and_a_setting() -> None:
    named = Settings.__annotations__["environment"]
    for name in ROWS:
        assert name in str(named)
        assert any(name in kind for kind in KINDS)
