"""Does an error name a command that works where it is read?"""

from __future__ import annotations

import sys

import pytest

from segue import errors
from segue.errors import MissingPackage


@pytest.mark.parametrize(
    "has_pip, command",
    [
        (True, f"{sys.executable} -m pip install 'segue[mcp]'"),
        (False, f"uv pip install --python {sys.executable} 'segue[mcp]'"),
    ],
)
def test_missing_package_is_installed_into_the_environment_that_runs(
    monkeypatch: pytest.MonkeyPatch, has_pip: bool, command: str
) -> None:
    monkeypatch.setattr(errors, "find_spec", lambda name: object() if has_pip else None)
    said = str(MissingPackage("mcp", "mcp", "segue[mcp]"))
    assert said == f"mcp: the package 'mcp' is not installed. Run: {command}"
