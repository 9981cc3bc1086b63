"""What every `Engine` promises, whoever produces the tokens."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from segue.engines.scripted import Script, ScriptedEngine, ScriptedTurn
from segue_embedded.shared import SharedEngine, sharing
from tests.contracts import engine as contract
from tests.contracts.engine import Bench, chatml

SCRIPT = Script((ScriptedTurn(reasoning="Hm.", text="A scripted answer.", pad_tokens=40),))


def improvising() -> Bench:
    return Bench(ScriptedEngine(chatml()), chatml())


def scripted() -> Bench:
    return Bench(ScriptedEngine(chatml(), SCRIPT), chatml())


def paced() -> Bench:
    return Bench(ScriptedEngine(chatml(), SCRIPT, tokens_per_s=2_000), chatml())


MAKERS = {"improvising": improvising, "scripted": scripted, "paced": paced}


@asynccontextmanager
async def made(maker: str, folder: Path) -> AsyncIterator[Bench]:
    """An engine in this process, or one that is shared by way of a local socket."""
    if maker != "shared":
        yield MAKERS[maker]()
        return
    bench, path = paced(), folder / "engine"
    is_shared = threading.Event()
    over: list[Callable[[], object]] = []

    async def share() -> None:
        is_over = asyncio.Event()
        loop = asyncio.get_running_loop()
        over.append(lambda: loop.call_soon_threadsafe(is_over.set))
        async with sharing(bench.engine, path):
            is_shared.set()
            await is_over.wait()

    # A loop of its own, as another process would have.
    thread = threading.Thread(target=lambda: asyncio.run(share()))
    thread.start()
    try:
        assert await asyncio.to_thread(is_shared.wait, contract.WAIT_S)
        yield Bench(SharedEngine(path), bench.dialect)
    finally:
        over[0]()
        await asyncio.to_thread(thread.join, contract.WAIT_S)


PROMISES = [
    contract.streams_ids_then_one_finish,
    contract.ends_its_turn_with_a_stop,
    contract.honours_the_limit,
    contract.knows_its_own_room,
    contract.closing_frees_it,
    contract.cancelling_frees_it,
    contract.serves_jobs_beside_each_other,
    contract.says_whether_it_is_ready,
]


@pytest.mark.parametrize("maker", [*MAKERS, "shared"])
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_engine_keeps_its_promise(
    maker: str, promise: Callable[[Bench], Awaitable[None]], tmp_path: Path
) -> None:
    async with made(maker, tmp_path) as bench:
        await promise(bench)
