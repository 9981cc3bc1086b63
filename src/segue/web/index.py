"""What do the operator's own documents say? A full-text index of a folder, in one SQLite file.

`build` reads a folder into the file, and reads again only what has changed since; `IndexWeb` searches it. Nothing here
uses the network, so a web search over an index alone works on a machine without one.

A document has a URL: the prefix that the operator gave the folder, then its path. Several folders may be in one file.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import quote

from segue.documents.words import TOKENIZE, as_match
from segue.errors import Misconfigured, StoreFailed
from segue.web.html import Page, open_page, read_page
from segue.web.search import Hit, WebQuery, is_allowed
from segue.wire.files import is_pdf

# A larger file is no document.
FILE_BYTES_MAX = 32 * 1024 * 1024
# Documents written together: readers wait for no longer than this takes, and a stop loses no more.
BATCH = 64
BUSY_MS = 10_000
# Looked at for each hit that is wanted, where some may be of domains that are not.
SPARE = 20
# Where a word stands in a title it counts for more.
IN_TITLE = 4.0
IN_TEXT = 1.0
SNIPPET_WORDS = 48

VERSION = 1
SCHEMA = f"""
CREATE TABLE IF NOT EXISTS documents (
    id INTEGER PRIMARY KEY,
    url TEXT NOT NULL UNIQUE,
    folder TEXT NOT NULL,
    title TEXT NOT NULL,
    text TEXT NOT NULL,
    mtime_ns INTEGER NOT NULL,
    size INTEGER NOT NULL,
    digest BLOB NOT NULL,
    is_readable INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS folders (path TEXT PRIMARY KEY, url TEXT NOT NULL);
CREATE VIRTUAL TABLE IF NOT EXISTS words USING fts5 (
    title, text, content = 'documents', content_rowid = 'id', {TOKENIZE}
);
CREATE TRIGGER IF NOT EXISTS documents_added AFTER INSERT ON documents BEGIN
    INSERT INTO words (rowid, title, text) VALUES (new.id, new.title, new.text);
END;
CREATE TRIGGER IF NOT EXISTS documents_removed AFTER DELETE ON documents BEGIN
    INSERT INTO words (words, rowid, title, text) VALUES ('delete', old.id, old.title, old.text);
END;
CREATE TRIGGER IF NOT EXISTS documents_changed AFTER UPDATE OF title, text ON documents BEGIN
    INSERT INTO words (words, rowid, title, text) VALUES ('delete', old.id, old.title, old.text);
    INSERT INTO words (rowid, title, text) VALUES (new.id, new.title, new.text);
END;
PRAGMA user_version = {VERSION};
"""
KNOWN = "SELECT url, mtime_ns, size, digest FROM documents WHERE folder = ?"
SAVE = """
INSERT INTO documents (url, folder, title, text, mtime_ns, size, digest, is_readable) VALUES (?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (url) DO UPDATE SET folder = excluded.folder, title = excluded.title, text = excluded.text,
    mtime_ns = excluded.mtime_ns, size = excluded.size, digest = excluded.digest, is_readable = excluded.is_readable
"""
TOUCH = "UPDATE documents SET mtime_ns = ?, size = ? WHERE url = ?"
REMOVE = "DELETE FROM documents WHERE url = ?"
REMOVE_FOLDER = "DELETE FROM documents WHERE folder = ?"
FOLDER_URL = "SELECT url FROM folders WHERE path = ?"
SAVE_FOLDER = "INSERT OR REPLACE INTO folders (path, url) VALUES (?, ?)"
SEARCH = f"""
SELECT documents.url, documents.title, snippet(words, 1, '', '', ' … ', {SNIPPET_WORDS})
FROM words JOIN documents ON documents.id = words.rowid
WHERE words MATCH ? ORDER BY bm25(words, {IN_TITLE}, {IN_TEXT}), documents.id LIMIT ?
"""
READ = "SELECT url, title, text FROM documents WHERE url = ? AND is_readable"


@dataclass(frozen=True, slots=True)
class Report:
    """What became of the files of a folder."""

    added: int = 0
    changed: int = 0
    same: int = 0
    removed: int = 0
    # No text, too large, or not readable.
    unread: int = 0


def build(
    folder: Path, into: Path, prefix: str = "", note: Callable[[int, int], None] | None = None
) -> Report:
    """Bring the index up to date with a folder. A folder has one URL: without a new one it keeps its own, and documents
    under an older one are removed. `note` is called with how many files are done, and of how many."""
    if not folder.is_dir():
        raise Misconfigured(f"index: {folder} is not a folder.")
    place = str(folder.resolve())
    files = sorted(_files(folder))
    outcomes: Counter[str] = Counter()
    try:
        with closing(_open_to_write(into)) as database:
            row = database.execute(FOLDER_URL, (place,)).fetchone()
            before = row[0] if row else f"file:///{quote(folder.resolve().name)}/"
            prefix = prefix or before
            documents = {row[0]: row[1:] for row in database.execute(KNOWN, (prefix,))}
            for number, path in enumerate(files, 1):
                url = prefix.rstrip("/") + "/" + quote(path.relative_to(folder).as_posix())
                outcomes[_update_file(database, path, url, prefix, documents.pop(url, None))] += 1
                if number % BATCH == 0:
                    database.commit()
                if note is not None:
                    note(number, len(files))
            database.executemany(REMOVE, [(url,) for url in documents])
            gone = len(documents)
            if before != prefix:
                gone += database.execute(REMOVE_FOLDER, (before,)).rowcount
            database.execute(SAVE_FOLDER, (place, prefix))
            database.commit()
    except sqlite3.Error as error:
        raise Misconfigured(f"index: {into} cannot be written: {error}.") from error
    return Report(**outcomes, removed=gone)


def _files(folder: Path) -> Iterator[Path]:
    """Ordinary files that are not hidden. Links are not followed: they may lead anywhere."""
    for place, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            path = Path(place, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


def _update_file(
    database: sqlite3.Connection,
    path: Path,
    url: str,
    prefix: str,
    known: tuple[int, int, bytes] | None,
) -> Literal["added", "changed", "same", "unread"]:
    """Bring one file up to date. `known`: time, size and digest of the document as the index has it."""
    try:
        state = path.stat()
        mtime_ns = state.st_mtime_ns
        size = state.st_size
        if known is not None and known[:2] == (mtime_ns, size):
            return "same"
        data = path.read_bytes() if size <= FILE_BYTES_MAX else b""
    except OSError:
        # Gone in the meantime, or without permission to read it.
        return "unread"
    digest = hashlib.sha256(data).digest()
    if known is not None and known[1:] == (size, digest):
        database.execute(TOUCH, (mtime_ns, size, url))
        return "same"
    page = _read(url, data, path.name) if data else None
    is_readable = page is not None and bool(page.text.strip())
    title, text = (page.title, page.text) if page is not None and is_readable else ("", "")
    # What cannot be read is remembered too, so that it is not tried again each time.
    database.execute(SAVE, (url, prefix, title, text, mtime_ns, size, digest, is_readable))
    if not is_readable:
        return "unread"
    return "added" if known is None else "changed"


def _read(url: str, data: bytes, name: str) -> Page | None:
    if is_pdf(data):
        return asyncio.run(open_page(url, data, name=name))
    return read_page(url, data, name=name)


def _open_to_write(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path)
    database.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
    version = database.execute("PRAGMA user_version").fetchone()[0]
    if version not in (0, VERSION):
        database.close()
        raise Misconfigured(
            f"index: {path} has version {version}, this Segue needs {VERSION}: make a new one."
        )
    database.executescript(SCHEMA)
    return database


class IndexWeb:
    """The documents of an index, found and read as pages."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise Misconfigured(f"search_index: {path} does not exist. Make it: segue index DIR")
        self._path = path

    async def search(self, query: WebQuery) -> Sequence[Hit]:
        match = as_match(query.words)
        if not match:
            return []
        rows_max = query.hits_max * (SPARE if query.allowed or query.blocked else 1)
        rows = await asyncio.to_thread(self._query, SEARCH, (match, rows_max))
        hits = [Hit(str(url), str(title), str(text)) for url, title, text in rows]
        return [hit for hit in hits if is_allowed(hit.url, query)][: query.hits_max]

    async def open_page(self, url: str) -> Page | None:
        rows = await asyncio.to_thread(self._query, READ, (url,))
        return next((Page(str(url), str(title), str(text)) for url, title, text in rows), None)

    def _query(self, sql: str, values: tuple[object, ...]) -> list[tuple[object, ...]]:
        # A connection for each query: they are cheap, and the file may be replaced while the server runs.
        file = f"file:{quote(str(self._path))}?mode=ro"
        try:
            with closing(sqlite3.connect(file, uri=True)) as database:
                database.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
                return database.execute(sql, values).fetchall()
        except sqlite3.Error as error:
            raise StoreFailed("The index of documents cannot be read.") from error
