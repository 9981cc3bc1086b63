"""What does a process write for its operator? Log lines without API keys; with several workers, with the process id."""

from __future__ import annotations

import logging
import re

from segue.settings import Settings

SECRET = re.compile(r"sk-segue-[A-Za-z0-9_-]+")


class RedactingFormatter(logging.Formatter):
    """Replaces every API key of ours in a log line, tracebacks included."""

    def format(self, record: logging.LogRecord) -> str:
        return SECRET.sub("sk-segue-…", super().format(record))


def set_up_logging(settings: Settings) -> None:
    """Write log lines of at least `log_level` to standard error."""
    process = "%(process)d " if settings.workers > 1 else ""
    logging.basicConfig(level=settings.log_level.upper())
    formatter = RedactingFormatter(f"%(asctime)s {process}%(levelname)s %(name)s %(message)s")
    for handler in logging.getLogger().handlers:
        handler.setFormatter(formatter)
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
