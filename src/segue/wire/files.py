"""What is in a file that came inside JSON? Its bytes, whole or in slices; a PDF is only recognized.

In: base64, with or without a data URL around it. Out: bytes, or the error that it is none. Nothing is fetched here.
"""

from __future__ import annotations

from binascii import a2b_base64
from collections.abc import Iterator

# Far beyond any context that we know of; a bound on work, not on models.
FILE_CHARS_MAX = 2_000_000
# Four letters are three bytes.
SLICE_CHARS = 1024 * 1024


def is_pdf(data: bytes | bytearray) -> bool:
    """Whether these bytes claim to be a PDF."""
    return data.startswith(b"%PDF")


def contents(file_data: str) -> bytes | None:
    """What a file holds; None where it is no base64."""
    try:
        return b"".join(slices_of(file_data))
    except ValueError:
        return None


def from_base64(text: str) -> bytes:
    """The bytes that a text stands for; `ValueError` where it is no base64."""
    return b"".join(slices_of(text))


def slices_of(text: str) -> Iterator[bytes]:
    """The same in slices: all of it at once would hold the interpreter, and with it every other request, for 3 ms each
    MiB, and be in memory as a whole."""
    begin = text.find(",") + 1 or len(text) if text.startswith("data:") else 0
    if 0 <= text.find("=", begin) < len(text) - 2:
        raise ValueError("what follows the padding belongs to nothing")
    for at in range(begin, len(text), SLICE_CHARS):
        yield a2b_base64(text[at : at + SLICE_CHARS], strict_mode=True)
