"""What does a file say? Text, Markdown, source code and PDF that came inside a request, as words for a model.

In: an `input_file` part. Out: its text, or None where it cannot be read (an address, another format, broken data).
Nothing is fetched here, and no PDF is taken apart: what one says was read before and stands beside its bytes. Long
texts are cut, and the cut is said.
"""

from __future__ import annotations

from segue.wire.files import FILE_CHARS_MAX, contents, is_pdf, text_of_bytes
from segue.wire.items import InputFile


def text_of_file(part: InputFile) -> str | None:
    """The words of an inline file, or None."""
    text = part.text if isinstance(part.text, str) else _text_inside(part)
    if text is not None and len(text) > FILE_CHARS_MAX:
        return text[:FILE_CHARS_MAX] + f"\n[cut after {FILE_CHARS_MAX} characters]"
    return text


def _text_inside(part: InputFile) -> str | None:
    data = contents(part.file_data) if isinstance(part.file_data, str) else None
    return None if data is None or is_pdf(data) else text_of_bytes(data)
