"""Which processes are a fleet on one machine, and how do they start, end and come back?

    PostgreSQL   one store for all, on a Unix socket
    replicas     engines without a model that count prefix blocks (`replica.py`)
    machines     `segue serve --workers N`, each with a folder of its own, all with the same store and replicas
    HAProxy      in front of the machines, in turns, so that a chain continues at another machine and worker

and Prometheus, where it is installed. Everything listens on loopback, everything is in one folder, and everything ends
with `Fleet.stop`. A process starts when those that it needs answer.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from segue.errors import Misconfigured
from segue_fleet.blocks import ReplicaShape
from segue_fleet.postgres import (
    SOCKET_PATH_CHARS_MAX,
    START_S,
    give_to_other_user,
    is_ready,
    make_database,
    other_user,
    reachable,
)
from segue_fleet.programs import find_haproxy, find_postgres, find_prometheus
from segue_fleet.words import known_words, tokenizer_path

HOST = "127.0.0.1"
# None of those that systems give to outgoing connections: one of these could take the port of a member that restarts.
PORTS = (20_000, 32_768)
MODEL = "counted"
STOP_S = 20
LOG_TAIL = 800
# A fleet is for tests and demonstrations: what is committed outlives its processes, not a power cut.
POSTGRES_OPTIONS = {
    "listen_addresses": "",
    "fsync": "off",
    "full_page_writes": "off",
    "max_connections": "100",
    "shared_buffers": "32MB",
}
# By turns instead of by the number of connections, so that it is seen that a chain needs no sticky sessions.
HAPROXY_SETTINGS = """\
global
    maxconn 4000
defaults
    mode http
    timeout connect 5s
    timeout http-request 10s
    timeout client 75s
    timeout server 75s
    timeout tunnel 65m
    timeout check 5s
    retries 2
    option redispatch
    retry-on conn-failure
frontend segue
    bind {host}:{port}
    default_backend segue
backend segue
    balance {balance}
    option httpchk
    http-check send meth GET uri {health} ver HTTP/1.1 hdr Host localhost
    http-check expect status 200
    default-server check inter 500ms fall 3 rise 1 maxconn 2000
"""


class FleetShape(Struct, frozen=True):
    """How many of each, and what a replica has."""

    machines: int = 2
    workers: int = 2
    replicas: int = 4
    replica: ReplicaShape = ReplicaShape()
    # Simulated seconds of the replicas in a second.
    time_factor: float = 1.0
    seed: int = 1
    port: int = 0
    with_prometheus: bool = True
    # Whether the machines see one engine, a load balancer that knows only the load, and not the replicas themselves.
    is_by_load: bool = False
    serve_flags: tuple[str, ...] = ()


class FleetMember(Struct, frozen=True):
    """A process of the fleet as others see it."""

    name: str
    pid: int
    url: str


@dataclass
class Running:
    """One process: how it is started, and how it is seen that it is up."""

    name: str
    url: str
    command: Sequence[str | Path]
    is_up: Callable[[], bool]
    options: dict[str, Any] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None


def free_ports() -> Iterator[int]:
    """Ports that no process has now, each once."""
    for port in random.sample(range(*PORTS), PORTS[1] - PORTS[0]):
        with socket.socket() as probe:
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        yield port


def answers(url: str) -> bool:
    """Whether a page is there."""
    try:
        with urllib.request.urlopen(url, timeout=2) as page:
            return bool(page.status == 200)
    except OSError:
        return False


class Fleet:
    """All processes, from `start` to `stop`."""

    def __init__(self, folder: Path, shape: FleetShape) -> None:
        if len(str(folder)) > SOCKET_PATH_CHARS_MAX:
            raise Misconfigured(f"fleet: the folder's path is too long for a Unix socket: {folder}")
        self.folder = folder
        self.shape = shape
        self._programs = find_postgres()
        self._haproxy = find_haproxy()
        self._prometheus = find_prometheus() if shape.with_prometheus else None
        self.members: dict[str, Running] = {}
        self._ports = free_ports()

    @property
    def url(self) -> str:
        """The URL of the API, which is HAProxy's."""
        return self.members["haproxy"].url

    @property
    def replicas(self) -> list[str]:
        return [name for name in self.members if name.startswith("replica-")]

    @property
    def machines(self) -> list[str]:
        return [name for name in self.members if name.startswith("machine-")]

    @property
    def has_prometheus(self) -> bool:
        return self._prometheus is not None

    def start(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Start everything; what started is stopped again where something does not."""
        try:
            self._prepare()
            for stage in self._stages():
                for member in stage:
                    self.members[member.name] = member
                    self._spawn(member)
                for member in stage:
                    self._await(member)
                    say(f"{member.name} is up")
        except BaseException:
            self.stop()
            raise

    def _prepare(self) -> None:
        store = self.folder / "postgres"
        store.mkdir()
        give_to_other_user(store)
        self._programs = reachable(self._programs, store)
        make_database(self._programs, store)
        words = msgspec.json.encode(known_words().words)
        (self.folder / "words.json").write_bytes(words)

    def _stages(self) -> list[list[Running]]:
        """Those of a stage start together, when the stages before it are up."""
        replicas = [self._replica(number) for number in range(self.shape.replicas)]
        engines = [replica.url for replica in replicas]
        balancers = []
        if self.shape.is_by_load:
            balancers = [self._balancer("by-load", "leastconn", "/health", engines, 0)]
            engines = [balancers[0].url]
        machines = [self._machine(number, engines) for number in range(self.shape.machines)]
        urls = [machine.url for machine in machines]
        front = self._balancer("haproxy", "roundrobin", "/ready", urls, self.shape.port)
        stages = [[self._postgres(), *replicas], balancers, machines, [front]]
        if self._prometheus is not None:
            targets = [*urls, *(replica.url for replica in replicas)]
            stages[-1].append(self._watcher(self._prometheus, targets))
        return stages

    def _postgres(self) -> Running:
        store = self.folder / "postgres"
        options = (f"{name}={value}" for name, value in POSTGRES_OPTIONS.items())
        command: list[str | Path] = [
            self._programs / "bin" / "postgres", "-D", store / "data", "-k", store,
            *(word for option in options for word in ("-c", option)),
        ]  # fmt: skip
        return Running(
            "postgres",
            f"postgresql://segue@/postgres?host={store}",
            command,
            lambda: is_ready(self._programs, store),
            {"cwd": store, **other_user()},
        )

    def _replica(self, number: int) -> Running:
        port = next(self._ports)
        shape = self.shape.replica
        url = f"http://{HOST}:{port}"
        command = [
            sys.executable, "-m", "segue_fleet.replica", "--port", str(port), "--model", MODEL,
            "--kv-tokens", str(shape.kv_tokens), "--slots", str(shape.slots),
            "--prefill-tps", str(shape.prefill_tps), "--decode-tps", str(shape.decode_tps),
            "--block", str(shape.block_tokens), "--time-factor", str(self.shape.time_factor),
            "--seed", str(self.shape.seed), "--words", str(self.folder / "words.json"),
        ]  # fmt: skip
        return Running(f"replica-{number}", url, command, lambda: answers(url + "/health"))

    def _machine(self, number: int, engines: Sequence[str]) -> Running:
        port = next(self._ports)
        name = f"machine-{'abcdefghij'[number]}"
        url = f"http://{HOST}:{port}"
        folder = self.folder / name
        folder.mkdir()
        command = [
            sys.executable, "-m", "segue_cli.cli", "serve", "--config", "none", "--port", str(port),
            "--workers", str(self.shape.workers), "--store", self._postgres().url,
            "--engine", "vllm", "--model", MODEL, "--tokenizer", str(tokenizer_path()),
            *(word for engine in engines for word in ("--engine-url", engine)),
            *self.shape.serve_flags,
        ]  # fmt: skip
        return Running(name, url, command, lambda: answers(url + "/ready"), {"cwd": folder})

    def _balancer(
        self, name: str, balance: str, health: str, servers: Sequence[str], port: int
    ) -> Running:
        port = port or next(self._ports)
        url = f"http://{HOST}:{port}"
        path = self.folder / f"{name}.cfg"
        lines = (
            f"    server s{n} {server.removeprefix('http://')}\n"
            for n, server in enumerate(servers)
        )
        settings = HAPROXY_SETTINGS.format(host=HOST, port=port, balance=balance, health=health)
        path.write_text(settings + "".join(lines))
        return Running(
            name, url, [self._haproxy, "-db", "-f", path], lambda: answers(url + "/health")
        )

    def _watcher(self, program: Path, targets: Sequence[str]) -> Running:
        port = next(self._ports)
        url = f"http://{HOST}:{port}"
        names = ", ".join(f'"{target.removeprefix("http://")}"' for target in targets)
        path = self.folder / "prometheus.yml"
        path.write_text(
            "global:\n  scrape_interval: 2s\nscrape_configs:\n  - job_name: segue-fleet\n"
            f"    static_configs:\n      - targets: [{names}]\n"
        )
        command: list[str | Path] = [
            program, f"--config.file={path}", f"--storage.tsdb.path={self.folder / 'prometheus'}",
            f"--web.listen-address={HOST}:{port}",
        ]  # fmt: skip
        return Running("prometheus", url, command, lambda: answers(url + "/-/ready"))

    # --- one process ------------------------------------------------------------------------------

    def run(self, name: str) -> None:
        """Start a process that does not run, and wait until it answers."""
        self._spawn(self.members[name])
        self._await(self.members[name])

    def _spawn(self, member: Running) -> None:
        # The settings of the operator's own server are not meant for these.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SEGUE_")}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        with self._log(member).open("ab") as output:
            member.process = subprocess.Popen(
                member.command,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
                env=environment,
                # Ctrl-C reaches only the fleet itself, which ends the others in order; and a kill reaches all workers.
                start_new_session=True,
                **member.options,
            )

    def _await(self, member: Running) -> None:
        until = time.monotonic() + START_S
        while not member.is_up():
            assert member.process is not None, "it was started"
            if member.process.poll() is not None or time.monotonic() > until:
                log = self._log(member)
                tail = log.read_bytes()[-LOG_TAIL:].decode(errors="replace").strip()
                raise Misconfigured(f"fleet: {member.name} did not start; {log} ends with:\n{tail}")
            time.sleep(0.05)

    def _log(self, member: Running) -> Path:
        return self.folder / f"{member.name}.log"

    def signal(self, name: str, number: signal.Signals) -> None:
        """To a process and all processes that it started, and wait until it has ended."""
        process = self.members[name].process
        if process is None:
            return
        if number == signal.SIGKILL:
            kill_session(process.pid)
        else:
            process.send_signal(number)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            kill_session(process.pid)
            process.wait(STOP_S)
        self.members[name].process = None
        await_port(self.members[name].url)

    def restart(self, name: str) -> None:
        """End a process in order and start it again at the same address; a replica has then forgotten everything."""
        self.signal(name, _gentle(name))
        self.run(name)

    def ended(self) -> list[str]:
        """Processes that have ended by themselves, or were killed from outside."""
        return [
            name
            for name, member in self.members.items()
            if member.process is not None and member.process.poll() is not None
        ]

    def stop(self) -> None:
        """End everything, in the opposite order, and remove what only these processes need."""
        for name in reversed(self.members):
            self.signal(name, _gentle(name))

    def seen(self) -> list[FleetMember]:
        return [
            FleetMember(name, member.process.pid if member.process else 0, member.url)
            for name, member in self.members.items()
        ]


def _gentle(name: str) -> signal.Signals:
    """PostgreSQL ends at once and with its connections by SIGINT; the others end in order by SIGTERM."""
    return signal.SIGINT if name == "postgres" else signal.SIGTERM


def await_port(url: str) -> None:
    """Until the workers of a process have ended too, so that its port is free."""
    port = urlsplit(url).port
    until = time.monotonic() + STOP_S
    while port and time.monotonic() < until:
        try:
            socket.create_server((HOST, port)).close()
        except OSError:
            time.sleep(0.05)
        else:
            return


def kill_session(leader: int) -> None:
    """End a process and all that it started at once, as when a machine loses power: workers have process groups of
    their own."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(int(folder.name)) == leader:
                os.kill(int(folder.name), signal.SIGKILL)


def remove_folder(folder: Path) -> None:
    """Everything that a fleet wrote."""
    shutil.rmtree(folder, ignore_errors=True)
