"""Which files of a container does an answer link, and where? Pure.

A model links a file that it has made as `[name](sandbox:/mnt/data/name)`. The citation has the range of the text
`sandbox:/mnt/data/name`. The id of a file is made from its container and its path, so that no list of files is kept.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from hashlib import sha256
from itertools import islice

from msgspec import Struct

from segue.seams.tools import Source

CITATIONS_MAX = 1_000
DATA = "/mnt/data"
_LINK = re.compile(rf"sandbox:({DATA}/[^\s()<>\"'`\]]+)")
# What ends a sentence does not belong to a path.
_TRAIL = ".,;:!?"


class ContainerFileCitation(Struct, frozen=True, tag_field="type", tag="container_file_citation"):
    """A place in a text that stands for a file of a container."""

    container_id: str
    file_id: str
    filename: str
    start_index: int
    end_index: int


def file_id(container_id: str, path: str) -> str:
    """The id of a file, by its path below the folder."""
    return f"cfile_{sha256(f'{container_id}/{path}'.encode()).hexdigest()[:32]}"


def sources(container_id: str, paths: Sequence[str]) -> tuple[Source, ...]:
    """Files that an answer may cite."""
    return tuple(Source(f"{DATA}/{path}", container_id) for path in paths)


def cite(text: str, found: Sequence[Source]) -> list[ContainerFileCitation]:
    """The citations of a text, in its order; of a file in two containers the newer counts."""
    return [
        *islice(_citations(text, {source.url: source.title for source in found}), CITATIONS_MAX)
    ]


def picture_citations(
    drawn: Sequence[Source], linked: Sequence[ContainerFileCitation]
) -> list[ContainerFileCitation]:
    """Citations of pictures that a text does not link: they stand for no part of it."""
    known = {citation.file_id for citation in linked}
    cited = []
    for source in drawn[:CITATIONS_MAX]:
        path = source.url.removeprefix(f"{DATA}/")
        made = file_id(source.title, path)
        if made not in known:
            name = path.rpartition("/")[2]
            cited.append(ContainerFileCitation(source.title, made, name, 0, 0))
    return cited


def _citations(text: str, containers: dict[str, str]) -> Iterator[ContainerFileCitation]:
    for match in _LINK.finditer(text):
        place = match[1]
        trimmed = place if place in containers else place.rstrip(_TRAIL)
        if (container_id := containers.get(trimmed)) is not None:
            path = trimmed.removeprefix(f"{DATA}/")
            end = match.start() + len(f"sandbox:{trimmed}")
            name = path.rpartition("/")[2]
            made = file_id(container_id, path)
            yield ContainerFileCitation(container_id, made, name, match.start(), end)
