"""Which models does an engine list, and which one is served where the operator names none?"""

from __future__ import annotations

from pathlib import Path

import pytest

from segue.errors import Misconfigured
from segue.server.names import is_listed
from segue.server.operator import still_named
from segue.server.served import served_models
from segue.settings.checks import load_settings
from segue.settings.values import Settings
from segue_cli.commands.engine_name import with_engine_name
from tests.engines.fakes.chat import FakeChat
from tests.engines.fakes.thread import remote
from tests.support import fetch, served_process, serving, until


def in_front_of(*urls: str, **flags: object) -> Settings:
    return load_settings({"engine": "chat", "engine_url": urls, **flags}, environment={})


@pytest.mark.parametrize(
    "engine",
    [
        {"names": ("qwen3:8b",)},
        {"names": ("qwen3:8b", "text-embedding-nomic-embed-text-v1.5")},
        {"names": ("qwen3:8b",), "adapters": ("sql", "poems")},
        {"names": ("qwen3:8b",), "key": "secret"},
    ],
)
async def test_only_model_of_an_engine_is_served_where_none_is_named(
    engine: dict[str, object],
) -> None:
    async with FakeChat(**engine) as fake:  # type: ignore[arg-type]
        settings = await with_engine_name(in_front_of(fake.url, engine_key="secret"))
        assert [one.name for one in served_models(settings)] == ["qwen3:8b"]
        named = in_front_of(fake.url, model=["other"])
        assert await with_engine_name(named) is named


async def test_several_models_are_listed_and_one_must_be_named() -> None:
    names = tuple(f"m{n}" for n in range(12))
    async with FakeChat(names=names) as many, FakeChat(names=("m3", "x")) as other:
        with pytest.raises(Misconfigured, match=r"--model m0\. There are: m0, .*, m7 and 4 more"):
            await with_engine_name(in_front_of(many.url))
        both = await with_engine_name(in_front_of(many.url, other.url, "http://127.0.0.1:9"))
        assert both.model == ("m3",), "what all replicas have that answer"
    async with FakeChat() as one, FakeChat(names=("x",)) as two:
        with pytest.raises(Misconfigured, match="There are: gpt, x"):
            await with_engine_name(in_front_of(one.url, two.url))


async def test_engine_that_does_not_say_what_it_has_is_asked_again() -> None:
    async with FakeChat(key="secret") as closed:
        refused = in_front_of(closed.url)
        assert await with_engine_name(refused) is refused, "with another key it may answer"
    async with FakeChat(names=()) as silent:
        with pytest.raises(Misconfigured, match="does not list its models"):
            await with_engine_name(in_front_of(silent.url))
        nameless = in_front_of(silent.url, engine="llamacpp")
        assert await with_engine_name(nameless) is nameless, (
            "it has one model, whatever it is called"
        )


async def test_engine_whose_only_model_is_for_embeddings_has_that_name() -> None:
    async with FakeChat(names=("embed-qwen",)) as fake:
        assert (await with_engine_name(in_front_of(fake.url))).model == ("embed-qwen",)


@pytest.mark.parametrize("is_elsewhere", [True, False])
def test_model_keeps_its_name_while_its_engine_is_away(is_elsewhere: bool) -> None:
    served = in_front_of("http://127.0.0.1:9", model=["qwen3:8b"])
    read = in_front_of("http://127.0.0.1:10" if is_elsewhere else "http://127.0.0.1:9")
    assert still_named(read, served).model == (() if is_elsewhere else ("qwen3:8b",))


@pytest.mark.parametrize(
    "name, listed",
    [
        ("tiny", "tiny:latest"),
        ("tiny:latest", "tiny"),
        ("gemini-3-flash", "models/gemini-3-flash"),
        ("openai/gpt-5", "openai/*"),
    ],
)
def test_engine_takes_other_spellings_of_a_name(name: str, listed: str) -> None:
    assert is_listed(name, ["other", listed])
    assert not is_listed(f"{name}-mini:8b", ["other", listed.replace("*", "gpt-5")])


async def test_client_and_log_learn_which_model_the_engine_does_not_know(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with FakeChat(names=("qwen3:8b",), is_strict=True) as engine:
        flags = {"engine": "chat", "engine_url": [engine.url], "model": ["wrongname"]}
        async with serving(**flags) as served:
            body = {"model": "wrongname", "input": "x"}
            answer = await fetch(served, "POST", "/v1/responses", body)
    error = answer.json["error"]
    assert "does not know the model 'wrongname'" in error["message"]
    assert "It lists: qwen3:8b." in error["message"]
    assert engine.url not in error["message"], "where engines are is not for clients"
    assert f"engine {engine.url} does not know the model 'wrongname'" in caplog.text


def test_person_starts_in_front_of_an_engine_without_naming_its_model(tmp_path: Path) -> None:
    with remote(FakeChat) as engine:
        flags = ("--engine", "chat", "--engine-url", engine.url, "--store", "memory")
        with served_process(*flags, cwd=tmp_path) as served:
            assert "serves gpt at" in "".join(served.printed)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_engine_that_comes_up_later_names_its_model(tmp_path: Path, workers: str) -> None:
    engine = FakeChat()
    await engine.start()
    await engine.stop()
    flags = ("--engine", "chat", "--engine-url", engine.url, "--workers", workers)
    with served_process(*flags, cwd=tmp_path) as served:
        await until(lambda: any("WARNING: no model is named" in line for line in served.printed))
        await engine.start()

        async def is_named() -> bool:
            listed = (await fetch(served, "GET", "/v1/models")).json["data"]
            return [model["id"] for model in listed] == ["gpt"]

        await until(is_named)
        await engine.stop()


async def test_engine_that_comes_up_later_with_another_model_is_warned_of(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = FakeChat()
    await engine.start()
    await engine.stop()
    flags = {"engine": "chat", "engine_url": [engine.url], "model": ["wrongname"]}
    async with serving(**flags) as served:
        await engine.start()
        served.app.health.renew()
        for _ in range(2):
            await fetch(served, "GET", "/ready")
            served.app.health.renew()
        await engine.stop()
    assert caplog.text.count("does not list the model 'wrongname'. It lists: gpt.") == 1
