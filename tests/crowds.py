"""What must hold when many come: nobody who is served is harmed, and memory has a bound. Times are only sanity bounds:
what they are is measured by `segue bench crowd`."""

from __future__ import annotations

from segue_bench.crowd import CrowdRun, ReconnectRun

# The machine may be busy with other tests; a server that stands still would take longer.
HEALTH_MS_MAX = 30_000
LATE_MS_MAX = 10_000
# What else changes in a process meanwhile.
NOISE_BYTES = 16 * 1024 * 1024
# What a client costs that does not read: its outbox, and the events that could be asked for again.
GUEST_BYTES_MAX = 2 * 1024 * 1024
# The budget of an idle connection.
IDLE_BYTES_MAX = 20 * 1024


def check_streams(run: CrowdRun) -> None:
    """The streams were served all the time, and so was whoever asked how we are."""
    for counts in (run.alone, run.beside, run.again):
        assert counts.drops == 0
        assert counts.open == run.streams
        assert counts.answers > 0
        assert counts.late_ms_p99 is not None
        assert counts.late_ms_p99 < LATE_MS_MAX
    assert run.beside.tokens > run.alone.tokens / 4
    assert 0 < run.health_ms_max < HEALTH_MS_MAX


def check_idle(run: CrowdRun) -> None:
    """No idle connection was dropped, and none is dear."""
    check_streams(run)
    assert run.left == run.guests
    assert run.beside.lost == 0
    assert run.guest_bytes <= IDLE_BYTES_MAX


def check_stalled(run: CrowdRun) -> None:
    """Those who do not read were cut, and held no more than what may wait for a reader.

    It waits as frames, and once more as the events that a late subscriber could still ask for.
    """
    check_streams(run)
    assert run.left == 0
    assert run.peak_bytes - run.memory_bytes <= run.guests * GUEST_BYTES_MAX + NOISE_BYTES


def check_herd(run: ReconnectRun) -> None:
    """All went on from where they were, and none was turned away."""
    herd = run.herd
    assert herd.served == herd.open == run.guests
    assert herd.refused == {}
    # Told to leave, or not.
    assert herd.codes == {1012 if run.how == "stop" else 0: run.guests}
    assert 0 < run.health_ms_max < HEALTH_MS_MAX
