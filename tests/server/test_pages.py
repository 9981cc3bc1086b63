"""What a server answers where no dashboard is installed."""

from __future__ import annotations

import pytest

from segue.server import app
from tests.support import fetch, serving


async def test_server_without_a_dashboard_answers_in_words(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "has_dashboard", lambda: False)
    async with serving() as served:
        welcome = await fetch(served, "GET", "/", headers={"accept": "text/html"})
        assert welcome.status == 200
        assert welcome.body.startswith(
            b"Segue serves scripted at /v1/responses, /v1/messages, /v1/chat/completions."
        )
        assert (await fetch(served, "GET", "/dashboard/keys")).status == 404
