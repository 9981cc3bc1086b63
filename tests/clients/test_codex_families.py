"""Codex on models of other families: a vLLM that speaks a family's own tokens, which its own template has written.

Everything but the model is real: Codex from its package, the server, its dialect for the family's tokenizer and
template. The bug gets fixed in five turns, each of which stands on the one before, and every prompt begins with the
last prompt and what was sampled after it, so that the prefix cache of the engine holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest

from tests.clients.agents import AGENTS, MODEL
from tests.clients.stage import staged
from tests.clients.task import END, NEW, PROMPT, TEST_COMMAND
from tests.engines.fakes.vllm import FakeVllm
from tests.models.families import BY_NAME, model_folder
from tests.models.talk import Model

CODEX = AGENTS["Codex CLI"]
QUICK = ("Qwen3.5",)
OTHERS = ("Qwen3-Coder", "GLM-4.6", "gpt-oss", "DeepSeek V3.1", "Kimi K2 Thinking", "MiniMax M2")
COMMANDS = ("ls -la", "cat money.py", f"sed -i 's/prices.1:./{NEW}/' money.py", TEST_COMMAND)
COMMAND = {"cmd": {"type": "string", "description": "A command."}}
TOOL = {
    "type": "function",
    "function": {
        "name": "exec_command",
        "description": "Runs a command.",
        "parameters": {"type": "object", "properties": COMMAND, "required": ["cmd"]},
    },
}


class Speaker:
    """Says the turns of the task, in the words that the family's template has for them."""

    def __init__(self, model: Model) -> None:
        self._judge = model.judge
        self.turns: list[list[int]] = []
        chat: list[dict[str, Any]] = [{"role": "user", "content": PROMPT}]
        for number, command in enumerate(COMMANDS):
            call = {
                "id": f"abcdefg{number:02}",
                "name": "exec_command",
                "arguments": {"cmd": command},
            }
            output = {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": "exec_command",
                "content": "1",
            }
            self._say(chat, self._judge.answer("", f"Step {number}.", [call]), output)
        self._say(chat, self._judge.answer(END, "Done."), {"role": "user", "content": "Thanks."})

    def _say(
        self, chat: list[dict[str, Any]], answer: dict[str, Any], then: dict[str, Any]
    ) -> None:
        self.turns.append(self._judge.ids(self._judge.sampled(chat, answer, [then], [TOOL])))
        chat += [answer, then]

    def answer(self, prompt: Sequence[int]) -> Sequence[int]:
        """The turn after those whose commands stand in the prompt."""
        said = self._judge.shown(prompt).partition(PROMPT)[2]
        return self.turns[sum(command in said for command in COMMANDS)]


@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(one, marks=pytest.mark.clients) for one in OTHERS)]
)
async def test_codex_fixes_the_bug_on(name: str, tmp_path: Path) -> None:
    speaker = Speaker(Model(BY_NAME[name]))
    flags = ("--engine", "vllm", "--tokenizer", str(model_folder(name)))
    async with (
        FakeVllm(model=MODEL, answer=speaker.answer) as engine,
        staged(tmp_path, *flags, "--engine-url", engine.url) as stage,
    ):
        ran = await stage.play(CODEX)
        assert ran.code == 0, ran.said[-3000:]
        assert END in ran.out
        assert stage.is_fixed
        frames = [frame for _, frame in stage.proxy.frames]
        assert frames[0]["generate"] is False
        assert len(frames) == 1 + len(speaker.turns)
        assert all(frame["previous_response_id"] for frame in frames[1:])
        check_prefixes(engine, speaker)


def check_prefixes(engine: FakeVllm, speaker: Speaker) -> None:
    """Each prompt begins with the one before it and what was sampled after that."""
    prompts = [cast("list[int]", body["prompt"]) for body in engine.requests if "prompt" in body]
    prompts = prompts[-len(speaker.turns) :]
    for number, (before, after) in enumerate(pairwise(prompts)):
        known = [*before, *speaker.turns[number]]
        assert after[: len(known)] == known, (
            f"turn {number + 2} is not what turn {number + 1} was and said"
        )
    assert engine.cached(prompts[-1]) > 0.5 * len(prompts[-1])
