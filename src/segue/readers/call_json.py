"""How is the JSON of a call read, while the model still writes it?

In: text, cut anywhere. Out: where an object ends (`Braces`), which tool a whole object calls, its keys in any order
(`whole_call`), and the one string of a call that has only one as far as it is certain (`InputReader`).

To the model a custom tool is a function with one string: `{"input": "…"}`, and so is what runs code: `{"code": "…"}`.
The string is sent while it is written, so that a long patch is seen early. Where the JSON is broken nothing is lost: an
invalid escape stays as it was written, and arguments that are something else altogether are sent as they are: at once
where they do not begin like an object, else at the end. An escape that was cut in the middle is left out.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

# With which keys an object may begin that is a call without a mark.
FIRST_KEY = re.compile(r'\{\s*"(\w*)(")?')
KEYS = ("name", "type", "id", "function", "arguments", "parameters")
# Beside what JSON is made of: what cannot be JSON, special tokens (`marks.py`) everywhere.
IN_STRING = re.compile(r'[\\"\udc00-\udfff]')
IN_OBJECT = re.compile(r'["{}<`\udc00-\udfff]')


@dataclass(slots=True)
class Braces:
    """Finds the end of a JSON object that arrives in pieces."""

    depth: int = 0
    is_quoted: bool = False
    is_escaped: bool = False

    def end_in(self, text: str, at: int = 0) -> int | None:
        """After the brace that closes the object, or before what cannot be JSON; None: not in here."""
        if self.is_escaped and at < len(text):
            self.is_escaped = False
            at += 1
        while mark := (IN_STRING if self.is_quoted else IN_OBJECT).search(text, at):
            at = mark.end()
            match mark[0]:
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
                    return mark.start()
        return None


# --- which tool is called -------------------------------------------------------------------------


def may_begin_call(text: str) -> bool:
    """Whether an object that begins like this may be a call."""
    if not text[1:].lstrip():
        return True
    key = FIRST_KEY.match(text)
    if key is None:
        return False
    return key[1] in KEYS if key[2] else any(known.startswith(key[1]) for known in KEYS)


_any_fields = msgspec.json.Decoder(dict[str, Raw])


def is_object(text: str) -> bool:
    """Whether this is the JSON of an object."""
    try:
        # What is inside is looked over, and no value is made of it.
        return text.startswith("{") and _any_fields.decode(text) is not None
    except (msgspec.DecodeError, RecursionError):
        return False


class CallObject(Struct):
    """A call that is an object, in any order of keys."""

    name: str
    arguments: Raw | UnsetType = UNSET
    parameters: Raw | UnsetType = UNSET

    def arguments_text(self) -> str:
        """Verbatim; some models write the object into a string."""
        raw = self.parameters if self.arguments is UNSET else self.arguments
        text = "{}" if raw is UNSET else bytes(raw).decode()
        return msgspec.json.decode(text, type=str) if text.startswith('"') else text


class _Wrapped(Struct):
    function: CallObject


def whole_call(text: str) -> CallObject | None:
    """The call that this object is; None if it is no call."""
    try:
        return msgspec.json.decode(text, type=CallObject)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return msgspec.json.decode(text, type=_Wrapped).function
    except (msgspec.DecodeError, RecursionError):
        return None


FENCED = re.compile(r"```(?:json|tool_call)?\s*(.*?)(?:```)?", re.DOTALL)


def only_calls(text: str) -> list[CallObject]:
    """The calls that this text is, in a fence or not; none if there is anything else in it."""
    fenced = FENCED.fullmatch(text.strip())
    rest = fenced[1] if fenced else text
    calls: list[CallObject] = []
    while rest := rest.lstrip("}; \t\r\n"):
        end = Braces().end_in(rest) if rest[0] == "{" else 0
        # A brace too few is a common slip of small models.
        call = whole_call(rest[:end]) or (whole_call(rest + "}") if end is None else None)
        if call is None:
            return []
        calls.append(call)
        rest = "" if end is None else rest[end:]
    return calls


# --- the input of a custom tool, and code ----------------------------------------------------------

# The name of the string, by the kind of call.
INPUT_KEYS = {"custom": "input", "code_interpreter": "code"}
OPENINGS = {key: re.compile(rf'\s*\{{\s*"{key}"\s*:\s*"') for key in INPUT_KEYS.values()}
# How arguments begin that may be an object.
MAY_BE_OBJECT = re.compile(r'\s*(?:\{\s*(?:".*)?)?', re.DOTALL)
PLAIN = re.compile(r'[^"\\]+')
# A whole escape; a character beyond the first 65,536 is two of them.
ESCAPE = re.compile(
    r"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    r'|\\u[0-9a-fA-F]{4}|\\["\\/bfnrt]'
)
# The beginning of an escape, up to the end of the text so far.
BEGUN = re.compile(
    r"\\(?:u[0-9a-fA-F]{0,3})?|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?"
)
# The longest beginning.
BEGUN_CHARS_MAX = 11


@dataclass(slots=True)
class InputReader:
    """Reads the arguments of one call, in which the string has this name."""

    key: str = "input"
    # All of it until the string begins, then what may become an escape.
    _held: str = ""
    _is_open: bool = False
    _is_closed: bool = False
    # Whether it is no object at all, but the string itself.
    _is_bare: bool = False

    def feed(self, text: str) -> str:
        """What has become certain of the input."""
        if self._is_closed:
            return ""
        if self._is_bare:
            return text
        text = self._held + text
        if not self._is_open:
            opening = OPENINGS[self.key].match(text)
            if opening is None:
                self._is_bare = MAY_BE_OBJECT.fullmatch(text) is None
                self._held = "" if self._is_bare else text
                return text if self._is_bare else ""
            self._is_open = True
            text = text[opening.end() :]
        return self._unescaped(text)

    def close(self) -> str:
        """What is left when there is no more: arguments that hold no such string at their beginning."""
        if self._is_open:
            return ""
        try:
            # Another order of keys, or something else.
            found = msgspec.json.decode(self._held or "null", type=dict[str, object])
        except (msgspec.DecodeError, RecursionError):
            return self._held
        text = found.get(self.key)
        return text if isinstance(text, str) else self._held

    def _unescaped(self, text: str) -> str:
        parsed: list[str] = []
        at = 0
        self._held = ""
        while at < len(text):
            if plain := PLAIN.match(text, at):
                parsed.append(plain[0])
                at = plain.end()
            elif text[at] == '"':
                self._is_closed = True
                break
            elif len(text) - at <= BEGUN_CHARS_MAX and BEGUN.fullmatch(text, at):
                self._held = text[at:]
                break
            else:
                escape = ESCAPE.match(text, at)
                written = "\\" if escape is None else escape[0]
                parsed.append(unescaped(written))
                at += len(written)
        return "".join(parsed)


def unescaped(escape: str) -> str:
    """The character of an escape; what is none, such as half of a pair, as it was written."""
    try:
        return msgspec.json.decode(f'"{escape}"', type=str)
    except msgspec.DecodeError:
        return escape
