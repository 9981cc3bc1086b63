"""What words does the model get to see? For those who must look at them before it does. Pure.

In: items, or the head of a request. Out: their texts. Everything that is text counts, in whatever field it stands, so
that a new type of item is looked at too; what only names or points (types, roles, ids) does not. What was sealed is
seen as it was opened. Pictures and sound have no words; a file has those that the model will read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from msgspec import UNSET, Raw

from segue.turn.values import Head, Past, Round, Scene, Turn
from segue.wire.codec import encode
from segue.wire.items import InputFile, Item
from segue.wire.response import Response

ReadFile = Callable[[InputFile], str | None]
Json = str | int | float | bool | None | list["Json"] | dict[str, "Json"]

# Fields that hold a name of something and no words of anybody.
NAMES = frozenset(
    {"type", "role", "id", "call_id", "status", "detail", "phase", "execution", "encrypted_content"}
)
# Fields that may hold a picture or sound itself instead of its address: letters that are no words.
MEDIA = frozenset({"image_url", "audio_url", "file_url", "input_audio"})
# Where the words of a file stand, or what they are read from.
FILE = frozenset({"file_data", "segue:text"})

_file_decoder = msgspec.json.Decoder(InputFile)


def texts_of(items: Iterable[Item], read_file: ReadFile) -> list[str]:
    """The texts of these items, in order."""
    found: list[str] = []
    for item in items:
        value: Json = msgspec.json.decode(encode(item.value))
        found.extend(_words(value, read_file))
    return found


def texts_of_head(head: Head, response: Response, parent: Turn | None) -> list[str]:
    """The texts of instructions, tools and format, as far as they are not the parent's."""
    before = None if parent is None else parent.response
    found: list[str] = []
    if head.instructions and (before is None or response.instructions != before.instructions):
        found.append(head.instructions)
    if head.tools.echo and (before is None or response.tools != before.tools):
        found.extend(_with_names(msgspec.json.decode(head.tools.echo)))
    wanted = head.text.format
    if wanted is not None and (before is None or response.text != before.text):
        schema = wanted.schema if wanted.schema is not UNSET else Raw(b"null")
        found.extend(_with_names(msgspec.json.decode(schema)))
        found += [wanted.description] if isinstance(wanted.description, str) else []
    return found


def new_items(scene: Scene, names: Sequence[str]) -> list[Item]:
    """What the model sees in this scene and these guards have not let pass before: as a rule what is given now."""
    if scene.past is not None and has_passed(scene.past, names):
        rounds: Iterable[Round] = scene.rounds
    else:
        rounds = scene.history()
    seen = [item for one in rounds for item in (*one.given, *one.wrote)]
    return [*seen, *scene.given]


def has_passed(turn: Past, names: Sequence[str]) -> bool:
    """Whether all of these guards have let everything pass up to this turn."""
    return all(name in turn.passed for name in names)


def _words(value: Json, read_file: ReadFile) -> Iterator[str]:
    if isinstance(value, dict) and value.get("type") == "input_file" and "file_data" in value:
        text = read_file(_file_decoder.decode(encode(value)))
        value = {name: one for name, one in value.items() if name not in FILE} | {"text": text}
    match value:
        case str():
            if value:
                yield value
        case list():
            for one in value:
                yield from _words(one, read_file)
        case dict():
            for name, one in value.items():
                if not _is_wordless(name, one):
                    yield from _words(one, read_file)
        case _:
            pass


def _is_wordless(name: str, value: Json) -> bool:
    if name in NAMES:
        return isinstance(value, str)
    return name in MEDIA and not (isinstance(value, str) and not value.startswith("data:"))


def _with_names(value: Json) -> Iterator[str]:
    """Every text, and the names of fields too: the model reads the whole definition."""
    match value:
        case str():
            yield value
        case list():
            for one in value:
                yield from _with_names(one)
        case dict():
            for name, one in value.items():
                yield name
                yield from _with_names(one)
        case _:
            pass
