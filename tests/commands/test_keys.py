"""`segue keys`: give out, list, take back."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from segue.accounts.scopes import SCOPES
from segue.errors import Misconfigured
from segue.limits import Key, KeyLimits
from segue_cli.cli import main
from segue_cli.commands.keys import chosen

SECRET = re.compile(r"sk-segue-[A-Za-z0-9_-]{43}")


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path}/segue.db"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["keys", *words])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_key_is_printed_once_and_stored_nowhere(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run(capsys, "create", "--name", "laptop", "--store", store)
    assert status == 0
    assert SECRET.fullmatch(out.strip())
    assert "not shown again" in err
    assert out.strip() not in err
    for path in tmp_path.iterdir():
        assert out.strip().encode() not in path.read_bytes()
    _, listed, _ = run(capsys, "list", "--store", store)
    assert "laptop" in listed
    assert out.strip() not in listed
    assert f"{out[:13]}…" in listed


def test_owner_scopes_and_limits_are_kept(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--name", "ci", "--owner", "team", "--scopes", "responses, metrics", "--json"]
    words += ["--limit-requests-per-min", "60", "--limit-lanes", "4", "--store", store]
    status, out, _ = run(capsys, "create", *words)
    made = json.loads(out)
    assert status == 0
    assert SECRET.fullmatch(made.pop("secret"))
    _, out, _ = run(capsys, "list", "--json", "--store", store)
    assert json.loads(out) == [made]
    assert (made["owner"], made["scopes"]) == ("team", ["responses", "metrics"])
    given = KeyLimits(requests_per_min=60, lanes_max=4)
    assert msgspec.convert(made["limits"], KeyLimits) == given


def test_list_cuts_nothing_and_says_what_a_person_wants_to_know(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = ("--name", "Ключ von 東京", "--expires", "30d", "--limit-lanes", "4", "--json")
    _, out, err = run(capsys, "create", *words, "--store", store)
    made = json.loads(out)
    assert made["expires_at"] - made["created_at"] in range(30 * 86_400 - 60, 30 * 86_400 + 60)
    assert f"It is in sqlite:///{tmp_path}/segue.db, which was created now" in err
    _, out, err = run(capsys, "create", "--name", "b", "--scopes", "operator", "--store", store)
    assert "created now" not in err
    _, out, err = run(capsys, "list", "--store", store)
    head, *rows, limits = out.splitlines()
    second, first = sorted(rows, key=lambda row: made["id"] in row)
    assert first.split()[0] == made["id"]
    assert [head.index(word) for word in ("STATE", "SCOPES")] == [
        second.index(word) for word in ("valid", "operator")
    ]
    assert first.count("never") == 1
    assert second.count("never") == 2
    assert limits == f"limits of {made['id']} (Ключ von 東京): responses that run at once: 4"
    assert f"{tmp_path}/segue.db" in err


def test_second_key_of_one_name_is_said(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, err = run(capsys, "create", "--name", "ci", "--json", "--store", store)
    first = json.loads(out)["id"]
    assert "Also named" not in err
    _, out, err = run(capsys, "create", "--name", "ci", "--store", store)
    assert f"Also named 'ci', and still valid: {first}." in err


def made_key(number: str, name: str, **more: Any) -> Key:
    return Key(f"key_{number}", name, "ada", ("models",), KeyLimits(), "r", 1, **more)


KEYS = [
    made_key("1234", "ci", revoked_at=5),
    made_key("1256", "ci"),
    made_key("3456", "ci2"),
    made_key("5678", "key_1234"),
    made_key("9999", "twice"),
    made_key("9998", "twice"),
    made_key("7777", "old", expires_at=5),
]


@pytest.mark.parametrize(
    "word, meant",
    [
        ("key_3456", "3456"),
        ("key_34", "3456"),
        ("key_34…", "3456"),
        ("34", "3456"),
        ("ci", "1256"),
        ("ci2", "3456"),
        ("key_1234", "1234"),
        ("old", "7777"),
        ("key_12", "fits 2 keys: key_1234 (ci, …); key_1256"),
        ("twice", "fits 2 keys"),
        ("key_", "fits 7 keys"),
        ("", "no key"),
        ("…", "no key"),
        ("c", "no key"),
    ],
)
def test_key_is_meant_by_id_start_or_name(word: str, meant: str) -> None:
    if meant.isdigit():
        assert chosen(KEYS, word).id == f"key_{meant}"
        return
    with pytest.raises(Misconfigured, match=re.escape(meant)):
        chosen(KEYS, word)


def test_key_is_taken_back_by_its_id(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "create", "--name", "old", "--json", "--store", store)
    key_id = json.loads(out)["id"]
    assert run(capsys, "revoke", key_id, "--store", store)[0] == 0
    status, _, err = run(capsys, "revoke", key_id, "--store", store)
    assert (status, key_id in err) == (2, True)
    _, out, _ = run(capsys, "list", "--json", "--store", store)
    assert json.loads(out)[0]["revoked_at"] is not None


@pytest.mark.parametrize(
    "words, said",
    [
        (("create", "--name", "a", "--store", "memory"), "memory"),
        (("create", "--name", "a", "--scopes", "everything"), "scopes"),
        (("create", "--name", "a", "--scopes", ""), "scopes"),
        (("create", "--name", ""), "name"),
        (("create", "--name", "a\nb"), "name"),
        (("create", "--name", "a", "--owner", "\udce4"), "owner"),
        (("create", "--name", "a", "--expires", "30"), "expires"),
        (("create", "--name", "a", "--expires", "0d"), "expires"),
        (("list", "--store", "sqlite:///none.db"), "none.db"),
        (("revoke", "key_1", "--store", "sqlite:///none.db"), "none.db"),
    ],
)
def test_what_cannot_be_done_is_said(
    words: tuple[str, ...],
    said: str,
    store: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    place = () if "--store" in words else ("--store", store)
    status, out, err = run(capsys, *words, *place)
    assert (status, out) == (2, "")
    assert said in err


def test_ring_that_is_not_the_stores_is_said(
    store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(capsys, "create", "--name", "a", "--store", store)[0] == 0
    strange = str(tmp_path / "other.seals")
    words = ("create", "--name", "b", "--store", store, "--seal-keys", strange)
    status, out, err = run(capsys, *words)
    assert (status, out) == (2, "")
    assert "seal_keys" in err


def test_first_key_of_a_store_is_an_operators_and_later_ones_are_not(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out, err = run(capsys, "create", "--name", "me", "--json", "--store", store)
    assert json.loads(out)["scopes"] == ["responses", "models", "metrics", "dashboard", "operator"]
    assert "first key of this store, so it opens the dashboard" in err
    run(capsys, "revoke", "me", "--store", store)
    _, out, err = run(capsys, "create", "--name", "app", "--json", "--store", store)
    assert json.loads(out)["scopes"] == ["responses", "models"]
    assert "first key" not in err


def test_first_key_with_named_scopes_has_these(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("--scopes", "responses", "--json", "--store", store)
    _, out, err = run(capsys, "create", "--name", "me", *words)
    assert json.loads(out)["scopes"] == ["responses"]
    assert "first key" not in err


def test_models_before_the_key_leave_the_key_alone(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run(capsys, "create", "--name", "ci", "--store", store)
    status, out, _ = run(capsys, "edit", "--models", "qwen3-*,gpt-*", "ci", "--store", store)
    assert (status, "(ci)" in out, "models: qwen3-*, gpt-*" in out) == (0, True, True)


def test_help_names_every_scope_and_what_an_edit_leaves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "400")
    for action, words in (("create", (*SCOPES, "(default: all)")), ("edit", ("'*': all",))):
        with pytest.raises(SystemExit):
            main(["keys", action, "--help"])
        text = capsys.readouterr().out
        assert [word for word in words if word not in text] == []


def test_models_and_budgets_are_given_edited_and_removed(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets = ("--budget-tokens-day", "1000", "--budget-tokens-month", "20000")
    models = ("--models", "qwen3", "--models", "gpt-*,claude-*")
    given = (*models, *budgets, "--json", "--store", store)
    _, out, _ = run(capsys, "create", "--name", "ci", *given)
    expected = KeyLimits(
        budget_tokens_day=1_000,
        budget_tokens_month=20_000,
        models=("qwen3", "gpt-*", "claude-*"),
    )
    assert msgspec.convert(json.loads(out)["limits"], KeyLimits) == expected
    _, out, _ = run(capsys, "list", "--store", store)
    assert "models: qwen3, gpt-*, claude-*; tokens a day" in out
    assert "tokens a month (UTC): 20,000" in out
    words = ("edit", "ci", "--models", "*", "--budget-tokens-day", "0", "--limit-lanes", "3")
    status, out, _ = run(capsys, *words, "--store", store)
    assert status == 0
    assert "responses that run at once: 3; tokens a month (UTC): 20,000" in out
    assert "models" not in out
    assert run(capsys, "edit", "ci", "--store", store)[0] == 2
    assert run(capsys, "edit", "ci", "--models", "a*b*", "--store", store)[0] == 2


def test_budget_of_an_owner_is_that_of_all_its_keys(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    of_owner = ("--owner", "team", "--store", store)
    run(capsys, "create", "--name", "a", *of_owner)
    run(capsys, "create", "--name", "other", "--store", store)
    run(capsys, "create", "--name", "b", "--owner-budget-tokens-day", "500", *of_owner)
    run(capsys, "create", "--name", "c", *of_owner)

    def budgets() -> dict[str, int]:
        _, out, _ = run(capsys, "list", "--json", "--store", store)
        return {key["name"]: key["limits"]["owner_budget_tokens_day"] for key in json.loads(out)}

    assert budgets() == {"a": 500, "other": 0, "b": 500, "c": 500}
    status, out, _ = run(capsys, "edit", "b", "--owner-budget-tokens-day", "0", "--store", store)
    assert status == 0
    assert len(out.splitlines()) == 3
    assert budgets() == {"a": 0, "other": 0, "b": 0, "c": 0}


def test_budget_of_an_owner_outlives_its_last_key(
    store: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who revokes the only key, and then gives out another one, has not taken the budget away."""
    of_owner = ("--owner", "team", "--store", store)
    run(capsys, "create", "--name", "a", "--owner-budget-tokens-day", "500", *of_owner)
    assert run(capsys, "revoke", "a", "--store", store)[0] == 0
    _, out, _ = run(capsys, "create", "--name", "b", "--json", *of_owner)
    assert json.loads(out)["limits"]["owner_budget_tokens_day"] == 500
