"""Many at once, in small: idle connections, readers that never read, a herd that comes back. The numbers that count are
in tests/reliability/test_crowds.py."""

from __future__ import annotations

from segue_bench.crowd import run_crowd, run_reconnect
from tests.crowds import check_herd, check_idle, check_stalled

OUTBOX_BYTES_MAX = 100_000


def test_streams_go_on_beside_idle_connections_that_are_kept() -> None:
    check_idle(run_crowd("idle", 200, 5, 100, 1.5))


def test_streams_go_on_beside_readers_that_never_read_and_are_cut() -> None:
    flags = ("--write-s-max", "2", "--outbox-bytes-max", str(OUTBOX_BYTES_MAX))
    check_stalled(run_crowd("stalled", 10, 5, 400, 1.5, *flags))


def test_herd_that_was_told_to_leave_comes_back_and_goes_on() -> None:
    check_herd(run_reconnect(100, "stop"))
