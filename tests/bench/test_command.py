"""`segue bench` as a person runs it: small, against real server processes."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from segue_cli.cli import main
from tests.support import fetch, metric, served_process

KEYS = {
    "way",
    "tokens_per_s",
    "context_tokens",
    "turns",
    "total_s",
    "turn_ms_p50",
    "turn_ms_p99",
    "ttft_ms_p50",
    "cpu_ms_per_turn",
    "bytes_sent",
    "bytes_received",
    "tokens_tokenized",
    "render_cache",
}
SMALL = ("--output-tokens", "60", "--repeat", "1", "--contexts", "12000", "--turns", "3")


def bench(folder: Path, *flags: str) -> tuple[dict[str, Any], str]:
    """Run the command; its JSON and its page."""
    files = ("--json", str(folder / "bench.json"), "--html", str(folder / "bench.html"))
    assert main(["bench", *SMALL, *flags, *files]) == 0
    return json.loads((folder / "bench.json").read_text()), (folder / "bench.html").read_text()


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str]:
    return bench(tmp_path_factory.mktemp("bench"), "--speeds", "0", "--seed", "7", "--bare")


def by_name(report: dict[str, Any]) -> dict[tuple[str, bool, bool], dict[str, Any]]:
    return {(r["way"], r["render_cache"], r["piece_cache"]): r for r in report["runs"]}


def test_json_has_the_promised_keys(measured: tuple[dict[str, Any], str]) -> None:
    report, _ = measured
    assert report["runs"]
    assert all(run.keys() >= KEYS for run in report["runs"])
    assert report["machine"].keys() >= {"cpu", "cores", "python", "segue", "packages"}
    assert report["settings"]["seed"] == 7
    assert report["settings"]["repetitions"] == 1


def test_full_history_is_measured_with_each_cache_and_without(
    measured: tuple[dict[str, Any], str],
) -> None:
    full = {key[1:] for key in by_name(measured[0]) if key[0] == "http-full"}
    assert full == {(False, False), (False, True), (True, True)}


def test_what_is_chained_sends_and_tokenizes_only_what_is_new(
    measured: tuple[dict[str, Any], str],
) -> None:
    runs = by_name(measured[0])
    full = runs["http-full", False, True]
    # Three prompts of 12,000 tokens and more, each tokenized as a whole.
    assert full["tokens_tokenized"] > 36_000
    for way in ("http-chained", "ws", "ws-stored"):
        run = runs[way, True, True]
        assert run["tokens_tokenized"] < 6_000
        assert run["tokens_reused"] > 30_000
        # One tool output a turn is all that is new.
        assert run["items_validated"] == 3
        assert run["bytes_sent"] < full["bytes_sent"]
    recalled = runs["http-full", True, True]
    assert recalled["tokens_tokenized"] < 6_000
    assert recalled["items_validated"] < full["items_validated"]


def test_prompts_and_answers_are_as_long_as_asked(measured: tuple[dict[str, Any], str]) -> None:
    run = by_name(measured[0])["ws", True, True]
    assert 12_000 <= run["prompt_tokens_first"] <= 12_000 * 1.1
    assert abs(run["output_tokens_per_turn"] - 60) <= 3


def test_every_way_reaches_the_same_prompt(measured: tuple[dict[str, Any], str]) -> None:
    """The story is the same: the ways that chain end with the prompt of those that resend, to a few tokens."""
    last = [run["prompt_tokens_last"] for run in measured[0]["runs"] if run["way"] != "rollout"]
    assert max(last) - min(last) < 0.02 * min(last)


def test_shares_and_stages_add_up(measured: tuple[dict[str, Any], str]) -> None:
    for run in measured[0]["runs"]:
        assert sum(run["shares"].values()) == pytest.approx(1, abs=0.01)
        assert all(spent >= 0 for spent in run["stages_ms"].values())
        assert len(run["turn_ms_along"]) == run["turns"]


def test_page_needs_nothing_from_outside(measured: tuple[dict[str, Any], str]) -> None:
    _, page = measured
    without_names = page.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"(https?:)?//\w", without_names)
    assert not re.search(r"<(script|link|img|iframe)\b|@import|url\(", page)
    assert page.count("<svg") == page.count("</svg>") == 3
    assert "prefers-color-scheme:dark" in page


def test_a_way_that_is_left_out_says_why_or_was_measured(
    measured: tuple[dict[str, Any], str],
) -> None:
    report, page = measured
    ways = {run["way"] for run in report["runs"]}
    assert ("rollout" in ways) != ("rollout" in report["left_out"])
    if why := report["left_out"].get("rollout"):
        assert "rollout" in why
        assert why.split(":")[0] in page


def test_network_is_slower_by_its_round_trips(tmp_path: Path) -> None:
    flags = ("--speeds", "0", "--ways", "http-new,ws", "--tls", "--rtt-ms", "40")
    report, _ = bench(tmp_path, *flags)
    by_way = {run["way"]: run for run in report["runs"]}
    # One round trip a turn on an open socket; a new connection adds those of TCP and TLS.
    assert by_way["ws"]["turn_ms_p50"] >= 40
    assert by_way["http-new"]["turn_ms_p50"] >= 120


async def test_a_server_that_runs_already_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served_process("--store", "memory", cwd=tmp_path) as served:
        report, page = bench(
            tmp_path, "--url", served.url, "--model", "scripted", "--ways", "ws", "--key", "sk-abc"
        )
        assert (await fetch(served, "GET", "/health")).status == 200
        ended = [
            await metric(served, f'segue_turns_total{{outcome="{outcome}",transport="websocket"}}')
            for outcome in ("completed", "incomplete")
        ]
        # The opening and three turns, some of them cut at the asked length.
        assert sum(ended) == 4
    (run,) = report["runs"]
    assert run["cpu_ms_per_turn"] is None
    assert run["render_cache"] is None
    assert run["tokens_per_s"] is None
    assert run["tokens_tokenized"] is not None
    assert "sk-abc" not in page + json.dumps(report) + capsys.readouterr().out


def test_nobody_there_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        assert main(["bench", "--url", url, "--model", "any"]) == 1
    said = capsys.readouterr().err
    assert said.startswith(f"segue bench: {url} cannot be reached")
    assert said.count("\n") == 1


def test_a_model_that_is_not_there_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with served_process("--store", "memory", cwd=tmp_path) as served:
        assert main(["bench", "--url", served.url, "--model", "nobody", "--ways", "ws"]) == 1
    assert "nobody" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags, word",
    [
        (("--ways", "pigeon"), "pigeon"),
        (("--speeds", "fast"), "--speeds"),
        (("--contexts", "-5"), "--contexts"),
        (("--url", "http://127.0.0.1:1"), "--model"),
        (("--url", "http://127.0.0.1:1", "--model", "m", "--tls"), "--tls"),
        (("load", "--lanes", "17"), "--lanes"),
        (("load", "--connections", "0"), "--connections"),
    ],
)
def test_wrong_flags_are_refused_before_anything_starts(
    flags: tuple[str, ...], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *flags]) == 2
    assert word in capsys.readouterr().err
