"""Who is measured? A Segue server of our own in a process of its own, or one that runs already.

Of our own server we also know the processor time and the memory, from the kernel; of any Segue server what its counters
at `/metrics` say. What is not known is None and never guessed.
"""

from __future__ import annotations

import os
import re
import select
import signal
import ssl
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from segue_bench.line import Address, LineFailed, get

START_S_MAX = 60.0
STOP_S_MAX = 30.0
STAGES = ("validate", "resolve", "render", "first_token", "sample", "save")
LOG_TAIL = 800


class NotServing(Exception):
    """A process that we started did not come up, or a server that was named is not there."""


@dataclass(frozen=True, slots=True)
class Counters:
    """What a Segue server counted, up to a moment or between two."""

    tokens_tokenized: float
    tokens_reused: float
    items_validated: float
    turns: float
    stage_s: Mapping[str, float]

    def since(self, before: Counters) -> Counters:
        """What was counted in between."""
        return Counters(
            self.tokens_tokenized - before.tokens_tokenized,
            self.tokens_reused - before.tokens_reused,
            self.items_validated - before.items_validated,
            self.turns - before.turns,
            {stage: self.stage_s[stage] - before.stage_s[stage] for stage in STAGES},
        )


def read_counters(address: Address) -> Counters | None:
    """The counters of a Segue server; None where there are none."""
    try:
        status, page = get(address, _root(address) + "/metrics")
    except LineFailed:
        return None
    text = page.decode("utf-8", "replace")
    if status != 200 or "segue_turns_total" not in text:
        return None
    return parse_counters(text)


def parse_counters(text: str) -> Counters:
    """Read a page of metrics; a counter that was never counted is 0."""

    def total(name: str) -> float:
        found = re.findall(rf"^{re.escape(name)}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
        return sum(map(float, found))

    def stage(name: str) -> float:
        labelled = rf'^segue_turn_stage_seconds_sum{{stage="{name}"}} (\S+)$'
        found = re.search(labelled, text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    return Counters(
        total("segue_tokens_tokenized_total"),
        total("segue_tokens_reused_total"),
        total("segue_items_validated_total"),
        total("segue_turns_total"),
        {name: stage(name) for name in STAGES},
    )


def _root(address: Address) -> str:
    return urlsplit(address.url).path.rstrip("/").removesuffix("/v1")


@dataclass(frozen=True, slots=True)
class Process:
    """A process that we started and that listens."""

    port: int
    pid: int

    def cpu_s(self) -> float | None:
        """Processor time so far, all threads; None where the kernel does not tell."""
        return cpu_s(self.pid)

    def memory_bytes(self) -> int | None:
        """Resident memory."""
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        except OSError:
            return None
        return pages * os.sysconf("SC_PAGE_SIZE")


def cpu_s(pid: int) -> float | None:
    """Processor time of a process, in nanoseconds where the scheduler says so, else in ticks."""
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        return sum(int((task / "schedstat").read_text().split()[0]) for task in tasks) / 1e9
    except (OSError, ValueError):
        pass
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to be measured: where it is spoken to, where its counters are, and its process if it is ours."""

    address: Address
    counted_at: Address
    process: Process | None = None

    def counters(self) -> Counters | None:
        """What it has counted."""
        return read_counters(self.counted_at)

    def cpu_s(self) -> float | None:
        """Its processor time."""
        return self.process.cpu_s() if self.process else None


@dataclass(frozen=True, slots=True)
class Played:
    """A model of our own server: a script at a speed."""

    name: str
    script: bytes
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Served:
    """What our own server is started with."""

    models: Sequence[Played]
    flags: Sequence[str] = field(default=())


@contextmanager
def serve(served: Served) -> Iterator[Process]:
    """Run `segue serve` on a free loopback port, with a SQLite file that goes with it."""
    with (
        tempfile.TemporaryDirectory(prefix="segue-bench-") as name,
        serve_in(Path(name), served) as process,
    ):
        yield process


@contextmanager
def serve_in(folder: Path, served: Served, port: int = 0) -> Iterator[Process]:
    """The same in a folder that another one may be served from later, and on this port, if one is named."""
    lines = ['engine = "scripted"', f'store = "sqlite:///{folder}/bench.db"', "grace_s = 0"]
    for number, model in enumerate(served.models):
        script = folder / f"script-{number}.json"
        script.write_bytes(model.script)
        lines += [
            "[[models]]",
            f'name = "{model.name}"',
            f'script = "{script}"',
            f"tps = {model.tokens_per_s:g}",
        ]
    config = folder / "segue.toml"
    config.write_text("\n".join(lines) + "\n")
    command = ["segue.cli", "serve", "--port", str(port), "--config", str(config), *served.flags]
    with spawn(command, r" at http://\S+:(\d+)/v1", folder) as process:
        yield process


@contextmanager
def relay(port: int, rtt_s: float, certificate: Path | None) -> Iterator[Process]:
    """Run the relay in front of a port."""
    command = ["segue_bench.relay", str(port), str(rtt_s)]
    if certificate is not None:
        command.append(str(certificate))
    with (
        tempfile.TemporaryDirectory(prefix="segue-relay-") as folder,
        spawn(command, r"relay at (\d+)", Path(folder)) as process,
    ):
        yield process


@contextmanager
def spawn(command: Sequence[str], announced: str, folder: Path) -> Iterator[Process]:
    """Run a module of ours in a process until we are done; it says its port when it listens."""
    with (folder / "errors.txt").open("w+b") as errors:
        # What the person has set for a server of their own is not meant for ours.
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SEGUE_")}
        child = subprocess.Popen(
            [sys.executable, "-m", *command],
            stdout=subprocess.PIPE,
            stderr=errors,
            env=environment,
            cwd=folder,
        )
        assert child.stdout is not None
        try:
            is_up = select.select([child.stdout], [], [], START_S_MAX)[0]
            line = child.stdout.readline() if is_up else b""
            found = re.search(announced, line.decode("utf-8", "replace"))
            if found is None:
                errors.seek(0)
                said = errors.read().decode("utf-8", "replace").strip()[-LOG_TAIL:]
                raise NotServing(f"our own server did not start: {said or 'it said nothing'}")
            yield Process(int(found[1]), child.pid)
        finally:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdout.close()


def make_certificate(folder: Path) -> Path:
    """A self-signed certificate for localhost, key and certificate in one file, good for a day."""
    path, key = folder / "certificate.pem", folder / "key.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "1",
        "-subj",
        "/CN=localhost",
        "-addext",
        "subjectAltName=DNS:localhost,IP:127.0.0.1",
    ]
    try:
        subprocess.run(
            [*command, "-keyout", str(key), "-out", str(path)],
            check=True,
            capture_output=True,
            timeout=START_S_MAX,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise NotServing(f"--tls needs the command 'openssl': {error}") from None
    path.write_bytes(path.read_bytes() + key.read_bytes())
    return path


def trust(certificate: Path) -> ssl.SSLContext:
    """A client's TLS that knows this certificate and no other."""
    tls = ssl.create_default_context(cafile=str(certificate))
    return tls
