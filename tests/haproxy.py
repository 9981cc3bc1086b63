"""A real HAProxy with the settings that we ship, for the tests with several servers.

`make test` puts one under `.cache/haproxy`; `SEGUE_TEST_HAPROXY` names another. There is no test without one: a missing
one is a failure.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "deploy" / "haproxy.cfg"
START_S = 20


def find_haproxy() -> Path:
    """The balancer of this project, or the one that was named."""
    path = Path(os.environ.get("SEGUE_TEST_HAPROXY") or ROOT / ".cache" / "haproxy" / "haproxy")
    assert path.is_file(), f"there is no HAProxy at {path}: run 'make test', or name one"
    return path


@dataclass(frozen=True)
class Balanced:
    """A port behind which several servers are."""

    port: int

    @property
    def ws_url(self) -> str:
        return f"ws://127.0.0.1:{self.port}/v1/responses"


def settings_for(port: int, servers: Sequence[int]) -> str:
    """What we ship, with the addresses of this test: no certificate, other ports, in turns instead of by count."""
    text = SHIPPED.read_text()
    text = re.sub(r"bind :8443 .*", f"bind 127.0.0.1:{port}", text)
    text = re.sub(r"    log stdout.*\n|    option httplog\n", "", text)
    text = re.sub(r"maxconn \d+", "maxconn 500", text)
    # So that a test knows that two requests reach two servers.
    text = text.replace("balance leastconn", "balance roundrobin")
    text = re.sub(r"    server .*\n", "", text)
    return text + "".join(
        f"    server s{number} 127.0.0.1:{one}\n" for number, one in enumerate(servers)
    )


def free_port() -> int:
    """A port that nobody has now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def haproxy(folder: Path, servers: Sequence[int]) -> Iterator[Balanced]:
    """HAProxy in front of these ports, until all of them are seen to be up."""
    port = free_port()
    path = folder / "haproxy.cfg"
    path.write_text(settings_for(port, servers))
    process = subprocess.Popen(
        [find_haproxy(), "-db", "-f", path], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    try:
        await_port(port, process)
        yield Balanced(port)
    finally:
        process.terminate()
        process.wait(START_S)
        assert process.stderr is not None
        process.stderr.close()


def await_port(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until this process takes connections there."""
    until = time.monotonic() + START_S
    while True:
        assert process.poll() is None, process.stderr and process.stderr.read()
        assert time.monotonic() < until, "it did not start"
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        except OSError:
            time.sleep(0.02)
