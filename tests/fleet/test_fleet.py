"""A whole fleet: PostgreSQL, two machines, HAProxy in turns, replicas that count. Do conversations stay warm there?"""

from __future__ import annotations

import argparse
import asyncio

import pytest

import bench.fleet
from bench.fleet import OF_ORACLE_MIN, RESTARTS, play_kill, play_restarts, play_ways, running
from bench.fleet_play import WAYS, Way


def options_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.fleet.add_arguments(parser)
    return parser.parse_args(words)


def test_chains_find_their_prompts_wherever_they_continue() -> None:
    """By socket, chained and with full history, in turns over two machines, as well as one who knows everything."""
    few = "--sessions 6 --turns 4 --gap-s 0.1 --stagger-s 60 --workers 1 --replicas 3"
    options = options_of(*few.split(), "--time-factor", "200", "--tokens-per", "64")
    with running(options) as rig:
        judged = asyncio.run(play_ways(rig, WAYS))
    for way, one in judged.items():
        assert one.jobs == 24, way
        assert one.of_oracle >= OF_ORACLE_MIN, f"{way}: {one.of_oracle:.1%}"
        # It is a test of routes only where something is shared, and more than one replica is used.
        assert one.shared_tokens > one.prompt_tokens / 2
        assert sum(tokens > 0 for tokens in one.computed.values()) > 1


SOME = "--sessions 16 --turns 6 --gap-s 20 --stagger-s 60"


@pytest.mark.fleet
@pytest.mark.parametrize("way", WAYS)
def test_chains_stay_warm_after_a_restart_of_any_process(way: Way) -> None:
    with running(options_of(*SOME.split())) as rig:
        judged = asyncio.run(play_restarts(rig, way))
    assert set(judged) == set(RESTARTS)
    for name, one in judged.items():
        assert one.jobs >= 32, name
        if name != "nothing":
            assert one.of_oracle >= OF_ORACLE_MIN, f"{name}: {one.of_oracle:.1%}"


@pytest.mark.fleet
@pytest.mark.parametrize("what", ["machine-b", "replica-1"])
@pytest.mark.parametrize("way", WAYS)
def test_no_turn_is_lost_when_a_machine_or_a_replica_is_killed(way: Way, what: str) -> None:
    with running(options_of(*SOME.split())) as rig:
        found = asyncio.run(play_kill(rig, way, what))
    assert found["turns"] == 96
    assert found["turns_lost"] == 0
    # Clients may hear an error, and go on when they ask again.
    assert isinstance(found["tries_max"], int)
    assert found["tries_max"] <= 8
