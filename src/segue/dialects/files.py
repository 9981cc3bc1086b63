"""What does a file say? Text, Markdown, source code and PDF that came inside a request, as words for a model.

In: an `input_file` part. Out: its text, or None where it cannot be read (an address, another format, broken data).
Nothing is fetched here. Long texts are cut, and the cut is said.
"""

from __future__ import annotations

import base64
import binascii

from segue.wire.files import is_pdf, text_of_bytes, text_of_pdf
from segue.wire.items import InputFile

# Far beyond any context that we know of; a bound on work, not on models.
FILE_CHARS_MAX = 2_000_000


def text_of_file(part: InputFile) -> str | None:
    """The words of an inline file, or None."""
    data = _bytes(part.file_data) if isinstance(part.file_data, str) else None
    if data is None:
        return None
    text = text_of_pdf(data) if is_pdf(data) else text_of_bytes(data)
    if text is not None and len(text) > FILE_CHARS_MAX:
        return text[:FILE_CHARS_MAX] + f"\n[cut after {FILE_CHARS_MAX} characters]"
    return text


def _bytes(file_data: str) -> bytes | None:
    """The contents: base64, with or without a data URL around it."""
    encoded = file_data.partition(",")[2] if file_data.startswith("data:") else file_data
    try:
        return base64.b64decode(encoded, validate=True)
    except (binascii.Error, ValueError):
        return None
