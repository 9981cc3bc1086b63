"""Does every command on the pages exist, with its flags?

A command is `segue VERB …` at the beginning of a line, of a code span or of `$(…)`, up to where a shell sees its end.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from segue_cli.cli import VERBS, parser_of
from segue_cli.commands.completion import places_of
from tests.rules.test_citations import ROOT, documents

COMMAND = re.compile(r"(?:^ *|`|\$\()segue ([a-z]+)((?: +[^\s`|;&#)>]+)*)", re.MULTILINE)
FLAG = re.compile(r"^--[a-z][a-z-]*$")


# The flags after the name of a client are the client's own.
PASSES_ON = {"run"}


@cache
def flags_of(verb: str) -> dict[str, set[str]]:
    """The flags of a command and of each of its actions."""
    places = places_of(verb, parser_of(verb))
    return {place.path: {flag.name for flag in place.flags} for place in places}


def wrong_commands(text: str) -> list[str]:
    """The commands of a page that do not exist."""
    return [
        f"segue {verb}{words}"
        for verb, words in COMMAND.findall(text.replace("\\\n", " "))
        if not exists(verb, words.split())
    ]


def exists(verb: str, words: list[str]) -> bool:
    """Whether the installed version has this command with these flags."""
    if verb not in VERBS:
        return False
    if verb in PASSES_ON:
        return True
    known = flags_of(verb)
    path = f"{verb} {words[0]}" if words and f"{verb} {words[0]}" in known else verb
    named = {word.partition("=")[0].rstrip(",.:") for word in words}
    return {word for word in named if FLAG.match(word)} <= known[path] | known[verb]


@pytest.mark.parametrize("page", documents(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_commands_of_a_page_exist(page: Path) -> None:
    assert wrong_commands(page.read_text("utf-8")) == []


def test_a_command_that_does_not_exist_is_seen() -> None:
    page = "`segue serve --prot 1`, `segue fly`, ``segue keys list --json``\n\n```sh\nsegue stop --later  # x\n```\n"
    assert wrong_commands(page) == ["segue serve --prot 1", "segue fly", "segue stop --later"]
