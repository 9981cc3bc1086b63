"""What can fail, by blame.

    ApiError            code, message, param, status
      CallerError       the caller must change something
        InvalidRequest Unauthenticated Forbidden NotFound Conflict Refused
      TryLater          the same request may succeed later (wait_s)
        TooMany Unavailable
      ServerFault       we must change something
        EngineFailed StoreFailed

Raised anywhere below, caught in two places only: the transport around `prepare`, and `perform`.
One table for every transport: the wire form of an error is made from these fields alone.
"""

from __future__ import annotations


class ApiError(Exception):
    """Something the client is told, as a status and a code on HTTP or as an event on a stream."""

    status = 500
    type = "server_error"
    code: str = "server_error"
    wait_s: float | None = None

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        wait_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code
        if wait_s is not None:
            self.wait_s = wait_s


class CallerError(ApiError):
    """The caller must change something."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class InvalidRequest(CallerError):
    """The request cannot be understood or contradicts itself."""


class Unauthenticated(CallerError):
    """Nobody whom we know."""

    status = 401
    code = "invalid_api_key"

    def __init__(self, message: str, *, is_wrong: bool = False) -> None:
        super().__init__(message)
        # Whether there was a key, and it was the wrong one (RFC 6750, 3.1).
        self.challenge = 'Bearer realm="segue"' + ', error="invalid_token"' * is_wrong


class Forbidden(CallerError):
    """Known, and not allowed."""

    status = 403
    code = "insufficient_permissions"


class NotFound(CallerError):
    """Absent, or somebody else's: the answer is the same to the byte."""

    status = 404
    code = "not_found"


class Conflict(CallerError):
    """The thing exists, in a state that does not allow this."""

    status = 409
    code = "conflict"


class Refused(CallerError):
    """Understood, and not done here: too large, a wrong method, a transport that is switched off."""

    def __init__(
        self,
        message: str,
        *,
        status: int,
        code: str,
        param: str | None = None,
        allow: str | None = None,
    ) -> None:
        super().__init__(message, code=code, param=param)
        self.status = status
        self.allow = allow


def too_large(size: int, size_max: int) -> Refused:
    """The same words for a body and for a frame, with both figures (docs/hazards.md F11)."""
    return Refused(
        f"The request is too large: {size} bytes, at most {size_max} are accepted.",
        status=413,
        code="payload_too_large",
    )


class TryLater(ApiError):
    """The same request may succeed later."""

    wait_s = 1.0


class TooMany(TryLater):
    """The caller has reached a limit of its own."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class Unavailable(TryLater):
    """Something that we need does not answer, or we are shutting down."""

    status = 503
    code = "server_is_overloaded"


class ServerFault(ApiError):
    """We must change something."""


class EngineFailed(ServerFault):
    """The engine broke off, or said something that it may not say; not the same status as a mistake of our own
    (docs/hazards.md F17)."""

    status = 502


class StoreFailed(ServerFault):
    """The store refused a write that it should have taken."""


# Ids are repeated in messages; ours have 37 characters, and an endless one is not sent back whole.
ID_CHARS_MAX = 256
# Names of tools, calls and items that the caller made up.
NAME_CHARS_MAX = 128


def parent_not_found(parent_id: str) -> InvalidRequest:
    """Unknown, evicted, foreign or half-written: one code, one text, on every transport."""
    return InvalidRequest(
        f"Previous response with id '{parent_id[:ID_CHARS_MAX]}' not found.",
        code="previous_response_not_found",
        param="previous_response_id",
    )


def response_not_found(response_id: str) -> NotFound:
    """The same words for an absent and for a foreign response."""
    return NotFound(
        f"Response with id '{response_id[:ID_CHARS_MAX]}' not found.", param="response_id"
    )


def conversation_not_found(conversation_id: str) -> NotFound:
    """The same words for an absent and for a foreign conversation."""
    return NotFound(
        f"Conversation with id '{conversation_id[:ID_CHARS_MAX]}' not found.",
        code="conversation_not_found",
        param="conversation",
    )


def context_overflow(tokens: int, tokens_max: int) -> InvalidRequest:
    """The prompt does not fit the model; said as a failed response once the turn has started."""
    return InvalidRequest(
        f"Your input exceeds the context window of this model: {tokens} tokens, "
        f"at most {tokens_max} fit. Please adjust your input and try again.",
        code="context_length_exceeded",
        param="input",
    )


def cut_name(name: str | None) -> str | None:
    """A name of the caller's as a message may repeat it."""
    return name if name is None else name[:NAME_CHARS_MAX]


def model_not_found(name: str) -> NotFound:
    """We do not serve this model."""
    return NotFound(
        f"The model '{cut_name(name)}' does not exist or you do not have access to it.",
        code="model_not_found",
        param="model",
    )


class Misconfigured(Exception):
    """The operator must change a setting; said on the terminal before anything starts."""
