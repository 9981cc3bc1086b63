"""What do the errors of a server of an engine mean, whatever shape they have?

In: a status and a body, or an event in the middle of an answer. Out: one of our own errors, with what of the server's
words is for the client whose request it is; the log gets a name and a number.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.border.numbers import context_size
from segue.errors import (
    ApiError,
    EngineFailed,
    InvalidRequest,
    TooMany,
    Unavailable,
    context_overflow,
    shown_names,
)

log = logging.getLogger(__name__)

# How much of an error is read.
REFUSAL_BYTES_MAX = 64 * 1024
# How many characters of an engine's error message are passed on to the client.
MESSAGE_CHARS_MAX = 500
# How much of what it calls an error is logged: a name.
KIND_CHARS_MAX = 40


class EngineLost(EngineFailed):
    """The connection broke or fell silent: the engine itself may be gone, unlike after an error that it sent."""


class NotServed(EngineFailed):
    """The engine does not know the model, or has no such endpoint."""


class RequestRefused(InvalidRequest):
    """The engine does not take this request; `words` is everything that it said about that."""

    words = ""


class ContextRefused(InvalidRequest):
    """Prompt and answer together do not fit; `context_tokens` is how much would, where the engine says it."""

    def __init__(self, message: str, context_tokens: int | None) -> None:
        super().__init__(message, code="context_length_exceeded", param="input")
        self.context_tokens = context_tokens


class _Fault(Struct):
    message: str = ""
    type: str | None = None
    code: int | str | None = None
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None


class _Refusal(Struct):
    """The shapes in which engines refuse: an `error` (object or string), a bare `message`, FastAPI's `detail`."""

    error: _Fault | str | UnsetType | None = UNSET
    message: Raw = Raw(b'""')
    detail: Raw | UnsetType = UNSET


_refusal = msgspec.json.Decoder(_Refusal)
# What a decoder raises, and what reads the decoded values: numbers and lengths that do not fit together.
UNREADABLE = (msgspec.MsgspecError, ValueError, OverflowError, RecursionError)
_CONTEXT = re.compile(
    r"context[ _](?:length|size|window)|maximum (?:input|model) length|exceed_context_size"
    r"|longer than the (?:maximum )?model|input (?:is|length).*too long|max_model_len",
    re.IGNORECASE,
)
# The length itself in such a message: `max_model_len=32768`, `maximum context length of 32768 tokens`.
_LENGTH = re.compile(
    r"(?:max_model_len|max_total_tokens|context (?:length|size|window))[^\d.]{1,24}(\d+)",
    re.IGNORECASE,
)


def error_for_status(
    status: int, body: bytes, wait_s: float | None = None, engine: str = "engine"
) -> ApiError:
    """Our error for an engine's refusal: by its status, and by its message where the status is not enough."""
    fault = _fault(body)
    message = fault.message[:MESSAGE_CHARS_MAX]
    # An engine may quote the request in its words: they are for the client whose request it is, and for nobody else.
    kind = re.sub(r"\W+", " ", str(fault.type or fault.code)[:99])[:KIND_CHARS_MAX]
    log.warning("%s answered with status %d (%s)", engine, status, kind)
    # So llama.cpp's server refuses messages that the model's chat template does not take, and pictures.
    is_refusal = status == 500 and re.search(r"jinja|is not supported", message, re.IGNORECASE)
    if status in (400, 413, 422) or is_refusal:
        if fault.n_prompt_tokens is not None and fault.n_ctx is not None:
            words = context_overflow(fault.n_prompt_tokens, fault.n_ctx).message
            return ContextRefused(words, context_size(fault.n_ctx))
        if _CONTEXT.search(f"{fault.type!s:.99} {fault.code!s:.99} {message}"):
            length = _LENGTH.search(message)
            words = f"Your input exceeds the context window of this model. {message}".rstrip()
            return ContextRefused(words, context_size(int(length[1]) if length else None))
        refused = RequestRefused(f"The engine refused this request. {message}".rstrip())
        refused.words = body.decode(errors="replace")
        return refused
    if status in (401, 403):
        return EngineFailed("The engine does not accept the server's key.")
    # llama.cpp's server answers 501 where it was not started for a kind of request.
    if status in (404, 405, 501):
        return NotServed("The engine does not know this model or this kind of request.")
    if status == 429:
        words = message or "The engine takes no more requests of this server now."
        return TooMany(words, wait_s=wait_s)
    if status in (408, 425, 502, 503, 504):
        return Unavailable("The engine cannot take this request now.", wait_s=wait_s)
    return EngineFailed("The engine had an error.")


def not_served(engine: str, model: str, names: Sequence[str]) -> NotServed:
    """Which model an engine does not know, and which it lists; its address is for the log alone."""
    listed = shown_names(names) or "no models"
    problem = f"does not know the model '{model}' or this kind of request. It lists: {listed}."
    log.warning("engine %s %s", engine, problem)
    return NotServed(f"The engine {problem}")


def _fault(body: bytes) -> _Fault:
    try:
        # Gemini's endpoint puts it into a list.
        refusal = _refusal.decode(body.strip().removeprefix(b"[").removesuffix(b"]"))
    except UNREADABLE:
        return _Fault()
    match refusal.error:
        case _Fault() as fault:
            return fault
        case str() as message:
            return _Fault(message)
        case _:
            pass
    told = refusal.message if refusal.detail is UNSET else refusal.detail
    return _Fault(bytes(told).decode(errors="replace").strip('"'))


def error_in_stream(raw: Raw | bytes) -> ApiError:
    """Our error for an error that came as an event; its code is a status, where it has one."""
    if len(bytes(raw)) > REFUSAL_BYTES_MAX:
        # No words of an engine are so long.
        raw = b"{}"
    fault = _fault(b'{"error":' + bytes(raw) + b"}")
    status = fault.code if isinstance(fault.code, int) else 500
    if isinstance(fault.code, str) and re.fullmatch("[0-9]{3}", fault.code):
        status = int(fault.code)
    if status == 500 and _CONTEXT.search(
        f"{fault.type!s:.99} {fault.code!s:.99} {fault.message:.500}"
    ):
        status = 400
    return error_for_status(status, b'{"error":' + bytes(raw) + b"}")


def unreadable(error: Exception) -> EngineFailed:
    """What to raise for JSON that an engine sent and that cannot be decoded."""
    failure = EngineFailed("The engine sent something that cannot be read.")
    failure.__cause__ = error
    return failure
