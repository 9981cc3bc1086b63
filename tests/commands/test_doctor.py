"""The doctor finds what is wrong before a start, and says what to do."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
from pathlib import Path

import pytest

from segue.seams.model import EngineFacts
from segue.server.apis import APIS
from segue.server.models import SCRIPTED_VOCABULARY
from segue.settings.checks import load_settings
from segue.settings.values import ModelSettings
from segue.vocabularies.load import vocabulary_from_gguf
from segue_cli.cli import main
from segue_cli.commands import doctor
from segue_cli.commands.doctor import Check, check_files, compare, examine
from segue_embedded.weights import find_weights
from tests.engines.fakes.chat import FakeChat
from tests.engines.fakes.vllm import FakeVllm
from tests.support import serving


async def checks(**flags: object) -> dict[str, Check]:
    """What it says, by name."""
    given = {"engine": "scripted", "store": "memory", "port": 0} | flags
    settings = load_settings(given, environment={})
    return {check.name: check async for check in examine(settings)}


async def test_all_is_well(tmp_path: Path) -> None:
    found = await checks(store=f"sqlite:///{tmp_path / 'turns.db'}")
    assert [check.name for check in found.values() if not check.is_ok] == []
    names = {"segue", "port", "APIs", "store", "files", "model scripted", "engine scripted"}
    assert set(found) == names
    assert not (tmp_path / "turns.db").exists(), "a check makes nothing"


async def test_taken_port_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "ASK_S_MAX", 0.1)  # the other program says nothing
    with socket.create_server(("127.0.0.1", 0)) as other:
        found = (await checks(port=other.getsockname()[1]))["port"]
    assert not found.is_ok
    assert "another program" in found.found
    assert "--port" in found.advice


async def test_running_server_is_reported_instead_of_the_settings_of_the_command() -> None:
    """The command's own settings name another store, another engine and another model."""
    flags = {"store": "sqlite:///elsewhere.db", "engine": "embedded", "model": ["nobody"]}
    async with serving() as served:
        found = await checks(**flags, port=served.port)
    assert set(found) == {"segue", "port", "server", "store"} | {
        "engine scripted",
        "accepting",
        "models",
        "APIs",
    }
    assert [check.name for check in found.values() if not check.is_ok] == []
    assert served.url in found["server"].found
    assert found["store"].found == "answers"
    assert found["models"].found.startswith("scripted")
    assert found["APIs"].found == ", ".join(APIS)
    assert "in use by a Segue server" in found["port"].found
    # One that needs keys shows neither its checks nor its models to everybody, and the doctor says so.
    async with serving(auth="keys") as served:
        found = await checks(**flags, port=served.port)
    assert found["ready"].found == "ready"
    assert "not asked: the server needs an API key" in found["models"].found


async def test_server_of_another_machine_is_asked_by_its_url(
    capsys: pytest.CaptureFixture[str],
) -> None:
    try:
        async with serving() as served:
            assert await asyncio.to_thread(main, ["doctor", "--url", served.url, "--json"]) == 0
        names = [check["name"] for check in json.loads(capsys.readouterr().out)]
        assert names == ["server", "store", "engine scripted", "accepting", "models", "APIs"]
        assert await asyncio.to_thread(main, ["doctor", "--url", served.url]) == 1
        assert f"no Segue server answers at {served.url}" in capsys.readouterr().out
    finally:
        logging.disable(logging.NOTSET)


async def test_running_server_whose_engine_is_away_is_not_well() -> None:
    flags = {"engine": "chat", "engine_url": ["http://127.0.0.1:1"], "model": ["m"]}
    async with serving(**flags) as served:
        found = (await checks(port=served.port))["engine m"]
    assert (found.is_ok, found.found) == (False, "no answer")
    assert "/ready" in found.advice


async def test_engine_that_wants_another_key_differs_from_one_that_is_away() -> None:
    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as engine:
        url = f"http://127.0.0.1:{engine.sockets[0].getsockname()[1]}"
        flags = {"engine": "chat", "engine_url": [url], "model": ["m"]}
        found = (await checks(**flags))["engine chat"]
        other = (await checks(**flags, engine_key="wrong"))["engine chat"]
    assert (found.is_ok, found.found) == (False, f"{url} refuses requests without an API key")
    assert "--engine-key" in found.advice
    assert other.found == f"{url} refuses this API key"


@pytest.mark.parametrize("name", ["no/such/folder", "Qwen/Qwen3-8B"])
async def test_tokenizer_that_is_missing_comes_with_the_way_to_get_it(name: str) -> None:
    vllm = {"engine": "vllm", "engine_url": ["http://127.0.0.1:1"], "model": ["m"]}
    found = (await checks(**vllm, tokenizer=name))["model m"]
    assert not found.is_ok
    assert "hf download" in found.advice
    assert "start the engine" not in found.advice


async def test_files_that_are_not_a_tokenizer_or_a_model_come_with_the_way_to_get_them(
    tmp_path: Path,
) -> None:
    (tmp_path / "tokenizer.json").write_text('"no tokenizer"')
    (tmp_path / "broken.gguf").write_text("no weights")
    vllm = {"engine": "vllm", "engine_url": ["http://127.0.0.1:1"], "model": ["m"]}
    found = (await checks(**vllm, tokenizer=str(tmp_path)))["model m"]
    assert (found.is_ok, "hf download" in found.advice) == (False, True)
    embedded = {"engine": "embedded", "model": [str(tmp_path / "broken.gguf")]}
    found = (await checks(**embedded))["model broken"]
    assert (found.is_ok, "models add" in found.advice) == (False, False)


def base_model(folder: Path) -> Path:
    """The head of a GGUF file without a template, and without the marks of a family."""
    head = Path(SCRIPTED_VOCABULARY).read_bytes()
    for name in (b"tokenizer.chat_template", b"<|im_start|>", b"<|im_end|>"):
        head = head.replace(name, b"?" * len(name))
    path = folder / "base.gguf"
    path.write_bytes(head)
    return path


async def test_model_without_a_chat_template_is_not_downloaded_again(tmp_path: Path) -> None:
    """A base model in a GGUF file that is whole: nothing is wrong with the file."""
    path = base_model(tmp_path)
    found = (await checks(engine="embedded", model=[str(path)]))["model base"]
    assert "base.gguf has no chat template" in found.found
    assert "looks like a base model" in found.found
    assert "deepseek" not in found.found
    assert "--template FILE.jinja" in found.advice
    assert "download" not in found.advice


async def test_template_without_tools_is_said(caplog: pytest.LogCaptureFixture) -> None:
    async with FakeVllm(model="m") as engine:
        flags = {"engine": "vllm", "engine_url": [engine.url], "model": ["m"]}
        found = await checks(**flags, tokenizer=str(find_weights("smollm2")))
        assert "no place for tools" in found["tools"].found
        assert "model m: its chat template has no place for tools" in caplog.text
        found = await checks(**flags, tokenizer=str(find_weights("smollm2")), dialect="qwen2")
        assert "tools" not in found


async def test_store_that_cannot_be_had_is_named(tmp_path: Path) -> None:
    missing = (await checks(store=f"sqlite:///{tmp_path / 'no' / 'turns.db'}"))["store"]
    assert not missing.is_ok
    assert "mkdir" in missing.advice
    (tmp_path / "broken.db").write_text("this is no database, whatever it is called" * 100)
    broken = (await checks(store=f"sqlite:///{tmp_path / 'broken.db'}"))["store"]
    assert not broken.is_ok


async def test_model_that_is_not_here_comes_with_the_way_to_get_it() -> None:
    found = (await checks(engine="embedded", model=["nobody"]))["model nobody"]
    assert not found.is_ok
    assert "segue models add" in found.advice


async def test_engine_that_is_away_differs_from_one_that_answers() -> None:
    async with FakeChat() as engine:
        found = await checks(engine="chat", engine_url=[engine.url], model=["m"])
        assert found["engine chat"].is_ok
        url = engine.url
    away = (await checks(engine="chat", engine_url=[url], model=["m"]))["engine chat"]
    assert not away.is_ok
    assert url in away.advice


async def test_sharing_of_the_prefix_cache_is_reported() -> None:
    async with FakeChat() as engine:
        flags = {"engine": "chat", "engine_url": [engine.url], "model": ["m"]}
        assert "kept apart" in (await checks(**flags))["prefix cache"].found
        assert "shared" in (await checks(**flags, cache_salt="off"))["prefix cache"].found
    assert "shared" in (await checks(engine="embedded"))["prefix cache"].found


async def test_token_engine_without_a_tokenizer_is_named() -> None:
    found = await checks(engine="vllm", engine_url=["http://127.0.0.1:1"], model=["m"])
    assert "tokenizer" in found["model m"].found


def test_exit_status_and_json_say_whether_all_is_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SEGUE_PROT", "1")
    flags = ["doctor", "--port", "0", "--engine", "scripted"]
    try:
        assert main([*flags, "--json"]) == 1
        *well, odd = json.loads(capsys.readouterr().out)
        assert all(check["is_ok"] for check in well)
        assert odd["found"].endswith("Did you mean SEGUE_PORT?")
        monkeypatch.delenv("SEGUE_PROT")
        assert main(flags) == 0
        assert "`segue serve` would start" in capsys.readouterr().out
        assert main([*flags, "--script", "nowhere.json"]) == 1
        assert "1 check failed." in capsys.readouterr().out
    finally:
        logging.disable(logging.NOTSET)


async def test_settings_are_compared_with_what_the_engine_says() -> None:
    """Each difference is named, with what to do about it."""
    tokenizer = str(find_weights("smollm2"))
    words = vocabulary_from_gguf(Path(tokenizer))
    fake = FakeVllm(context_tokens=32_768, tokenize=lambda text: words.ids(text).tolist())
    async with fake:
        vllm = {"engine": "vllm", "engine_url": [fake.url], "tokenizer": tokenizer}
        well = await checks(**vllm, model=["fake"])
        assert [check for check in well.values() if not check.is_ok] == []
        assert well["context"].found == "32,768 tokens"
        assert "same ids" in well["vocabulary"].found
        assert "--enable-scale-out" in well["advice"].found
        assert "whole prompts; with the plugin segue-vllm" in well["sessions"].found
        fake.is_scaled_out = True
        fake.sessions = {
            "package": "segue-vllm",
            "version": "1",
            "path": "/s",
            "reason": "no class",
        }
        well = await checks(**vllm, model=["fake"])
        assert "advice" not in well
        assert well["sessions"].found.endswith("segue-vllm 1, step 1; not step 2: no class")
        off = await checks(**vllm, model=["fake"], engine_sessions="off")
        assert off["sessions"].found.endswith("because engine_sessions is off")

        odd = await checks(**vllm, model=["other"], context_tokens=131_072)
        assert not odd["context"].is_ok
        assert "32768" in odd["context"].advice
        assert not odd["name"].is_ok
        assert "--model fake" in odd["name"].advice

        fake.tokenize = lambda text: [1, 2, 3]
        other = (await checks(**vllm, model=["fake"]))["vocabulary"]
        assert not other.is_ok
        assert "--tokenizer" in other.advice


def test_more_jobs_than_slots_are_named() -> None:
    model = ModelSettings(name="m", engine="llamacpp", engine_parallel=8)
    (_, parallel) = compare(model, EngineFacts(context_tokens=4_096, slots=4))
    assert not parallel.is_ok
    assert "4 slots" in parallel.found


@pytest.mark.parametrize(
    "flags, found",
    [
        ({"store": "sqlite:///a/segue.db"}, "a/segue.db.files"),
        ({"store": "memory"}, "a temporary folder"),
        ({"store": "postgresql://127.0.0.1/x", "files_dir": "shared"}, "shared"),
        ({"store": "postgresql://127.0.0.1/x"}, "none: /v1/files answers 501."),
    ],
)
def test_place_of_uploaded_files_is_said(flags: dict[str, str], found: str) -> None:
    check = check_files(load_settings(flags, environment={}))
    assert check.is_ok
    assert check.found.startswith(found)
