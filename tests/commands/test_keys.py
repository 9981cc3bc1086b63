"""`segue keys`: give out, list, take back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from segue.cli import main

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
    assert "sk-segue" not in listed


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
    assert made["limits"] == {
        "requests_per_min": 60,
        "tokens_per_min": 0,
        "connections_max": 0,
        "lanes_max": 4,
        "state_bytes_max": 0,
        "other_requests_per_min": 0,
    }


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
