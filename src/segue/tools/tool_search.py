"""Which of the deferred tools does the model mean? Pure.

In: the arguments of a search, and the tools that it may find. Out: the best of them, as definitions to be loaded.
Ranked as documents are (BM25): words that few tools have count more, a word in a name counts more than one in a
description, and long descriptions gain nothing by their length. A tool that is called by its name is always found.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

import msgspec
from msgspec import UNSET, Raw
from msgspec.structs import replace

from segue.wire.codec import as_item
from segue.wire.items import Item, ToolSearchCall, ToolSearchOutput
from segue.wire.tools import CustomTool, FunctionTool, NamespaceTool, Offer

# What is loaded stays in the prompt for the rest of the chain.
FOUND_MAX = 8
# The usual constants: how soon repeating a word stops counting, and how much length counts against it.
REPEATS, LENGTH = 1.2, 0.75
# How much a word counts by where it stands.
IN_NAME, IN_NAMESPACE, IN_PARAMETER, IN_TEXT = 4.0, 2.5, 1.5, 1.0
# Above anything that words can reach.
BY_NAME = 1_000.0

WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+|[^\W\d_a-zA-Z]+")
NULL = Raw(b"null")

Words = Mapping[str, float]


def answer(call: ToolSearchCall, offers: Sequence[Offer]) -> Item:
    """The output of a search that we run ourselves, with what it loads."""
    wanted = "" if call.arguments is UNSET else _texts(msgspec.json.decode(call.arguments))
    # The same letters behind the prefix tell which call it belongs to: neither has a call_id.
    letters = (call.id or "").rpartition("_")[2]
    return as_item(
        ToolSearchOutput(
            id=f"tso_{letters}",
            call_id=None,
            execution="server",
            status="completed",
            tools=[*definitions_of(search(wanted, offers))],
        )
    )


def search(wanted: str, offers: Sequence[Offer]) -> list[Offer]:
    """The tools that fit best, best first; those that share no word with what is wanted are left out."""
    documents = [_words_of(offer) for offer in offers]
    rarity = _rarity(documents)
    mean = sum(sum(words.values()) for words in documents) / max(len(documents), 1)
    asked = set(_words(wanted))
    named = set(re.findall(r"[\w.-]+", wanted.lower()))
    scores = [
        _score(asked, words, rarity, mean) + (BY_NAME if _is_named(offer, named) else 0)
        for offer, words in zip(offers, documents, strict=True)
    ]
    ranked = sorted(range(len(offers)), key=lambda n: (-scores[n], n))
    return [offers[n] for n in ranked[:FOUND_MAX] if scores[n] > 0]


def definitions_of(offers: Sequence[Offer]) -> list[FunctionTool | CustomTool | NamespaceTool]:
    """Whole definitions; those of one namespace stand in it together."""
    spaces: dict[str, list[FunctionTool | CustomTool]] = {}
    about: dict[str, str] = {}
    found: list[FunctionTool | CustomTool | str] = []
    for offer in offers:
        if offer.namespace is None:
            found.append(_complete(offer.tool))
            continue
        if offer.namespace not in spaces:
            found.append(offer.namespace)
        spaces.setdefault(offer.namespace, []).append(_complete(offer.tool))
        about[offer.namespace] = offer.about
    return [
        NamespaceTool(name=one, description=about[one], tools=spaces[one])
        if isinstance(one, str)
        else one
        for one in found
    ]


def _complete(tool: FunctionTool | CustomTool) -> FunctionTool | CustomTool:
    """A function as responses show it, with its nullable keys."""
    if isinstance(tool, CustomTool):
        return tool
    return replace(
        tool,
        description=None if tool.description is UNSET else tool.description,
        parameters=NULL if tool.parameters is UNSET else tool.parameters,
        strict=None if tool.strict is UNSET else tool.strict,
    )


def _texts(value: object) -> str:
    """Every text in there: a search may be asked in any shape."""
    match value:
        case str():
            return value
        case list():
            return " ".join(map(_texts, value))
        case dict():
            return " ".join(map(_texts, value.values()))
        case _:
            return ""


def _words(text: str) -> list[str]:
    """Lower case, names taken apart (`getUser_id` is three words), and one form for one and many."""
    found = [word.lower() for word in WORD.findall(text)]
    return [word[:-1] if len(word) > 3 and word.endswith("s") else word for word in found]


def _words_of(offer: Offer) -> Words:
    weights: dict[str, float] = {}
    description = offer.tool.description
    for text, weight in (
        (offer.tool.name, IN_NAME),
        (offer.namespace or "", IN_NAMESPACE),
        (" ".join(_parameters(offer.tool)), IN_PARAMETER),
        (description if isinstance(description, str) else "", IN_TEXT),
        (offer.about, IN_TEXT),
    ):
        for word in _words(text):
            weights[word] = weights.get(word, 0) + weight
    return weights


def _parameters(tool: FunctionTool | CustomTool) -> list[str]:
    if isinstance(tool, CustomTool) or not isinstance(tool.parameters, Raw):
        return []
    schema = msgspec.json.decode(tool.parameters)
    properties = schema.get("properties") if isinstance(schema, dict) else None
    return [str(name) for name in properties] if isinstance(properties, dict) else []


def _rarity(documents: Sequence[Words]) -> Words:
    """How much each word tells one tool from the others."""
    counts = Counter(word for words in documents for word in words)
    total = len(documents)
    return {
        word: math.log(1 + (total - count + 0.5) / (count + 0.5)) for word, count in counts.items()
    }


def _score(asked: set[str], words: Words, rarity: Words, mean: float) -> float:
    length = 1 - LENGTH + LENGTH * sum(words.values()) / (mean or 1)
    return sum(
        rarity[word] * words[word] * (REPEATS + 1) / (words[word] + REPEATS * length)
        for word in asked
        if word in words
    )


def _is_named(offer: Offer, named: set[str]) -> bool:
    return bool(named & {offer.qualified_name.lower(), offer.tool.name.lower()})
