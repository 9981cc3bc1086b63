"""Do the documents do what they say? Each reader plays their pages, as printed, from an empty folder to the end."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from segue.derivation.family import from_toml
from segue.errors import Misconfigured
from segue.settings.checks import load_settings
from segue_embedded.weights import find_weights
from tests.documents.pages import steps_of
from tests.documents.player import ROOT, free_port, playing

DOCS = ROOT / "docs"
STAND_INS = Path(__file__).parent / "stand_ins.py"


def stand_in(name: str) -> list[str]:
    """A program that is played by `stand_ins.py`."""
    return [sys.executable, str(STAND_INS), name]


@dataclass(frozen=True)
class Story:
    """The pages of one reader, or single sections of them, in order."""

    pages: tuple[tuple[Path, str | None], ...]
    programs: dict[str, list[str]] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    # Whether the reader has a GGUF file, `model.gguf`.
    has_model: bool = False
    # The port that an engine listens on by default.
    engine_port: int = 0


def pages(*names: str) -> tuple[tuple[Path, str | None], ...]:
    """Whole pages of docs/."""
    return tuple((DOCS / name, None) for name in names)


def sections(name: str, *titles: str) -> tuple[tuple[Path, str | None], ...]:
    """Some sections of a page."""
    return tuple((DOCS / name, title) for title in titles)


STORIES = {
    "newcomer": Story(
        ((ROOT / "README.md", None),),
        {"make": [str(ROOT / ".venv" / "bin" / "segue")]},
    ),
    "operator with keys": Story(pages("how-to/secure.md")),
    "operator of a running server": Story(pages("how-to/backup.md", "how-to/reload.md")),
    "application developer": Story(
        sections("how-to/application.md", "Start", "Conversations", "Tools", "Background")
    ),
    "agent developer": Story(
        pages("tutorial.md"),
        {"vllm": stand_in("vllm"), "hf": stand_in("hf")},
        engine_port=8000,
    ),
}
LONG_STORIES = {
    "agent developer with SDKs": Story(
        sections("clients/codex.md", "Configure", "Run", "A task that changes a file")
        + sections("clients/openai-python.md", "Install and configure")
        + sections("clients/agents-python.md", "Install and configure")
        + sections("clients/curl.md", "From a shell", "curl")
        + sections("clients/openai-node.md", "Install and configure")
        + sections("clients/agents-js.md", "Install and configure")
        + sections("clients/ai-sdk.md", "Install and configure")
    ),
    "application developer, to the end": Story(pages("how-to/application.md")),
    "application developer with files": Story(
        sections("how-to/application.md", "Start") + pages("files.md")
    ),
    "application developer with a real model": Story(
        pages("how-to/application.md"), environment={"SEGUE_ENGINE": "embedded"}
    ),
    "operator with a reference": Story(
        sections("security.md", "Authentication") + sections("models.md", "How to get them")
    ),
    "operator who scales": Story(pages("how-to/scale.md")),
    "operator with a slow turn": Story(pages("how-to/debug-a-slow-turn.md", "cache.md")),
    "operator with a model": Story(pages("how-to/bring-a-model.md")),
    "operator in trouble": Story(pages("how-to/troubleshooting.md")),
    "owner of a vLLM": Story(
        pages("engines/vllm.md"),
        {"vllm": stand_in("vllm"), "hf": stand_in("hf")},
        engine_port=8000,
    ),
    "owner of a hosted API": Story(
        sections("engines/ollama.md", "Start Ollama") + pages("engines/hosted.md"),
        {"ollama": stand_in("ollama")},
        engine_port=11434,
    ),
    "owner of an SGLang": Story(
        pages("engines/sglang.md"),
        {"python": stand_in("python"), "hf": stand_in("hf")},
        engine_port=30000,
    ),
    "owner of a llama.cpp": Story(
        pages("engines/llamacpp.md"),
        {"llama-server": stand_in("llama-server")},
        has_model=True,
        engine_port=8081,
    ),
    "owner of an Ollama": Story(
        pages("engines/ollama.md"), {"ollama": stand_in("ollama")}, engine_port=11434
    ),
    "owner of an LM Studio": Story(
        pages("engines/lmstudio.md"), {"lms": stand_in("lms")}, engine_port=1234
    ),
}


# Pages whose commands are not played, and why.
NOT_PLAYED = {
    "adding/store.md": "pieces of code, not programs",
    "inside/performance.md": "measurements that take minutes",
}


def other_stories() -> dict[str, Story]:
    """Every other page with commands, each from its beginning to its end."""
    told = {
        page for story in [*STORIES.values(), *LONG_STORIES.values()] for page, _ in story.pages
    }
    names = {page.relative_to(DOCS).as_posix(): page for page in DOCS.rglob("*.md")}
    return {
        name: Story(((page, None),))
        for name, page in sorted(names.items())
        if page not in told
        and name not in NOT_PLAYED
        and any(step.is_run for step in steps_of(page))
    }


LONG_STORIES |= other_stories()


def play(story: Story, folder: Path) -> None:
    """From nothing to the end."""
    port = free_port()
    replaced = {f":{story.engine_port}": f":{port}"} if story.engine_port else {}
    environment = {"STAND_IN_PORT": str(port), **story.environment}
    with playing(folder, story.programs, environment, replaced, True) as player:
        if story.has_model:
            (player.work / "model.gguf").symlink_to(find_weights("smollm2"))
        ran = sum(player.play(steps_of(page, section)) for page, section in story.pages)
        assert ran


def test_every_piece_of_a_settings_file_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "segue.toml"
    pieces = [
        step
        for page in sorted(DOCS.rglob("*.md"))
        for step in steps_of(page)
        if step.language == "toml" and page.name != "codex.md"
    ]
    assert len(pieces) > 8
    for step in pieces:
        text = step.text.replace("…", "x")
        file.write_text(text)
        try:
            # Two kinds of file are in TOML: settings, and how a model writes.
            if text.startswith("version ="):
                from_toml(text, str(file))
            else:
                load_settings({"config": str(file)}, environment={})
        except Misconfigured as error:
            pytest.fail(f"{step.place}: {error}")


@pytest.mark.parametrize("name", STORIES)
def test_reader_gets_to_the_end(name: str, tmp_path: Path) -> None:
    play(STORIES[name], tmp_path)


@pytest.mark.documents
@pytest.mark.parametrize("name", LONG_STORIES)
def test_reader_gets_to_the_end_of_a_longer_story(name: str, tmp_path: Path) -> None:
    play(LONG_STORIES[name], tmp_path)
