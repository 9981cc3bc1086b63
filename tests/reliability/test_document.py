"""Hundreds of requests of every operation of our OpenAPI document, and Schemathesis' own systematic ones."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from schemathesis import GenerationMode

from tests.asking import ASKED, NAMES_OF_CHECKS, Place, ask, furnished

pytestmark = pytest.mark.reliability

MANY = settings(max_examples=200, deadline=None, print_blob=True)
RUN_S_MAX = 900


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with furnished(tmp_path_factory.mktemp("served")) as one:
        yield one


@pytest.mark.parametrize("label, mode", ASKED, ids=lambda one: getattr(one, "value", one))
def test_answers_are_those_of_the_document(place: Place, label: str, mode: GenerationMode) -> None:
    ask(place, label, mode, MANY)


def test_every_value_at_its_limits_and_every_method_is_answered_as_the_document_says(
    place: Place, tmp_path: Path
) -> None:
    """Some thirty thousand requests: each field at and beyond its limits, each method on each path, and chains of
    requests that use what others gave."""
    checks = [*NAMES_OF_CHECKS, "unsupported_method", "allow_header_conformance", "use_after_free"]
    asked = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run", f"{place.url}/openapi.json"),
            *("--checks", ",".join(checks), "--phases", "coverage,stateful"),
            *("--continue-on-failure", "--generation-database", "none", "--request-timeout", "30"),
        ],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
        check=False,
    )
    assert asked.returncode == 0, asked.stdout[-5000:] + asked.stderr[-2000:]
