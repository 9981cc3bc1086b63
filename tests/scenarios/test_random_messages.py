"""Whatever a model writes, the events of the Messages API have one legal order, and say what the object says.

Random turns of a scripted model (thoughts, texts, calls, in any number and of any characters), asked for with random
limits, stop sequences and displays of thoughts, go through the machine of `tests/message_events.py`.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from tests.message_events import BASH, HELLO, both
from tests.support import serving

SEED, TURNS = 1, 60
PIECES = ("Well", " ", "\n\n", "né", "中文", "😀", '"', "\\", "{", "<", "the end", "stop", "\u2028")


def words(source: random.Random) -> str:
    return "".join(source.choice(PIECES) for _ in range(source.randrange(12)))


def turn(source: random.Random) -> dict[str, Any]:
    """What the model writes; it writes something."""
    calls = [
        {"name": "bash", "arguments": {"command": words(source), "n": source.randrange(9)}}
        for _ in range(source.choice((0, 0, 1, 2, 3)))
    ]
    thought = words(source).strip() if source.random() < 0.5 else ""
    return {"reasoning": thought, "text": words(source) or "So.", "calls": calls}


def fields(source: random.Random) -> dict[str, Any]:
    """What the client asks for beside."""
    asked: dict[str, Any] = {"tools": [BASH]}
    if source.random() < 0.3:
        asked["max_tokens"] = source.randrange(1, 30)
    if source.random() < 0.3:
        asked["stop_sequences"] = source.sample(["stop", "the end", "中文", "never"], 2)
    if source.random() < 0.5:
        display = source.choice(("omitted", "summarized"))
        asked["thinking"] = {"type": "adaptive", "display": display}
    return asked


async def test_random_turns_have_events_in_order_that_say_what_the_object_says(
    tmp_path: Path,
) -> None:
    source = random.Random(SEED)
    script = tmp_path / "script.json"
    script.write_text(json.dumps({"turns": [turn(source) for _ in range(TURNS)]}))
    reasons = set()
    async with serving(script=str(script)) as served:
        for number in range(TURNS):
            # The entry of the script that answers is that of the number of answers before.
            before = [*HELLO, {"role": "assistant", "content": "Yes?"}] * number
            message = await both(served, [*before, *HELLO], **fields(source))
            reasons.add(message["stop_reason"])
    assert reasons == {"end_turn", "tool_use", "max_tokens", "stop_sequence"}
