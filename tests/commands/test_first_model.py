"""Which model does a newcomer get?"""

from __future__ import annotations

from pathlib import Path

import pytest

from segue.settings.checks import load_settings
from segue.settings.values import Settings
from segue_cli.commands import first_model
from segue_cli.commands.first_model import missing_models, with_first_model

BETTER = ("better", 1_100_000_000)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A machine with memory to spare, and what is fetched there."""
    names: list[str] = []
    monkeypatch.setattr(first_model, "better_model", lambda: BETTER)
    monkeypatch.setattr(first_model, "offered_note", lambda: tmp_path / "models" / "offered")
    monkeypatch.setattr(first_model, "add_with_bar", names.append)
    monkeypatch.setattr(first_model, "missing_models", lambda settings: [])
    return names


def settings(**flags: object) -> Settings:
    return load_settings(flags, environment={})


def test_small_model_where_nobody_can_be_asked(fetched: list[str]) -> None:
    assert with_first_model(settings()).model == ()
    assert fetched == []


def test_better_model_by_one_flag(fetched: list[str]) -> None:
    assert with_first_model(settings(model=["auto"])).model == ("better",)
    assert fetched == ["better"]


def test_small_model_where_memory_is_short(
    fetched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_model, "better_model", lambda: None)
    assert with_first_model(settings(model=["auto"]), lambda question: "y").model == ()
    assert fetched == []


def test_offer_is_made_once(fetched: list[str]) -> None:
    questions: list[str] = []

    def decline(question: str) -> str:
        questions.append(question)
        return ""

    for _ in range(2):
        assert with_first_model(settings(), decline).model == ()
    assert [("1.1 GB" in question) for question in questions] == [True]
    assert fetched == []


def test_offer_is_taken(fetched: list[str]) -> None:
    assert with_first_model(settings(), lambda question: "Y\n").model == ("better",)
    assert fetched == ["better"]


@pytest.mark.parametrize(
    "flags",
    [{"model": ["smollm2"]}, {"engine": "scripted"}, {"engine": "chat", "model": ["auto"]}],
)
def test_who_says_what_to_serve_is_not_asked(fetched: list[str], flags: dict[str, object]) -> None:
    def ask(question: str) -> str:
        raise AssertionError(question)

    assert with_first_model(settings(**flags), ask).model == tuple(flags.get("model", ()))  # type: ignore[arg-type]
    assert fetched == []


@pytest.mark.parametrize(
    "flags, answer, is_fetched",
    [
        ({}, "", True),
        ({}, "n", False),
        ({"model": ["smollm2"]}, "y", True),
        ({"model": ["auto"]}, None, True),
        ({}, None, False),
        ({"engine": "scripted"}, "y", False),
    ],
)
def test_missing_weights_are_downloaded_if_a_person_agrees(
    fetched: list[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    flags: dict[str, object],
    answer: str | None,
    is_fetched: bool,
) -> None:
    monkeypatch.setattr(first_model, "better_model", lambda: None)
    monkeypatch.setattr(first_model, "missing_models", missing_models)
    # A machine without weights.
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("segue_embedded.weights._installed", lambda weights: None)
    ask = None if answer is None else lambda question: answer
    with_first_model(settings(**flags), ask)
    assert fetched == (["smollm2"] if is_fetched else [])
