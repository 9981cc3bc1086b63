"""A sample of real agent sessions, with faults put in; all of them: `make test-traces FILE=…`."""

from __future__ import annotations

from tests.reports.traces import FAULTS, load, replay


def test_every_fault_is_named_and_nothing_is_said_of_clean_turns() -> None:
    found = replay(load())
    assert found.faults >= 2 * len(FAULTS)
    assert found.turns > 60
    assert found.wrong == ()
