"""Log lines carry the id of their request, and no API key."""

from __future__ import annotations

import json
import logging
import sys
from contextvars import copy_context

from segue.ids import current_request
from segue.observe.logs import JsonFormatter, TextFormatter


def test_no_key_gets_through_a_log_line() -> None:
    secret = "sk-segue-" + "s" * 43
    try:
        raise ValueError(secret)
    except ValueError:
        record = logging.LogRecord(
            "x", logging.ERROR, "x.py", 1, "of %s", (secret,), sys.exc_info()
        )
    line = TextFormatter("%(name)s %(message)s").format(record)
    assert "of sk-segue-…" in line
    assert "ValueError" in line
    assert secret not in line


def test_json_line_has_the_request_the_error_and_no_key() -> None:
    secret = "sk-segue-" + "s" * 43
    try:
        raise ValueError(secret)
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "x.py", 1, 'a "%s"', (1,), sys.exc_info())

    def lines() -> tuple[dict[str, object], dict[str, object]]:
        current_request.set("req_1")
        first = json.loads(JsonFormatter().format(record))
        record.request_id = "req_2"
        return first, json.loads(JsonFormatter().format(record))

    first, second = copy_context().run(lines)
    assert (first["level"], first["logger"], first["message"]) == ("error", "x", 'a "1"')
    assert (first["request_id"], second["request_id"]) == ("req_1", "req_2")
    assert str(first["time"]).endswith("Z")
    traceback = str(first["traceback"])
    assert "ValueError: sk-segue-…" in traceback
    assert secret not in traceback


def test_words_of_an_engine_neither_reach_the_terminal_as_orders_nor_forge_a_line() -> None:
    said = "no \x1b]52;c;cm0=\x07\x9b2J\r\n2026-01-01 INFO forged \u2028"
    try:
        raise ValueError(said)
    except ValueError:
        record = logging.LogRecord(
            "x", logging.DEBUG, "x.py", 1, "engine said: %s", (said,), sys.exc_info()
        )
    text = TextFormatter("%(name)s %(message)s").format(record)
    assert text.splitlines()[0].endswith("\\u0007\\u009b2J\\n2026-01-01 INFO forged \\u2028")
    assert all(one.isprintable() or one == "\n" for one in text)
    line = JsonFormatter().format(record)
    assert line.isprintable()
    assert json.loads(line)["message"] == f"engine said: {said}"
