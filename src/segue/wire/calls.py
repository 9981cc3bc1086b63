"""How are the call of a built-in tool and the arguments that a model writes for it made from each other?

To the model a shell, patches, a search for tools and the three actions of a web search are functions, whose arguments
it writes as JSON. The client gets an item with typed fields instead. Both directions are here, so that a call that a
client sends back reads as the model wrote it. Arguments that cannot be parsed never break an item: it has the fields
that could be understood, and a command is never made up. Nothing here knows a model family or the order of events.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from typing import Literal, NamedTuple, assert_never

import msgspec
from msgspec import UNSET, Raw, Struct, structs

from segue.wire.items import (
    ApplyPatchCall,
    CodeInterpreterCall,
    CreateFile,
    DeleteFile,
    FindInPageAction,
    LocalShellAction,
    LocalShellCall,
    OpenPageAction,
    PatchOperation,
    SearchAction,
    ShellAction,
    ShellCall,
    ToolSearchCall,
    UpdateFile,
    WebAction,
    WebSearchCall,
)
from segue.wire.requests import COUNT_MAX

_Fields = Mapping[str, object]

# The namespace of the functions of a web search.
WEB = "web"
# The function that runs code, whichever way a model writes it.
PYTHON = "python"
# Beyond this a text is no query.
QUERY_CHARS_MAX = 1_000
# How many members are given up, one by one from the end, until arguments that were cut off can be read.
GIVEN_UP_MAX = 8
IN_STRING = re.compile(r'[^"\\]+')
ESCAPE = re.compile(r"\\(?:u[dD][89abAB][0-9a-fA-F]{2}\\u[0-9a-fA-F]{4}|u[0-9a-fA-F]{4}|[^u])")
# An escape that needs more letters: half a letter of two halves may still get its other half.
ESCAPE_BEGUN = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3}|u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)?\Z"
)
CLOSING = {"{": "}", "[": "]"}


# --- from what the model wrote --------------------------------------------------------------------


class CommandPiece(NamedTuple):
    """A command begins, goes on, or is whole."""

    what: Literal["begun", "more", "whole"]
    # The place of the command among all.
    nth: int
    text: str


class CommandScanner:
    """Finds the commands of a shell call in arguments that arrive in pieces: the strings of `commands`.

    `commands` holds them as far as they have come.
    """

    def __init__(self) -> None:
        self.commands: list[str] = []
        self._held = ""
        self._depth = 0
        self._key = ""
        self._is_listing = False
        # The string that we are in: a command, or any other, of which only keys matter.
        self._inside: Literal["", "command", "other"] = ""
        self._other = ""

    def feed(self, text: str) -> list[CommandPiece]:
        """What has become certain with this text."""
        text = self._held + text
        self._held = ""
        pieces: list[CommandPiece] = []
        at = 0
        while at < len(text):
            at = (
                self._take_string(text, at, pieces)
                if self._inside
                else self._take(text, at, pieces)
            )
        return pieces

    def close(self, arguments: str) -> list[CommandPiece]:
        """The arguments are over: a command that was begun ends here, and commands in other words are found."""
        if self.commands:
            return [self._whole()] if self._inside == "command" else []
        self.commands = _other_commands(arguments)
        return [
            CommandPiece(what, index, "" if what == "begun" else command)
            for index, command in enumerate(self.commands)
            for what in ("begun", "more", "whole")
        ]

    def _take(self, text: str, at: int, pieces: list[CommandPiece]) -> int:
        match text[at]:
            case '"' if self._key == "commands" and (self._depth == 1 or self._is_listing):
                self._inside = "command"
                self.commands.append("")
                pieces.append(CommandPiece("begun", len(self.commands) - 1, ""))
            case '"':
                self._inside, self._other = "other", ""
            case "{" | "[" as brace:
                self._depth += 1
                self._is_listing = self._depth == 2 and brace == "[" and self._key == "commands"
            case "}" | "]":
                self._depth -= 1
                self._is_listing = False
            case ":" if self._depth == 1:
                self._key = self._other
            case "," if self._depth == 1:
                self._key = ""
            case _:
                pass
        return at + 1

    def _take_string(self, text: str, at: int, pieces: list[CommandPiece]) -> int:
        if text[at] == '"':
            if self._inside == "command":
                pieces.append(self._whole())
            self._inside = ""
            return at + 1
        found = IN_STRING.match(text, at)
        if found is not None:
            self._add(found[0], pieces)
            return found.end()
        if ESCAPE_BEGUN.match(text, at):
            self._held = text[at:]
            return len(text)
        escape = ESCAPE.match(text, at)
        letters = text[at] if escape is None else _unescaped(escape[0])
        self._add(letters, pieces)
        return at + 1 if escape is None else escape.end()

    def _add(self, text: str, pieces: list[CommandPiece]) -> None:
        if self._inside == "command":
            self.commands[-1] += text
            pieces.append(CommandPiece("more", len(self.commands) - 1, text))
        else:
            self._other += text

    def _whole(self) -> CommandPiece:
        return CommandPiece("whole", len(self.commands) - 1, self.commands[-1])


def _unescaped(escape: str) -> str:
    try:
        text: str = json.loads(f'"{escape}"')
    except ValueError:
        return escape
    # Half a letter cannot leave as UTF-8.
    return text.encode("utf-8", "replace").decode()


def shell_action(arguments: str, commands: list[str]) -> ShellAction:
    """What a shell is to do: these commands, and the limits that the arguments set."""
    fields = _fields(arguments, "action")
    return ShellAction(
        commands=commands,
        timeout_ms=_count(fields, "timeout_ms"),
        max_output_length=_count(fields, "max_output_length"),
    )


def _other_commands(arguments: str) -> list[str]:
    """Commands in other words than we asked for, as models write that have learned another shell."""
    fields = _fields(arguments, "action")
    for key in ("commands", "command", "cmd"):
        match fields.get(key):
            case str() as command:
                return [command]
            case list() as words if key == "commands":
                return [word for word in words if isinstance(word, str)]
            case list() as words:
                return [shlex.join(str(word) for word in words)] if words else []
            case _:
                pass
    return []


def local_shell_action(arguments: str) -> LocalShellAction:
    """What the older shell is to do: one program with its arguments."""
    fields = _fields(arguments, "action")
    command = fields.get("command")
    if isinstance(command, str):
        command = ["bash", "-lc", command]
    env = fields.get("env")
    return LocalShellAction(
        command=[str(word) for word in command] if isinstance(command, list) else [],
        env={str(name): str(value) for name, value in env.items()} if isinstance(env, dict) else {},
        timeout_ms=_count(fields, "timeout_ms"),
        user=_text(fields, "user"),
        working_directory=_text(fields, "working_directory"),
    )


def patch_operation(arguments: str) -> PatchOperation:
    """What to do with a file. Arguments that cannot be parsed become an update without a path, which no client can
    apply; its diff is what the model wrote."""
    fields = _fields(arguments, "operation")
    path, diff = fields.get("path"), fields.get("diff")
    if not isinstance(path, str):
        return UpdateFile("", arguments)
    match fields.get("type"):
        case "delete_file":
            return DeleteFile(path)
        case "create_file":
            return CreateFile(path, diff if isinstance(diff, str) else "")
        case _:
            return UpdateFile(path, diff if isinstance(diff, str) else "")


def search_arguments(arguments: str) -> Raw:
    """What is searched for, as JSON; what is none, as a string."""
    try:
        msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        return Raw(msgspec.json.encode(arguments))
    return Raw(arguments.strip().encode())


class _WebArguments(Struct, frozen=True):
    """What a model may write for any function of a web search; `type` where it is an action already."""

    type: str = ""
    query: str = ""
    q: str = ""
    url: str = ""
    pattern: str = ""


def web_action(name: str, arguments: str | bytes) -> WebAction:
    """What the model asks for, by the function's name and its arguments; an action that was made of them is read alike.

    Arguments that cannot be parsed are empty ones, which the tool then reports.
    """
    try:
        written = msgspec.json.decode(arguments or "{}", type=_WebArguments)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        written = _WebArguments()
    match written.type or name:
        case "open_page":
            return OpenPageAction(url=written.url)
        case "find_in_page":
            return FindInPageAction(pattern=written.pattern or written.query, url=written.url)
        case _:
            query = (written.query or written.q)[:QUERY_CHARS_MAX].strip()
            return SearchAction(query=query, queries=[query] if query else [])


def _fields(arguments: str, wrapper: str) -> _Fields:
    """The arguments as an object, as far as there is one; some models put it into the field that the item has."""
    value = _read(arguments)
    inner = value.get(wrapper) if isinstance(value, dict) and len(value) == 1 else None
    found = inner if isinstance(inner, dict) else value
    return found if isinstance(found, dict) else {}


def _read(text: str) -> object:
    """JSON, also where it is cut off: what is open is closed, and what is not whole is given up."""
    closing = ""
    for _ in range(GIVEN_UP_MAX):
        try:
            # Newlines that should have been escaped are letters all the same.
            return json.loads(text + closing, strict=False)
        except (ValueError, RecursionError):
            if closing:
                comma = _open_ends(text).comma
                text = text[: max(comma, 0)]
            end, closing, _ = _open_ends(text)
            text = text[:end]
    return None


class _Ends(NamedTuple):
    """Up to where a text can be parsed, what closes it there, and where its last comma outside of a string is."""

    end: int
    closing: str
    comma: int


def _open_ends(text: str) -> _Ends:
    stack: list[str] = []
    comma = escape_at = -1
    is_quoted = is_escaped = False
    for at, letter in enumerate(text):
        if is_quoted:
            is_quoted = is_escaped or letter != '"'
            is_escaped = letter == "\\" and not is_escaped
            escape_at = at if is_escaped else escape_at
        elif letter == '"':
            is_quoted = True
        elif letter in CLOSING:
            stack.append(CLOSING[letter])
        elif letter in "}]" and stack:
            stack.pop()
        elif letter == ",":
            comma = at
    needed = 6 if text[escape_at + 1 : escape_at + 2] == "u" else 2
    is_cut_off = is_quoted and escape_at >= 0 and len(text) - escape_at < needed
    quote = '"' if is_quoted else ""
    return _Ends(escape_at if is_cut_off else len(text), quote + "".join(reversed(stack)), comma)


def _count(fields: _Fields, key: str) -> int | None:
    value = fields.get(key)
    return value if type(value) is int and 0 <= value <= COUNT_MAX else None


def _text(fields: _Fields, key: str) -> str | None:
    value = fields.get(key)
    return value if isinstance(value, str) else None


# --- and back -------------------------------------------------------------------------------------


def web_function(action: Raw | bytes) -> str:
    """The whole name of the function that a model calls for this action."""
    return f"{WEB}.{web_action('search', bytes(action)).__struct_config__.tag}"


def _web_arguments(action: Raw | bytes) -> dict[str, str]:
    read = web_action("search", bytes(action))
    match read:
        case SearchAction(query=query):
            return {"query": query}
        case OpenPageAction(url=url):
            return {"url": url}
        case FindInPageAction(url=url, pattern=pattern):
            return {"url": url, "pattern": pattern}
        case _:
            assert_never(read)


FunctionLikeCall = (
    ShellCall
    | LocalShellCall
    | ApplyPatchCall
    | ToolSearchCall
    | WebSearchCall
    | CodeInterpreterCall
)


def arguments_of(value: FunctionLikeCall) -> object:
    """What the model writes to make this call."""
    match value:
        case ShellCall(action=action):
            fields = structs.asdict(action)
        case LocalShellCall(action=action):
            fields = {**structs.asdict(action), "env": action.env or None}
        case ApplyPatchCall(operation=operation):
            kind = str(operation.__struct_config__.tag)
            diff = "" if isinstance(operation, DeleteFile) else operation.diff
            fields = {"type": kind, "path": operation.path, "diff": diff}
        case ToolSearchCall(arguments=arguments):
            return {} if arguments is UNSET else msgspec.json.decode(arguments)
        case WebSearchCall(action=action):
            return {} if action is UNSET else _web_arguments(action)
        case CodeInterpreterCall(code=code):
            return {"code": code or ""}
    return {key: value for key, value in fields.items() if value is not None and value is not UNSET}
