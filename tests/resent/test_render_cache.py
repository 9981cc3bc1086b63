"""The render cache: warmth for clients that resend everything."""

from __future__ import annotations

from typing import Any

import pytest

from segue.resent.render_cache import is_cut
from segue.wire.items import Item
from tests.contracts import dialect as contract
from tests.support import MODEL, WEATHER, Served, fetch, metric, serving

TURNS = 6


async def resend_everything(served: Served) -> list[dict[str, Any]]:
    """An agent loop over plain HTTP with the full history each turn; the usage of every turn."""
    history: list[dict[str, Any]] = [{"role": "user", "content": "Weather?"}]
    usages = []
    for number in range(TURNS):
        body = {"model": MODEL, "input": history, "tools": [WEATHER], "store": False}
        body["tool_choice"] = "required"
        response = (await fetch(served, "POST", "/v1/responses", body)).json
        call = response["output"][0]
        usages.append(response["usage"])
        output = {"type": "function_call_output", "call_id": call["call_id"], "output": f"{number}"}
        history += [call, output]
    return usages


async def test_client_that_resends_everything_pays_for_what_is_new_only() -> None:
    async with serving(render_cache_bytes_max=0) as cold, serving() as warm:
        assert await resend_everything(cold) == await resend_everything(warm)
        tokenized = "segue_tokens_tokenized_total"
        reused = "segue_tokens_reused_total"
        assert await metric(cold, reused) == 0
        all_tokens = await metric(cold, tokenized)
        assert await metric(warm, tokenized) + await metric(warm, reused) == all_tokens
        assert await metric(warm, tokenized) < all_tokens / 3


async def test_cache_stays_within_its_bytes() -> None:
    async with serving(render_cache_bytes_max=30_000, reuse_bytes_max=0) as served:
        for _ in range(3):
            await resend_everything(served)
            assert 0 < await metric(served, "segue_state_bytes") <= 30_000


async def test_client_that_repeats_its_request_to_the_letter_pays_for_nothing_but_the_cue() -> None:
    history = [{"role": "user", "content": "Tell me about the weather. " * 200}]
    body = {"model": MODEL, "input": history, "store": False}
    async with serving() as served:
        first = (await fetch(served, "POST", "/v1/responses", body)).json
        tokenized = await metric(served, "segue_tokens_tokenized_total")
        again = (await fetch(served, "POST", "/v1/responses", body)).json
        assert await metric(served, "segue_tokens_tokenized_total") == tokenized
    assert again["usage"] == first["usage"]
    assert again["output"][0]["content"] == first["output"][0]["content"]


async def test_history_that_is_dropped_while_it_is_looked_up_is_rendered_anew() -> None:
    """Long histories are looked up in a thread; meanwhile the loop lets go of what is too much."""

    class Ends(dict[int, int]):
        def get(self, key: int, default: Any = None) -> Any:
            found = super().get(key, default)
            if found is not None:
                cache.shrink(cache.bytes)
            return found

    history = [{"role": "user", "content": "Tell me about the weather."}]
    async with serving() as served:
        cache = served.app.state.render_cache
        body = {"model": MODEL, "input": history, "store": False}
        assert (await fetch(served, "POST", "/v1/responses", body)).status == 200
        cache._ends = Ends(cache._ends)
        assert (await fetch(served, "POST", "/v1/responses", body)).status == 200


LISTED = {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": []}
BARE_TOOLS = {"type": "additional_tools", "role": "developer", "tools": [{"type": "web_search"}]}


@pytest.mark.parametrize("silent", [BARE_TOOLS, LISTED])
async def test_item_that_says_nothing_is_no_place_to_cut(silent: dict[str, Any]) -> None:
    """What follows it joins what the model said before it, whether that was rendered before or not."""
    first = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Let me see."},
        silent,
    ]
    more = [
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "x"},
    ]
    used = []
    for before in ([first], []):
        async with serving(check_rendering=True) as served:
            for history in (*before, [*first, *more]):
                body = {"model": MODEL, "input": history, "tools": [WEATHER], "store": False}
                answer = await fetch(served, "POST", "/v1/responses", body)
                assert answer.json["status"] == "completed", answer.body
            used.append(answer.json["usage"]["input_tokens"])
    assert used[0] == used[1]


def test_requests_may_have_ended_behind_what_others_said() -> None:
    user, said = contract.message("user", "hi"), contract.message("assistant", "Well.")
    thought, listed = contract.reasoning("hm"), contract.item(**LISTED)
    tools, called, answered = (
        contract.item(**BARE_TOOLS),
        contract.call("f", "{}"),
        contract.output("x"),
    )

    def places(*given: Item) -> list[int]:
        return [count for count in range(1, len(given) + 1) if is_cut(given, count)]

    assert places(user, said, user) == [1, 3]
    assert places(user, thought, called, answered, thought, said, user) == [1, 4, 7]
    assert places(user, listed, called, answered) == [1, 2, 4]
    assert places(user, tools, said) == [2]
    assert places(user, said, tools, called, answered) == [1, 5]
    assert places(user, thought, listed, said, user) == [1, 5]
    assert places(user, thought, user) == [3]
    assert places(tools, said) == []
