"""Every prompt rendered cold as well, and compared: `--check-rendering`."""

from __future__ import annotations

import threading

import pytest
from msgspec.structs import replace

from segue.seams.history import Turn
from segue.seams.model import Scene
from segue.seams.prompt import NO_TOKENS, id_array
from tests.support import WEATHER, fetch, serving, wire


async def test_prompts_pass_the_check_of_an_operator_who_doubts() -> None:
    async with serving(check_rendering=True) as served, wire(served) as socket:
        last = await socket.turn(input="Weather?", tools=[WEATHER], store=False)
        for _ in range(3):
            call = last["response"]["output"][0]
            output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
            last = await socket.turn(
                previous_response_id=last["response"]["id"],
                input=[output, {"role": "user", "content": "And now?"}],
                tools=[WEATHER],
                store=False,
            )
            assert last["type"] == "response.completed"


async def test_prompt_that_fails_the_check_fails_the_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(check_rendering=True) as served, wire(served) as socket:
        first = await socket.turn(input="Hello.", store=False)
        dialect = served.app.runner.models["scripted"].dialect
        honest = dialect.render

        def forgetful(scene: Scene) -> object:
            past = scene.past
            if isinstance(past, Turn) and past.warm is not None:
                wrong = replace(past.warm, prompt=NO_TOKENS.plus(id_array([1, 2, 3])))
                scene = Scene(scene.head, replace(past, warm=wrong), scene.given)
            return honest(scene)

        # Servers of one test process share the dialect.
        monkeypatch.setattr(dialect, "render", forgetful)
        failed = await socket.turn(
            previous_response_id=first["response"]["id"], input="Again.", store=False
        )
        assert failed["type"] == "response.failed"
        assert "differs" in failed["response"]["error"]["message"]
        assert (await fetch(served, "GET", "/health")).status == 200


@pytest.mark.parametrize("choice, is_beside", [("auto", False), ("required", True)])
async def test_large_grammar_of_a_forced_call_is_written_beside_the_loop(
    choice: str, is_beside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt of a second turn is warm; what the answer must look like is made of all tools again."""
    large = {**WEATHER, "description": "It says how the weather is. " * 4_000}
    fields = {"tools": [large], "tool_choice": choice, "store": False}
    async with serving() as served, wire(served) as socket:
        first = await socket.turn(input="Weather?", **fields)
        dialect = served.app.runner.models["scripted"].dialect
        honest, seen = dialect.render, list[str]()

        def watched(scene: Scene) -> object:
            seen.append(threading.current_thread().name)
            return honest(scene)

        monkeypatch.setattr(dialect, "render", watched)
        call = first["response"]["output"][0]
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}
        again = {"previous_response_id": first["response"]["id"], "input": [output]}
        await socket.turn(**again, **fields)
    assert [name != threading.current_thread().name for name in seen] == [is_beside]
