"""The verdict of a soak: what grows is found, what only moves is not; and what is drawn is a picture."""

from __future__ import annotations

import os
import random
from xml.etree import ElementTree

import pytest

from tests.soak.figures import MIB, Sample, descendants, sample, slope, verdicts
from tests.soak.picture import picture

WARM_S = 1200.0


def hours(rss_an_hour: float = 0.0, files_an_hour: float = 0.0, pid: int = 1) -> list[Sample]:
    """Two hours of a process that breathes by 10 MiB and grows by this."""
    chance = random.Random(pid)
    found = []
    for at_s in range(0, 7200, 30):
        rss = 100 * MIB + chance.uniform(0, 10) * MIB + rss_an_hour * at_s / 3600
        files = 40 + int(files_an_hour * at_s / 3600)
        found.append(
            Sample(at_s, pid, "worker", int(rss), 0, 0, files, 0.0, is_rest=at_s % 300 == 0)
        )
    return found


@pytest.mark.parametrize(
    ("samples", "tasks_an_hour", "words"),
    [
        (hours(), 0, []),
        (hours(rss_an_hour=4 * MIB), 0, ["memory"]),
        (hours(rss_an_hour=-4 * MIB), 0, []),
        (hours(files_an_hour=12), 0, ["files"]),
        (hours(), 12, ["tasks"]),
        # One that was killed soon tells nothing.
        (hours() + hours(rss_an_hour=50 * MIB, pid=2)[:60], 0, []),
    ],
)
def test_growth_is_found(samples: list[Sample], tasks_an_hour: int, words: list[str]) -> None:
    tasks = [(at_s, 50.0 + tasks_an_hour * at_s / 3600) for at_s in range(0, 7200, 300)]
    assert [one.partition(":")[0] for one in verdicts(samples, tasks, WARM_S)] == words


def test_one_moment_does_not_make_a_slope() -> None:
    points = [(float(at_s), 500.0 if at_s == 3000 else 1.0) for at_s in range(0, 7200, 60)]
    assert slope(points) == 0


def test_process_is_sampled_with_its_children() -> None:
    own = os.getpid()
    assert descendants(own)[0] == own
    found = sample(own, 1.0, is_rest=False, name="own")
    assert found is not None
    assert found.rss > found.anonymous > MIB
    assert found.files > 2
    assert sample(2**22 + 1, 1.0, is_rest=False) is None


def test_picture_is_well_formed_and_has_every_line() -> None:
    drawn = picture({"memory": {"a <b>": [(0.0, 1.0), (60.0, 2.0)]}, "none": {}}, [30.0], 60.0)
    root = ElementTree.fromstring(drawn)
    assert len(list(root.iter("{http://www.w3.org/2000/svg}polyline"))) == 1
    assert "a <b>" in {one.text for one in root.iter("{http://www.w3.org/2000/svg}text")}
