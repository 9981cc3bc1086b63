"""The audit log: who, what, when, with what outcome, and not a word of content."""

from __future__ import annotations

import json
import logging
import stat
from pathlib import Path

import pytest

from segue.errors import Misconfigured
from tests.support import MODEL, fetch, serving, wire


async def test_every_turn_and_every_refusal_is_one_line_without_content(tmp_path: Path) -> None:
    file = tmp_path / "audit.jsonl"
    async with serving(audit_log=str(file)) as served, wire(served) as socket:
        first = await socket.turn(input="A canary that sings.", store=False)
        await socket.turn(input="On.", previous_response_id=first["response"]["id"], store=False)
        body = {"model": "none", "input": "A canary."}
        assert (await fetch(served, "POST", "/v1/responses", body)).status == 404
    text = file.read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert "canary" not in text
    # A refusal does not wait for turns to settle.
    assert sorted((one["event"], one["outcome"]) for one in lines) == [
        ("refusal", "refused"),
        ("turn", "completed"),
        ("turn", "completed"),
    ]
    turns = [one for one in lines if one["event"] == "turn"]
    assert turns[1]["previous_response_id"] == turns[0]["response_id"] == first["response"]["id"]
    assert turns[0]["output_tokens"] == first["response"]["usage"]["output_tokens"]
    assert turns[0]["owner"]
    assert turns[0]["model"] == MODEL
    assert [one["code"] for one in lines if one["event"] == "refusal"] == ["model_not_found"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_lines_go_to_the_servers_own_log_if_that_is_asked_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, "segue.audit"):
        async with serving(audit_log="log") as served:
            await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": "A canary."})
    lines = [json.loads(r.getMessage()) for r in caplog.records if r.name == "segue.audit"]
    assert [one["outcome"] for one in lines] == ["completed"]


async def test_file_that_cannot_be_written_is_told_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="audit_log"):
        async with serving(audit_log=str(tmp_path / "none" / "audit.jsonl")):
            pass
