"""Is a forced call held to the words of the family? The other families are a column of the matrix."""

import pytest

from tests.models.families import BY_NAME
from tests.models.forced import check
from tests.models.talk import Model

FORMATS = ["Qwen3.5", "GLM-4.6", "Kimi K2"]


@pytest.mark.parametrize("name", FORMATS)
def test_call_that_the_template_writes_can_be_forced(name: str) -> None:
    check(Model(BY_NAME[name]))
