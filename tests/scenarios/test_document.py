"""The server does what its own OpenAPI document says, whatever it is asked: a few requests of every operation.

`tests/reliability/test_document.py` is the long run.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import Phase, settings
from schemathesis import GenerationMode

from tests.asking import ASKED, Place, ask, furnished

FEW = settings(
    max_examples=5,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    with furnished(tmp_path_factory.mktemp("served")) as one:
        yield one


@pytest.mark.parametrize("label, mode", ASKED, ids=lambda one: getattr(one, "value", one))
def test_answers_are_those_of_the_document(place: Place, label: str, mode: GenerationMode) -> None:
    ask(place, label, mode, FEW)
