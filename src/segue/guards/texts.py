"""What text does the model get to see? For the guards, which check it first. Pure.

In: items, or the head of a request. Out: their texts. Everything that is text counts, in whatever field it stands, so
that a new type of item is checked too; names and references (types, roles, ids) do not. What was sealed is checked as
it was opened. Pictures and sound have no text; a file has the text that the model will read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec
from msgspec import UNSET

from segue.turn.values import Head, Past, Round, Scene, Turn
from segue.wire.codec import encode
from segue.wire.items import InputFile, Item
from segue.wire.response import Response

ReadFile = Callable[[InputFile], str | None]
_Json = str | int | float | bool | None | list["_Json"] | dict[str, "_Json"]

# Fields that hold a name or a reference and no text.
NAMES = frozenset(
    {"type", "role", "id", "call_id", "status", "detail", "phase", "execution", "encrypted_content"}
)
# Fields that may hold a picture or sound itself instead of its URL: base64, which is no text.
MEDIA = frozenset({"image_url", "audio_url", "file_url", "input_audio"})
# Where the text of a file stands, or what it is read from.
FILE = frozenset({"file_data", "segue:text"})

_file_decoder = msgspec.json.Decoder(InputFile)


def texts_of(items: Iterable[Item], read_file: ReadFile) -> list[str]:
    """The texts of these items, in order."""
    values: Iterator[_Json] = (msgspec.json.decode(encode(item.value)) for item in items)
    return [text for value in values for text in _texts(value, read_file)]


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
        if wanted.schema is not UNSET:
            found.extend(_with_names(msgspec.json.decode(wanted.schema)))
        found += [wanted.description] if isinstance(wanted.description, str) else []
    return found


def new_items(scene: Scene, names: Sequence[str]) -> list[Item]:
    """What the model sees in this scene and these guards have not let pass before: as a rule what is given now."""
    is_known = scene.past is not None and has_passed(scene.past, names)
    rounds: Iterable[Round] = scene.rounds if is_known else scene.history()
    return [*(item for one in rounds for item in (*one.given, *one.wrote)), *scene.given]


def has_passed(turn: Past, names: Sequence[str]) -> bool:
    """Whether all of these guards have let everything pass up to this turn."""
    return all(name in turn.passed for name in names)


def _texts(value: _Json, read_file: ReadFile) -> Iterator[str]:
    if isinstance(value, dict) and value.get("type") == "input_file" and "file_data" in value:
        text = read_file(_file_decoder.decode(encode(value)))
        value = {name: one for name, one in value.items() if name not in FILE} | {"text": text}
    match value:
        case str() if value:
            yield value
        case list():
            for one in value:
                yield from _texts(one, read_file)
        case dict():
            for name, one in value.items():
                if not _is_no_text(name, one):
                    yield from _texts(one, read_file)
        case _:
            pass


def _is_no_text(name: str, value: _Json) -> bool:
    if name in NAMES:
        return isinstance(value, str)
    return name in MEDIA and not (isinstance(value, str) and not value.startswith("data:"))


def _with_names(value: _Json) -> Iterator[str]:
    """Every text, and the names of fields too: the model reads the whole definition."""
    match value:
        case str():
            yield value
        case list():
            for one in value:
                yield from _with_names(one)
        case dict():
            for pair in value.items():
                yield from _with_names([*pair])
        case _:
            pass
