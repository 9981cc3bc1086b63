"""Real agents on Messages and Chat Completions, through good and bad times."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.clients.coders import CODERS
from tests.clients.stage import scripted, staged
from tests.clients.task import END

pytestmark = pytest.mark.clients

Record = Callable[[str, object], None]


@pytest.mark.parametrize("name", CODERS)
async def test_coder_fixes_the_bug(name: str, tmp_path: Path, record_property: Record) -> None:
    """The repository's tests really pass, and the history that came back was known."""
    record_property("coder", (name, "fixes the bug", "yes"))
    coder = CODERS[name]
    turns = coder.turns()
    async with staged(tmp_path, *scripted(tmp_path, turns)) as stage:
        ran = await stage.play(coder)
        assert ran.code == 0, ran.said[-3000:]
        assert END in ran.out or len(turns) == 1
        assert stage.is_fixed, ran.said[-3000:]
        posts = [line for line in stage.proxy.requests if line.startswith(f"POST {coder.path}")]
        assert len(posts) >= len(turns)
        if len(turns) > 1:
            tokenized = await stage.count("tokens_tokenized_total")
            assert await stage.count("tokens_reused_total") > 2 * tokenized, (
                "history was made again"
            )
