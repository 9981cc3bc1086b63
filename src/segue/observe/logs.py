"""What does a process write for its operator? Log lines as text or as JSON, without API keys and control characters.

A line that belongs to a request has its id: every record that is logged in the task of a request, or with an
`extra={"request_id": …}`. A record with `extra={"fields": …}` has these in JSON instead of a message.
"""

from __future__ import annotations

import logging
import re
from datetime import UTC, datetime
from typing import Literal

import msgspec

from segue.ids import current_request
from segue.printable import printable

LogFormat = Literal["text", "json"]

SECRET = re.compile(r"sk-segue-[A-Za-z0-9_-]+")


def _redacted(line: str) -> str:
    return SECRET.sub("sk-segue-…", printable(line))


def _request_of(record: logging.LogRecord) -> str:
    return getattr(record, "request_id", "") or current_request.get()


class TextFormatter(logging.Formatter):
    """One line of text. Replaces every API key of ours, in tracebacks too."""

    def format(self, record: logging.LogRecord) -> str:
        request_id = _request_of(record)
        record.request = f"[{request_id}] " if request_id else ""
        return _redacted(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:
        """A message is one line, whatever it contains; only a traceback has more."""
        return super().formatMessage(record).replace("\n", "\\n")


class JsonFormatter(logging.Formatter):
    """One JSON object a line. Replaces every API key of ours, in tracebacks too."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": time.replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": record.process,
        }
        if request_id := _request_of(record):
            line["request_id"] = request_id
        line |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)
        return _redacted(msgspec.json.encode(line).decode())


def make_formatter(log_format: LogFormat, *, workers: int = 1) -> logging.Formatter:
    """The formatter that the operator has chosen; text has the process id where there are several workers."""
    if log_format == "json":
        return JsonFormatter()
    process = "%(process)d " if workers > 1 else ""
    return TextFormatter(f"%(asctime)s {process}%(levelname)s %(name)s %(request)s%(message)s")


def set_up_logging(level: str, log_format: LogFormat, *, workers: int = 1) -> None:
    """Write log lines of at least this level to standard error."""
    logging.basicConfig(level=level.upper())
    for handler in logging.getLogger().handlers:
        handler.setFormatter(make_formatter(log_format, workers=workers))
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    # It quotes what MCP servers answer; what goes wrong with them is said in words of our own.
    logging.getLogger("mcp").setLevel(logging.CRITICAL)
