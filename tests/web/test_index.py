from __future__ import annotations

import asyncio
import os
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.errors import Misconfigured, StoreFailed
from segue.web.index import IndexWeb, Report, as_match, build
from segue.web.search import WebQuery
from segue_cli.cli import main
from tests.documents.papers import pdf

URL = "https://docs.a.com/v1"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "papers"
    (folder / "deep").mkdir(parents=True)
    (folder / ".git").mkdir()
    (folder / "rain.md").write_text("# About rain\n\nClouds bring rain to the harbour.\n")
    (folder / "deep" / "snow day.html").write_text("<title>Snow</title><p>Snow falls on mountains.")
    (folder / "notes.txt").write_text("The ferry leaves at seven.")
    (folder / "paper.pdf").write_bytes(pdf("Glaciers move slowly."))
    (folder / "picture.png").write_bytes(b"\x89PNG\0\0\0")
    (folder / ".git" / "config").write_text("rain in a hidden place")
    (folder / "link.txt").symlink_to(tmp_path / "outside.txt")
    (tmp_path / "outside.txt").write_text("rain outside")
    return folder


async def found(path: Path, query: str, **limits: object) -> list[str]:
    hits = await IndexWeb(path).search(WebQuery(query, 10, **limits))  # type: ignore[arg-type]
    return [hit.url for hit in hits]


async def test_documents_of_every_kind_are_found(folder: Path, tmp_path: Path) -> None:
    into = tmp_path / "i.db"
    assert await asyncio.to_thread(build, folder, into, URL + "/") == Report(added=4, unread=1)
    assert await found(into, "raining in harbours?") == [f"{URL}/rain.md"]
    assert await found(into, "SNOW") == [f"{URL}/deep/snow%20day.html"]
    assert await found(into, "glacier") == [f"{URL}/paper.pdf"]
    assert await found(into, "ferry OR") == [f"{URL}/notes.txt"]
    assert await found(into, "nothing of this") == []
    assert await found(into, " ?! ") == []
    page = await IndexWeb(into).open_page(f"{URL}/deep/snow%20day.html")
    assert page is not None
    assert (page.title, page.text) == ("Snow", "Snow falls on mountains.")
    assert await IndexWeb(into).open_page(f"{URL}/picture.png") is None
    assert await IndexWeb(into).open_page(f"{URL}/.git/config") is None


async def test_only_what_changed_is_read_again(folder: Path, tmp_path: Path) -> None:
    into = tmp_path / "i.db"
    await asyncio.to_thread(build, folder, into, URL)
    assert await asyncio.to_thread(build, folder, into, URL) == Report(same=5)
    (folder / "rain.md").write_text("# About hail\n\nHail is ice.\n")
    (folder / "notes.txt").unlink()
    (folder / "new.txt").write_text("A new thing.")
    os.utime(folder / "paper.pdf", ns=(1, 1))
    assert await asyncio.to_thread(build, folder, into, URL) == Report(
        added=1, changed=1, same=3, removed=1
    )
    assert await found(into, "rain") == []
    assert await found(into, "hail") == [f"{URL}/rain.md"]
    assert await found(into, "ferry") == []
    assert await found(into, "new") == [f"{URL}/new.txt"]


async def test_folder_with_another_url_is_there_once(folder: Path, tmp_path: Path) -> None:
    into = tmp_path / "x.index"
    await asyncio.to_thread(build, folder, into)
    moved = await asyncio.to_thread(build, folder, into, URL)
    assert moved == Report(added=4, unread=1, removed=5)
    assert await found(into, "rain") == [f"{URL}/rain.md"]
    assert await asyncio.to_thread(build, folder, into) == Report(same=5)
    await asyncio.to_thread(build, folder, into, f"{URL}/")
    assert await found(into, "rain") == [f"{URL}/rain.md"]


async def test_folders_share_a_file_and_do_not_disturb_each_other(
    folder: Path, tmp_path: Path
) -> None:
    into = tmp_path / "i.db"
    await asyncio.to_thread(build, folder, into, URL)
    await asyncio.to_thread(build, folder / "deep", into)
    assert await found(into, "snow") == [
        f"{URL}/deep/snow%20day.html",
        "file:///deep/snow%20day.html",
    ]
    assert await found(into, "snow", allowed=("a.com",)) == [f"{URL}/deep/snow%20day.html"]
    assert await found(into, "snow", blocked=("docs.a.com",)) == ["file:///deep/snow%20day.html"]
    assert await asyncio.to_thread(build, folder, into, URL) == Report(same=5)


def test_words_never_become_a_query_language() -> None:
    assert as_match('a" OR b* NEAR(c) -d title:e') == (
        '"a" OR "or" OR "b" OR "near" OR "c" OR "d" OR "title" OR "e"'
    )


@given(st.text(max_size=100))
def test_any_question_can_be_asked(text: str) -> None:
    with sqlite3.connect(":memory:") as database:
        database.execute("CREATE VIRTUAL TABLE words USING fts5 (text)")
        if match := as_match(text):
            database.execute("SELECT * FROM words WHERE words MATCH ?", (match,))
    database.close()


async def test_file_that_is_no_index_is_told(tmp_path: Path, folder: Path) -> None:
    with pytest.raises(Misconfigured, match="segue index"):
        IndexWeb(tmp_path / "none.db")
    broken = tmp_path / "broken.db"
    broken.write_bytes(b"not a database at all, but long enough to look at")
    with pytest.raises(StoreFailed):
        await IndexWeb(broken).search(WebQuery("rain", 3))
    with pytest.raises(Misconfigured):
        await asyncio.to_thread(build, folder, broken, URL)
    with pytest.raises(Misconfigured):
        await asyncio.to_thread(build, tmp_path / "nowhere", tmp_path / "i.db")
    newer = tmp_path / "newer.db"
    with sqlite3.connect(newer) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    with pytest.raises(Misconfigured, match="version 99"):
        await asyncio.to_thread(build, folder, newer, URL)


def test_command_makes_an_index(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    into = tmp_path / "i.db"
    assert main(["index", str(folder), "--into", str(into), "--url", URL]) == 0
    assert "4 added, 0 changed, 0 unchanged, 0 removed, 1 without text." in capsys.readouterr().out
    assert main(["index", str(tmp_path / "nowhere"), "--into", str(into)]) == 2
    assert "is not a folder" in capsys.readouterr().err
