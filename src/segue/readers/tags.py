"""Of what is a structural tag made?

A structural tag is the JSON in which vLLM and SGLang take what an answer must look like; other engines translate it
(`engines/structural_tags.py`). Out: its parts. Special tokens are named by their ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from segue.turn.values import Grammar
from segue.vocabularies.vocabulary import Own, Vocabulary

Node = dict[str, object]


def tag_of(node: Node) -> Grammar:
    """The whole tag."""
    tag = {"type": "structural_tag", "format": node}
    return Grammar("structural_tag", msgspec.json.encode(tag).decode())


def words(text: str) -> Node:
    return {"type": "const_string", "value": text}


def json_of(schema: object) -> Node:
    return {"type": "json_schema", "json_schema": schema}


def sequence(nodes: Sequence[Node]) -> Node:
    """These in a row. Words next to each other become one: a text ends at the words after it, taken as a whole."""
    joined: list[Node] = []
    for node in nodes:
        inner = node["elements"] if node["type"] == "sequence" else [node]
        assert isinstance(inner, list)
        for one in inner:
            if joined and one["type"] == joined[-1]["type"] == "const_string":
                joined[-1] = words(f"{joined[-1]['value']}{one['value']}")
            else:
                joined.append(one)
    return joined[0] if len(joined) == 1 else {"type": "sequence", "elements": joined}


def any_of(nodes: Sequence[Node]) -> Node:
    return nodes[0] if len(nodes) == 1 else {"type": "or", "elements": nodes}


def maybe(nodes: Sequence[Node]) -> Node:
    return {"type": "optional", "content": sequence(nodes)}


def many(nodes: Sequence[Node]) -> Node:
    return {"type": "star", "content": sequence(nodes)}


def text_without(*excluded: str) -> Node:
    """Any text in which none of these stands."""
    return {"type": "any_text", "excludes": excluded}


def marks_of(vocabulary: Vocabulary, text: str) -> list[Node]:
    """Words of the family, in which special tokens are special."""
    nodes: list[Node] = []
    for part in vocabulary.parts((Own(text),)):
        if isinstance(part, str):
            nodes.extend([words(part)] if part else [])
            continue
        id = vocabulary.special(part.special)
        is_text = bool(vocabulary.bytes_of(id))
        nodes.append(words(part.special) if is_text else {"type": "token", "token": id})
    return nodes
