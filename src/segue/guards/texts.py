"""What text does the model get to see? For the guards, which check it first. Pure.

In: items, or the head of a request. Out: their texts. The functions that write an item or a tool for the model write it
here too (`dialects/parts`, `readers/offers`), so that guards see what the model reads, in whatever field it stood:
names, ids of calls, keys, fields that we do not know. Where that text is JSON, strings that are written there with
escapes are shown once more without them; so are the URLs of pictures, sound and files, which may be fetched. JSON that
the model still writes has no end yet: `forms_of` resolves the escapes in a piece of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import msgspec
from msgspec import Raw

from segue.dialects.parts import dumps, part_of
from segue.readers.call_json import ESCAPE, unescaped
from segue.readers.offers import added_by, definition_of
from segue.seams.history import Past, Round, Turn
from segue.seams.model import Scene
from segue.seams.prompt import Head
from segue.wire.codec import encode
from segue.wire.items import ConfigurationUpdate, Item
from segue.wire.kinds import shown_as
from segue.wire.long_texts import string_end
from segue.wire.requests import TextFormat
from segue.wire.response import Response
from segue.wire.tools import CustomTool, Offer

_string = msgspec.json.Decoder(str)
_any_json = msgspec.json.Decoder(Raw)
# Fields with the URL of something that the model does not read as text.
URLS = ("image_url", "audio_url", "file_url")
# How often the escapes in JSON that the model writes are resolved: a string there may hold JSON once more.
ESCAPES_DEEP_MAX = 2
# The longest escape, of a character that is two of them: one that is not whole yet counts as so many characters.
ESCAPE_CHARS_MAX = len(r"\\ud83d\\ude00")


def texts_of(items: Iterable[Item]) -> list[str]:
    """The texts of these items, in order."""
    return [text for item in items for text in _texts(item) if text]


def texts_of_head(head: Head, response: Response, parent: Turn | None) -> list[str]:
    """The texts of instructions, tools and format, as far as they are not the parent's."""
    before = None if parent is None else parent.response
    texts: list[str] = []
    if head.instructions and (before is None or response.instructions != before.instructions):
        texts.append(head.instructions)
    if before is None or response.tools != before.tools:
        texts.extend(_of_tools((*head.tools.offers, *head.tools.deferred)))
    wanted = head.text.format
    if wanted is not None and (before is None or response.text != before.text):
        texts.extend(_of_format(wanted))
    return texts


def new_items(scene: Scene, names: Sequence[str]) -> list[Item]:
    """What the model sees in this scene and these guards have not let pass before: as a rule what is given now."""
    is_known = scene.past is not None and has_passed(scene.past, names)
    rounds: Iterable[Round] = scene.rounds if is_known else scene.history()
    return [*(item for round_ in rounds for item in (*round_.given, *round_.wrote)), *scene.given]


def has_passed(turn: Past, names: Sequence[str]) -> bool:
    """Whether all of these guards have let everything pass up to this turn."""
    return all(name in turn.passed for name in names)


def _texts(item: Item) -> Iterator[str]:
    value = item.value
    if shown_as(value) == "nothing":
        # The model knows it from elsewhere: the tools of a remote server, a call that was approved.
        yield from _meant(_as_json(encode(value)))
        return
    part = part_of(item)
    yield part.name
    yield part.call_id
    added = added_by(item)
    yield from _of_tools(added) if added else _meant(part.text)
    if isinstance(value, ConfigurationUpdate) and value.text and value.text.format is not None:
        yield from _of_format(value.text.format)
    for inner in _content(value):
        for name in URLS:
            url = getattr(inner, name, None)
            if isinstance(url, str) and not url.startswith("data:"):
                yield url


def _as_json(raw: bytes) -> str:
    """JSON as the model would see it; as it came where unread fields hold numbers that we do not take."""
    try:
        return dumps(msgspec.json.decode(raw))
    except (msgspec.MsgspecError, RecursionError):
        return raw.decode()


def _content(value: object) -> Sequence[object]:
    content = getattr(value, "content", None) or getattr(value, "output", None)
    return content if isinstance(content, list) else ()


def _of_tools(offers: Iterable[Offer]) -> Iterator[str]:
    for offer in offers:
        yield from _meant(dumps(definition_of(offer)))
        if isinstance(offer.tool, CustomTool) and isinstance(offer.tool.format, Raw):
            # JSON in the middle of the description.
            yield from _meant(bytes(offer.tool.format).decode())


def _of_format(wanted: TextFormat) -> Iterator[str]:
    for text in (wanted.name, wanted.description):
        if isinstance(text, str):
            yield text
    if isinstance(wanted.schema, Raw):
        yield from _meant(dumps(msgspec.json.decode(wanted.schema)))


def _meant(text: str) -> Iterator[str]:
    """A text, and where it is JSON, the strings in it that are written there with escapes: one by one, as to take all
    of it apart at once would hold up other requests."""
    yield text
    if not begins_json(text) or not _is_json(text):
        return
    data, at = text.encode(), 0
    while (start := data.find(b'"', at)) >= 0:
        at = string_end(data, start + 1)
        written = data[start:at]
        if b"\\" in written:
            with suppress(ValueError):
                # Which may be JSON again: the arguments of a call.
                yield from _meant(_string.decode(written))


def _is_json(text: str) -> bool:
    try:
        _any_json.decode(text)
    except (ValueError, RecursionError):
        return False
    return True


# --- what the model writes ------------------------------------------------------------------------


def begins_json(text: str) -> bool | None:
    """Whether a text is JSON, by its beginning; None while there is nothing but blanks."""
    start = text.lstrip()[:1]
    return start in ("{", "[") if start else None


def forms_of(text: str) -> list[str]:
    """A piece of JSON as it is written, and with its escapes resolved, as far as there are any."""
    forms = [text]
    while len(forms) <= ESCAPES_DEEP_MAX and ESCAPE.search(forms[-1]):
        forms.append(ESCAPE.sub(lambda escape: unescaped(escape[0]), forms[-1]))
    return forms


def chars_written(forms: Sequence[str], chars: int) -> int:
    """With how many characters the first of these forms writes the last `chars` of the last one."""
    for text in reversed(forms[:-1]):
        end = len(text)
        for escape in reversed([*ESCAPE.finditer(text)]):
            if end - escape.end() >= chars:
                break
            chars -= end - escape.end() + 1
            end = escape.start()
        chars += len(text) - end
    return chars
