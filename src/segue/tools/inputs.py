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
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from mimetypes import guess_type
from typing import Literal, NamedTuple, Protocol

import msgspec
from msgspec import Raw

from segue.aio import cancel_all, off_loop
from segue.errors import ApiError, InvalidRequest
from segue.seams.access import Room
from segue.seams.history import Owner
from segue.wire import long_texts
from segue.wire.codec import decode_item
from segue.wire.files import contents, is_pdf
from segue.wire.items import (
    CustomToolCallOutput,
    FunctionCallOutput,
    InputFile,
    InputImage,
    Item,
    Message,
)

UrlKind = Literal["file", "image"]
# Returns the name and the size of a file that the owner has uploaded, and its bytes, part by part.
OpenFile = Callable[[Owner, str], Awaitable[tuple[str, int, AsyncGenerator[bytes, None]]]]
# Returns the text of a PDF, whose bytes are here in base64; None if it is broken.
ReadPdf = Callable[[str], Awaitable[str | None]]


class ReadUrl(Protocol):
    """Reads URLs."""

    # Of one of them.
    bytes_max: int

    async def __call__(self, url: str, kind: UrlKind) -> str:
        """The bytes at a URL as a data URL."""


# URLs in one request, and the size of everything they lead to, as it is kept.
URLS_MAX = 32
CHARS_MAX = 64 * 1024 * 1024
# Uploaded files in one request, and their size together.
FILES_MAX = 32
FILES_BYTES_MAX = 48 * 1024 * 1024
# What each byte of a file costs until it is in an item, and each letter of its base64, of which there are a third more:
# it is there as it was read, in the bytes of the item, and as its value.
BYTE_COST, TEXT_COST = 4, 3
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


async def attach(items: tuple[Item, ...], read_url: ReadUrl, room: Room) -> tuple[Item, ...]:
    """The items with the contents of their URLs."""
    places = [(part, *found) for part in _parts(items) if (found := _url_in(part.value))]
    if not places:
        return items
    if len(places) > URLS_MAX:
        message = f"Too many URLs: {len(places)}, at most {URLS_MAX} are read."
        raise InvalidRequest(message, param="input")

    left = CHARS_MAX

    async def read(part: _Part, kind: UrlKind, url: str) -> str:
        nonlocal left
        try:
            await room.take(read_url.bytes_max)
            data = await read_url(url, kind)
            room.give(read_url.bytes_max)
            await room.take(TEXT_COST * len(data))
        except ApiError as error:
            error.param = f"{part.param}.{kind}_url"
            raise
        left -= len(data)
        if left < 0:
            message = "The contents of the URLs are too large together."
            raise InvalidRequest(message, code="url_failed", param="input")
        return data

    reading = [asyncio.ensure_future(read(*place)) for place in places]
    try:
        read_data = await asyncio.gather(*reading)
    finally:
        await cancel_all(reading)
    changes = [
        _Change(part, {"image_url": data})
        if kind == "image"
        else _Change(part, {"file_data": data}, {"filename": _name_of(url)})
        for (part, kind, url), data in zip(places, read_data, strict=True)
    ]
    return await _with_changes(items, changes)


async def attach_files(
    items: tuple[Item, ...], owner: Owner, open_file: OpenFile, room: Room
) -> tuple[Item, ...]:
    """The items with the contents of the uploaded files that they name. A small request may name large files: memory is
    set aside for all of them before the first is read."""
    places = [(part, file_id) for part in _parts(items) if (file_id := _file_in(part.value))]
    if len(places) > FILES_MAX:
        message = f"Too many files: {len(places)}, at most {FILES_MAX} are read."
        raise InvalidRequest(message, param="input")
    if not places:
        return items
    opened: list[tuple[_Part, str, AsyncGenerator[bytes, None]]] = []
    left = FILES_BYTES_MAX
    for part, file_id in places:
        try:
            name, size, data = await open_file(owner, file_id)
            if size > left:
                message = (
                    f"The file '{name}' is too large for an input: {size} bytes, at most {left}."
                )
                raise InvalidRequest(message)
        except ApiError as error:
            error.param = f"{part.param}.file_id"
            raise
        left -= size
        opened.append((part, name, data))
    await room.take(BYTE_COST * (FILES_BYTES_MAX - left))
    changes: list[_Change] = []
    for part, name, data in opened:
        try:
            changes.append(await _file_change(part, name, data))
        except ApiError as error:
            error.param = f"{part.param}.file_id"
            raise
    return await _with_changes(items, changes)


async def _file_change(part: _Part, name: str, data: AsyncGenerator[bytes, None]) -> _Change:
    """A file inside a part, as if the client had sent its bytes."""
    kind = guess_type(name)[0] or "application/octet-stream"
    is_file = isinstance(part.value, InputFile)
    if not is_file and not kind.startswith("image/"):
        raise InvalidRequest(f"The file '{name}' is no image by its name.", code="invalid_value")
    url = f"data:{kind};base64,"
    async with aclosing(data):
        async for slice in _base64(data):
            # It grows in place.
            url += slice
    return (
        _Change(part, {"file_data": url}, {"filename": name})
        if is_file
        else _Change(part, {"image_url": url})
    )


async def _base64(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    """The text that stands for these bytes, in slices."""
    rest = b""
    async for part in parts:
        part = rest + part
        # Three bytes are four letters.
        whole = len(part) - len(part) % 3
        rest = part[whole:]
        yield b2a_base64(memoryview(part)[:whole], newline=False).decode()
    yield b2a_base64(rest, newline=False).decode()


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
            text = await read_pdf(data)
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
    changed: list[Mapping[str, str | Raw]] = [*parts]
    for part, texts, usual in changes:
        changed[part.place] = {**usual, **parts[part.place], **texts}
    # Written once, with the long texts in it.
    written = long_texts.encode({**fields, name: changed})
    return decode_item(written, f"input[{changes[0].part.item}]")


def _name_of(url: str) -> str:
    """The name of a file: the last part of its URL."""
    path = url.partition("?")[0].partition("#")[0].rstrip("/")
    return path.rpartition("/")[2] or url
