"""The agents that use Messages and Chat Completions: how each is started, what its script is written for.

Those that `segue run` starts are started with what it sets up; the libraries through `python_coders.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from segue_cli.client import run
from segue_cli.client.talk import ModelEndpoint
from tests.clients.agents import AIDER, NPM_MORE, Agent
from tests.clients.outside import NODE, PYTHON, ROOT, SCRIPTS
from tests.clients.task import END, MONEY, NEW, OLD, PROMPT, TEST_COMMAND, Turns, by_functions, call

PYTHON_AGENTS = ROOT / ".cache" / "agents" / "bin"
CONTEXT_TOKENS = 131_072
# Those that are about connections and engines, not about the state of a socket.
CODER_STORIES = (
    "fixes the bug",
    "drop in mid-response",
    "restart with drain",
    "engine error",
    "context overflow",
    "long silence",
)
# Nobody reaches the outside: what is not on this machine goes to a proxy that is not there.
ALONE = {
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
    "DO_NOT_TRACK": "1",
    "DISABLE_TELEMETRY": "1",
    "PI_OFFLINE": "1",
    "PI_TELEMETRY": "0",
    "OPENCODE_DISABLE_AUTOUPDATE": "1",
    "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
    "OPENCODE_DISABLE_MODELS_FETCH": "1",
    "QWEN_CODE_SUPPRESS_YOLO_WARNING": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "MSWEA_CONFIGURED": "true",
    "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "2",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "IS_SANDBOX": "1",
    "TERM": "dumb",
}


@dataclass(frozen=True)
class Coder(Agent):
    """An agent on Messages or Chat Completions."""

    api: str = "chat"
    # Whether each turn names the one before instead of resending it.
    has_threads: bool = False

    @property
    def path(self) -> str:
        """Where its requests go."""
        return "/v1/messages" if self.api == "messages" else "/v1/chat/completions"


def by_tool(name: str, make: Callable[[str], dict[str, Any]]) -> Turns:
    """Everything is a command of a tool."""
    # Qwen Code knows `sed -i`, and refuses it for a file that its own tool has not read.
    edit = f"import pathlib; f = pathlib.Path('money.py'); f.write_text(f.read_text().replace('{OLD}', '{NEW}'))"
    commands = ("ls", "cat money.py", f'python3 -c "{edit}"', TEST_COMMAND)
    return [call(name, **make(command)) for command in commands] + [{"text": END}]


def by_head(turns: Turns, file: str) -> dict[str, Any]:
    """The first call of a script, with another command: 20,000 characters are more than agents cut off."""
    text = json.dumps(turns[0])
    return json.loads(text.replace('"ls"', json.dumps(f"head -c 20000 {file}")))


def by_final_answer() -> Turns:
    """For smolagents: its end is a call as well."""
    return [*by_functions()[:-1], call("final_answer", answer=END)]


def by_submission() -> Turns:
    """For mini-swe-agent: a command whose output begins with its word is the end."""
    done = f"echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo '{END}'"
    return [*by_tool("bash", _command)[:-1], call("bash", command=done)]


def by_whole_file() -> Turns:
    """For aider, which has no tools: the model writes the file anew."""
    return [{"text": f"money.py\n```\n{MONEY.replace(OLD, NEW)}```\n\n{END}"}]


def started(
    agent: str,
    words: tuple[str, ...],
    url: str,
    repository: Path,
    scratch: Path,
    model: str,
    *,
    api: str,
    context_tokens: int = CONTEXT_TOKENS,
    more: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """As `segue run` starts it."""
    home = scratch / "home"
    home.mkdir(exist_ok=True)
    folder = scratch / agent
    endpoint = ModelEndpoint(url, model, None, context_tokens, sees_images=True)
    setup = run.AGENTS[agent].set_up(endpoint, folder, None, api)
    for name, text in setup.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    program = AIDER if agent == "aider" else NPM_MORE / ".bin" / agent
    path = f"{NODE.parent}:/usr/bin:/bin"
    # opencode works in the folder that the variable names.
    own = {"HOME": str(home), "PATH": path, "PWD": str(repository), **ALONE}
    return [str(program), *setup.words, *words], {**own, **setup.environment, **(more or {})}


def library(
    name: str, url: str, repository: Path, scratch: Path, model: str, *, python: Path = PYTHON
) -> tuple[list[str], dict[str, str]]:
    """A program of `python_coders.py`."""
    root = url.removesuffix("/v1")
    command = [str(python), str(SCRIPTS / "python_coders.py"), name, root, str(repository), model]
    return command, {"HOME": str(scratch), **ALONE}


def mini(url: str, repository: Path, scratch: Path, model: str) -> tuple[list[str], dict[str, str]]:
    """mini-swe-agent."""
    words = ("-m", f"openai/{model}", "-y", "--exit-immediately", "-t", PROMPT)
    own = {"HOME": str(scratch), "OPENAI_API_BASE": url, "OPENAI_API_KEY": "none"}
    return [str(PYTHON_AGENTS / "mini"), *words], {**own, **ALONE}


def _coder(
    name: str,
    package: str,
    agent: str,
    words: tuple[str, ...],
    api: str,
    turns: Callable[[], Turns],
    **more: str,
) -> Coder:
    return Coder(
        name,
        (package,),
        partial(started, agent, words, api=api, more=more),
        turns,
        has_threads="CLAUDE_CODE_TETHER_LIVE" in more,
        transport="sse",
        api=api,
        read=partial(by_head, turns()),
        context_tokens=CONTEXTS[agent],
    )


def _library(
    name: str, package: str, program: str, turns: Callable[[], Turns] = by_functions, **options: Any
) -> Coder:
    api = "messages" if program.endswith("messages") or program == "anthropic" else "chat"
    start = partial(library, program, **options)
    threads = program == "anthropic"
    return Coder(name, (package,), start, turns, has_threads=threads, transport="sse", api=api)


def _command(command: str) -> dict[str, Any]:
    return {"command": command}


def _described(command: str) -> dict[str, Any]:
    return {"command": command, "description": "the next step"}


CLAUDE = ("-p", PROMPT, "--permission-mode", "bypassPermissions", "--output-format", "json")
BASH = partial(by_tool, "Bash", _command)
OPENCODE = ("run", PROMPT), partial(by_tool, "bash", _described)
PI = ("--no-session", "-p", PROMPT), partial(by_tool, "bash", _command)
QWEN = (
    ("--yolo", "-p", PROMPT),
    partial(
        by_tool, "run_shell_command", lambda command: {"command": command, "is_background": False}
    ),
)
CN = ("--auto", "-p", PROMPT)
AIDER_WORDS = ("--yes-always", "--no-check-update", "--no-git", "--message", PROMPT, "money.py")
CLINE = (PROMPT,), partial(by_tool, "run_commands", lambda command: {"commands": [command]})
# Their prompts and tools, and a little more.
CONTEXTS = {
    "claude": 16_500,
    "opencode": 11_500,
    "pi": 5_000,
    "qwen": 22_000,
    "cn": 5_000,
    "aider": 600,
    "cline": 7_500,
}
# One for each kind of machine.
CLAUDE_PACKAGE = "@anthropic-ai/claude-code-*"
OLDER = PYTHON_AGENTS / "python"

CODERS = {
    coder.name: coder
    for coder in (
        _coder("Claude Code", CLAUDE_PACKAGE, "claude", CLAUDE, "messages", BASH),
        _coder(
            "Claude Code, threads",
            CLAUDE_PACKAGE,
            "claude",
            CLAUDE,
            "messages",
            BASH,
            CLAUDE_CODE_TETHER_LIVE="1",
        ),
        _library("Anthropic Python", "anthropic", "anthropic"),
        _coder(
            "opencode, Messages", "opencode-ai", "opencode", OPENCODE[0], "messages", OPENCODE[1]
        ),
        _coder("opencode, Chat", "opencode-ai", "opencode", OPENCODE[0], "chat", OPENCODE[1]),
        _coder("pi, Messages", "@earendil-works/pi-coding-agent", "pi", PI[0], "messages", PI[1]),
        _coder("pi, Chat", "@earendil-works/pi-coding-agent", "pi", PI[0], "chat", PI[1]),
        _coder("Qwen Code, Messages", "@qwen-code/qwen-code", "qwen", QWEN[0], "messages", QWEN[1]),
        _coder("Qwen Code, Chat", "@qwen-code/qwen-code", "qwen", QWEN[0], "chat", QWEN[1]),
        _coder("Continue, Messages", "@continuedev/cli", "cn", CN, "messages", BASH),
        _coder("Continue, Chat", "@continuedev/cli", "cn", CN, "chat", BASH),
        _coder("aider, Messages", "aider-chat", "aider", AIDER_WORDS, "messages", by_whole_file),
        _coder("aider, Chat", "aider-chat", "aider", AIDER_WORDS, "chat", by_whole_file),
        _coder("Cline, Chat", "cline", "cline", CLINE[0], "chat", CLINE[1]),
        _library("LangChain, Messages", "langchain-anthropic", "langchain-messages"),
        _library("LangChain, Chat", "langchain-openai", "langchain-chat"),
        _library("Pydantic AI, Messages", "pydantic-ai-slim", "pydantic-messages"),
        _library("Pydantic AI, Chat", "pydantic-ai-slim", "pydantic-chat"),
        _library("LiteLLM", "litellm", "litellm", python=OLDER),
        _library("smolagents", "smolagents", "smolagents", by_final_answer, python=OLDER),
        Coder(
            "mini-swe-agent",
            ("mini-swe-agent",),
            mini,
            by_submission,
            transport="sse",
            read=partial(by_head, by_submission()),
            context_tokens=3_500,
        ),
    )
}


def coder_version(coder: Coder) -> str:
    """The version that is installed."""
    (package,) = coder.packages
    for manifest in NPM_MORE.glob(f"{package}/package.json"):
        return str(json.loads(manifest.read_text())["version"])
    folder = package.replace("-", "_")
    environments = (
        environment.parent for environment in (PYTHON.parent, PYTHON_AGENTS, AIDER.parent)
    )
    found = next(
        path
        for environment in environments
        for path in environment.glob(f"lib/python*/site-packages/{folder}-*.dist-info")
    )
    return found.name.removesuffix(".dist-info").rpartition("-")[2]


def end_leftovers(folder: Path) -> None:
    """Cline leaves a process behind that names the folder in which it was started."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = entry.read_bytes().split(b"\0")
            if b"--cline-hub-daemon" in words and os.fsencode(folder) in words:
                os.kill(int(entry.parent.name), signal.SIGKILL)
