"""Runs examples one after the other in one process, which imports the SDK once. Runs in the client's environment.

    python_examples.py BASE_URL "FILE ARGUMENTS" ...

Prints one JSON object: for each example what it printed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def main(base_url: str, *lines: str) -> None:
    """Run each as a program."""
    os.environ["OPENAI_BASE_URL"] = base_url
    sys.path.insert(0, str(EXAMPLES))
    said = {}
    for line in lines:
        file, *words = line.split()
        sys.argv = [file, *words]
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            runpy.run_path(str(EXAMPLES / file), run_name="__main__")
        said[line] = printed.getvalue()
    print(json.dumps(said))


if __name__ == "__main__":
    main(*sys.argv[1:])
