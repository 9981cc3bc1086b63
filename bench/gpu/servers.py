"""Which servers run on the GPU machine? vLLM in several forms, and the gateways in front of each, by name.

All files are below one folder: `vllm` and `segue` (packages), `models`, `bin`, `run` (logs, process ids, databases).
Servers go on when this program ends, so that one measurement can be made in several calls; `stop` ends them.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from segue_bench.server import ServerProcess

START_S_MAX = 300.0
CONTEXT_TOKENS = 131_072
PARALLEL = 64
# 8 guesses a step, from what stands in the prompt already.
SPECULATION = json.dumps(
    {
        "method": "ngram",
        "num_speculative_tokens": 8,
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    }
)
RUST = {"VLLM_USE_RUST_FRONTEND": "1"}
TOOL_FLAGS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
TUNED = ("--api-server-count", "4")
# Larger blocks: less to hash and to look up of a long history.
BLOCKS = ("--block-size", "128")
# Segue's package inside vLLM keeps the ids of conversations (step one); with this scheduler, their blocks (step two).
STEP_ONE = {"VLLM_PLUGINS": "segue"}
STEP_TWO = ("--scheduler-cls", "segue_vllm.scheduler.KeepAsyncScheduler")


@dataclass(frozen=True, slots=True)
class Engine:
    """A vLLM: its model, its port, room for its cache, and what is special about it. Gateways take the next ports."""

    model: str
    port: int
    cache_gb: int
    flags: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


ENGINES = {
    "plain": Engine("written", 8100, 30),
    "rust": Engine("written", 8110, 30, (), RUST),
    "tuned": Engine("written", 8120, 30, TUNED, {"VLLM_USE_FASTOKENS": "1"}),
    "fast": Engine("small", 8130, 4, ("--speculative-config", SPECULATION)),
    "fast-rust": Engine("small", 8140, 4, ("--speculative-config", SPECULATION), RUST),
    "real": Engine("real", 8150, 23),
    "real-rust": Engine("real", 8160, 23, (), RUST),
    "real-tuned": Engine("real", 8170, 23, TUNED, {"VLLM_USE_FASTOKENS": "1"}),
}
# Of some models: what keeps conversations, and larger blocks; by the form, its flags and its environment.
FORMS: dict[str, tuple[Sequence[str], Mapping[str, str]]] = {
    "": ((), {}),
    "rust": ((), RUST),
    "one": ((), STEP_ONE),
    "two": (STEP_TWO, STEP_ONE),
}
# Step two keeps at most half of its blocks for turns to come.
ROOM = {"two": 2}
# Begin of the name, model, first port, room for one conversation at 100k tokens, and flags.
FAMILIES: tuple[tuple[str, str, int, int, Sequence[str]], ...] = (
    ("plain", "written", 8200, 13, ()),
    ("fast", "small", 8300, 4, ("--speculative-config", SPECULATION)),
    ("big", "big", 8400, 16, ()),
)


def engine_name(family: str, form: str, blocks: Sequence[str]) -> str:
    """`plain`, `one`, `rust-128`; `big-two-128` where the family is another one."""
    parts = [family if family != "plain" or not form else "", form, "128" if blocks else ""]
    return "-".join(filter(None, parts))


for _family, _model, _port, _cache_gb, _flags in FAMILIES:
    for _place, (_form, _blocks) in enumerate((f, b) for b in ((), BLOCKS) for f in FORMS):
        _more, _variables = FORMS[_form]
        ENGINES.setdefault(
            engine_name(_family, _form, _blocks),
            Engine(
                _model,
                _port + 10 * _place,
                _cache_gb * ROOM.get(_form, 1),
                (*_flags, *_more, *_blocks),
                _variables,
            ),
        )
# Real weights with little room, so that requests are preempted; in float32, or with kernels whose sums do not depend on
# what else is in a batch.
LITTLE_ROOM = (
    *STEP_TWO,
    *("--max-model-len", "6000", "--num-gpu-blocks-override", "420", "--max-num-seqs", "8"),
)
ENGINES["exact"] = Engine("real", 8180, 2, (*LITTLE_ROOM, "--dtype", "float32"), STEP_ONE)
ENGINES["exact-bf16"] = Engine(
    "real", 8190, 2, LITTLE_ROOM, {**STEP_ONE, "VLLM_BATCH_INVARIANT": "1"}
)
# Name, and how far its port is from the engine's.
GATEWAYS = {"segue": 1, "segue-off": 2, "agentic": 3, "segue-plain": 4, "segue-tool": 5}
USUAL_GATEWAYS = ("segue", "segue-off", "agentic")


class Servers:
    """The servers below one folder."""

    def __init__(self, folder: Path, more_flags: Sequence[str] = ()) -> None:
        self.folder = folder
        self.more_flags = more_flags
        (folder / "run").mkdir(parents=True, exist_ok=True)

    def model(self, engine: str) -> Path:
        return self.folder / "models" / ENGINES[engine].model

    def port(self, engine: str, gateway: str = "") -> int:
        return ENGINES[engine].port + (GATEWAYS[gateway] if gateway else 0)

    def start(self, engines: Sequence[str]) -> None:
        """Start these vLLMs; all of them start at once."""
        for name in engines:
            engine = ENGINES[name]
            command = [
                *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"),
                *(str(self.model(name)), "--served-model-name", "m", "--dtype", "bfloat16"),
                *("--max-model-len", str(CONTEXT_TOKENS), "--max-num-seqs", str(PARALLEL)),
                *("--kv-cache-memory-bytes", f"{engine.cache_gb}G"),
                *("--gpu-memory-utilization", "0.2", "--enable-prompt-tokens-details"),
                *TOOL_FLAGS,
                *("--host", "127.0.0.1", "--port", str(self.port(name))),
                *engine.flags,
                *self.more_flags,
            ]
            environment = {
                "PYTHONPATH": str(self.folder / "vllm"),
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "VLLM_CACHE_ROOT": str(self.folder / "cache"),
                "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "600",
                # FlashInfer is not there.
                "VLLM_USE_FLASHINFER_SAMPLER": "0",
                **engine.environment,
            }
            self.spawn(name, command, environment)

    def await_engines(self, engines: Sequence[str]) -> list[str]:
        """Wait until each answers or has ended; those that answer."""
        until = time.monotonic() + START_S_MAX
        waiting, ready = list(engines), []
        while waiting and time.monotonic() < until:
            for name in list(waiting):
                if _is_healthy(self.port(name)):
                    ready.append(name)
                    waiting.remove(name)
                elif not _is_running(self.pid(name)):
                    print(f"{name} ended: {self._tail(name)}", flush=True)
                    waiting.remove(name)
            time.sleep(0.5)
        for name in waiting:
            print(f"{name} did not answer: {self._tail(name)}", flush=True)
        return ready

    def start_gateways(self, engine: str, wanted: Sequence[str] = USUAL_GATEWAYS) -> None:
        """These, in front of this vLLM: Segue with its render cache on and off, without sessions at the engine, with a
        tool that is slow; and agentic-api."""
        base = f"http://127.0.0.1:{self.port(engine)}"
        segue = [
            *(sys.executable, "-m", "segue_cli.cli", "serve", "--engine", "vllm"),
            *("--engine-url", base, "--model", "m", "--tokenizer", str(self.model(engine))),
            *("--engine-parallel", str(PARALLEL), "--context-tokens", str(CONTEXT_TOKENS)),
        ]
        own = Path(__file__).parents[2]
        run = self.folder / "run"
        environment = {"PYTHONPATH": f"{self.folder / 'segue'}:{own}"}
        commands: dict[str, list[str]] = {
            "segue": segue,
            "segue-off": [*segue, "--render-cache-bytes-max", "0"],
            "segue-plain": [*segue, "--engine-sessions", "off"],
            "segue-tool": [*segue, "--hosted-tools", "bench.gpu.slow_tool:build"],
            "agentic": [
                *(str(self.folder / "bin" / "agentic-server"), "--llm-api-base", base),
                *("--gateway-host", "127.0.0.1"),
                *("--gateway-port", str(self.port(engine, "agentic"))),
                *("--db-url", f"sqlite://{run}/{engine}-agentic.db"),
                *("--max-request-body-size-bytes", str(1 << 26)),
            ],
        }
        for gateway in wanted:
            command = commands[gateway]
            name = f"{engine}-{gateway}"
            if gateway != "agentic":
                command = [*command, "--port", str(self.port(engine, gateway))]
                command += ["--store", f"sqlite:///{run}/{name}.db"]
                self.spawn(name, command, environment)
            elif Path(command[0]).exists():
                self.spawn(name, command, {"HOME": str(run), "RUST_LOG": "error"})
            else:
                print(f"no agentic-api: there is no {command[0]}", flush=True)
        until = time.monotonic() + 60
        for gateway in set(wanted) - {"agentic"}:
            while not _is_healthy(self.port(engine, gateway)):
                if time.monotonic() > until or not _is_running(self.pid(f"{engine}-{gateway}")):
                    raise SystemExit(f"{gateway}: {self._tail(f'{engine}-{gateway}')}")
                time.sleep(0.2)

    def stop(self, engines: Sequence[str]) -> None:
        """End these vLLMs and what stands in front of them."""
        pids = []
        for engine in engines:
            for name in (*(f"{engine}-{gateway}" for gateway in GATEWAYS), engine):
                if (pid := self.pid(name)) and _is_running(pid):
                    os.killpg(pid, signal.SIGTERM)
                    pids.append(pid)
        until = time.monotonic() + 20
        while any(map(_is_running, pids)) and time.monotonic() < until:
            time.sleep(0.3)
        for pid in filter(_is_running, pids):
            os.killpg(pid, signal.SIGKILL)

    def pid(self, name: str) -> int:
        """The process of this server; 0 if it was never started."""
        path = self.folder / "run" / f"{name}.pid"
        return int(path.read_text()) if path.exists() else 0

    def is_up(self, name: str) -> bool:
        """Whether this server was started and has not ended."""
        return _is_running(self.pid(name))

    def cpu_s(self, engine: str, gateway: str) -> dict[str, float]:
        """Processor time so far: of the gateway, of vLLM's front end (all its processes), of its engine core."""
        front = core = 0.0
        for pid in _descendants(self.pid(engine)):
            spent = ServerProcess(0, pid).cpu_s() or 0.0
            if "EngineCore" in _title(pid):
                core += spent
            else:
                front += spent
        times = {"front": front, "core": core}
        if gateway:
            times["gateway"] = ServerProcess(0, self.pid(f"{engine}-{gateway}")).cpu_s() or 0.0
        return times

    def spawn(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start a server of this name; its output goes to a file, and it goes on when this program ends."""
        run = self.folder / "run"
        with (run / f"{name}.log").open("wb") as log:
            child = subprocess.Popen(
                command,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **environment},
                cwd=run,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        (run / f"{name}.pid").write_text(str(child.pid))

    def _tail(self, name: str) -> str:
        lines = (self.folder / "run" / f"{name}.log").read_text(errors="replace").splitlines()
        wrong = [line for line in lines if "rror" in line and "WARN" not in line]
        return "\n".join([*wrong[-6:], *lines[-3:]])[-1500:]


def _is_healthy(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def _is_running(pid: int) -> bool:
    """Whether this process runs; one that has ended and that nobody waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def _title(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
    except OSError:
        return ""


def _descendants(pid: int) -> Iterator[int]:
    """This process and all that it started."""
    yield pid
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in task.read_text().split():
            yield from _descendants(int(child))
