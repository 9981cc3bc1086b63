"""Does the benchmark work, before a GPU machine is paid for? The same commands in front of vLLMs without a model.

Each engine is a real API server of vLLM over an executor that computes nothing (`bench/hollow`), with SmolLM2's
vocabulary whatever its name says. Answers have 100 tokens, a step takes 2 ms. Times say nothing about a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.gpu.cases import SHAPE
from bench.gpu.servers import ENGINES, TOOL_FLAGS, Servers
from bench.hollow.server import hollow_command, hollow_environment, write_model

STEP_MS = 2.0
# Away from those of a measurement that runs.
PORTS_FROM = 15_000
# SmolLM2's own knows no tools; this one is ChatML too, and shows them.
TEMPLATE = Path(__file__).parents[2] / "tests" / "golden" / "qwen2.5-coder.jinja"
PEER = Path(__file__).parents[2] / ".cache" / "peers" / "bin" / "agentic-server"


class HollowServers(Servers):
    """The same servers and gateways; nothing is computed."""

    def port(self, engine: str, gateway: str = "") -> int:
        return PORTS_FROM + super().port(engine, gateway)

    def start(self, engines: Sequence[str]) -> None:
        for name in engines:
            folder = self.model(name)
            folder.mkdir(parents=True, exist_ok=True)
            write_model(folder, TEMPLATE.read_text())
            environment = hollow_environment(self.folder / "plugins" / name, STEP_MS)
            tokens = SHAPE.output_tokens
            environment["HOLLOW_ANSWER_TOKENS"] = f"{tokens},{tokens}"
            engine = ENGINES[name]
            environment |= engine.environment if "VLLM_PLUGINS" in engine.environment else {}
            # Nothing is computed, so no step goes on beside the next one.
            own = [flag.replace("KeepAsyncScheduler", "KeepScheduler") for flag in engine.flags]
            own = own if engine.model in ("written", "big") else []
            flags = [*TOOL_FLAGS, *own, *self.more_flags]
            command = hollow_command(folder, "m", self.port(name), flags)
            self.spawn(name, command, environment)


@contextmanager
def hollow_servers(flags: Sequence[str]) -> Iterator[HollowServers]:
    """In a folder that goes away."""
    with TemporaryDirectory(prefix="segue-gpu-dry-") as name:
        folder = Path(name)
        if PEER.exists():
            (folder / "bin").mkdir()
            (folder / "bin" / PEER.name).symlink_to(PEER)
        yield HollowServers(folder, flags)
