"""Does Segue conform, and does every case of the suite fail on a server that is wrong?"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from segue_conform.case import LEVELS, Case, Need, Result
from segue_conform.suite import BESIDE, CASES, has_script, run_case, run_suite
from segue_conform.target import Target
from segue_conform.upstream import MODEL, Upstream
from tests.conform.mutants import MUTANTS, OTHERWISE
from tests.conform.proxy import Mutant, listening, mutated
from tests.scenarios.test_keys import new_key
from tests.support import serving

PAGE = Path(__file__).parents[2] / "docs" / "conform.md"
BY_NAME = {case.name: case for case in CASES}


@asynccontextmanager
async def conforming() -> AsyncIterator[tuple[str, str, str]]:
    """Segue in front of the scripted upstream: its address, the upstream's, and a key."""
    async with (
        listening(Upstream().app()) as upstream,
        serving(engine="chat", engine_url=[f"{upstream}/v1"], model=[MODEL], auth="keys") as served,
    ):
        _, key = await new_key(served)
        yield served.url, upstream, key


@asynccontextmanager
async def target_at(url: str, upstream: str, key: str) -> AsyncIterator[Target]:
    async with aiohttp.ClientSession() as session:
        yield Target(session, f"{url}/v1", MODEL, key, upstream)


@pytest.mark.parametrize("by_proxy", [False, True])
async def test_segue_conforms(by_proxy: bool) -> None:
    """Through a proxy that changes nothing, too: what fails on a mutant fails because of it."""
    async with (
        conforming() as (url, upstream, key),
        mutated(url, Mutant()) as relayed,
        target_at(relayed if by_proxy else url, upstream, key) as target,
    ):
        results = await run_suite(target, CASES)
    wrong = {result.case.name: result.why for result in results if result.verdict != "passed"}
    assert wrong.keys() == OTHERWISE.keys(), wrong


async def test_every_case_fails_on_a_server_that_is_wrong() -> None:
    """It says what is wrong: a case that comes out as absent has not looked."""
    async with conforming() as (url, upstream, key):
        free = asyncio.Semaphore(BESIDE)

        async def tried(name: str, mutant: Mutant) -> Result:
            async with free:
                return await _tried(BY_NAME[name], mutant, url, upstream, key)

        alone = {name for name in MUTANTS if BY_NAME[name].need is Need.CONTROL}
        beside = [tried(name, MUTANTS[name]) for name in MUTANTS if name not in alone]
        results = [*await asyncio.gather(*beside)]
        results += [await tried(name, MUTANTS[name]) for name in alone]
        for name, mended in OTHERWISE.items():
            result = await tried(name, mended)
            assert result.verdict == "passed", result.why
    others = {r.case.name: f"{r.verdict}: {r.why}" for r in results if r.verdict != "failed"}
    assert others == {}


async def _tried(case: Case, mutant: Mutant, url: str, upstream: str, key: str) -> Result:
    async with (
        mutated(url, mutant.with_key(key)) as wrong,
        target_at(wrong, upstream, key) as target,
    ):
        return await run_case(case, target)


def test_every_case_has_its_mutant_a_source_and_a_name_of_its_own() -> None:
    assert set(BY_NAME) == set(MUTANTS) | set(OTHERWISE)
    assert len(BY_NAME) == len(CASES)
    assert all(case.source and case.claim for case in CASES)


def test_page_says_how_many_cases_there_are() -> None:
    page = PAGE.read_text()
    found = Counter((case.api, case.level) for case in CASES)
    for api, title in {"responses": "Responses", "messages": "Messages", "chat": "Chat"}.items():
        row = re.search(rf"^\| {title}[^|]*\|(.*)\|$", page, re.MULTILINE)
        assert row is not None
        assert [int(n) for n in row[1].split("|")] == [
            *(found[api, level] for level in LEVELS),
            sum(case.api == api for case in CASES),
        ]
    assert f"{len(CASES)} cases" in page
    assert f"{len(MUTANTS)} of them" in page


async def test_without_the_upstream_cases_are_not_run() -> None:
    async with serving() as served, aiohttp.ClientSession() as session:
        target = Target(session, f"{served.url}/v1", "scripted")
        assert not await has_script(target)
        needing = [case for case in CASES if case.name.startswith("responses.calls")]
        results = await run_suite(target, needing)
    assert {result.verdict for result in results} == {"not run"}
    assert all("upstream" in result.why for result in results)


async def test_server_without_an_api_is_absent_and_not_passed() -> None:
    async with serving(apis=["responses"]) as served, aiohttp.ClientSession() as session:
        target = Target(session, f"{served.url}/v1", "scripted")
        result = await run_case(BY_NAME["messages.create.whole"], target)
    assert (result.verdict, "404" in result.why) == ("absent", True)
