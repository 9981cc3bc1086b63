"""Which APIs are served: the setting `apis`, and what an API that is switched off answers."""

from __future__ import annotations

import argparse

import pytest
import websockets

from segue.responses.api import RESPONSES
from segue.server.apis import APIS, is_on
from segue.settings.checks import load_settings
from segue.settings.values import API_NAMES
from segue_cli.commands.flags import add_settings
from tests.doors.echo_api.api import ECHO
from tests.support import fetch, serving, wire


@pytest.mark.parametrize(
    "words", [["--apis", "responses,chat"], ["--apis", "responses", "--apis", "chat"]]
)
def test_flag_takes_names_with_commas_and_may_be_repeated(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_settings(parser)
    settings = load_settings(vars(parser.parse_args(words)), environment={})
    assert settings.apis == ("responses", "chat")


def test_every_api_is_on_unless_the_operator_names_some() -> None:
    assert load_settings({}, {}).apis == API_NAMES
    settings = load_settings({}, {"SEGUE_APIS": "messages, chat"})
    assert settings.apis == ("messages", "chat")
    assert not is_on(RESPONSES, settings)
    assert is_on(ECHO, settings)


def test_every_row_has_the_name_of_its_api_and_of_the_setting() -> None:
    assert {name: api.name for name, api in APIS.items()} == {name: name for name in APIS}
    assert APIS.keys() <= set(API_NAMES)


async def test_api_that_is_off_is_not_found_and_the_flag_is_named() -> None:
    rows = APIS | {"echo": ECHO}
    async with serving(rows=rows, apis=["chat"]) as served:
        asked = await fetch(served, "POST", "/v1/responses", {})
        assert (asked.status, asked.json["error"]["code"]) == (404, "unknown_url")
        assert "The API 'responses' is switched off: --apis" in asked.json["error"]["message"]
        with pytest.raises(websockets.InvalidStatus) as refused:
            async with wire(served):
                pass
        assert refused.value.response.status_code == 404
        assert b"'responses' is switched off: --apis" in (refused.value.response.body or b"")
        paths = (await fetch(served, "GET", "/openapi.json")).json["paths"]
        assert not any(map(RESPONSES.owns, paths))
