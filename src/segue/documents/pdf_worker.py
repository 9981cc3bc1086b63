"""What is the text of a PDF? The program that parses it, in a process of its own (see `pdf`).

In: the bytes, on standard input, and how many characters are wanted at most. Out: lines of JSON, the title first, then
each page as soon as it is read, so that after a timeout the parent has what came before; last, in an object, how it
ended. A malicious page can take minutes and any amount of memory: this process has little of either.
"""

from __future__ import annotations

import io
import json
import logging
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import suppress

from pypdf import PageObject, PdfReader
from pypdf.errors import PyPdfError
from pypdf.generic import DictionaryObject, StreamObject

PAGES_MAX = 2_000
# A few kilobytes can unfold to minutes of work (docs/inside/hazards.md T8). A page of text has some thousand operations
# in less than 100 KiB; each costs some 20 us. A note stands for what is beyond that, if there is time for the rest.
PAGE_BYTES_MAX = 1024 * 1024
OPERATIONS_MAX = 1_000_000
UNREAD_PAGE = "[a page that is too large to read]"
UNREAD_REST = "[the rest is too long to read]"
MEMORY_BYTES_MAX = 1024 * 1024 * 1024
# The serving process goes first.
NICENESS = 10
_FAULTS = (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, OSError)


class _Exhausted(Exception):
    """The file has more operations than are read."""


class _Effort:
    """Counts the operations that were read of a file."""

    def __init__(self) -> None:
        self.spent = 0

    def __call__(self, *_: object) -> None:
        self.spent += 1
        if self.spent > OPERATIONS_MAX:
            raise _Exhausted


def extract(data: bytes, chars_max: int) -> Iterator[str | dict[str, bool]]:
    """The title, then the text of each page in turn, then whether all of it could be read."""
    effort = _Effort()
    is_broken = False
    length = 0
    try:
        reader = PdfReader(io.BytesIO(data))
        metadata = reader.metadata
        yield (metadata.title or "").strip() if metadata is not None else ""
        for page in reader.pages[:PAGES_MAX]:
            is_small = _drawn_bytes(page, PAGE_BYTES_MAX) <= PAGE_BYTES_MAX
            text = page.extract_text(visitor_operand_before=effort) if is_small else UNREAD_PAGE
            yield text[: chars_max - length]
            length += len(text)
            if length >= chars_max:
                break
    except _Exhausted:
        yield UNREAD_REST
    except (PyPdfError, *_FAULTS):
        is_broken = True
    yield {"is_broken": is_broken}


def _drawn_bytes(page: PageObject, enough: int) -> int:
    """How long the instructions of a page are, with those of the forms in it; no more is counted than `enough`."""
    contents = page.get_contents()
    size = 0 if contents is None else len(contents.get_data())
    seen: set[int] = set()
    todo: list[DictionaryObject] = [page]
    while todo and size <= enough:
        forms = _inside(_inside(todo.pop(), "/Resources"), "/XObject")
        for entry in forms.values():
            form = entry.get_object()
            is_form = isinstance(form, StreamObject) and form.get("/Subtype") == "/Form"
            if is_form and id(form) not in seen and size <= enough:
                seen.add(id(form))
                size += len(form.get_data())
                todo.append(form)
    return size


def _inside(holder: DictionaryObject, name: str) -> DictionaryObject:
    entry = holder.get(name)
    inner = entry.get_object() if entry is not None else None
    return inner if isinstance(inner, DictionaryObject) else DictionaryObject()


def main() -> None:
    """Read one file, within limits that hold even if the parent process is gone."""
    chars_max = int(sys.argv[1])
    seconds = int(sys.argv[2])
    os.nice(NICENESS)
    logging.disable()
    for what, limit in ((resource.RLIMIT_AS, MEMORY_BYTES_MAX), (resource.RLIMIT_CPU, seconds)):
        # Not every system has both.
        with suppress(ValueError, OSError):
            resource.setrlimit(what, (limit, limit))
    for line in extract(sys.stdin.buffer.read(), chars_max):
        # JSON can express a lone surrogate, UTF-8 cannot.
        text = line.encode(errors="replace").decode() if isinstance(line, str) else line
        print(json.dumps(text), flush=True)


if __name__ == "__main__":
    main()
