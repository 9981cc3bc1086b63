"""What a whole server loads, and in which order it is built and closed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PROGRAM = """
import asyncio, sys
from segue.app import open_app
from segue.cli import main
from segue.settings import load_settings

async def run():
    flags = {"engine": "scripted", "store": "sqlite:///turns.db", "port": 0}
    async with open_app(load_settings(flags, environment={})) as app:
        assert app.peers is None

asyncio.run(run())
print(*sorted(name for name in sys.modules if name.startswith("segue.")))
"""


def test_server_of_one_process_loads_neither_cluster_nor_commands_of_clients(
    tmp_path: Path,
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    loaded = done.stdout.split()
    assert "segue.app" in loaded
    for name in ("segue.cluster", "segue.workers", "segue.commands.connect", "segue.commands.chat"):
        assert not [one for one in loaded if one == name or one.startswith(f"{name}.")], name
