"""A real headless Chromium, spoken to in its own DevTools protocol: enough to look, click, type and take pictures.

`make test` puts one under `.cache/chromium`; `SEGUE_TEST_CHROMIUM` names another executable (on machines that the
packaged one does not run on). There is no test without a browser: a missing one is a failure.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import re
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import websockets.asyncio.client

ROOT = Path(__file__).parents[2]
PACKAGED = ROOT / ".cache" / "chromium" / "chromium"
WAIT_S = 30
# The packaged fonts first, so that a machine without any still has letters, and pictures look alike.
FONTS = """<?xml version="1.0"?><!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>{fonts}</dir><dir>/usr/share/fonts</dir><cachedir>{cache}</cachedir>
<alias><family>sans-serif</family><prefer><family>Open Sans</family></prefer></alias>
<alias><family>system-ui</family><prefer><family>Open Sans</family></prefer></alias>
<alias><family>monospace</family><prefer><family>DejaVu Sans Mono</family></prefer></alias></fontconfig>
"""
FLAGS = (
    "--headless",
    # Containers have no user namespaces; the only pages it opens are our own.
    "--no-sandbox",
    "--no-zygote",
    "--disable-dev-shm-usage",
    "--disable-gpu",
    "--hide-scrollbars",
    "--font-render-hinting=none",
    "--no-first-run",
    "--disable-background-networking",
    "--remote-debugging-port=0",
)


def find_chromium() -> Path:
    """The browser of this project, or the one that was named."""
    path = Path(os.environ.get("SEGUE_TEST_CHROMIUM") or PACKAGED)
    assert path.is_file(), f"there is no browser at {path}: run 'make test', or name one"
    return path


class Page:
    """One tab. Whatever goes wrong in it is kept in `faults`; what it fetches in `fetched`."""

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self.session = session
        self.faults: list[str] = []
        self.fetched: list[str] = []

    async def call(self, method: str, wait_s: float = WAIT_S, **parameters: Any) -> dict[str, Any]:
        """A command to this tab."""
        return await self._browser.call(method, parameters, self.session, wait_s)

    async def open(self, url: str) -> None:
        """Go there, and wait until its scripts ran."""
        await self.call("Page.navigate", url=url)
        await self.until("document.readyState === 'complete'")

    async def read(self, script: str, wait_s: float = WAIT_S) -> Any:
        """The value of an expression, awaited."""
        answer = await self.call(
            "Runtime.evaluate", wait_s, expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, (script, answer["exceptionDetails"])
        return answer["result"].get("value")

    async def until(self, condition: str, wait_s: float = WAIT_S) -> Any:
        """Wait until an expression is true; looked at in every frame of the page."""
        watch = f"""new Promise((resolve) => {{
            const look = () => {{ let value = null; try {{ value = {condition}; }} catch {{ value = null; }}
                if (value) resolve(value); else setTimeout(look, 20); }};
            look();
        }})"""
        try:
            async with asyncio.timeout(wait_s):
                while True:
                    try:
                        return await self.read(watch, wait_s)
                    except AssertionError as error:
                        # The page was left while we looked.
                        if "navigated" not in str(error) and "destroyed" not in str(error):
                            raise
        except TimeoutError:
            text = await self.read("document.body.innerText.slice(0, 2000)")
            raise AssertionError(f"never true: {condition}\n{self.faults}\n{text}") from None

    async def text(self, selector: str) -> str:
        """What a person reads there."""
        return str(await self.read(f"document.querySelector({json.dumps(selector)})?.innerText"))

    async def click(self, selector: str, meanwhile: str = "") -> None:
        """A real click in the middle of it; `meanwhile` runs between press and release."""
        name = json.dumps(selector)
        box = await self.read(
            f"""(() => {{ const node = document.querySelector({name});
            node.scrollIntoView({{block: "center"}});
            const {{x, y, width, height}} = node.getBoundingClientRect();
            return [x + width / 2, y + height / 2]; }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            await self.call(
                "Input.dispatchMouseEvent",
                type=kind,
                x=box[0],
                y=box[1],
                button="left",
                clickCount=1,
            )
            if meanwhile and kind == "mousePressed":
                await self.read(meanwhile)

    async def type(self, text: str) -> None:
        """Type into what has the focus."""
        await self.call("Input.insertText", text=text)

    async def press(self, key: str, code: int, modifiers: int = 0) -> None:
        """A key, by its name and number; modifiers: 2 is Ctrl, 8 is Shift."""
        # With its text, a key writes unless the page prevents it.
        text = {"text": "\r"} if key == "Enter" else {}
        for kind, more in (("keyDown", text), ("keyUp", {})):
            await self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                modifiers=modifiers,
                **more,
            )

    async def size(
        self, width: int, height: int, *, scale: float = 1, mobile: bool = False
    ) -> None:
        """The size of the window."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=mobile,
        )
        await self.call("Emulation.setTouchEmulationEnabled", enabled=mobile)

    async def colours(self, scheme: str) -> None:
        """Light or dark, as the system would have it."""
        feature = {"name": "prefers-color-scheme", "value": scheme}
        await self.call("Emulation.setEmulatedMedia", features=[feature])

    async def picture(self, *, whole: bool = False, of: str = "") -> bytes:
        """A PNG of what is seen, of the whole page, or of one element."""
        clip: dict[str, Any] = {}
        if of:
            box = await self.read(
                f"""(() => {{ const {{x, y, width, height}} =
                document.querySelector({json.dumps(of)}).getBoundingClientRect();
                return {{x: x + scrollX, y: y + scrollY, width, height, scale: 1}}; }})()"""
            )
            clip = {"clip": box}
        answer = await self.call("Page.captureScreenshot", captureBeyondViewport=whole, **clip)
        return base64.b64decode(answer["data"])

    def hear(self, method: str, parameters: dict[str, Any]) -> None:
        """Something happened in this tab."""
        match method:
            case "Runtime.exceptionThrown":
                self.faults.append(json.dumps(parameters["exceptionDetails"])[:1000])
            case "Log.entryAdded" if parameters["entry"]["level"] == "error":
                self.faults.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent":
                self.fetched.append(parameters["request"]["url"])
            case "Network.webSocketCreated":
                self.fetched.append(parameters["url"])


class Browser:
    """A running Chromium, and the one connection to it."""

    def __init__(self, socket: websockets.asyncio.client.ClientConnection) -> None:
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._pages: dict[str, Page] = {}
        self._tasks: set[asyncio.Task[dict[str, Any]]] = set()

    async def listen(self) -> None:
        """Answers to their callers, events to their pages; until the browser goes."""
        async for text in self._socket:
            message = json.loads(text)
            if "id" in message:
                answer = self._answers.pop(message["id"], None)
                if answer is not None and not answer.done():
                    answer.set_result(message)
            elif page := self._pages.get(message.get("sessionId", "")):
                page.hear(message["method"], message["params"])

    async def call(
        self,
        method: str,
        parameters: dict[str, Any],
        session: str | None = None,
        wait_s: float = WAIT_S,
    ) -> dict[str, Any]:
        """One command and its answer."""
        number = next(self._numbers)
        self._answers[number] = asyncio.get_running_loop().create_future()
        frame: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if session is not None:
            frame["sessionId"] = session
        await self._socket.send(json.dumps(frame))
        async with asyncio.timeout(wait_s):
            answer = await self._answers[number]
        assert "error" not in answer, (method, answer["error"])
        result: dict[str, Any] = answer["result"]
        return result

    async def page(self) -> Page:
        """A new tab, in a profile of its own."""
        context = (await self.call("Target.createBrowserContext", {}))["browserContextId"]
        target = await self.call(
            "Target.createTarget", {"url": "about:blank", "browserContextId": context}
        )
        attached = await self.call(
            "Target.attachToTarget", {"targetId": target["targetId"], "flatten": True}
        )
        page = self._pages[attached["sessionId"]] = Page(self, attached["sessionId"])
        for name in ("Page", "Runtime", "Log", "Network"):
            await page.call(f"{name}.enable")
        await page.size(1280, 900)
        return page


@asynccontextmanager
async def browsing() -> AsyncIterator[Browser]:
    """A browser while inside, with an empty profile that goes with it."""
    path = find_chromium()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            path,
            *FLAGS,
            f"--user-data-dir={profile}",
            "about:blank",
            env={**os.environ, **_surroundings(path, Path(profile))},
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
        )
        try:
            url = await _address(process)
            async with websockets.asyncio.client.connect(url, max_size=None) as socket:
                browser = Browser(socket)
                listening = asyncio.create_task(browser.listen())
                try:
                    yield browser
                finally:
                    listening.cancel()
                    await asyncio.gather(listening, return_exceptions=True)
        finally:
            if process.returncode is None:
                process.kill()
            # Whoever still writes into the pipe must not be waited for.
            await process.communicate()


def _surroundings(path: Path, profile: Path) -> dict[str, str]:
    """The libraries and fonts that came with it, and a home that goes away again."""
    libraries = [str(path.parent / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
    fonts = profile / "fonts.conf"
    fonts.write_text(FONTS.format(fonts=path.parent / "fonts", cache=profile / "fonts"))
    return {
        "HOME": str(profile),
        "FONTCONFIG_FILE": str(fonts),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
    }


async def _address(process: asyncio.subprocess.Process) -> str:
    """Where the browser listens; it says so when it is up."""
    assert process.stderr is not None
    said = ""
    async with asyncio.timeout(WAIT_S):
        while line := await process.stderr.readline():
            said += line.decode(errors="replace")
            if found := re.search(r"DevTools listening on (ws://\S+)", said):
                return found[1]
    raise AssertionError(f"the browser did not start: {said}")
