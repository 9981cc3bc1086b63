"""A small program that behaves as `vllm serve`: a real process on a real port, with a FAKE vLLM and no model in it.

`serve MODEL --port N …`. The model `small-card` ends as vLLM does where the card has no room; `bad-flag` as for a flag
that it does not know; `loading` is never ready. It prints its command line first, and which plugins it is to load. As
vLLM has its engine core, it has a process that goes on for ever if nobody ends it.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from tests.engines.fakes.vllm import FakeVllm

CORE = "import signal; signal.pause()"
ENDS = {
    "small-card": "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`.",
    "bad-flag": "vllm: error: unrecognized arguments: --nosuch",
}


async def serve(model: str, port: int) -> None:
    """Until it is asked to end."""
    is_over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, is_over.set)
    if model == "loading":
        print(f"loading in process {os.getpid()}", flush=True)
        await is_over.wait()
        return
    core = await asyncio.create_subprocess_exec(sys.executable, "-c", CORE)
    fake = FakeVllm(model=model)
    fake._port = port
    async with fake:
        await is_over.wait()
    core.terminate()
    await core.wait()


def main() -> int:
    print("argv:", *sys.argv[1:], flush=True)
    print("plugins:", os.environ.get("VLLM_PLUGINS"), flush=True)
    assert sys.argv[1] == "serve"
    model = sys.argv[2]
    if model in ENDS:
        print(ENDS[model], flush=True)
        return 1
    places = [place for place, word in enumerate(sys.argv) if word == "--port"]
    asyncio.run(serve(model, int(sys.argv[places[-1] + 1])))
    return 0


if __name__ == "__main__":
    sys.exit(main())
