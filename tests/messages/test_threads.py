"""What a request of a thread has from the turns before it, by values; how a thread that is not there is refused."""

from __future__ import annotations

import json
from typing import Any

from segue.messages.errors import ThreadRefused, error_answer
from segue.messages.reading import MessageReading
from segue.messages.request import NONE_SHOWN, ShownTools, Surroundings
from segue.resent.memo import Memo
from segue.wire.requests import Create, ToolChoiceName

SCHEMA = {"type": "object"}
LATER = {"name": "later", "input_schema": SCHEMA, "defer_loading": True}
NOW = {"name": "now", "input_schema": SCHEMA}


def named(name: str) -> dict[str, Any]:
    return {"type": "tool_reference", "tool_name": name}


def changed(kind: str, name: str) -> dict[str, Any]:
    block = {"type": kind, "tool": {"type": "tool_reference", "name": name}}
    return {"role": "system", "content": [block]}


def read(before: ShownTools, *messages: object, **fields: object) -> tuple[Create, ShownTools]:
    """The turn of a request that continues a thread, and which tools were shown by then."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "x"}, *messages, {"role": "user", "content": "y"}],
        "tools": [NOW, LATER],
        "thread": {"type": "continue", "previous_message_id": "msg_" + "0" * 32},
        **fields,
    }
    reading = MessageReading(Memo(1 << 20), "ada", Surroundings())
    reading.decode(json.dumps(body).encode())
    create = reading.compile(reading.body, before)
    return create, reading.asked.shown


def joined(create: Create) -> int:
    """How often tools were brought."""
    assert isinstance(create.input, list)
    return sum(b"additional_tools" in bytes(raw) for raw in create.input)


def test_tool_joins_once_in_a_thread() -> None:
    addition = changed("tool_addition", "later")
    create, shown = read(NONE_SHOWN, addition)
    assert joined(create) == 1
    assert shown == ShownTools(("later",))
    create, again = read(shown, addition)
    assert joined(create) == 0
    assert again == shown


def test_tool_that_was_removed_earlier_may_not_be_called_until_it_is_added_again() -> None:
    _, shown = read(NONE_SHOWN, changed("tool_addition", "later"), changed("tool_removal", "now"))
    assert shown == ShownTools(("later",), ("now",))
    create, _ = read(shown)
    choice = create.tool_choice
    assert isinstance(choice, ToolChoiceName)
    assert [tool.name for tool in choice.tools or ()] == ["later"]
    create, shown = read(shown, changed("tool_addition", "now"))
    assert create.tool_choice is None
    assert shown == ShownTools(("later",))


def test_message_is_the_turn_with_the_same_number() -> None:
    thread = {"type": "continue", "previous_message_id": "msg_" + "0f" * 16}
    assert read(NONE_SHOWN, thread=thread)[0].previous_response_id == "resp_" + "0f" * 16


def test_message_that_a_create_names_is_no_parent() -> None:
    thread = {"type": "create", "previous_message_id": "msg_" + "0f" * 16}
    assert read(NONE_SHOWN, thread=thread)[0].previous_response_id is None


def test_refusals_have_the_shape_by_which_clients_choose_what_to_do() -> None:
    lost = error_answer(ThreadRefused("Gone.", "thread_not_found", status=404), "req_1")
    assert lost.status == 404
    assert json.loads(lost.body) == {
        "type": "error",
        "error": {
            "type": "not_found_error",
            "message": "Gone.",
            "details": {"error_code": "thread_not_found"},
        },
        "request_id": "req_1",
    }
    refused = ThreadRefused("Off.", "thread_unsupported_request", unsupported=[])
    details = json.loads(error_answer(refused, "req_1").body)["error"]["details"]
    assert details == {"error_code": "thread_unsupported_request", "unsupported": []}
