"""How is a text searched for words? What the indexes of SQLite's FTS5 have in common: of documents, and of tools."""

from __future__ import annotations

import re

# Words of a query that count; more would not change what is found.
WORDS_MAX = 32
# Words by their stems; accents and case do not count.
TOKENIZE = "tokenize = 'porter unicode61 remove_diacritics 2'"


def as_match(query: str) -> str:
    """A query for FTS5: any of its words, each as a plain word whatever it looks like."""
    words = list(dict.fromkeys(re.findall(r"\w+", query.lower())))[:WORDS_MAX]
    return " OR ".join(f'"{word}"' for word in words)
