"""What is each tool called at a chat endpoint, and which tool is meant by a name there?

Chat endpoints know no namespaces, and take names of letters, digits, `_` and `-` only. In: the tools of a request. Out:
one name for each, and by a name one tool. Pure.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable
from hashlib import blake2b

from segue.wire.tools import Offer

# What chat endpoints allow in the name of a function.
PLAIN_NAME_MAX = 64
_NOT_PLAIN = re.compile(r"[^a-zA-Z0-9_-]")


def plain_name(qualified_name: str) -> str:
    """A name for chat endpoints, which know no dots: `fs.read` is `fs__read` to them."""
    return _plain(qualified_name)[:PLAIN_NAME_MAX]


def _plain(qualified_name: str) -> str:
    if qualified_name.isascii() and qualified_name.isidentifier():
        return qualified_name
    return _NOT_PLAIN.sub("_", qualified_name.replace(".", "__")) or "_"


class PlainNames:
    """What each tool is called at a chat endpoint, and which tool is meant by a name there: one by each.

    A name that has to be changed or cut, and is then like that of another tool, gets a digest of itself: at its end, or
    of a long one in place of its middle, because the end tells a model most.
    """

    def __init__(self, offers: Iterable[Offer]) -> None:
        """Of two tools with the same qualified name the first is called."""
        by_name: dict[str, Offer] = {}
        for offer in offers:
            by_name.setdefault(offer.qualified_name, offer)
        self._names = {name: plain_name(name) for name in by_name}
        wanted = Counter(self._names.values())
        clashing = [
            name for name, plain in self._names.items() if name != plain and wanted[plain] > 1
        ]
        taken = {*wanted}
        for name in clashing:
            self._names[name] = _digest_name(name, taken)
            taken.add(self._names[name])
        # The names that would be called otherwise without the other tools.
        self.respelled = frozenset((name, self._names[name]) for name in clashing)
        self._offers = {plain: by_name[name] for name, plain in self._names.items()}

    def name(self, qualified_name: str) -> str:
        """What this tool is called, which may be one of the history that is not offered any more."""
        offered = self._names.get(qualified_name)
        if offered is not None:
            return offered
        plain = plain_name(qualified_name)
        return plain if plain not in self._offers else _digest_name(qualified_name, self._offers)

    def offer(self, name: str) -> Offer | None:
        """The tool that is called so."""
        return self._offers.get(name)


def _digest_name(qualified_name: str, taken: Container[str]) -> str:
    """A plain name that no other tool has."""
    plain = _plain(qualified_name)
    digest = blake2b(qualified_name.encode(), digest_size=4)
    begin = plain
    end = ""
    if len(plain) > PLAIN_NAME_MAX - 9:
        begin = plain[:10]
        end = f"_{plain[-(PLAIN_NAME_MAX - 20) :]}"
    while (name := f"{begin}_{digest.hexdigest()}{end}") in taken:
        digest.update(b"again")
    return name
