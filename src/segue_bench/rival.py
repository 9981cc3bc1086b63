"""Which other gateway is measured beside ours? `agentic-api`, in Rust, fetched from the package index once."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from segue.printable import say
from segue_bench.server import START_S_MAX, ServerNotStarted, ServerProcess, apart

PEER = "agentic-api==0.9.0"
# A checkout has a cache of its own.
CHECKOUT = Path(__file__).parents[2]
CACHE = (
    CHECKOUT / ".cache" if (CHECKOUT / "Makefile").exists() else Path.home() / ".cache" / "segue"
)
FOLDER = CACHE / "peers"
BODY_BYTES_MAX = 1 << 26


def installed() -> Path:
    """Its program."""
    program = FOLDER / "bin" / "agentic-server"
    if not program.exists():
        say(f"installing {PEER} into {FOLDER}", file=sys.stderr)
        pip = [str(FOLDER / "bin" / "pip"), "install", "--quiet", "--no-deps", PEER]
        try:
            subprocess.run([sys.executable, "-m", "venv", str(FOLDER)], check=True)
            subprocess.run(pip, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            raise ServerNotStarted(f"{PEER} cannot be installed: {error}") from None
    return program


@contextmanager
def agentic(upstream_port: int, *, is_pinned: bool = True) -> Iterator[ServerProcess]:
    """The gateway on a free port, in front of this one; where it is pinned, on the core that Segue has too."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as home:
        command = [
            str(installed()),
            *("--llm-api-base", f"http://127.0.0.1:{upstream_port}"),
            *("--gateway-host", "127.0.0.1", "--gateway-port", str(port)),
            *("--db-url", f"sqlite://{home}/peer.db"),
            *("--max-request-body-size-bytes", str(BODY_BYTES_MAX)),
        ]
        environment = {**os.environ, "HOME": home, "RUST_LOG": "error"}
        child = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            _wait_for(port, child)
            process = ServerProcess(port, child.pid)
            with apart(process) if is_pinned else nullcontext():
                yield process
        finally:
            child.terminate()
            child.wait(30)


def _wait_for(port: int, child: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + START_S_MAX
    while child.poll() is None and time.monotonic() < until:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise ServerNotStarted(f"{PEER} did not start")
