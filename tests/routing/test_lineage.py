"""Does every job say to which chain and fork it belongs, also after a restart and for histories that are resent?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.engines.scripted import Script, ScriptedCall, ScriptedTurn
from segue.errors import EngineFailed
from segue.lineage import Lineage
from tests.pipeline import Stage, staged

CALLING = Script((ScriptedTurn(calls=(ScriptedCall("look"),)), ScriptedTurn(text="Done.")))
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]


async def turn(stage: Stage, parent: str | None = None, **fields: Any) -> tuple[str, Lineage]:
    told = await stage.turn(previous_response_id=parent, input="Hi", **fields)
    return told.response["id"], stage.engine.jobs[-1].lineage


async def test_chain_keeps_its_name_and_a_second_child_is_a_fork(
    tmp_path: Path,
) -> None:
    async with staged(tmp_path / "s.db") as stage:
        root, lineage = await turn(stage)
        chain = lineage.chain
        assert lineage == Lineage(chain)
        second, lineage = await turn(stage, root)
        assert lineage == Lineage(chain, root)
        fork, lineage = await turn(stage, root)
        assert lineage == Lineage(chain, root, fork)
        stage.engine.fault = EngineFailed("It broke.")
        _, lineage = await turn(stage, second)
        assert lineage == Lineage(chain, second)
        third, lineage = await turn(stage, second)
        assert lineage == Lineage(chain, second)
    async with staged(tmp_path / "s.db") as stage:
        assert (await turn(stage, third))[1] == Lineage(chain, third)
        assert (await turn(stage, fork))[1] == Lineage(chain, fork, fork)


async def test_output_of_a_tool_resumes_a_chain(tmp_path: Path) -> None:
    async with staged(tmp_path / "s.db", CALLING) as stage:
        told = await stage.turn(input="Hi", tools=TOOLS)
        call = told.response["output"][-1]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
        root = told.response["id"]
        await stage.turn(input=[output], tools=TOOLS, previous_response_id=root)
        first, second = (job.lineage for job in stage.engine.jobs)
        assert second == Lineage(first.chain, root, is_resumed=True)


async def test_history_that_is_resent_is_one_chain(tmp_path: Path) -> None:
    async with staged(tmp_path / "s.db") as stage:
        history: list[dict[str, Any]] = [{"role": "user", "content": "Hi"}]
        chains = set()
        for _ in range(3):
            told = await stage.turn(input=history)
            history += [*told.response["output"], {"role": "user", "content": "More"}]
            chains.add(stage.engine.jobs[-1].lineage.chain)
        assert len(chains) == 1
        history[0] = {"role": "user", "content": "Another"}
        await stage.turn(input=history)
        assert stage.engine.jobs[-1].lineage.chain not in chains
