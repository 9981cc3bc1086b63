"""What text is in the bytes of a file? Any kind of text, Markdown and source code included.

In: an `input_file` part of a request. Out: text, or None where there is none to be had. No PDF is parsed here: its text
was read before and stands beside its bytes. Long texts are cut, and say so.
"""

from __future__ import annotations

from codecs import getincrementaldecoder

from segue.wire.files import FILE_CHARS_MAX, is_pdf, slices_of
from segue.wire.items import InputFile

# More bytes than this are more characters; a mark of three may stand before them.
TEXT_BYTES_MAX = 4 * (FILE_CHARS_MAX + 1) + 3


def text_of_file(part: InputFile) -> str | None:
    """The text of a file that came inside a request; None for a URL, another format or broken data."""
    text = part.text if isinstance(part.text, str) else _text_inside(part)
    if text is not None and len(text) > FILE_CHARS_MAX:
        return text[:FILE_CHARS_MAX] + f"\n[cut after {FILE_CHARS_MAX} characters]"
    return text


def _text_inside(part: InputFile) -> str | None:
    """Plain text of whatever kind; what has NUL bytes or is not UTF-8 is not text. Nothing is decoded that would not be
    shown."""
    if not isinstance(part.file_data, str):
        return None
    data = bytearray()
    try:
        for slice in slices_of(part.file_data):
            data += slice
            if b"\0" in slice or is_pdf(data):
                return None
            if len(data) > TEXT_BYTES_MAX:
                break
        # Where it is cut, its last character may be as well.
        is_whole = len(data) <= TEXT_BYTES_MAX
        return getincrementaldecoder("utf-8-sig")().decode(data, is_whole)
    except ValueError:
        return None
