"""Which models are served: the named ones, or one by default; and with what where nothing is set."""

from __future__ import annotations

from typing import Any

from segue.server.served import served_models
from segue.settings.checks import load_settings
from segue.settings.values import Settings


def load(flags: dict[str, Any] | None = None, **environment: str) -> Settings:
    return load_settings(flags or {}, environment)


def test_without_any_model_there_is_one() -> None:
    assert [model.name for model in served_models(load())] == ["smollm2"]
    assert [model.name for model in served_models(load(SEGUE_ENGINE="scripted"))] == ["scripted"]


def test_small_models_usual_sampling_gives_way_to_what_the_operator_says() -> None:
    usual = served_models(load())[0]
    said = served_models(load({"temperature": "1", "output_tokens_max": "50"}))[0]
    named = served_models(load({"model": ["smollm2"]}))[0]
    assert (usual.temperature, usual.output_tokens_max) == (0.2, 1_024)
    assert (said.temperature, said.top_p, said.output_tokens_max) == (1, 0.9, 50)
    assert named == usual


def test_model_inside_takes_one_slot_and_known_models_their_authors_sampling() -> None:
    coder, own = served_models(load({"model": ("qwen2.5-coder-1.5b", "own.gguf")}))
    assert (coder.engine_parallel, coder.temperature, coder.top_p) == (1, 0.7, 0.8)
    assert (own.engine_parallel, own.temperature, own.dialect) == (1, None, "auto")
    assert served_models(load({"engine_parallel": "3"}))[0].engine_parallel == 3
