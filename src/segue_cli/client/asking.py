"""How much of what a server answers does a command believe?

In: a request over HTTP, or JSON that a server has sent. Out: its status and body, or the value, within limits of time
and size; what is neither is an error in words. No redirect is followed: the key is for the server that was named.
"""

from __future__ import annotations

import http.client
import ssl
import urllib.error
import urllib.request
from concurrent.futures import Future
from threading import Thread
from typing import TypeVar

import msgspec

from segue.errors import Misconfigured

T = TypeVar("T")

# As much as a message on a WebSocket may have.
ANSWER_BYTES_MAX = 64 * 1024 * 1024
# Of a message that is one line for a person.
MESSAGE_CHARS_MAX = 2_000


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The answer that leads elsewhere is the answer."""

    def redirect_request(self, *_: object) -> None:
        return None


def answer_to(
    request: urllib.request.Request,
    wait_s: float,
    proxies: dict[str, str] | None = None,
    tls: ssl.SSLContext | None = None,
) -> tuple[int, bytes]:
    """Status and body; an `OSError` where there is no answer. `proxies`: None stands for those of the environment."""
    asked: Future[tuple[int, bytes]] = Future()
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler(proxies),
        urllib.request.HTTPSHandler(context=tls),
        _NoRedirects(),
    )
    # The library's limit is for each read: who sends a byte now and then, or interim answers, is waited for in vain.
    Thread(target=_ask, args=(asked, opener, request, wait_s), daemon=True).start()
    try:
        return asked.result(wait_s)
    except TimeoutError:
        raise TimeoutError("timed out") from None


def _ask(
    asked: Future[tuple[int, bytes]],
    opener: urllib.request.OpenerDirector,
    request: urllib.request.Request,
    wait_s: float,
) -> None:
    try:
        asked.set_result(_read(opener, request, wait_s))
    except http.client.HTTPException:
        # Its words are the server's.
        asked.set_exception(ConnectionError("it does not answer in HTTP that can be read"))
    except Exception as error:
        asked.set_exception(error)


def _read(
    opener: urllib.request.OpenerDirector, request: urllib.request.Request, wait_s: float
) -> tuple[int, bytes]:
    try:
        answer = opener.open(request, timeout=wait_s)
    except urllib.error.HTTPError as error:
        answer = error
    with answer:
        body = answer.read(ANSWER_BYTES_MAX + 1)
        if len(body) > ANSWER_BYTES_MAX:
            raise ConnectionError(f"it answers with more than {ANSWER_BYTES_MAX:,} bytes")
        return int(answer.status), body


def decoded(text: bytes | str, kind: type[T], what: str) -> T:
    """What a server has sent as JSON; `what` says what it should be."""
    try:
        return msgspec.json.decode(text, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise Misconfigured(f"url: the server there did not answer with {what}.") from None


def shown(text: str) -> str:
    """Words of a server, as many as are read."""
    return text if len(text) <= MESSAGE_CHARS_MAX else f"{text[:MESSAGE_CHARS_MAX]}…"
