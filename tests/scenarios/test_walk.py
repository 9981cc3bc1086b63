"""The walking product, in its smallest story: a tool call and its answer, on every transport."""

from __future__ import annotations

from tests.support import MODEL, WEATHER, fetch, kinds, serving, wire


async def test_client_walks_a_tool_loop_over_websocket() -> None:
    async with serving() as served, wire(served) as socket:
        first = await socket.turn(input="Weather?", tools=[WEATHER], store=False)
        call = first["response"]["output"][0]
        assert call["type"] == "function_call"
        second = await socket.turn(
            previous_response_id=first["response"]["id"],
            input=[{"type": "function_call_output", "call_id": call["call_id"], "output": "sun"}],
            tools=[WEATHER],
            store=False,
        )
        assert second["type"] == "response.completed"
        assert "sun" in second["response"]["output"][0]["content"][0]["text"]


async def test_one_story_gives_the_same_events_over_sse_and_websocket() -> None:
    story = {"model": MODEL, "input": "Weather?", "tools": [WEATHER]}
    async with serving() as served:
        sse = await fetch(served, "POST", "/v1/responses", {**story, "stream": True})
        async with wire(served) as socket:
            await socket.create(**story)
            assert kinds(await socket.events()) == kinds(sse.events)
