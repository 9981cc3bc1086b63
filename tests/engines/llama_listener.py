"""A REAL llama.cpp server for tests: the one inside the xllamacpp wheel, with SmolLM2, as a process of its own.

Run as a program it serves until its standard input ends: `llama_listener.py MODEL PORT KEY CONTEXT_TOKENS SLOTS
PROJECTOR`.
SmolLM2's own template knows no tools; the server gets Qwen2.5's, which is ChatML too and has them.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

TEMPLATE = Path(__file__).parents[1] / "golden" / "qwen2.5-coder.jinja"
KEY = "test-key"
CONTEXT_TOKENS = 1024
START_S = 60


@dataclass(frozen=True)
class Listener:
    """Where it listens, and its process."""

    url: str
    process: subprocess.Popen[str]


@contextmanager
def llama_server(
    slots: int = 2, projector: Path | str = "", context_tokens: int = CONTEXT_TOKENS
) -> Iterator[Listener]:
    """A server that is ready; ended by its own process at the end. With a projector it takes images."""
    from segue_embedded.weights import find_weights

    model = find_weights("smollm2")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(Path(__file__)), str(model), str(port), KEY]
    process = subprocess.Popen(
        [*command, str(context_tokens), str(slots), str(projector)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield Listener(f"http://127.0.0.1:{port}", process)
    finally:
        process.kill()
        process.wait(START_S)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def main() -> None:
    """Serve, say so in one line, and end with the parent."""
    import xllamacpp

    path, port, key, context_tokens, slots, projector = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.mmproj.path = projector
    params.n_ctx = int(context_tokens)
    params.n_parallel = int(slots)
    params.kv_unified = True
    params.fit_params = False
    params.verbosity = -1
    params.use_jinja = True
    params.chat_template = TEMPLATE.read_text()
    params.cpuparams.n_threads = 1
    params.cpuparams_batch.n_threads = 1
    params.hostnames = ["127.0.0.1"]
    params.port = int(port)
    params.api_keys = [key] if key else []
    server = xllamacpp.Server(params)
    print("ready", flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main()
