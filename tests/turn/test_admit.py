"""Admission: the model, its usual sampling, and the first snapshot."""

from __future__ import annotations

import pytest

from tests.support import MODEL, fetch, serving


@pytest.mark.parametrize("said", [{}, {"temperature": None, "top_p": None, "top_logprobs": None}])
async def test_where_a_client_says_nothing_the_models_usual_sampling_holds(said: object) -> None:
    assert isinstance(said, dict)
    async with serving(temperature=0.3, top_p=0.9) as served:
        body = {"model": MODEL, "input": "Hello.", "store": False, **said}
        usual = (await fetch(served, "POST", "/v1/responses", body)).json
        bold = (await fetch(served, "POST", "/v1/responses", {**body, "temperature": 0})).json
    assert (usual["temperature"], usual["top_p"], usual["top_logprobs"]) == (0.3, 0.9, 0)
    assert (usual["presence_penalty"], usual["frequency_penalty"]) == (0, 0)
    assert (bold["temperature"], bold["top_p"]) == (0, 0.9)


async def test_longest_answer_of_a_model_is_said_to_be_incomplete() -> None:
    async with serving(output_tokens_max=5) as served:
        body = {"model": MODEL, "input": "Hello.", "store": False}
        cut = (await fetch(served, "POST", "/v1/responses", body)).json
        longer = {**body, "max_output_tokens": 100}
        whole = (await fetch(served, "POST", "/v1/responses", longer)).json
    assert (cut["status"], cut["usage"]["output_tokens"]) == ("incomplete", 5)
    assert whole["status"] == "completed"
