"""Which requests came, from where, and how were they answered? One line for each; never content.

An HTTP request has its line when it is answered, a WebSocket connection when it is opened and closed, and each of its
turns when it has ended. The lines go to the server's log at once, or to a file in the background, in the same format.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from segue.exports.lines import AddLine, open_lines
from segue.listener.access_line import AccessLine
from segue.observe.logs import LogFormat, make_formatter

# The documented name of the logger, for operators who route it (docs/observability.md).
log = logging.getLogger("segue.access")
# An operator who asks for these lines gets them at every `log_level`.
log.setLevel(logging.INFO)

# What follows by name in a line of text, if there is something.
NAMED = ("owner", "key", "response_id", "turns", "reason", "forwarded_for")
PLAIN = re.compile(r"[!#-~]+")


class AccessLog:
    """Writes the access log: to the server's log where there is no file to add lines to."""

    def __init__(
        self, add_line: AddLine | None, log_format: LogFormat, *, workers: int = 1
    ) -> None:
        self._add_line = add_line
        self._format = make_formatter(log_format, workers=workers).format

    def write(self, line: AccessLine) -> None:
        """Write one line."""
        fields = msgspec.to_builtins(line)
        fields["took_s"] = round(line.took_s, 6)
        extra = {"fields": fields, "request_id": line.request_id}
        text = text_of(line)
        record = log.makeRecord(log.name, logging.INFO, "", 0, text, (), None, None, extra)
        if self._add_line is None:
            log.handle(record)
        else:
            self._add_line(self._format(record).encode())


@asynccontextmanager
async def open_access_log(
    place: str, log_format: LogFormat, *, workers: int = 1
) -> AsyncIterator[AccessLog]:
    """The access log at this place while inside; what is left is written on the way out."""
    async with open_lines("access_log", place) as add_line:
        yield AccessLog(add_line, log_format, workers=workers)


def text_of(line: AccessLine) -> str:
    """The line as text, without time and request id."""
    what = f"{line.address or '-'} {line.event} {line.method} {line.path} {line.status}"
    named = [(name, getattr(line, name)) for name in NAMED]
    rest = "".join(f" {name}={_quoted(str(value))}" for name, value in named if value)
    return f"{what} {line.sent_bytes} bytes {line.took_s:.3f} s{rest}"


def _quoted(value: str) -> str:
    """A value that a program can tell from its neighbours."""
    return value if PLAIN.fullmatch(value) else json.dumps(value)
