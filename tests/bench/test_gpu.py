"""The parts of the GPU benchmark that need no GPU: reading streams, and making a report of results."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from bench.gpu import report, talk
from bench.gpu.__main__ import cases_of, parse, run
from bench.gpu.agents import AGENT_WAYS
from bench.gpu.cases import WAYS, Case, Choice, Figures, agent_cases, stages
from bench.gpu.servers import ENGINES, Servers
from bench.peer import server
from segue_bench.client import ClientConnection

STREAM = b'data: {"a":"\\n\\ndata: "}\n\nevent: x\ndata: {"b":1}\n\n: ping\n\ndata: [DONE]\n\n'


@pytest.mark.parametrize("size", range(1, len(STREAM)))
def test_events_do_not_depend_on_where_a_stream_is_cut(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks: Iterator[bytes] = iter([STREAM[:size], STREAM[size:], b""])
    monkeypatch.setattr(talk, "read_chunk", lambda connection: next(chunks))
    events = list(talk.sse(ClientConnection.__new__(ClientConnection)))
    assert events == [b'{"a":"\\n\\ndata: "}', b'{"b":1}', b"[DONE]"]


def figures(case: Case, turn_ms: float) -> Figures:
    """A loop whose turns all take this long."""
    return Figures(
        case=case,
        loop_s=case.turns * turn_ms / 1e3,
        ttft_ms=[turn_ms / 2] * case.turns,
        turn_ms=[turn_ms] * case.turns,
        computed_per_turn=500.0,
        cpu_ms={"front": 1.0, "core": 2.0},
    )


def test_rounds_are_put_together_and_compared_with_the_ids() -> None:
    loops = [
        figures(Case("plain", way, 100_000, round=number), ms)
        for number in (0, 1)
        for way, ms in (("ws", 100.0), ("ids", 80.0), ("chat", 200.0))
    ]
    ids, chat, ws = report.rows_of(1, loops)
    assert [ids.way, chat.way, ws.way] == ["ids", "chat", "ws"]
    assert (ws.turns, ws.loop_s, ws.beyond_ids) == (20, 2.0, 0.2)
    assert ws.loop_beyond_ids == [0.25, 0.25]
    assert "| Segue socket | 2.00 s | −50% |" in report.tables([ids, chat, ws])
    ElementTree.fromstring(report.chart([ids, chat, ws]))


def test_a_round_is_compared_with_the_ids_of_the_same_round() -> None:
    ids = [figures(Case("plain", "ids", 20_000, 8, round=number), 100.0) for number in (0, 2)]
    ws = [figures(Case("plain", "ws", 20_000, 8, round=n), 110.0 + 10 * n) for n in (2, 1, 0)]
    assert report.rows_of(1, [*ws, *ids])[1].loop_beyond_ids == [0.1, 0.3]


def test_the_flags_choose_cases_round_by_round_with_the_ways_in_turn() -> None:
    flags = "measure plain --ways ids ws --conversations 8 32 --rounds 3 --turns 5 --contexts 20000"
    cases = cases_of(parse(flags.split()), ["plain"])
    assert [case.round for case in cases] == [0] * 4 + [1] * 4 + [2] * 4
    assert {(case.context, case.turns) for case in cases} == {(20_000, 5)}
    assert [(case.conversations, case.way) for case in cases[:8]] == [
        *((8, "ids"), (8, "ws"), (32, "ids"), (32, "ws")),
        *((8, "ws"), (8, "ids"), (32, "ws"), (32, "ids")),
    ]


def test_without_such_flags_every_case_of_the_engines_is_measured() -> None:
    cases = cases_of(parse(["measure", "--contexts", "1000"]), ["rust"])
    assert cases == [Case("rust", "chat", 1_000), Case("rust", "ws", 1_000)]


@pytest.mark.parametrize(
    "flags",
    ["measure nosuch", "measure --pairs plain", "measure --rounds 0", "measure --ways carrier"],
)
def test_flags_that_mean_nothing_are_refused(
    flags: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(flags.split())
    assert "error:" in capsys.readouterr().err


def test_cases_that_do_not_fit_into_the_time_are_left_out_and_done_ones_are_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]

    def played(case: Case, servers: Servers, seconds: float) -> Figures:
        clock[0] += 10.0
        return figures(case, 1.0)

    now = SimpleNamespace(monotonic=lambda: clock[0])
    monkeypatch.setattr("bench.gpu.__main__.time", now)
    monkeypatch.setattr("bench.gpu.__main__.measure", played)
    cases = Choice(rounds=2).cases(["plain"])
    assert not run(Servers(tmp_path), cases, until=25.0)
    assert "no time left for 2 of 4 cases" in capsys.readouterr().out
    assert run(Servers(tmp_path), cases, until=1_000.0)
    played_once = [one.case for one in report.results(tmp_path / "results.jsonl")]
    assert sorted(map(str, played_once)) == sorted(map(str, cases))


def test_a_case_that_failed_is_no_row() -> None:
    assert report.rows_of(1, [Figures(case=Case("plain", "ws", 1_000), failed="refused")]) == []


def test_every_case_has_an_engine_that_runs_and_a_name_in_the_tables() -> None:
    for stage in stages():
        for case in stage.cases:
            assert case.engine in stage.engines
            assert case.engine in ENGINES
            assert report.name_of(case.engine, case.way)


def test_every_way_of_every_engine_has_a_row_of_its_own() -> None:
    """Whatever is measured by flags can be reported."""
    cases = [Case(engine, way, 100_000) for engine in ENGINES for way in WAYS]
    rows = report.rows_of(1, [figures(case, 100.0) for case in cases])
    assert len({(row.model, row.name) for row in rows}) == len(cases)
    assert "Claude Code's loop, reminder" in report.tables(rows)
    assert {case.way for case in agent_cases()} == set(AGENT_WAYS)
    ElementTree.fromstring(report.chart(rows))


def test_steps_are_compared_with_the_ids_of_the_same_round_straight_and_on_rust() -> None:
    told = {("big", "ids"): 100.0, ("big-rust", "ids"): 80.0, ("big-two-128", "ws"): 60.0}
    loops = [
        replace(figures(Case(engine, way, 100_000, round=n), ms + n), engine_ms={"prefill": 20.0})
        for (engine, way), ms in told.items()
        for n in (0, 100)
    ]
    table = report.pairs_table([loops])
    row = next(line for line in table.splitlines() if "step two" in line)
    assert row == (
        "| Segue socket, step two, blocks of 128 | 55 ms | 35 ms"
        " | 0.60 0.80 | 0.75 0.89 | 0.60 0.80 | 0.75 0.89 |"
    )


def test_pairs_of_engine_and_way_take_turns_within_a_round() -> None:
    flags = "measure plain two --pairs plain:ids two:ws --rounds 2 --contexts 100000"
    cases = cases_of(parse(flags.split()), ["plain", "two"])
    played = [(case.engine, case.way, case.round) for case in cases]
    assert played == [
        *(("plain", "ids", 0), ("two", "ws", 0), ("two", "ws", 1), ("plain", "ids", 1))
    ]


@pytest.fixture(scope="module")
def place() -> Iterator[talk.Place]:
    script = {"turns": [{"text": "So it is."}]}
    flags = ("--model", "m", "--context-tokens", "200000")
    with server(script, *flags, is_pinned=False) as process:
        yield talk.Place(f"http://127.0.0.1:{process.port}", [], Path(), 100, 0.0)


@pytest.mark.parametrize("way", [way for way, (gateway, _) in AGENT_WAYS.items() if gateway])
def test_agents_loop_is_understood(place: talk.Place, way: str) -> None:
    """Each turn has all that was before, and the found tools."""
    loop = AGENT_WAYS[way][1](place)
    loop.say("user", "the text " * 1_000)
    turns = [loop.turn()]
    for _ in range(4):
        loop.say("user", "what a tool said " * 10)
        turns.append(loop.turn())
    loop.connection.close()
    sizes = [turn.prompt for turn in turns]
    assert sizes == sorted(sizes)
    new = [after - before for before, after in pairwise(sizes)]
    assert min(new) > 40
    # The third output was that of a search, after which there is one more tool.
    assert (new[2] > 1.5 * new[1]) == ("search" in way)
    assert all(turn.output > 0 < turn.ttft_s <= turn.turn_s for turn in turns)
