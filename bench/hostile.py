"""What do healthy clients notice of a hostile one? Turns on a socket, beside a client that sends what costs the most.

    python -m bench hostile

For each kind of hostile input a server of its own: the turns of a healthy client by the clock, and what the server's
memory grew by at most. The hostile client is a process of its own; it sends the same bytes again as fast as they are
taken, reads nothing of what it is told, and comes back when it is cut off.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from bench.peer import Client, server
from segue_bench.client import frame, local, upgrade_request
from segue_bench.crowd import HealthProbe
from segue_bench.rounds import print_table
from segue_bench.server import ServerProcess

SCRIPT = {"turns": [{"text": "Once", "pad_tokens": 20}]}
# Longer than any measurement: a hostile process that is left over ends by itself.
HOSTILE_S_MAX = 300.0
MIB = 1024 * 1024
# Where answers go that nobody reads.
DISCARDED = bytearray(MIB)


def _create(**fields: object) -> bytes:
    return json.dumps(
        {"type": "response.create", "model": "scripted", "store": False, **fields}
    ).encode()


def _body(data: bytes, encoding: str = "identity") -> bytes:
    """A request over HTTP."""
    return b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: %s\r\nContent-Length: %d\r\n\r\n%s" % (
        encoding.encode(), len(data), data,
    )  # fmt: skip


def _one_byte_frames() -> bytes:
    """One message, each of its bytes in a frame of its own: a text frame, continuations, and the bit that ends it."""
    data = _create(input="a" * 8_000)
    return b"".join(
        bytes(
            [(0x80 if at == len(data) - 1 else 0) | (1 if at == 0 else 0), 0x81, 0, 0, 0, 0, byte]
        )
        for at, byte in enumerate(data)
    )


def hostile_bytes(kind: str) -> tuple[bool, bytes]:
    """Whether it goes over a socket, and what is sent again and again."""
    numbers = _create(input="a", metadata={"numbers": list(range(1_000_000))})
    words = _create(input="word " * 4_000_000)
    match kind:
        case "one-byte frames":
            return True, _one_byte_frames()
        case "a million numbers, HTTP":
            return False, _body(numbers)
        case "a million numbers, socket":
            return True, frame(numbers)
        case "20 MB of words, HTTP":
            return False, _body(words)
        case "20 MB of words, gzip":
            return False, _body(gzip.compress(words), "gzip")
        case _:
            assert kind == "bad JSON, 80 KB", kind
            return True, frame(b'{"input":' + b"[" * 2_000 + b'"' + b'\\"a' * 26_000)


KINDS = (
    "nobody",
    "one-byte frames",
    "a million numbers, HTTP",
    "a million numbers, socket",
    "20 MB of words, HTTP",
    "20 MB of words, gzip",
    "bad JSON, 80 KB",
)


def be_hostile(port: int, kind: str) -> None:
    """Send until ended."""
    is_socket, data = hostile_bytes(kind)
    until = time.monotonic() + HOSTILE_S_MAX
    print("ready", flush=True)
    while time.monotonic() < until:
        try:
            with socket.create_connection(("127.0.0.1", port), 10) as connection:
                if is_socket:
                    connection.sendall(upgrade_request(local(port)))
                    connection.recv(MIB)
                while time.monotonic() < until:
                    connection.sendall(data)
                    connection.recv_into(DISCARDED)
        except OSError:
            time.sleep(0.01)


@contextmanager
def hostile(process: ServerProcess, kind: str) -> Iterator[None]:
    """A hostile client beside what is measured."""
    if kind == "nobody":
        yield
        return
    command = [sys.executable, "-m", "bench.hostile", str(process.port), kind]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        client.stdout.readline()
        try:
            yield
        finally:
            client.kill()


def measured(kind: str, seconds: float) -> tuple[str, int, float, float, float, float]:
    """Turns, their p50, p99 and longest in milliseconds, and the mebibytes that the server took more."""
    with server(SCRIPT) as process:
        client, times = Client(process.port), list[float]()
        for _ in range(20):
            client.timed_turn(input="Hello", store=False)
        before = process.memory_bytes() or 0
        with HealthProbe(process) as probe, hostile(process, kind):
            until = time.perf_counter() + seconds
            while time.perf_counter() < until:
                began = time.perf_counter()
                client.timed_turn(input="Hello", store=False)
                times.append(time.perf_counter() - began)
                # As an agent does: most of its time it does something else.
                time.sleep(0.005)
        times.sort()
        p50, p99 = (times[math.ceil(len(times) * share) - 1] * 1e3 for share in (0.5, 0.99))
        return kind, len(times), p50, p99, times[-1] * 1e3, (probe.peak_bytes - before) / MIB


def main(arguments: Sequence[str]) -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(prog="python -m bench hostile", description=__doc__)
    parser.add_argument("--seconds", type=float, default=15.0, help="for each kind (default: 15)")
    parser.add_argument("--kind", choices=KINDS, action="append", help="only these")
    options = parser.parse_args(arguments)
    rows = [measured(kind, options.seconds) for kind in options.kind or KINDS]
    columns = "{}|{} turns|p50 {:.1f} ms|p99 {:.1f} ms|longest {:.0f} ms|+{:.0f} MiB"
    print_table("beside: " + columns, rows)


if __name__ == "__main__":
    be_hostile(int(sys.argv[1]), sys.argv[2])
