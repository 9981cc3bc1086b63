"""Does an error name what helps where it is read?"""

from __future__ import annotations

import sys

import pytest

from segue import errors
from segue.errors import MissingPackage, model_not_found


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


def test_unknown_model_lists_the_served_ones_and_stays_short() -> None:
    error = model_not_found("gpt-5", {"smollm2": 1, "qwen": 2})
    assert error.message.endswith("you do not have access to it. Served: smollm2, qwen.")
    assert (error.status, error.code, error.param) == (404, "model_not_found", "model")
    many = model_not_found("m" * 9_999, ["n" * 9_999] * 100)
    assert many.message.endswith(" and 92 more.")
    assert len(many.message) < 1_500


def test_key_that_may_use_no_model_is_told_so() -> None:
    assert model_not_found("a", ["b", "c"]).message.endswith(" Served: b, c.")
    assert model_not_found("a", []).message.endswith(" may use none of the models here.")
