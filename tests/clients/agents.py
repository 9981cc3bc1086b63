"""The agents that the suite drives: how each is started, what it was built from, what its script is written for.

An agent is the real client, unmodified, from the registries. The SDKs are driven through the programs in `examples/`,
which are what we tell people to write.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tests.clients.outside import NODE, PYTHON, ROOT
from tests.clients.task import PROMPT, Turns, by_functions, by_shell, call

EXAMPLES = ROOT / "examples"
NPM_AGENTS = ROOT / ".cache" / "npm-agents" / "node_modules"
# Agents that are installed for `make test-clients` alone.
NPM_MORE = ROOT / ".cache" / "npm-more" / "node_modules"
AIDER = ROOT / ".cache" / "aider" / "bin" / "aider"
CODEX = NPM_AGENTS / ".bin" / "codex"
RUN_S_MAX = 60
MODEL = "agent"
CODEX_FLAGS = (
    "--skip-git-repo-check",
    "--dangerously-bypass-approvals-and-sandbox",
    "--json",
)


@dataclass(frozen=True)
class Ran:
    """How a client's process ended."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def said(self) -> str:
        return self.out + self.err

    @property
    def items(self) -> list[dict[str, object]]:
        """The finished items of Codex's JSON output."""
        events = [json.loads(line) for line in self.out.splitlines() if line.startswith("{")]
        return [one["item"] for one in events if one["type"] == "item.completed"]


Start = Callable[[str, Path, Path, str], tuple[list[str], dict[str, str]]]


@dataclass(frozen=True)
class Agent:
    """One client; `start` gives its command and environment for an address, a repository, a scratch folder, a model."""

    name: str
    packages: tuple[str, ...]
    start: Start
    turns: Callable[[], Turns] = by_functions
    chains: bool = True
    transport: str = "websocket"
    # A call of its tool that reads a long file.
    read: Callable[[str], dict[str, Any]] = lambda file: call("read_file", path=file)
    # A window that its first request fits into, and a long file does not.
    context_tokens: int = 4_000


def codex_home(scratch: Path, url: str, model: str = MODEL, **provider: object) -> Path:
    """A Codex configuration of its own. A key that is named here wins."""
    home = scratch / "codex_home"
    home.mkdir(exist_ok=True)
    table = {"name": "segue", "base_url": url, "wire_api": "responses", "supports_websockets": True}
    lines = [f"model = {json.dumps(model)}", 'model_provider = "segue"', 'web_search = "disabled"']
    lines += ["[model_providers.segue]"]
    lines += [f"{key} = {json.dumps(value)}" for key, value in (table | provider).items()]
    (home / "config.toml").write_text("\n".join(lines) + "\n")
    return home


def codex(
    url: str,
    repository: Path,
    scratch: Path,
    model: str = MODEL,
    *,
    prompt: Sequence[str] = (PROMPT,),
    options: Sequence[str] = ("--disable", "multi_agent", "--disable", "goals"),
    **provider: object,
) -> tuple[list[str], dict[str, str]]:
    """`codex exec` in a repository."""
    home = codex_home(scratch, url, model, **provider)
    command = [str(CODEX), "exec", *CODEX_FLAGS, *options, "-C", str(repository), *prompt]
    return command, {"CODEX_HOME": str(home)}


def python_example(file: str, *flags: str) -> Start:
    def start(
        url: str, repository: Path, scratch: Path, model: str
    ) -> tuple[list[str], dict[str, str]]:
        command = [str(PYTHON), "-W", "error", str(EXAMPLES / file), str(repository), *flags]
        return command, {"OPENAI_BASE_URL": url, "EXAMPLE_MODEL": model}

    return start


def node_example(file: str) -> Start:
    def start(
        url: str, repository: Path, scratch: Path, model: str
    ) -> tuple[list[str], dict[str, str]]:
        home = node_home(scratch)
        command = [str(NODE), "--no-warnings", str(home / file), str(repository)]
        return command, {"OPENAI_BASE_URL": url, "EXAMPLE_MODEL": model, "RUN_MS_MAX": "20000"}

    return start


def node_home(scratch: Path) -> Path:
    """The JavaScript examples beside the packages that they import, as after `npm install` there."""
    home = scratch / "examples"
    if not home.exists():
        home.mkdir()
        for source in [*EXAMPLES.glob("*.mjs"), EXAMPLES / "package.json"]:
            shutil.copy(source, home)
        (home / "node_modules").symlink_to(NPM_AGENTS)
    return home


def codex_read(file: str) -> dict[str, Any]:
    return call("exec_command", cmd=f"cat {file}")


AGENTS = {
    agent.name: agent
    for agent in (
        Agent(
            "Codex CLI", ("@openai/codex",), codex, by_shell, read=codex_read, context_tokens=7_000
        ),
        Agent(
            "Codex CLI, HTTP",
            ("@openai/codex",),
            partial(codex, supports_websockets=False),
            by_shell,
            chains=False,
            transport="sse",
            read=codex_read,
            context_tokens=7_000,
        ),
        Agent("OpenAI Python", ("openai",), python_example("fix_the_bug.py", "--plain")),
        Agent("OpenAI npm", ("npm openai",), node_example("openai_node.mjs")),
        Agent("Agents SDK Python", ("openai-agents",), python_example("agents_python.py")),
        Agent(
            "Agents SDK JavaScript",
            ("@openai/agents",),
            node_example("agents_js.mjs"),
            chains=False,
        ),
        Agent(
            "AI SDK",
            ("ai", "@ai-sdk/openai", "@vercel/ai-sdk-openai-websocket-fetch"),
            node_example("ai_sdk.mjs"),
        ),
    )
}


def version_of(package: str) -> str:
    """The version that is installed."""
    if package in ("openai", "openai-agents"):
        (found,) = PYTHON.parent.parent.glob(
            f"lib/python*/site-packages/{package.replace('-', '_')}-*.dist-info"
        )
        return found.name.removesuffix(".dist-info").rpartition("-")[2]
    path = NPM_AGENTS / package.removeprefix("npm ") / "package.json"
    return str(json.loads(path.read_text())["version"])


async def run(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    cwd: Path | None = None,
    run_s_max: float = RUN_S_MAX,
    stop: asyncio.Event | None = None,
) -> Ran:
    """Run a client to its end, in a group of its own; one that hangs is ended, and that is a failure.

    Once `stop` is set it is interrupted, as by Ctrl-C.
    """
    assert shutil.which(command[0]), "the clients are not installed: run `make test-clients`"
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=cwd,
        env={**clean(os.environ), **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    stopping = asyncio.create_task(_interrupt(process, stop)) if stop else None
    try:
        async with asyncio.timeout(run_s_max):
            out, err = await process.communicate()
    except TimeoutError:
        raise AssertionError(f"{Path(command[0]).name} hung for {run_s_max:g} s") from None
    finally:
        if stopping is not None:
            stopping.cancel()
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    seconds = time.monotonic() - began
    assert process.returncode is not None
    return Ran(process.returncode, out.decode(), err.decode(), seconds)


async def _interrupt(process: asyncio.subprocess.Process, stop: asyncio.Event) -> None:
    await stop.wait()
    process.send_signal(signal.SIGINT)


def clean(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment without what would lead a client elsewhere."""
    unwanted = re.compile(
        r"(?i)^(openai_|anthropic_|claude_|codex_|segue_|(https?|all|no)_proxy$|pythonpath$)"
    )
    return {key: value for key, value in environment.items() if not unwanted.match(key)}
