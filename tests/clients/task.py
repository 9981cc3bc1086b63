"""The task that every agent gets: a small real repository with a failing test, and the scripts that make a scripted
engine list its files, read one, patch it, run the tests and say so.

A script is written for the tools that an agent offers: our examples' four functions, Codex's shell, its patch tool, or
its JavaScript.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

Turns = list[dict[str, Any]]

MONEY = '''"""Sums of prices in cents."""


def total(prices):
    """What all of them cost together."""
    cents = 0
    for price in prices[1:]:
        cents += price
    return cents
'''
TEST_MONEY = """import unittest

from money import total


class Total(unittest.TestCase):
    def test_every_price_counts(self):
        self.assertEqual(total([100, 20, 3]), 123)

    def test_nothing_costs_nothing(self):
        self.assertEqual(total([]), 0)
"""
OLD, NEW = "prices[1:]", "prices"
END = "The first price was skipped. It counts now, and the tests pass."
PROMPT = "The tests in this folder fail. Find the bug, fix it, and run the tests."


def make_repository(folder: Path) -> Path:
    """The repository, broken, under version control."""
    folder.mkdir(parents=True)
    (folder / "money.py").write_text(MONEY)
    (folder / "test_money.py").write_text(TEST_MONEY)
    (folder / "README.md").write_text("# Money\n\nTest with `python3 -m unittest`.\n")
    subprocess.run(["git", "init", "-q", str(folder)], check=True)
    return folder


def passes(folder: Path) -> bool:
    """Whether the repository's own tests really pass."""
    command = [sys.executable, "-B", "-m", "unittest", "-q"]
    done = subprocess.run(command, cwd=folder, capture_output=True, timeout=60, check=False)
    return done.returncode == 0


def call(name: str, **arguments: Any) -> dict[str, Any]:
    """A scripted turn that calls one function."""
    return {"calls": [{"name": name, "arguments": arguments}]}


def by_functions() -> Turns:
    """For the four tools of our examples."""
    return [
        call("list_files"),
        call("read_file", path="money.py"),
        call("edit_file", path="money.py", old=OLD, new=NEW),
        call("run_tests"),
        {"text": END},
    ]


TEST_COMMAND = "python3 -B -m unittest -q"


def by_shell() -> Turns:
    """For Codex with a model that it does not know: everything is a shell command."""
    commands = ("ls", "cat money.py", f"sed -i 's/prices.1:./{NEW}/' money.py", TEST_COMMAND)
    return [call("exec_command", cmd=command) for command in commands] + [{"text": END}]


PATCH = f"""*** Begin Patch
*** Update File: money.py
@@
-    for price in {OLD}:
+    for price in {NEW}:
*** End Patch
"""


def by_patch() -> Turns:
    """For Codex with a model that has the custom tool `apply_patch`."""
    return [
        call("exec_command", cmd="ls"),
        call("exec_command", cmd="cat money.py"),
        {"calls": [{"name": "apply_patch", "input": PATCH}]},
        call("exec_command", cmd=TEST_COMMAND),
        {"text": END},
    ]


def by_code() -> Turns:
    """For Codex in code mode: the custom tool `exec` of a namespace takes JavaScript."""

    def shell(command: str) -> dict[str, Any]:
        code = (
            f"const r = await tools.exec_command({json.dumps({'cmd': command})}); text(r.output);"
        )
        return {"calls": [{"name": "functions.exec", "input": code}]}

    edit = {
        "calls": [
            {
                "name": "functions.exec",
                "input": f"text(await tools.apply_patch({json.dumps(PATCH)}));",
            }
        ]
    }
    return [shell("ls"), shell("cat money.py"), edit, shell(TEST_COMMAND), {"text": END}]


def write_script(path: Path, turns: Turns) -> Path:
    """A file for `--script`."""
    path.write_text(json.dumps({"turns": turns}))
    return path
