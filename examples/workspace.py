"""The tools of a small coding agent, for the Python examples: list, read, edit, test, in one folder.

Every path is checked to stay inside the folder, every result is text for the model, and nothing raises: a mistake
of the model is returned to it as text, and it may try again.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

TASK = "The tests in this folder fail. Find the bug, fix it, and run the tests."
INSTRUCTIONS = (
    "You are a coding agent. Work only through the tools: list the files, read what matters, edit it, run the tests. "
    "When the tests pass, say in one sentence what was wrong."
)
READ_CHARS_MAX = 20_000
TEST_S_MAX = 60


class Workspace:
    """One folder, and what may be done in it."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).resolve()

    def list_files(self) -> str:
        """List the files of the project."""
        found = sorted(
            str(path.relative_to(self.folder))
            for path in self.folder.rglob("*")
            if path.is_file() and not any(part.startswith((".", "__")) for part in path.parts)
        )
        return "\n".join(found)

    def read_file(self, path: str) -> str:
        """Read a file of the project."""
        return self._inside(path).read_text()[:READ_CHARS_MAX]

    def edit_file(self, path: str, old: str, new: str) -> str:
        """Replace a text that occurs exactly once in a file by another."""
        file = self._inside(path)
        text = file.read_text()
        if text.count(old) != 1:
            return f"error: the old text occurs {text.count(old)} times in {path}, not once"
        file.write_text(text.replace(old, new))
        return f"{path} is changed"

    def run_tests(self) -> str:
        """Run the project's tests; the last line says whether they pass."""
        # -B: a file that is changed twice within a second must not be taken from the byte-code cache.
        done = subprocess.run(
            [sys.executable, "-B", "-m", "unittest", "-q"],
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=TEST_S_MAX,
            check=False,
        )
        verdict = "the tests pass" if done.returncode == 0 else "the tests fail"
        return f"{(done.stdout + done.stderr)[-READ_CHARS_MAX:]}\n{verdict}"

    def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Run a tool by name; a mistake is an answer too."""
        tools: dict[str, Callable[..., str]] = {
            "list_files": self.list_files,
            "read_file": self.read_file,
            "edit_file": self.edit_file,
            "run_tests": self.run_tests,
        }
        if name not in tools:
            return f"error: there is no tool '{name}'"
        try:
            return tools[name](**arguments)
        except (OSError, TypeError, ValueError, subprocess.TimeoutExpired) as error:
            return f"error: {error}"

    def _inside(self, path: str) -> Path:
        file = (self.folder / path).resolve()
        if not file.is_relative_to(self.folder):
            raise ValueError(f"{path} is outside the project")
        return file


def _tool(name: str, description: str, **properties: str) -> dict[str, Any]:
    return {
        "type": "function",
        "name": name,
        "description": description,
        "parameters": {
            "type": "object",
            "properties": {
                key: {"type": "string", "description": text} for key, text in properties.items()
            },
            "required": list(properties),
            "additionalProperties": False,
        },
        "strict": True,
    }


TOOLS = [
    _tool("list_files", "List the files of the project."),
    _tool("read_file", "Read a file of the project.", path="a path as listed"),
    _tool(
        "edit_file",
        "Replace a text that occurs exactly once in a file by another.",
        path="a path as listed",
        old="the text as it is now",
        new="the text as it is to be",
    ),
    _tool("run_tests", "Run the project's tests; the last line says whether they pass."),
]
