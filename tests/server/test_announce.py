"""The first lines of a server: where it is, what answers, what is needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from segue.server.announce import announce, count, start_lines
from segue.server.apis import APIS
from segue.server.app import open_app
from segue.settings.checks import load_settings
from segue_embedded.weights import find_weights
from tests.engines.fakes.chat import FakeChat
from tests.engines.fakes.vllm import FakeVllm


async def lines_of(**flags: object) -> list[str]:
    settings = load_settings({"store": "memory", **flags}, environment={})
    async with open_app(settings) as app:
        return start_lines(app, settings)


async def test_engine_that_answers_is_told_with_its_context_and_slots() -> None:
    async with FakeChat() as engine:
        flags = {"engine": "chat", "engine_url": [engine.url], "model": ["gpt"]}
        lines = await lines_of(**flags, context_tokens="9000", engine_parallel="1")
        assert lines == [
            f"  model      gpt: chat engine at {engine.url}, context 9,000 tokens, 1 slot",
            "  API keys   not needed until the first one is created (in the dashboard)",
        ]
        url = engine.url
    lines = await lines_of(**(flags | {"auth": "off"}))
    assert lines[0] == f"  model      gpt: chat engine at {url}, no answer"
    assert lines[1] == "  API keys   not needed (--auth off)"
    assert lines[2].startswith(f"WARNING: no engine answers at {url}. Requests fail with 503")
    assert len(lines) == 3


async def test_name_that_the_engine_does_not_list_is_warned_of(tmp_path: Path) -> None:
    async with FakeChat(names=("qwen3:8b", "tiny:latest")) as engine, FakeChat() as other:
        flags: dict[str, object] = {"engine": "chat", "engine_url": [engine.url]}
        (warning,) = await warnings_of(**flags, model=["wrongname"])
        assert f"the engine at {engine.url} does not list the model 'wrongname'" in warning
        assert "It lists: qwen3:8b, tiny:latest." in warning
        for name in ("qwen3:8b", "tiny", "tiny:latest"):
            assert await warnings_of(**flags, model=[name]) == []
        flags["engine_url"] = [engine.url, other.url]
        (warning,) = await warnings_of(**flags, model=["gpt"])
        assert engine.url in warning
        assert other.url not in warning
        file = tmp_path / "segue.toml"
        file.write_text(
            f"""engine = "chat"
            models = [
                {{name = "tiny", aliases = ["small"], engine_url = ["{engine.url}"]}},
                {{name = "large", engine_url = ["{other.url}"]}},
            ]"""
        )
        (warning,) = await warnings_of(config=str(file))
        assert f"the engine at {other.url} does not list the model 'large'" in warning


async def test_llama_server_takes_any_name() -> None:
    async with FakeChat(owned_by="llamacpp") as engine:
        flags: dict[str, object] = {"engine": "chat", "engine_url": [engine.url]}
        assert await warnings_of(**flags, model=["whatever"]) == []


async def warnings_of(**flags: object) -> list[str]:
    return [line for line in await lines_of(**flags) if line.startswith("WARNING: ")]


@pytest.mark.parametrize("is_scaled_out", [False, True])
async def test_vllm_without_its_endpoint_for_ids_is_named_once(is_scaled_out: bool) -> None:
    async with (
        FakeVllm(model="m", is_scaled_out=is_scaled_out) as one,
        FakeVllm(model="m", is_scaled_out=True) as other,
    ):
        flags = {"engine": "vllm", "model": ["m"], "tokenizer": str(find_weights("smollm2"))}
        lines = await lines_of(**flags, engine_url=[other.url, one.url])
    advice = [line for line in lines if line.startswith("  advice     start vLLM ")]
    assert len(advice) == (0 if is_scaled_out else 1)
    assert all("--enable-scale-out" in line for line in advice)


async def test_scripted_engine_is_told_to_be_no_model() -> None:
    lines = await lines_of(engine="scripted", auth="keys")
    assert "is not a model" in lines[0]
    assert lines[1:] == ["  API keys   needed"]


def test_place_store_and_settings_file_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    store = "postgresql://me:secret@db/segue"
    flags = {"engine": "scripted", "store": store, "workers": "2"}
    announce(load_settings(flags, environment={}), "http://127.0.0.1:1", ["  more"])
    first, *rest = capsys.readouterr().out.splitlines()
    assert first.endswith("serves scripted at http://127.0.0.1:1/v1 with 2 workers")
    assert rest == [
        "  dashboard  http://127.0.0.1:1/",
        f"  APIs       {', '.join(APIS)}",
        "  store      postgresql://me:…@db/segue",
        "  settings   no file",
        "  more",
        "Stop with Ctrl-C.",
    ]


@pytest.mark.parametrize(
    "flags, words",
    [
        ({"environment": "auto"}, "bwrap: isolation kernel-shared, no network"),
        (
            {"environment": "gvisor", "environment_domains": ["a.com", "*.b.org"]},
            "gvisor: isolation user-kernel, network to a.com, *.b.org",
        ),
    ],
)
def test_sandboxes_are_told_with_their_level(
    flags: dict[str, object], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = load_settings({"engine": "scripted", "store": "memory", **flags}, environment={})
    announce(settings, "http://127.0.0.1:1", [])
    assert f"  sandboxes  {words}\n" in capsys.readouterr().out


def test_numbers_have_the_right_noun() -> None:
    assert [count(number, "turn") for number in (0, 1, 2)] == ["no turns", "1 turn", "2 turns"]
