"""What does an answer cite, and where?

In: the text of a message, and the sources that this response has found, in the order in which they were numbered. Out:
annotations with their places in the text (docs/protocol.md 3.2). Pure. Places are counted in Unicode
characters, from the first of the mark to one behind its last: `text[start_index:end_index]` is the mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from segue.turn.values import Source
from segue.wire.items import UrlCitation

# An answer that cites more than this has gone astray.
CITATIONS_MAX = 1_000

# Code, where brackets mean something else; a link of Markdown; numbers in brackets, as they were told; an address by
# itself. In this order, because each may contain those behind it.
_MARK = re.compile(
    r"(?P<code>(?s:```.*?(?:```|\Z))|`[^`\n]{1,500}`)"
    r"|\[(?P<words>[^\[\]\n]{0,500})\]\((?P<link>[a-z]{1,10}://[^\s()]*(?:\([^\s()]*\)[^\s()]*)*)\)"
    r"|[\[【](?P<numbers>\d{1,4}(?:\s?,\s?\d{1,4}){0,15})(?:†[^\]】\n]{0,80})?[\]】]"
    r"|(?P<bare>[a-z]{1,10}://[^\s<>\"'`\[\]]+)"
)
# What ends a sentence does not belong to an address.
_TRAIL = ".,;:!?…*_"


class _Mark(NamedTuple):
    start: int
    end: int
    source: Source


def cite(text: str, sources: Sequence[Source]) -> list[UrlCitation]:
    """The annotations of a text, in its order. What is cited without having been found is no citation."""
    if not sources:
        return []
    return [
        UrlCitation(
            start_index=mark.start,
            end_index=mark.end,
            title=mark.source.title,
            url=mark.source.url,
        )
        for _, mark in zip(range(CITATIONS_MAX), _marks(text, sources), strict=False)
    ]


def _marks(text: str, sources: Sequence[Source]) -> Iterator[_Mark]:
    by_url: dict[str, Source] = {}
    for source in sources:
        by_url.setdefault(_plain(source.url), source)
    for found in _MARK.finditer(text):
        if found["code"]:
            continue
        if found["numbers"]:
            for number in dict.fromkeys(re.findall(r"\d+", found["numbers"])):
                if 1 <= int(number) <= len(sources):
                    yield _Mark(found.start(), found.end(), sources[int(number) - 1])
            continue
        url = found["link"] or _trimmed(found["bare"])
        known = by_url.get(_plain(url))
        if known is not None:
            end = found.end() if found["link"] else found.start() + len(url)
            yield _Mark(found.start(), end, known)


def _plain(url: str) -> str:
    """Addresses that everybody takes for one: without the fragment, without the last slash."""
    return url.partition("#")[0].rstrip("/")


def _trimmed(url: str) -> str:
    """An address in a sentence, without what belongs to the sentence."""
    while url and (url[-1] in _TRAIL or (url[-1] == ")" and url.count(")") > url.count("("))):
        url = url[:-1]
    return url
