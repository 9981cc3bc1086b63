"""Of which marks, words and signs is a text made? So that two texts of a template can be compared.

An atom is a special token of the vocabulary, a tag as XML has it, an upper-case word in brackets, a word, a sign, or
one letter of white space.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

TAG = r"</?[^\W\d][^<>\s/]*(?:\s[^<>\n]{0,120})?>"
BRACKETED = r"\[/?[A-Z][A-Z_]+\]"
# Like a mark, and no text that people write: a tag has three letters or more.
MARK_LIKE = re.compile(rf"(?:</?[^<>/\n]{{3,}}>|{BRACKETED})\Z")
# The beginning of a tag in which the name of a tool follows.
OPEN_TAG = re.compile(r"<[A-Za-z_:|]{3,}[^<>\n]*\Z")
Atoms = tuple[str, ...]


class Lexer:
    """Cuts texts into atoms."""

    def __init__(self, specials: Iterable[str]) -> None:
        # Runs of white space are tokens of some vocabularies, and no marks.
        named = [name for name in specials if name.strip() and len(name) > 1]
        self._specials = frozenset(named)
        longest_first = sorted(named, key=len, reverse=True)
        either = "|".join(map(re.escape, longest_first)) or "(?!)"
        # A tag whose name begins with a token is a tag.
        tagged = rf"</?(?:{either})[^<>\n]{{1,120}}>"
        self._atom = re.compile(rf"{tagged}|{either}|{TAG}|{BRACKETED}|\s|\w+|.", re.DOTALL)

    def atoms(self, text: str) -> Atoms:
        return tuple(self._atom.findall(text))

    def is_mark(self, atom: str) -> bool:
        """Whether only a model that means it writes this."""
        return atom in self._specials or MARK_LIKE.match(atom) is not None

    def begins_with_mark(self, text: str) -> bool:
        atoms = self.atoms(text)
        return bool(atoms) and (self.is_mark(atoms[0]) or OPEN_TAG.match(text) is not None)


def is_same(atom: str, other: str) -> bool:
    """Whether two atoms are the same; a number may count calls."""
    return atom == other or (atom.isdigit() and other.isdigit())


def common_prefix(texts: Sequence[str], others: Sequence[str]) -> int:
    """With how many same atoms both begin."""
    pairs = zip(texts, others, strict=False)
    return next(
        (n for n, (atom, other) in enumerate(pairs) if atom != other), min(len(texts), len(others))
    )


def common_suffix(texts: Sequence[str], others: Sequence[str]) -> int:
    """With how many same atoms both end; numbers are alike."""
    pairs = zip(reversed(texts), reversed(others), strict=False)
    return next(
        (n for n, (atom, other) in enumerate(pairs) if not is_same(atom, other)),
        min(len(texts), len(others)),
    )


def counted(texts: Sequence[str], others: Sequence[str]) -> str:
    """The text of these atoms, in which a number that differs from the others is `%index%`; both are of one length."""
    return "".join(
        "%index%" if atom != other else atom for atom, other in zip(texts, others, strict=True)
    )
