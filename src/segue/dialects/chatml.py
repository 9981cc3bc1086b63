"""How do ChatML models write and read? SmolLM2's system text, and tools as Qwen2.5 and Hermes have them.

A prompt is a row of blocks, `<|im_start|>role`, newline, content, `<|im_end|>`, newline. Role and content are
encoded together, because a newline merges with what follows it, and never with the special ids around
them, so that blocks can be encoded one by one and a user's `<|im_end|>` is only text.

Inside an assistant's block everything is text: `<think>`, then what it says, then each call as JSON between
`<tool_call>` marks. The reader finds these marks again in what is sampled, one token after the other:

    state       waits for                                    and then
    between     a mark, or a letter                          thinking, heading, or opens a message
    talking     <tool_call>                                  heading
    thinking    </think>                                     closes, between
    heading     the name and the `{` of its arguments        opens a call, arguing; else it was text: talking
    arguing     the `}` of the arguments                     trailing
    trailing    the `}` of the call                          ending
    ending      </tool_call>, or anything else               closes, between

A message stays open while heading, since what looks like a call may turn out to be text. Each token gives at
most one `Wrote` for an item. Text is held back only where it may still be a mark, or newlines before one.
"""

from __future__ import annotations

import json
import re
from array import array
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Literal, assert_never

import msgspec
from msgspec import Raw, Struct

from segue.dialects.vocabulary import Vocabulary
from segue.dialects.warm import Hand, is_alike_by_words, render
from segue.turn.values import (
    Closed,
    Head,
    IdArray,
    Ids,
    Opened,
    Piece,
    Rendered,
    Said,
    Scene,
    Sealed,
    Wrote,
    id_array,
)
from segue.wire.items import (
    AdditionalTools,
    ApplyPatchCall,
    ApplyPatchCallOutput,
    CodeInterpreterCall,
    Compaction,
    CompactionSummary,
    CompactionTrigger,
    ComputerCall,
    ComputerCallOutput,
    ConfigurationUpdate,
    CustomToolCall,
    CustomToolCallOutput,
    FileSearchCall,
    FunctionCall,
    FunctionCallOutput,
    ImageGenerationCall,
    InputAudio,
    InputFile,
    InputImage,
    InputText,
    Item,
    ItemReference,
    LocalShellCall,
    LocalShellCallOutput,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    McpListTools,
    Message,
    MessagePart,
    OutputPart,
    OutputText,
    Program,
    ProgramOutput,
    Reasoning,
    Refusal,
    ShellCall,
    ShellCallOutput,
    ToolSearchCall,
    ToolSearchOutput,
    WebSearchCall,
)
from segue.wire.tools import CustomTool, FunctionTool, NamespaceTool, Offer, offer_named, offers_of

START, END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
THINK, THOUGHT = "<think>", "</think>"
CALL, CALLED = "<tool_call>", "</tool_call>"
# A change of this file that changes what kept ids mean needs a new number.
VERSION = "chatml1"

# The words of the model families' own templates.
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_BEHIND = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


class ChatmlDialect:
    """A `Dialect` for token engines."""

    def __init__(self, vocabulary: Vocabulary, default_system: str = SMOLLM2_SYSTEM) -> None:
        self._vocabulary = vocabulary
        self._default_system = default_system
        self._start = id_array([vocabulary.special(START)])
        self._end = id_array([vocabulary.special(END)])
        self._newline = vocabulary.encode("\n")
        self._seal = self._end + self._newline
        ends = [END, END_OF_TEXT] if vocabulary.has_special(END_OF_TEXT) else [END]
        self._stops = frozenset(vocabulary.special(text) for text in ends)
        self._flows: dict[int, Wrote | None] = {}
        self._hand = Hand(
            fingerprint=f"{VERSION}-{vocabulary.fingerprint}",
            cue=self._start + vocabulary.encode("assistant\n"),
            begin=self._begin,
            given=self._given,
            wrote=lambda items: self.write(items) + self._newline,
            is_alike=is_alike_by_words,
        )

    @property
    def fingerprint(self) -> str:
        """Names this format and the vocabulary."""
        return self._hand.fingerprint

    @property
    def stops(self) -> frozenset[int]:
        """Ids that end the model's turn."""
        return self._stops

    def render(self, scene: Scene) -> Rendered:
        """The prompt: head, history, what is given now, and the cue."""
        return render(self._hand, scene)

    def write(self, items: Sequence[Item]) -> IdArray[int]:
        """What the model would sample behind the cue to say these items, its end mark included."""
        return self._vocabulary.encode(_spoken(items)) + self._end

    def reader(self, scene: Scene) -> ChatmlReader:
        """A reader for the answer to this scene, which knows the tools by name."""
        return ChatmlReader(self._vocabulary, self._stops, self._seal, self._flows, scene)

    def _begin(self, head: Head, items: Sequence[Item], root_at: int) -> IdArray[int]:
        """The first block is the system's: the instructions, or else a system message that leads the chain."""
        system = head.instructions
        first = items[0].value if items else None
        if system is None and isinstance(first, Message) and first.role in ("system", "developer"):
            system, items = _text(first), items[1:]
        elif system is None:
            system = self._default_system
        if head.tools.offers:
            system = f"{system}\n\n{_tools(head.tools.offers)}"
        return self._block("system", system) + self._given(items)

    def _given(self, items: Sequence[Item]) -> IdArray[int]:
        ids = id_array()
        for role, content in _blocks(items):
            ids.extend(self._block(role, content))
        return ids

    def _block(self, role: str, content: str) -> IdArray[int]:
        return self._start + self._vocabulary.encode(f"{role}\n{content}") + self._seal


# --- writing: items as text -----------------------------------------------------------------------

Kind = Literal["think", "talk", "call", "response", "user", "system"]
ROLES = {"think": "assistant", "talk": "assistant", "call": "assistant", "response": "user"}
# What goes on in the same block: a model turn in the order in which the model writes it, and tool outputs.
JOINS = {
    ("think", "think"),
    ("think", "talk"),
    ("think", "call"),
    ("talk", "call"),
    ("call", "call"),
    ("response", "response"),
}
# Fields of a call that say nothing to the model, or that stand elsewhere.
UNTOLD = {"type", "id", "call_id", "status"}


def _blocks(items: Sequence[Item]) -> list[tuple[str, str]]:
    """Role and content of each block."""
    blocks: list[list[tuple[Kind, str]]] = []
    for part in _parts(items):
        if blocks and (blocks[-1][-1][0], part[0]) in JOINS:
            blocks[-1].append(part)
        else:
            blocks.append([part])
    return [(ROLES.get(parts[0][0], parts[0][0]), _content(parts)) for parts in blocks]


def _spoken(items: Sequence[Item]) -> str:
    """The content of one assistant's block that says all these items, in this order."""
    return _content(_parts(items))


def _parts(items: Sequence[Item]) -> list[tuple[Kind, str]]:
    parts = [_part(item) for item in items]
    # Reasoning that came encrypted, from elsewhere, has nothing that could be told.
    return [(kind, text) for kind, text in parts if text or kind != "think"]


def _content(parts: Sequence[tuple[Kind, str]]) -> str:
    content = ""
    glue = ""
    for kind, text in parts:
        is_thought = kind == "think"
        content += glue + (f"{THINK}\n{text}\n{THOUGHT}\n\n" if is_thought else text)
        glue = "" if is_thought else "\n"
    return content


def _part(item: Item) -> tuple[Kind, str]:
    """What one item is to the model, and its text. Nothing is left out without a word."""
    value = item.value
    match value:
        case Message():
            kinds: dict[str, Kind] = {"assistant": "talk", "user": "user"}
            return kinds.get(value.role, "system"), _text(value)
        case Reasoning():
            return "think", "\n\n".join(part.text for part in value.content or value.summary)
        case FunctionCall():
            return "call", _call(_qualified(value), value.arguments)
        case CustomToolCall():
            return "call", _call(_qualified(value), _dumps({"input": value.input}))
        case ShellCall() | LocalShellCall():
            return "call", _call(_bare_type(item), bytes(value.action).decode())
        case ApplyPatchCall():
            return "call", _call("apply_patch", bytes(value.operation).decode())
        case (
            ComputerCall()
            | ToolSearchCall()
            | McpCall()
            | McpApprovalRequest()
            | WebSearchCall()
            | FileSearchCall()
            | CodeInterpreterCall()
            | ImageGenerationCall()
            | Program()
        ):
            return "call", _call(_bare_type(item), _dumps(_fields(item, but=UNTOLD)))
        case FunctionCallOutput() | CustomToolCallOutput():
            return "response", _response(_joined(value.output, "\n"))
        case LocalShellCallOutput():
            return "response", _response(value.output)
        case (
            ShellCallOutput()
            | ApplyPatchCallOutput()
            | ComputerCallOutput()
            | ToolSearchOutput()
            | McpApprovalResponse()
            | ProgramOutput()
        ):
            return "response", _response(_dumps(_fields(item, but={"type", "id", "call_id"})))
        case AdditionalTools():
            return "system", _tools(_added(value.tools))
        case (
            McpListTools()
            | ConfigurationUpdate()
            | Compaction()
            | CompactionSummary()
            | CompactionTrigger()
            | ItemReference()
        ):
            return "system", _told_raw(item)
        case _:
            assert_never(value)


def _text(value: Message) -> str:
    # The model's own parts are one text; parts of others are separate texts.
    return _joined(value.content, "" if value.role == "assistant" else "\n")


def _joined(content: str | Sequence[MessagePart | OutputPart], glue: str) -> str:
    return content if isinstance(content, str) else glue.join(_words(part) for part in content)


def _words(part: MessagePart | OutputPart) -> str:
    """A part as text; a picture, a file or a sound in words, because this family has only text."""
    match part:
        case InputText() | OutputText():
            return part.text
        case Refusal():
            return part.refusal
        case InputImage():
            return f"[image: {_origin(part.image_url, part.file_id)}, which this model cannot see]"
        case InputFile():
            origin = _origin(part.filename, part.file_url, part.file_id, part.file_data)
            return f"[file: {origin}, which this model cannot read]"
        case InputAudio():
            return f"[audio: {_origin(part.audio_url)}, which this model cannot hear]"
        case _:
            assert_never(part)


def _origin(*places: object) -> str:
    """Where something came from, without its bytes."""
    for place in places:
        if isinstance(place, str) and place:
            return _without_data(place)
    return "sent as data"


def _without_data(text: str) -> str:
    """The text itself, or for a data URL only what kind of data it is."""
    if not text.startswith("data:"):
        return text
    return f"{text[5:].partition(',')[0].partition(';')[0] or 'data'} sent as data"


def _told(value: object) -> object:
    """JSON for the model's eyes: the same, with words in place of embedded data."""
    match value:
        case str():
            return _without_data(value)
        case list():
            return [_told(inner) for inner in value]
        case dict():
            return {key: _told(inner) for key, inner in value.items()}
        case _:
            return value


def _told_raw(item: Item) -> str:
    return _dumps(_told(msgspec.json.decode(item.raw)))


def _fields(item: Item, but: set[str]) -> object:
    """What is particular to this item."""
    fields = msgspec.json.decode(item.raw, type=dict[str, object])
    if isinstance(item.value, ImageGenerationCall) and "result" in fields:
        fields["result"] = "[image, which this model cannot see]"
    return _told({key: value for key, value in fields.items() if key not in but})


def _bare_type(item: Item) -> str:
    tag = type(item.value).__struct_config__.tag
    assert isinstance(tag, str)
    return tag.removesuffix("_call")


def _qualified(value: FunctionCall | CustomToolCall) -> str:
    return f"{value.namespace}.{value.name}" if value.namespace else value.name


def _call(name: str, arguments: str) -> str:
    """A call as the model writes it: arguments verbatim if they are an object, as a string if not."""
    bare = arguments.strip()
    shown = bare if _is_object(bare) else _dumps(arguments)
    return f'{CALL}\n{{"name": {_dumps(name)}, "arguments": {shown}}}\n{CALLED}'


def _response(text: str) -> str:
    return f"<tool_response>\n{text}\n</tool_response>"


def _is_object(text: str) -> bool:
    try:
        return text.startswith("{") and isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False


def _dumps(value: object) -> str:
    """JSON with the spaces that templates put into it."""
    return json.dumps(value, ensure_ascii=False)


# --- writing: tools -------------------------------------------------------------------------------


def _tools(tools: Iterable[Offer | Raw]) -> str:
    return TOOLS_BEFORE + "\n".join(map(_tool, tools)) + TOOLS_BEHIND


def _tool(tool: Offer | Raw) -> str:
    if isinstance(tool, Raw):
        return _dumps(msgspec.json.decode(tool))
    function: dict[str, object] = {"name": tool.qualified_name}
    if isinstance(tool.tool.description, str):
        function["description"] = tool.tool.description
    parameters = _parameters(tool.tool)
    if parameters is not None:
        function["parameters"] = parameters
    return _dumps({"type": "function", "function": function})


def _parameters(tool: FunctionTool | CustomTool) -> object:
    if isinstance(tool, FunctionTool):
        return msgspec.json.decode(tool.parameters) if isinstance(tool.parameters, Raw) else None
    shape: dict[str, object] = {"type": "string"}
    if isinstance(tool.format, Raw):
        shape["description"] = f"Its format: {_dumps(msgspec.json.decode(tool.format))}"
    return {"type": "object", "properties": {"input": shape}, "required": ["input"]}


def _added(tools: Sequence[Raw]) -> list[Offer | Raw]:
    """Tools that came in an item: those that the model can call by name, and the others as they are."""
    found: list[Offer | Raw] = []
    for tool in tools:
        try:
            kind = msgspec.json.decode(tool, type=FunctionTool | CustomTool | NamespaceTool)
            found.extend(offers_of((kind,)))
        except msgspec.ValidationError:
            found.append(tool)
    return found


def _offer(scene: Scene, name: str) -> Offer | None:
    """The tool of this name: of the request, or else the one that an item has brought last.

    The items are only walked for a name that the request does not offer.
    """
    offer = offer_named(scene.head.tools.offers, name)
    if offer is not None:
        return offer
    rounds = [round.given + round.wrote for round in scene.history()]
    for item in reversed([*chain.from_iterable(rounds), *scene.given]):
        if isinstance(item.value, AdditionalTools | ToolSearchOutput):
            added = tuple(o for o in _added(item.value.tools) if isinstance(o, Offer))
            offer = offer_named(added, name)
            if offer is not None:
                return offer
    return None


# --- reading --------------------------------------------------------------------------------------

HEADER = re.compile(
    r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"arguments"\s*:\s*(?=\{)', re.DOTALL
)
HEADER_CHARS_MAX = (
    1024  # A name is at most 128 characters; a longer header is read when it is whole.
)
IN_STRING = re.compile(r'[\\"]')
IN_OBJECT = re.compile(r'["{}<]')
CUT_INPUT = re.compile(r'\s*\{\s*"input"\s*:\s*"((?:[^"\\]|\\.)*)', re.DOTALL)


class _Called(Struct):
    name: str
    arguments: Raw = Raw(b"{}")


class _Input(Struct):
    input: str


class _Braces:
    """Finds the end of a JSON object that arrives in pieces."""

    __slots__ = ("depth", "is_escaped", "is_quoted")

    def __init__(self, depth: int = 0) -> None:
        self.depth = depth
        self.is_quoted = False
        self.is_escaped = False

    def end_in(self, text: str, at: int = 0) -> int | None:
        """Behind the brace that closes the object, or before a `<` that cannot be JSON; None: not in here."""
        if self.is_escaped and at < len(text):
            self.is_escaped = False
            at += 1
        while found := (IN_STRING if self.is_quoted else IN_OBJECT).search(text, at):
            at = found.end()
            match found[0]:
                case '"':
                    self.is_quoted = not self.is_quoted
                case "\\":
                    self.is_escaped = at == len(text)
                    at += 1
                case "{":
                    self.depth += 1
                case "}":
                    self.depth -= 1
                    if self.depth == 0:
                        return at
                case _:
                    return found.start()
        return None


class ChatmlReader:
    """A `Reader`: see the table of states at the top.

    A state takes the text that is not used up and returns what it leaves for the next one, or None to wait.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        stops: frozenset[int],
        seal: IdArray[int],
        flows: dict[int, Wrote | None],
        scene: Scene,
    ) -> None:
        """`flows` is shared by all readers: tokens that are plain text wherever they stand, ready to be said."""
        self._vocabulary = vocabulary
        self._stops = stops
        self._seal = seal
        self._flows = flows
        self._scene = scene
        self._decode = getincrementaldecoder("utf-8")("replace")
        self._state: Callable[[str], str | None] = self._between
        # Whether text tokens may pass as they are: an item of text is open and nothing is held back.
        self._is_flowing = False
        self._said: list[Said] = []
        self._said_before = 0
        # Sampled since the last closed item, and the stop behind them.
        self._ids = array("I")
        self._stop: int | None = None
        self._held = ""
        self._fresh = 0
        self._held_from = 0
        self._open: Opened | None = None
        self._is_behind_mark = False
        self._gap = ""
        self._braces = _Braces()
        self._scanned = 0
        self._input = ""

    def feed(self, piece: Piece) -> list[Said]:
        """What has become certain with these ids."""
        assert isinstance(piece, Ids), "this dialect reads tokens"
        said = self._said = []
        flows = self._flows
        for id in piece.ids:
            if self._is_flowing:
                wrote = flows.get(id)
                if wrote is not None:
                    self._ids.append(id)
                    said.append(wrote)
                    continue
            self._take(id)
        return said

    def close(self, *, is_cut: bool) -> list[Said]:
        """Say what was held back, close the open item, and seal the block."""
        said = self._said = []
        self._said_before = 0
        is_cut = is_cut and self._stop is None
        rest = "" if is_cut else self._decode.decode(b"", final=True)
        self._read(rest)
        self._let_go()
        is_whole_call = self._state in (self._trailing, self._ending)
        self._close(len(self._ids), is_cut=is_cut and not is_whole_call)
        ids = self._ids + (self._seal if self._stop is None else array("I", [self._stop]))
        if self._stop is not None:
            ids.extend(self._seal[1:])
        said.append(Sealed(ids))
        return said

    def _take(self, id: int) -> None:
        """One token on the slow way."""
        if self._stop is not None:
            return
        if id in self._stops:
            self._stop = id
            self._is_flowing = False
            return
        if id not in self._flows:
            self._flows[id] = _flow(self._vocabulary.bytes_of(id))
        self._ids.append(id)
        text = self._decode.decode(self._vocabulary.bytes_of(id))
        self._fresh = len(text)
        self._said_before = len(self._said)
        self._read(text)
        self._is_flowing = (
            self._open is not None
            and not self._held
            and self._state in (self._talking, self._thinking)
            and not self._decode.getstate()[0]
        )

    def _read(self, text: str) -> None:
        rest: str | None = self._held + text
        self._held = ""
        while rest is not None:
            rest = self._state(rest)

    def _between(self, text: str) -> str | None:
        bare = text.lstrip()
        if bare.startswith(THINK):
            self._state = self._thinking
            return bare[len(THINK) :]
        is_call = bare.startswith(CALL)
        if not is_call and (THINK.startswith(bare) or CALL.startswith(bare)):
            self._held = text
            return None
        # Newlines behind a mark belong to the mark; at the very beginning they are the model's own.
        own = text.lstrip("\n") if self._is_behind_mark else text
        if is_call:
            self._gap = own[: own.index(CALL)]
            return self._head(bare[len(CALL) :])
        self._begin(Opened("message"))
        self._state = self._talking
        return own

    def _talking(self, text: str) -> str | None:
        at = text.find(CALL)
        if at < 0:
            self._write_but(text, _held_back(text, CALL))
            return None
        own = text[:at].rstrip("\n")
        self._write_but(text, len(text) - len(own))
        self._held = ""
        self._gap = text[len(own) : at]
        return self._head(text[at + len(CALL) :])

    def _thinking(self, text: str) -> str | None:
        at = text.find(THOUGHT)
        held = _held_back(text, THOUGHT) if at < 0 else len(text) - len(text[:at].rstrip("\n"))
        own = text[: len(text) - held]
        if self._open is None and own.strip():
            self._begin(Opened("reasoning"))
            own = own.lstrip("\n")
        if self._open is not None:
            self._write(own)
        if at < 0:
            self._held = text[len(text) - held :] if self._open is not None else text
            return None
        self._close(len(self._ids))
        return text[at + len(THOUGHT) :]

    def _head(self, text: str) -> str:
        """Behind `<tool_call>`: a call begins, or what looks like one."""
        self._state = self._heading
        self._braces = _Braces()
        self._scanned = 0
        return text

    def _heading(self, text: str) -> str | None:
        bare = text.lstrip()
        if bare and bare[0] != "{":
            return self._was_text(text)
        header = HEADER.match(text) if len(text) <= HEADER_CHARS_MAX else None
        if header is not None:
            self._begin_call(_string(header[1]))
            self._state = self._arguing
            self._braces = _Braces()
            return text[header.end() :]
        end = self._braces.end_in(text, self._scanned)
        self._scanned = len(text)
        if end is None:
            self._held = text
            return None
        # Another order of keys, arguments that are no object, or no call at all.
        call = _called(text[:end])
        if call is None:
            return self._was_text(text)
        self._begin_call(call.name)
        self._argue(_arguments(call))
        self._end_arguments()
        self._state = self._ending
        return text[end:]

    def _was_text(self, text: str) -> str:
        if self._open is None:
            self._begin(Opened("message"))
        self._write(self._gap + CALL)
        self._held_from = len(self._ids)
        self._state = self._talking
        return text

    def _arguing(self, text: str) -> str | None:
        end = self._braces.end_in(text)
        if end is None:
            self._argue(text)
            return None
        self._argue(text[:end])
        self._end_arguments()
        self._state = self._trailing if self._braces.depth == 0 else self._ending
        self._braces = _Braces(depth=1)
        return text[end:]

    def _trailing(self, text: str) -> str | None:
        end = self._braces.end_in(text)
        if end is None:
            return None
        self._state = self._ending
        return text[end:]

    def _ending(self, text: str) -> str | None:
        # A brace too many is a common slip of small models and means nothing.
        bare = text.lstrip("} \t\r\n")
        if CALLED.startswith(bare) and bare != CALLED:
            self._held = bare
            return None
        self._close(len(self._ids))
        return bare.removeprefix(CALLED)

    def _let_go(self) -> None:
        """At the end nothing can become a mark any more."""
        while self._state == self._heading:
            held, self._held = self._held, ""
            rest: str | None = self._was_text(held)
            while rest is not None:
                rest = self._state(rest)
        held, self._held = self._held, ""
        if self._state == self._arguing:
            self._end_arguments()
        elif self._state in (self._between, self._thinking, self._talking):
            if self._open is None and held.strip():
                is_thought = self._state == self._thinking
                self._begin(Opened("reasoning" if is_thought else "message"))
                held = held.lstrip("\n") if is_thought or self._is_behind_mark else held
            if self._open is not None:
                self._write(held)

    # Leaves: what is said, and which ids belong to it.

    def _begin(self, opened: Opened) -> None:
        self._open = opened
        self._said.append(opened)

    def _begin_call(self, name: str) -> None:
        if self._open is not None:
            self._close(self._held_from)
        offer = _offer(self._scene, name)
        if offer is None:
            self._begin(Opened("function", name))
            return
        kind: Literal["function", "custom"]
        kind = "custom" if isinstance(offer.tool, CustomTool) else "function"
        self._begin(Opened(kind, offer.tool.name, offer.namespace, offer.tool.is_async is True))

    def _close(self, count: int, *, is_cut: bool = False) -> None:
        """Close what is open, if anything is; the first ids so far are its own."""
        if self._open is not None:
            self._said.append(Closed(self._ids[:count], is_cut))
            self._ids = self._ids[count:]
            self._held_from = 0
            self._open = None
        self._is_behind_mark = True
        self._state = self._between

    def _write(self, text: str) -> None:
        if not text:
            return
        said = self._said
        last = said[-1] if len(said) > self._said_before else None
        if isinstance(last, Wrote):
            said[-1] = Wrote(last.text + text)
        else:
            said.append(Wrote(text))

    def _write_but(self, text: str, held: int) -> None:
        """Write all but the end, and note with which token that end begins."""
        if held < len(text):
            self._held_from = len(self._ids) - (1 if held >= self._fresh else 0)
        elif held == self._fresh:
            self._held_from = len(self._ids) - 1
        self._write(text[: len(text) - held])
        self._held = text[len(text) - held :]

    def _argue(self, text: str) -> None:
        assert self._open is not None
        if self._open.kind == "custom":
            self._input += text
        else:
            self._write(text)

    def _end_arguments(self) -> None:
        self._write(_input(self._input))
        self._input = ""


def _flow(data: bytes) -> Wrote | None:
    """The token as said, if it is whole characters and can neither begin a mark nor stand before one."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return Wrote(text) if text and "<" not in text and text[-1] != "\n" else None


def _held_back(text: str, mark: str) -> int:
    """How many characters at the end may still be newlines before the mark, and a part of it."""
    at = text.rfind("<")
    own = text[:at] if at >= 0 and mark.startswith(text[at:]) else text
    return len(text) - len(own.rstrip("\n"))


def _called(text: str) -> _Called | None:
    try:
        return msgspec.json.decode(text, type=_Called)
    except (msgspec.DecodeError, RecursionError):
        return None


def _arguments(call: _Called) -> str:
    """Verbatim; some models write the object into a string."""
    text = bytes(call.arguments).decode()
    return _string(text) if text.startswith('"') else text


def _string(text: str) -> str:
    return msgspec.json.decode(text, type=str)


def _input(arguments: str) -> str:
    """The input of a custom tool: the string, as much of it as there is, or whatever was written instead."""
    try:
        return msgspec.json.decode(arguments, type=_Input).input
    except msgspec.DecodeError:
        cut = CUT_INPUT.match(arguments)
    try:
        return _string(f'"{cut[1]}"') if cut else arguments
    except msgspec.DecodeError:
        return arguments
