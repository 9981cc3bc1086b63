"""Does a table of plain values fit a struct? All that does not fit: where it stands, and what would fit, in words.

In: a table as TOML, flags or variables give it, and a struct type. Out: a path and a sentence for each misfit. Nothing
here knows a setting.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping
from types import NoneType
from typing import Literal, get_args, get_origin

import msgspec
from msgspec import Struct, inspect

# ("mcp", 0, "command"): the command of the first [[mcp]] table.
SettingPath = tuple[str | int, ...]
VALUE_CHARS_MAX = 80
# What people write, without capitals and signs, for a choice that is called otherwise here.
CALLED = dict.fromkeys(("ollama", "openai", "lmstudio", "litellm", "openrouter", "gemini"), "chat")


class Misfit(Struct, frozen=True):
    """A value that does not fit: where it stands, and why not."""

    path: SettingPath
    sentence: str

    @property
    def setting(self) -> str:
        """The path as it is written: mcp[0].command."""
        words = (f"[{step}]" if isinstance(step, int) else f".{step}" for step in self.path)
        return "".join(words).removeprefix(".")


def nearest(word: str, names: Iterable[str]) -> str:
    """A question with the name most like a word; nothing if no name is like it."""
    choices = list(names)
    called = CALLED.get(re.sub(r"[^a-z]", "", word.lower()))
    found = [called] if called in choices else difflib.get_close_matches(word, choices, n=1)
    return f" Did you mean {found[0]}?" if found else ""


def misfits(
    values: Mapping[str, object], kind: type[Struct], path: SettingPath = ()
) -> Iterator[Misfit]:
    """What of a table does not fit the struct."""
    fields = {field.name: field for field in msgspec.structs.fields(kind)}
    for name, value in values.items():
        here = (*path, name)
        if name in fields:
            yield from _value_misfits(value, fields[name].type, here)
        else:
            where = f" of [[{path[0]}]]" if path else ""
            sentence = f"'{name}' is not a setting{where}.{nearest(name, fields)}"
            yield Misfit(here, sentence)
    for name, field in fields.items():
        if field.required and name not in values:
            yield Misfit(path, f"{name} is missing.")


def _value_misfits(value: object, kind: object, path: SettingPath) -> Iterator[Misfit]:
    if NoneType in get_args(kind):
        # "X | None": what is set is an X.
        kind = get_args(kind)[0]
    outer, inner = get_origin(kind), get_args(kind)
    if isinstance(kind, type) and issubclass(kind, Struct) and isinstance(value, Mapping):
        yield from misfits(value, kind, path)
    elif outer is tuple and isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _value_misfits(item, inner[0], (*path, index))
    elif outer is dict and isinstance(value, Mapping):
        for name, item in value.items():
            yield from _value_misfits(item, inner[1], (*path, name))
    elif isinstance(value, Mapping) and (wanted := expected(kind)).startswith("a list of tables"):
        yield Misfit(path, f"a table is not {wanted}.{_as_list(value, inner[0], path)}")
    elif not _fits(value, kind):
        hint = nearest(str(value), choices) if (choices := choices_of(kind)) else ""
        yield Misfit(path, f"{shown(value)} is not {expected(kind)}.{hint}")


def _as_list(table: Mapping[str, object], kind: object, path: SettingPath) -> str:
    """How a table would be one of a list: [models.foo] is [[models]] with the name foo."""
    name, inside = next(iter(table.items()), ("", None))
    key = "label" if hasattr(kind, "label") else "name"
    named = f' and {key} = "{name}"' if isinstance(inside, Mapping) else ""
    return f" Write [[{path[-1]}]]{named}."


def _fits(value: object, kind: object) -> bool:
    try:
        msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError:
        return False
    return True


def choices_of(kind: object) -> tuple[str, ...]:
    """The values that a type allows, where they are a fixed list."""
    return get_args(kind) if get_origin(kind) is Literal else ()


def shown(value: object) -> str:
    """A value in a sentence, as it would be written."""
    if isinstance(value, str):
        return f"'{value[:VALUE_CHARS_MAX]}'"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "a list"
    return "a table" if isinstance(value, Mapping) else str(value)


def expected(kind: object) -> str:
    """What fits a type, in words."""
    if choices := choices_of(kind):
        return f"one of: {', '.join(choices)}"
    return _described(inspect.type_info(kind))


def _described(kind: inspect.Type) -> str:
    match kind:
        case inspect.BoolType():
            return "true or false"
        case inspect.IntType():
            return "a whole number" + _range(kind)
        case inspect.FloatType():
            return "a number" + _range(kind)
        case inspect.UnionType(types=(first, *_)):
            return _described(first)
        case inspect.VarTupleType(item_type=item):
            noun = _described(item).split()
            plural = {"whole": "numbers", "table": "tables"}.get(noun[1], "texts")
            return f"a list of {plural}, written in [ ]"
        case inspect.DictType() | inspect.StructType():
            return "a table"
        case _:
            return "a text, written in quotes"


def _range(kind: inspect.IntType | inspect.FloatType) -> str:
    low, high = kind.ge, kind.le
    if isinstance(kind, inspect.IntType) and kind.gt is not None:
        low = kind.gt + 1
    if low is not None and high is not None:
        return f" from {low:g} to {high:g}"
    if kind.gt is not None and low is None:
        return f" above {kind.gt:g}" + (f" and up to {high:g}" if high is not None else "")
    return f" of at least {low:g}" if low is not None else ""
