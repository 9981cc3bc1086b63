"""Messages become items: every kind of block by values."""

from __future__ import annotations

import json
from typing import Any

import pytest
from msgspec import Raw

from segue.errors import InvalidRequest
from segue.messages.history import (
    Defined,
    FoundTools,
    Loaded,
    MessagePiece,
    Removed,
    TranslatedMessage,
    call_id_of,
    tool_use_id_of,
    translate,
    translate_system,
)
from segue.messages.pairs import check_pairs


def read(message: dict[str, Any]) -> TranslatedMessage:
    sealed = {"ours": "What was found."}
    return translate(Raw(json.dumps(message).encode()), 3, sealed.get)


def items(role: str, *blocks: dict[str, Any]) -> list[Any]:
    """The items of a message; what is no item as it is."""
    return [shown(piece) for piece in read({"role": role, "content": list(blocks)}).pieces]


def shown(piece: MessagePiece) -> Any:
    return json.loads(bytes(piece)) if isinstance(piece, Raw) else piece


def said(role: str, content: Any) -> dict[str, Any]:
    return {"type": "message", "role": role, "content": content}


@pytest.mark.parametrize(
    "role, meant", [("user", "user"), ("assistant", "assistant"), ("system", "developer")]
)
def test_text_is_the_same_as_a_string_and_as_a_block(role: str, meant: str) -> None:
    plain = read({"role": role, "content": "Hi."})
    block = {"type": "text", "text": "Hi.", "cache_control": None, "citations": None}
    assert [shown(piece) for piece in plain.pieces] == [said(meant, "Hi.")]
    assert items(role, block) == [said(meant, "Hi.")]


def test_texts_of_one_message_stay_apart_and_empty_ones_go() -> None:
    first, second = {"type": "text", "text": "One."}, {"type": "text", "text": "Two."}
    empty = {"type": "text", "text": " \n"}
    parts = [{"type": "input_text", "text": "One."}, {"type": "input_text", "text": "Two."}]
    assert items("user", first, empty, second) == [said("user", parts)]
    assert items("user", empty) == []
    assert items("assistant", first, second)[0]["content"][0]["type"] == "output_text"


def test_answer_keeps_the_order_of_its_blocks() -> None:
    thought = {"type": "thinking", "thinking": "Hm.", "signature": "s"}
    use = {"type": "tool_use", "id": "toolu_x", "name": "ls", "input": {"b": 1, "a": [2.50]}}
    text = {"type": "text", "text": "I look."}
    meant = items("assistant", thought, text, use, text)
    assert [item["type"] for item in meant] == ["reasoning", "message", "function_call", "message"]
    assert meant[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert meant[0]["encrypted_content"] == "s"
    assert (meant[2]["call_id"], json.loads(meant[2]["arguments"])) == ("toolu_x", use["input"])


def test_thought_without_text_or_seal_says_nothing() -> None:
    assert items("assistant", {"type": "thinking", "thinking": "", "signature": ""}) == []
    (hidden,) = items("assistant", {"type": "thinking", "thinking": "", "signature": "sealed"})
    assert hidden == {"type": "reasoning", "summary": [], "encrypted_content": "sealed"}
    (redacted,) = items("assistant", {"type": "redacted_thinking", "data": "sealed"})
    assert redacted == hidden


def test_our_calls_have_one_number_in_both_apis() -> None:
    ours = "call_" + "0123456789abcdef" * 2 + "0001"
    assert call_id_of(tool_use_id_of(ours)) == ours
    assert tool_use_id_of(ours).startswith("toolu_")
    for foreign in ("toolu_01A09q90qw90lq917835lq9", "call_1", "x"):
        assert call_id_of(foreign) == foreign


def test_results_come_before_the_words_beside_them() -> None:
    results = [
        {"type": "tool_result", "tool_use_id": "b", "content": "two", "is_error": False},
        {"type": "tool_result", "tool_use_id": "a"},
    ]
    meant = items("user", *results, {"type": "text", "text": "Go on."})
    assert [(item["call_id"], item["output"]) for item in meant[:2]] == [("b", "two"), ("a", "")]
    assert meant[2] == said("user", "Go on.")


@pytest.mark.parametrize(
    "content, output",
    [
        ("No such file", "Error: No such file"),
        ("error: no such file", "error: no such file"),
        ([{"type": "text", "text": "exit 1"}], "Error: exit 1"),
        (None, "Error:"),
    ],
)
def test_result_that_is_an_error_says_so(content: Any, output: str) -> None:
    result = {"type": "tool_result", "tool_use_id": "a", "content": content, "is_error": True}
    assert items("user", result)[0]["output"] == output


def test_result_may_have_pictures_documents_and_hits() -> None:
    source = {"type": "base64", "media_type": "image/png", "data": "AA=="}
    hit = {"type": "search_result", "source": "u", "title": "t"}
    hit |= {"content": [{"type": "text", "text": "words"}]}
    blocks = [{"type": "text", "text": "See:"}, {"type": "image", "source": source}, hit]
    result = {"type": "tool_result", "tool_use_id": "a", "content": blocks}
    assert items("user", result)[0]["output"] == [
        {"type": "input_text", "text": "See:"},
        {"type": "input_image", "image_url": "data:image/png;base64,AA=="},
        {"type": "input_text", "text": "t\nu\n\nwords"},
    ]


@pytest.mark.parametrize(
    "source, parts",
    [
        (
            {"type": "base64", "media_type": "application/pdf", "data": "AA=="},
            [
                {
                    "type": "input_file",
                    "filename": "T.pdf",
                    "file_data": "data:application/pdf;base64,AA==",
                }
            ],
        ),
        (
            {"type": "url", "url": "http://a/b"},
            [{"type": "input_file", "filename": "T.pdf", "file_url": "http://a/b"}],
        ),
        ({"type": "file", "file_id": "file_1"}, [{"type": "input_file", "file_id": "file_1"}]),
        (
            {"type": "text", "media_type": "text/plain", "data": "Words."},
            [{"type": "input_text", "text": "Words."}],
        ),
        ({"type": "content", "content": "Words."}, [{"type": "input_text", "text": "Words."}]),
        (
            {"type": "content", "content": [{"type": "text", "text": "Words."}]},
            [{"type": "input_text", "text": "Words."}],
        ),
    ],
)
def test_document_is_a_file_or_its_words(
    source: dict[str, Any], parts: list[dict[str, Any]]
) -> None:
    block = {"type": "document", "source": source, "title": "T", "context": "From Ada."}
    about = {"type": "input_text", "text": "Document: T\nFrom Ada."}
    assert items("user", block) == [said("user", [about, *parts])]


def test_tools_that_are_named_join_after_all_results() -> None:
    reference = {"type": "tool_reference", "tool_name": "WebFetch"}
    first = {"type": "tool_result", "tool_use_id": "a", "content": [reference]}
    second = {"type": "tool_result", "tool_use_id": "b", "content": "x"}
    meant = items("user", first, second, {"type": "text", "text": "Go on."})
    assert [item["type"] for item in meant[:2]] == ["function_call_output"] * 2
    assert meant[2] == Loaded(("WebFetch",))
    assert "WebFetch" in meant[0]["output"]
    assert meant[3] == said("user", "Go on.")


def test_system_message_changes_tools_and_effort() -> None:
    named = {"type": "tool_reference", "name": "a"}
    defined = {"type": "tool_definition", "definition": {"name": "b", "input_schema": {}}}
    blocks = [
        {"type": "tool_addition", "tool": named},
        {"type": "tool_addition", "tool": defined},
        {"type": "tool_removal", "tool": named},
        {"type": "text", "text": "Note."},
    ]
    message = {"role": "system", "content": blocks, "clear_at": "next_user_message"}
    pieces = read(message | {"output_config": {"effort": "low"}}).pieces
    effort, added, definition, removed, note = map(shown, pieces)
    assert effort == {"type": "configuration_update", "reasoning": {"effort": "low"}}
    assert (added, removed) == (Loaded(("a",)), Removed("a"))
    assert isinstance(definition, Defined)
    assert note == said("developer", "Note.")


def test_search_of_the_server_is_one_item_with_what_it_found() -> None:
    use = {"type": "server_tool_use", "id": "srvtoolu_ws_1", "name": "web_search"}
    page = {"type": "web_search_result", "url": "u", "title": "t"}
    result = {"type": "web_search_tool_result", "tool_use_id": "srvtoolu_ws_1"}
    for sealed, text in (("ours", "What was found."), ("theirs", None)):
        found = {**result, "content": [{**page, "encrypted_content": sealed}]}
        (item,) = items("assistant", {**use, "input": {"query": "rain"}}, found)
        assert (item["type"], item["id"]) == ("web_search_call", "ws_1")
        assert item["action"]["query"] == "rain"
        assert item["action"]["sources"] == [{"type": "url", "url": "u"}]
        assert item["action"].get("segue:text") == text
    failed = {**result, "content": {"type": "web_search_tool_result_error", "error_code": "x"}}
    (item,) = items("assistant", {**use, "input": {"query": "rain"}}, failed)
    assert item["action"]["sources"] == []


def test_search_for_tools_is_a_call_and_the_tools_it_found() -> None:
    use = {"type": "server_tool_use", "id": "srvtoolu_tsc_1", "name": "tool_search_tool_regex"}
    reference = {"type": "tool_reference", "tool_name": "a"}
    found = {"type": "tool_search_tool_search_result", "tool_references": [reference]}
    result = {"type": "tool_search_tool_result", "tool_use_id": "srvtoolu_tsc_1", "content": found}
    call, tools = items("assistant", {**use, "input": {"query": "x"}}, result)
    assert (call["type"], call["id"], call["arguments"]) == (
        "tool_search_call",
        "tsc_1",
        {"query": "x"},
    )
    assert tools == FoundTools("1", ("a",))


def test_remote_call_is_one_item_with_its_result() -> None:
    use = {"type": "mcp_tool_use", "id": "mcptoolu_mcp_1", "name": "now", "server_name": "time"}
    result = {"type": "mcp_tool_result", "tool_use_id": "mcptoolu_mcp_1"}
    texts = [{"type": "text", "text": "Noon."}]
    (good,) = items("assistant", {**use, "input": {}}, {**result, "content": texts})
    assert (good["server_label"], good["name"], good["output"]) == ("time", "now", "Noon.")
    (bad,) = items(
        "assistant", {**use, "input": {}}, {**result, "content": "No.", "is_error": True}
    )
    assert (bad["error"], "output" in bad) == ("No.", False)


def test_content_that_is_not_known_is_a_line_and_is_remembered() -> None:
    blocks = [{"type": "text", "text": "See:"}, {"type": "hologram", "x": 1}]
    found = read({"role": "user", "content": blocks})
    assert found.unknown == (1, "hologram")
    assert "[content of type hologram]" in bytes(found.pieces[0]).decode()  # type: ignore[arg-type]


def test_marks_are_found_everywhere_and_the_longest_counts() -> None:
    five = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}
    hour = {"type": "text", "text": "a", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    assert read({"role": "user", "content": "a"}).ttl == ""
    assert read({"role": "user", "content": [five]}).ttl == "5m"
    assert read({"role": "user", "content": [hour, five]}).ttl == "1h"
    result = {"type": "tool_result", "tool_use_id": "a", "content": [hour]}
    assert read({"role": "user", "content": [result]}).ttl == "1h"


@pytest.mark.parametrize(
    "message, words",
    [
        ({"role": "robot", "content": "x"}, "messages.3.role: "),
        ({"role": "user", "content": 5}, "messages.3.content: "),
        ({"role": "user", "content": [{"text": "x"}]}, "messages.3.content.0: "),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.3.content.0: "),
        (
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": "a", "name": "b", "input": []}],
            },
            "messages.3.content.0.input: Input should be an object",
        ),
        (
            {"role": "user", "content": [{"type": "image", "source": {"type": "fax"}}]},
            "messages.3.content.0.source.type: ",
        ),
    ],
)
def test_message_that_is_wrong_is_refused_with_its_place(
    message: dict[str, Any], words: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read(message)
    assert refused.value.message.startswith(words)


# --- system -------------------------------------------------------------------------------------------


def system(given: Any) -> Any:
    return translate_system(Raw(json.dumps(given).encode()))


@pytest.mark.parametrize(
    "given, instructions",
    [
        ("Be brief.", "Be brief."),
        (None, None),
        ([], None),
        ([{"type": "text", "text": "A"}, {"type": "text", "text": "B"}], "A\n\nB"),
        ([{"type": "text", "text": "A\n"}, {"type": "text", "text": "B"}], "A\nB"),
        ([{"type": "text", "text": "A"}, {"type": "text", "text": "\nB"}], "A\nB"),
    ],
)
def test_system_blocks_are_one_text(given: Any, instructions: str | None) -> None:
    assert (system(given).instructions, system(given).is_cut) == (instructions, False)


def test_billing_header_is_left_out() -> None:
    billing = {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1; cch=0123;"}
    found = system([billing, {"type": "text", "text": "Be brief."}])
    assert (found.instructions, found.is_cut) == ("Be brief.", True)


# --- pairs --------------------------------------------------------------------------------------------


def user(*results: str) -> TranslatedMessage:
    return TranslatedMessage("user", results=results)


def model(*calls: str) -> TranslatedMessage:
    return TranslatedMessage("assistant", calls=calls)


SYSTEM = TranslatedMessage("system")


@pytest.mark.parametrize(
    "messages",
    [
        [user()],
        [user(), model("a", "b"), user("b", "a"), SYSTEM, model()],
        [user(), model("a"), model("b"), user("a"), user("b"), model("c"), SYSTEM, user("c")],
    ],
)
def test_calls_with_their_results_pass(messages: list[TranslatedMessage]) -> None:
    check_pairs(messages)


@pytest.mark.parametrize(
    "messages, words",
    [
        ([user(), model("a"), user()], "messages.1: `tool_use` ids were found without"),
        ([user(), model("a", "b"), user("a")], "immediately after: b."),
        ([user(), model("a"), user(), model(), user("a")], "messages.1: `tool_use` ids"),
        ([user("a")], "messages.0: unexpected `tool_use_id`"),
        ([model("a"), user("a"), model(), user("a")], "messages.3: unexpected `tool_use_id`"),
        (
            [model("a"), user("a", "a")],
            "must have a single result. Found multiple `tool_result` blocks",
        ),
        ([model("a", "a"), user("a")], "`tool_use` ids must be unique"),
    ],
)
def test_calls_and_results_that_do_not_fit_are_refused(
    messages: list[TranslatedMessage], words: str
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        check_pairs(messages)
    assert words in refused.value.message


def test_first_results_of_a_thread_answer_what_came_before() -> None:
    check_pairs([user("a", "b"), model("c"), user("c")], is_continued=True)
    with pytest.raises(InvalidRequest):
        check_pairs([user("a"), model("c"), user("c", "b")], is_continued=True)
