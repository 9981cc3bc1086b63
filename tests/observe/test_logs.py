"""Log lines carry no API key."""

from __future__ import annotations

import logging
import sys

from segue.observe.logs import RedactingFormatter


def test_no_key_gets_through_a_log_line() -> None:
    secret = "sk-segue-" + "s" * 43
    try:
        raise ValueError(secret)
    except ValueError:
        record = logging.LogRecord(
            "x", logging.ERROR, "x.py", 1, "of %s", (secret,), sys.exc_info()
        )
    line = RedactingFormatter("%(name)s %(message)s").format(record)
    assert "of sk-segue-…" in line
    assert "ValueError" in line
    assert secret not in line
