"""What every `Engine` promises, whoever produces the tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from segue.engines.scripted import Script, ScriptedEngine, ScriptedTurn
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
PROMISES = [
    contract.streams_ids_then_one_finish,
    contract.ends_its_turn_with_a_stop,
    contract.honours_the_limit,
    contract.closing_frees_it,
    contract.cancelling_frees_it,
    contract.serves_jobs_beside_each_other,
    contract.says_whether_it_is_ready,
]


@pytest.mark.parametrize("maker", MAKERS)
@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
async def test_engine_keeps_its_promise(
    maker: str, promise: Callable[[Bench], Awaitable[None]]
) -> None:
    await promise(MAKERS[maker]())
