"""Files inside requests: read where they are text or PDF, said to be unreadable where they are not."""

from __future__ import annotations

import base64
from base64 import b64decode, b64encode
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.dialects.files import text_of_file
from segue.dialects.parts import part_of
from segue.wire import files
from segue.wire.codec import decode_item
from segue.wire.files import FILE_CHARS_MAX
from segue.wire.items import InputFile
from tests.support import MODEL, fetch, metric, serving

PICTURE = {"type": "input_image", "image_url": "data:image/png;base64,AAAA"}


def sent(data: bytes, kind: str | None = "text/plain") -> InputFile:
    encoded = base64.b64encode(data).decode()
    return InputFile(file_data=f"data:{kind};base64,{encoded}" if kind else encoded)


def test_text_is_read_with_and_without_a_data_url_and_of_a_pdf_what_stands_beside_it() -> None:
    assert text_of_file(sent("# Títle\n".encode(), "text/markdown")) == "# Títle\n"
    assert text_of_file(sent(b"print(1)", None)) == "print(1)"
    assert text_of_file(InputFile(file_data="JVBERi0=", text="A page.")) == "A page."


@pytest.mark.parametrize(
    "data", [b"\x89PNG\r\n\x1a\n\0\0", b"\xff\xfe\x00a", b"%PDF-1.4 and nothing more", b"%PDF" * 9]
)
def test_what_cannot_be_read_is_said_to_be_so(data: bytes) -> None:
    assert text_of_file(sent(data)) is None
    assert text_of_file(InputFile(file_data="not base64!")) is None
    assert text_of_file(InputFile(file_url="https://example.com/a.pdf")) is None


def test_model_is_never_told_the_letters_of_a_file() -> None:
    for kind, told in (("application/pdf", "application/pdf sent as data"), (None, "sent as data")):
        file = msgspec.to_builtins(sent(b"%PDF broken", kind))
        message = {"role": "user", "content": [file]}
        part = part_of(decode_item(msgspec.json.encode(message), "input[0]"))
        assert part.text == f"[file: {told}, which cannot be read here]"


def test_endless_file_is_cut_and_the_cut_is_said() -> None:
    text = text_of_file(sent(b"x" * (FILE_CHARS_MAX + 1)))
    assert text is not None
    assert text.endswith("characters]")
    assert len(text) < FILE_CHARS_MAX + 100


def asked(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"model": MODEL, "store": False, "input": [{"role": "user", "content": list(parts)}]}


async def test_model_is_given_the_words_of_a_file() -> None:
    async with serving() as served:
        plain = await fetch(served, "POST", "/v1/responses", asked())
        encoded = base64.b64encode(b"word " * 500).decode()
        file = {"type": "input_file", "filename": "a.txt", "file_data": encoded}
        read = await fetch(served, "POST", "/v1/responses", asked(file))
    more = read.json["usage"]["input_tokens"] - plain.json["usage"]["input_tokens"]
    assert 500 <= more <= 530


async def test_picture_is_told_and_counted_or_refused_as_the_operator_says() -> None:
    async with serving() as served:
        assert (await fetch(served, "POST", "/v1/responses", asked(PICTURE))).status == 200
        assert await metric(served, "segue_media_told_total") == 1
    async with serving(unseen="refuse") as served:
        refused = await fetch(served, "POST", "/v1/responses", asked(PICTURE))
        assert (refused.status, refused.json["error"]["param"]) == (400, "input[0]")


@given(st.binary(max_size=100), st.sampled_from([4, 8, 64]))
def test_base64_in_slices_is_base64(data: bytes, slice_chars: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "SLICE_CHARS", slice_chars)
        assert files.from_base64(b64encode(data).decode()) == data


@given(st.text(alphabet="Aa+/=-_ \n\u00e9", max_size=12), st.sampled_from([4, 8, 64]))
def test_what_is_no_base64_is_none_in_slices_either(text: str, slice_chars: int) -> None:
    """As the library refuses it as a whole."""
    try:
        whole = b64decode(text, validate=True)
    except ValueError:
        whole = None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "SLICE_CHARS", slice_chars)
        if whole is None:
            with pytest.raises(ValueError):
                files.from_base64(text)
        else:
            assert files.from_base64(text) == whole
