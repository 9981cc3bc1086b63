"""How does a person start an agent on this server? `segue run AGENT [ARGUMENTS]`.

In: the name of an agent that is installed. Out: the agent in the foreground, with a configuration of its own that names
the server, the model and the key; its exit status. Where no server answers, one is started for it, and stopped at its
end. The person's own configuration of the agent is not changed.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec

from segue.errors import Misconfigured
from segue.printable import say
from segue_cli.client.clients import (
    CLIENTS,
    CLINE_PROVIDERS,
    api_of,
    opencode,
    pi,
    qwen_auth,
    snippet,
)
from segue_cli.client.talk import (
    ModelEndpoint,
    NotReachable,
    RunningServer,
    add_api,
    add_model,
    add_server,
    find_endpoint,
    server_of,
)

STOP_S_MAX = 40.0
ANNOUNCED = re.compile(r" at (https?://\S+)/v1")
# Flags of `segue serve` that a server is started with here.
SERVER_FLAGS = {
    "engine": ("NAME", "engine of a server that is started here (default: embedded)"),
    "engine_url": ("URL", "URL of its engine"),
    "script": ("FILE", "file that its scripted engine plays"),
}


class Setup(NamedTuple):
    """What an agent is started with: files of its folder by name, words after its name, its environment."""

    files: dict[str, str] = {}
    words: tuple[str, ...] = ()
    environment: dict[str, str] = {}


class RunnableAgent(NamedTuple):
    """An agent: how it is installed, what it is started with, and the name that `segue connect` has for it.

    What it is started with depends on the server and its model, a folder, the API key, if any, and the API.
    """

    install: str
    set_up: Callable[[ModelEndpoint, Path, str | None, str], Setup]
    client: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `segue run`."""
    add_server(parser)
    add_model(parser)
    add_api(parser)
    parser.usage = "segue run [FLAGS] AGENT [ARGUMENTS]"
    for name, (metavar, about) in SERVER_FLAGS.items():
        parser.add_argument("--" + name.replace("_", "-"), metavar=metavar, help=about)
    agents = ", ".join(AGENTS)
    parser.add_argument("agent", metavar="AGENT", help=f"the agent to start: {agents}")
    rest = "passed on to the agent; flags for segue go before its name"
    words = parser.add_argument("words", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help=rest)
    words.required = False


def run(options: argparse.Namespace) -> int:
    """Start the agent and wait for it; returns its exit status."""
    agent, program = _find(options.agent)
    api = api_of(agent.client, options.api)
    with _serving(options) as server:
        endpoint = find_endpoint(server, options.model)
        home = _state_home() / "run" / agent.client
        setup = agent.set_up(endpoint, home, server.key, api)
        _write(home, setup.files)
        key = {endpoint.key_env: server.key} if endpoint.key_env and server.key else {}
        environment = {**os.environ, **setup.environment, **key}
        return _wait([program, *setup.words, *options.words], environment)


def _state_home() -> Path:
    """The folder for what is kept between two runs."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "segue"


def _find(name: str) -> tuple[RunnableAgent, str]:
    name = ALIASES.get(name, name)
    if name not in AGENTS:
        raise Misconfigured(f"run: '{name}' cannot be started; choose from {', '.join(AGENTS)}.")
    program = shutil.which(name)
    if program is None:
        install = AGENTS[name].install
        raise Misconfigured(f"run: {name} is not installed, or not in PATH. Install it: {install}")
    return AGENTS[name], program


def _wait(command: list[str], environment: dict[str, str]) -> int:
    with subprocess.Popen(command, env=environment) as process:
        # Ctrl-C belongs to the agent, which may only end a turn.
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            status = process.wait()
        finally:
            signal.signal(signal.SIGINT, before)
    return status if status >= 0 else 128 - status


def _write(home: Path, files: dict[str, str]) -> None:
    """The files of the agent, readable by this person only: one may hold the key."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    home.chmod(0o700)
    for name, text in files.items():
        path = home / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


# --- a server for the agent --------------------------------------------------------------------------


@contextmanager
def _serving(options: argparse.Namespace) -> Iterator[RunningServer]:
    """The server that answers, or one that is started here and stopped at the end."""
    server = server_of(options)
    flags = {name: getattr(options, name) for name in SERVER_FLAGS}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in flags.items() if value]
    if not given and _answers(server, is_named=bool(options.url)):
        yield server
        return
    # A fixed engine was asked for, or no server answers: the server is this agent's alone.
    if options.config:
        given.append(f"--config={options.config}")
    if options.model:
        given.append(f"--model={options.model}")
    with _started(given) as url:
        yield RunningServer(f"{url}/v1")


def _answers(server: RunningServer, *, is_named: bool) -> bool:
    """Whether the server answers; one that was named must."""
    try:
        server.models()
    except NotReachable:
        if is_named:
            raise
        return False
    return True


@contextmanager
def _started(flags: list[str]) -> Iterator[str]:
    """A server on a free port of this machine, without a store, in a session of its own: Ctrl-C does not reach it."""
    own = ["--host", "127.0.0.1", "--port", "0", "--auth", "off", "--store", "memory"]
    own += ["--workers", "1"]
    command = [sys.executable, "-m", "segue_cli.cli", "serve", *own, *flags]
    log = _state_home() / "run" / "server.log"
    log.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (
        log.open("w") as written,
        subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=written,
            text=True,
            start_new_session=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            for line in process.stdout:
                if found := ANNOUNCED.search(line):
                    say(f"segue: started a server at {found[1]}, log: {log}", file=sys.stderr)
                    # What it prints later must not fill the pipe.
                    rest = (process.stdout, written)
                    threading.Thread(target=shutil.copyfileobj, args=rest, daemon=True).start()
                    yield found[1]
                    return
            process.wait()
            raise Misconfigured(f"run: the server did not start. {log.read_text().strip()}")
        finally:
            process.terminate()
            try:
                process.wait(STOP_S_MAX)
            except subprocess.TimeoutExpired:
                process.kill()


# --- agents ------------------------------------------------------------------------------------------


def _codex(endpoint: ModelEndpoint, home: Path, key: str | None, api: str) -> Setup:
    # Imported here: only Codex's file needs tomlkit.
    from segue_cli.client.codex import SMALL_PROMPT, SMALL_PROMPT_TEXT, codex_block

    files = {"config.toml": codex_block(endpoint) + "\n", SMALL_PROMPT: SMALL_PROMPT_TEXT}
    return Setup(files, environment={"CODEX_HOME": str(home)})


def _opencode(endpoint: ModelEndpoint, home: Path, key: str | None, api: str) -> Setup:
    # Wins over the files of the project and of the person.
    return Setup(environment={"OPENCODE_CONFIG_CONTENT": _json(opencode(endpoint, api))})


def _pi(endpoint: ModelEndpoint, home: Path, key: str | None, api: str) -> Setup:
    words = ("--provider", "segue", "--model", endpoint.model)
    folder = {"PI_CODING_AGENT_DIR": str(home)}
    return Setup({"models.json": _json(pi(endpoint, api))}, words, folder)


def _cline(endpoint: ModelEndpoint, home: Path, key: str | None, api: str) -> Setup:
    provider = CLINE_PROVIDERS[api]
    settings = {
        "provider": provider,
        "apiKey": key or "none",
        "model": endpoint.model,
        "baseUrl": endpoint.base_url,
    }
    row = {"settings": settings, "tokenSource": "manual", "updatedAt": "2026-01-01T00:00:00.000Z"}
    stored = {"version": 1, "lastUsedProvider": provider, "providers": {provider: row}}
    files = {"data/settings/providers.json": _json(stored)}
    return Setup(files, ("--config", str(home), "-P", provider, "-m", endpoint.model))


def _continue(endpoint: ModelEndpoint, home: Path, key: str | None, api: str) -> Setup:
    settings = snippet("continue", endpoint, api)
    return Setup({"config.yaml": settings}, ("--config", str(home / "config.yaml")))


def _claude(endpoint: ModelEndpoint, home: Path, key: str | None, api: str) -> Setup:
    # A key of the person's own for another server would be sent beside ours.
    none = {"ANTHROPIC_API_KEY": ""}
    return Setup(environment=_variables("claude-code", endpoint, key, api) | none)


def _qwen(endpoint: ModelEndpoint, home: Path, key: str | None, api: str) -> Setup:
    words = ("--auth-type", qwen_auth(api))
    return Setup(words=words, environment=_variables("qwen-code", endpoint, key, api))


def _aider(endpoint: ModelEndpoint, home: Path, key: str | None, api: str) -> Setup:
    return Setup(environment=_variables("aider", endpoint, key, api))


def _variables(client: str, endpoint: ModelEndpoint, key: str | None, api: str) -> dict[str, str]:
    make = CLIENTS[client].variables
    assert make is not None
    return make(endpoint, api, key or "none")


def _json(value: object) -> str:
    return msgspec.json.encode(value).decode()


NPM = "npm install -g"
AGENTS = {
    "codex": RunnableAgent(f"{NPM} @openai/codex", _codex, "codex"),
    "claude": RunnableAgent(f"{NPM} @anthropic-ai/claude-code", _claude, "claude-code"),
    "opencode": RunnableAgent(f"{NPM} opencode-ai", _opencode, "opencode"),
    "pi": RunnableAgent(f"{NPM} @earendil-works/pi-coding-agent", _pi, "pi"),
    "cline": RunnableAgent(f"{NPM} cline", _cline, "cline"),
    "qwen": RunnableAgent(f"{NPM} @qwen-code/qwen-code", _qwen, "qwen-code"),
    "cn": RunnableAgent(f"{NPM} @continuedev/cli", _continue, "continue"),
    "aider": RunnableAgent("python3 -m pip install aider-chat", _aider, "aider"),
}
# The name of a client leads to its program as well.
ALIASES = {agent.client: name for name, agent in AGENTS.items()}
