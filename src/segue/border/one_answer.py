"""How much may a server say before it answers?

In: the bytes of one connection. Out: one answer for aiohttp, which keeps all interim answers (100 Continue) that come,
and works them off at once: ten megabytes of them took 130, and the event loop for a second.
"""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import aiohttp
from aiohttp.client_proto import ResponseHandler

# Answers that are not looked at yet; an honest server sends one or two before its own.
ANSWERS_MAX = 8


class OneAnswer(ResponseHandler):
    """The protocol of a connection, which ends where too many answers come at once."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if len(self._buffer) > ANSWERS_MAX and self.transport is not None:
            self._buffer.clear()
            self.set_exception(aiohttp.ServerDisconnectedError("more answers than one"))
            self.transport.abort()


class OneAnswerConnector(aiohttp.TCPConnector):
    """Connects with that protocol."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._factory = cast("partial[ResponseHandler]", partial(OneAnswer, loop=self._loop))
