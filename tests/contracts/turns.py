"""Turns to remember: builders and samples for everything that is a `Turns` or a `Ledger`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import get_args

import msgspec
from msgspec import Raw
from msgspec.structs import replace

from segue.seams.history import Round, Turn
from segue.seams.prompt import NO_IDS, IdArray, id_array
from segue.wire.items import Call, Item, ItemReference, ItemValue, Message
from segue.wire.response import (
    InputDetails,
    OutputDetails,
    ReasoningEcho,
    Response,
    ResponseStatus,
    Usage,
)

OWNER = "ada"

# One of every type, with a field that nobody knows and spacing that no encoder would choose.
SAMPLES: dict[str, str] = {
    "message": '{ "type":"message","role":"user","content":[{"type":"input_text","text":"hi"}]}',
    "function_call": '{"type":"function_call","call_id":"c","name":"f","arguments":"{}", "x":1}',
    "function_call_output": '{"type":"function_call_output","call_id":"c","output":"42"}',
    "segue:tool_output": '{"type":"segue:tool_output","call_id":"mcp_1","output":"42"}',
    "custom_tool_call": '{"type":"custom_tool_call","call_id":"c","name":"f","input":"a\\nb"}',
    "custom_tool_call_output": '{"type":"custom_tool_call_output","call_id":"c","output":[]}',
    "reasoning": '{"type":"reasoning","content":[{"type":"reasoning_text","text":"t"}]}',
    "web_search_call": '{"type":"web_search_call","action":{"type":"search","query":"q"}}',
    "file_search_call": '{"type":"file_search_call","queries":["q"],"results":null}',
    "code_interpreter_call": '{"type":"code_interpreter_call","code":"1+1","outputs":[{ }]}',
    "image_generation_call": '{"type":"image_generation_call","result":"aGk="}',
    "computer_call": '{"type":"computer_call","call_id":"c","action":{"type":"click"}}',
    "computer_call_output": '{"type":"computer_call_output","call_id":"c","output":{"a": 1.0}}',
    "mcp_list_tools": '{"type":"mcp_list_tools","server_label":"s","tools":[{"name":"n"}]}',
    "mcp_call": '{"type":"mcp_call","server_label":"s","name":"n","arguments":"{}","output":null}',
    "mcp_approval_request": (
        '{"type":"mcp_approval_request","id":"a","server_label":"s","name":"n","arguments":"{}"}'
    ),
    "mcp_approval_response": (
        '{"type":"mcp_approval_response","approval_request_id":"a","approve":true}'
    ),
    "shell_call": '{"type":"shell_call","call_id":"c","action":{"commands":["ls"]}}',
    "shell_call_output": '{"type":"shell_call_output","call_id":"c","output":'
    '[{"stdout":"x","stderr":"","outcome":{"type":"exit","exit_code":0}}]}',
    "local_shell_call": '{"type":"local_shell_call","call_id":"c",'
    '"action":{"type":"exec","command":["ls"],"env":{}}}',
    "local_shell_call_output": '{"type":"local_shell_call_output","id":"c","output":"x"}',
    "apply_patch_call": '{"type":"apply_patch_call","call_id":"c","operation":'
    '{"type":"delete_file","path":"p"}}',
    "apply_patch_call_output": '{"type":"apply_patch_call_output","call_id":"c","status":"ok"}',
    "tool_search_call": '{"type":"tool_search_call","call_id":"c","execution":"client"}',
    "tool_search_output": '{"type":"tool_search_output","call_id":"c","tools":[]}',
    "additional_tools": '{"type":"additional_tools","tools":[{"type":"function","name":"f"}]}',
    "configuration_update": '{"type":"configuration_update","reasoning":{"effort":"low"}}',
    "program": '{"type":"program","code":"f()"}',
    "program_output": '{"type":"program_output","result":[1,2]}',
    "compaction": '{"type":"compaction","encrypted_content":"e"}',
    "compaction_summary": '{"type":"compaction_summary","encrypted_content":"e"}',
    "compaction_trigger": '{"type":"compaction_trigger"}',
    "item_reference": '{"type":"item_reference","id":"msg_1"}',
    # Clients leave the type out, or send null for it.
    "message without type": '{"role":"user","content":"hi"}',
    "message of type null": '{"type":null,"role":"user","content":"hi"}',
    "reference without type": '{"id":"msg_1"}',
    "reference of type null": '{"id":"msg_1","type":null}',
}

NASTY = {
    "nul": "a\0b\0",
    "controls": "".join(map(chr, range(32))) + "\x7f\x80\x9f",
    "edges of planes": "\ud7ff\ue000\ufffd\ufffe\uffff\U00010000\U0001fffe\U0010ffff",
    "emoji and joiners": "👩‍👩‍👧‍👦🏳️‍🌈 e\u0301 \u202eright\u202c \u2028\u2029 \ufeff",
    "quotes": "'; DROP TABLE turns; --\"\\`",
    "a megabyte": "x€" * 262_144,
}


def kinds() -> set[str]:
    """All types of items that the contract has."""
    return {str(kind.__struct_config__.tag) for kind in get_args(ItemValue)}


def item(raw: str) -> Item:
    """An item from its JSON, as the door would decode it."""
    body = json.loads(raw)
    if body.get("type") is None:
        kind = Message if "role" in body else ItemReference
        typed = msgspec.json.encode({**body, "type": kind.__struct_config__.tag})
    else:
        typed = raw.encode()
    return Item(raw.encode(), msgspec.json.decode(typed, type=ItemValue))


def said(text: str, role: str = "user") -> Item:
    """A message with this text."""
    kind = "output_text" if role == "assistant" else "input_text"
    part = {"type": kind, "text": text}
    return item(json.dumps({"type": "message", "role": role, "content": [part]}))


def response_of(
    turn_id: str,
    wrote: Sequence[Item] = (),
    *,
    parent_id: str | None = None,
    status: ResponseStatus = "completed",
    tools: bytes = b"[]",
    instructions: bytes = b"null",
    store: bool = True,
) -> Response:
    """A response that has these items as its output."""
    return Response(
        id=turn_id,
        created_at=1_700_000_000,
        completed_at=1_700_000_001 if status == "completed" else None,
        status=status,
        instructions=Raw(instructions),
        max_output_tokens=None,
        max_tool_calls=None,
        model="tiny",
        output=[Raw(each.raw) for each in wrote],
        parallel_tool_calls=True,
        previous_response_id=parent_id,
        prompt_cache_key=None,
        reasoning=ReasoningEcho(),
        safety_identifier=None,
        store=store,
        temperature=0.1,
        text=Raw(b'{"format":{"type":"text"}}'),
        tool_choice=Raw(b'"auto"'),
        tools=Raw(tools),
        top_logprobs=0,
        top_p=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        truncation="disabled",
        usage=Usage(7, InputDetails(cached_tokens=3), 5, OutputDetails(), 12),
        user=None,
        metadata={"k": "v"},
    )


def make_turn(
    turn_id: str,
    parent: Turn | None = None,
    *,
    owner: str = OWNER,
    given: Sequence[Item] | None = None,
    wrote: Sequence[Item] | None = None,
    ids: Sequence[IdArray[int]] | None = None,
    is_stored: bool = True,
    tools: bytes = b"[]",
    instructions: bytes = b"null",
    status: ResponseStatus = "completed",
    node_bytes: int = 1_000,
) -> Turn:
    """A turn in which one thing was asked and one thing was said."""
    given = [said(f"ask {turn_id}")] if given is None else given
    wrote = [said(f"answer {turn_id}", "assistant")] if wrote is None else wrote
    kept = tuple(id_array([1, 2, 3]) for _ in wrote) if ids is None else tuple(ids)
    parent_id = parent.id if parent else None
    return Turn(
        id=turn_id,
        owner=owner,
        parent_id=parent_id,
        parent=parent,
        rounds=(Round(tuple(given), tuple(wrote), kept, id_array([0]), "dialect/1", True),),
        response=response_of(
            turn_id,
            wrote,
            parent_id=parent_id,
            status=status,
            tools=tools,
            instructions=instructions,
            store=is_stored,
        ),
        is_stored=is_stored,
        open_calls={},
        model_turns=parent.model_turns + 1 if parent else 1,
        root_at=parent.root_at if parent else 1_700_000_000,
        is_whole=parent.is_whole if parent else True,
        bytes=node_bytes,
    )


def make_chain(length: int, *, prefix: str = "t", **more: object) -> list[Turn]:
    """A chain of turns, oldest first."""
    chain: list[Turn] = []
    for number in range(length):
        parent = chain[-1] if chain else None
        chain.append(make_turn(f"{prefix}{number}", parent, **more))  # type: ignore[arg-type]
    return chain


def rich_turn() -> Turn:
    """A turn with several rounds, calls that wait, and output that is not just what was written."""
    call = item(SAMPLES["function_call"])
    rounds = (
        Round((said("a"),), (call,), (id_array([0, 2**32 - 1]),), id_array([7]), "d/2", True),
        Round((item(SAMPLES["function_call_output"]),), (), (), NO_IDS, None, False),
        Round((), (said("b", "assistant"), call), (NO_IDS, id_array(range(500)))),
    )
    turn = make_turn("rich")
    return replace(
        turn,
        rounds=rounds,
        response=msgspec.structs.replace(turn.response, output=[Raw(b'{ "odd": 1 }')]),
        open_calls={"c": Call("c", "function", True), "d": Call("d", "shell")},
        model_turns=41,
        root_at=99,
        passed=("rules-1", "moderation-2"),
    )


def meaning(turn: Turn | None) -> tuple[object, ...]:
    """What every store must give back; parents, warmth, tools and weight are not in it."""
    assert turn is not None
    return (
        turn.id,
        turn.owner,
        turn.parent_id,
        turn.rounds,
        msgspec.json.encode(turn.response),
        turn.is_stored,
        turn.open_calls,
        list(turn.open_calls),
        turn.model_turns,
        turn.root_at,
        turn.passed,
    )
