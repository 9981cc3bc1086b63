"""Is every engine of the settings built, and is an unknown one refused in words?"""

from __future__ import annotations

from pathlib import Path
from typing import cast, get_args

import msgspec
import pytest

from segue.errors import Misconfigured
from segue.server.models import BUILDERS, SCRIPTED_VOCABULARY, build_models, shared_engines
from segue.server.served import served_models
from segue.settings.checks import load_settings
from segue.settings.values import EngineName
from segue.vocabularies.gguf import read_gguf
from segue_embedded.shared import note_context, share_path
from segue_embedded.weights import find_weights
from tests.engines.fakes.vllm import FakeVllm

TOKENS_OVER_HTTP = ("llamacpp", "vllm", "sglang")


def test_every_engine_of_the_settings_has_a_builder() -> None:
    assert set(BUILDERS) == set(get_args(EngineName))


def test_scripted_engine_has_the_vocabulary_of_smollm2_without_its_weights() -> None:
    assert read_gguf(Path(SCRIPTED_VOCABULARY)) == read_gguf(find_weights("smollm2"))


def test_every_engine_is_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines" / "README.md").read_text()
    assert [name for name in BUILDERS if f"`{name}`" not in page] == []


def test_unknown_engine_is_refused_and_the_choices_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that was added to the settings and forgotten here does not become another engine."""
    settings = load_settings({"engine": "scripted", "store": "memory"}, environment={})
    (model,) = served_models(settings)
    unknown = msgspec.structs.replace(model, engine=cast(EngineName, "tpu"))
    monkeypatch.setattr(type(settings), "named_models", lambda self: (unknown,))
    with pytest.raises(Misconfigured, match="'tpu' is not one of: embedded, scripted, llamacpp"):
        build_models(settings)


@pytest.mark.parametrize("engine", [*TOKENS_OVER_HTTP, "chat"])
def test_engine_over_http_needs_an_address(engine: str) -> None:
    settings = load_settings({"engine": engine, "store": "memory"}, environment={})
    with pytest.raises(Misconfigured, match=f"engine_url: engine '{engine}' needs"):
        build_models(settings)


@pytest.mark.parametrize("engine", TOKENS_OVER_HTTP)
def test_engine_of_token_ids_needs_a_tokenizer(engine: str) -> None:
    flags = {"engine": engine, "engine_url": ["http://127.0.0.1:1"], "store": "memory"}
    with pytest.raises(Misconfigured, match=f"tokenizer: engine '{engine}' takes token ids"):
        build_models(load_settings(flags, environment={}))


async def test_chat_needs_none_and_is_closed_at_the_end() -> None:
    async with FakeVllm() as fake:
        flags = {"engine": "chat", "engine_url": [fake.url], "model": ["x"], "store": "memory"}
        served = build_models(load_settings(flags, environment={}))
        assert list(served.models) == ["x"]
        assert served.bytes == 0
        await served.aclose()


def test_every_engine_has_a_test_file_of_its_own() -> None:
    tests = Path(__file__).parents[1]

    assert [name for name in BUILDERS if not list(tests.glob(f"*/test_{name}.py"))] == []


async def test_workers_and_engine_agree_on_the_context_whatever_memory_is_free_later(
    tmp_path: Path,
) -> None:
    settings = load_settings({"model": ["smollm2"], "store": "memory"}, environment={})
    noted = []
    for memory_of_before in (None, 2_048):
        if memory_of_before:
            note_context(share_path(str(tmp_path), "smollm2"), memory_of_before)
        async with shared_engines(settings, str(tmp_path)):
            workers = build_models(settings, str(tmp_path))
            noted.append(workers.models["smollm2"].context_tokens)
            await workers.aclose()
    assert noted[1] == 2_048 != noted[0]
