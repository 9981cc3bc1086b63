"""How does the Messages API say errors? An error in, a status, a body and headers out."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
from msgspec import UNSET, Struct, UnsetType

from segue.errors import ApiError, CallerError
from segue.listener.exchange import ErrorAnswer
from segue.messages.words import words_of

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
# The SDKs read it; `x-request-id` has the same.
REQUEST_ID = b"request-id"
# A wrong key stays wrong: without this clients come back for minutes.
NO_RETRY = (b"x-should-retry", b"false")


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
    headers = [(REQUEST_ID, request_id.encode())]
    if status == 401:
        headers.append(NO_RETRY)
    return ErrorAnswer(status, error_body(error, request_id), headers)


def error_body(error: ApiError, request_id: str) -> bytes:
    """An error as the API says it, in a refusal and on a stream."""
    status = OVERLOADED if error.status == 503 else error.status
    usual = "invalid_request_error" if status < 500 else "api_error"
    details = error.details if isinstance(error, ThreadRefused) else UNSET
    body = ErrorWords(TYPES.get(status, usual), words_of(error), details)
    return msgspec.json.encode(ErrorMessage(body, request_id))
