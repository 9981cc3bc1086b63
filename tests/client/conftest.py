"""A server with a key, for the commands that talk to it."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator

import pytest

from segue_cli.cli import main
from tests.support import served_process


@pytest.fixture(autouse=True)
def no_keys_around(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SEGUE_KEY", "OPENAI_API_KEY", "MINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="session")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The URL of a server with a key and two models, one with an alias; and the key."""
    folder = tmp_path_factory.mktemp("locked")
    store = f"sqlite:///{folder}/segue.db"
    (folder / "segue.toml").write_text(
        '[[models]]\nname = "agent"\naliases = ["gpt-5.5"]\n[[models]]\nname = "other"\n'
    )
    printed, sys.stdout = sys.stdout, io.StringIO()
    try:
        assert main(["keys", "create", "--name", "laptop", "--store", store]) == 0
        key = sys.stdout.getvalue().strip()
    finally:
        sys.stdout = printed
    flags = ("--store", store, "--config", str(folder / "segue.toml"))
    with served_process(*flags, cwd=folder) as served:
        yield served.url, key
