"""What does an answer cite, and where?

In: the text of a message, and the sources that this response has found, in the order in which they were numbered. Out:
annotations with their places in the text (docs/protocol.md 3.2). Pure. Places are counted in Unicode
characters, from the first of the mark to one after its last: `text[start_index:end_index]` is the mark.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import islice

from segue.seams.tools import Source
from segue.wire.items import UrlCitation

# An answer that cites more than this has gone astray.
CITATIONS_MAX = 1_000

# Code, where brackets mean something else; a link of Markdown; numbers in brackets, as the model is asked to write; a
# bare URL. In this order, because each may contain the ones after it.
_MARK = re.compile(
    r"(?P<code>(?s:```.*?(?:```|\Z))|`[^`\n]{1,500}`)"
    r"|\[(?P<words>[^\[\]\n]{0,500})\]\((?P<link>[a-z]{1,10}://[^\s()]*(?:\([^\s()]*\)[^\s()]*)*)\)"
    r"|[\[【](?P<numbers>\d{1,4}(?:\s?,\s?\d{1,4}){0,15})(?:†[^\]】\n]{0,80})?[\]】]"
    r"|(?P<bare>[a-z]{1,10}://[^\s<>\"'`\[\]]+)"
)
# What ends a sentence does not belong to a URL.
_TRAIL = ".,;:!?…*_"


def cite(text: str, sources: Sequence[Source]) -> list[UrlCitation]:
    """The annotations of a text, in its order. A mark of something that was not found is no citation."""
    return [*islice(_citations(text, sources), CITATIONS_MAX)] if sources else []


def _citations(text: str, sources: Sequence[Source]) -> Iterator[UrlCitation]:
    # Of two sources with the same URL the first counts.
    by_url = {_plain(source.url): source for source in reversed(sources)}
    for mark in _MARK.finditer(text):
        start, end = mark.span()
        cited: list[Source | None] = []
        if mark["numbers"]:
            numbers = [int(number) for number in dict.fromkeys(re.findall(r"\d+", mark["numbers"]))]
            cited = [sources[number - 1] for number in numbers if 1 <= number <= len(sources)]
        elif not mark["code"]:
            url = mark["link"] or _trimmed(mark["bare"])
            cited = [by_url.get(_plain(url))]
            end = end if mark["link"] else start + len(url)
        for source in filter(None, cited):
            yield UrlCitation(start_index=start, end_index=end, title=source.title, url=source.url)


def _plain(url: str) -> str:
    """The same for URLs of the same page: without the fragment, without the last slash."""
    return url.partition("#")[0].rstrip("/")


def _trimmed(url: str) -> str:
    """A URL in a sentence, without what belongs to the sentence."""
    unopened = url.count(")") - url.count("(")
    end = len(url)
    while end and (url[end - 1] in _TRAIL or (url[end - 1] == ")" and unopened > 0)):
        end -= 1
        unopened -= url[end] == ")"
    return url[:end]
