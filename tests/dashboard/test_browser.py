"""A person looks at the dashboard, in a real browser: load, watch, open, race, talk, lose the server, give a key."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from segue.accounts.hashes import issue_key
from segue.accounts.scopes import SCOPES
from segue_embedded.weights import find_weights
from tests.dashboard.browser import Browser, Page, browsing
from tests.engines.fakes.vllm import FakeVllm
from tests.scenarios.test_mcp import DONE, OWN, echoing, hosting_own
from tests.scenarios.test_three_apis import ASKING
from tests.support import MODEL, Served, ServedProcess, Wire, fetch, serving, wire

CTRL, SHIFT = 2, 8
TABS = ("live", "race", "playground", "stored", "fleet", "keys")
IS_LIVE = "document.querySelector('#link').dataset.state === 'live'"


HOSTILE = """# Plan
**Bold** and [good](https://example.org/a), [bad](javascript:window.hacked=1), [worse](JAVASCRIPT:window.hacked=2),
[data](data:text/html,<script>window.hacked=3</script>) and ![a picture](https://foreign.test/x.png)
<script>window.hacked = 4</script><img src=x onerror="window.hacked = 5"><svg onload=window.hacked=6>

1. one
   - inner

| a | b |
|---|--:|
| <iframe src="https://foreign.test/"> | 2 |

```html
<script>window.hacked = 7</script>
```

---
"""

# Buttons and tabs whose words are broken into several lines.
BROKEN_LABELS = """[...document.querySelectorAll("button, nav a")].filter((one) => {
  const range = document.createRange();
  range.selectNodeContents(one);
  return new Set([...range.getClientRects()].map(({top}) => Math.round(top / 8))).size > 1;
}).map((one) => one.innerText)"""
LONG_LINK = f"https://example.com/{'x' * 200}"
# Turns and history that the race has chosen, and the histories that it offers.
SIZES = """(() => { const {turns, context} = document.querySelector("#race-form").elements;
  return [Number(turns.value), Number(context.value), [...context.options].map((one) => Number(one.value))]; })()"""
# The next two frames are drawn.
DRAWN = "new Promise((resolve) => requestAnimationFrame(() => requestAnimationFrame(resolve)))"
# The texts of a chart that lie on each other, by a pixel or more.
OVERLAPS = """(() => {{ const boxes = [...document.querySelectorAll("{selector}")].map((one) =>
    [one.textContent, one.getBoundingClientRect()]);
  return boxes.flatMap(([name, one], at) => boxes.slice(at + 1).filter(([, other]) =>
    one.left + 1 < other.right && other.left + 1 < one.right &&
    one.top + 1 < other.bottom && other.top + 1 < one.bottom).map(([other]) => `${{name}} / ${{other}}`)); }})()"""


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with browsing() as one:
        yield one


async def look(browser: Browser, served: Served | ServedProcess, view: str = "") -> Page:
    """The dashboard, in a fresh tab, live."""
    page = await browser.page()
    await page.open(f"{served.url}/{view}")
    await page.until(IS_LIVE)
    return page


def number(name: str, at_least: int) -> str:
    """A tile shows at least this."""
    return f"parseInt(document.querySelector('[data-tile={name}] .value').textContent.replace(',', '')) >= {at_least}"


def count(selector: str, at_least: int) -> str:
    return f"document.querySelectorAll({json.dumps(selector)}).length >= {at_least}"


async def rollout(socket: Wire, turns: int, **fields: Any) -> list[str]:
    """A chain of turns; their ids."""
    made: list[str] = []
    for step in range(turns):
        parent = {"previous_response_id": made[-1]} if made else {}
        last = await socket.turn(input=f"step {step}", **parent, **fields)
        made.append(last["response"]["id"])
    return made


@asynccontextmanager
async def many_wires(served: Served, many: int) -> AsyncIterator[list[Wire]]:
    """So many open sockets. They close side by side, because each close takes its time."""
    stacks = [AsyncExitStack() for _ in range(many)]
    try:
        yield [await one.enter_async_context(wire(served)) for one in stacks]
    finally:
        await asyncio.gather(*(one.aclose() for one in stacks))


async def test_person_opens_the_page_and_nothing_comes_from_elsewhere(browser: Browser) -> None:
    async with serving() as served:
        page = await look(browser, served)

        await page.until(count(".engine.up", 1))
        assert await page.read("document.title") == "Segue"
        assert await page.read(count(".tile", 6))
        assert await page.read(count("#memory .meter", 3))
        assert {url.partition("://")[2].partition("/")[0] for url in page.fetched} == {
            f"127.0.0.1:{served.port}"
        }
        assert page.faults == []


async def test_person_watches_a_rollout_as_it_runs(browser: Browser) -> None:
    # At full speed the bar of sampling may be too narrow to be drawn.
    async with serving(tps=1000) as served:
        page = await look(browser, served)
        async with wire(served) as socket:
            made = await rollout(socket, 4)
            await page.until(number("turns", 4))
            fork = await socket.turn(input="x", previous_response_id=made[1], stream_id="side")
            await page.until(number("turns", 5))

            await page.until(count(".turn-row", 5))
            await page.until(count("#tree .node", 5))
            assert "1 fork" in await page.text("#chains")
            assert await page.read(count("#sockets tbody tr", 1))
            assert await page.read(number("connections", 1))
            stages = await page.read(
                "[...new Set([...document.querySelectorAll('.turn-row rect')].map((one) => one.className.baseVal))]"
            )
            assert {"sample", "settle", "first"} <= set(stages)
            assert await page.read(
                f"document.querySelector('#tree [data-id=\"{fork['response']['id']}\"]') !== null"
            )
        await page.until("!document.querySelector('#sockets tbody tr')")
        assert page.faults == []


async def test_conversation_is_one_where_a_turn_of_it_ran_at_another_server(
    browser: Browser, tmp_path: Path
) -> None:
    """The second of four turns; the third knows only the name of its chain."""
    store = f"sqlite:///{tmp_path / 'turns.db'}"
    async with serving(store=store) as here, serving(store=store) as there:
        page = await look(browser, here)
        last: dict[str, Any] = {}
        for served in (here, there, here, here):
            body = {"model": MODEL, "input": "x", "previous_response_id": last.get("id")}
            last = (await fetch(served, "POST", "/v1/responses", body)).json

        await page.until(count("#tree .node", 3))
        assert (await page.text("#chains")).split("\n")[0] == "all 1"
        assert "3 turns" in await page.text("#chains")


async def test_person_sees_the_pause_for_a_tool_of_the_server(
    browser: Browser, tmp_path: Path
) -> None:
    """In the timeline, between the parts of sampling, and in words beside it."""
    async with (
        hosting_own(tmp_path, echoing("a", "b"), DONE) as (served, _),
        wire(served) as socket,
    ):
        page = await look(browser, served)
        await socket.turn(input="Go", tools=[OWN])
        await page.until(count(".turn-row rect.pause", 1))
        row = "document.querySelector('.turn-row')"
        assert await page.read(f"{row}.querySelector('rect.pause').width.baseVal.value > 0")
        await page.read(f"{row}.dispatchEvent(new MouseEvent('mousemove', {{bubbles: true}}))")
        await page.until("document.body.innerText.includes('paused for 2 tool calls')")
        assert page.faults == []


async def test_person_sees_what_went_wrong(browser: Browser) -> None:
    async with serving() as served:
        page = await look(browser, served)
        await fetch(
            served,
            "POST",
            "/v1/responses",
            {"model": MODEL, "input": "x", "previous_response_id": "resp_unknown"},
        )

        await page.until("document.querySelector('#errors').innerText.includes('not_found')")


async def test_person_opens_a_conversation_with_the_keyboard_and_reads_it(browser: Browser) -> None:
    async with serving() as served:
        page = await look(browser, served)
        async with wire(served) as socket:
            await rollout(socket, 3)
            await page.until(count("#tree .node", 3))
            await page.read("document.querySelector('#tree .node[tabindex=\"0\"]').focus()")
            await page.press("Enter", 13)

            await page.until(count("#reader .item.user", 3))
            text = await page.text("#reader-items")
            assert text.index("step 0") < text.index("step 1") < text.index("step 2")
            assert "You said: step 2" in text
            await page.press("Escape", 27)
            await page.until("!document.querySelector('#reader').open")


async def test_unstored_turn_cannot_be_read_and_the_page_says_so(browser: Browser) -> None:
    async with serving() as served:
        page = await look(browser, served)
        async with wire(served) as socket:
            await rollout(socket, 2, store=False)
            await page.until(count("#tree .node", 2))
            await page.click("#tree .node")

            await page.until("document.querySelector('#reader').innerText.includes('not stored')")


async def look_at_race(browser: Browser, served: Served) -> Page:
    """The race, once it knows the context of the model."""
    page = await look(browser, served, "#race")
    await page.until("!document.querySelector('#race-go').disabled")
    return page


async def test_race_runs_the_same_rollout_both_ways_and_gives_a_verdict(browser: Browser) -> None:
    async with serving() as served:
        page = await look_at_race(browser, served)
        assert await page.read(SIZES) == [16, 8_000, [500, 2_000, 4_000, 8_000, 20_000, 100_000]]
        await page.read("document.querySelector('#race-form').elements.turns.value = 6")
        await page.click("#race-go")

        await page.until(
            "document.querySelector('#race-result').innerText.startsWith('WebSocket took')"
        )
        for lane in ("http", "socket"):
            await page.until(count(f"#race-times .dot.{lane}", 6))
        sent = await page.read(
            "[...document.querySelectorAll('.runner .sub')].map((one) => one.innerText.match(/sent (.+?) ·/)[1])"
        )
        assert sent[0] != sent[1], "whole histories are more than what is new"
        assert "times fewer bytes" in await page.text("#race-result")
        assert page.faults == []


async def test_newcomer_races_a_small_model_untouched_and_gets_a_verdict(
    browser: Browser, tmp_path: Path
) -> None:
    """With the context of the models inside. Every answer is a call, so that every turn adds the most that it can."""
    call = {"calls": [{"name": "read_file", "arguments": {"path": "a.py"}}], "pad_tokens": 40}
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [call] * 6}))
    async with serving(context_tokens=8_192, script=str(script), tps=200) as served:
        page = await look_at_race(browser, served)
        turns, history, offered = await page.read(SIZES)
        assert (turns, history, offered) == (6, 2_000, [500, 2_000, 4_000])
        assert "8,192 tokens" in await page.text("#race-fits")
        await page.click("#race-go")
        await page.until(
            r"/^[1-9]\d* of 12 turns done, about \d+ s left$/.test("
            "document.querySelector('#race-progress').innerText.trim())"
        )

        await page.until("document.querySelector('#race-go').textContent === 'Race again'")
        assert (await page.text("#race-result")).startswith("WebSocket took")
        await page.until("document.querySelector('#race-progress').hidden")
        assert page.faults == []


async def test_race_offers_only_what_fits_the_model(browser: Browser) -> None:
    async with serving(context_tokens=8_192) as served:
        page = await look_at_race(browser, served)
        for field, value, expected in (
            ("turns", 12, [12, 500, [500]]),
            ("turns", 60, [14, 500, [500]]),
            ("output", 16, [14, 500, [500]]),
            ("turns", 2, [2, 2_000, [500, 2_000, 4_000]]),
        ):
            await page.read(
                f"""(() => {{ const one = document.querySelector('#race-form').elements.{field};
                one.value = {value}; one.dispatchEvent(new Event('change')); }})()"""
            )
            assert await page.read(SIZES) == expected, (field, value)
    async with serving(context_tokens=1_000) as served:
        page = await look(browser, served, "#race")
        await page.until("document.querySelector('#race-fits').innerText.includes('too few')")
        assert await page.read("document.querySelector('#race-go').disabled")


async def test_race_that_is_stopped_says_so(browser: Browser) -> None:
    async with serving(tps=50) as served:
        page = await look_at_race(browser, served)
        await page.click("#race-go")
        await page.until("document.querySelector('#race-go').textContent === 'Stop'")
        await page.until(count(".runner", 2))
        await page.click("#race-go")

        await page.until("document.querySelector('#race-result').innerText === 'Stopped.'")


async def test_person_talks_on_the_playground_and_sees_every_event(browser: Browser) -> None:
    async with serving() as served:
        page = await look(browser, served, "#playground")
        await page.click("#play-form textarea")
        hint = "document.querySelector('#play-form textarea').placeholder"
        assert "Enter sends" in await page.read(hint)
        await page.type("Good")
        await page.press("Enter", 13, modifiers=SHIFT)
        await page.type("evening")
        assert await page.read(f"{hint.replace('placeholder', 'value')}") == "Good\nevening"
        await page.press("Enter", 13)
        await page.until(count(".foot", 1))
        await page.type("Good morning")
        await page.press("Enter", 13, modifiers=CTRL)
        await page.until(count(".foot", 2))
        await page.type("And good night")
        await page.click("#play-form .main")
        await page.until(count(".foot", 3))

        # The text of an answer is drawn with the next frame.
        said = "document.querySelector('#transcript').innerText.includes('You said: Good morning')"
        await page.until(said)
        await page.until(count("#events .end", 3))
        events = await page.text("#events")
        for name in ("response.created", "response.output_text.delta", "response.completed"):
            assert name in events
        assert page.faults == []


async def test_newcomer_is_told_what_to_send_until_there_was_a_turn(browser: Browser) -> None:
    async with serving() as served:
        page = await look(browser, served)
        await page.until("!document.querySelector('#first').hidden")
        line = await page.text("#first-line")
        assert line.startswith(f"curl {served.url}/v1/responses -d '")
        await page.click("#first-copy")
        await page.until("document.querySelector('#first-copy').innerText !== 'Copy'")
        process = await asyncio.create_subprocess_shell(line, stdout=asyncio.subprocess.PIPE)
        out, _ = await process.communicate()
        assert json.loads(out)["status"] == "completed"
        await page.until("document.querySelector('#first').hidden")
        assert page.faults == []


async def test_person_finds_a_stored_conversation_and_reads_it(browser: Browser) -> None:
    async with serving() as served:
        for text in (f"Name a fruit. {LONG_LINK}", "Name a tree."):
            body = {"model": MODEL, "input": text, "instructions": "Be brief."}
            assert (await fetch(served, "POST", "/v1/responses", body)).status == 200
        page = await look(browser, served, "#stored")
        await page.until(count("#stored-rows li", 2))
        await page.click("#stored-form input")
        await page.type("fruit")
        await page.until("document.querySelectorAll('#stored-rows li').length === 1")
        await page.click("#stored-rows a")
        await page.until(
            "document.querySelector('#reader-items').innerText.includes('Name a fruit.')"
        )
        await page.until(count("#reader-items .markdown a", 1))
        # The answer repeats the link: nothing of it is cut off.
        assert await page.read(
            "[...document.querySelectorAll('#reader-items .item')].every((one) => one.scrollWidth <= one.clientWidth)"
        )
        assert page.faults == []


async def test_playground_has_a_system_prompt(browser: Browser) -> None:
    async with serving() as served:
        page = await look(browser, served, "#playground")
        await page.click("#play-form [name=instructions]")
        await page.type("Be brief.")
        await page.click("#play-form textarea")
        await page.type("Hello")
        await page.press("Enter", 13)
        await page.until(count(".foot", 1))
        stored = (await fetch(served, "GET", "/dashboard/stored", None)).json["data"]
        response = (await fetch(served, "GET", f"/v1/responses/{stored[0]['id']}", None)).json
        assert response["instructions"] == "Be brief."


async def test_person_steers_a_running_turn_and_sees_the_servers_answer(
    browser: Browser, tmp_path: Path
) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [{"reasoning": "So." * 150, "text": "So."}]}))
    async with serving(tps=100, script=str(script)) as served:
        page = await look(browser, served, "#playground")
        await page.click("#play-form textarea")
        await page.type("Tell me everything")
        await page.press("Enter", 13, modifiers=2)
        await page.until("!document.querySelector('#play-steer').disabled")
        await page.click("#play-form textarea")
        await page.type("Keep it short")
        await page.click("#play-steer")

        await page.until("document.querySelector('#events').innerText.includes('steer.accepted')")
        # The steered turn ends at its boundary, and its successor begins by itself.
        await page.until(
            "document.querySelector('#events').innerText.includes('response.incomplete')"
        )
        await page.until(count(".foot", 1))
        assert "↑ response.steer" in await page.text("#events")
        assert "Keep it short" in await page.text("#transcript")
        assert "steered" in await page.text(".foot")


async def test_page_survives_a_restart_of_the_server(browser: Browser) -> None:
    async with serving() as served:
        page = await look(browser, served)
        async with wire(served) as socket:
            await rollout(socket, 2)
        await page.until(number("turns", 2))
        process = await page.read("document.body.dataset.process")
    await page.until("document.querySelector('#link').dataset.state === 'lost'")
    await page.until("document.querySelector('#banner').innerText.includes('cannot be reached')")
    assert await page.read(count(".turn-row", 2)), "the past stays in sight"

    async with serving(port=served.port) as again:
        await page.until(f"{IS_LIVE} && document.body.dataset.process !== '{process}'")
        await page.until("document.querySelector('#banner').innerText.includes('restarted')")
        async with wire(again) as socket:
            await rollout(socket, 1)
        await page.until(number("turns", 1))
        await page.until("document.querySelectorAll('.turn-row').length === 1")


async def test_wrong_key_is_asked_for_again_and_the_right_one_opens(browser: Browser) -> None:
    async with serving(auth="keys") as served:
        app = served.app
        _, secret = await issue_key(app.state.store.keys, app.state.hashes, "page", "ada", SCOPES)
        page = await browser.page()
        await page.open(f"{served.url}/")

        await page.until("document.querySelector('#ask').open")
        assert await page.read("document.querySelector('#ask-wrong').hidden")
        await page.type("wrong")
        await page.press("Enter", 13)
        await page.until("!document.querySelector('#ask-wrong').hidden")
        assert "API key" in await page.text("#ask-wrong")
        await page.type(secret)
        await page.press("Enter", 13)

        await page.until(f"{IS_LIVE} && !document.querySelector('#ask').open")
        assert secret not in await page.read("document.body.innerText + location.href")


async def test_thousand_connections_do_not_freeze_the_page(browser: Browser) -> None:
    async with serving() as served:
        page = await look(browser, served)
        async with many_wires(served, 1_000) as sockets:
            await page.until(number("connections", 1_000))
            await asyncio.gather(
                *(socket.turn(input="hello", store=False) for socket in sockets[::10])
            )
            await page.until(number("turns", 100))
            drawn = await page.read("document.querySelectorAll('*').length")
            assert drawn < 4_000, "what is drawn has a limit"
            assert "1,000 open" in await page.text("#connections-sub")
            # A frame that took this long would be felt; half of them would be a frozen page.
            frames = await page.read(
                """new Promise((resolve) => { const seen = []; let last = performance.now();
                const frame = () => { const now = performance.now(); seen.push(now - last); last = now;
                    if (seen.length < 30) requestAnimationFrame(frame); else resolve(seen); };
                requestAnimationFrame(frame); })"""
            )
            assert sorted(frames)[len(frames) // 2] < 250
        assert page.faults == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_page_fits_a_phone_and_follows_the_systems_colours(
    browser: Browser, scheme: str
) -> None:
    async with serving() as served:
        page = await browser.page()
        await page.size(390, 844, scale=2, mobile=True)
        await page.colours(scheme)
        await page.open(f"{served.url}/")
        await page.until(IS_LIVE)
        async with wire(served) as socket:
            await rollout(socket, 3)
            await page.until(count(".turn-row", 3))
            assert await page.read(OVERLAPS.format(selector="#waterfall text")) == []
            for view in TABS:
                await tap(page, view)
                assert await page.read("document.documentElement.scrollWidth") <= 390, view
                assert await page.read(BROKEN_LABELS) == [], view
            await tap(page, "playground")
            hint = await page.read("document.querySelector('#play-form textarea').placeholder")
            assert hint == "Type a message.", "a phone has no Shift + Enter"
            await page.click("#play-form textarea")
            await page.type("Good morning")
            await page.click("#play-form .main")
            await page.until(count(".foot", 1))
            assert await page.read("document.documentElement.scrollWidth") <= 390, "with a response"
        assert await page.read("document.documentElement.dataset.theme") == scheme


async def tap(page: Page, view: str) -> None:
    """A tap on a tab shows its view from the top, whatever was scrolled to before."""
    await page.read("scrollTo(0, 150)")
    await page.click(f'.bar nav a[href="#{view}"]')
    await page.until(f"!document.querySelector('#{view}-view').hidden")
    top = f"document.querySelector('#{view}-view').getBoundingClientRect().top"
    header = "document.querySelector('.top').getBoundingClientRect().bottom"
    # A scroll to an anchor may come a frame later.
    await page.read(DRAWN)
    assert await page.read(f"scrollY === 0 && {top} >= {header}"), view


async def test_tap_on_a_tab_never_hides_the_top_of_its_view(browser: Browser) -> None:
    async with serving() as served:
        page = await look(browser, served)
        for width, height in ((390, 844), (1440, 900)):
            await page.size(width, height)
            for view in (*TABS, "playground", "live"):
                await tap(page, view)


async def test_answer_is_shown_as_markdown_and_nothing_in_it_runs_or_is_loaded(
    browser: Browser, tmp_path: Path
) -> None:
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [{"text": HOSTILE}]}))
    async with serving(script=str(script)) as served:
        page = await look(browser, served, "#playground")
        await page.read("document.querySelector('#play-form').elements.output.value = 4000")
        await page.click("#play-form textarea")
        await page.type("Hello")
        await page.press("Enter", 13)
        await page.until(count(".say.model hr", 1))

        said = "document.querySelector('.say.model')"
        names = await page.read(f"[...{said}.querySelectorAll('*')].map((one) => one.localName)")
        assert {"h3", "strong", "ol", "ul", "table", "pre", "button"} <= set(names)
        assert not {"script", "img", "iframe", "style", "svg", "form"} & set(names)
        links = await page.read(
            f"[...{said}.querySelectorAll('a')].map((one) => [one.getAttribute('href'), one.rel])"
        )
        assert {href for href, _ in links} == {
            "https://example.org/a",
            "https://foreign.test/x.png",
            "https://foreign.test/",
        }
        assert all("noopener" in rel.split() for _, rel in links)
        assert await page.read(f"{said}.innerText.includes('<script>')"), "HTML is shown as text"
        assert await page.read("window.hacked === undefined")
        assert not [url for url in page.fetched if "127.0.0.1" not in url]
        await page.click(".say.model .copy")
        await page.until(f"{said}.querySelector('.copy').textContent === 'Copied'")
        assert page.faults == []


async def test_person_opens_the_figures_of_a_turn_and_from_there_its_conversation(
    browser: Browser,
) -> None:
    """In front of a FAKE engine with two replicas, of which one does not answer."""
    async with FakeVllm() as engine:
        flags: dict[str, object] = {
            "engine": "vllm",
            "engine_url": (engine.url, "http://127.0.0.1:9"),
            "tokenizer": str(find_weights("smollm2")),
            "model": ("fake",),
            "context_tokens": 8_000,
        }
        async with serving(**flags) as served, wire(served) as socket:
            await read_figures(await look(browser, served), socket, engine.url)


async def test_person_sees_turns_of_all_apis_in_their_own_words(browser: Browser) -> None:
    """Clients that send their whole history each time: their turns are conversations all the same."""
    async with serving() as served:
        page = await look(browser, served)
        for asking in ASKING.values():
            past: list[dict[str, Any]] = []
            for step in range(3):
                answer = await asking.ask(served, f"Step {step}", before=past)
                said = {"role": "assistant", "content": asking.text(answer.json)}
                past += [{"role": "user", "content": f"Step {step}"}, said]
        await page.until(count(".turn-row", 9))
        rows = await page.read("document.querySelector('#waterfall').textContent")
        assert [rows.count(f"{label}http") for label in ("messages_", "chat_")] == [3, 3]
        chips = await page.text("#chains")
        assert chips.count("3 turns") == 3
        for asking in ASKING.values():
            await page.click(f'.turn-row[data-id^="{asking.prefix}"]')
            await page.until("document.querySelector('#figures').open")
            assert (await page.text("#figures-sub")).startswith(asking.prefix)
            assert f"transport\n{asking.label}http" in await page.text("#figures")
            await page.press("Escape", 27)
        assert page.faults == []


async def read_figures(page: Page, socket: Wire, replica: str) -> None:
    made = await rollout(socket, 2, model="fake")
    await page.until(count(".turn-row", 2))
    # Drawn again while the button is down, as happens four times a second while turns run.
    again = """new Promise((resolve) => { document.dispatchEvent(new Event('visibilitychange'));
        requestAnimationFrame(() => requestAnimationFrame(resolve)); })"""
    await page.click(f'.turn-row[data-id="{made[1]}"]', again)

    await page.until("document.querySelector('#figures').open")
    figures = await page.text("#figures")
    for name in ("first token", "reused by Segue", "cached in the engine", "overhead"):
        assert name in figures
    assert f"continues\n{made[0]}" in figures
    assert f"engine replica\n{replica}" in figures
    assert "the client does not wait" in figures
    await page.click("#figures-read")
    await page.until("document.querySelector('#reader').innerText.includes('step 1')")
    assert not await page.read("document.querySelector('#figures').open")
    await page.until("document.querySelector('#engines-sub').innerText.startsWith('1 of 2 up')")
    assert "down" in await page.text("#engines")
    await page.press("Escape", 27)
    await see_fleet(page, made[0], replica)
    assert page.faults == []


async def see_fleet(page: Page, root: str, replica: str) -> None:
    """Each replica with its state and figures, and the conversation at its replica."""
    await page.read("location.hash = '#fleet'")
    await page.until(count(".replica.up", 1))
    await page.until(count(".replica.down", 1))
    await page.until(count("#fleet-chains tbody tr", 1))
    shown = replica.removeprefix("http://")
    assert f"{root[-6:]}\t2\t{shown}\t–" in await page.text("#fleet-chains")
    assert "1\nof 2 up" in (await page.text("#fleet-tiles")).replace(" of", "\nof")
    assert "turns\n2" in await page.text(f'[data-replica="{replica}"]')
    assert await page.read("document.querySelectorAll('#fleet-processes tbody tr').length") == 1


async def test_person_sees_where_two_prompts_part_and_what_costs_most(browser: Browser) -> None:
    async with serving() as served, wire(served) as socket:
        page = await look(browser, served)
        dates = ("1 May", "2 May")
        story, last = "The build reads its settings once. " * 60, None
        for day in dates:
            more = {} if last is None else {"previous_response_id": last}
            told = {"instructions": f"Today is {day}. Be brief.", "input": story, **more}
            last = (await socket.turn(**told))["response"]["id"]
        await page.until("document.querySelector('#losses .loss') !== null")
        losses = await page.text("#losses")
        assert "earlier input changed in 1 of 2 turns" in losses
        assert "into the last message" in losses
        await page.size(390, 844, mobile=True)
        await page.read(DRAWN)
        await page.click("#losses .loss button")

        await page.until("document.querySelectorAll('#figures-cache mark').length === 2")
        parts = await page.read(
            "[...document.querySelectorAll('#figures-cache mark')].map((one) => one.textContent)"
        )
        assert parts == ["1", "2"]
        cache = await page.text("#figures-cache")
        assert all(f"Today is {day}." in cache for day in dates)
        assert "instructions, line 1, character 9" in cache
        assert await page.read("document.documentElement.scrollWidth") <= 390
        assert await page.read("document.querySelector('#figures').scrollWidth <= innerWidth")
        assert page.faults == []


async def test_operator_makes_the_first_key_and_manages_keys_in_the_page(browser: Browser) -> None:
    """On an open server the first key closes it; the page goes on with that key. On a phone."""
    async with serving() as served:
        page = await browser.page()
        await page.size(390, 844, scale=2, mobile=True)
        await page.open(f"{served.url}/#keys")
        await page.until(
            "document.querySelector('#keys-open').innerText.includes('No key is required')"
        )
        await create_key(page, "me")
        first = await page.text("#key-secret")
        await page.until("document.querySelector('.keys .tag')?.innerText === 'this page'")
        assert (await fetch(served, "GET", "/v1/models")).status == 401
        await page.click("#key-form [type=submit]")

        await create_key(
            page, "laptop", requests_per_min="1", budget_tokens_day="50", models=f"{MODEL}, x-*"
        )
        secret = await page.text("#key-secret")
        await page.click(".secret .copy")
        await page.until("document.querySelector('.secret .copy').innerText === 'Copied'")
        await page.click("#key-form [type=submit]")
        await page.until("document.querySelector('#keys-rows').innerText.includes('1 req/min')")
        headers = {"Authorization": f"Bearer {secret}"}
        asked = ("POST", "/v1/responses", {"model": MODEL, "input": "hello"}, headers)
        assert [(await fetch(served, *asked)).status for _ in range(2)] == [200, 429]

        laptop = (
            "tr[data-id]:last-child"
            if "laptop" in await page.text("tr[data-id]:last-child")
            else "tr[data-id]:first-child"
        )
        await page.click(f"{laptop} .actions button")
        await page.until("document.querySelector('#key-form [name=lanes_max]') !== null")
        await page.read("document.querySelector('#key-form [name=requests_per_min]').value = ''")
        await page.click("#key-form [type=submit]")
        await page.until("!document.querySelector('#keys-rows').innerText.includes('1 req/min')")
        shown = await page.text("#keys-rows")
        assert "1 turns" in shown
        assert f"models {MODEL}, x-*" in shown
        assert "of 50 tokens this day" in shown
        assert await page.read("document.querySelectorAll('.budget progress').length") == 1

        await page.click(f"{laptop} .actions .bad")
        await page.until("document.querySelector('#key-title').innerText.startsWith('Revoke')")
        assert await page.read("document.documentElement.scrollWidth") <= 390
        await page.click("#key-form .danger")
        await page.until("document.querySelector('#keys-sub').innerText === '1 valid · 1 revoked'")
        while (await fetch(served, *asked)).status != 401:
            pass
        content = await page.read("document.body.innerText + location.href")
        assert not [one for one in (first, secret) if one in content]
        assert page.faults == []


async def create_key(page: Page, name: str, **limits: str) -> None:
    """Through the dialog; the secret is shown then."""
    await page.click("#keys-new")
    await page.until("document.querySelector('#key-form [name=name]') !== null")
    await page.read(f"document.querySelector('#key-form [name=name]').value = '{name}'")
    for limit, value in limits.items():
        await page.read(f"document.querySelector('#key-form [name={limit}]').value = '{value}'")
    await page.click("#key-form [type=submit]")
    await page.until("document.querySelector('#key-secret') !== null")


async def test_key_that_is_no_operators_sees_no_keys(browser: Browser) -> None:
    async with serving(auth="keys") as served:
        app = served.app
        _, secret = await issue_key(
            app.state.store.keys, app.state.hashes, "page", "ada", ["responses", "dashboard"]
        )
        page = await browser.page()
        await page.open(f"{served.url}/#keys")
        await page.until("document.querySelector('#ask').open")
        await page.type(secret)
        await page.press("Enter", 13)
        await page.until(IS_LIVE)
        for view in ("fleet", "keys"):
            link = f"document.querySelector('.bar nav a[href=\"#{view}\"]')"
            assert await page.read(f"{link}.hidden")
        await page.until("document.querySelector('#keys-rows').innerText.includes('operator')")


async def test_page_computes_rates_by_the_end_of_turns_and_bounds_hostile_markdown(
    browser: Browser,
) -> None:
    """Turns of four seconds that end every half second are two a second, not none. No text keeps the page busy."""
    async with serving() as served:
        page = await look(browser, served)
        for hostile in ("**a ", "`a", "[a](", "# \t", "> ", "- ", "|-", "a\n- ", "1. a\n\n"):
            await page.read(
                f"""import('/dashboard/markdown.js').then(({{ showMarkdown }}) =>
                showMarkdown(document.createElement('div'), {json.dumps(hostile)}.repeat(1200) + "!"))"""
            )
        rate = await page.read(
            """import('/dashboard/live.js').then(({ rates }) => rates({ now_ms: 60000, turns:
            Array.from({ length: 41 }, (_, at) => ({ at_ms: 36000 + at * 500, total_ms: 4000 })) }).last)"""
        )
    assert rate == 2
