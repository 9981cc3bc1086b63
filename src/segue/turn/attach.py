"""What stands behind the addresses in an input?

In: the items of a request, and a way to read addresses, where the operator allows that. Out: the same items with files
and pictures inside them, as if the client had sent their bytes; so what was read is kept with the turn, is the same
whenever the turn is continued, and no engine is ever told to follow an address. Everything is read before the turn
begins, all at once and within limits: what cannot be read is refused, with the place where it stands.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, NamedTuple

import msgspec
from msgspec import Raw

from segue.errors import ApiError, InvalidRequest
from segue.wire.codec import decode_item, encode
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

# Addresses in one request, and what may stand behind all of them together, as it is kept.
URLS_MAX = 32
CHARS_MAX = 64 * 1024 * 1024


class _Place(NamedTuple):
    """Where an address stands."""

    item: int
    part: int
    kind: Kind
    url: str
    # Under which name of the item its parts stand.
    content: Literal["content", "output"]

    @property
    def param(self) -> str:
        return f"input[{self.item}].{self.content}[{self.part}].{self.kind}_url"


async def attach(items: tuple[Item, ...], read_url: ReadUrl) -> tuple[Item, ...]:
    """The items with what their addresses stand for."""
    places = [place for number, item in enumerate(items) for place in _places(number, item)]
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


async def _read(place: _Place, read_url: ReadUrl) -> str:
    try:
        return await read_url(place.url, place.kind)
    except ApiError as error:
        error.param = place.param
        raise


def _places(number: int, item: Item) -> list[_Place]:
    match item.value:
        case Message(content=list() as parts):
            return _among(number, parts, "content")
        case (
            FunctionCallOutput(output=list() as parts)
            | CustomToolCallOutput(output=list() as parts)
        ):
            return _among(number, parts, "output")
        case _:
            return []


def _among(
    number: int, parts: Sequence[object], content: Literal["content", "output"]
) -> list[_Place]:
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
    # What else the client wrote is nobody's to read, and stays as it is.
    fields = msgspec.json.decode(item.raw, type=dict[str, Raw])
    parts = msgspec.json.decode(fields[place.content], type=list[dict[str, Raw]])
    part = parts[place.part]
    if place.kind == "image":
        part["image_url"] = Raw(encode(data))
    else:
        part["file_data"] = Raw(encode(data))
        part.setdefault("filename", Raw(encode(_name_of(place.url))))
    fields[place.content] = Raw(encode(parts))
    return decode_item(encode(fields), f"input[{place.item}]")


def _name_of(url: str) -> str:
    """What a file is called: the end of its address."""
    path = url.partition("?")[0].partition("#")[0].rstrip("/")
    return path.rpartition("/")[2] or url
