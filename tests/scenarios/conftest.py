"""A scenario that fails prints its last turn."""

from tests.last_turn import pytest_runtest_makereport, remember_the_last_turn

__all__ = ["pytest_runtest_makereport", "remember_the_last_turn"]
