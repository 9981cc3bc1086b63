"""The containers of a person on the dashboard, their files, and the commands of a turn; in a headless Chromium."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.dashboard.browser import Browser, browsing
from tests.dashboard.test_browser import count, look
from tests.escapes.conftest import sandboxes_can_be_made
from tests.keepers import OWN
from tests.scenarios.test_code_interpreter import AUTO, python
from tests.scenarios.test_shell import DONE, ONLINE, reaching, run
from tests.scenarios.test_tools import scripted
from tests.support import serving, wire

__all__ = ["sandboxes_can_be_made"]


@pytest.fixture
async def browser() -> AsyncIterator[Browser]:
    async with browsing() as one:
        yield one


async def test_person_sees_containers_their_files_and_the_commands_of_a_turn(
    browser: Browser, tmp_path: Path
) -> None:
    commands = run("echo a,b > squares.csv", "grep -r needle . || exit 3")
    async with scripted(tmp_path, commands, DONE, **ONLINE) as served, wire(served) as socket:
        page = await look(browser, served)
        await socket.turn(input="Go", tools=[reaching("github.com", "files.example.com")])
        await page.open(f"{served.url}/")
        await page.until(count("#containers tr.active", 1))
        text = await page.text("#containers")
        assert "kernel-shared" in text
        assert "github.com, files.example.com" in text
        assert "1 active" in await page.text("#containers-sub")
        await page.click("#containers .actions button")
        await page.until(count("#containers tr.files li", 1))
        assert "/mnt/data/squares.csv" in await page.text("#containers tr.files")
        await page.until(count(".turn-row", 1))
        await page.read(
            "document.querySelector('.turn-row').dispatchEvent(new MouseEvent('click', {bubbles: true}))"
        )
        await page.until(count(".figure.command", 2))
        said = await page.text("#figures-rows")
        assert "grep -r needle . || exit 3" in said
        assert "exit 3 " in said or said.count("exit 3") == 2
        assert page.faults == []


async def test_person_sees_the_code_of_a_turn(browser: Browser, tmp_path: Path) -> None:
    code = "x = 6\nprint(x * 7)"
    async with scripted(tmp_path, python(code), DONE, **OWN) as served, wire(served) as socket:
        page = await look(browser, served)
        await socket.turn(input="Go", tools=[AUTO])
        await page.until(count(".turn-row", 1))
        await page.read(
            "document.querySelector('.turn-row').dispatchEvent(new MouseEvent('click', {bubbles: true}))"
        )
        await page.until(count(".figure.command", 1))
        shown = await page.text(".figure.command dt")
        assert shown == code
        assert page.faults == []


async def test_server_without_sandboxes_shows_no_containers(browser: Browser) -> None:
    async with serving() as served:
        page = await look(browser, served)
        assert await page.read("document.getElementById('containers-card').hidden")
