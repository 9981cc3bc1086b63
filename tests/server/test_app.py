"""What a whole server loads: nothing that it does not use."""

from __future__ import annotations

import json
import urllib.request
from pathlib import Path

import pytest

from tests.support import ServedProcess, loaded_modules, served_process

# Each import is printed, by Python itself.
IMPORTS = {"PYTHONPROFILEIMPORTTIME": "1"}
UNUSED = (
    "segue.cluster",
    "segue.guards",
    "segue.tools",
    "segue.mcp",
    "segue.web",
    "segue.documents",
    "segue.openapi",
    "segue.workers.supervisor",
    "segue_cli.client.chat",
    "segue_cli.client.connect",
    "segue_bench",
)


def ask(served: ServedProcess) -> None:
    body = json.dumps({"model": "scripted", "input": "Hello"}).encode()
    request = urllib.request.Request(
        f"{served.url}/v1/responses", body, {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        assert json.load(answer)["status"] == "completed"


@pytest.mark.parametrize("store", ["memory", "sqlite:///turns.db"])
def test_plain_server_and_its_text_turn_load_only_what_they_use(tmp_path: Path, store: str) -> None:
    with served_process("--store", store, cwd=tmp_path, environment=IMPORTS) as served:
        ask(served)
    names = loaded_modules(served)
    assert {"segue.server.app", "segue.turn.loop"} <= names
    assert not names & set(UNUSED)


def test_configured_guard_and_tool_are_loaded_at_the_start(tmp_path: Path) -> None:
    flags = ("--store", "memory", "--guard", "rules", "--fetch", "public")
    with served_process(*flags, cwd=tmp_path, environment=IMPORTS) as served:
        pass
    assert {"segue.guards.rules", "segue.tools.hosted"} <= loaded_modules(served)
