"""The pictures of docs/dashboard.md, of a real server with a scripted engine: `python -m tests.dashboard.pictures`.

Three agents work, one of them on three lanes; others are connected and mostly idle.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import msgspec

from segue.accounts.hashes import issue_key
from segue.limits import KeyLimits
from segue.server.control import DrainOrder
from tests.dashboard.browser import Page, browsing
from tests.scenarios.test_replicas import ask, fleet_of, restart, staged
from tests.support import MODEL, WEATHER, Served, Wire, fetch, serving, wire

DOCS = Path(__file__).parents[2] / "docs"
# Turns of the longest conversation; what continues it is long.
CHAIN = 19
# What a tool takes; a client is not always as quick as a test.
TOOL_S = 0.05
SETTLED_S = 0.6
HISTORY = "The project reads its settings once, and never again. " * 220
TOOL_SAID = "12 files changed, 3 of them in the room that this question belongs to. " * 12


def script(path: Path) -> Path:
    """Calls and answers of an ordinary rollout; the last entry is long, so that something runs in the picture."""
    call = {
        "text": "I look it up.",
        "calls": [{"name": "get_weather", "arguments": {"city": "Rome"}}],
    }
    turns: list[dict[str, Any]] = [
        {**call, "pad_tokens": 20 + 17 * (step * 7 % 5)} for step in range(CHAIN)
    ]
    turns[-1] = {"text": "This is what I found.", "pad_tokens": 40}
    turns.append({"text": "Let me think about it.", "pad_tokens": 6_000})
    path.write_text(json.dumps({"turns": turns}))
    return path


async def go_on(
    socket: Wire, last: dict[str, Any] | None, opening: str, lane: str | None = None
) -> dict[str, Any]:
    """The next turn: the outputs of all calls, or the first words."""
    fields: dict[str, Any] = {"tools": [WEATHER], "input": opening}
    if last is not None:
        fields["previous_response_id"] = last["id"]
        fields["input"] = [
            {"type": "function_call_output", "call_id": item["call_id"], "output": TOOL_SAID}
            for item in last["output"]
            if item["type"] == "function_call"
        ]
    if lane is not None:
        fields["stream_id"] = lane
    await asyncio.sleep(TOOL_S)
    response: dict[str, Any] = (await socket.turn(**fields))["response"]
    return response


async def work(served: Served, opened: AsyncExitStack) -> None:
    """The past that the pictures show, and four attempts from one state that still run."""
    sockets = [await opened.enter_async_context(wire(served)) for _ in range(64)]
    main, second, third = sockets[:3]
    await fetch(served, "POST", "/v1/responses", {"model": "gpt-nobody", "input": "x"})
    await second.turn(input="x", previous_response_id="resp_of_yesterday")
    for socket, steps in ((third, 5), (second, 9)):
        last = None
        for _ in range(steps):
            last = await go_on(socket, last, HISTORY[:4000])
    chain: list[dict[str, Any]] = []
    for _ in range(15):
        chain.append(await go_on(main, chain[-1] if chain else None, HISTORY))
    for lane, start, steps in (("review", 4, 5), ("tests", 8, 4)):
        last = chain[start]
        for _ in range(steps):
            last = await go_on(main, last, "", lane)
    while len(chain) < CHAIN:
        chain.append(await go_on(main, chain[-1], ""))
    await asyncio.sleep(SETTLED_S)
    for socket in sockets[12:44:9]:
        await socket.create(input="Try it.", previous_response_id=chain[-1]["id"])


async def look(page: Page, path: str, *, whole: bool = False) -> None:
    """Take a picture once everything is drawn."""
    await page.read("new Promise((resolve) => setTimeout(resolve, 350))")
    picture = await page.picture(whole=whole)
    await asyncio.to_thread((DOCS / path).write_bytes, picture)


async def look_at(page: Page, selector: str, path: str) -> None:
    """Take a picture of one element."""
    await page.read("new Promise((resolve) => setTimeout(resolve, 350))")
    picture = await page.picture(of=selector)
    await asyncio.to_thread((DOCS / path).write_bytes, picture)


async def show_live(page: Page, served: Served) -> None:
    async with AsyncExitStack() as opened:
        await work(served, opened)
        await page.until("document.querySelectorAll('#tree .node.running').length === 4")
        await look(page, "dashboard-light.png", whole=True)
        await page.colours("dark")
        await look(page, "dashboard-dark.png", whole=True)
        await page.colours("light")
        await page.size(390, 844, scale=2, mobile=True)
        await look(page, "dashboard-phone.png")
        await page.size(1440, 900)
        await page.click(".turn-row:nth-last-child(6)")
        await page.until("document.querySelector('#figures').open")
        await look_at(page, "#figures", "dashboard-turn.png")


async def show_keys(page: Page, served: Served) -> None:
    """Keys of a small team, one of them revoked."""
    keys, hashes = served.app.state.store.keys, served.app.state.hashes
    _, secret = await issue_key(keys, hashes, "operator", "ops", ["operator", "dashboard"])
    team: tuple[tuple[str, str, KeyLimits], ...] = (
        ("build agents", "ci", KeyLimits(requests_per_min=600, lanes_max=32)),
        ("ada's laptop", "ada", KeyLimits(tokens_per_min=2_000_000)),
        ("ada's phone", "ada", KeyLimits()),
        ("trial", "guest", KeyLimits(requests_per_min=20, tokens_per_min=50_000)),
    )
    for turns, (name, owner, limits) in enumerate(team, start=2):
        key, own = await issue_key(keys, hashes, name, owner, limits=limits)
        headers = {"Authorization": f"Bearer {own}"}
        for _ in range(turns * 3):
            body = {"model": MODEL, "input": HISTORY[: 900 * turns]}
            await fetch(served, "POST", "/v1/responses", body, headers)
    await keys.revoke(key.id)
    await page.size(1280, 560)
    await page.open(f"{served.url}/#keys")
    await page.until("document.querySelector('#ask').open")
    await page.type(secret)
    await page.press("Enter", 13)
    await page.until("document.querySelectorAll('.keys tbody tr').length === 4")
    await look(page, "dashboard-keys.png")


async def show_loss(page: Page, served: Served) -> None:
    """An agent that writes the time into its instructions."""
    await page.open(f"{served.url}/")
    last: dict[str, Any] = {}
    async with wire(served) as socket:
        for minute in (14, 15):
            told = f"You are a careful engineer.\nIt is Monday, 09:{minute}.\nUse the tools, and be brief."
            more = {"previous_response_id": last["id"]} if last else {}
            last = (await socket.turn(instructions=told, input=HISTORY, **more))["response"]
    await page.until("document.querySelector('#losses button') !== null")
    await page.click("#losses button")
    await page.until("document.querySelectorAll('#figures-cache mark').length === 2")
    await look_at(page, "#figures-cache", "dashboard-cache.png")


async def show_race(page: Page) -> None:
    await page.read("location.hash = '#race'")
    await page.read("document.querySelector('#race-form').elements.context.value = '20000'")
    await page.click("#race-go")
    await page.until("document.querySelector('#race-go').textContent === 'Race again'", 60)
    await page.read("document.activeElement.blur()")
    await look(page, "dashboard-race.png")


async def show_fleet() -> None:
    """Four replicas that count their blocks: one is drained, and one was restarted, while conversations go on."""
    async with staged(4) as (served, machines), browsing() as browser:
        page = await browser.page()
        await page.size(1440, 900)
        await page.open(f"{served.url}/#fleet")
        lasts: list[str | None] = [None] * 9
        for turn in range(8):
            for at, last in enumerate(lasts):
                lasts[at] = (await ask(served, last, f"Question {at}: {HISTORY[: 900 * at]}"))[0]
            rows = (await fleet_of(served)).values()
            in_service = [one for one in rows if one["state"] == "up"]
            busiest = max(in_service, key=lambda one: int(one["turns"]))["name"]
            if turn == 3:
                order = DrainOrder(busiest, is_drained=True)
                await served.app.drains.order(msgspec.json.encode(order))
            if turn == 5:
                await restart(served, machines[busiest])
        await page.until("document.querySelectorAll('#fleet-losses tbody tr').length > 1")
        await page.until("document.querySelectorAll('#fleet-chains tbody tr').length === 9")
        await look(page, "dashboard-fleet.png", whole=True)
        await page.colours("dark")
        await page.size(390, 844, scale=2, mobile=True)
        await look(page, "dashboard-fleet-phone.png")


async def main() -> int:
    await show_fleet()
    with tempfile.TemporaryDirectory() as folder:
        played = script(Path(folder) / "script.json")
        store = f"sqlite:///{folder}/turns.db"
        async with (
            serving(tps=1000, script=str(played), store=store) as served,
            browsing() as browser,
        ):
            page = await browser.page()
            await page.size(1440, 900)
            await page.open(f"{served.url}/")
            await show_live(page, served)
        async with serving(auth="keys") as served, browsing() as browser:
            await show_keys(await browser.page(), served)
        async with serving() as served, browsing() as browser:
            page = await browser.page()
            await page.size(1440, 820)
            await page.open(f"{served.url}/")
            await show_loss(page, served)
            await page.open(f"{served.url}/")
            await page.until("document.querySelectorAll('#race-form option').length > 5")
            await show_race(page)
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
