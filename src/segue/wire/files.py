"""What text is in the bytes of a file? Any kind of text, Markdown and source code included; a PDF is only recognized.

In: bytes, or an `input_file` part of a request. Out: text, or None where there is none to be had. Nothing is fetched
here, and no PDF is parsed: its text was read before and stands beside its bytes. Long texts are cut, and say so.
"""

from __future__ import annotations

from binascii import a2b_base64
from codecs import getincrementaldecoder
from collections.abc import Iterator

from segue.wire.items import InputFile

# Far beyond any context that we know of; a bound on work, not on models.
FILE_CHARS_MAX = 2_000_000
# More bytes than this are more characters; a mark of three may stand before them.
TEXT_BYTES_MAX = 4 * (FILE_CHARS_MAX + 1) + 3
# Four letters are three bytes.
SLICE_CHARS = 1024 * 1024


def is_pdf(data: bytes) -> bool:
    """Whether these bytes claim to be a PDF."""
    return data.startswith(b"%PDF")


def contents(file_data: str) -> bytes | None:
    """What a file holds that came inside JSON: base64, with or without a data URL around it."""
    try:
        return b"".join(slices_of(file_data))
    except ValueError:
        return None


def slices_of(file_data: str) -> Iterator[bytes]:
    """The same in slices; `ValueError` at what is no base64."""
    if not file_data.startswith("data:"):
        return _slices(file_data, 0)
    return _slices(file_data, file_data.find(",") + 1 or len(file_data))


def from_base64(text: str) -> bytes:
    """The bytes that a text stands for; `ValueError` where it is no base64."""
    return b"".join(_slices(text, 0))


def _slices(text: str, begin: int) -> Iterator[bytes]:
    """In slices: all of it at once would hold the interpreter, and with it every other request, for 3 ms each MiB."""
    if 0 <= text.find("=", begin) < len(text) - 2:
        raise ValueError("what follows the padding belongs to nothing")
    for at in range(begin, len(text), SLICE_CHARS):
        yield a2b_base64(text[at : at + SLICE_CHARS], strict_mode=True)


def text_of_bytes(data: bytes | bytearray) -> str | None:
    """Plain text of whatever kind; what has NUL bytes or is not UTF-8 is not text."""
    if b"\0" in data:
        return None
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def text_of_file(part: InputFile) -> str | None:
    """The text of a file that came inside a request; None for a URL, another format or broken data."""
    text = part.text if isinstance(part.text, str) else _text_inside(part)
    if text is not None and len(text) > FILE_CHARS_MAX:
        return text[:FILE_CHARS_MAX] + f"\n[cut after {FILE_CHARS_MAX} characters]"
    return text


def _text_inside(part: InputFile) -> str | None:
    """Nothing is decoded that would not be shown."""
    data = bytearray()
    try:
        for slice in slices_of(part.file_data) if isinstance(part.file_data, str) else ():
            if b"\0" in slice or (not data and is_pdf(slice)):
                return None
            data += slice
            if len(data) > TEXT_BYTES_MAX:
                # The last character may be cut.
                return getincrementaldecoder("utf-8-sig")().decode(data)
    except ValueError:
        return None
    return text_of_bytes(data) if isinstance(part.file_data, str) else None
