"""How does the Messages API say errors? An error in, a status, a body and headers out.

Clients act on some of the words: a prompt that is too long is said so that they compact their history, a call without
its result so that they repair it (docs/apis/messages.md).
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
from msgspec import UNSET, Struct, UnsetType

from segue.errors import ApiError, CallerError
from segue.listener.exchange import ErrorAnswer, Headers

# The status and the type of the error for statuses of ours that the API has other words for.
TYPES = {
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
# What clients of this API know as a server that has too much to do.
OVERLOADED = 529
# A wrong key stays wrong: without this clients come back for minutes.
NO_RETRY = (b"x-should-retry", b"false")

# How engines and we ourselves say that a prompt is too long: the first number is what was sent, or what fits.
_SENT_FIRST = re.compile(
    r"(\d+) (?:input |prompt )?tokens\b.{0,80}?(?:at most|>|maximum|limit|size|window|length)\D{0,40}(\d+)",
    re.IGNORECASE | re.DOTALL,
)
_LIMIT_FIRST = re.compile(
    r"(?:maximum|context (?:length|size|window)|limit)\D{0,40}(\d+) tokens"
    r".{0,80}?(?:requested|has|have|contains?|resulted in|passed|prompt)\D{0,40}(\d+)",
    re.IGNORECASE | re.DOTALL,
)
_CALL_ID = re.compile(r"call_(\w+)\.?\Z")


class ErrorWords(Struct, frozen=True, omit_defaults=True):
    type: str
    message: str
    details: Mapping[str, object] | UnsetType = UNSET


class ErrorMessage(Struct, frozen=True, tag_field="type", tag="error"):
    """The body of a refusal, and the data of the event `error`."""

    error: ErrorWords
    request_id: str


class ThreadRefused(CallerError):
    """A thread cannot be continued; clients choose by `error_code` what they do then."""

    def __init__(
        self,
        message: str,
        error_code: str,
        *,
        status: int = 400,
        unsupported: list[str] | None = None,
    ) -> None:
        super().__init__(message, code=error_code, param="thread")
        self.status = status
        self.details: dict[str, object] = {"error_code": error_code}
        if unsupported is not None:
            self.details["unsupported"] = unsupported


def error_answer(error: ApiError, request_id: str) -> ErrorAnswer:
    """An error as a status, a body and headers."""
    status = OVERLOADED if error.status == 503 else error.status
    headers: Headers = (NO_RETRY,) if status == 401 else ()
    return ErrorAnswer(status, error_body(error, request_id), headers)


def error_body(error: ApiError, request_id: str) -> bytes:
    """An error as the API says it, in a refusal and on a stream."""
    status = OVERLOADED if error.status == 503 else error.status
    usual = "invalid_request_error" if status < 500 else "api_error"
    details = error.details if isinstance(error, ThreadRefused) else UNSET
    body = ErrorWords(TYPES.get(status, usual), words_of(error), details)
    return msgspec.json.encode(ErrorMessage(body, request_id))


def words_of(error: ApiError) -> str:
    """What the error says, in the words that clients of this API know."""
    match error.code:
        case "context_length_exceeded":
            return _too_long(error.message)
        case "missing_function_call_output" if found := _CALL_ID.search(error.message):
            return without_results("messages.0", [f"toolu_{found[1]}"])
        case _:
            return error.message


def _too_long(message: str) -> str:
    """`prompt is too long: N tokens > M maximum`, as far as both numbers are known; else the engine's own words."""
    if found := _SENT_FIRST.search(message):
        return f"prompt is too long: {found[1]} tokens > {found[2]} maximum"
    if found := _LIMIT_FIRST.search(message):
        return f"prompt is too long: {found[2]} tokens > {found[1]} maximum"
    return f"prompt is too long: {message}"


def without_results(place: str, ids: list[str]) -> str:
    """Calls were left open."""
    return (
        f"{place}: `tool_use` ids were found without `tool_result` blocks immediately after: {', '.join(ids)}. "
        "Each `tool_use` block must have a corresponding `tool_result` block in the next message."
    )
