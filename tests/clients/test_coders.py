"""Real agents on Messages and Chat Completions, through good and bad times."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.clients.coders import CODER_STORIES, CODERS, end_leftovers
from tests.clients.stage import scripted, staged
from tests.clients.stories import SILENT_S, STORIES
from tests.clients.task import END

pytestmark = pytest.mark.clients

Record = Callable[[str, object], None]
TOO_LONG = r"prompt is too long: \d+ tokens > \d+ maximum"
EXCEEDS = r"Your input exceeds\s+the context\s+window"
# Where a client gives up: its exit status, what it says, and why that is right.
ENDS: dict[str, dict[str, tuple[int, str, str]]] = {
    "drop in mid-response": {
        "Cline, Chat": (1, "JSON Parse error", "does not repeat a request"),
        "LangChain, Messages": (1, "peer closed connection", "does not repeat a request"),
        "LangChain, Chat": (1, "Connection error", "does not repeat a request"),
    },
    "engine error": {
        "opencode, Messages": (1, "The engine broke off", "shows the message"),
        "pi, Messages": (1, "The engine broke off", "shows the message"),
        "pi, Chat": (1, "The engine broke off", "shows the message"),
        "Continue, Messages": (1, "The engine broke off", "shows the message"),
        "Cline, Chat": (1, "The engine broke off", "shows the message"),
        "LangChain, Messages": (1, "The engine broke off", "shows the message"),
        "LangChain, Chat": (1, "The engine broke off", "shows the message"),
    },
    "context overflow": {
        # The scripted engine writes no summary; test_claude_code.py has the story with an engine that does.
        "Claude Code": (
            1,
            "Prompt is too long",
            "asks for a summary, which a script does not write",
        ),
        "Claude Code, threads": (
            1,
            "Prompt is too long",
            "asks for a summary, which a script does not write",
        ),
        "Anthropic Python": (1, TOO_LONG, "shows the message"),
        "opencode, Messages": (1, "OK", "compacts, does the work, exits with 1"),
        "opencode, Chat": (1, "OK", "compacts, does the work, exits with 1"),
        "pi, Messages": (0, r"\A\Z", "without a word"),
        "pi, Chat": (0, r"\A\Z", "without a word"),
        "Qwen Code, Messages": (
            1,
            "assistant message prefill",
            "asks to go on with half an answer",
        ),
        "Continue, Messages": (1, TOO_LONG, "shows the message"),
        "Continue, Chat": (1, EXCEEDS, "shows the message"),
        "aider, Messages": (0, "token-limits", "its own message"),
        "aider, Chat": (0, EXCEEDS, "shows the message"),
        "Cline, Chat": (1, EXCEEDS, "shows the message"),
        "LangChain, Messages": (1, TOO_LONG, "`AnthropicContextOverflowError`"),
        "LangChain, Chat": (1, EXCEEDS, "shows the message"),
        "Pydantic AI, Messages": (1, TOO_LONG, "`ModelContextWindowExceededError`"),
        "Pydantic AI, Chat": (1, EXCEEDS, "`ModelContextWindowExceededError`"),
        "LiteLLM": (1, EXCEEDS, "shows the message"),
        "smolagents": (1, EXCEEDS, "shows the message"),
        "mini-swe-agent": (1, EXCEEDS, "shows the message"),
    },
}


@pytest.fixture(autouse=True)
def tidy(tmp_path: Path) -> Iterator[None]:
    yield
    end_leftovers(tmp_path / "repository")


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


@pytest.mark.parametrize("name", CODERS)
@pytest.mark.parametrize("story", CODER_STORIES[1:])
async def test_coder_recovers_or_ends_with_words_that_it_understands(
    story: str, name: str, tmp_path: Path, record_property: Record
) -> None:
    coder = CODERS[name]
    code, words, why = ENDS.get(story, {}).get(name, (0, "", ""))
    text = f"ends: {why}" if words else "goes on" if story == "long silence" else "recovers"
    record_property("coder", (name, story, text))
    told = await STORIES[story](coder, tmp_path)
    if words:
        assert told.ran.code == code, told.ran.said[-3000:]
        assert re.search(words, told.ran.said, re.DOTALL), told.ran.said[-3000:]
    else:
        assert told.is_recovered, told.ran.said[-3000:]
    posts = [line for line in told.proxy.requests if line.startswith(f"POST {coder.path}")]
    if story == "context overflow":
        assert len(posts) > told.proxy.created, "a request was refused"
    if story == "long silence":
        assert told.ran.seconds > SILENT_S
        assert len(posts) == told.proxy.created, "nothing was sent twice"
