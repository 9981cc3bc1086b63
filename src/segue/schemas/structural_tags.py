"""How does llama.cpp follow a structural tag?

In: a structural tag, the JSON in which vLLM and SGLang take what an answer must look like (`readers/tags.py`). Out: the
same as a Lark grammar for a llama.cpp with llguidance, or as GBNF for one without. GBNF knows no JSON schema: there
JSON is held only to the types at its top.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from segue.schemas.json_schema import JsonSchema

_Node = Mapping[str, Any]

# JSON as templates and models write it, and no endless white space, which small models like.
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
# JSON in GBNF, and which rule is for which type of a schema.
GBNF_JSON = r"""
json ::= object | array | string | number | boolean | null
object ::= "{" ( string ": " json ( ", " string ": " json )* )? "}"
array ::= "[" ( json ( ", " json )* )? "]"
string ::= "\"" ( [^"\\\x00-\x1F] | "\\" ( ["\\/bfnrt] | "u" [0-9a-fA-F]{4} ) )* "\""
number ::= integer ( "." [0-9]+ )? ( [eE] [-+]? [0-9]+ )?
integer ::= "-"? ( "0" | [1-9] [0-9]{0,15} )
boolean ::= "true" | "false"
null ::= "null"
"""
IN_CLASS = re.compile(r"[\\\]\[^-]")


def lark(tag: str) -> str:
    """The grammar for llguidance."""
    rules: dict[str, str] = {}

    def rule(kind: str, body: str) -> str:
        return rules.setdefault(body, f"{kind}{len(rules)}")

    def leaf(node: _Node) -> str:
        match node["type"]:
            case "json_schema":
                schema = node["json_schema"]
                styled = schema if isinstance(schema, bool) else {"x-guidance": JSON_STYLE} | schema
                return rule("json", f"%json {json.dumps(styled)}")
            case "any_text":
                banned = "|".join(map(_in_regex, node["excludes"]))
                text = f"(/(?s:.*)/ & ~/(?s:.*)({banned})(?s:.*)/)"
                return rule("TEXT", " ".join([text, *map(_literal, node.get("ended", ()))]))
            case "regex":
                return rule("WORD", f"/{node['pattern']}/")
            case _:
                return _literal(node["value"])

    start = _expression(_with_ends(json.loads(tag)["format"]), leaf)
    return "\n".join([f"start: {start}", *(f"{name}: {body}" for body, name in rules.items())])


def _with_ends(node: Any) -> Any:
    """A text together with the words after it: llguidance takes as much as can be text, and never gives back."""
    if isinstance(node, list):
        found: list[Any] = []
        for one in map(_with_ends, node):
            is_ended = bool(found) and found[-1]["type"] == "any_text"
            if is_ended and one["type"] == "const_string":
                found[-1] = found[-1] | {"ended": [one["value"]]}
            else:
                found.append(one)
        return found
    inner = "elements" if "elements" in node else "content"
    return node | {inner: _with_ends(node[inner])} if inner in node else node


def gbnf(tag: str) -> str:
    """The grammar for llama.cpp itself."""
    texts: dict[tuple[str, ...], str] = {}

    def leaf(node: _Node) -> str:
        match node["type"]:
            case "json_schema":
                return _json_rule(node["json_schema"])
            case "any_text":
                return texts.setdefault(tuple(node["excludes"]), f"text{len(texts)}")
            case "regex":
                return str(node["pattern"])
            case _:
                return _literal(node["value"])

    start = _expression(json.loads(tag)["format"], leaf)
    rules = (_without(name, excluded) for excluded, name in texts.items())
    return "\n".join([f"root ::= {start}", *rules]) + GBNF_JSON


def _expression(node: _Node, leaf: Callable[[_Node], str]) -> str:
    """What both have in common."""
    match node["type"]:
        case "sequence":
            return f"({' '.join(_expression(one, leaf) for one in node['elements'])})"
        case "or":
            return f"({' | '.join(_expression(one, leaf) for one in node['elements'])})"
        case "optional":
            return f"({_expression(node['content'], leaf)})?"
        case "star":
            return f"({_expression(node['content'], leaf)})*"
        case "token":
            return f"<[{node['token']}]>"
        case _:
            return leaf(node)


def _in_regex(text: str) -> str:
    return re.escape(text).replace("/", r"\/").replace("\n", r"\n")


def _json_rule(schema: object) -> str:
    types = JsonSchema(schema).known_types(schema)
    return f"({' | '.join(types)})" if types else "json"


def _without(name: str, excluded: Sequence[str]) -> str:
    """Rules for any text in which none of these stands: one for each beginning of one that may have been written."""
    states = ["", *sorted({text[:n] for text in excluded for n in range(1, len(text))})]
    letters = sorted({letter for text in excluded for letter in text})
    rules = []
    for n, state in enumerate(states):
        ways, watched = [], ""
        for letter in letters:
            written = state + letter
            longest = max((one for one in states if written.endswith(one)), key=len)
            is_whole = written.endswith(tuple(excluded))
            watched += letter if longest or is_whole else ""
            if longest and not is_whole:
                ways.append(f"{_literal(letter)} {name}-{states.index(longest)}")
        others = IN_CLASS.sub(lambda found: "\\" + found[0], watched).replace("\n", "\\n")
        rules.append(f"{name}-{n} ::= ({' | '.join([f'[^{others}] {name}-0', *ways])})?")
    return "\n".join([f"{name} ::= {name}-0", *rules])


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
