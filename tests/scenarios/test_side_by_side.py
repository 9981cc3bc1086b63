"""Each version runs beside the one before it on one store, up and down; who could not read the rows is refused.

`python -m tests.side_by_side` plays the same with 64 clients.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from segue import __version__
from tests.postgres import PostgresServer
from tests.releases import ROOT, Program, build, make_up, neighbour, released
from tests.side_by_side import STORES, Service, Versions, by_http, measure, play, refusal

# Of the six kinds at least one each.
CLIENTS = 8
HERE = Program(__version__, ROOT / "src")


@pytest.fixture(params=STORES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
async def store(kind: str, tmp_path: Path, postgres: PostgresServer) -> AsyncIterator[str]:
    if kind == "sqlite":
        yield f"sqlite:///{tmp_path / 'shared.db'}"
        return
    url = await postgres.make_database()
    yield url
    await postgres.drop_database(url)


@pytest.fixture(scope="module")
def reads(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The next version, which reads a new kind of row."""
    return make_up(tmp_path_factory.mktemp("made_up") / "reads", writes_new_rows=False)


@pytest.fixture(scope="module")
def writes(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """The version after that, which writes it."""
    return make_up(tmp_path_factory.mktemp("made_up") / "writes", writes_new_rows=True)


async def test_version_and_the_one_before_it_serve_one_store(
    kind: str, store: str, reads: Program, tmp_path: Path
) -> None:
    service = await play(neighbour(), reads, store, kind, tmp_path, CLIENTS)
    assert service.turns >= 4 * CLIENTS
    assert {path for path, _ in service.resent} == {"chat/completions", "messages"}


async def test_new_rows_are_written_by_the_version_after_the_one_that_reads_them(
    kind: str, store: str, reads: Program, writes: Program, tmp_path: Path
) -> None:
    service = Service()
    with Versions(store, kind, tmp_path, service) as versions:
        await versions.start(neighbour())
        said = refusal(writes, store, tmp_path)
        assert (
            f"a process of Segue {neighbour().version} uses it, which cannot run beside 99.1.0"
            in said
        )
        (old,) = service.servers
        await versions.stop(old)
    service = await play(reads, writes, store, kind, tmp_path, clients=6)
    assert "written by a newer Segue" in refusal(neighbour(), store, tmp_path)


async def test_store_of_0_2_0_goes_on_after_a_stop(kind: str, store: str, tmp_path: Path) -> None:
    (release,) = [one for one in released() if one.version == "0.2.0"]
    old, service = build(release), Service()
    with Versions(store, kind, tmp_path, service) as versions:
        before = await versions.start(old)
        first = await by_http(service, None)
        said = refusal(HERE, store, tmp_path)
        assert (
            f"a process of Segue 0.2.0 or older uses it, which cannot run beside {__version__}"
            in said
        )
        second = await by_http(service, first["id"])
        await versions.stop(before)
        await versions.start(HERE)
        await measure(service)
        third = await by_http(service, second["id"])
        assert third["usage"]["input_tokens"] == service.expected[2], "it has the whole history"
        assert "newer Segue" in refusal(old, store, tmp_path)
