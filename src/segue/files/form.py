"""What is in a form that a client uploads? Its fields as texts; its files go on as they arrive.

In: the parts of a `multipart/form-data` body, cut anywhere. Out: texts, and the bytes of the files in pieces, so
that no file is in memory as a whole. The library reads the form; here are its limits, and what a field is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from msgspec import Struct
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from segue.errors import InvalidRequest

# Fields are short: a purpose, a time.
FIELD_BYTES_MAX = 1024
FIELDS_MAX = 16
# The library takes no longer one.
BOUNDARY_BYTES_MAX = 256
NAME_CHARS_MAX = 255

WriteFile = Callable[[bytes], Awaitable[None]]


class _Begins(Struct, frozen=True):
    """Here a file begins, with a name as it was sent."""

    name: bytes


class FileForm:
    """One form with one file; or with several, each of which is announced with its name before its bytes."""

    def __init__(
        self,
        content_type: str,
        file_fields: Sequence[str] = ("file",),
        announce: WriteFile | None = None,
    ) -> None:
        kind, options = parse_options_header(content_type)
        is_bounded = 0 < len(options.get(b"boundary", b"")) <= BOUNDARY_BYTES_MAX
        if kind != b"multipart/form-data" or not is_bounded:
            raise InvalidRequest("Send the file as a form: Content-Type: multipart/form-data.")
        self.fields: dict[str, str] = {}
        # The name of the file; None until it has begun.
        self.filename: str | None = None
        self._file_fields = file_fields
        self._announce = announce
        self._file_parts: list[bytes | _Begins] = []
        self._is_whole = False
        self._headers: dict[bytes, bytes] = {}
        self._header = [b"", b""]
        # The field that is being read; None: the file.
        self._field: str | None = ""
        self._text = b""
        self._parser = MultipartParser(
            options[b"boundary"],
            {
                "on_part_begin": self._begin_part,
                "on_header_field": lambda data, start, end: self._add_to_header(0, data[start:end]),
                "on_header_value": lambda data, start, end: self._add_to_header(1, data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_contents,
                "on_part_data": lambda data, start, end: self._add(data[start:end]),
                "on_part_end": self._end_part,
                "on_end": self._end,
            },
        )

    async def read(self, body: AsyncIterator[bytes], write: WriteFile) -> None:
        """Read the form to its end; the bytes of the file are written as they come."""
        async for part in body:
            try:
                self._parser.write(part)
            except FormParserError as error:
                raise InvalidRequest(f"The form cannot be read: {error}.") from None
            parts, self._file_parts = self._file_parts, []
            for data in parts:
                if isinstance(data, bytes):
                    await write(data)
                elif self._announce is not None:
                    await self._announce(data.name)
        if not self._is_whole:
            raise InvalidRequest("The form ends before its last boundary.")
        if self.filename is None:
            field = self._file_fields[0]
            raise InvalidRequest(f"Missing required parameter: '{field}'.", param=field)

    # --- what the parser finds ---

    def _begin_part(self) -> None:
        self._headers = {}
        self._header = [b"", b""]

    def _add_to_header(self, place: int, data: bytes) -> None:
        self._header[place] += data

    def _end_header(self) -> None:
        name, value = self._header
        self._headers[name.lower()] = value
        self._header = [b"", b""]

    def _begin_contents(self) -> None:
        disposition = self._headers.get(b"content-disposition", b"").decode("latin-1")
        options = parse_options_header(disposition)[1]
        name = _text(options.get(b"name", b""))
        if name not in self._file_fields:
            self._field, self._text = name, b""
            return
        if self.filename is not None and self._announce is None:
            raise InvalidRequest("Send one file at a time.", param=name)
        self._field = None
        sent = options.get(b"filename", b"")
        self.filename = clean_name(_text(sent))
        self._file_parts.append(_Begins(sent))

    def _add(self, data: bytes) -> None:
        if self._field is None:
            self._file_parts.append(data)
        elif len(self._text) + len(data) > FIELD_BYTES_MAX:
            message = f"'{self._field[:64]}' has more than {FIELD_BYTES_MAX} bytes."
            raise InvalidRequest(message, param=self._field[:64])
        else:
            self._text += data

    def _end_part(self) -> None:
        if self._field is not None:
            self.fields[self._field] = _text(self._text)
            if len(self.fields) > FIELDS_MAX:
                raise InvalidRequest(f"The form has more than {FIELDS_MAX} fields.")
        self._field = ""

    def _end(self) -> None:
        self._is_whole = True


def clean_name(name: str) -> str:
    """A file's own name: without folders, control characters and what is too long; the suffix stays."""
    own = "".join(c for c in name.replace("\\", "/").rpartition("/")[2] if c.isprintable()).strip()
    own = own if own not in (".", "..") else ""
    if len(own) > NAME_CHARS_MAX:
        stem, dot, suffix = own.rpartition(".")
        is_suffix = bool(dot) and len(suffix) <= 16
        own = (
            f"{stem[: NAME_CHARS_MAX - len(suffix) - 1]}.{suffix}"
            if is_suffix
            else own[:NAME_CHARS_MAX]
        )
    return own or "file"


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")
