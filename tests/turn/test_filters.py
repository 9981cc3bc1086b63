"""Stop strings end the text before the first of them, however it is cut; a summary is kept and not shown."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.seams.model import ItemClosed, ItemOpened, ItemText, Parsed, TurnClosed
from segue.seams.prompt import id_array
from segue.turn.filters import StopStrings, Summary
from tests.support import serving, wire


@given(
    pieces=st.lists(st.text("abc", max_size=4)),
    stops=st.lists(st.text("abc", min_size=1, max_size=3), min_size=1, max_size=4),
)
async def test_text_ends_before_the_first_stop_however_it_is_cut(
    pieces: list[str], stops: list[str]
) -> None:
    stop_strings = StopStrings(stops)
    parsed: list[Parsed] = []
    for one in (ItemOpened("message"), *map(ItemText, pieces)):
        parsed += await stop_strings.feed([one])
    parsed += await stop_strings.close([ItemClosed(id_array()), TurnClosed(id_array())])
    whole = "".join(pieces)
    # The first to be whole is met; of those that end together the longest.
    met = [(at + len(stop), at) for stop in stops if (at := whole.find(stop)) >= 0]
    text = "".join(one.text for one in parsed if isinstance(one, ItemText))
    assert stop_strings.is_shut == bool(met)
    assert text == (whole[: min(met)[1]] if met else whole)
    assert [type(one) for one in parsed if not isinstance(one, ItemText)] == [
        ItemOpened,
        ItemClosed,
        TurnClosed,
    ]


@given(
    pieces=st.lists(st.text("ab", max_size=9)),
    stops=st.lists(st.text("ab", min_size=1, max_size=8), min_size=1, max_size=4),
)
async def test_no_more_is_held_back_than_may_become_a_stop(
    pieces: list[str], stops: list[str]
) -> None:
    stop_strings, passed, whole = StopStrings(stops), "", ""
    await stop_strings.feed([ItemOpened("message")])
    for piece in pieces:
        whole += piece
        parsed = await stop_strings.feed([ItemText(piece)])
        passed += "".join(one.text for one in parsed if isinstance(one, ItemText))
        if stop_strings.is_shut:
            return
        begun = (n for stop in stops for n in range(len(stop)) if whole.endswith(stop[:n]))
        assert len(whole) - len(passed) == max(begun)


async def test_letters_of_an_answer_are_not_compared_with_all_of_a_long_stop() -> None:
    async def took_s(chars: int) -> float:
        stop_strings = StopStrings([letter * chars for letter in "åéîø"])
        await stop_strings.feed([ItemOpened("message")])
        began = time.thread_time()
        for _ in range(2_000):
            await stop_strings.feed([ItemText(" word")])
        return time.thread_time() - began

    short_s, long_s = [min([await took_s(chars) for _ in range(3)]) for chars in (4, 256)]
    assert long_s < 5 * short_s


async def test_summary_keeps_the_text_of_messages_and_lets_nothing_pass() -> None:
    begun: list[str] = []
    summary = Summary(lambda: begun.append("begun"))
    thought = [ItemOpened("reasoning"), ItemText("hm"), ItemClosed(id_array())]
    call = [ItemOpened("function", name="f"), ItemText("{}"), ItemClosed(id_array())]
    message = [ItemOpened("message"), ItemText(" All "), ItemText("done. "), ItemClosed(id_array())]

    assert await summary.feed([*thought, *call]) == []
    assert not begun
    assert await summary.feed(message) == []
    assert await summary.close([TurnClosed(id_array())]) == []

    assert (summary.text, begun) == ("All done.", ["begun"])


@pytest.mark.parametrize("stop", [". I", ["never", "Second"], "First"])
@pytest.mark.parametrize("tps", [0, 2_000])
async def test_answer_ends_before_its_stop_and_the_next_turn_goes_on_from_there(
    tmp_path: Path, stop: str | list[str], tps: int
) -> None:
    text = "First of all. I said it. Second of all."
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [{"reasoning": "First.", "text": text}]}))
    flags = {"script": str(script), "check_rendering": True, "tps": tps}
    async with serving(**flags) as served, wire(served) as socket:
        await socket.create(input="Go.", stop=stop, store=False)
        events = await socket.events()
        last = events[-1]["response"]
        assert last["status"] == "completed"
        first = stop if isinstance(stop, str) else stop[-1]
        expected = text[: text.index(first)]
        shown = [one["delta"] for one in events if one["type"] == "response.output_text.delta"]
        assert "".join(shown) == expected
        assert last["output"][0]["type"] == "reasoning"
        content = last["output"][-1]["content"]
        assert "".join(part["text"] for part in content) == expected
        following = await socket.turn(
            input="And?", previous_response_id=last["id"], store=False, stop=None
        )
        assert following["response"]["output"][-1]["content"][0]["text"] == text
