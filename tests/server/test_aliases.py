"""Aliases of model names by pattern: which model a name means, what is counted under which name, what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import pytest

from segue.errors import Misconfigured
from segue.server.aliases import NamedModels, alias_problems
from segue.settings.checks import load_settings
from segue.settings.values import ModelSettings
from segue.turn.plan import Model
from tests.support import Served, fetch, metric, serving

CONFIG = """
[[models]]
name = "large"
aliases = ["claude-*", "gpt-4o"]
[[models]]
name = "small"
aliases = ["claude-haiku-*", "*"]
"""


def named(*names: str) -> NamedModels:
    """Each name means a model that is called as it is."""
    models = NamedModels()
    for name in names:
        models.add(name, cast(Model, f"model of {name}"))
    return models


@pytest.mark.parametrize(
    "name, meant",
    [
        ("claude-haiku-4", "claude-haiku-*"),
        ("claude-opus-5", "claude-*"),
        ("claude-", "claude-*"),
        ("claude-opus", "claude-opus"),
        ("an-opus", "*-opus"),
        ("claude", "*"),
        ("", "*"),
    ],
)
def test_exact_name_goes_before_patterns_and_longer_patterns_before_shorter(
    name: str, meant: str
) -> None:
    models = named("*", "claude-*", "claude-haiku-*", "*-opus", "claude-opus")
    assert models[name] == f"model of {meant}"
    assert [*models] == ["claude-opus"]


def test_name_that_fits_nothing_is_not_known() -> None:
    models = named("claude-*-fast")
    assert models.get("claude-fast") is None
    assert "gpt" not in models
    assert models["claude--fast"]


def settings_of(*aliases: Sequence[str]) -> list[ModelSettings]:
    return [ModelSettings(name=f"m{at}", aliases=tuple(row)) for at, row in enumerate(aliases)]


@pytest.mark.parametrize(
    "models, problem",
    [
        (settings_of(["a"], ["a"]), "two models are called 'a'."),
        (settings_of(["m1"], []), "two models are called 'm1'."),
        (settings_of(["*"], ["*"]), "two models are called '*'."),
        (settings_of(["a*b*"]), "the alias 'a*b*' has more than one *."),
        (settings_of(["ab*"], ["*yz"]), "the aliases 'ab*' of m0 and '*yz' of m1 fit the same"),
        (settings_of(["a*z"], ["ab*"]), "the aliases 'a*z' of m0 and 'ab*' of m1 fit the same"),
    ],
)
def test_names_that_could_mean_two_models_are_a_problem(
    models: list[ModelSettings], problem: str
) -> None:
    (found,) = alias_problems(models)
    assert problem in found


def test_patterns_that_cannot_meet_or_differ_in_length_are_none() -> None:
    assert not [*alias_problems(settings_of(["claude-*", "*", "ab*"], ["gpt-*", "xy*", "*yzz"]))]
    # One model may have both.
    assert not [*alias_problems(settings_of(["ab*", "*yz"]))]


async def test_start_with_aliases_that_are_not_clear_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "segue.toml"
    file.write_text(CONFIG.replace('"*"', '"claude-*"'))
    with pytest.raises(Misconfigured, match=r"models: two models are called 'claude-\*'"):
        async with serving(config=str(file)):
            pass


async def asked(served: Served, name: str, **fields: object) -> str:
    body = {"model": name, "input": "Hello", **fields}
    answer = await fetch(served, "POST", "/v1/responses", body)
    assert answer.status == 200
    return str(answer.json["model"])


async def test_client_is_answered_under_its_own_name_and_counted_under_the_served(
    tmp_path: Path,
) -> None:
    file = tmp_path / "segue.toml"
    file.write_text(CONFIG)
    async with serving(config=str(file)) as served:
        for name in ("claude-opus-5", "claude-haiku-4-5-20251001", "gpt-4o", "anything"):
            assert await asked(served, name) == name
            assert (await fetch(served, "GET", f"/v1/models/{name}")).json["id"] == name
        listed = (await fetch(served, "GET", "/v1/models")).json["data"]
        assert [model["id"] for model in listed] == ["large", "gpt-4o", "small"]
        await served.app.runner.drain(1)
        for model in ("large", "small"):
            assert await metric(served, f'segue_output_tokens_total{{model="{model}"}}') > 0
        text = (await fetch(served, "GET", "/metrics")).body.decode()
        assert "claude" not in text
        assert "anything" not in text


async def test_change_of_aliases_holds_after_a_reload(tmp_path: Path) -> None:
    file = tmp_path / "segue.toml"
    file.write_text(CONFIG)
    flags = {"config": str(file), "engine": "scripted", "store": "memory", "port": 0}
    async with serving(config=str(file)) as served:
        file.write_text(CONFIG.replace(', "*"', "").replace("claude-*", "o*"))
        reload = served.app.reload
        await reload.check(load_settings(flags, environment={}))
        reload.apply()
        assert await asked(served, "opus") == "opus"
        assert await asked(served, "claude-haiku-4") == "claude-haiku-4"
        for name in ("claude-opus", "anything"):
            body = {"model": name, "input": "Hello"}
            answer = await fetch(served, "POST", "/v1/responses", body)
            assert (answer.status, answer.json["error"]["code"]) == (404, "model_not_found")
