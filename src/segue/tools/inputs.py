"""What stands behind the addresses in an input, and what do its PDFs say?

In: the items of a request, and a way to read addresses, where the operator allows that. Out: the same items with files
and pictures inside them, as if the client had sent their bytes; so what was read is kept with the turn, is the same
whenever the turn is continued, and no engine is ever told to follow an address. Everything is read before the turn
begins, all at once and within limits: what cannot be read is refused, with the place where it stands.

A PDF takes long to read, so that is done in the turn, where a client hears heartbeats and can cancel. Its text is kept
beside its bytes, so that it is read once and is the same for whoever continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec import Raw

from segue.errors import ApiError, InvalidRequest
from segue.wire.codec import decode_item, encode
from segue.wire.files import contents, is_pdf
from segue.wire.items import (
    CustomToolCallOutput,
    FunctionCallOutput,
    InputFile,
    InputImage,
    Item,
    Message,
)

Kind = Literal["file", "image"]
# Gives the bytes at an address as a data URL.
ReadUrl = Callable[[str, Kind], Awaitable[str]]
# Gives the text of a PDF; None if it is broken.
ReadPdf = Callable[[bytes], Awaitable[str | None]]

# Addresses in one request, and what may stand behind all of them together, as it is kept.
URLS_MAX = 32
CHARS_MAX = 64 * 1024 * 1024
# PDFs in one request.
PDFS_MAX = 32
# So many letters of base64 tell whether a file claims to be a PDF.
CLAIM_CHARS = 8


Content = Literal["content", "output"]


class _Place(NamedTuple):
    """Where an address stands, or a PDF."""

    item: int
    part: int
    kind: Kind
    # The address; of a PDF, its data.
    url: str
    # Under which name of the item its parts stand.
    content: Content

    @property
    def where(self) -> str:
        return f"input[{self.item}].{self.content}[{self.part}]"

    @property
    def param(self) -> str:
        return f"{self.where}.{self.kind}_url"


async def attach(items: tuple[Item, ...], read_url: ReadUrl) -> tuple[Item, ...]:
    """The items with what their addresses stand for."""
    places = [place for number, item in enumerate(items) for place in _places(number, item, _among)]
    if not places:
        return items
    if len(places) > URLS_MAX:
        raise InvalidRequest(
            f"Too many addresses: {len(places)}, at most {URLS_MAX} are followed.", param="input"
        )
    read = await asyncio.gather(*(_read(place, read_url) for place in places))
    if sum(map(len, read)) > CHARS_MAX:
        raise InvalidRequest(
            "What the addresses lead to is too large together.", code="url_failed", param="input"
        )
    changed = list(items)
    for place, data in zip(places, read, strict=True):
        changed[place.item] = _with_data(changed[place.item], place, data)
    return tuple(changed)


async def read_pdfs(items: tuple[Item, ...], read_pdf: ReadPdf) -> tuple[Item, ...]:
    """The items with what their PDFs say, one after the other, so that no request keeps others from being read."""
    places = [
        place for number, item in enumerate(items) for place in _places(number, item, _pdfs_among)
    ]
    if len(places) > PDFS_MAX:
        raise InvalidRequest(
            f"Too many PDF files: {len(places)}, at most {PDFS_MAX} are read.", param="input"
        )
    changed = list(items)
    for place in places:
        try:
            text = await read_pdf(contents(place.url) or b"")
        except ApiError as error:
            error.param = place.where
            raise
        if text is not None:
            changed[place.item] = _with_fields(changed[place.item], place, {"segue:text": text})
    return tuple(changed) if places else items


async def _read(place: _Place, read_url: ReadUrl) -> str:
    try:
        return await read_url(place.url, place.kind)
    except ApiError as error:
        error.param = place.param
        raise


Among = Callable[[int, Sequence[object], Content], list[_Place]]


def _places(number: int, item: Item, among: Among) -> list[_Place]:
    match item.value:
        case Message(content=list() as parts):
            return among(number, parts, "content")
        case (
            FunctionCallOutput(output=list() as parts)
            | CustomToolCallOutput(output=list() as parts)
        ):
            return among(number, parts, "output")
        case _:
            return []


def _pdfs_among(number: int, parts: Sequence[object], content: Content) -> list[_Place]:
    return [
        _Place(number, index, "file", part.file_data, content)
        for index, part in enumerate(parts)
        if isinstance(part, InputFile)
        and isinstance(part.file_data, str)
        and not isinstance(part.text, str)
        and _claims_pdf(part.file_data)
    ]


def _claims_pdf(file_data: str) -> bool:
    begin = file_data.find(",") + 1 if file_data.startswith("data:") else 0
    return is_pdf(contents(file_data[begin : begin + CLAIM_CHARS]) or b"")


def _among(number: int, parts: Sequence[object], content: Content) -> list[_Place]:
    found: list[_Place] = []
    for index, part in enumerate(parts):
        match part:
            case InputFile(file_url=str() as url, file_data=data) if not data and _is_address(url):
                found.append(_Place(number, index, "file", url, content))
            case InputImage(image_url=str() as url) if _is_address(url):
                found.append(_Place(number, index, "image", url, content))
    return found


def _is_address(url: str) -> bool:
    """Data that is here already is not fetched."""
    return bool(url) and not url.startswith("data:")


def _with_data(item: Item, place: _Place, data: str) -> Item:
    if place.kind == "image":
        return _with_fields(item, place, {"image_url": data})
    return _with_fields(item, place, {"file_data": data}, filename=_name_of(place.url))


def _with_fields(
    item: Item, place: _Place, changes: Mapping[str, str], **unless_there: str
) -> Item:
    """The item with a part of it changed. What else the client wrote is nobody's to read, and stays as it is."""
    fields = msgspec.json.decode(item.raw, type=dict[str, Raw])
    parts = msgspec.json.decode(fields[place.content], type=list[dict[str, Raw]])
    usual, changed = (
        {name: Raw(encode(text)) for name, text in these.items()}
        for these in (unless_there, changes)
    )
    parts[place.part] = usual | parts[place.part] | changed
    fields[place.content] = Raw(encode(parts))
    return decode_item(encode(fields), f"input[{place.item}]")


def _name_of(url: str) -> str:
    """What a file is called: the end of its address."""
    path = url.partition("?")[0].partition("#")[0].rstrip("/")
    return path.rpartition("/")[2] or url
