"""The `segue` command, as far as it serves nothing."""

from __future__ import annotations

import asyncio
import json
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from segue.accounts.hashes import KeyHashes, issue_key
from segue.seals.cipher import RingSeals, new_key
from segue.seals.ring import open_ring
from segue.seams.history import CONTAINERS, UsageEntry
from segue.stores.sqlite import SqliteStore
from segue_cli.cli import VERBS, main

NOW = int(time.time())
ENTRIES = [
    UsageEntry("a", "ada", "tiny", "completed", 1_000, 400, 20, NOW),
    UsageEntry("b", "ada", "tiny", "cancelled", 500, 0, 5, NOW),
    UsageEntry("c", "eve", "large", "failed", 7, 0, 0, NOW),
    UsageEntry("d", "ada", "tiny", "completed", 9_999, 9, 9, NOW - 40 * 86_400),
    UsageEntry("e", "eve", "", CONTAINERS, 0, 0, 0, NOW, 0, 5_400.0, 12.25, 7_500_000),
]


@pytest.fixture
async def store(tmp_path: Path) -> str:
    path = tmp_path / "segue.db"
    store = await SqliteStore.open(path)
    await store.ledger.settle(ENTRIES)
    await store.close()
    return f"sqlite:///{path}"


@pytest.mark.parametrize(
    "words", [["usage"], ["usage", "--json"], ["keys", "list"], ["keys", "list", "--json"]]
)
async def test_names_in_a_store_give_no_orders_to_a_terminal(
    words: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever wrote them there: an older version, or another program."""
    odd = "e\x1b]52;c;cm0=\x07\x9b2J\u202e\u200b\rve[red]"
    store = await SqliteStore.open(tmp_path / "segue.db")
    await store.ledger.settle([UsageEntry("c", odd, odd, "failed", 7, 0, 0, NOW)])
    await issue_key(store.keys, KeyHashes([new_key()]), odd, odd)
    await store.close()
    monkeypatch.setenv("COLUMNS", "400")
    status = await asyncio.to_thread(main, [*words, "--store", f"sqlite:///{tmp_path}/segue.db"])
    printed = capsys.readouterr()
    assert status == 0
    assert "ve[red]" in printed.out
    assert not set(printed.out + printed.err) & set("\x1b\x07\x9b\u202e\u200b\r")


def test_command_alone_prints_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    alone = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == alone
    for verb, (module, about, _) in VERBS.items():
        assert f"  {verb} " in alone
        assert about in alone
        assert find_spec(module), f"{verb} has no module"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["srve"], "'srve' is not a command. Did you mean serve? See `segue --help`."),
        (["xyzzy"], "'xyzzy' is not a command. See `segue --help`."),
        (
            ["serve", "--prot", "3"],
            "'--prot' is not a flag of `segue serve`. Did you mean --port? See `segue serve --help`.",
        ),
        (["serve", "models"], "`segue serve` takes no 'models'. See `segue serve --help`."),
        (
            ["chat", "hello"],
            "`segue chat` takes no 'hello'. To ask one question: segue ask 'hello …'. See `segue chat --help`.",
        ),
        (["keys", "create"], "--name is missing. See `segue keys create --help`."),
        (["keys"], "ACTION is missing: create, edit, list, revoke. See `segue keys --help`."),
        (["completion"], "SHELL is missing: bash, zsh, fish. See `segue completion --help`."),
        (["connect"], "CLIENT is missing. See `segue connect --help`."),
        (
            ["seals", "rotat"],
            "ACTION: 'rotat' is not one of: rotate. Did you mean rotate? See `segue seals --help`.",
        ),
        (
            ["completion", "zhs"],
            "SHELL: 'zhs' is not one of: bash, zsh, fish. Did you mean zsh? See `segue completion --help`.",
        ),
        (
            ["usage", "--days", "0"],
            "--days: '0' is not a whole number of at least 1. See `segue usage --help`.",
        ),
    ],
)
def test_wrong_words_are_told_in_one_sentence(
    words: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err == f"segue: {told}\n"


def test_usage_is_a_table_with_totals(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--store", store]) == 0
    printed = capsys.readouterr().out
    for word in (
        "ada",
        "eve",
        "tiny",
        "large",
        "1,500",
        "400",
        "1,507",
        "25",
        "90.0",
        "12.2",
        "7.5",
    ):
        assert word in printed
    assert "9,999" not in printed


def test_usage_in_a_narrow_terminal_has_whole_days_numbers_and_names(
    store: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    assert main(["usage", "--store", store, "--by", "key,owner,model"]) == 0
    printed = capsys.readouterr().out
    assert time.strftime("%Y-%m-%d", time.gmtime()) in printed
    assert "1,507" in printed
    assert "…" not in printed


def test_usage_of_one_owner_as_json(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["usage", "--store", store, "--owner", "ada", "--days", "60", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["model"], row["turns"], row["cached_tokens"]) for row in rows] == [
        ("tiny", 1, 9),
        ("tiny", 2, 400),
    ]


def test_usage_without_a_store_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = tmp_path / "none.db"
    assert main(["usage", "--store", f"sqlite:///{missing}"]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert not missing.exists()
    assert main(["usage", "--store", "memory"]) == 2
    assert "memory" in capsys.readouterr().err
    assert main(["usage", "--store", "mysql://me:secret@host/x"]) == 2
    assert "secret" not in capsys.readouterr().err


def test_unreachable_store_is_said_without_its_password(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("segue.stores.postgres_database.PATIENCE_S", 0.1)
    for url in (
        "postgresql://me:s3cret@127.0.0.1:1/x",
        "postgresql://127.0.0.1:1/x?password=s3cret",
    ):
        assert main(["usage", "--store", url]) == 2
        printed = capsys.readouterr()
        assert "127.0.0.1:1/x" in printed.err
        assert "refused: no PostgreSQL listens there." in printed.err
        assert "s3cret" not in printed.err + printed.out


def test_rotated_ring_seals_anew_and_opens_the_old(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ring = tmp_path / "ring"
    sealed = RingSeals(open_ring(ring)).seal("ada", b"old")
    assert main(["seals", "rotate", "--seal-keys", str(ring)]) == 0
    assert "2 keys" in capsys.readouterr().out
    assert RingSeals(open_ring(ring)).open("ada", sealed) == b"old"
    assert main(["seals", "rotate", "--store", "memory"]) == 2
