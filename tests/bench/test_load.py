from __future__ import annotations

import json
from array import array
from pathlib import Path

from segue_bench.load import LoadRun, summarise
from segue_bench.machine import describe
from segue_bench.streams import LATE_STEPS, late_ms, note_late
from segue_cli.cli import main


def test_load_delivers_and_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "load.json"
    flags = ("--connections", "2", "--lanes", "2", "--tps", "200", "--seconds", "1.2")
    assert main(["bench", "load", *flags, "--no-search", "--json", str(file)]) == 0
    load = json.loads(file.read_text())["load"]
    assert load["drops"] == 0
    assert load["answers"] >= 4
    assert 0.7 < load["delivered"] < 1.2
    assert load["event_late_ms_p99"] >= load["event_late_ms_p50"] >= 0


def test_lateness_is_against_the_steadiest_stream_that_fits() -> None:
    late = array("L", bytes(8 * LATE_STEPS))
    # A hundred a second; the third event is 30 ms late, the others on time.
    note_late(late, [5.0, 5.01, 5.05, 5.03], 100)
    assert sum(late) == 4
    assert late_ms(late, 0.5) <= 0.2
    assert 30 <= late_ms(late, 0.99) <= 30.2


def test_an_empty_answer_is_not_late() -> None:
    late = array("L", bytes(8 * LATE_STEPS))
    note_late(late, [], 100)
    assert not any(late)


def probe(streams: int, delivered: float, *, cpu: float = 0.5, client: float = 0.2) -> LoadRun:
    return LoadRun(
        connections=streams,
        lanes=1,
        tokens_per_s=1_000,
        seconds=2,
        tokens_per_s_delivered=streams * 1_000 * delivered,
        delivered=delivered,
        event_late_ms_p50=1,
        event_late_ms_p99=5,
        answers=10,
        drops=0,
        cpu_cores=cpu,
        client_cores=client,
        memory_mb=100,
    )


def test_the_most_streams_that_were_sustained_count() -> None:
    probes = [probe(16, 0.99), probe(32, 0.98), probe(64, 0.5), probe(48, 0.8)]
    report = summarise(describe(), probes[0], probes, 1)
    assert report.streams_per_core == 32
    assert not report.is_client_bound


def test_a_client_that_is_the_limit_is_told() -> None:
    probes = [probe(16, 0.99), probe(32, 0.5, cpu=0.6, client=0.97)]
    assert summarise(describe(), probes[0], probes, 1).is_client_bound
