"""How does a model family write a call, and a thought?

A `CallFormat` is a value: the marks around calls, and the shapes that a call between them may have. `FORMATS` has a row
for every format; `format_of` finds the row of a model by the marks that stand in its chat template.

Patterns are written as they read: `%name%` is the name of the tool, `%key%` of a parameter (`%tag%` where it is a tag),
`%type%` its type, `%any%` something that does not matter, and a space is any white space or none. A mark may be a
special token of the vocabulary (`marks.py`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Tags:
    """Arguments in tags: every parameter in tags of its own, its value as text."""

    # Before a value.
    opening: str
    closing: str
    # Also end a value, where its own end is missing: the next parameter, and the end of the call.
    missed_next: str = ""
    missed_ends: tuple[str, ...] = ()
    # Whether a newline after the first tag and before the last belongs to the tags.
    is_wrapped: bool = False
    # Whether only the newline before the last does.
    is_ended_on_line: bool = False
    # Stands before the tags of lists and objects inside a value.
    nested: str = ""
    # May stand around a value that holds letters of tags.
    raw: tuple[str, str] | None = None
    # May stand between two values, beside white space.
    comma: str = ""


@dataclass(frozen=True, slots=True)
class Notation:
    """Arguments in an object notation that is not JSON."""

    # Stand around a string.
    quotes: tuple[str, ...]
    # Whether a backslash escapes.
    has_escapes: bool = False
    # Whether the object is open already, after the header.
    is_open: bool = False


@dataclass(frozen=True, slots=True)
class CallShape:
    """One way to write a call."""

    # Stands before the arguments.
    header: str
    # One of these follows the header, and is part of the arguments or the end.
    ahead: tuple[str, ...] = ()
    # How arguments are written; None: as JSON.
    arguments: Tags | Notation | None = None
    # Closes the call after its arguments; `}` with other keys before it, and a mark after it.
    closing: str = ""
    # A pattern of what in a name is not part of it.
    noise: str = ""


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family marks calls and thoughts."""

    name: str
    # All of these stand in the chat template of such a model.
    known_by: tuple[str, ...]
    # Any of these begins calls, and any of the ends ends them.
    begins: tuple[str, ...]
    ends: tuple[str, ...]
    shapes: tuple[CallShape, ...]
    # Around a thought.
    think: str = "<think>"
    thought: str = "</think>"
    # Marks that say nothing.
    dropped: tuple[str, ...] = ()
    # White space that stands between the cue and an answer, and between the answer and its end.
    gap: str = ""
    tail: str = ""
    # Begins the header of a call; the call of a tool that there is may stand without the marks around it.
    loose: str = ""
    # Whether calls stand in a list.
    is_listed: bool = False
    # Whether calls that begin with the name of the tool stand on lines of their own, up to the end of them all.
    is_lined: bool = False
    # Whether a call is a bare object, as the beginning of an answer.
    is_bare: bool = False
    # Whether an answer that is nothing but the JSON of a call, in a fence or not, is meant as a call: small models
    # forget the marks.
    is_guessed: bool = False
    # Whether what closes a forced call is ours: the engine writes only the JSON of the call and stops after it.
    is_mended: bool = False


# --- shapes ---------------------------------------------------------------------------------------

OBJECT = CallShape('{ "name" : "%name%" , "arguments" : ', ("{",), closing="}")
PARAMETERS = CallShape('{ "name" : "%name%" , "parameters" : ', ("{",), closing="}")
OBJECTS = (OBJECT, PARAMETERS)
FUNCTION = CallShape(
    "<function=%name%>",
    arguments=Tags(
        "<parameter=%key%>",
        "</parameter>",
        "\n<parameter=",
        ("\n</function>",),
        is_wrapped=True,
    ),
    closing="</function>",
)


def _invoke(before: str, attributes: str, after: str = ">") -> CallShape:
    """`<invoke name="…">` with parameters in it; `before` stands before both words."""
    return CallShape(
        f'<{before}invoke name="%name%"%any%{after}',
        arguments=Tags(
            f"<{before}parameter name={attributes}{after}",
            f"</{before}parameter{after}",
            f"\n<{before}parameter name=",
            (f"\n</{before}invoke{after}",),
        ),
        closing=f"</{before}invoke{after}",
    )


# A name, and each parameter as a key and a value.
KEYED = CallShape(
    "%name% ",
    ("<arg_key>", "</tool_call>"),
    Tags("<arg_key> %key% </arg_key> <arg_value>", "</arg_value>"),
)


def _named(before: str, after: str, closing: str = "", noise: str = "") -> CallShape:
    """A name between marks, then JSON."""
    ahead = ("{", closing) if closing else ("{",)
    return CallShape(f"{before} %name% {after} ", ahead, closing=closing, noise=noise)


# --- the table ------------------------------------------------------------------------------------

HERMES = CallFormat("hermes", ("<tool_call>",), ("<tool_call>",), ("</tool_call>",), OBJECTS)
LLAMA3 = CallFormat(
    "llama3", ('"parameters": ', "ipython"), ("<|python_tag|>",), (";",), OBJECTS, is_bare=True
)
MISTRAL_LIST = CallFormat(
    "mistral-list", ("[TOOL_CALLS]",), ("[TOOL_CALLS]",), (), OBJECTS, is_listed=True
)
MISTRAL = replace(
    MISTRAL_LIST,
    name="mistral",
    shapes=(_named("", "[ARGS]"), _named("", "[CALL_ID]%any%[ARGS]"), *OBJECTS),
    think="[THINK]",
    thought="[/THINK]",
)
XML = CallFormat(
    "xml",
    ("<function=", "<parameter="),
    ("<tool_call>",),
    ("</tool_call>",),
    (FUNCTION, *OBJECTS),
    loose="<function=",
)
DSML = "｜DSML｜"
MINIMAX = "]<]minimax[>["
PYTHON = CallFormat(
    "pythonic",
    ("<|python_start|>",),
    ("<|python_start|>",),
    ("<|python_end|>",),
    (CallShape("%name%( ", arguments=Notation(("'", '"'), has_escapes=True, is_open=True)),),
    is_listed=True,
)
COMMAND = '{ "tool_call_id" : "%any%" , "tool_name" : "%name%" , "parameters" : '


def _list(name: str, begin: str, end: str, *shapes: CallShape) -> CallFormat:
    """A list of objects between two marks."""
    return CallFormat(name, (begin,), (begin,), (end,), shapes or OBJECTS, is_listed=True)


# The first row of which all marks stand in a template is taken.
FORMATS: tuple[CallFormat, ...] = (
    replace(
        XML,
        name="seed",
        known_by=("<seed:tool_call>",),
        begins=("<seed:tool_call>",),
        ends=("</seed:tool_call>",),
        think="<seed:think>",
        thought="</seed:think>",
    ),
    XML,
    CallFormat(
        "minimax-m2",
        ("<minimax:tool_call>",),
        ("<minimax:tool_call>",),
        ("</minimax:tool_call>",),
        (_invoke("", '"%key%"'),),
    ),
    CallFormat(
        "minimax-m3",
        (MINIMAX,),
        (f"{MINIMAX}<tool_call>",),
        (f"{MINIMAX}</tool_call>",),
        (
            CallShape(
                f'{MINIMAX}<invoke name="%name%">',
                arguments=Tags(f"{MINIMAX}<%tag%>", f"{MINIMAX}</%tag%>", nested=MINIMAX),
                closing=f"{MINIMAX}</invoke>",
            ),
        ),
        think="<mm:think>",
        thought="</mm:think>",
    ),
    CallFormat(
        "dsml",
        (DSML, "invoke"),
        (f"<{DSML}function_calls>", f"<{DSML}tool_calls>"),
        (f"</{DSML}function_calls>", f"</{DSML}tool_calls>"),
        (_invoke(DSML, '"%key%" string="%type%"'),),
    ),
    CallFormat("glm", ("<arg_key>",), ("<tool_call>",), ("</tool_call>",), (KEYED,)),
    CallFormat(
        "kimi-k3",
        ("<|open|>", "<|close|>", "argument"),
        ("<|open|>tools<|sep|>",),
        ("<|close|>tools<|sep|>",),
        (
            CallShape(
                '<|open|>call tool="%name%"%any%<|sep|>',
                arguments=Tags(
                    '<|open|>argument key="%key%" type="%type%"<|sep|>', "<|close|>argument<|sep|>"
                ),
                closing="<|close|>call<|sep|>",
            ),
        ),
        think="<|open|>think<|sep|>",
        thought="<|close|>think<|sep|>",
        dropped=(
            "<|open|>response<|sep|>",
            "<|close|>response<|sep|>",
            "<|close|>message<|sep|>",
        ),
    ),
    CallFormat(
        "kimi-k2",
        ("<|tool_calls_section_begin|>",),
        ("<|tool_calls_section_begin|>",),
        ("<|tool_calls_section_end|>",),
        (
            _named(
                "<|tool_call_begin|>",
                "<|tool_call_argument_begin|>",
                "<|tool_call_end|>",
                noise=r"^functions\.|:\d+$",
            ),
        ),
    ),
    CallFormat(
        "deepseek-v3",
        ("<｜tool▁calls▁begin｜>",),
        ("<｜tool▁calls▁begin｜>",),
        ("<｜tool▁calls▁end｜>",),
        (
            _named("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
            _named("<｜tool▁call▁begin｜>function<｜tool▁sep｜>", "```json", "```<｜tool▁call▁end｜>"),
        ),
    ),
    CallFormat(
        "gemma4",
        ("<|tool_call>", "call:"),
        ("<|tool_call>",),
        ("<tool_call|>",),
        (CallShape("call:%name%", ("{",), Notation(('<|"|>',))),),
        think="<|channel>thought",
        thought="<channel|>",
    ),
    replace(PYTHON, name="lfm2", known_by=("List of tools: ",),
            begins=("<|tool_call_start|>",), ends=("<|tool_call_end|>",)),
    PYTHON,
    MISTRAL,
    replace(
        _list("command-r", "<|START_ACTION|>", "<|END_ACTION|>", CallShape(COMMAND, ("{",), closing="}")),
        think="<|START_THINKING|>",
        thought="<|END_THINKING|>",
        dropped=("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
    _list("apriel", "<tool_calls>", "</tool_calls>"),
    _list("granite3", "<|tool_call|>", "<|/tool_call|>"),
    _list("gigachat3.1", "<|function_call|>", "<|message_sep|>"),
    CallFormat(
        "gigachat3",
        ("<|message_sep|>", "function call"),
        ("function call<|role_sep|>",),
        ("<|message_sep|>",),
        OBJECTS,
    ),
    CallFormat(
        "minicpm5",
        ('<function name="', '<param name="'),
        ("<function",),
        ("</function>",),
        (
            CallShape(
                ' name="%name%">',
                arguments=Tags(
                    '<param name="%key%">',
                    "</param>",
                    "\n<param name=",
                    ("\n</function>",),
                    raw=("<![CDATA[", "]]>"),
                ),
            ),
        ),
    ),
    CallFormat(
        "solar",
        ("<|tool_call:begin|>",),
        ("<|tool_calls|>",),
        ("<|calls|>",),
        (
            _named(
                "<|tool_call:begin|>%any%<|tool_call:name|>",
                "<|tool_call:args|>",
                "<|tool_call:end|>",
            ),
        ),
        think="<|think|>",
        thought="<|end|>",
        # Between the parts of an answer.
        dropped=("<|begin|>assistant", "<|content|>", "<|end|>"),
    ),
    LLAMA3,
    HERMES,
)  # fmt: skip


def format_of(template: str) -> CallFormat | None:
    """How the model with this chat template writes calls; None: its template shows none that is known."""
    return next((row for row in FORMATS if all(mark in template for mark in row.known_by)), None)


def declared_format(declared: object) -> CallFormat | None:
    """The format that a model declares itself (`response_template` in its tokenizer_config.json), where it is objects
    between two marks, or one of the table; None: there is no such declaration, or another."""
    match declared:
        case {"fields": {"tool_calls": {"open": str(begin), "close": str(end), "content": "json"}}}:
            found = _list("declared", begin.strip(), end.strip())
        case {"fields": {"tool_calls": {**calls}}}:
            # Patterns are matched by the marks in them.
            row = format_of(json.dumps(calls, ensure_ascii=False).replace("\\", ""))
            if row is None:
                return None
            found = row
        case _:
            return None
    match declared:
        case {"fields": {"thinking": {"open": str(think), "close": str(thought)}}} | {
            "fields": {"reasoning_content": {"open": str(think), "close": str(thought)}}
        }:
            return replace(found, think=think.strip(), thought=thought.strip())
        case _:
            return found


# How families write the id of a call: before its arguments, or at the end of its object.
OWN_ID = re.compile(
    r"\[CALL_ID\](?P<mistral>\w{9})\[ARGS\]"
    r"|<\|tool_call_begin\|> ?(?P<kimi>\S{1,256}?) ?<\|tool_call_argument_begin\|>"
    r"|<\|tool_call:begin\|>(?P<solar>[^<>\s]{1,256})<\|tool_call:name\|>"
)
LISTED_CALLS = re.compile(r"\[TOOL_CALLS\]\s*(\[.*\])", re.DOTALL)


# A call as an object of its own, and how many of them an answer may have.
CALL_OBJECT = re.compile(r'\{\s*"(?:name|id|type|function)"\s*:')
CALL_OBJECTS_MAX = 128


def own_ids(text: str) -> list[str]:
    """The ids that the model itself gave its calls in this answer."""
    if listed := LISTED_CALLS.search(text):
        return _listed_ids(listed[1])
    marked = [next(filter(None, found.groups())) for found in OWN_ID.finditer(text)]
    return marked or _ids_of_objects(text)


def _ids_of_objects(text: str) -> list[str]:
    """The ids of calls that are JSON objects, between any marks."""
    ids: list[str] = []
    at = 0
    for _ in range(CALL_OBJECTS_MAX):
        begin = CALL_OBJECT.search(text, at)
        if begin is None:
            break
        try:
            call, at = DECODER.raw_decode(text, begin.start())
        except (ValueError, RecursionError):
            at = begin.end()
            continue
        if isinstance(call.get("id"), str):
            ids.append(call["id"])
    return ids


def _listed_ids(text: str) -> list[str]:
    try:
        calls = json.loads(text)
    except (ValueError, RecursionError):
        return []
    return [str(call["id"]) for call in calls if isinstance(call, dict) and "id" in call]


DECODER = json.JSONDecoder()

# What looks like the mark of a call.
CALL_MARK = re.compile(
    r"<[^<>\s'\"{}%]*(?:tool_?call|function_?call|invoke|action)[^<>\s'\"{}%]*>?"
    r"|\[[A-Z_]*TOOL_CALL[A-Z_]*\]|functools\[|>>>|<function name=|Action:",
    re.IGNORECASE,
)


def unread_marks(template: str) -> str | None:
    """A mark of calls in this template that no reader knows."""
    if format_of(template) is not None:
        return None
    mark = CALL_MARK.search(template)
    return mark and mark[0]
