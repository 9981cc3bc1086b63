"""Does a model on a token engine see? The whole server in front of FAKE engines that check what arrives.

An agent asks for an image with a tool, as Codex does with `view_image`, and goes on after it: in a chain, in a fork,
and with the whole history sent again.
"""

from __future__ import annotations

import base64
import json
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest

from segue.dialects.choose import choose
from segue.seams.model import Dialect
from segue.vocabularies.load import load_vocabulary
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.items import Item
from tests.contracts.dialect import call, message
from tests.dialects import templates
from tests.engines.fakes.llama import MARKER, FakeLlama
from tests.engines.fakes.server import Body, Fake
from tests.engines.fakes.sglang import FakeSglang
from tests.engines.fakes.vllm import FakeVllm
from tests.models.families import model_folder
from tests.support import Served, fetch, metric, serving

PNG = [base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes([n]) * 3_000).decode() for n in range(2)]
URLS = [f"data:image/png;base64,{data}" for data in PNG]
TOOLS = [
    {
        "type": "function",
        "name": "view_image",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    }
]
FOLDER = "Qwen3.5"


@cache
def qwen() -> tuple[Vocabulary, Dialect]:
    vocabulary = load_vocabulary(model_folder(FOLDER))
    return vocabulary, choose(model_folder(FOLDER), vocabulary)


def saying(*items: Item) -> Callable[[Sequence[int]], Sequence[int]]:
    """An engine that says these items one after the other, whatever it is asked."""
    left = [qwen()[1].write([item]).tolist() for item in items]
    return lambda ids: left.pop(0)


def image_id() -> int:
    return qwen()[0].special("<|image_pad|>")


def vllm(answer: Any) -> Fake:
    return FakeVllm(answer, model="m", is_scaled_out=True, image_id=image_id(), block=1)


def sglang(answer: Any) -> Fake:
    return FakeSglang(answer, image_id=image_id(), block=1)


def llamacpp(answer: Any) -> Fake:
    return FakeLlama(answer, vocabulary=qwen()[0], block=1)


ENGINES: dict[str, Callable[[Any], Fake]] = {"vllm": vllm, "sglang": sglang, "llamacpp": llamacpp}


def jobs(fake: Fake) -> list[Body]:
    return [body for body in fake.requests if {"token_ids", "input_ids", "prompt"} & body.keys()]


def sent(body: Body) -> tuple[object, list[str]]:
    """The prompt of a job, and the base64 of its images."""
    if "token_ids" in body:
        parts: Any = body.get("content_parts", [])
        return body["token_ids"], [part["url"].partition(",")[2] for part in parts]
    if "input_ids" in body:
        urls: Any = body.get("image_data", [])
        return body["input_ids"], [url.partition(",")[2] for url in urls]
    prompt: Any = body["prompt"]
    if isinstance(prompt, list):
        return prompt, []
    return prompt["prompt_string"], prompt["multimodal_data"]


def as_text(prompt: Any) -> str:
    vocabulary = qwen()[0]
    names = sorted(vocabulary.specials)
    return prompt if isinstance(prompt, str) else templates.shown(vocabulary, prompt, names)


async def asked(served: Served, input: object, **fields: object) -> dict[str, Any]:
    body = {"model": "m", "input": input, "tools": TOOLS, **fields}
    answer = await fetch(served, "POST", "/v1/responses", body)
    assert answer.status == 200, answer.json
    assert answer.json["status"] == "completed", answer.json
    return dict(answer.json)


def viewed(response: dict[str, Any], url: str) -> dict[str, Any]:
    """What Codex's `view_image` returns."""
    (made,) = [item for item in response["output"] if item["type"] == "function_call"]
    output = [{"type": "input_image", "image_url": url, "detail": "high"}]
    return {"type": "function_call_output", "call_id": made["call_id"], "output": output}


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


@pytest.mark.parametrize("name", ENGINES)
async def test_image_in_a_tool_output_is_seen_and_stays_in_its_place(name: str) -> None:
    looks = call("view_image", '{"path": "a.png"}')
    cat, yes = message("assistant", "A cat."), message("assistant", "Yes.")
    fake = ENGINES[name](saying(looks, looks, cat, yes, cat))
    async with fake:
        flags = {"engine": name, "engine_url": (fake.url,), "model": ("m",)}
        async with serving(
            tokenizer=str(model_folder(FOLDER)), check_rendering=True, **flags
        ) as served:
            card = (await fetch(served, "GET", "/v1/models/m")).json
            assert card["input_modalities"] == ["text", "image"]

            first = await asked(served, [user("What is in a.png?")])
            second = await asked(served, [viewed(first, URLS[0])], previous_response_id=first["id"])
            output = viewed(second, URLS[0])["call_id"]
            text = {"type": "function_call_output", "call_id": output, "output": "The same."}
            third = await asked(served, [text], previous_response_id=second["id"])
            one, two, three = map(sent, jobs(fake))
            assert (one[1], two[1], three[1]) == ([], [PNG[0]], [PNG[0]])
            if name != "llamacpp":
                assert isinstance(two[0], list)
                assert isinstance(three[0], list)
                assert two[0].count(image_id()) == 1
                assert three[0].index(image_id()) == two[0].index(image_id())
                assert three[0][: len(two[0])] == two[0]
            else:
                assert isinstance(three[0], str)
                assert three[0].startswith(str(two[0]))
                assert three[0].count(MARKER) == 1
            # Counted as the engine does: an image is 66 tokens.
            assert third["usage"]["input_tokens"] > 66
            assert third["usage"]["input_tokens_details"]["cached_tokens"] > 66

            # A fork shows another image in the same place.
            fork = await asked(served, [viewed(first, URLS[1])], previous_response_id=first["id"])
            assert sent(jobs(fake)[-1]) == (two[0], [PNG[1]])
            assert fork["output"][-1]["content"][0]["text"] == "Yes."

            # The whole history again: the same text, the same image.
            whole = [user("What is in a.png?"), *first["output"], viewed(first, URLS[0])]
            await asked(served, whole)
            resent = sent(jobs(fake)[-1])
            assert (as_text(resent[0]), resent[1]) == (as_text(two[0]), two[1])


async def test_model_that_does_not_see_is_told_in_words_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """In `input_modalities`, in the metrics, and in one log line for the model."""
    fake = FakeVllm(saying(*[message("assistant", "No.")] * 2), model="m", is_scaled_out=True)
    folder = str(model_folder(FOLDER))
    async with (
        fake,
        serving(engine="vllm", engine_url=(fake.url,), model=("m",), tokenizer=folder) as served,
    ):
        assert (await fetch(served, "GET", "/v1/models/m")).json["input_modalities"] == ["text"]
        with caplog.at_level(logging.WARNING):
            for _ in range(2):
                content = [{"type": "input_image", "image_url": URLS[0]}]
                await asked(served, [{"role": "user", "content": content}])
            assert await metric(served, "segue_media_told_total") == 2
        lines = [
            one.getMessage() for one in caplog.records if "images or audio" in one.getMessage()
        ]
        assert len(lines) == 1
        assert "model 'm'" in lines[0]
        assert "content_parts" not in json.dumps(jobs(fake)[-1])


async def test_engine_that_starts_later_is_asked_before_an_image_is_lost() -> None:
    fake = vllm(saying(message("assistant", "A cat.")))
    await fake.start()
    await fake.stop()
    folder = str(model_folder(FOLDER))
    async with serving(
        engine="vllm", engine_url=(fake.url,), model=("m",), tokenizer=folder
    ) as served:
        await fake.start()
        content = [{"type": "input_image", "image_url": URLS[0]}]
        await asked(served, [{"role": "user", "content": content}])
        assert sent(jobs(fake)[-1])[1] == [PNG[0]]
    await fake.stop()
