"""Of what is a structural tag made?

A structural tag is the JSON in which vLLM and SGLang take what an answer must look like; other engines translate it
(`schemas/structural_tags.py`). Out: its parts. Special tokens are named by their ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from segue.errors import InvalidRequest
from segue.schemas.followed import LEVELS_MAX, UNROLLED_MAX, can_be_followed
from segue.seams.model import Grammar
from segue.vocabularies.vocabulary import Own, Vocabulary

Node = dict[str, object]
# What an engine is asked to follow: many times what the largest real tools need, and still written in milliseconds.
GRAMMAR_BYTES_MAX = 4 * 1024 * 1024
# Around the parts of a node.
NODE_BYTES = 40
# Longer rows in a row stay rows of their own: in nested objects each level would copy all that is inside it.
JOINED_MAX = 32


def tag_of(node: Node) -> Grammar:
    """The whole tag. A part may stand in it more than once, so it is measured before it is written."""
    check_size(Sizes().of(node), "tools")
    tag = {"type": "structural_tag", "format": node}
    return Grammar("structural_tag", msgspec.json.encode(tag).decode())


def check_size(size: int, param: str) -> None:
    if size > GRAMMAR_BYTES_MAX:
        raise too_large(param)


def check_followed(held: bytes | Grammar, param: str) -> None:
    """Refuse what the engine's library would write out without end, or could not walk down."""
    if not can_be_followed(held):
        raise InvalidRequest(
            "The engine cannot hold the answer to these tools or this schema: written out item by item, lists "
            f"('minItems', 'maxItems', 'prefixItems') and what 'allOf' joins would have more than {UNROLLED_MAX:,} "
            f"parts, or more than {LEVELS_MAX:,} parts lead to each other by '$ref'.",
            code="unsupported_value",
            param=param,
        )


def too_large(param: str) -> InvalidRequest:
    """The refusal of what an engine should not be asked to follow."""
    return InvalidRequest(
        "The engine cannot hold the answer to these tools or this schema: the grammar would be larger than "
        f"{GRAMMAR_BYTES_MAX // 1024 // 1024} MiB, or nested too deep. Use fewer or smaller tools or schemas, or leave "
        "the choice to the model.",
        code="unsupported_value",
        param=param,
    )


class Sizes:
    """About how many bytes nodes will be. A node that stands in many places is measured once."""

    def __init__(self) -> None:
        # By identity; the nodes are kept so that no other gets the same.
        self._known: dict[int, tuple[Node, int]] = {}

    def of(self, node: Node) -> int:
        if (known := self._known.get(id(node))) is not None:
            return known[1]
        inner = (
            node["elements"]
            if "elements" in node
            else [node["content"]]
            if "content" in node
            else []
        )
        assert isinstance(inner, list)
        size = NODE_BYTES + sum(map(self.of, inner)) if inner else len(msgspec.json.encode(node))
        self._known[id(node)] = node, size
        return size


def words(text: str) -> Node:
    return {"type": "const_string", "value": text}


def json_of(schema: object) -> Node:
    # Encoded at once, because it may be written more than once.
    return {"type": "json_schema", "json_schema": msgspec.Raw(msgspec.json.encode(schema))}


def sequence(nodes: Sequence[Node]) -> Node:
    """These in a row. Words next to each other become one: a text ends at the words after it, taken as a whole."""
    joined: list[Node] = []
    for node in nodes:
        inner = node.get("elements") if node["type"] == "sequence" else None
        for element in inner if isinstance(inner, list) and len(inner) <= JOINED_MAX else [node]:
            if joined and element["type"] == joined[-1]["type"] == "const_string":
                joined[-1] = words(f"{joined[-1]['value']}{element['value']}")
            else:
                joined.append(element)
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
