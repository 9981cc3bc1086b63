"""Many at once: 5,000 idle connections, 200 readers that never read, and herds of 2,000 that come back."""

from __future__ import annotations

import pytest

from segue_bench.crowd import DisconnectCause, run_crowd, run_reconnect
from tests.crowds import check_herd, check_idle, check_stalled

pytestmark = [pytest.mark.reliability, pytest.mark.timeout(600)]

STREAMS = 50
TOKENS_PER_S = 100


def test_fifty_streams_go_on_beside_five_thousand_idle_connections() -> None:
    # Longer than the beat of pings: a connection that cannot answer them would be lost.
    check_idle(run_crowd("idle", 5_000, STREAMS, TOKENS_PER_S, 30))


def test_fifty_streams_go_on_beside_two_hundred_readers_that_never_read() -> None:
    check_stalled(run_crowd("stalled", 200, STREAMS, TOKENS_PER_S, 10))


@pytest.mark.parametrize("how", ["stop", "kill", "cut"])
def test_herd_of_two_thousand_comes_back_and_goes_on(how: DisconnectCause) -> None:
    check_herd(run_reconnect(2_000, how))
