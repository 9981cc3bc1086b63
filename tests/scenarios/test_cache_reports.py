"""What a turn says of the reuse of its prompt: over HTTP, in the terminal, in the metrics; to its owner only.

A real server with two keys in front of a FAKE vLLM that keeps prefixes as the real one does.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from segue.accounts.hashes import issue_key
from segue.accounts.scopes import OPERATOR
from segue.cluster.hub import Hub
from segue.reports.watch import ReuseWatch
from segue.server.app import WorkerPlace
from segue_cli.cli import main
from tests.contracts.dialect import find_weights
from tests.engines.asking import reply
from tests.engines.fakes.vllm import FakeVllm
from tests.pipeline import BUDGET, OWNER, Listener
from tests.pipeline import staged as staged_process
from tests.support import MODEL, Answer, Served, fetch, metric, serving, until, wire

RULES = "Follow the rules of the house. " * 60
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}}
SCOPES = ("responses", "models", "metrics", "dashboard")
ABSENT = "resp_" + "0" * 32
GENERAL = {"model": "fake", "instructions": RULES, "store": False}
COUNTER = 'segue_reuse_lost_tokens_total{reason="input_changed"}'


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


class Client:
    """One owner's requests."""

    def __init__(self, served: Served, secret: str) -> None:
        self._served, self.secret = served, secret

    async def call(self, verb: str, path: str, body: Any = None) -> Answer:
        headers = {"authorization": f"Bearer {self.secret}"}
        return await fetch(self._served, verb, path, body, headers)

    async def ask(self, **fields: Any) -> dict[str, Any]:
        answer = await self.call("POST", "/v1/responses", {**GENERAL, **fields})
        assert answer.status == 200, answer.body
        response: dict[str, Any] = answer.json
        return response

    async def report(self, response: dict[str, Any]) -> dict[str, Any]:
        answer = await self.call("GET", f"/v1/responses/{response['id']}/cache")
        assert answer.status == 200, answer.body
        report: dict[str, Any] = answer.json
        return report


@asynccontextmanager
async def staged(folder: Path) -> AsyncIterator[tuple[FakeVllm, Served, Client, Client, Client]]:
    """The engine, the server, two owners, and an operator."""
    async with FakeVllm(reply) as fake:
        flags = {
            "engine": "vllm",
            "engine_url": [fake.url],
            "model": ["fake"],
            "auth": "keys",
            "store": f"sqlite:///{folder / 'turns.db'}",
            "tokenizer": str(find_weights("smollm2")),
        }
        async with serving(**flags) as served:
            app = served.app
            clients = []
            for owner in ("ada", "eve", "operator"):
                scopes = (OPERATOR,) if owner == "operator" else SCOPES
                key = await issue_key(app.state.store.keys, app.state.hashes, "test", owner, scopes)
                clients.append(Client(served, key[1]))
            yield fake, served, *clients


def test_turns_are_compared_and_their_owner_reads_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asyncio.run(_play(tmp_path, capsys))
    # Texts of turns that are not stored are in memory only.
    for file in tmp_path.iterdir():
        assert b"12:04" not in file.read_bytes(), file


async def _play(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with staged(tmp_path) as (fake, served, ada, eve, operator):
        await _clean_turns_lose_nothing(ada)
        changed = await _changed_line_is_found(ada, served)
        await _engine_is_told_apart(ada, fake)
        await _only_the_owner_reads_it(ada, eve, operator, changed)
        await _terminal_shows_both_texts(ada, served, changed, capsys)


async def _clean_turns_lose_nothing(ada: Client) -> None:
    """A full history that grows; a chain; another conversation with the same instructions."""
    first = await ada.ask(input=[user("One.")])
    assert (await ada.report(first))["verdict"] == "first"
    given = [user("One."), *first["output"], user("Two.")]
    second = await ada.ask(input=given)
    report = await ada.report(second)
    assert (report["verdict"], report["comparison"]) == ("hit", "nearest")
    assert report["compared_with"] == first["id"]
    assert report["reusable_tokens"] > 300
    parent = await ada.ask(input=[user("Hello.")], store=True)
    assert (await ada.report(parent))["lost_tokens"] == 0
    child = await ada.ask(input=[user("More.")], previous_response_id=parent["id"])
    report = await ada.report(child)
    assert (report["verdict"], report["comparison"]) == ("hit", "parent")
    assert report["compared_with"] == parent["id"]
    details = child["usage"]["input_tokens_details"]
    assert report["cached_tokens"] == details["cached_tokens"] > 0
    written = child["usage"]["input_tokens"] - details["cached_tokens"]
    assert details["cache_write_tokens"] == written


async def _changed_line_is_found(ada: Client, served: Served) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {ada.secret}"}
    before = await _lost(served, headers)
    first = await ada.ask(input=[user("Where?")], instructions="It is 12:04.\n" + RULES)
    given = [user("Where?"), *first["output"], user("There?")]
    second = await ada.ask(input=given, instructions="It is 12:05.\n" + RULES)
    report = await ada.report(second)
    assert (report["verdict"], report["reason"]) == ("prompt_changed", "input_changed")
    assert report["compared_with"] == first["id"]
    place = report["place"]
    assert (place["part"], place["line"], place["character"]) == ("instructions", 1, 10)
    assert report["before"]["text"].startswith("It is 12:04.")
    assert report["now"]["text"][report["now"]["at"]] == "5"
    assert report["lost_tokens"] > 300
    assert await _lost(served, headers) - before == report["lost_tokens"]
    return report


async def _lost(served: Served, headers: dict[str, str]) -> float:
    page = (await fetch(served, "GET", "/metrics", None, headers)).body.decode()
    values = [line.split()[-1] for line in page.splitlines() if line.startswith(COUNTER)]
    return float(values[0]) if values else 0.0


async def _engine_is_told_apart(ada: Client, fake: FakeVllm) -> None:
    """The prompt is the same, and the engine has forgotten it."""
    first = await ada.ask(input=[user("Wait.")], store=True)
    fake._seen.clear()
    second = await ada.ask(input=[user("Well?")], previous_response_id=first["id"])
    report = await ada.report(second)
    assert (report["verdict"], report["reason"]) == ("engine_lost", "engine_evicted")
    assert (report["cached_tokens"], report["place"]) == (0, None)
    assert report["lost_tokens"] == report["reusable_tokens"] > 300
    options = {"comparison_response_id": first["id"]}
    fake._seen.clear()
    third = await ada.ask(
        input=[user("Well?")], previous_response_id=first["id"], prompt_cache_options=options
    )
    assert third["prompt_cache_diagnostics"] == {"type": "unavailable"}


async def _only_the_owner_reads_it(
    ada: Client, eve: Client, operator: Client, report: dict[str, Any]
) -> None:
    foreign = await eve.call("GET", f"/v1/responses/{report['response_id']}/cache")
    absent = await eve.call("GET", f"/v1/responses/{ABSENT}/cache")
    assert foreign.status == absent.status == 404
    assert foreign.body.replace(report["response_id"].encode(), ABSENT.encode()) == absent.body
    stored = await ada.ask(input=[user("Mine.")], store=True)
    named = [stored["id"], report["response_id"], ABSENT, "x" * 500]
    found = [
        (await eve.ask(input="Hi.", prompt_cache_options={"comparison_response_id": one}))
        for one in named
    ]
    said = {json.dumps(one["prompt_cache_diagnostics"]) for one in found}
    assert said == {'{"type": "comparison_response_not_found"}'}
    advice = [(await one.call("GET", "/dashboard/advice")).json for one in (ada, eve)]
    assert {cost["reason"] for cost in advice[0]["costs"]} == {"input_changed", "engine_evicted"}
    assert (advice[1]["costs"], advice[1]["turns"]) == ([], len(named))
    seen = (await operator.call("GET", "/dashboard/advice")).json
    assert seen["lost_tokens"] == advice[0]["lost_tokens"]
    assert {cost["response_id"] for cost in seen["costs"]} == {""}
    assert (await ada.call("DELETE", f"/v1/responses/{stored['id']}")).status == 200
    assert (await ada.call("GET", f"/v1/responses/{stored['id']}/cache")).status == 404


async def _terminal_shows_both_texts(
    ada: Client, served: Served, report: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["explain", report["response_id"], "--url", served.url, "--key", ada.secret]
    assert await asyncio.to_thread(main, words) == 0
    printed = capsys.readouterr().out
    assert "Earlier input changed in the instructions, line 1, character 10" in printed
    assert "It is 12:0»4." in printed
    assert "| It is 12:0»5." in printed
    assert await asyncio.to_thread(main, [*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == report
    assert await asyncio.to_thread(main, ["doctor", "--traffic", *words[2:]]) == 0
    printed = capsys.readouterr().out
    assert "earlier input changed in 1 of" in printed
    assert "The instructions change at line 1, character 10." in printed
    words[1] = ABSENT
    assert await asyncio.to_thread(main, words) == 2
    assert "knows nothing of the prompt" in capsys.readouterr().err


async def test_another_worker_finds_the_report(tmp_path: Path) -> None:
    place = WorkerPlace(group="here", hub=str(tmp_path / "hub"))
    flags = {"store": f"sqlite:///{tmp_path / 'shared.db'}", "seal_keys": str(tmp_path / "seals")}
    async with (
        Hub().opened(place.hub),
        serving(place, **flags) as here,
        serving(place, **flags) as there,
    ):
        await until(lambda: here.app.state.peers.others and there.app.state.peers.others)
        async with wire(here) as socket:
            last = await socket.turn(input="Hello.", tools=[LOOK], store=False)
        path = f"/v1/responses/{last['response']['id']}/cache"
        answers = [await fetch(served, "GET", path) for served in (here, there)]
        assert [one.status for one in answers] == [200, 200]
        assert answers[0].json == answers[1].json
        assert answers[0].json["model"] == MODEL


async def test_memory_is_bounded_and_can_be_switched_off() -> None:
    async with serving(reuse_bytes_max=20_000, render_cache_bytes_max=0) as served:
        ids = []
        for number in range(30):
            body = {"model": MODEL, "input": f"{number} " * 200, "store": False}
            ids.append((await fetch(served, "POST", "/v1/responses", body)).json["id"])
        paths = [f"/v1/responses/{one}/cache" for one in (ids[0], ids[-1])]
        assert [(await fetch(served, "GET", path)).status for path in paths] == [404, 200]
        assert await metric(served, 'segue_memory_bytes{part="prompts"}') <= 20_000
    async with serving(reuse_bytes_max=0) as served:
        first = (
            await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": "Hi."})
        ).json
        body = {
            "model": MODEL,
            "input": "Hi.",
            "prompt_cache_options": {"comparison_response_id": first["id"]},
        }
        second = (await fetch(served, "POST", "/v1/responses", body)).json
        assert second["prompt_cache_diagnostics"] == {"type": "cache_hit"}
        path = f"/v1/responses/{second['id']}/cache"
        assert (await fetch(served, "GET", path)).status == 404


async def _report(served: Served, response: dict[str, Any]) -> dict[str, Any]:
    report: dict[str, Any] = (
        await fetch(served, "GET", f"/v1/responses/{response['id']}/cache")
    ).json
    return report


async def _create(served: Served, **fields: Any) -> dict[str, Any]:
    answer = await fetch(served, "POST", "/v1/responses", {"model": MODEL, **fields})
    assert answer.status == 200, answer.body
    response: dict[str, Any] = answer.json
    return response


async def _delete(served: Served, response: dict[str, Any]) -> None:
    answer = await fetch(served, "DELETE", f"/v1/responses/{response['id']}")
    assert answer.status == 200, answer.body


async def test_words_of_a_deleted_response_leave_the_reports_of_others(tmp_path: Path) -> None:
    """The report is in one worker, the response is deleted at another."""
    place = WorkerPlace(group="here", hub=str(tmp_path / "hub"))
    flags = {"store": f"sqlite:///{tmp_path / 'shared.db'}", "seal_keys": str(tmp_path / "seals")}
    async with (
        Hub().opened(place.hub),
        serving(place, **flags) as here,
        serving(place, **flags) as there,
    ):
        await until(lambda: here.app.state.peers.others and there.app.state.peers.others)
        first, second = [
            await _create(here, input=[user(f"{RULES}{word} {RULES}")], prompt_cache_key="k")
            for word in ("SECRET", "plain")
        ]
        quoting = await _report(here, second)
        assert (quoting["compared_with"], quoting["place"]["part"]) == (first["id"], "input")
        assert "SECRET" in quoting["before"]["text"]
        before = await metric(here, 'segue_memory_bytes{part="prompts"}')
        await _delete(there, first)
        async with asyncio.timeout(20):
            while (left := await _report(here, second))["before"] is not None:
                pass
        summary = f"earlier input changed: {quoting['lost_tokens']:,} tokens were computed again"
        gone = {"place": None, "before": None, "now": None, "summary": summary}
        assert left == {**quoting, **gone}
        assert await metric(here, 'segue_memory_bytes{part="prompts"}') < before - 10_000


async def test_words_of_a_deleted_ancestor_leave_the_reports_of_the_chain() -> None:
    async with serving(context_tokens=1_200) as served:
        first = await _create(served, input=f"SECRET {RULES}")
        second = await _create(served, input=RULES, previous_response_id=first["id"])
        third = await _create(
            served, input=RULES, previous_response_id=second["id"], truncation="auto"
        )
        report = await _report(served, third)
        assert (report["reason"], report["compared_with"]) == ("history_truncated", second["id"])
        assert "SECRET" in report["before"]["text"]
        await _delete(served, first)
        report = await _report(served, third)
        assert (report["before"], report["lost_tokens"] > 0) == (None, True)


async def test_response_that_was_deleted_while_the_next_one_ran_is_not_quoted(
    tmp_path: Path,
) -> None:
    watch = ReuseWatch(BUDGET, set())
    async with staged_process(tmp_path / "turns.db") as stage:
        stage.runner.resources = replace(stage.runner.resources, report_prompt=watch.add)
        first = (await stage.turn(input="Hi.", instructions=f"SECRET {RULES}")).response
        listener = Listener()
        running = await stage.start(
            None,
            listener,
            input="More.",
            previous_response_id=first["id"],
            instructions=f"plain {RULES}",
        )
        await watch.forget(OWNER, first["id"])
        await listener.all()
        report = await watch.find(OWNER, running.id)
        assert report is not None
        assert (report.verdict, report.before, report.place) == ("prompt_changed", None, None)
        assert report.lost_tokens > 300
