"""What must hold when many come: nobody who is served is harmed, and memory has a bound. Times are only sanity bounds:
what they are is measured by `segue bench crowd`."""

from __future__ import annotations

from segue_bench.scenes import Beside, Return

# The machine may be busy with other tests; a server that stands still would take longer.
HEALTH_MS_MAX = 30_000
LATE_MS_MAX = 10_000
# The budget of an idle connection.
IDLE_BYTES_MAX = 20 * 1024


def check_streams(scene: Beside) -> None:
    """The streams were served all the time, and so was whoever asked how we are."""
    for told in (scene.alone, scene.beside, scene.again):
        assert told.drops == 0
        assert told.open == scene.streams
        assert told.answers > 0
        assert told.late_ms_p99 is not None
        assert told.late_ms_p99 < LATE_MS_MAX
    assert scene.beside.tokens > scene.alone.tokens / 4
    assert 0 < scene.health_ms_max < HEALTH_MS_MAX


def check_idle(scene: Beside) -> None:
    """No idle connection was dropped, and none is dear."""
    check_streams(scene)
    assert scene.left == scene.guests
    assert scene.beside.lost == 0
    assert scene.guest_bytes <= IDLE_BYTES_MAX


def check_stalled(scene: Beside, outbox_bytes_max: int) -> None:
    """Those who do not read were cut, and held no more than what may wait for a reader.

    It waits as bytes with headers around it, and once more as the events that a late subscriber could still ask for.
    """
    check_streams(scene)
    assert scene.left == 0
    assert scene.peak_bytes - scene.memory_bytes <= scene.guests * (3 * outbox_bytes_max + 512_000)


def check_herd(scene: Return) -> None:
    """All went on from where they were, and none was turned away."""
    herd = scene.herd
    assert herd.served == herd.open == scene.guests
    assert herd.refused == {}
    # Told to leave, or not.
    assert herd.codes == {1012 if scene.how == "stop" else 0: scene.guests}
    assert 0 < scene.health_ms_max < HEALTH_MS_MAX
