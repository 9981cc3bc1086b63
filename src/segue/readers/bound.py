"""What is a model family on one vocabulary? What all readers of its answers share."""

from __future__ import annotations

from dataclasses import dataclass, field

from segue.seams.model import ItemText
from segue.seams.prompt import IdArray
from segue.vocabularies.vocabulary import Vocabulary


@dataclass(frozen=True, slots=True)
class BoundFamily:
    """What a family is on one vocabulary, and what all readers of its answers share."""

    vocabulary: Vocabulary
    fingerprint: str
    cue: IdArray[int]
    stops: frozenset[int]
    seal: IdArray[int]
    # Tokens that are plain text wherever they stand, ready to be sent; None: the token is not plain.
    plain_tokens: dict[int, ItemText | None] = field(default_factory=dict)
