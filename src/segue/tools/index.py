"""What do the operator's own documents say? A full-text index of a folder, in one SQLite file.

`build` reads a folder into the file, and reads again only what has changed since; `IndexWeb` searches it. Nothing here
uses the network, so a web search with only this behind it works on a machine without one.

A document has an address: the prefix that the operator gave the folder, then its path. Several folders may be in one
file.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from segue.errors import Misconfigured, StoreFailed
from segue.tools.html import Page, open_page, read_page
from segue.tools.search import Asked, Hit, is_allowed
from segue.wire.files import is_pdf

# A larger file is no document.
FILE_BYTES_MAX = 32 * 1024 * 1024
# Documents written together: readers wait for no longer than this takes, and a stop loses no more.
BATCH = 64
BUSY_MS = 10_000
# Of a question; the rest would not change what is found.
WORDS_MAX = 32
# Looked at for each hit that is wanted, where some may be of domains that are not.
SPARE = 20
# Where a word stands in a title it counts for more.
IN_TITLE, IN_TEXT = 4.0, 1.0
SNIPPET_WORDS = 48

# Words by their stems; accents and case do not count.
TOKENIZE = "tokenize = 'porter unicode61 remove_diacritics 2'"
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
SEARCH = f"""
SELECT documents.url, documents.title, snippet(words, 1, '', '', ' … ', {SNIPPET_WORDS})
FROM words JOIN documents ON documents.id = words.rowid
WHERE words MATCH ? ORDER BY bm25(words, {IN_TITLE}, {IN_TEXT}), documents.id LIMIT ?
"""
READ = "SELECT url, title, text FROM documents WHERE url = ? AND is_readable"


@dataclass(slots=True)
class Report:
    """What became of the files of a folder."""

    added: int = 0
    changed: int = 0
    same: int = 0
    removed: int = 0
    # No text, too large, or not to be had.
    unread: int = 0


def build(
    folder: Path, into: Path, prefix: str = "", note: Callable[[int, int], None] | None = None
) -> Report:
    """Bring the index up to date with a folder. `note` hears how many files are done, of how many."""
    if not folder.is_dir():
        raise Misconfigured(f"index: {folder} is not a folder.")
    prefix = prefix or f"file:///{quote(folder.resolve().name)}/"
    files = sorted(_files(folder))
    report = Report()
    try:
        with closing(_open_to_write(into)) as database:
            known = {row[0]: row[1:] for row in database.execute(KNOWN, (prefix,))}
            for number, path in enumerate(files, 1):
                url = prefix.rstrip("/") + "/" + quote(path.relative_to(folder).as_posix())
                _take_in(database, path, url, prefix, known.pop(url, None), report)
                if number % BATCH == 0:
                    database.commit()
                if note is not None:
                    note(number, len(files))
            database.executemany(REMOVE, [(url,) for url in known])
            report.removed = len(known)
            database.commit()
    except sqlite3.Error as error:
        raise Misconfigured(f"index: {into} cannot be written: {error}.") from error
    return report


def _files(folder: Path) -> Iterator[Path]:
    """Ordinary files that are not hidden. Links are not followed: they may lead anywhere."""
    for place, folders, names in os.walk(folder):
        folders[:] = [one for one in folders if not one.startswith(".")]
        for name in names:
            path = Path(place, name)
            if not name.startswith(".") and path.is_file() and not path.is_symlink():
                yield path


Known = tuple[int, int, bytes]


def _take_in(
    database: sqlite3.Connection,
    path: Path,
    url: str,
    prefix: str,
    known: Known | None,
    report: Report,
) -> None:
    try:
        state = path.stat()
        if known is not None and known[:2] == (state.st_mtime_ns, state.st_size):
            report.same += 1
            return
        data = path.read_bytes() if state.st_size <= FILE_BYTES_MAX else b""
    except OSError:
        # Gone in the meantime, or not ours to read.
        report.unread += 1
        return
    digest = hashlib.sha256(data).digest()
    if known is not None and known[2] == digest and known[1] == state.st_size:
        database.execute(TOUCH, (state.st_mtime_ns, state.st_size, url))
        report.same += 1
        return
    page = _read(url, data, path.name) if data else None
    title, text = (page.title, page.text) if page is not None else ("", "")
    is_readable = bool(text.strip())
    row = (title if is_readable else "", text if is_readable else "")
    # What cannot be read is remembered too, so that it is not tried again each time.
    database.execute(
        SAVE, (url, prefix, *row, state.st_mtime_ns, state.st_size, digest, is_readable)
    )
    if not is_readable:
        report.unread += 1
    elif known is None:
        report.added += 1
    else:
        report.changed += 1


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
        raise Misconfigured(f"index: {path} is of version {version}; make it anew.")
    database.executescript(SCHEMA)
    return database


class IndexWeb:
    """The documents of an index, found and read as pages."""

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise Misconfigured(
                f"search_index: there is no file {path}. Make it with: segue index DIR"
            )
        self._path = path

    async def search(self, asked: Asked) -> Sequence[Hit]:
        """The documents that fit best, best first."""
        question = as_match(asked.query)
        if not question:
            return []
        wanted = asked.hits_max * (SPARE if asked.allowed or asked.blocked else 1)
        rows = await asyncio.to_thread(self._ask, SEARCH, (question, wanted))
        hits = [Hit(str(url), str(title), str(text)) for url, title, text in rows]
        return [hit for hit in hits if is_allowed(hit.url, asked)][: asked.hits_max]

    async def open_page(self, url: str) -> Page | None:
        """The document at this address, if it is here."""
        rows = await asyncio.to_thread(self._ask, READ, (url,))
        if not rows:
            return None
        found, title, text = map(str, rows[0])
        return Page(found, title, text)

    def _ask(self, query: str, values: tuple[object, ...]) -> list[tuple[object, ...]]:
        # A connection for each question: they are cheap, and an index may be made anew behind our back.
        try:
            with closing(
                sqlite3.connect(f"file:{quote(str(self._path))}?mode=ro", uri=True)
            ) as database:
                database.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
                return database.execute(query, values).fetchall()
        except sqlite3.Error as error:
            raise StoreFailed("The index of documents cannot be read.") from error


def as_match(query: str) -> str:
    """A question as the index is asked: any of its words, each as a plain word whatever it looks like."""
    words = list(dict.fromkeys(re.findall(r"\w+", query.lower())))[:WORDS_MAX]
    return " OR ".join(f'"{word}"' for word in words)
