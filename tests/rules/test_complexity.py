"""Is every function of the core simple enough to be read at once?

In `turn/`, `process/` and `session/` no function has a cyclomatic complexity above 15 (ruff's C901), except tables. A
made-up function shows that the rule can fail.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "segue"
ROOMS = ("turn", "process", "session")
COMPLEXITY_MAX = 15
# File and function of those that are tables: the docstring of each shows it.
TABLES: set[tuple[str, str]] = set()


def complex_functions(*folders: Path) -> set[tuple[str, str]]:
    """File and name of each function that is too complex."""
    words = ["check", "--isolated", "--select", "C901", "--output-format", "json"]
    limit = ["--config", f"lint.mccabe.max-complexity={COMPLEXITY_MAX}"]
    ran = subprocess.run(
        [sys.executable, "-m", "ruff", *words, *limit, *map(str, folders)],
        check=False,
        capture_output=True,
        text=True,
    )
    return {
        (Path(row["filename"]).name, row["message"].split("`")[1]) for row in json.loads(ran.stdout)
    }


def test_functions_of_the_core_are_simple() -> None:
    assert complex_functions(*(PACKAGE / room for room in ROOMS)) <= TABLES


def test_rule_sees_a_complex_function(tmp_path: Path) -> None:
    branches = "".join(f"    if n == {number}:\n        return {number}\n" for number in range(16))
    (tmp_path / "loop.py").write_text(f"def play(n):\n{branches}")
    assert complex_functions(tmp_path) == {("loop.py", "play")}
