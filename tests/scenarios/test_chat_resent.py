"""Clients of Chat Completions resend everything, each in a spelling of its own: a turn costs what is new in it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chat import BASH, ask, chunks_of, joined, script
from tests.support import metric, serving

TURNS = 5
Message = dict[str, Any]


def respelt(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as JavaScript writes them."""
    function = call["function"]
    arguments = json.dumps(json.loads(function["arguments"]), separators=(",", ":"))
    return {**call, "function": {**function, "arguments": arguments}}


def only(*names: str) -> Callable[[Message], Message]:
    return lambda message: {name: message[name] for name in names if name in message}


# How clients send an answer back, by what they are.
SPELLINGS: dict[str, Callable[[Message], Message]] = {
    "as it came": lambda message: message,
    "opencode, cline, qwen-code": lambda message: {
        **only("role", "content", "reasoning_content")(message),
        "tool_calls": [respelt(call) for call in message["tool_calls"]],
    },
    "Continue": lambda message: {
        **only("role", "content")(message),
        "tool_calls": [respelt(call) for call in message["tool_calls"]],
    },
    "LangChain": only("content", "role", "tool_calls"),
    "LiteLLM": lambda message: {
        **only("content", "role", "tool_calls", "reasoning_content")(message),
        "provider_specific_fields": {"refusal": None},
    },
    "with the key of vLLM": lambda message: {
        **only("role", "content", "tool_calls")(message),
        "reasoning": message["reasoning_content"],
    },
    "with details": lambda message: {
        **only("role", "content", "tool_calls")(message),
        "reasoning_details": [{"type": "reasoning.text", "text": message["reasoning_content"]}],
    },
    "with blocks": lambda message: {
        **only("role", "content", "tool_calls")(message),
        "thinking_blocks": [{"type": "thinking", "thinking": message["reasoning_content"]}],
    },
    "with parts": lambda message: {
        **message,
        "content": [{"type": "text", "text": message["content"], "cache_control": {}}],
    },
}


@pytest.mark.parametrize("spelling", SPELLINGS)
async def test_turn_costs_what_is_new_in_it(tmp_path: Path, spelling: str) -> None:
    call = {"name": "bash", "arguments": {"command": "make test", "timeout": 10}}
    turns = [
        {"reasoning": f"Thinking {turn}.", "text": f"Step {turn}.", "calls": [call, call]}
        for turn in range(TURNS)
    ]
    messages: list[Message] = [
        {"role": "system", "content": "Be careful. " * 50},
        {"role": "user", "content": "Please mend the tests. " * 50},
    ]
    async with serving(script=script(tmp_path, *turns)) as served:
        tokenized = validated = before = 0.0
        for turn in range(TURNS):
            usage = {"stream_options": {"include_usage": True}}
            answer = await ask(served, messages, tools=[BASH], stream=True, **usage)
            chunks = chunks_of(answer.body)
            said = joined(chunks)["message"]
            counted = chunks[-1]["usage"]
            counts = (
                await metric(served, "segue_tokens_tokenized_total"),
                await metric(served, "segue_items_validated_total"),
            )
            if turn:
                assert counts[0] - tokenized <= counted["prompt_tokens"] - before
                # The thought, the text, two calls and two results.
                assert counts[1] - validated <= 6
            tokenized, validated = counts
            before = counted["prompt_tokens"] + counted["completion_tokens"]
            messages = [*messages, SPELLINGS[spelling](said)]
            messages += [
                {"role": "tool", "tool_call_id": call["id"], "content": "All 12 tests pass."}
                for call in said["tool_calls"]
            ]
        assert await metric(served, "segue_tool_decodes_total") == 1
