"""What does a sandbox cost? `python -m bench.sandbox`: ready, a command, an idle one; beside a bare `bwrap true`.

Everything is taken in one run, in turns, because machines are noisy. Times are p50 and p95 in milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter, process_time

from segue.ids import new_id
from segue.isolation.bwrap import find_bwrap
from segue.isolation.limits import processes_of
from segue.sandbox.client import KeeperClient, KeeperProcess
from segue.sandbox.messages import ContainerSpec, RunCommand

OWNER = "bench"
BARE = ("--unshare-all", "--unshare-user", "--cap-drop", "ALL", "--die-with-parent")
ROOT = ("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib")


async def run(client: KeeperClient, container: str, command: str) -> float:
    """How long a command takes, as a worker sees it."""
    began = perf_counter()
    request = RunCommand(OWNER, container, command, 60.0, 1_000)
    async with aclosing(client.run(request)) as running:
        async for _ in running:
            pass
    return perf_counter() - began


async def first_command(client: KeeperClient) -> tuple[str, float]:
    """A new container, and how long it takes until its first command has ended."""
    began = perf_counter()
    container = new_id("cntr")
    await client.create(OWNER, container, ContainerSpec())
    await run(client, container, "true")
    return container, perf_counter() - began


def bare(program: str) -> float:
    """A bare `bwrap true`."""
    began = perf_counter()
    words = [program, *BARE, *ROOT, "--symlink", "usr/lib64", "/lib64", "--proc", "/proc", "true"]
    subprocess.run(words, env={}, check=True)
    return perf_counter() - began


def plain() -> float:
    """A shell on the host."""
    began = perf_counter()
    subprocess.run(["/bin/sh", "-c", "true"], env={}, check=True)
    return perf_counter() - began


def shown(name: str, times: Sequence[float]) -> None:
    ordered = sorted(times)
    p50, p95 = statistics.median(ordered), ordered[int(len(ordered) * 0.95)]
    print(f"{name:44} p50 {p50 * 1e3:7.1f}  p95 {p95 * 1e3:7.1f}  min {ordered[0] * 1e3:6.1f}")


def pss(pids: Sequence[int]) -> int:
    """The memory of these processes in bytes, shared pages by parts."""
    size = 0
    for pid in pids:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        size += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return size


def cpu_s(pids: Sequence[int]) -> float:
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / 100


async def measure(rounds: int, idle: int) -> None:
    with TemporaryDirectory() as folder:
        program = find_bwrap(Path(folder), "").program
        keeper = KeeperProcess("", 4 * max(idle, 16))
        keeper.start()
        try:
            client = KeeperClient(keeper.socket)
            print(f"isolation {keeper.ready.isolation}, limits by {keeper.ready.held_by}")
            await _times(client, program, rounds)
            await _idle(client, keeper.pid, idle)
        finally:
            keeper.close()


async def _times(client: KeeperClient, program: str, rounds: int) -> None:
    names = ("bare bwrap true", "cold", "warm", "command", "host")
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        found["bare bwrap true"].append(await asyncio.to_thread(bare, program))
        # Two in a row: the second finds no sandbox that is ready, the first does.
        container, took = await first_command(client)
        found["warm"].append(took)
        cold, took = await first_command(client)
        found["cold"].append(took)
        found["command"].append(await run(client, container, "true"))
        found["host"].append(await asyncio.to_thread(plain))
        for each in (container, cold):
            await client.delete(OWNER, each)
        await asyncio.sleep(0.3)
    shown("a bare bwrap true", found["bare bwrap true"])
    shown("container and first command, none ready", found["cold"])
    shown("container and first command, one ready", found["warm"])
    shown("a command in a container", found["command"])
    shown("the same on the host", found["host"])


async def _idle(client: KeeperClient, keeper: int, count: int) -> None:
    before = pss(processes_of(keeper))
    for _ in range(count):
        await first_command(client)
    await asyncio.sleep(1)
    pids = processes_of(keeper)
    each = (pss(pids) - before) / count / 2**20
    began, used = perf_counter(), cpu_s(pids)
    await asyncio.sleep(5)
    share = (cpu_s(processes_of(keeper)) - used) / (perf_counter() - began)
    print(f"{count} idle containers: {each:.1f} MiB each, {share:.1%} of a core in all")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sandbox", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--idle", type=int, default=50)
    options = parser.parse_args()
    began = process_time()
    asyncio.run(measure(options.rounds, options.idle))
    print(f"(this process used {process_time() - began:.1f} s of CPU)")
    return 0


if __name__ == "__main__":
    sys.exit(main())
