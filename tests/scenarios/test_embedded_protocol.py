"""The newer parts of the contract on a real model: steered through the official SDK, compacted by three ways, and
freed when its client is lost."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from typing import Any

import aiohttp
import pytest

from segue_embedded.weights import find_weights
from tests.clients.outside import PYTHON, ROOT
from tests.engines.llama_listener import CONTEXT_TOKENS, KEY, Listener, llama_server
from tests.support import Served, Wire, fetch, serving, wire

CONTEXT = 1_500
RUN_S_MAX = 100
NAME = "smollm2"


async def run_example(served: Served, name: str, *options: str) -> tuple[int, str]:
    """An example in the environment of the official client; its exit status and what it printed."""
    process = await asyncio.create_subprocess_exec(
        str(PYTHON),
        str(ROOT / "examples" / name),
        *options,
        env={**os.environ, "OPENAI_BASE_URL": f"{served.url}/v1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    async with asyncio.timeout(RUN_S_MAX):
        out, _ = await process.communicate()
    return process.returncode or 0, out.decode()


async def test_long_answer_of_a_real_model_is_steered_through_the_sdk() -> None:
    async with serving(engine="embedded", context_tokens=CONTEXT) as served:
        status, printed = await run_example(served, "steer.py", "--after", "12")
    assert status == 0, printed
    assert "[response.steer.accepted]" in printed
    assert "[incomplete: steered]" in printed
    first, second = [line for line in printed.splitlines() if line.startswith("[resp_")]
    assert second.endswith(f"of {first.split()[0][1:]}]")


def tokens(response: dict[str, Any]) -> int:
    found: int = response["usage"]["input_tokens"]
    return found


@pytest.mark.parametrize(
    "way",
    [
        "trigger",
        pytest.param("endpoint", marks=pytest.mark.reliability),
        pytest.param("threshold", marks=pytest.mark.reliability),
    ],
)
async def test_chain_that_outgrows_a_real_models_context_is_compacted(way: str) -> None:
    """What the model is given shrinks, and the chain goes on."""
    # A threshold is at least 1,000 tokens; the other ways need no long history.
    count, context = (65, CONTEXT) if way == "threshold" else (25, CONTEXT // 2)
    filler = "The ferry leaves at noon, and the harbour master writes down who is aboard. " * count
    async with serving(engine="embedded", context_tokens=context) as served, wire(served) as socket:
        common = {"model": NAME, "max_output_tokens": 24, "temperature": 0}
        long = (await socket.turn(input=f"Remember this: {filler}", **common))["response"]
        first = (await socket.turn(previous_response_id=long["id"], input="Good.", **common))[
            "response"
        ]
        before = tokens(first)
        after = await go_on(served, socket, first, way, common)
        print(f"{way}: {before} tokens before, {tokens(after)} after")
        assert after["status"] in ("completed", "incomplete"), after
        if way == "threshold":
            last = await socket.turn(previous_response_id=after["id"], input="And?", **common)
            after = last["response"]
        assert tokens(after) < before


async def go_on(
    served: Served, socket: Wire, first: dict[str, Any], way: str, common: dict[str, Any]
) -> dict[str, Any]:
    parent = {"previous_response_id": first["id"]}
    question = "When does the ferry leave?"
    match way:
        case "trigger":
            compacted = await socket.turn(
                input=[{"type": "compaction_trigger"}], **parent, **common
            )
            assert compacted["response"]["output"][0]["type"] == "compaction"
            parent = {"previous_response_id": compacted["response"]["id"]}
            end = await socket.turn(input=question, **parent, **common)
        case "threshold":
            manage = [{"type": "compaction", "compact_threshold": 1_000}]
            end = await socket.turn(input=question, context_management=manage, **parent, **common)
            assert end["response"]["output"][0]["type"] == "compaction"
        case _:
            body = {"model": NAME, "input": "Go on.", **parent}
            window = (await fetch(served, "POST", "/v1/responses/compact", body)).json
            kept = [one for one in window["output"] if one["type"] == "compaction"]
            end = await socket.turn(
                input=[*kept, {"role": "user", "content": question}], store=False, **common
            )
    found: dict[str, Any] = end["response"]
    return found


# --- lost clients ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def listener() -> Iterator[Listener]:
    with llama_server() as found:
        yield found


async def busy_slots(listener: Listener) -> int:
    headers = {"Authorization": f"Bearer {KEY}"}
    async with (
        aiohttp.ClientSession(headers=headers) as http,
        http.get(f"{listener.url}/slots") as answer,
    ):
        slots = await answer.json()
    return sum(slot["is_processing"] for slot in slots)


async def until_slots(listener: Listener, count: int, within_s: float) -> None:
    async with asyncio.timeout(within_s):
        while await busy_slots(listener) != count:
            pass


async def test_engine_is_free_a_second_after_an_unstored_client_was_lost(
    listener: Listener,
) -> None:
    """Seen in the engine's own slots."""
    async with serving(
        engine="llamacpp",
        engine_url=[listener.url],
        engine_key=KEY,
        tokenizer=str(find_weights(NAME)),
        model=["m"],
        context_tokens=CONTEXT_TOKENS,
    ) as served:
        for _ in range(3):
            async with wire(served) as socket:
                await socket.create(model="m", input="Count to a thousand.", store=False)
                while (await socket.next())["type"] != "response.output_text.delta":
                    pass
                assert await busy_slots(listener) == 1
                socket.socket.transport.abort()
                await until_slots(listener, 0, within_s=1.5)
