"""Calls of built-in tools: what a model writes becomes an item, and the item what the model wrote."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Raw

from segue.wire.calls import (
    CommandScanner,
    arguments_of,
    local_shell_action,
    patch_operation,
    search_arguments,
    shell_action,
    web_action,
    web_function,
)
from segue.wire.codec import encode
from segue.wire.items import (
    ApplyPatchCall,
    CreateFile,
    DeleteFile,
    FindInPageAction,
    LocalShellAction,
    LocalShellCall,
    OpenPageAction,
    SearchAction,
    ShellCall,
    ToolSearchCall,
    UpdateFile,
    WebSearchCall,
)

WORDS = st.text(st.characters(codec="utf-8"), max_size=12)
COUNTS = st.none() | st.integers(0, 10_000)


def scan(text: str, cuts: list[int]) -> tuple[list[str], list[str], str]:
    """The commands, each one as it was told to be whole, and all that was told of them on the way."""
    scanner = CommandScanner()
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    said = [one for begin, end in pairwise(places) for one in scanner.feed(text[begin:end])]
    said += scanner.close(text)
    whole = [text for what, _, text in said if what == "whole"]
    return scanner.commands, whole, "".join(text for what, _, text in said if what == "more")


@given(
    st.lists(WORDS, max_size=4), COUNTS, st.booleans(), st.lists(st.integers(0, 200), max_size=6)
)
def test_commands_are_found_wherever_the_arguments_are_cut(
    commands: list[str], timeout_ms: int | None, is_ascii: bool, cuts: list[int]
) -> None:
    fields = {"note": {"commands": ["not this"]}, "commands": commands, "timeout_ms": timeout_ms}
    text = json.dumps(fields, ensure_ascii=is_ascii)

    found, whole, told = scan(text, cuts)

    assert found == whole == commands
    assert told == "".join(commands)
    assert shell_action(text, found).timeout_ms == timeout_ms


@given(st.lists(WORDS, min_size=1, max_size=3), st.integers(0, 100), st.booleans())
def test_commands_that_are_cut_off_are_beginnings(
    commands: list[str], at: int, is_ascii: bool
) -> None:
    text = json.dumps({"commands": commands}, ensure_ascii=is_ascii)[:at]

    found, whole, told = scan(text, [])

    assert found == whole
    assert told == "".join(found)
    assert len(found) <= len(commands)
    if found:
        assert found[:-1] == commands[: len(found) - 1]
        assert commands[len(found) - 1].startswith(found[-1].rstrip("?\ufffd"))


def test_command_that_is_no_list_is_one_command() -> None:
    assert scan('{"commands": "ls -l"}', [5, 17])[0] == ["ls -l"]


@pytest.mark.parametrize(
    "arguments, commands",
    [
        ('{"command": "ls"}', ["ls"]),
        ('{"cmd": "ls"}', ["ls"]),
        ('{"command": ["git", "log", "a b"]}', ["git log 'a b'"]),
        ('{"action": {"commands": ["ls", 7]}}', ["ls"]),
        ("rm -rf .", []),
        ('{"text": "rm -rf ."}', []),
        ("[]", []),
        ("", []),
    ],
)
def test_other_words_for_commands_are_understood_and_no_command_is_made_up(
    arguments: str, commands: list[str]
) -> None:
    assert scan(arguments, [])[0] == commands


@pytest.mark.parametrize(
    "arguments, action",
    [
        ('{"command": ["ls", "-l"]}', LocalShellAction(command=["ls", "-l"], env={})),
        ('{"command": "ls | wc"}', LocalShellAction(command=["bash", "-lc", "ls | wc"], env={})),
        (
            '{"command": ["ls"], "env": {"A": 1}, "timeout_ms": "x", "user": "ada", "working_dir',
            LocalShellAction(command=["ls"], env={"A": "1"}, user="ada"),
        ),
        ("{", LocalShellAction(command=[], env={})),
        ("nothing", LocalShellAction(command=[], env={})),
    ],
)
def test_older_shell_gets_what_could_be_read(arguments: str, action: LocalShellAction) -> None:
    found = local_shell_action(arguments)

    assert (found.command, found.env, found.user or None) == (
        action.command,
        action.env,
        action.user or None,
    )


@pytest.mark.parametrize(
    "arguments, operation",
    [
        ('{"type":"create_file","path":"a","diff":"+x"}', CreateFile("a", "+x")),
        ('{"type":"update_file","path":"a","diff":"@@\\n-x"}', UpdateFile("a", "@@\n-x")),
        ('{"type":"delete_file","path":"a","diff":""}', DeleteFile("a")),
        ('{"operation":{"type":"delete_file","path":"a"}}', DeleteFile("a")),
        ('{"type":"rewrite","path":"a","diff":"x"}', UpdateFile("a", "x")),
        ('{"type":"update_file","path":"a","diff":"cut \\u00', UpdateFile("a", "cut ")),
        ('{"type":"update_file","path":"a","di', UpdateFile("a", "")),
        ('{"type":"delete_file"}', UpdateFile("", '{"type":"delete_file"}')),
        ("*** Begin Patch", UpdateFile("", "*** Begin Patch")),
    ],
)
def test_patch_that_cannot_be_read_names_no_file(arguments: str, operation: object) -> None:
    assert patch_operation(arguments) == operation


@pytest.mark.parametrize(
    "arguments, told",
    [('{"query": "x"}', {"query": "x"}), (" [1] ", [1]), ("weather", "weather"), ("", "")],
)
def test_search_is_for_json_or_for_words(arguments: str, told: object) -> None:
    assert msgspec.json.decode(search_arguments(arguments)) == told


@given(st.lists(WORDS, max_size=3), COUNTS, COUNTS)
def test_shell_call_reads_as_the_model_wrote_it(
    commands: list[str], timeout_ms: int | None, length: int | None
) -> None:
    fields = {"commands": commands, "timeout_ms": timeout_ms, "max_output_length": length}
    written = {key: one for key, one in fields.items() if one is not None}

    action = shell_action(json.dumps(written), commands)

    assert arguments_of(ShellCall(call_id="c", action=action)) == written


@given(
    st.fixed_dictionaries(
        {"command": st.lists(WORDS, max_size=3)},
        optional={
            "env": st.dictionaries(WORDS, WORDS, min_size=1, max_size=2),
            "timeout_ms": st.integers(0, 9),
            "user": WORDS,
            "working_directory": WORDS,
        },
    )
)
def test_older_shell_call_reads_as_the_model_wrote_it(written: dict[str, Any]) -> None:
    call = LocalShellCall(call_id="c", action=local_shell_action(json.dumps(written)))

    assert arguments_of(call) == written


@given(st.sampled_from(["create_file", "update_file", "delete_file"]), WORDS, WORDS)
def test_patch_reads_as_the_model_wrote_it(kind: str, path: str, diff: str) -> None:
    written = {"type": kind, "path": path, "diff": "" if kind == "delete_file" else diff}
    call = ApplyPatchCall(call_id="c", operation=patch_operation(json.dumps(written)))

    assert arguments_of(call) == written


def test_search_reads_as_the_model_wrote_it() -> None:
    written = {"query": "x"}
    call = ToolSearchCall(arguments=search_arguments(json.dumps(written)))

    assert arguments_of(call) == written
    assert arguments_of(ToolSearchCall()) == {}


@pytest.mark.parametrize(
    "name, arguments, action",
    [
        ("search", '{"query":" rain "}', SearchAction(query="rain", queries=["rain"])),
        ("search", '{"q":"rain"}', SearchAction(query="rain", queries=["rain"])),
        ("web_search", '{"query":"rain"}', SearchAction(query="rain", queries=["rain"])),
        ("open_page", '{"url":"https://a.com"}', OpenPageAction(url="https://a.com")),
        ("web_search", '{"type":"open_page","url":"u"}', OpenPageAction(url="u")),
        ("find_in_page", '{"url":"u","pattern":"p"}', FindInPageAction(url="u", pattern="p")),
        ("find_in_page", '{"url":"u","query":"p"}', FindInPageAction(url="u", pattern="p")),
        ("search", "not json", SearchAction(query="")),
        ("search", '{"query":7}', SearchAction(query="")),
        ("search", "", SearchAction(query="")),
        ("search", "[" * 100_000, SearchAction(query="")),
    ],
)
def test_arguments_of_a_web_search_are_read_kindly(
    name: str, arguments: str, action: object
) -> None:
    assert web_action(name, arguments) == action


@given(
    st.sampled_from(["search", "open_page", "find_in_page"]),
    st.text(max_size=40),
    st.text(max_size=40),
)
def test_action_of_a_web_search_and_its_call_say_the_same(name: str, url: str, words: str) -> None:
    asked = {"search": {"query": words.strip()}, "open_page": {"url": url}}
    arguments = asked.get(name, {"url": url, "pattern": words})
    action = Raw(encode(web_action(name, json.dumps(arguments))))
    assert web_function(action) == f"web.{name}"
    assert arguments_of(WebSearchCall(action=action)) == arguments
