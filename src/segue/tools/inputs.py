"""What is at the URLs in an input, and what is the text of its PDFs?

In: the items of a request, and a way to read URLs, where the operator allows that. Out: the same items with files and
pictures inside them, as if the client had sent their bytes; so the content is kept with the turn, is the same whenever
the turn is continued, and no engine ever follows a URL. Everything is read before the turn begins, all at once and
within limits: what cannot be read is refused, and `param` names the place.

A PDF takes long to read, so that is done in the turn, where a client gets heartbeats and can cancel. Its text is kept
beside its bytes, so that it is read once and is the same in every continuation.
"""

from __future__ import annotations

import asyncio
from binascii import b2a_base64
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from mimetypes import guess_type
from typing import Literal, NamedTuple

import msgspec
from msgspec import Raw

from segue.aio import off_loop
from segue.errors import ApiError, InvalidRequest
from segue.seams.history import Owner
from segue.wire import long_texts
from segue.wire.codec import decode_item, encode
from segue.wire.files import SLICE_CHARS, contents, is_pdf
from segue.wire.items import (
    CustomToolCallOutput,
    FunctionCallOutput,
    InputFile,
    InputImage,
    Item,
    Message,
)

UrlKind = Literal["file", "image"]
# Returns the bytes at a URL as a data URL.
ReadUrl = Callable[[str, UrlKind], Awaitable[str]]
# Returns the name and the bytes of a file that the owner has uploaded, within a size.
ReadFile = Callable[[Owner, str, int], Awaitable[tuple[str, bytes]]]
# Returns the text of a PDF; None if it is broken.
ReadPdf = Callable[[bytes], Awaitable[str | None]]

# URLs in one request, and the size of everything they lead to, as it is kept.
URLS_MAX = 32
CHARS_MAX = 64 * 1024 * 1024
# Uploaded files in one request, and their size together.
FILES_MAX = 32
FILES_BYTES_MAX = 48 * 1024 * 1024
# Requests whose files are read at the same time.
READING_MAX = 2
# Writing so much into an item takes some milliseconds.
LONG_BYTES = 1024 * 1024
# PDFs in one request.
PDFS_MAX = 32
# So many characters of base64 tell whether a file claims to be a PDF.
CLAIM_CHARS = 8


class _Part(NamedTuple):
    """A part of an item, and where it stands."""

    item: int
    # The field of the item that has its parts.
    field: Literal["content", "output"]
    place: int
    value: object

    @property
    def param(self) -> str:
        return f"input[{self.item}].{self.field}[{self.place}]"


class _Change(NamedTuple):
    """Fields of a part: these, and what they are where the client has left them out."""

    part: _Part
    texts: Mapping[str, str]
    usual: Mapping[str, str] = {}


_fields = msgspec.json.Decoder(dict[str, Raw])
_parts_of = msgspec.json.Decoder(list[dict[str, Raw]])


async def attach(items: tuple[Item, ...], read_url: ReadUrl) -> tuple[Item, ...]:
    """The items with the contents of their URLs."""
    places = [(part, *found) for part in _parts(items) if (found := _url_in(part.value))]
    if not places:
        return items
    if len(places) > URLS_MAX:
        message = f"Too many URLs: {len(places)}, at most {URLS_MAX} are read."
        raise InvalidRequest(message, param="input")

    async def read(part: _Part, kind: UrlKind, url: str) -> str:
        try:
            return await read_url(url, kind)
        except ApiError as error:
            error.param = f"{part.param}.{kind}_url"
            raise

    read_data = await asyncio.gather(*(read(*place) for place in places))
    if sum(map(len, read_data)) > CHARS_MAX:
        message = "The contents of the URLs are too large together."
        raise InvalidRequest(message, code="url_failed", param="input")
    changes = [
        _Change(part, {"image_url": data})
        if kind == "image"
        else _Change(part, {"file_data": data}, {"filename": _name_of(url)})
        for (part, kind, url), data in zip(places, read_data, strict=True)
    ]
    return await _with_changes(items, changes)


async def attach_files(
    items: tuple[Item, ...], owner: Owner, read_file: ReadFile, turns: asyncio.Semaphore
) -> tuple[Item, ...]:
    """The items with the contents of the uploaded files that they name. A small request may name large files, which
    count once they are in a turn: so a few are read at a time."""
    places = [(part, file_id) for part in _parts(items) if (file_id := _file_in(part.value))]
    if len(places) > FILES_MAX:
        message = f"Too many files: {len(places)}, at most {FILES_MAX} are read."
        raise InvalidRequest(message, param="input")
    if not places:
        return items
    changes: list[_Change] = []
    left = FILES_BYTES_MAX
    async with turns:
        for part, file_id in places:
            try:
                name, data = await read_file(owner, file_id, left)
                is_long = len(data) > LONG_BYTES
                changes.append(await off_loop(is_long, _file_change, part, name, data))
            except ApiError as error:
                error.param = f"{part.param}.file_id"
                raise
            left -= len(data)
        return await _with_changes(items, changes)


def _file_change(part: _Part, name: str, data: bytes) -> _Change:
    """A file inside a part, as if the client had sent its bytes."""
    kind = guess_type(name)[0] or "application/octet-stream"
    url = f"data:{kind};base64,{_base64(data)}"
    if isinstance(part.value, InputFile):
        return _Change(part, {"file_data": url}, {"filename": name})
    if not kind.startswith("image/"):
        raise InvalidRequest(f"The file '{name}' is no image by its name.", code="invalid_value")
    return _Change(part, {"image_url": url})


def _base64(data: bytes) -> str:
    """The text that stands for bytes; in slices, as they are read."""
    step = SLICE_CHARS // 4 * 3
    slices = (b2a_base64(data[at : at + step], newline=False) for at in range(0, len(data), step))
    return b"".join(slices).decode()


def _file_in(part: object) -> str | None:
    """The uploaded file that is to be read; data that is here already is not read again."""
    match part:
        case InputFile(file_id=str() as file_id, file_data=data) if file_id and not data:
            return file_id
        case InputImage(file_id=str() as file_id, image_url=url) if file_id and not url:
            return file_id
        case _:
            return None


async def read_pdfs(items: tuple[Item, ...], read_pdf: ReadPdf) -> tuple[Item, ...]:
    """The items with the text of their PDFs, one after the other, so that no request keeps others from being read."""
    places = [(part, data) for part in _parts(items) if (data := _pdf_in(part.value))]
    if len(places) > PDFS_MAX:
        message = f"Too many PDF files: {len(places)}, at most {PDFS_MAX} are read."
        raise InvalidRequest(message, param="input")
    changes: list[_Change] = []
    for part, data in places:
        try:
            content = await off_loop(len(data) > LONG_BYTES, contents, data)
            text = await read_pdf(content or b"")
        except ApiError as error:
            error.param = part.param
            raise
        if text is not None:
            changes.append(_Change(part, {"segue:text": text}))
    return await _with_changes(items, changes)


def _parts(items: Iterable[Item]) -> Iterator[_Part]:
    for number, item in enumerate(items):
        match item.value:
            case Message(content=list() as values):
                yield from (_Part(number, "content", *one) for one in enumerate(values))
            case (
                FunctionCallOutput(output=list() as values)
                | CustomToolCallOutput(output=list() as values)
            ):
                yield from (_Part(number, "output", *one) for one in enumerate(values))
            case _:
                pass


def _url_in(part: object) -> tuple[UrlKind, str] | None:
    """The URL that is to be read; data that is here already is not fetched."""
    match part:
        case InputFile(file_url=str() as url, file_data=data) if not data and _is_remote(url):
            return "file", url
        case InputImage(image_url=str() as url) if _is_remote(url):
            return "image", url
        case _:
            return None


def _is_remote(url: str) -> bool:
    return bool(url) and not url.startswith("data:")


def _pdf_in(part: object) -> str | None:
    """The data of a file that claims to be a PDF and has no text yet."""
    if not isinstance(part, InputFile) or isinstance(part.text, str):
        return None
    data = part.file_data
    if not isinstance(data, str):
        return None
    begin = data.find(",") + 1 if data.startswith("data:") else 0
    return data if is_pdf(contents(data[begin : begin + CLAIM_CHARS]) or b"") else None


async def _with_changes(items: tuple[Item, ...], changes: Sequence[_Change]) -> tuple[Item, ...]:
    """The items with parts of them changed. Each is written once, beside the event loop if it is long."""
    by_item: dict[int, list[_Change]] = {}
    for change in changes:
        by_item.setdefault(change.part.item, []).append(change)
    changed = list(items)
    for number, own in by_item.items():
        size = len(items[number].raw) + sum(len(text) for one in own for text in one.texts.values())
        changed[number] = await off_loop(size > LONG_BYTES, _changed, items[number], own)
    return tuple(changed) if changes else items


def _changed(item: Item, changes: Sequence[_Change]) -> Item:
    """The item with these parts changed. Everything else that the client wrote stays as it is."""
    name = changes[0].part.field
    fields = long_texts.decode(_fields.decode, item.raw)
    parts = long_texts.decode(_parts_of.decode, fields[name])
    for part, *given in changes:
        texts, usual = ({key: Raw(encode(text)) for key, text in one.items()} for one in given)
        parts[part.place] = usual | parts[part.place] | texts
    fields[name] = Raw(encode(parts))
    return decode_item(encode(fields), f"input[{changes[0].part.item}]")


def _name_of(url: str) -> str:
    """The name of a file: the last part of its URL."""
    path = url.partition("?")[0].partition("#")[0].rstrip("/")
    return path.rpartition("/")[2] or url
