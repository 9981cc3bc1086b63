"""A whole fleet: PostgreSQL, two machines, HAProxy in turns, replicas that count. Do conversations stay warm there?"""

from __future__ import annotations

import argparse
import asyncio

import bench.fleet
from bench.fleet import OF_ORACLE_MIN, play_ways, running
from bench.fleet_play import WAYS


def options_of(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    bench.fleet.add_arguments(parser)
    return parser.parse_args(words)


def test_chains_find_their_prompts_wherever_they_continue() -> None:
    """By socket, chained and with full history, in turns over two machines, as well as one who knows everything."""
    options = options_of(
        *(
            "--sessions",
            "6",
            "--turns",
            "4",
            "--gap-s",
            "0.1",
            "--stagger-s",
            "60",
            "--time-factor",
            "200",
        ),
        *("--workers", "1", "--replicas", "3", "--tokens-per", "64"),
    )
    with running(options) as rig:
        judged = asyncio.run(play_ways(rig, WAYS[:2]))
    for way, one in judged.items():
        assert one.jobs == 24, way
        assert one.of_oracle >= OF_ORACLE_MIN, f"{way}: {one.of_oracle:.1%}"
        # It is a test of routes only where something is shared, and more than one replica is used.
        assert one.shared_tokens > one.prompt_tokens / 2
        assert sum(tokens > 0 for tokens in one.computed.values()) > 1
