"""What every `SharedLimits` promises: all who draw on a key together are given no more than its limits."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from msgspec import structs

from segue.accounts.quota import KeyQuota, Meter
from segue.limits import Draw, HeldPlaces, KeyLimits
from tests.contracts.stores import KINDS, SHARED, open_stores

LIMITS = KeyLimits(requests_per_min=60, tokens_per_min=600, connections_max=5, lanes_max=3)
ASK = Draw("key_1", LIMITS)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "layered"])
async def test_one_alone_is_given_everything_and_no_more(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with open_stores(kind, request, tmp_path) as open_one:
        shared_limits = (await open_one()).shared_limits
        wanted = structs.replace(ASK, requests=50, tokens=700, held=HeldPlaces(9, 9))
        grant = await shared_limits.draw(wanted)
        assert (grant.requests, grant.held, grant.others) == (50, HeldPlaces(5, 3), HeldPlaces())
        assert grant.tokens == pytest.approx(-100, abs=5)
        rest = await shared_limits.draw(structs.replace(ASK, requests=50))
        assert 10 <= rest.requests <= 12
        none = await shared_limits.draw(structs.replace(ASK, requests=1))
        assert none.requests == 0
        assert 0 < none.wait_s <= 1
        back = await shared_limits.draw(structs.replace(ASK, requests=-30))
        assert back.requests == -30
        again = await shared_limits.draw(structs.replace(ASK, requests=40))
        other = await shared_limits.draw(structs.replace(ASK, key_id="key_2", requests=7))
        assert 30 <= again.requests <= 32
        assert other.requests == 7


@pytest.mark.parametrize("kind", SHARED)
async def test_several_share_what_there_is(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with open_stores(kind, request, tmp_path) as open_one:
        stores = [await open_one() for _ in range(3)]
        wanted = structs.replace(ASK, requests=7, tokens=10, held=HeldPlaces(2, 2))
        granted = await asyncio.gather(
            *(one.shared_limits.draw(wanted) for one in stores for _ in range(5))
        )
        assert 60 <= sum(grant.requests for grant in granted) <= 63
        last = [
            await one.shared_limits.draw(structs.replace(ASK, held=HeldPlaces(2, 2)))
            for one in stores
        ]
        assert sum(one.held.connections for one in last) == 5
        assert sum(one.held.lanes for one in last) == 3
        assert last[0].tokens == pytest.approx(450, abs=20)
        # What one gives back, or leaves behind, another may have.
        await stores[0].shared_limits.draw(ASK)
        grant = await stores[1].shared_limits.draw(structs.replace(ASK, held=HeldPlaces(5, 3)))
        others = grant.others
        assert grant.held == HeldPlaces(5 - others.connections, 3 - others.lanes)
        await stores[2].crash()
        await stores[1].maintenance.recover()
        grant = await stores[1].shared_limits.draw(structs.replace(ASK, held=HeldPlaces(5, 3)))
        assert (grant.held, grant.others) == (HeldPlaces(5, 3), HeldPlaces())


@pytest.mark.parametrize("kind", SHARED)
async def test_history_in_memory_is_divided_by_connections(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with open_stores(kind, request, tmp_path) as open_one:
        told: list[str] = []
        shared_limits = [
            Meter((await open_one()).shared_limits, on_report=told.append) for _ in range(2)
        ]
        here, there = [
            KeyQuota(KeyLimits(state_bytes_max=1_000), "key", one) for one in shared_limits
        ]
        assert here.state_bytes_max == 1_000
        for quota in (here, there, there, there):
            quota.connect()
        for meter in shared_limits:
            await meter.report()
        await here.count_request()
        await shared_limits[0].report()
        assert (here.state_bytes_max, there.state_bytes_max) == (250, 750)
        assert set(told) == {"key"}
        for _ in range(3):
            there.disconnect()
        await shared_limits[1].report()
        await here.report()
        assert here.state_bytes_max == 1_000
