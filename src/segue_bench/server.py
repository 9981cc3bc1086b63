"""Which server is measured? A Segue server of our own in a process of its own, or one that runs already.

Processor time and memory of our own server are read from the kernel; of any Segue server the counters at `/metrics`.
What is not known is None and never guessed.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from segue_bench.client import ConnectionFailed, ServerAddress, get

# The command line of the server that is measured; up to 0.3.0 it was a part of the package.
CLI = "segue_cli.cli" if find_spec("segue_cli") else "segue.cli"
START_S_MAX = 60.0
STOP_S_MAX = 30.0
STAGES = ("validate", "resolve", "render", "first_token", "sample", "save")
LOG_TAIL = 800
CERTIFICATE = (
    "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 1 -subj /CN=localhost "
    "-addext subjectAltName=DNS:localhost,IP:127.0.0.1"
)


class ServerNotStarted(Exception):
    """A process that we started does not listen, or ended too early."""


# --- counters -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerCounters:
    """What a Segue server counted, up to a moment or between two."""

    tokens_tokenized: float
    tokens_reused: float
    items_validated: float
    turns: float
    bytes_received: float
    stage_s: Mapping[str, float]

    def since(self, before: ServerCounters) -> ServerCounters:
        return ServerCounters(
            self.tokens_tokenized - before.tokens_tokenized,
            self.tokens_reused - before.tokens_reused,
            self.items_validated - before.items_validated,
            self.turns - before.turns,
            self.bytes_received - before.bytes_received,
            {stage: self.stage_s[stage] - before.stage_s[stage] for stage in STAGES},
        )


def read_counters(address: ServerAddress) -> ServerCounters | None:
    """The counters of a Segue server; None where there are none."""
    root = urlsplit(address.url).path.rstrip("/").removesuffix("/v1")
    try:
        status, page = get(address, root + "/metrics")
    except ConnectionFailed:
        return None
    text = page.decode("utf-8", "replace")
    if status != 200 or "segue_turns_total" not in text:
        return None
    return parse_counters(text)


def parse_counters(text: str) -> ServerCounters:
    """Read a page of metrics; a counter that is not there is 0."""

    def total(name: str, labels: str = "[^}]*") -> float:
        values = re.findall(rf"^{re.escape(name)}(?:{{{labels}}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, values))

    return ServerCounters(
        total("segue_tokens_tokenized_total"),
        total("segue_tokens_reused_total"),
        total("segue_items_validated_total"),
        total("segue_turns_total"),
        total("segue_bytes_received_total"),
        {name: total("segue_turn_stage_seconds_sum", f'stage="{name}"') for name in STAGES},
    )


# --- processes ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A process that we started and that listens."""

    port: int
    pid: int
    # What it prints after its first line.
    output: IO[bytes] | None = None

    def cpu_s(self) -> float | None:
        """Processor time so far, all threads: in nanoseconds where the scheduler counts them, else in ticks."""
        try:
            tasks = list(Path(f"/proc/{self.pid}/task").iterdir())
            return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
        except (OSError, ValueError):
            pass
        try:
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_bytes(self) -> int | None:
        """Resident memory."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except OSError:
            return None
        return pages * os.sysconf("SC_PAGE_SIZE")


@cache
def cores() -> frozenset[int]:
    """The cores that this process could use before it gave some away; empty where they cannot be chosen."""
    return frozenset(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else frozenset()


@contextmanager
def apart(process: ServerProcess) -> Iterator[None]:
    """The server on the first core, this process on the others, where there are two; afterwards as before."""
    if len(cores()) < 2:
        yield
        return
    first = min(cores())
    before = os.sched_getaffinity(0)
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        # A thread may end meanwhile.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), {first})
    os.sched_setaffinity(0, cores() - {first})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@dataclass(frozen=True, slots=True)
class MeasuredServer:
    """A server to be measured: the address for turns, the address of its counters, and its process if it is ours."""

    address: ServerAddress
    counted_at: ServerAddress
    process: ServerProcess | None = None

    def counters(self) -> ServerCounters | None:
        return read_counters(self.counted_at)

    def cpu_s(self) -> float | None:
        return self.process.cpu_s() if self.process else None


@dataclass(frozen=True, slots=True)
class ScriptedModel:
    """A model of our own server: a script at a speed."""

    name: str
    script: bytes
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class ServerOptions:
    """What our own server is started with."""

    models: Sequence[ScriptedModel]
    flags: Sequence[str] = field(default=())
    # Another module may change the server before it serves.
    module: str = CLI


@contextmanager
def serve(options: ServerOptions) -> Iterator[ServerProcess]:
    """Run `segue serve` on a free loopback port, with a SQLite file that is removed at the end."""
    with (
        tempfile.TemporaryDirectory(prefix="segue-bench-") as name,
        serve_in(Path(name), options) as process,
    ):
        yield process


@contextmanager
def serve_in(folder: Path, options: ServerOptions, port: int = 0) -> Iterator[ServerProcess]:
    """The same with its files in this folder, from which it can be started again, and on this port, if given."""
    lines = ['engine = "scripted"', f'store = "sqlite:///{folder}/bench.db"', "grace_s = 0"]
    for number, model in enumerate(options.models):
        script = folder / f"script-{number}.json"
        script.write_bytes(model.script)
        lines += ["[[models]]", f'name = "{model.name}"', f'script = "{script}"']
        lines += [f"tps = {model.tokens_per_s:g}"]
    config = folder / "segue.toml"
    config.write_text("\n".join(lines) + "\n")
    command = ["-m", options.module, "serve", "--port", str(port), "--config", str(config)]
    with spawn([*command, *options.flags], LISTENING, folder) as process:
        yield process


LISTENING = r" at http://\S+:(\d+)/v1"


@contextmanager
def relay(port: int, rtt_s: float, certificate: Path | None) -> Iterator[ServerProcess]:
    """Run the relay in front of a port."""
    command = ["-m", "segue_bench.relay", str(port), str(rtt_s)]
    if certificate is not None:
        command.append(str(certificate))
    with (
        tempfile.TemporaryDirectory(prefix="segue-relay-") as folder,
        spawn(command, r"relay at (\d+)", Path(folder)) as process,
    ):
        yield process


@contextmanager
def spawn(command: Sequence[str], announced: str, folder: Path) -> Iterator[ServerProcess]:
    """Run Python with these arguments; `announced` finds the port in the first line that it prints."""
    with (folder / "errors.txt").open("w+b") as errors:
        # The settings of the operator's own server are not meant for ours; modules are found where we find them.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SEGUE_")}
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
        child = subprocess.Popen(
            [sys.executable, *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            cwd=folder,
        )
        assert child.stdout is not None
        try:
            is_up = select.select([child.stdout], [], [], START_S_MAX)[0]
            line = child.stdout.readline() if is_up else b""
            announcement = re.search(announced, line.decode("utf-8", "replace"))
            if announcement is None:
                errors.seek(0)
                tail = errors.read().decode("utf-8", "replace").strip()[-LOG_TAIL:]
                name = " ".join(command[:2])
                raise ServerNotStarted(f"{name} did not start: {tail or 'no error output'}")
            yield ServerProcess(int(announcement[1]), child.pid, child.stdout)
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdout.close()


# --- TLS ------------------------------------------------------------------------------------------


def make_certificate(folder: Path) -> Path:
    """A self-signed certificate for localhost, key and certificate in one file, valid for a day."""
    path = folder / "certificate.pem"
    key = folder / "key.pem"
    command = [*shlex.split(CERTIFICATE), "-keyout", str(key), "-out", str(path)]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=START_S_MAX)
    except (OSError, subprocess.SubprocessError) as error:
        raise ServerNotStarted(f"--tls needs the command 'openssl': {error}") from None
    path.write_bytes(path.read_bytes() + key.read_bytes())
    return path


def trust(certificate: Path) -> ssl.SSLContext:
    """A client's TLS that accepts this certificate and no other."""
    return ssl.create_default_context(cafile=str(certificate))
