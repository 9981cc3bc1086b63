"""A person reads the API at /docs and tries it, in a real browser: a key, a filter, a stream, an error, a WebSocket."""

from __future__ import annotations

from segue.accounts.hashes import issue_key
from segue.accounts.scopes import SCOPES
from tests.dashboard.browser import Page, browsing
from tests.support import fetch, serving

CREATE = "#post-v-responses"


async def unfold(page: Page, entry: str) -> None:
    """Open an entry; its form is drawn then."""
    await page.click(f"{entry} > summary")
    await page.until(f"document.querySelector('{entry} form')")


async def send(page: Page, entry: str, answered: str) -> None:
    """Send the form of an entry, and wait until its answer has these words."""
    await page.click(f"{entry} button[type=submit]")
    await page.until(
        f"document.querySelector('{entry} .answer').textContent.includes('{answered}')"
    )


async def test_person_reads_and_tries_the_api() -> None:
    async with serving(auth="keys") as served, browsing() as browser:
        head = await fetch(served, "GET", "/docs")
        assert head.status == 200
        policy = head.headers["content-security-policy"]
        assert "unsafe" not in policy
        assert "require-trusted-types-for 'script'" in policy

        page = await browser.page()
        await page.open(f"{served.url}/docs")
        await page.until("document.querySelectorAll('.operation').length > 20")

        # Without a key: the error of the server, in the server's words.
        await unfold(page, "#get-v-models")
        await send(page, "#get-v-models", "invalid_api_key")
        assert (await page.text("#get-v-models .status")).startswith("401 Unauthorized after")

        _, secret = await issue_key(
            served.app.state.store.keys, served.app.state.hashes, "page", "ada", SCOPES
        )
        await page.click("#key")
        await page.type(secret)
        await page.press("Enter", 13)
        # The page is drawn anew, with the same entry open, and knows the models.
        await page.until("document.querySelector('#get-v-models .status')?.textContent === ''")

        await page.click("#filter")
        await page.type("post responses")
        assert await page.read("document.querySelectorAll('.operation:not([hidden])').length") == 4
        await unfold(page, CREATE)
        body = await page.read(f"document.querySelector('{CREATE} textarea').value")
        assert '"model": "scripted"' in body
        await send(page, CREATE, "response.completed")
        await page.click(f"{CREATE} button.quiet")
        assert "$SEGUE_KEY" in await page.text(f"{CREATE} .curl")
        assert secret not in await page.text(f"{CREATE} .curl")
        # Schemas open as deep as they go.
        await page.click(f"{CREATE} form > details > summary")
        await page.until(
            f"document.querySelector('{CREATE} .schema').textContent.includes('previous_response_id')"
        )

        await page.read("document.querySelector('#filter').value = ''")
        await page.read("document.querySelector('#filter').dispatchEvent(new Event('input'))")
        await unfold(page, "#socket-v-responses")
        await send(page, "#socket-v-responses", "response.completed")
        # Nothing came from elsewhere, and the one fault is the refusal above.
        assert {url.partition("://")[2].partition("/")[0] for url in page.fetched} == {
            f"127.0.0.1:{served.port}"
        }
        assert [one for one in page.faults if "401" not in one] == []
