"""What must a forced call look like, in the family's own format?

In: how a family spells a call (`Spelling`, found by its format and its template), and the tools of which one must be
called. Out: a structural tag (`tags.py`), and how such a call is begun by us (`form_of`).

A value is held to its schema where the format writes it as JSON. Text between tags is any text, or one of the listed
texts: only the tag ends it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import msgspec

from segue.readers.forced import QUOTE, UNQUOTE, CallForm, Chunks, Forced
from segue.readers.formats import MINIMAX, CallFormat
from segue.readers.offers import forced, format_schema, parameters_of
from segue.readers.tags import (
    Node,
    Sizes,
    any_of,
    check_size,
    json_of,
    many,
    marks_of,
    maybe,
    sequence,
    tag_of,
    text_without,
    too_large,
    words,
)
from segue.schemas.json_schema import CopyBudget, JsonSchema, listed, properties_of, required_of
from segue.seams.model import Scene
from segue.vocabularies.vocabulary import Own, Vocabulary
from segue.wire.tools import Offer, allowed_offers

SLOT = re.compile("(%(?:name|key|string|type|id)%)")
ID = "%id%"
# The id of a call in families that write one, where the model does not choose it.
OWN_ID = "000000000"
ANY_ID: Node = {"type": "regex", "pattern": "[a-zA-Z0-9]{9,10}"}
# Names a parameter that the schema does not know.
ANY_KEY: Node = {"type": "regex", "pattern": "[A-Za-z0-9_]+"}
JSON_QUOTE, PYTHON_QUOTE = '"', "'"
# Objects and lists inside each other, in a notation that is not JSON: more than real tools have.
NESTED_MAX = 16


@dataclass(frozen=True, slots=True)
class Spelling:
    """One call, letter by letter: `%name%` is the tool, `%key%` a parameter, `%string%` whether it is a string,
    `%type%` its type, `%id%` the id of the call."""

    # Before the call, before its arguments, and after them.
    begin: str
    header: str
    end: str
    # Around one value; None: the arguments are one JSON object.
    argument: tuple[str, str] | None = None
    # Around a string; None: a string is the text up to what stands after the value.
    quote: str | None = None
    # What also ends such a text for a reader.
    ends: tuple[str, ...] = ()
    # Between two arguments.
    separator: str = ""
    booleans: tuple[str, ...] = ("true", "false")
    # Whether arguments stand in the order of their names, and not in that of the schema.
    is_sorted: bool = False
    # The tag of what stands in a list, where lists and objects are written in tags.
    item: str = ""

    def written(self, name: str, arguments: Mapping[str, str]) -> re.Pattern[str]:
        """Finds a call of this tool with these texts as arguments, spelt like this."""
        if self.argument is None:
            inside = json.dumps(arguments)
        else:
            quote = self.quote or ""
            opening, closing = self.argument
            inside = self.separator.join(
                f"{opening}{quote}{value}{quote}{closing}".replace("%key%", key)
                for key, value in arguments.items()
            )
        text = f"{self.begin}{self.header}{inside}{self.end}".replace("%name%", name)
        text = text.replace("%string%", "true").replace("%type%", "string")
        return re.compile(re.escape(text).replace(ID, r"[A-Za-z0-9]+"))

    @property
    def unled(self) -> str:
        """What of the header is the model's: an id, or the space before JSON, which most vocabularies join with the
        brace."""
        at = self.header.find(ID)
        return self.header[at if at >= 0 else len(self.header.rstrip(" ")) :]


def _filled(text: str, **slots: str) -> Iterator[Own | str]:
    """These words of the family, and between them what is not the family's: no text of a tool becomes special."""
    for n, part in enumerate(SLOT.split(text)):
        yield slots.get(part.strip("%"), part) if n % 2 else Own(part)


# --- how a call begins ------------------------------------------------------------------------------


# A format that we can read and not spell: a forced call is an object without marks.
BARE_OBJECT = CallForm(
    named=lambda name: (f'{{"name": "{name}", "arguments":',), end="}", is_always_object=True
)


# A call with which spellings are distinguished.
PROBE = ("look", {"q": "x", "r": "y"})


def form_of(format: CallFormat, template: str, written: str = "") -> CallForm:
    """How the family with this format and this template is made to call; `written`: what the template writes of the
    call `PROBE`."""
    rows = [row for row in SPELLINGS if row[0] == format.name]
    exact = (spelling for _, _, spelling in rows if spelling.written(*PROBE).search(written))
    alike = (spelling for _, mark, spelling in rows if mark in template)
    return spelt_form(next(exact, None) or next(alike, None))


def spelt_form(spelling: Spelling | None) -> CallForm:
    """How a family that spells a call so is made to call; None: in an unknown way."""
    if spelling is None:
        return BARE_OBJECT
    space = spelling.header[len(spelling.header.rstrip(" ")) :]
    before = space + QUOTE
    after = UNQUOTE
    if spelling.argument is not None:
        opening, closing = spelling.argument
        quote = spelling.quote or ""
        before = opening + quote
        after = quote + closing
    return CallForm(
        named=partial(_begun, (spelling.begin + spelling.header).rstrip(" ")),
        end=spelling.end.replace(ID, OWN_ID),
        arguments_key=None if spelling != HERMES else "arguments",
        before_object=(Own(HERMES.begin),),
        tagged=partial(tagged_calls, spelling),
        around_input=(Own(_text_of_input(before)), _text_of_input(after)),
        is_json=spelling.argument is None,
    )


def _text_of_input(text: str) -> str:
    return text.replace("%key%", "input").replace("%string%", "true").replace("%type%", "string")


def _begun(text: str, name: str) -> Chunks:
    return tuple(_filled(text, name=name, id=OWN_ID))


def tagged_calls(spelling: Spelling, scene: Scene, vocabulary: Vocabulary) -> Forced | None:
    """A call of one of the tools that must be called, or JSON of the format where a tool may be called too."""
    tags = _CallTags(spelling, vocabulary)
    if len(offers := forced(scene)) == 1:
        led = spelling.begin + spelling.header.removesuffix(spelling.unled)
        call = tags.call(offers[0], header=spelling.unled)
        return _begun(led, offers[0].qualified_name), tag_of(call)
    if offers:
        calls = [tags.call(offer, header=spelling.header) for offer in offers]
        return (Own(spelling.begin),), tag_of(any_of(calls))
    schema = format_schema(scene)
    offers = allowed_offers(scene.head.tool_choice, scene.offers)
    if schema is None or not offers:
        return None
    calls = [tags.call(offer, header=spelling.begin + spelling.header) for offer in offers]
    return (), tag_of(any_of([json_of(msgspec.Raw(schema)), *calls]))


# --- a call as a tag --------------------------------------------------------------------------------


class _CallTags:
    """Writes calls as a family spells them, on its vocabulary."""

    def __init__(self, spelling: Spelling, vocabulary: Vocabulary) -> None:
        self._spelling = spelling
        self._vocabulary = vocabulary
        self._separator = self._marks(spelling.separator)
        self._budget = CopyBudget()
        self._sizes = Sizes()

    def call(self, offer: Offer, *, header: str) -> Node:
        """A call of this tool from this header on, which is what the lead has not written."""
        schema = JsonSchema(parameters_of(offer))
        is_object = self._spelling.argument is None
        arguments = [json_of(schema.root)] if is_object else self._arguments(schema, schema.root)
        begun = self._marks(header, name=offer.qualified_name)
        return sequence([*begun, *arguments, *self._marks(self._spelling.end)])

    def _marks(self, text: str, **slots: str) -> list[Node]:
        nodes: list[Node] = []
        for part in _filled(text, **slots):
            if isinstance(part, Own):
                nodes.extend(marks_of(self._vocabulary, part.text))
            else:
                nodes.append(ANY_ID if part == ID else words(part))
        return nodes

    def _arguments(
        self, schema: JsonSchema, part: Mapping[str, object], depth: int = 0
    ) -> list[Node]:
        properties = properties_of(part)
        if not properties:
            is_open = part.get("additionalProperties") is not False and not self._separator
            return self._any_arguments() if is_open else []
        needed = required_of(part)
        keys = sorted(properties) if self._spelling.is_sorted else [*properties]
        written = [self._argument(schema, key, properties[key], depth) for key in keys]
        is_needed = [key in needed for key in keys]
        if self._separator:
            return self._separated(written, is_needed)
        pairs = zip(written, is_needed, strict=True)
        return [node if must else maybe([node]) for node, must in pairs]

    def _separated(self, nodes: Sequence[Node], is_needed: Sequence[bool]) -> list[Node]:
        """These with separators between them; what is not needed may be left out."""
        before = [maybe([node, *self._separator]) for node in nodes]
        after = [maybe([*self._separator, node]) for node in nodes]
        if not any(is_needed):
            return [maybe([self._some(nodes, before, after)])]
        # What may be left out has its separator on the side of the first that may not.
        first = is_needed.index(True)
        row = [*before[:first], nodes[first]]
        for n in range(first + 1, len(nodes)):
            row.extend([*self._separator, nodes[n]] if is_needed[n] else [after[n]])
        return row

    def _some(self, nodes: Sequence[Node], before: Sequence[Node], after: Sequence[Node]) -> Node:
        """One or more of these, `before` and `after` others. They are divided into halves of about the same size, and
        only the lighter is written twice: once for itself, and once beside the other."""
        if len(nodes) == 1:
            return nodes[0]
        sums = [*accumulate(map(self._sizes.of, nodes))]
        at = min(max(bisect_left(sums, sums[-1] / 2), 1), len(nodes) - 1)
        left = self._some(nodes[:at], before[:at], after[:at])
        right = self._some(nodes[at:], before[at:], after[at:])
        if sums[at - 1] * 2 <= sums[-1]:
            return any_of([sequence([*before[:at], right]), left])
        return any_of([sequence([left, *after[at:]]), right])

    def _any_arguments(self) -> list[Node]:
        """A tool that takes anything gets texts by any names."""
        opening, closing = self._spelling.argument or ("", "")
        before, _, after = opening.partition("%key%")
        key = [*self._marks(before), ANY_KEY, *self._marks(after, string="true", type="string")]
        return [many([*key, self._text(closing), *self._marks(closing)])]

    def _argument(self, schema: JsonSchema, key: str, part: object, depth: int) -> Node:
        opening, closing = self._spelling.argument or ("", "")
        is_string = "string" in schema.types(part)
        value = self._value(schema, part, closing, depth)
        kind = "string" if is_string else _kind_of(part)
        before = self._marks(opening, key=key, string="true" if is_string else "false", type=kind)
        return sequence([*before, value, *self._marks(closing, key=key)])

    def _value(self, schema: JsonSchema, part: object, closing: str, depth: int) -> Node:
        quote = self._spelling.quote
        only = _only(part)
        if "string" in schema.types(part) and quote != JSON_QUOTE:
            are_texts = only and all(isinstance(value, str) for value in only)
            free = [self._text(quote or closing)]
            texts = [words(str(value)) for value in only] if are_texts else free
            quotes = self._marks(quote or "")
            return sequence([*quotes, any_of(texts), *quotes])
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "boolean" and not only:
            return any_of([words(text) for text in self._spelling.booleans])
        is_spelt = quote not in (None, JSON_QUOTE, PYTHON_QUOTE) or bool(self._spelling.item)
        is_json = not is_spelt or kind not in ("object", "array")
        if is_json or not isinstance(part, dict):
            return json_of(schema.alone(part, self._budget))
        if depth >= NESTED_MAX:
            raise too_large("tools")
        if self._spelling.item:
            node = self._nested(schema, part, kind, depth)
        elif kind == "object":
            node = sequence([words("{"), *self._arguments(schema, part, depth + 1), words("}")])
        else:
            item = self._value(schema, part.get("items"), closing, depth + 1)
            node = sequence([words("["), maybe([item, many([words(","), item])]), words("]")])
        # The sooner, the less is written for nothing.
        check_size(self._sizes.of(node), "tools")
        return node

    def _nested(
        self, schema: JsonSchema, part: Mapping[str, object], kind: object, depth: int
    ) -> Node:
        """An object or a list in tags."""
        if kind == "object":
            return sequence(self._arguments(schema, part, depth + 1) or [words("")])
        return many([self._argument(schema, self._spelling.item, part.get("items"), depth + 1)])

    def _text(self, closing: str) -> Node:
        return text_without(closing.partition("%key%")[0].strip(), *self._spelling.ends)


def _kind_of(part: object) -> str:
    """The type of a value, in the words of templates that name it."""
    kind = part.get("type") if isinstance(part, dict) else None
    return "number" if kind == "integer" else kind if isinstance(kind, str) else "object"


def _only(part: object) -> list[object]:
    """The only values that a schema allows, if it lists them."""
    if isinstance(part, dict) and "const" in part:
        return [part["const"]]
    return listed(part, "enum")


# --- the families -----------------------------------------------------------------------------------

HERMES = Spelling("<tool_call>\n", '{"name": "%name%", "arguments": ', "}\n</tool_call>")
XML = Spelling(
    "<tool_call>\n",
    "<function=%name%>\n",
    "</function>\n</tool_call>",
    ("<parameter=%key%>\n", "\n</parameter>\n"),
    ends=("<parameter=", "</function>"),
    # Templates write Python's words, models either.
    booleans=("true", "false", "True", "False"),
)
PYTHON = Spelling(
    "<|python_start|>[", "%name%(", ")]<|python_end|>", ("%key%=", ""), JSON_QUOTE,
    separator=", ", booleans=("True", "False"),
)  # fmt: skip
MISTRAL_CALL = Spelling("[TOOL_CALLS]", "%name%[ARGS]", "")
KIMI_HEADER = "<|tool_call_begin|>functions.%name%:0<|tool_call_argument_begin|>"


def _invoke(outer: str, before: str = "", attribute: str = "") -> Spelling:
    parameter = f"{before}parameter"
    return Spelling(
        f"<{outer}>\n",
        f'<{before}invoke name="%name%">\n',
        f"</{before}invoke>\n</{outer}>",
        (f'<{parameter} name="%key%"{attribute}>', f"</{parameter}>\n"),
        ends=(f"<{parameter} name=", f"</{before}invoke>"),
    )


def _keyed(newline: str, last: str = "") -> Spelling:
    value = f"<arg_key>%key%</arg_key>{newline}<arg_value>"
    closing = "</arg_value>" if last else f"</arg_value>{newline}"
    return Spelling("<tool_call>", f"%name%{newline}", f"{last}</tool_call>", (value, closing))


def _deepseek(header: str, end: str = "") -> Spelling:
    return Spelling(
        "<｜tool▁calls▁begin｜>", f"<｜tool▁call▁begin｜>{header}",
        f"{end}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    )  # fmt: skip


def _list(begin: str, end: str, header: str = HERMES.header) -> Spelling:
    return Spelling(f"{begin}[", header, f"}}]{end}")


DSML = "｜DSML｜"
TYPED = ' string="%string%"'
# By the name of the format (`formats.py`); of several rows, the first whose mark stands in the template is taken.
SPELLINGS: tuple[tuple[str, str, Spelling], ...] = (
    ("hermes", "", HERMES),
    ("llama3", "", Spelling("", '{"name": "%name%", "parameters": ', "}")),
    ("xml", "", XML),
    ("seed", "", replace(
        XML, begin="<seed:tool_call>\n", end="</function>\n</seed:tool_call>",
        argument=("<parameter=%key%>", "</parameter>\n"),
    )),
    ("minimax-m2", "", _invoke("minimax:tool_call")),
    ("dsml", "tool_calls>", _invoke(f"{DSML}tool_calls", DSML, TYPED)),
    ("dsml", "", _invoke(f"{DSML}function_calls", DSML, TYPED)),
    ("glm", "</arg_key><arg_value>", _keyed("")),
    ("glm", "", _keyed("\n")),
    ("glm", "", _keyed("\n", "\n")),
    ("minimax-m3", "", Spelling(
        f"{MINIMAX}<tool_call>\n", f'{MINIMAX}<invoke name="%name%">',
        f"{MINIMAX}</invoke>\n{MINIMAX}</tool_call>", (f"{MINIMAX}<%key%>", f"{MINIMAX}</%key%>"), item="item",
    )),
    ("kimi-k3", "", Spelling(
        "<|open|>tools<|sep|>", '<|open|>call tool="%name%" index="1"<|sep|>',
        "<|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>",
        ('<|open|>argument key="%key%" type="%type%"<|sep|>', "<|close|>argument<|sep|>"),
    )),
    ("minicpm5", "", Spelling(
        "<function", ' name="%name%">', "</function>", ('<param name="%key%">', "</param>"),
        ends=("<param name=", "</function>"), booleans=("true", "false", "True", "False"),
    )),
    ("solar", "", Spelling(
        "<|tool_calls|>", "<|tool_call:begin|>%id%<|tool_call:name|>%name%<|tool_call:args|>", "<|tool_call:end|>",
    )),
    ("gigachat3.1", "", Spelling("<|function_call|>", HERMES.header, "}")),
    ("gigachat3", "", Spelling("function call<|role_sep|>\n", HERMES.header, "}")),
    ("kimi-k2", "", Spelling(
        "<|tool_calls_section_begin|>", KIMI_HEADER, "<|tool_call_end|><|tool_calls_section_end|>",
    )),
    ("deepseek-v3", "```json", _deepseek("function<｜tool▁sep｜>%name%\n```json\n", "\n```")),
    ("deepseek-v3", "", _deepseek("%name%<｜tool▁sep｜>")),
    ("gemma4", "", Spelling(
        "<|tool_call>", "call:%name%{", "}<tool_call|>", ("%key%:", ""), '<|"|>', separator=",",
        is_sorted=True,
    )),
    ("pythonic", "", PYTHON),
    ("lfm2", "format_arg_value", replace(
        PYTHON, begin="<|tool_call_start|>[", end=")]<|tool_call_end|>", quote="'",
    )),
    ("lfm2", "", replace(PYTHON, begin="<|tool_call_start|>[", end=")]<|tool_call_end|>")),
    ("mistral", "[CALL_ID]", replace(MISTRAL_CALL, header="%name%[CALL_ID]%id%[ARGS]")),
    ("mistral", "[ARGS]", MISTRAL_CALL),
    ("mistral", "", Spelling("[TOOL_CALLS][", HERMES.header, ', "id": "%id%"}]')),
    ("command-r", "", Spelling(
        "<|START_ACTION|>[\n    ",
        '{"tool_call_id": "0", "tool_name": "%name%", "parameters": ', "}\n]<|END_ACTION|>",
    )),
    ("apriel", "begin_of_document", replace(HERMES, begin="<tool_calls>\n", end="}\n</tool_calls>")),
    ("apriel", "", _list("<tool_calls>", "</tool_calls>")),
    ("granite3", "", _list("<|tool_call|>", "")),
)  # fmt: skip
