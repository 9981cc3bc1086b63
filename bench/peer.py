"""The two ends of a measurement: a server of ours on a core of its own, and a client that costs little."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from segue_bench.client import frame, local, open_websocket, read_message
from segue_bench.clients import ENDS
from segue_bench.server import CLI, LISTENING, ServerProcess, apart, spawn

DELTA = b'{"type":"response.output_text.delta"'


@contextmanager
def server(
    script: Mapping[str, Any] | None = None,
    *flags: str,
    module: str = CLI,
    is_pinned: bool = True,
) -> Iterator[ServerProcess]:
    """Run a server, pinned to the first core where there are two; another module may change it before it serves."""
    with tempfile.TemporaryDirectory(prefix="segue-bench-") as name:
        folder = Path(name)
        command = ["-m", module, "serve", "--port", "0", *flags]
        if "--engine" not in flags:
            command += ["--engine", "scripted"]
        if "--store" not in flags:
            command += ["--store", f"sqlite:///{folder}/bench.db"]
        if script is not None:
            path = folder / "script.json"
            path.write_text(json.dumps(script))
            command += ["--script", str(path)]
        with (
            spawn(command, LISTENING, folder) as process,
            apart(process) if is_pinned else nullcontext(),
        ):
            yield process


def cpu_s(process: ServerProcess) -> float:
    """Processor time of a server so far."""
    seconds = process.cpu_s()
    assert seconds is not None, "these benchmarks need a kernel that counts processor time in /proc"
    return seconds


class Timed(NamedTuple):
    """One turn as its client saw it: request to first delta, last delta to last event, and the last event."""

    first_s: float
    end_s: float
    last: dict[str, Any]


class Client:
    """One WebSocket: whole messages in, whole turns out."""

    def __init__(self, port: int) -> None:
        self._connection = open_websocket(local(port))

    def send(self, **event: Any) -> None:
        """A `response.create`."""
        data = json.dumps({"type": "response.create", "model": "scripted", **event}).encode()
        self._connection.send(frame(data))

    def receive(self) -> list[bytes]:
        """The events of one turn, undecoded, up to its last one."""
        events: list[bytes] = []
        while not events or not events[-1].startswith(ENDS):
            events.append(read_message(self._connection))
        return events

    def timed_turn(self, **event: Any) -> Timed:
        """One turn with the times of its deltas."""
        began, first, last = time.perf_counter(), 0.0, 0.0
        self.send(**event)
        while not (data := read_message(self._connection)).startswith(ENDS):
            if data.startswith(DELTA):
                last = time.perf_counter()
                first = first or last
        ended = time.perf_counter()
        return Timed(first - began, ended - last, json.loads(data))

    def close(self) -> None:
        self._connection.close()
