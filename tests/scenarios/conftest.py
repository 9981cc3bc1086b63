"""A scenario that fails prints its last turn; what Messages and Chat sent is held to the types of their clients."""

from tests.last_turn import pytest_runtest_makereport, remember_the_last_turn
from tests.shapes import hold_answers_to_the_types

__all__ = ["hold_answers_to_the_types", "pytest_runtest_makereport", "remember_the_last_turn"]
