"""What does a sandbox cost? `python -m bench.sandbox`: ready, a command, idle ones, bombs beside healthy turns.

Everything is taken in one run, in turns, because machines are noisy: a bare `bwrap true` beside ours, a command beside
itself on the host, turns of a server without and beside a bomb. The last lines are the bars, and which of them are
missed. Times are p50 and p95 in milliseconds. `--environment gvisor` measures that kind; the bars are bubblewrap's.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

from segue.errors import ApiError
from segue.ids import new_id
from segue.isolation.adapter import SandboxSpec
from segue.isolation.bwrap import Bwrap, HandedFiles, arguments, find_bwrap
from segue.isolation.limits import Group, Limits, processes_of
from segue.sandbox.client import KeeperClient, KeeperProcess
from segue.sandbox.messages import ContainerSpec, RunCommand
from segue_bench.server import ScriptedModel, ServerOptions, serve

OWNER = "bench"
COMMANDS = 5
BARE = ("--unshare-all", "--unshare-user", "--cap-drop", "ALL", "--die-with-parent")
ROOT = ("--ro-bind", "/usr", "/usr", "--symlink", "usr/bin", "/bin", "--symlink", "usr/lib", "/lib")


async def run(client: KeeperClient, container: str, command: str, owner: str = OWNER) -> float:
    """How long a command takes, as a worker sees it."""
    began = perf_counter()
    request = RunCommand(owner, container, command, 60.0, 1_000)
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


def made(bwrap: Bwrap, folder: str) -> float:
    """A sandbox as Segue makes it, until a program in it runs; its end is not waited for."""
    began = perf_counter()
    files = HandedFiles()
    spec = SandboxSpec(folder, Limits(1 << 30), Group(), None)
    words = ["--die-with-parent", "--new-session", "--clearenv", *arguments(bwrap, spec, files)]
    args = files.add("\0".join(words).encode() + b"\0")
    # A program that prints and, as `true` in the bare one, loads no locale: that would be another 0.2 ms of its own.
    command = [bwrap.program, "--args", args, "--", "/bin/sh", "-c", "echo"]
    with subprocess.Popen(command, env={}, pass_fds=files.fds, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.read(1)
        took = perf_counter() - began
    for fd in files.fds:
        os.close(fd)
    return took


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


@dataclass(slots=True)
class Bars:
    """What was promised, and what was measured."""

    rows: list[tuple[str, float, float, str]] = field(default_factory=list)

    def add(self, name: str, value: float, most: float, unit: str) -> None:
        self.rows.append((name, value, most, unit))

    def show(self) -> bool:
        """Print them; whether all are held."""
        for name, value, most, unit in self.rows:
            verdict = "held" if value <= most else "MISSED"
            print(f"{verdict:7} {name:52} {value:9.2f} {unit:5} at most {most:g}")
        return all(value <= most for _, value, most, _ in self.rows)


async def measure(options: argparse.Namespace) -> bool:
    bars = Bars()
    with TemporaryDirectory() as folder:
        os.chmod(folder, 0o755)
        bwrap = find_bwrap(Path(folder), "")
        most = 4 * max(options.idle, 16)
        keeper = KeeperProcess("", most, adapter=options.environment, runsc=options.runsc)
        keeper.start()
        try:
            client = KeeperClient(keeper.socket)
            print(f"isolation {keeper.ready.isolation}, limits by {keeper.ready.held_by}")
            await _times(client, bwrap, folder, options.rounds, bars)
            if options.bombs:
                await _bombs(client, options.bombs, bars)
            if options.idle:
                await _idle(client, keeper.pid, options.idle, bars)
        finally:
            keeper.close()
    return bars.show()


async def _times(client: KeeperClient, bwrap: Bwrap, folder: str, rounds: int, bars: Bars) -> None:
    names = ("bare bwrap true", "made", "cold", "warm", "command", "host")
    found: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        found["bare bwrap true"].append(await asyncio.to_thread(bare, bwrap.program))
        found["made"].append(await asyncio.to_thread(made, bwrap, folder))
        # Two in a row: the second finds no sandbox that is ready, the first does.
        container, took = await first_command(client)
        found["warm"].append(took)
        cold, took = await first_command(client)
        found["cold"].append(took)
        # Until the next one is ready that is kept.
        await asyncio.sleep(0.4)
        for _ in range(COMMANDS):
            found["command"].append(await run(client, container, "true"))
            found["host"].append(await asyncio.to_thread(plain))
        for each in (container, cold):
            await client.delete(OWNER, each)
    shown("a bare bwrap true", found["bare bwrap true"])
    shown("the same as Segue makes it", found["made"])
    shown("container and first command, none ready", found["cold"])
    shown("container and first command, one ready", found["warm"])
    shown("a command in a container", found["command"])
    shown("the same on the host", found["host"])
    p50 = {name: statistics.median(times) * 1e3 for name, times in found.items()}
    bars.add("sandbox ready, of a bare bwrap true", p50["made"] / p50["bare bwrap true"], 1.5, "x")
    bars.add("ready with Python, cold", p50["cold"], 350, "ms")
    # The first command is in it; its own cost is taken off.
    bars.add("ready with Python, one kept ready", p50["warm"] - p50["command"], 5, "ms")
    bars.add("a command, more than itself", p50["command"] - p50["host"], 3, "ms")


BOMBS = {
    "fork": "sh -c ':(){ :|:& };:'; while true; do sh -c 'sleep 1 & sleep 1'; done",
    "memory": "python3 -c 'x=[]\nwhile True: x.append(bytearray(1<<22))'",
    "disk": "while true; do dd if=/dev/zero of=x bs=1M count=200; rm x; done",
    "inode": "python3 -c 'for n in range(90000): open(str(n), \"w\").close()'; rm -f [0-9]*",
    "output": "yes",
}


async def _bombs(client: KeeperClient, seconds: float, bars: Bars) -> None:
    """Turns of a server alone, and beside each bomb; one after the other, so that both see the same machine."""
    script = b'{"turns": [{"text": "a short answer"}]}'
    with serve(ServerOptions((ScriptedModel("scripted", script, 0),))) as server:
        alone = await _turns(server.port, seconds)
        shown("turns, alone", alone)
        for name, bomb in BOMBS.items():
            container = new_id("cntr")
            await client.create(OWNER, container, ContainerSpec())
            await run(client, container, "true")
            exploding = asyncio.create_task(_repeat(client, container, bomb))
            beside = await _turns(server.port, seconds)
            exploding.cancel()
            await asyncio.gather(exploding, return_exceptions=True)
            await client.delete(OWNER, container)
            alone = await _turns(server.port, seconds)
            shown(f"turns, beside a bomb: {name}", beside)
            share = _p95(beside) / _p95(alone) - 1
            bars.add(f"turns beside a bomb: {name}, p95 more", share * 100, 20, "%")


async def _repeat(client: KeeperClient, container: str, command: str) -> None:
    while True:
        try:
            await run(client, container, command)
        except ApiError:
            # The bomb has ended its container: another one.
            container = new_id("cntr")
            await client.create(OWNER, container, ContainerSpec())


async def _turns(port: int, seconds: float) -> list[float]:
    until, times = perf_counter() + seconds, list[float]()
    body = b'{"model": "scripted", "input": "hello", "store": false}'
    head = f"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
    head += "Content-Type: application/json\r\nConnection: close\r\n\r\n"
    while perf_counter() < until:
        began = perf_counter()
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head.encode() + body)
        answer = await reader.read()
        writer.close()
        if b" 200 " not in answer[:20]:
            raise SystemExit(f"a turn failed: {answer[:300]!r}")
        times.append(perf_counter() - began)
        await asyncio.sleep(0.01)
    return times


def _p95(times: Sequence[float]) -> float:
    return sorted(times)[int(len(times) * 0.95)]


async def _idle(client: KeeperClient, keeper: int, count: int, bars: Bars) -> None:
    before = pss(processes_of(keeper))
    for number in range(count):
        container = new_id("cntr")
        await client.create(f"{OWNER}-{number // 16}", container, ContainerSpec())
        await run(client, container, "true", f"{OWNER}-{number // 16}")
    await asyncio.sleep(1)
    pids = processes_of(keeper)
    each = (pss(pids) - before) / count / 2**20
    began, used = perf_counter(), cpu_s(pids)
    await asyncio.sleep(5)
    share = (cpu_s(processes_of(keeper)) - used) / (perf_counter() - began)
    print(f"{count} idle containers: {each:.1f} MiB each, {share:.1%} of a core in all")
    bars.add("500 idle containers", each * 500 / 1024, 8, "GiB")
    bars.add(f"{count} idle containers, of a core", share * 100, 2, "%")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.sandbox", description=__doc__)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--idle", type=int, default=500, help="idle containers; 0: none")
    parser.add_argument("--bombs", type=float, default=4.0, help="seconds beside each; 0: none")
    parser.add_argument("--environment", default="bwrap", choices=("bwrap", "gvisor"))
    parser.add_argument("--runsc", default="", help="where the program of gVisor is")
    return 0 if asyncio.run(measure(parser.parse_args())) else 1


if __name__ == "__main__":
    sys.exit(main())
