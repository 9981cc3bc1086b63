"""How is llama.cpp loaded into a process, and what does it need there?

In: a GGUF file and how much it may hold. Out: a server that takes jobs, or `Misconfigured`, which says what is missing.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from segue.errors import Misconfigured

# Tokens of a prompt between two callbacks, and so how soon a cancel is noticed: about half a second for SmolLM2 on one
# core. It costs about a tenth of the speed that a batch of 512 has.
BATCH = 32
# Cached prompts that have no slot now. SmolLM2 needs 22.5 KiB a token.
CACHE_MIB = 1_024
# What the wheel is compiled for. Without these the first token ends the process.
X86_FLAGS = ("avx2", "bmi2", "f16c", "fma")


class LlamaServer(Protocol):
    """What we use of `xllamacpp.Server`. JSON goes in as bytes and comes back as bytes."""

    # Of its HTTP port, which only this process has the key of.
    listening_address: str

    def handle_completions(self, request: bytes, callback: Callable[[bytes], bool]) -> None:
        """Blocks until the answer is complete or a callback returns True."""


def check_cpu(info: Path = Path("/proc/cpuinfo")) -> None:
    """Refuse a CPU on which the wheel would end the process with an illegal instruction."""
    if platform.machine() not in ("x86_64", "AMD64") or not info.exists():
        return
    lines = (line for line in info.read_text().splitlines() if line.startswith("flags"))
    flags = next(lines, "").split()
    missing = [flag for flag in X86_FLAGS if flag not in flags]
    if flags and missing:
        raise Misconfigured(
            f"engine: the embedded engine's wheel needs a CPU with {', '.join(missing)}, which this "
            "one lacks. Use another engine: `--engine llamacpp --engine-url …` with a llama-server "
            "built for this CPU, or `--engine scripted`."
        )


def load_advice(error: ImportError) -> str:
    """What to do where the engine's library cannot be loaded; minimal systems lack OpenMP's."""
    if "libgomp" in str(error):
        return "Install the library; on Debian and Ubuntu: apt install libgomp1"
    return f"Run: {sys.executable} -m pip install --no-deps xllamacpp"


def load_server(
    path: Path,
    *,
    context_tokens: int,
    parallel: int,
    threads: int,
    key: str,
    memory: Path | None = None,
) -> LlamaServer:
    """A llama.cpp server in this process. Its HTTP port cannot be switched off: it gets loopback and a random key."""
    if not path.is_file():
        raise Misconfigured(
            f"engine: there are no weights at {path}. Name a GGUF file, or run `segue models list`."
        )
    check_cpu()
    # Threads that spin while they wait nearly stop when another process needs their core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    try:
        import xllamacpp  # type: ignore[import-untyped]
    except ImportError as error:
        raise Misconfigured(
            "engine: the embedded engine needs the package xllamacpp, which cannot be loaded here "
            f"({error}). {load_advice(error)}"
        ) from None
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.model_alias = {"m"}
    # Each slot has a context of its own, so that no conversation can crowd out another.
    params.n_ctx = context_tokens * parallel
    params.n_parallel = parallel
    params.kv_unified = False
    params.cache_ram_mib = CACHE_MIB
    params.n_batch = params.n_ubatch = max(BATCH, parallel)
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.fit_params = False
    params.verbosity = -1
    params.hostnames = ["127.0.0.1"]
    params.port = 0
    params.api_keys = [key]
    params.n_threads_http = 1
    params.ui = False
    params.endpoint_slots = False
    if memory is not None:
        params.slot_save_path = f"{memory}/"
    try:
        server: LlamaServer = xllamacpp.Server(params)
    except RuntimeError:
        raise Misconfigured(
            f"engine: {path.name} cannot be loaded: it is no GGUF file that llama.cpp knows, or the "
            "memory is too small for it. Try a smaller --context-tokens or --engine-parallel."
        ) from None
    return server
