"""Running the official clients, each in an environment of its own, against a server with models for them.

`make test` installs the clients; their libraries never meet the server's.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support import Served, ServedProcess, served_process

ROOT = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
NODE = ROOT / ".venv-clients" / "bin" / "node"
NODE_MODULES = ROOT / ".cache" / "npm" / "node_modules"
RUN_S_MAX = 60

LOOP_TURNS = 30
LOOP_END = "The weather is known in all 29 cities."
CITIES = [f"City {index}" for index in range(1, LOOP_TURNS)]


def weather(city: str) -> dict[str, Any]:
    """A scripted call."""
    return {"name": "get_weather", "arguments": {"city": city}}


LOOP = [{"calls": [weather(city)]} for city in CITIES] + [{"text": LOOP_END}]
# The first turn takes long enough for two lanes to be seen beside each other.
LANES = [
    {"pad_tokens": 250, "calls": [weather("Oslo")]},
    {"calls": [weather("Rome")]},
    {"text": "Both."},
]
THINKING = [
    {"reasoning": "Which city?\nOslo.", "calls": [weather("Oslo")]},
    {"reasoning": "It is sunny.", "text": "Sunny."},
]

# The models of the server: how each speaks, and at what speed.
MODELS: dict[str, dict[str, Any]] = {
    "loop": {"turns": LOOP},
    "improvised": {},
    "lanes": {"turns": LANES, "tps": 500},
    "slow": {"turns": [{"text": "So:", "pad_tokens": 60}], "tps": 40},
    "thinking-text": {"turns": THINKING, "reasoning": "text"},
    "thinking-summary": {"turns": THINKING, "reasoning": "summary"},
    "thinking-hidden": {"turns": THINKING, "reasoning": "hidden"},
}


@contextmanager
def serving_clients(folder: Path) -> Iterator[ServedProcess]:
    """The command itself, with all these models and a real database."""
    lines: list[str] = []
    for name, model in MODELS.items():
        fields = {"name": name, **model}
        if turns := fields.pop("turns", None):
            script = folder / f"{name}.json"
            script.write_text(json.dumps({"turns": turns}))
            fields["script"] = str(script)
        lines += ["[[models]]", *(f"{key} = {json.dumps(one)}" for key, one in fields.items())]
    config = folder / "segue.toml"
    config.write_text("\n".join(lines))
    store = f"sqlite:///{folder / 'turns.db'}"
    with served_process("--config", str(config), "--store", store, cwd=folder) as served:
        yield served
        assert not [line for line in served.printed if "Traceback" in line], served.printed


def run_python(
    script: str, served: Served | ServedProcess, *arguments: str, s_max: float = RUN_S_MAX
) -> Any:
    """What a script of the Python client prints."""
    command = [str(PYTHON), "-W", "error", str(SCRIPTS / script)]
    return _run(command, served, arguments, s_max)


def run_node(
    script: str, served: ServedProcess, *arguments: str, modules: Path = NODE_MODULES
) -> Any:
    """What a script of the JavaScript client prints, or of another one in this folder."""
    command = [str(NODE), "--no-warnings", str(SCRIPTS / script)]
    return _run(command, served, arguments, modules=modules)


def misfits(values: Sequence[Mapping[str, Any]]) -> list[str]:
    """What in these events and responses does not fit the types of the Python client."""
    assert PYTHON.exists(), "the clients are not installed: run `make test`"
    done = subprocess.run(
        [str(PYTHON), str(SCRIPTS / "python_types.py")],
        input=json.dumps(values),
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[str] = json.loads(done.stdout)
    return found


def _run(
    command: list[str],
    served: Served | ServedProcess,
    arguments: tuple[str, ...],
    s_max: float = RUN_S_MAX,
    modules: Path = NODE_MODULES,
) -> Any:
    assert Path(command[0]).exists(), "the clients are not installed: run `make test`"
    done = subprocess.run(
        [*command, f"{served.url}/v1", *arguments],
        env={**os.environ, "NODE_PATH": str(modules)},
        capture_output=True,
        text=True,
        timeout=s_max,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)
