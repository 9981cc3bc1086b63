"""Usage by key, owner and model: over HTTP as OpenAI's clients read it, and as CSV."""

from __future__ import annotations

import asyncio
import csv
import io
import subprocess
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from segue.accounts.hashes import KeyHashes, issue_key
from segue.reports.usage import MANY_ROWS
from segue.seals.cipher import new_key
from segue.seams.history import CONTAINERS, UsageEntry
from segue.seams.store import UsageTotal
from segue.stores.memory import MemoryLedger
from segue.stores.sqlite import SqliteStore
from segue_cli.cli import main
from tests.clients.outside import PYTHON
from tests.support import Served, fetch, serving

DAY_S = 86_400
PATH = "/v1/organization/usage/completions"
# The first of March and the last of February.
MARCH = 1_772_323_200


def entries(key_a: str = "key_a", key_b: str = "key_b") -> list[UsageEntry]:
    return [
        UsageEntry("a", "ada", "tiny", "completed", 100, 40, 7, MARCH + 5, 2, key_id=key_a),
        UsageEntry("b", "ada", "tiny", "completed", 10, 0, 1, MARCH - 5, key_id=key_a),
        UsageEntry("c", "ada", "large", "failed", 1, 0, 0, MARCH + DAY_S, key_id=key_b),
        UsageEntry("d", "eve", "tiny", "completed", 5, 0, 5, MARCH + 9, key_id="key_e"),
        UsageEntry("e", "ada", "", CONTAINERS, 0, 0, 0, MARCH + 9, 0, 60.5, 2.5, 1_000),
    ]


async def asking(served: Served, owner: str = "ada", *scopes: str) -> dict[str, str]:
    state = served.app.state
    await state.store.ledger.settle(entries())
    _, secret = await issue_key(state.store.keys, state.hashes, "lead", owner, scopes)
    return {"Authorization": f"Bearer {secret}"}


async def test_operator_sees_days_by_key_owner_and_model() -> None:
    async with serving(auth="keys") as served:
        headers = await asking(served, "lead", "operator")
        query = f"start_time={MARCH - 9}&end_time={MARCH + 2 * DAY_S}"
        query += "&group_by[]=api_key_id&group_by=model&group_by=project_id&limit=2"
        page = (await fetch(served, "GET", f"{PATH}?{query}", None, headers)).json
        assert (page["object"], page["has_more"]) == ("page", True)
        first, second = page["data"]
        assert (first["start_time"], first["end_time"]) == (MARCH - DAY_S, MARCH)
        rows = [
            (r["project_id"], r["api_key_id"], r["model"], r["num_model_requests"],
             r["input_tokens"], r["input_cached_tokens"], r["output_tokens"], r["tool_calls"])
            for r in second["results"]
        ]  # fmt: skip
        assert rows == [
            ("ada", "", "", 0, 0, 0, 0, 0),
            ("ada", "key_a", "tiny", 1, 100, 40, 7, 2),
            ("eve", "key_e", "tiny", 1, 5, 0, 5, 0),
        ]
        containers = second["results"][0]
        assert containers["container_seconds"] == 60.5
        assert containers["container_egress_bytes"] == 1_000
        query += f"&page={page['next_page']}"
        page = (await fetch(served, "GET", f"{PATH}?{query}", None, headers)).json
        assert [len(bucket["results"]) for bucket in page["data"]] == [1]
        assert (page["has_more"], page["next_page"]) == (False, None)


async def test_months_and_filters() -> None:
    async with serving(auth="keys") as served:
        headers = await asking(served, "lead", "operator")
        query = f"start_time={MARCH - 9}&end_time={MARCH + 40 * DAY_S}&bucket_width=1mo"
        page = (await fetch(served, "GET", f"{PATH}?{query}", None, headers)).json
        used = [bucket["results"][0]["input_tokens"] for bucket in page["data"][:2]]
        assert used == [10, 106]
        assert page["data"][0]["end_time"] == MARCH
        query += "&api_key_ids=key_b&models[]=large"
        page = (await fetch(served, "GET", f"{PATH}?{query}", None, headers)).json
        assert [len(bucket["results"]) for bucket in page["data"]][:2] == [0, 1]


async def test_a_year_of_many_rows_is_added_up_beside_the_loop_and_each_row_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[threading.Thread] = []

    class Rows(list[UsageTotal]):
        def __iter__(self) -> Iterator[UsageTotal]:
            threads.append(threading.current_thread())
            return super().__iter__()

    first = int(time.time()) // DAY_S * DAY_S - 365 * DAY_S

    async def report(*_: object) -> Rows:
        ends = (first + n % 366 * DAY_S for n in range(MANY_ROWS + 1))
        days = (time.strftime("%Y-%m-%d", time.gmtime(at)) for at in ends)
        return Rows(UsageTotal(day, "ada", "tiny", 1, 2, 0, 3) for day in days)

    async with serving(auth="keys") as served:
        headers = await asking(served, "lead", "operator")
        monkeypatch.setattr(MemoryLedger, "report", report)
        query = f"start_time={first}&limit=366"
        page = (await fetch(served, "GET", f"{PATH}?{query}", None, headers)).json
    used = sum(bucket["results"][0]["input_tokens"] for bucket in page["data"])
    assert (len(page["data"]), used) == (366, 2 * (MANY_ROWS + 1))
    assert len(threads) == 1
    assert threads[0] is not threading.main_thread()


async def test_key_sees_its_own_owner_and_needs_the_scope() -> None:
    async with serving(auth="keys") as served:
        headers = await asking(served, "ada", "dashboard")
        query = f"{PATH}?start_time={MARCH}&end_time={MARCH + DAY_S}&group_by=project_id"
        page = (await fetch(served, "GET", query, None, headers)).json
        assert [r["project_id"] for b in page["data"] for r in b["results"]] == ["ada"]
        plain = await asking(served, "ada", "responses", "models")
        assert (await fetch(served, "GET", query, None, plain)).status == 403


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("", "start_time"),
        ("start_time=x", "start_time"),
        ("start_time=1&bucket_width=1h", "bucket_width"),
        ("start_time=1&group_by=colour", "group_by"),
        ("start_time=1&limit=-1", "limit"),
        ("start_time=1&page=next", "page"),
        ("start_time=0&limit=0", "limit"),
    ],
)
async def test_odd_queries_are_refused(query: str, param: str) -> None:
    async with serving() as served:
        answer = await fetch(served, "GET", f"{PATH}?{query}")
        assert (answer.status, answer.json["error"]["param"]) == (400, param)


async def test_python_sdk_reads_it() -> None:
    """As an administrator's program does."""
    async with serving(auth="keys") as served:
        headers = await asking(served, "lead", "operator")
        program = f"""
            from openai import OpenAI
            secret = {headers["Authorization"].removeprefix("Bearer ")!r}
            client = OpenAI(base_url={served.url + "/v1"!r}, api_key=secret, admin_api_key=secret)
            page = client.admin.organization.usage.completions(
                start_time={MARCH}, end_time={MARCH + DAY_S}, group_by=["model", "api_key_id"]
            )
            for bucket in page.data:
                for result in bucket.results:
                    print(result.model, result.api_key_id, result.input_tokens)
        """
        ran = await asyncio.to_thread(
            subprocess.run,
            [PYTHON, "-c", textwrap.dedent(program)],
            check=True, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        printed = ran.stdout
        assert printed.splitlines()[1:] == ["tiny key_a 100", "tiny key_e 5"]


@pytest.fixture
async def store(tmp_path: Path) -> str:
    path = tmp_path / "segue.db"
    opened = await SqliteStore.open(path)
    hashes = KeyHashes([new_key()])
    key, _ = await issue_key(opened.keys, hashes, "=cmd()", "ada")
    now = int(time.time())
    found = [
        UsageEntry(f"{number}", "ada", model, "completed", 100, 4, 7, now, key_id=key.id)
        for number, model in enumerate(("tiny", "tiny", "large"))
    ]
    await opened.ledger.settle([*found, UsageEntry("e", "eve", "tiny", "failed", 1, 0, 0, now)])
    await opened.close()
    return f"sqlite:///{path}"


def rows_of(text: str) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(text)))


@pytest.mark.parametrize(
    "span", [[], ["--days", "9" * 20], ["--months", "1"], ["--months", "9" * 20]]
)
def test_usage_is_csv_by_what_is_asked_for(
    span: list[str], store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    period = time.strftime("%Y-%m" if "--months" in span else "%Y-%m-%d", time.gmtime())
    assert main(["usage", "--csv", "--store", store, *span]) == 0
    rows = rows_of(capsys.readouterr().out)
    found = [(r["period"], r["owner"], r["model"], r["turns"], r["input_tokens"]) for r in rows]
    assert found == [
        (period, "ada", "large", "1", "100"),
        (period, "ada", "tiny", "2", "200"),
        (period, "eve", "tiny", "1", "1"),
    ]
    assert main(["usage", "--csv", "--by", "key", "--store", store, *span]) == 0
    rows = rows_of(capsys.readouterr().out)
    assert [(r["key"][:4], r["key_name"], r["output_tokens"]) for r in rows] == [
        ("", "", "0"),
        ("key_", "'=cmd()", "21"),
    ]
    assert main(["usage", "--csv", "--by", "none", "--store", store, *span]) == 0
    assert [row["turns"] for row in rows_of(capsys.readouterr().out)] == ["4"]


def test_usage_by_an_unknown_name_is_refused(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["usage", "--by", "colour", "--store", store]) == 2
    assert "'colour' is not one of: key, owner, model" in capsys.readouterr().err
