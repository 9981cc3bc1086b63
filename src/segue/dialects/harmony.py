"""How does gpt-oss write and read? Harmony: messages with a channel, and tools in namespaces.

A message is `<|start|>`, who speaks, `<|channel|>` and its name, `<|message|>`, the text, `<|end|>`. The model thinks
in the channel `analysis`, calls tools in `commentary` (there the header says `to=functions.name`, before the channel
or after it, and `<|call|>` ends the message; code goes `to=python` as it is), and answers in `final`, which
`<|return|>` ends; in history that is an `<|end|>`. All marks are special tokens, so that no text can be
mistaken for a mark:

    state      at                                            goes to
    header     text; <|channel|>, <|constrain|>              stays, noting the text
    header     <|message|>                                   body, and opens a call; a text opens with its first letter
    body       text                                          stays, and writes it
    any        <|end|>, <|start|>                            closes what is open, header
    any        <|call|>, <|return|>                          the turn is over

A message to a tool that `tool_choice` forbids is text. Where calls may not be parallel, the first call ends the turn.

The system message says what day it is (the day on which the chain began), how much to think, and which channels there
are; instructions, tools and the format of the answer are the developer's message. What was thought before the last
final answer is forgotten. Where the engine follows structural tags, the final channel is held to that format, while
thoughts and calls stay free.
"""

from __future__ import annotations

import re
from array import array
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from functools import partial

import msgspec
from msgspec import UNSET, Raw

from segue.dialects.family import Family, system_of
from segue.dialects.parts import Part, part_of
from segue.dialects.warm import NameOf, Writing, is_alike_by_words
from segue.readers.bound import BoundFamily
from segue.readers.call_json import INPUT_KEYS
from segue.readers.forced import QUOTE, UNQUOTE, CallForm, Forced
from segue.readers.item_writer import ItemWriter, feed_tokens, plain_token
from segue.readers.offers import (
    added_by,
    arguments_schema,
    call_in,
    callable_offers,
    forced,
    format_schema,
    parameters_of,
)
from segue.readers.tags import (
    Node,
    any_of,
    json_of,
    many,
    marks_of,
    maybe,
    sequence,
    tag_of,
    text_without,
    words,
)
from segue.schemas.json_schema import properties_of, required_of
from segue.seams.history import Round
from segue.seams.model import ItemOpened, Parsed, Scene, TokenLogprob, TurnClosed
from segue.seams.prompt import Head, IdArray
from segue.vocabularies.vocabulary import Chunk, Mark, Own, Vocabulary, extend
from segue.wire import items as wire
from segue.wire.calls import PYTHON
from segue.wire.kinds import is_model_written
from segue.wire.requests import TextFormat
from segue.wire.tools import Offer

START = "<|start|>"
END = "<|end|>"
MESSAGE = "<|message|>"
CHANNEL = "<|channel|>"
CONSTRAIN = "<|constrain|>"
CALL = "<|call|>"
RETURN = "<|return|>"
# A change of this file that changes what kept ids mean needs a new number.
VERSION = "harmony2"
CUE = Mark(START, "assistant")

# The words of the family's own library.
SYSTEM = (
    "You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: {day}\n\nReasoning: {effort}\n\n{tools}"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
# What runs code stands in the system's message, in the words that the model was trained on.
CODE_TOOL = (
    "# Tools\n\n## python\n\n"
    "Use this tool to execute Python code in your chain of thought. The code will not be shown to the user. This tool "
    "should be used for internal reasoning, but not for code that is intended to be visible to the user (e.g. when "
    "creating plots, tables, or files).\n\n"
    "When you send a message containing Python code to python, it will be executed in a stateful Jupyter notebook "
    "environment. python will respond with the output of the execution or time out after 120.0 seconds. The drive at "
    "'/mnt/data' can be used to save and persist user files. Internet access for this session is UNKNOWN. Depends on "
    "the cluster.\n\n"
)
CALLS = "\nCalls to these tools must go to the commentary channel: 'functions'."
INSTRUCTIONS = "# Instructions\n\n"
# How much to think, where that is not "medium".
EFFORTS = {
    "none": "low", "minimal": "low", "low": "low", "high": "high", "xhigh": "high", "max": "high",
}  # fmt: skip
RECIPIENT = re.compile(r"\bto=(\S+)")
AFTER_RECIPIENT = f"{CHANNEL}commentary {CONSTRAIN}json{MESSAGE}"
# A call that is nothing but code.
CODE_HEADER = (f" to={PYTHON}", Own(f"{CHANNEL}analysis code{MESSAGE}"))
# The namespace of tools that stand in none.
FUNCTIONS = "functions"
# Whom the model may speak to without calling anything.
PEOPLE = {"assistant", "user", "all"}


# --- writing --------------------------------------------------------------------------------------


def _write_head(
    vocabulary: Vocabulary,
    head: Head,
    items: Sequence[wire.Item],
    root_at: int,
    name_of: NameOf,
) -> IdArray[int]:
    instructions, items = system_of(head, items)
    runs_code = any(map(_is_code, head.tools.offers))
    offers = [offer for offer in head.tools.offers if not _is_code(offer)]
    day = datetime.fromtimestamp(root_at, UTC).date().isoformat()
    tools = CODE_TOOL if runs_code else ""
    system = SYSTEM.format(day=day, effort=_effort(head), tools=tools)
    if any(offer.namespace is None for offer in offers):
        system += CALLS
    sections = [] if instructions is None else [INSTRUCTIONS + instructions]
    sections.extend([tools_section(offers)] if offers else [])
    sections.extend(_formats_section(head.text.format))
    chunks = _plain("system", system)
    if sections:
        chunks += _plain("developer", "\n\n".join(sections))
    ids = vocabulary.ids(*chunks)
    extend(ids, _given(vocabulary, items, name_of))
    return ids


def _given(vocabulary: Vocabulary, items: Sequence[wire.Item], name_of: NameOf) -> IdArray[int]:
    chunks: list[Chunk] = []
    finals = _finals(items)
    names: dict[str, str] = {}
    for n, item in enumerate(items):
        if isinstance(item.value, wire.AdditionalTools | wire.ConfigurationUpdate):
            chunks += _update(item)
            continue
        part = part_of(item)
        if part.kind == "call":
            names[part.call_id] = part.name
        name = part.kind == "response" and (names.get(part.call_id) or name_of(part.call_id))
        if isinstance(item.value, wire.ToolSearchOutput):
            name = "tool_search"
            if added := added_by(item):
                part = part._replace(text=tools_section(added))
        if isinstance(item.value, wire.HostedOutput) and name == PYTHON:
            chunks += [Mark(START), f"{PYTHON} to=assistant", *_channel("analysis"), part.text]
            chunks.append(Mark(END))
            continue
        chunks += _message(part, name or "tool", is_final=n in finals)
    return vocabulary.ids(*chunks)


def _is_code(offer: Offer) -> bool:
    return offer.builtin == "code_interpreter"


def _update(item: wire.Item) -> tuple[Chunk, ...]:
    """Tools and settings that come on the way, where they come, so that nothing before them changes."""
    match item.value:
        case wire.ConfigurationUpdate(
            reasoning=wire.ReasoningUpdate(effort=str() as effort), text=text
        ):
            # As the family has it in its first message.
            written = _plain("system", f"Reasoning: {EFFORTS.get(effort, 'medium')}")
            return written + _message(part_of(item), "", is_final=False) if text else written
        case wire.AdditionalTools():
            added = added_by(item)
            return _plain("developer", tools_section(added)) if added else ()
        case _:
            return _message(part_of(item), "", is_final=False)


def _message(part: Part, name: str, *, is_final: bool) -> tuple[Chunk, ...]:
    """One message; `name` is who was called, where this is the answer."""
    match part.kind:
        case "user":
            return _plain("user", part.text)
        case "response":
            speaker = f"{_recipient(name)} to=assistant"
            return Mark(START), speaker, *_channel("commentary"), part.text, Mark(END)
        case "think" if not part.text:
            return ()
        case "think" | "talk" | "call":
            return CUE, *_model_message(part, is_final=is_final)
        case _:
            return _plain("developer", INSTRUCTIONS + part.text)


def _plain(role: str, text: str) -> tuple[Chunk, ...]:
    return Mark(START, role), Mark(MESSAGE), text, Mark(END)


def _wrote(vocabulary: Vocabulary, items: Sequence[wire.Item]) -> IdArray[int]:
    """A model turn after the cue, as it stands in history. Only the last call ends as a call, since a reader
    stops there."""
    return vocabulary.ids(*_model_turn(items))


def _write(vocabulary: Vocabulary, items: Sequence[wire.Item]) -> IdArray[int]:
    chunks = _model_turn(items)
    return vocabulary.ids(*chunks[:-1], Mark(CALL if chunks[-1] == Mark(CALL) else RETURN))


def _model_turn(items: Sequence[wire.Item]) -> list[Chunk]:
    finals = _finals(items)
    chunks: list[Chunk] = []
    for n, item in enumerate(items):
        part = part_of(item)
        if part.kind in ("think", "talk", "call") and (part.text or part.kind != "think"):
            if chunks and chunks[-1] == Mark(CALL):
                chunks[-1] = Mark(END)
            chunks += [CUE] if chunks else []
            chunks += _model_message(part, is_final=n in finals)
    return chunks or [Mark(END)]


def _model_message(part: Part, *, is_final: bool) -> tuple[Chunk, ...]:
    """What the model says in one message, after the cue."""
    if part.code is not None:
        return *CODE_HEADER, part.code, Mark(CALL)
    if part.kind == "call":
        return *_call_header(part.name), part.text, Mark(CALL)
    channel = "analysis" if part.kind == "think" else "final" if is_final else "commentary"
    return *_channel(channel), part.text, Mark(END)


def _call_header(name: str) -> tuple[Chunk, ...]:
    return f" to={_recipient(name)}", Own(AFTER_RECIPIENT)


def _channel(name: str) -> tuple[Chunk, ...]:
    return Mark(CHANNEL, name), Mark(MESSAGE)


def _kept(vocabulary: Vocabulary, round: Round, forgotten: int) -> IdArray[int]:
    """What was sampled, less what is forgotten; what is first then needs no `<|start|>` after the cue."""
    joined = array("I")
    for n, (item, ids) in enumerate(zip(round.wrote, round.ids, strict=True)):
        if n >= forgotten or not isinstance(item.value, wire.Reasoning):
            joined.extend(ids)
    joined.extend(round.tail)
    cue = vocabulary.ids(CUE)
    return joined[len(cue) :] if joined[: len(cue)] == cue else joined


def _recipient(name: str) -> str:
    return name if "." in name else f"{FUNCTIONS}.{name}"


def _effort(head: Head) -> str:
    return EFFORTS.get(head.reasoning.effort or "", "medium")


def _is_alike(head: Head, other: Head) -> bool:
    formats = (_formats_section(head.text.format), _formats_section(other.text.format))
    is_alike = _effort(head) == _effort(other) and formats[0] == formats[1]
    return is_alike and is_alike_by_words(head, other)


def _formats_section(wanted: TextFormat | None) -> list[str]:
    """The schema of the answer, as OpenAI's guide to the format has it."""
    if wanted is None or wanted.type != "json_schema" or wanted.schema is UNSET:
        return []
    description = wanted.description if isinstance(wanted.description, str) else ""
    comment = "".join(f"// {line}\n" for line in _lines(description))
    schema = msgspec.json.format(wanted.schema, indent=-1).decode()
    return [f"# Response Formats\n\n## {wanted.name or 'answer'}\n\n{comment}{schema}"]


def _finals(items: Sequence[wire.Item]) -> set[int]:
    """Which of these are final answers: what the model says to the user with no call after it in the same turn."""
    found: set[int] = set()
    is_calling = False
    for n in range(len(items) - 1, -1, -1):
        value = items[n].value
        if isinstance(value, wire.Message) and value.role == "assistant":
            if not is_calling and value.phase != "commentary":
                found.add(n)
        elif is_model_written(value):
            is_calling = is_calling or not isinstance(value, wire.Reasoning)
        else:
            is_calling = False
    return found


def _last_final(items: Sequence[wire.Item]) -> int:
    """Up to the last final answer."""
    return max(_finals(items), default=-1) + 1


# --- tools as TypeScript --------------------------------------------------------------------------

# Functions in namespaces, letter for letter as the family's own library writes them, odd places of comments included,
# because that is what the model was trained on.


def tools_section(tools: Iterable[Offer]) -> str:
    """All tools by namespace."""
    spaces: dict[str, list[str]] = {}
    for tool in tools:
        spaces.setdefault(tool.namespace or FUNCTIONS, []).append(_declaration(tool))
    return "\n\n".join(["# Tools", *(_namespace(name, spaces[name]) for name in sorted(spaces))])


def _namespace(name: str, declarations: Sequence[str]) -> str:
    inside = "\n".join(declarations)
    return f"## {name}\n\nnamespace {name} {{\n\n{inside}\n}} // namespace {name}"


def _declaration(offer: Offer) -> str:
    description = offer.tool.description
    lines = _lines(description) if isinstance(description, str) else []
    comment = "".join(f"// {line}\n" for line in lines)
    parameters = parameters_of(offer)
    taken = "" if parameters is None else f"_: {_type(parameters, '')}"
    return f"{comment}type {offer.tool.name} = ({taken}) => any;\n"


def _lines(text: str) -> list[str]:
    """As Rust cuts them: at newlines only, with nothing after the last."""
    lines = [line.removesuffix("\r") for line in text.split("\n")]
    return lines[:-1] if lines[-1] == "" else lines


# Types of JSON schema that are one word of TypeScript.
WORDS = {"number": "number", "integer": "number", "boolean": "boolean"}


def _type(schema: object, indent: str) -> str:
    if not isinstance(schema, dict):
        return "any"
    variants = schema.get("oneOf")
    if isinstance(variants, list):
        return "".join(f"\n{indent} | {_variant(variant, indent)}" for variant in variants)
    match schema.get("type"):
        case list() as kinds:
            names = [kind for kind in kinds if isinstance(kind, str)]
            return " | ".join("number" if name == "integer" else name for name in names)
        case "object":
            return _object(schema, indent)
        case "string":
            return _string(schema.get("enum"))
        case "array":
            return f"{_type(schema['items'], indent)}[]" if "items" in schema else "Array<any>"
        case str() as kind:
            return WORDS.get(kind, "any")
        case _:
            return "any"


def _string(listed: object) -> str:
    if not isinstance(listed, list) or not listed:
        return "string"
    return " | ".join(f'"{value}"' for value in listed if isinstance(value, str))


def _object(schema: dict[str, object], indent: str) -> str:
    description = _text(schema, "description")
    out = "" if description is None else f"{indent}// {description}\n"
    out += "{\n"
    required = required_of(schema)
    for key, value in properties_of(schema).items():
        out += _property(f"{key}{'' if key in required else '?'}", value, indent)
    return f"{out}{indent}}}"


def _property(name: str, schema: object, indent: str) -> str:
    if not isinstance(schema, dict):
        return f"{indent}{name}: any,\n"
    out = ""
    title = _text(schema, "title")
    description = _text(schema, "description")
    if title is not None:
        out += f"{indent}// {title}\n{indent}//\n"
    variants = schema.get("oneOf")
    if description is not None and not isinstance(variants, list):
        out += f"{indent}// {description}\n"
    examples = schema.get("examples")
    if isinstance(examples, list) and examples:
        shown = [f'{indent}// - "{example}"\n' for example in examples if isinstance(example, str)]
        out += f"{indent}// Examples:\n{''.join(shown)}"
    if isinstance(variants, list):
        return out + _variants(name, schema, variants, indent)
    kind = _nullable(schema, _type(schema, indent + "    "))
    return f"{out}{indent}{name}: {kind},{_remark(_default(schema))}\n"


def _variants(name: str, schema: dict[str, object], variants: Sequence[object], indent: str) -> str:
    description = _text(schema, "description")
    default = _default(schema)
    first = _text(variants[0], "description") if variants else None
    out = "" if description in (None, first) else f"{indent}// {description}\n"
    out += "" if default is None else f"{indent}// {default}\n"
    out += f"{indent}{name}:\n"
    for n, variant in enumerate(variants):
        remark = _text(variant, "description")
        is_said = description is not None and (n == 0 or remark == description)
        remarks = (None if is_said else remark, _default(variant))
        kind = _nullable(variant, _type(variant, indent + "   "))
        out += f"{indent} | {kind}{_remark(*remarks)}\n"
    return f"{out}{indent},\n"


def _variant(schema: object, indent: str) -> str:
    kind = _nullable(schema, _type(schema, indent + "   "))
    # Here, unlike elsewhere, the default of an enumeration is quoted too.
    return kind + _remark(_text(schema, "description"), _default(schema, is_quoted=True))


def _nullable(schema: object, kind: str) -> str:
    is_nullable = isinstance(schema, dict) and schema.get("nullable") is True
    return f"{kind} | null" if is_nullable and "null" not in kind else kind


def _default(schema: object, *, is_quoted: bool = False) -> str | None:
    if not isinstance(schema, dict) or "default" not in schema:
        return None
    default = schema["default"]
    if not isinstance(default, str):
        return f"default: {msgspec.json.encode(default).decode()}"
    is_bare = schema.get("enum") and not is_quoted
    return f"default: {default}" if is_bare else f'default: "{default}"'


def _remark(*texts: str | None) -> str:
    remark = " ".join(text for text in texts if text is not None)
    return f" // {remark}" if remark else ""


def _text(schema: object, key: str) -> str | None:
    found = schema.get(key) if isinstance(schema, dict) else None
    return found if isinstance(found, str) else None


# --- reading --------------------------------------------------------------------------------------


class HarmonyReader:
    """A `Reader`: see the table of states at the top."""

    def __init__(self, bound: BoundFamily, scene: Scene) -> None:
        self._bound = bound
        self._vocabulary = vocabulary = bound.vocabulary
        self._scene = scene
        names = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
        self._marks = {vocabulary.special(name): name for name in names}
        self._decode = getincrementaldecoder("utf-8")("replace")
        self._items = ItemWriter(is_single=not scene.head.parallel_tool_calls)
        # Without tools nothing is a call.
        self._is_offering = bool(callable_offers(scene))
        # Whether the only call that is allowed is whole.
        self.is_over = False
        self._is_passing = False
        self._is_stopped = False
        # Whether nothing was sampled after the last `<|end|>`.
        self._is_ended = False
        # The header so far: who speaks, and the text after each mark.
        self._header = {"": ""}
        self._section = ""
        # What the body is; None in a header. Text is opened by its first letter.
        self._body: ItemOpened | None = None

    feed = feed_tokens

    def close(self, *, is_cut: bool) -> list[Parsed]:
        items = self._items
        items.parsed = []
        is_call = self._body is not None and self._body.is_call
        self._end(is_cut=is_cut and not self._is_done())
        if not self._is_ended:
            items.ids.append(self._vocabulary.special(CALL if is_call else END))
        return [*items.parsed, TurnClosed(items.ids)]

    def _feed_token(self, id: int, logprobs: TokenLogprob | None = None) -> None:
        if self._is_done():
            return
        mark = self._marks.get(id)
        if mark in (CALL, RETURN):
            self._is_stopped = True
            self._is_passing = False
            return
        if mark == START or (mark == CHANNEL and self._body is not None):
            # The message before it has no end of its own.
            self._end()
            if self._is_done():
                return
        self._items.ids.append(id)
        self._is_ended = mark == END
        if mark == END:
            self._end()
        elif self._body is not None:
            self._feed_text(id, logprobs)
        elif mark == MESSAGE:
            self._open_body()
        elif mark in (CHANNEL, CONSTRAIN):
            self._section = mark
            self._header[mark] = ""
        else:
            self._header[self._section] += self._decode.decode(self._vocabulary.bytes_of(id))

    def _is_done(self) -> bool:
        return self._is_stopped or self._items.is_over

    def _feed_text(self, id: int, logprobs: TokenLogprob | None) -> None:
        data = self._vocabulary.bytes_of(id)
        if id not in self._bound.plain_tokens:
            self._bound.plain_tokens[id] = plain_token(data)
        text = self._decode.decode(data)
        if self._items.pending is not None:
            self._items.pending.add_token(id, logprobs, len(text))
        self._write_text(text)
        self._is_passing = (
            self._items.open is not None
            and self._items.open.kind not in INPUT_KEYS
            and not self._decode.getstate()[0]
        )

    def _open_body(self) -> None:
        """The header is whole: it says what follows."""
        channel = self._header.get(CHANNEL, "")
        recipient = RECIPIENT.search(self._header[""]) or RECIPIENT.search(channel)
        name = "" if recipient is None else recipient[1].removeprefix(f"{FUNCTIONS}.")
        is_called = self._is_offering and recipient is not None and recipient[1] not in PEOPLE
        self._body = call_in(self._scene, name) if is_called else None
        if self._body is not None:
            self._items.open_item(self._body)
            return
        is_thought = channel.split()[:1] == ["analysis"]
        self._body = ItemOpened("reasoning" if is_thought else "message")
        if self._items.pending is not None:
            self._items.pending.start_text(0)

    def _write_text(self, text: str) -> None:
        assert self._body is not None
        items = self._items
        if not text:
            return
        if items.open is None:
            items.open_item(self._body)
        if self._body.is_call:
            items.write_arguments(text)
        else:
            items.write(text)

    def _end(self, *, is_cut: bool = False) -> None:
        """The message is over, with or without an end mark."""
        rest = "" if is_cut else self._decode.decode(b"", final=True)
        self._decode.reset()
        items = self._items
        if items.pending is not None:
            items.pending.add_chars(len(rest))
        stray = "" if CHANNEL in self._header else self._header[""].removeprefix("assistant")
        if self._body is None and stray.strip():
            # No message at all, only text: an untrained model, or a broken prompt. Its logprobs were not kept.
            self._body = ItemOpened("message")
            rest = stray + rest
        if self._body is not None:
            self._write_text(rest)
        items.end_arguments()
        items.close(is_cut=is_cut)
        self._header = {"": ""}
        self._section = ""
        self._body = None
        self._is_passing = False


# --- forced answers -------------------------------------------------------------------------------

# What may stand in a message.
TEXT = text_without(START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)


def _tagged(scene: Scene, vocabulary: Vocabulary) -> Forced | None:
    """Any of several tools, or an answer in JSON after any thoughts; one tool is called after its header."""
    marks = partial(marks_of, vocabulary)
    offers = forced(scene)
    if len(offers) > 1:
        calls: list[Node] = []
        for offer in offers:
            to = words(f" to={_recipient(offer.qualified_name)}")
            arguments = json_of(Raw(arguments_schema(offer)))
            calls.append(sequence([to, *marks(AFTER_RECIPIENT), arguments]))
        return (), tag_of(any_of(calls))
    if offers or (schema := format_schema(scene)) is None:
        return None
    ways = [sequence([*marks(f"{CHANNEL}final{MESSAGE}"), json_of(Raw(schema))])]
    channels = ["analysis"]
    if scene.head.tool_choice != "none" and scene.offers:
        ways.append(_any_call(marks))
        channels.append("commentary")
    channel = any_of([words(name) for name in channels])
    again = marks(f"{END}{START}assistant")
    before = many([*marks(CHANNEL), channel, *marks(MESSAGE), TEXT, *again])
    return (), tag_of(sequence([before, any_of(ways)]))


def _any_call(marks: Callable[[str], list[Node]]) -> Node:
    """A message to a tool: whom it is for stands before the channel or after it."""
    to: list[Node] = [words(" to="), {"type": "regex", "pattern": "[A-Za-z0-9_.-]+"}]
    channel = [*marks(CHANNEL), words("commentary")]
    header = any_of([sequence([*to, *channel]), sequence([*channel, *to])])
    constrained = maybe([maybe([words(" ")]), *marks(f"{CONSTRAIN}json")])
    return sequence([header, constrained, *marks(MESSAGE), TEXT])


# --- the family -----------------------------------------------------------------------------------

HARMONY = Family(
    name="harmony",
    version=VERSION,
    specials=(START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN),
    stops=(CALL, RETURN),
    seal=(Mark(CALL),),
    cue=(CUE,),
    render=Writing(
        begin=_write_head,
        given=_given,
        wrote=_wrote,
        is_alike=_is_alike,
        turning=_last_final,
        kept=_kept,
    ).render,
    write=_write,
    reader=HarmonyReader,
    call=CallForm(
        named=_call_header,
        arguments_key=None,
        before_text=_channel("final"),
        around_input=(QUOTE, UNQUOTE),
        tagged=_tagged,
    ),
    # Its template calls functions of its own, and differs from what the model was trained on in small things.
    is_known_by_tokens=True,
)
