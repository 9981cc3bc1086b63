"""What an MCP server answers, as the model reads it; the talking itself is in the scenarios and the contract suite."""

from __future__ import annotations

from typing import Any

import pytest
from mcp_types import CallToolResult

from segue.mcp.sessions import LISTS_BYTES_MAX, KnownLists, _text
from segue.wire.items import RemoteTool

PIXEL = {"type": "image", "data": "AAAA", "mimeType": "image/png"}


@pytest.mark.parametrize(
    "content, structured, told",
    [
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], None, "a\nb"),
        ([], None, ""),
        ([PIXEL], None, "[image: image/png, not shown: it is not a text]"),
        ([{"type": "text", "text": '{"n": 1}'}], {"n": 1}, '{"n": 1}'),
        ([], {"n": 1}, '{"n":1}'),
        (
            [{"type": "resource", "resource": {"uri": "demo://a", "text": "words"}}],
            None,
            "words",
        ),
        (
            [{"type": "resource", "resource": {"uri": "demo://a", "blob": "AAAA"}}],
            None,
            "[resource: demo://a, not a text]",
        ),
    ],
)
def test_model_reads_what_is_text_and_is_told_of_the_rest(
    content: list[Any], structured: Any, told: str
) -> None:
    fields: dict[str, Any] = {"content": content, "structuredContent": structured}
    assert _text(CallToolResult.model_validate(fields)) == told


def test_listings_that_are_known_are_bounded_in_bytes() -> None:
    lists = KnownLists(300.0)
    for number in range(40):
        tools = (RemoteTool(f"t{number}", description="a" * 1_000_000),)
        lists.keep(b"%d" % number, tools)
        assert lists.find(b"%d" % number) == tools
        assert lists.bytes <= LISTS_BYTES_MAX
    assert lists.find(b"0") is None
    lists.keep(b"39", ())
    assert lists.find(b"39") == ()
    lists.keep(b"40", (RemoteTool("t", description="a" * (LISTS_BYTES_MAX + 1)),))
    assert (lists.find(b"40"), lists.bytes) == (None, 0)
