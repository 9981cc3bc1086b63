"""Who is told that the store failed finds the reason in the log, and nothing of what was to be stored."""

import logging
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from segue.errors import StoreFailed
from segue.ids import current_request
from segue.seams.store import Conversation, ConversationItem
from segue.stores.sql_files import log_failure
from tests.contracts.stores import Stores, open_stores
from tests.contracts.turns import OWNER, make_turn, said

SECRET = "never to be logged"


class Lines(logging.Handler):
    """The lines of a log, each with the id of its request."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append((record.levelname, current_request.get(), record.getMessage()))


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Lines:
    found = Lines()
    monkeypatch.setattr(logging.getLogger("segue.stores.sql_files"), "handlers", [found])
    return found


@pytest.fixture(params=["sqlite", "postgres"])
async def stores(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    async with open_stores(request.param, request, tmp_path) as open_one:
        yield await open_one()


async def test_reason_of_a_failed_write_is_logged_once_with_its_request(
    stores: Stores, lines: Lines
) -> None:
    current_request.set("req_1")
    conversation = Conversation("conv_1", OWNER, 1_700_000_000, {})
    with pytest.raises(StoreFailed):
        await stores.conversations.save(
            conversation, [ConversationItem(f"{SECRET} \ud800", said(SECRET))]
        )
    ((level, request, line),) = lines.seen
    assert (level, request) == ("WARNING", "req_1")
    assert line.startswith("the store failed: ")
    assert line.endswith(" in _write_conversation")
    assert SECRET not in line


async def test_reason_of_a_failed_read_is_logged_once_with_its_request(
    stores: Stores, lines: Lines
) -> None:
    current_request.set("req_2")
    await stores.turns.save(make_turn("t", given=[said(SECRET)]))
    await stores.spoil("t")
    with pytest.raises(StoreFailed):
        await stores.turns.read(OWNER, "t")
    ((level, request, line),) = lines.seen
    assert (level, request) == ("WARNING", "req_2")
    assert SECRET not in line


def test_message_is_logged_where_it_quotes_nothing(lines: Lines) -> None:
    log_failure(sqlite3.OperationalError(f"attempt to write a readonly database\nDETAIL: {SECRET}"))
    log_failure(ValueError(SECRET))
    assert [line for *_, line in lines.seen] == [
        "the store failed: OperationalError attempt to write a readonly database",
        "the store failed: ValueError",
    ]
