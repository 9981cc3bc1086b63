"""Does every job say to which chain and fork it belongs, also after a restart and for histories that are resent?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.engines.scripted import Script, ScriptedCall, ScriptedTurn
from segue.errors import EngineFailed
from segue.seams.lineage import Lineage
from tests.pipeline import Stage, Told, staged

CALLING = Script((ScriptedTurn(calls=(ScriptedCall("look"),)), ScriptedTurn(text="Done.")))
TEXT = [{"type": "input_text", "text": "Hi"}]
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
        assert lineage == Lineage(root, beginning=lineage.beginning)
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


def said(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def answered(told: Told) -> dict[str, str]:
    """The answer as a client sends it that keeps nothing but the words."""
    return {"role": "assistant", "content": told.response["output"][-1]["content"][0]["text"]}


async def resend(stage: Stage, *history: Any, **fields: Any) -> tuple[str, Told]:
    told = await stage.turn(input=[*history], **fields)
    return stage.engine.jobs[-1].lineage.chain, told


async def test_conversations_that_begin_alike_and_are_resent_are_named_after_their_first_turns(
    tmp_path: Path,
) -> None:
    """At any worker and after a restart: the ids of what the model wrote first say which turn that was."""
    async with staged(tmp_path / "s.db", CALLING) as stage:
        plain = await stage.turn(input="Hi", tools=TOOLS)
        named, listed = await resend(stage, said("Hi"), tools=TOOLS)
        on_socket = await stage.turn(stage.connect(), input="Hi", tools=TOOLS)
        firsts = [plain, listed, on_socket]
        names = [told.response["id"] for told in firsts]
        assert [job.lineage.chain for job in stage.engine.jobs] == names
        assert named == names[1]
    async with staged(tmp_path / "t.db") as stage:
        for first, name in zip(firsts, names, strict=True):
            call = first.response["output"][-1]
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": "42"}
            # Some clients send no ids of items; those of calls must come back.
            for sent in (call, {key: call[key] for key in call if key not in ("id", "status")}):
                chain, told = await resend(stage, said("Hi"), sent, output)
                assert chain == name
            chain, _ = await resend(stage, said("Hi"), sent, output, answered(told), said("More"))
            assert chain == name


async def test_history_without_ids_is_one_chain_in_a_process_and_has_one_name_elsewhere(
    tmp_path: Path,
) -> None:
    names = set()
    async with staged(tmp_path / "s.db") as stage:
        for form in ("Hi", [said("Hi")], [{"role": "user", "content": TEXT}]):
            first = await stage.turn(input=form)
            chain, second = await resend(stage, said("Hi"), answered(first), said("More"))
            assert chain == first.response["id"]
        history = (said("Hi"), answered(first), said("More"), answered(second), said("Even more"))
        assert (await resend(stage, *history))[0] == chain
    for _ in range(2):
        async with staged(tmp_path / "t.db") as stage:
            names.add((await resend(stage, *history))[0])
            names.add((await resend(stage, *history[:3]))[0])
            other, _ = await resend(stage, said("Ho"), *history[1:])
            keyed, _ = await resend(stage, *history, prompt_cache_key="k")
            assert len({other, keyed, chain} | names) == 4
    assert len(names) == 1


async def test_greeting_that_the_client_wrote_is_no_answer(tmp_path: Path) -> None:
    async with staged(tmp_path / "s.db") as stage:
        greeting = {"role": "assistant", "content": "What can I do for you?"}
        chain, first = await resend(stage, greeting, said("Hi"))
        other, _ = await resend(stage, greeting, said("Ho"))
        again, _ = await resend(stage, greeting, said("Hi"), answered(first), said("More"))
        assert chain == first.response["id"] == again != other
