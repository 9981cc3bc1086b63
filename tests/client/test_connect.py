"""Codex's configuration keeps what stands in it, whatever it was; the verb asks before it writes."""

from __future__ import annotations

import ast
import json
import logging
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.errors import Misconfigured
from segue_cli.cli import main
from segue_cli.client.clients import CLIENTS, api_of, settings_of
from segue_cli.client.codex import codex_block, with_provider
from segue_cli.client.talk import ModelEndpoint, ServedModel, base_url_of
from tests.clients.outside import NODE
from tests.support import served_process

PLACE = ModelEndpoint("http://127.0.0.1:8080/v1", "smollm2")
TABLE = {
    "name": "segue",
    "base_url": PLACE.base_url,
    "wire_api": "responses",
    "supports_websockets": True,
}
OWN = """# mine
model = "gpt-5.5"   # the good one
approval_policy = "never"

[projects."/work"]
trust_level = "trusted"

[model_providers.other]
name = "other"

[model_providers.other.http_headers]
x = "y"
"""


def test_new_file_holds_the_provider_alone() -> None:
    assert tomllib.loads(codex_block(PLACE)) == {
        "model": "smollm2",
        "model_provider": "segue",
        "model_providers": {"segue": TABLE},
    }


def test_everything_else_is_kept_and_what_is_replaced_stays_as_a_comment() -> None:
    changed = with_provider(OWN, PLACE)
    meant = tomllib.loads(changed)
    before = tomllib.loads(OWN)
    assert meant["model_providers"].pop("segue") == TABLE
    assert meant == {**before, "model": "smollm2", "model_provider": "segue"}
    assert '# model = "gpt-5.5"   # the good one' in changed.splitlines()
    kept = [line for line in OWN.splitlines() if not line.startswith("model =")]
    assert [line for line in changed.splitlines() if line in kept and line] == [
        line for line in kept if line
    ]


def test_second_time_changes_nothing() -> None:
    once = with_provider(OWN, PLACE)
    assert with_provider(once, PLACE) == once


def test_another_server_changes_only_its_own_lines() -> None:
    """The table stays where it is, with the keys that the person has added to it."""
    once = with_provider(OWN, PLACE).replace(
        "supports_websockets = true", "supports_websockets = true\nstream_max_retries = 9"
    )
    moved = with_provider(
        once + "\n[tui]\ntheme = 'x'\n", ModelEndpoint("http://h:1/v1", "m", "MY_KEY")
    )
    meant = tomllib.loads(moved)
    assert meant["model_providers"]["segue"] == {
        **TABLE,
        "base_url": "http://h:1/v1",
        "stream_max_retries": 9,
        "env_key": "MY_KEY",
    }
    assert meant["tui"] == {"theme": "x"}
    assert meant["model_providers"]["other"] == {"name": "other", "http_headers": {"x": "y"}}


@pytest.mark.parametrize(
    "text",
    [
        "model_providers = { segue = { name = 'x' } }\n",
        "not toml",
    ],
)
def test_file_that_cannot_be_changed_safely_is_left_alone(text: str) -> None:
    with pytest.raises(Misconfigured, match=r"config\.toml"):
        with_provider(text, PLACE)


@pytest.mark.parametrize(
    "text",
    [
        "'model' = 'x'\n",
        "model_providers.segue.name = 'x'\n",
        'note = """\n[model_providers.segue]\nmodel = 1\n"""\n',
        "[model_providers.a]\nx = 1\n[tui]\ny = 2\n[model_providers.b]\nz = 3\n",
        "model = 'x'",
    ],
)
def test_odd_file_keeps_its_content(text: str) -> None:
    before = tomllib.loads(text)
    after = tomllib.loads(with_provider(text, PLACE))
    providers = {**before.get("model_providers", {}), "segue": TABLE}
    top = {"model": "smollm2", "model_provider": "segue"}
    assert after == {**before, **top, "model_providers": providers}


SMALL = ModelEndpoint(PLACE.base_url, "smollm2", None, 8_192)
LARGE = ModelEndpoint(PLACE.base_url, "qwen", None, 131_072)


def test_small_model_gets_a_short_prompt_and_few_tools() -> None:
    meant = tomllib.loads(with_provider(OWN, SMALL))
    assert meant["model_context_window"] == 8_192
    assert meant["model_instructions_file"] == "segue-small-model.md"
    assert meant["features"] == {"multi_agent": False, "goals": False}


def test_larger_model_takes_back_what_a_small_one_needed() -> None:
    """All but the values that were replaced, which stay as comments."""
    own = OWN + "\n[features]\ngoals = true\nhooks = false\n"
    small = with_provider(own, SMALL)
    assert with_provider(small, SMALL) == small
    assert "# goals = true" in small.splitlines()
    meant = tomllib.loads(with_provider(small, LARGE))
    assert meant["features"] == {"hooks": False}
    assert meant["model_context_window"] == 131_072
    assert "model_instructions_file" not in meant
    assert tomllib.loads(with_provider(with_provider(OWN, SMALL), LARGE)) == tomllib.loads(
        with_provider(OWN, LARGE)
    )


def test_codex_offers_no_view_of_images_to_a_model_that_sees_none() -> None:
    text_only = with_provider(OWN, replace(LARGE, sees_images=False))
    assert tomllib.loads(text_only)["features"] == {"view_image": False}
    sees = replace(LARGE, sees_images=True)
    assert with_provider(text_only, sees).rstrip() == with_provider(OWN, sees).rstrip()
    assert with_provider(OWN, sees) == with_provider(OWN, LARGE)


keys = st.text("abcdefgh_", min_size=1, max_size=8)
values = st.one_of(st.booleans(), st.integers(-9, 9), st.text("xyz #[]=", max_size=8))
tables = st.dictionaries(keys, values, max_size=4)


def written(top: dict[str, Any], rest: dict[str, dict[str, Any]]) -> str:
    """TOML of a simple file."""

    def lines(table: dict[str, Any]) -> list[str]:
        shown = {True: "true", False: "false"}
        return [
            f"{key} = {shown[value] if isinstance(value, bool) else repr(value)}"
            for key, value in table.items()
        ]

    parts = [*lines(top)]
    for name, table in rest.items():
        parts += [f"[{name}]", *lines(table)]
    return "\n".join(parts) + "\n"


@given(
    tables,
    st.dictionaries(keys.map(lambda key: f"t.{key}") | st.just("features"), tables, max_size=3),
)
def test_any_simple_file_means_the_same_but_for_our_keys(
    top: dict[str, Any], rest: dict[str, dict[str, Any]]
) -> None:
    top = {key: value for key, value in top.items() if key != "t"}
    text = written(top, rest)
    once = with_provider(text, PLACE)
    meant = tomllib.loads(once)
    assert meant.pop("model_providers") == {"segue": TABLE}
    assert (meant.pop("model"), meant.pop("model_provider")) == ("smollm2", "segue")
    assert meant == tomllib.loads(text)
    assert with_provider(once, PLACE) == once
    small = with_provider(once, SMALL)
    assert with_provider(small, SMALL) == small
    back = tomllib.loads(with_provider(small, LARGE))
    assert {**back, "model": "smollm2"} == {**tomllib.loads(once), "model_context_window": 131_072}


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:8080", "http://127.0.0.1:8080/", "http://127.0.0.1:8080/v1/"]
)
def test_address_is_taken_however_it_is_written(url: str) -> None:
    assert base_url_of(url) == PLACE.base_url


def test_address_without_a_scheme_is_refused() -> None:
    with pytest.raises(Misconfigured, match="is not a URL"):
        base_url_of("127.0.0.1:8080")


def segue(*arguments: str, home: Path, typed: str = "") -> subprocess.CompletedProcess[str]:
    """The command, as a person would run it."""
    return subprocess.run(
        [sys.executable, "-m", "segue_cli.cli", *arguments],
        env={"PATH": "", "CODEX_HOME": str(home), "PYTHONPATH": ":".join(sys.path)},
        input=typed,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_person_connects_codex_after_seeing_what_will_be_written(tmp_path: Path) -> None:
    """Nothing is written without a yes; the file as it was is kept; the second time there is nothing to do."""
    home = tmp_path / "codex"
    config = home / "config.toml"
    with served_process("--store", "memory", "--model", "first", cwd=tmp_path) as served:
        address = ("connect", "codex", "--url", served.url)
        shown = segue(*address, "--print", home=home)
        assert 'model = "first"' in shown.stdout
        assert not home.exists()
        assert segue(*address, home=home).returncode == 1
        assert not home.exists()
        assert segue(*address, home=home, typed="y\n").returncode == 0
        assert tomllib.loads(config.read_text()) == tomllib.loads(shown.stdout)
        config.write_text(OWN)
        config.chmod(0o600)
        assert segue(*address, "--yes", home=home).returncode == 0
        assert (home / "config.toml.before-segue").read_text() == OWN
        assert config.stat().st_mode & 0o777 == 0o600
        again = segue(*address, "--yes", home=home)
        assert "is up to date already" in again.stdout
        assert sorted(path.name for path in home.iterdir()) == [
            "config.toml",
            "config.toml.before-segue",
        ]


def test_snippets_name_the_server_and_the_model() -> None:
    for name in CLIENTS:
        text = settings_of(name, ModelEndpoint("http://127.0.0.1:1234/v1", "my-model"))
        assert "127.0.0.1:1234" in text, name
        assert "my-model" in text, name


# --- a server that chooses the name of its model ----------------------------------------------------

PLAIN = "my-model"
HOSTILE = [
    'm"); import os; os.system("id") #',
    "m'; $(touch pwned) `id` && id | id \\",
    "'); process.exit(1); //",
    "{model:string} {key_env} ${HOME} \\u0022 \\' \\\"",
    "ünï code 模型 🦅 </script>",
]
PYTHON = ("python", "anthropic-python", "agents-python", "langchain", "pydantic-ai")
SCRIPTS = ("node", "anthropic-node", "agents-js", "ai-sdk")
SHELL = ("curl", "cline")
TABLES = ("opencode", "pi", "zed")
VARIABLES = ("claude-code", "qwen-code", "aider")


def printed_for(client: str, name: str) -> str:
    endpoint = ModelEndpoint("http://127.0.0.1:1234/v1", name)
    return codex_block(endpoint) if client == "codex" else settings_of(client, endpoint)


def test_every_client_is_tried_with_hostile_names() -> None:
    assert {*PYTHON, *SCRIPTS, *SHELL, *TABLES, *VARIABLES, "continue", "other"} == {*CLIENTS}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("client", PYTHON)
def test_name_of_a_model_is_a_string_in_python(client: str, name: str) -> None:
    plain, hostile = (ast.dump(ast.parse(printed_for(client, one))) for one in (PLAIN, name))
    assert hostile == plain.replace(repr(PLAIN), repr(name))


@pytest.mark.parametrize("client", SCRIPTS)
def test_name_of_a_model_is_a_string_in_javascript(client: str, tmp_path: Path) -> None:
    for name in HOSTILE:
        text = printed_for(client, name)
        literal = json.dumps(name, ensure_ascii=False)
        assert text.replace(literal, json.dumps(PLAIN)) == printed_for(client, PLAIN)
        program = tmp_path / "snippet.mjs"
        program.write_text(text)
        subprocess.run([NODE, "--check", program], check=True, timeout=60)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("client", SHELL)
def test_name_of_a_model_is_a_word_in_a_shell(client: str, name: str, tmp_path: Path) -> None:
    """The program is run with a stand-in for the client, which prints its words."""
    stand_in = tmp_path / client
    stand_in.write_text('#!/bin/sh\nprintf "%s\\0" "$@"\n')
    stand_in.chmod(0o755)

    def words(name: str) -> list[str]:
        command = ["/bin/bash", "-c", printed_for(client, name)]
        environment = {"PATH": str(tmp_path)}
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, timeout=60, check=True
        )
        assert done.stderr == b""
        return done.stdout.decode().split("\0")

    quoted = json.dumps(name, ensure_ascii=False) if client == "curl" else name
    plain = json.dumps(PLAIN) if client == "curl" else PLAIN
    assert words(name) == [word.replace(plain, quoted) for word in words(PLAIN)]


@pytest.mark.parametrize("name", HOSTILE)
def test_name_of_a_model_is_a_value_in_settings(name: str) -> None:
    for client in TABLES:
        if client == "opencode" and "{" in name:
            # It puts files and variables in the place of such words.
            with pytest.raises(Misconfigured, match="braces"):
                printed_for(client, name)
            continue
        plain = json.dumps(json.loads(printed_for(client, PLAIN)))
        meant = plain.replace(PLAIN, json.dumps(name)[1:-1])
        assert json.loads(printed_for(client, name)) == json.loads(meant)
    assert tomllib.loads(printed_for("codex", name))["model"] == name
    assert printed_for("other", name) == printed_for("other", PLAIN).replace(PLAIN, name)


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("client", VARIABLES)
def test_name_of_a_model_is_the_value_of_a_variable(client: str, name: str) -> None:
    def variables(name: str) -> dict[str, str]:
        program = f"{printed_for(client, name)}\nenv -0"
        done = subprocess.run(
            ["/bin/bash", "-c", program],
            env={"PATH": "/usr/bin:/bin", "SEGUE_KEY": "a key"},
            capture_output=True,
            timeout=60,
            check=True,
        )
        assert done.stderr == b""
        lines = done.stdout.decode().split("\0")
        return dict(line.split("=", 1) for line in lines if line and line[0] != "_")

    plain = variables(PLAIN)
    assert "a key" in plain.values()
    assert variables(name) == {key: text.replace(PLAIN, name) for key, text in plain.items()}


@pytest.mark.parametrize("name", HOSTILE)
def test_name_of_a_model_is_a_string_in_yaml(name: str) -> None:
    """A JSON string is a YAML string."""
    literal = json.dumps(name, ensure_ascii=False)
    text = printed_for("continue", name)
    assert text.count(literal) == 2
    assert text.replace(literal, json.dumps(PLAIN)) == printed_for("continue", PLAIN)


# --- several APIs ------------------------------------------------------------------------------------


def test_client_is_set_up_for_the_api_that_was_asked_for() -> None:
    opencode = {
        api: json.loads(settings_of("opencode", PLACE, api))["provider"]["segue"]["npm"]
        for api in CLIENTS["opencode"].apis
    }
    assert opencode == {
        "responses": "@ai-sdk/openai",
        "chat": "@ai-sdk/openai-compatible",
        "messages": "@ai-sdk/anthropic",
    }
    pi = json.loads(settings_of("pi", PLACE, "messages"))["providers"]["segue"]
    assert (pi["api"], pi["baseUrl"]) == ("anthropic-messages", "http://127.0.0.1:8080")
    assert "--provider openai-compatible " in settings_of("cline", PLACE, "chat")
    assert "provider: anthropic\n" in settings_of("continue", PLACE, "messages")
    assert "ANTHROPIC_BASE_URL=http://127.0.0.1:8080\n" in settings_of(
        "qwen-code", PLACE, "messages"
    )
    assert "AIDER_MODEL=anthropic/smollm2\n" in settings_of("aider", PLACE, "messages")


def test_api_that_a_client_does_not_use_is_refused_with_those_that_it_does() -> None:
    assert api_of("opencode", None) == "responses"
    with pytest.raises(
        Misconfigured, match="claude-code does not use 'chat'; choose from messages"
    ):
        api_of("claude-code", "chat")
    with pytest.raises(Misconfigured, match="codex does not use 'chat'; choose from responses"):
        api_of("codex", "chat")


def test_claude_code_knows_the_window_only_where_the_server_says_it() -> None:
    large = settings_of("claude-code", LARGE)
    assert "CLAUDE_CODE_MAX_CONTEXT_TOKENS=131072" in large
    assert "CLAUDE_CODE_MAX_OUTPUT_TOKENS=32000" in large
    assert "CLAUDE_CODE_MAX_" not in settings_of("claude-code", PLACE)
    assert "ANTHROPIC_DEFAULT_HAIKU_MODEL=qwen" in large


class Listing(BaseHTTPRequestHandler):
    """Lists one model, and answers everything else with an error in the same words."""

    name = "m\x1b]52;c;cm0=\x07\x9b2J\u2028\u202e\u200b\r\n'\"`$(id)"

    def do_GET(self) -> None:
        is_list = self.path == "/v1/models"
        refused = {
            "error": {"message": self.name},
            "status": "not ready",
            "checks": {self.name: False},
        }
        answer = {"data": [{"id": self.name}]} if is_list else refused
        body = json.dumps(answer).encode()
        self.send_response(200 if is_list else 500)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def listing() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Listing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "words",
    [
        *(("connect", client, "--print") for client in ("codex", *CLIENTS)),
        ("chat",),
        ("connect", "python", "--model", "another"),
        ("explain", "resp_1"),
        ("doctor", "--traffic"),
        ("doctor",),
        ("status",),
        ("stop",),
    ],
)
def test_control_characters_of_a_server_reach_no_terminal(
    words: tuple[str, ...],
    listing: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging, "disable", lambda level: None)
    status = main([*words, "--url", listing])
    printed = capsys.readouterr()
    assert status != 0
    said = printed.out + printed.err
    assert all(one.isprintable() or one in "\n\t" for one in said), said
    assert "\\x1b" in said or "\\u001b" in said, said


def test_name_that_a_client_would_take_for_a_flag_is_refused() -> None:
    with pytest.raises(Misconfigured, match="dash"):
        ServedModel("--yolo").checked()


@pytest.mark.parametrize("words", [("--url", "http://a\nb"), ("--key-env", "A; id")])
def test_url_and_variable_that_are_none_are_refused(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["connect", "curl", "--model", "m", *words]) == 2
    assert "is n" in capsys.readouterr().err


def test_connecting_to_nobody_says_what_to_do(tmp_path: Path) -> None:
    done = segue("connect", "python", "--url", "http://127.0.0.1:1", home=tmp_path)
    assert done.returncode == 2
    assert "segue serve" in done.stderr
