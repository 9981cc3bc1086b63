"""What does a process write for its operator? Lines without secrets; of several processes, which one it was."""

from __future__ import annotations

import logging

from segue.keys import Discreet
from segue.settings import Settings


def set_up_logging(settings: Settings) -> None:
    """From now on lines go to standard error, from this level on."""
    which = "%(process)d " if settings.workers > 1 else ""
    logging.basicConfig(level=settings.log_level.upper())
    for one in logging.getLogger().handlers:
        one.setFormatter(Discreet(f"%(asctime)s {which}%(levelname)s %(name)s %(message)s"))
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
