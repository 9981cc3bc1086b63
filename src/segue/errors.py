"""What can fail, by blame.

    ApiError            code, message, param, status
      CallerError       the caller must change something
        InvalidRequest Unauthenticated Forbidden NotFound Conflict Refused
      TryLater          the same request may succeed later (wait_s)
        TooMany OverBudget Unavailable
      ServerFault       we must change something
        EngineFailed StoreFailed Outdated Fenced

Two places turn an error into an answer for the client: the transport around `prepare` (a status or an error event), and
the turn loop (a failed response). Elsewhere an error is caught only to retry, to fall back, to release what is held, or
to become a tool's output. The wire form of an error is made from these fields alone, on every transport.
"""

from __future__ import annotations

import sys
from collections.abc import Collection
from importlib.util import find_spec
from itertools import islice
from typing import Self


class ApiError(Exception):
    """An error that the client sees, as a status and a code over HTTP or as an event on a stream."""

    status = 500
    type = "server_error"
    code: str = "server_error"
    wait_s: float | None = None
    # The id of the refused request, where it was logged before its answer was made.
    request_id = ""

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

    def kept(self) -> Self:
        """The same error without the way that it came: what is passed on by frames that hold whole requests, and by
        one that holds the error, would stay until the garbage collector looks."""
        self.__context__ = None
        return self.with_traceback(None)


class CallerError(ApiError):
    """The caller must change something."""

    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class InvalidRequest(CallerError):
    """The request cannot be understood or contradicts itself."""


class Unauthenticated(CallerError):
    """The API key is missing or wrong."""

    status = 401
    code = "invalid_api_key"

    def __init__(self, message: str, *, code: str | None = None, is_wrong: bool = False) -> None:
        super().__init__(message, code=code)
        # A wrong key is named as such, a missing one is not (RFC 6750, 3.1).
        self.challenge = 'Bearer realm="segue"' + ', error="invalid_token"' * is_wrong


class Forbidden(CallerError):
    """The API key is valid, but not for this."""

    status = 403
    code = "insufficient_permissions"


class NotFound(CallerError):
    """Absent, or another owner's: the answer is the same to the byte."""

    status = 404
    code = "not_found"


class Conflict(CallerError):
    """The object exists, in a state that does not allow this."""

    status = 409
    code = "conflict"


class Refused(CallerError):
    """Understood, but not accepted here: too large, a wrong method, a transport that is switched off."""

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
    """The same message for a body and for a frame, with both figures (docs/inside/hazards.md F11)."""
    message = f"The request is too large: {size} bytes, at most {size_max} are accepted."
    return Refused(message, status=413, code="payload_too_large")


class TryLater(ApiError):
    """The same request may succeed later."""

    wait_s = 1.0


class TooMany(TryLater):
    """The caller has reached a limit of its own."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class OverBudget(TooMany):
    """The caller has used up what it may use of a day or a month."""

    type = "insufficient_quota"
    code = "insufficient_quota"


class Unavailable(TryLater):
    """The store or an engine does not answer, or the server is shutting down."""

    status = 503
    code = "server_is_overloaded"


class ServerFault(ApiError):
    """We must change something."""


class EngineFailed(ServerFault):
    """Failed, or returned something invalid; not the status of a bug of our own (docs/inside/hazards.md F17)."""

    status = 502


class StoreFailed(ServerFault):
    """The store refused a write that it should have accepted."""


class Outdated(StoreFailed):
    """A newer version has changed the store, so that this one can no longer use it."""


class Fenced(ServerFault):
    """This process stood still for so long that others have ended the response, or given away what it held."""

    def __init__(self) -> None:
        super().__init__("The server stopped before the response was finished.")


# Ids are repeated in messages; ours have 37 characters, and a very long one is cut.
ID_CHARS_MAX = 256
# The same for names of models, tools, calls and items from the request.
NAME_CHARS_MAX = 128
# And how many names of ours a message lists.
NAMES_MAX = 8


def parent_not_found(parent_id: str) -> InvalidRequest:
    """One code and one message for a response that is unknown, evicted, another owner's or incomplete."""
    message = f"Previous response with id '{parent_id[:ID_CHARS_MAX]}' not found."
    code = "previous_response_not_found"
    return InvalidRequest(message, code=code, param="previous_response_id")


def response_not_found(response_id: str) -> NotFound:
    """The same message for an absent response and for another owner's."""
    message = f"Response with id '{response_id[:ID_CHARS_MAX]}' not found."
    return NotFound(message, param="response_id")


def conversation_not_found(conversation_id: str) -> NotFound:
    """The same message for an absent conversation and for another owner's."""
    message = f"Conversation with id '{conversation_id[:ID_CHARS_MAX]}' not found."
    return NotFound(message, code="conversation_not_found", param="conversation")


def context_overflow(tokens: int, tokens_max: int) -> InvalidRequest:
    """The prompt does not fit the context window; a failed response once the turn has started."""
    message = (
        f"Your input exceeds the context window of this model: {tokens} tokens, "
        f"at most {tokens_max} fit. Please adjust your input and try again."
    )
    return InvalidRequest(message, code="context_length_exceeded", param="input")


def append_timeout(wait_s: float) -> ServerFault:
    """A rollout has waited too long for its client."""
    message = f"The rollout waited {wait_s:g} s for the outputs of its calls."
    return ServerFault(message, code="append_timeout")


def cut_name(name: str | None) -> str | None:
    """A name from the request, short enough for a message."""
    return name if name is None else name[:NAME_CHARS_MAX]


def shown_names(names: Collection[str]) -> str:
    """The first of these names, few and short enough for a message."""
    more = len(names) - NAMES_MAX
    shown = ", ".join(name[:NAME_CHARS_MAX] for name in islice(names, NAMES_MAX))
    return shown + (f" and {more} more" if more > 0 else "")


def model_not_found(name: str, served: Collection[str]) -> NotFound:
    """`served` are the names that the caller may use."""
    message = f"The model '{cut_name(name)}' does not exist or you do not have access to it."
    none = "Your API key may use none of the models here."
    message += f" Served: {shown_names(served)}." if served else f" {none}"
    return NotFound(message, code="model_not_found", param="model")


class Misconfigured(Exception):
    """The operator must change a setting; printed on the terminal at startup."""


class MissingPackage(Misconfigured):
    """An optional package is not installed; says how to install it into the environment that runs."""

    def __init__(self, subject: str, package: str, requirement: str) -> None:
        # Environments that uv makes have no pip.
        has_pip = find_spec("pip") is not None
        command = (
            f"{sys.executable} -m pip install"
            if has_pip
            else f"uv pip install --python {sys.executable}"
        )
        super().__init__(
            f"{subject}: the package '{package}' is not installed. Run: {command} '{requirement}'"
        )


def need_package(subject: str, package: str, extra: str) -> None:
    """Refuse a setting whose optional package is not installed."""
    if find_spec(package) is None:
        raise MissingPackage(subject, package, f"segue-server[{extra}]")
