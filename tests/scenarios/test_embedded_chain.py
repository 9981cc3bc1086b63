"""A chain of 20 turns on the embedded engine, through the command itself: what is new is all that is worked on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from segue.vocabularies.load import vocabulary_from_gguf
from segue.vocabularies.vocabulary import Vocabulary
from segue_embedded.weights import find_weights
from tests.support import ServedProcess, Wire, metric, served_process, wire

pytestmark = pytest.mark.xdist_group("embedded")

MODEL = "smollm2"
TURNS = 20
CALLS = 8
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"enum": ["Oslo", "Lima", "Cairo"]},
            "note": {"type": "string", "maxLength": 3},
        },
        "required": ["city", "note"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    with served_process(
        *("--engine", "embedded", "--context-tokens", "2048", "--engine-parallel", "1"),
        *("--store", "memory"),
        cwd=tmp_path_factory.mktemp("embedded"),
    ) as process:
        yield process


@pytest.fixture(scope="module")
def words() -> Vocabulary:
    path = find_weights("smollm2")
    return vocabulary_from_gguf(path)


def block_tokens(words: Vocabulary, content: str) -> int:
    """What one block of the user is in ChatML: a start, its role and content, an end, a newline."""
    return 1 + len(words.encode(f"user\n{content}")) + 1 + len(words.encode("\n"))


class Chain:
    """One conversation over one socket, each turn checked against what it may cost."""

    def __init__(self, served: ServedProcess, socket: Wire) -> None:
        self._served = served
        self._socket = socket
        self._last: str | None = None
        # How many tokens the engine has seen so far, the last answer included.
        self._known = 0
        self._counted = 0.0
        self.tokenized = 0

    async def turn(self, **fields: Any) -> dict[str, Any]:
        if self._last is None:
            self._counted = await metric(self._served, "segue_tokens_tokenized_total")
        end = await self._socket.turn(
            model=MODEL, previous_response_id=self._last, store=False, **fields
        )
        assert end["type"] in ("response.completed", "response.incomplete"), end
        response = end["response"]
        usage = response["usage"]
        if self._last is not None:
            # The last token that was sampled is not computed before it is needed.
            cached = usage["input_tokens_details"]["cached_tokens"]
            assert self._known - 1 <= cached <= self._known
        counted = await metric(self._served, "segue_tokens_tokenized_total")
        self.tokenized, self._counted = int(counted - self._counted), counted
        self._last, self._known = response["id"], usage["total_tokens"]
        return response


async def test_client_chains_twenty_turns_and_only_new_items_are_tokenized(
    served: ServedProcess, words: Vocabulary
) -> None:
    """Turn by turn the tokens that we make are those of the new block, and the engine computes no old one again."""
    async with wire(served) as socket:
        chain = Chain(served, socket)
        for number in range(TURNS):
            text = f"What comes after {number}?" + " Say why." * (number % 3)
            await chain.turn(input=text, max_output_tokens=4)
            if number:
                assert chain.tokenized == block_tokens(words, text)
            else:
                assert chain.tokenized >= block_tokens(words, text)


async def test_client_demands_a_call_in_each_turn_and_gets_it(
    served: ServedProcess, words: Vocabulary
) -> None:
    """A tool loop at temperature 1: every call satisfies its schema, and an output costs its own tokens only."""
    async with wire(served) as socket:
        chain = Chain(served, socket)
        given: object = "How is the weather?"
        for number in range(CALLS):
            response = await chain.turn(
                input=given, tools=[TOOL], tool_choice="required", max_output_tokens=60
            )
            assert response["status"] == "completed", response["incomplete_details"]
            calls = [one for one in response["output"] if one["type"] == "function_call"]
            assert [call["name"] for call in calls] == ["look"], response["output"]
            jsonschema.validate(json.loads(calls[0]["arguments"]), TOOL["parameters"])
            if number:
                told = f"<tool_response>\n{number}\n</tool_response>"
                assert chain.tokenized == block_tokens(words, told)
            output = {"type": "function_call_output", "output": f"{number + 1}"}
            given = [{**output, "call_id": calls[0]["call_id"]}]
