"""A clear word for every setting that is wrong, with its place."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from segue.errors import Misconfigured
from segue.settings.checks import is_web_url, load_settings
from segue.settings.values import EngineName, Settings


def load(flags: dict[str, Any] | None = None, **environment: str) -> Settings:
    return load_settings(flags or {}, environment)


def write(folder: Path, text: str) -> dict[str, str]:
    path = folder / "segue.toml"
    path.write_text(text)
    return {"config": str(path)}


ENGINES = ", ".join(get_args(EngineName))


@pytest.mark.parametrize(
    "flags, told",
    [
        ({"port": "many"}, "--port: 'many' is not a whole number from 0 to 65535."),
        ({"port": "70000"}, "--port: '70000' is not a whole number from 0 to 65535."),
        ({"port": "-1"}, "--port: '-1' is not a whole number from 0 to 65535."),
        ({"tps": "-1"}, "--tps: '-1' is not a number of at least 0."),
        ({"heartbeat_s": "0"}, "--heartbeat-s: '0' is not a number above 0."),
        ({"guard_threshold": "2"}, "--guard-threshold: '2' is not a number above 0 and up to 1."),
        ({"temperature": "hot"}, "--temperature: 'hot' is not a number from 0 to 2."),
        ({"connections_max": "0"}, "--connections-max: '0' is not a whole number of at least 1."),
        ({"fetch_port": ["80", "x"]}, "--fetch-port: 'x' is not a whole number from 1 to 65535."),
        ({"websocket": "perhaps"}, "--websocket: 'perhaps' is not true or false."),
        ({"engine": "steam"}, f"--engine: 'steam' is not one of: {ENGINES}."),
        ({"engine": "vlm"}, f"--engine: 'vlm' is not one of: {ENGINES}. Did you mean vllm?"),
        ({"engine": "openrouter"}, f"'openrouter' is not one of: {ENGINES}. Did you mean chat?"),
        ({"engine": "LM-Studio"}, f"'LM-Studio' is not one of: {ENGINES}. Did you mean chat?"),
        ({"reasoning": "loud"}, "--reasoning: 'loud' is not one of: text, summary, hidden."),
        (
            {"dialect": "qwen"},
            "deepseek-v4, template, derived, and no .toml file. Did you mean qwen3?",
        ),
        ({"apis": ["chat", "chta"]}, "--apis: 'chta' is not one of: responses, messages, chat."),
        ({"apis": []}, "--apis: name at least one of: responses, messages, chat."),
        ({"store": "mysql://x"}, "--store: 'mysql://x' is not the address of a store."),
        ({"store": "sqlite://x"}, "--store: 'sqlite://x' is not the address of a store."),
        (
            {"tls_cert": "only.pem"},
            "--tls-cert: tls_key is missing: set both tls_cert and tls_key, or neither.",
        ),
        (
            {"engine_url": ["foo"]},
            "--engine-url: 'foo' is not a URL such as http://127.0.0.1:8000.",
        ),
        ({"engine_url": ["127.0.0.1:8000"]}, "'127.0.0.1:8000' is not a URL"),
        ({"engine_url": ["http://"]}, "'http://' is not a URL"),
        ({"engine_url": ["http://h:99999"]}, "'http://h:99999' is not a URL"),
        ({"guard_url": "ftp://h"}, "--guard-url: 'ftp://h' is not a URL"),
        ({"store": "memory", "workers": "2"}, "--workers: 2 processes cannot share the store"),
        ({"host": "0.0.0.0", "auth": "off"}, "--host: 0.0.0.0 is not a loopback address"),
        ({"host": "::", "auth": "off"}, "--host: :: is not a loopback address"),
        ({"host": "example.com", "auth": "off"}, "--host: example.com is not a loopback address"),
    ],
)
def test_wrong_flag_is_told_with_its_value_and_what_would_do(
    flags: dict[str, Any], told: str
) -> None:
    with pytest.raises(Misconfigured) as error:
        load(flags)
    assert told in str(error.value)


def test_wrong_variable_is_told_by_its_name() -> None:
    with pytest.raises(Misconfigured, match=r"^SEGUE_LOG_LEVEL: 'loud' is not one of: debug, "):
        load(SEGUE_LOG_LEVEL="loud")


def test_all_problems_are_told_at_once() -> None:
    with pytest.raises(Misconfigured) as error:
        load({"port": "x", "tps": "y"}, SEGUE_AUTH="z")
    assert [line.split(":")[0] for line in str(error.value).splitlines()] == [
        "--tps",
        "--port",
        "SEGUE_AUTH",
    ]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert load({"host": host}).host == host


@pytest.mark.parametrize(
    "text, told",
    [
        ("\nport = \n", ", line 2: this is not TOML: Invalid value."),
        ("port = [1,", ", line 1: this is not TOML: "),
        ("\x00", ", line 1: this is not TOML: "),
        ("tps = 1\nprot = 8080\n", ", line 2: prot: 'prot' is not a setting. Did you mean port?"),
        ('port = "many"\n', ", line 1: port: 'many' is not a whole number from 0 to 65535."),
        ('model = "one"\n', ", line 1: model: 'one' is not a list of texts, written in [ ]."),
        ("engine_key = 5\n", ", line 1: engine_key: 5 is not a text, written in quotes."),
        ("fetch_port = [80, true]", "fetch_port[1]: true is not a whole number from 1 to 65535."),
        ("[[models]]\nname = 7\n", ", line 2: models[0].name: 7 is not a text"),
        (
            '[[models]]\nname = "a"\n\n[[models]]\nname = "b"\nspeed = 7\ntsp = 1\n',
            ", line 7: models[1].tsp: 'tsp' is not a setting of [[models]]. Did you mean tps?",
        ),
        (
            '[[models]]\nname = "a"\nengine = "steam"\n',
            f", line 3: models[0].engine: 'steam' is not one of: {ENGINES}.",
        ),
        ("# one\n[[models]]\ntps = 1\n", ", line 2: models[0]: name is missing."),
        ('[[models]]\nname="a"\ndialect="x"\n', ", line 3: models[0].dialect: 'x' is not one of"),
        ('[[models]]\nname="a"\nengine_url=["x"]\n', "models[0].engine_url: 'x' is not a URL"),
        ("[models]\n", "a table is not a list of tables, written in [ ]. Write [[models]]."),
        ("[models.foo]\ntps = 1\n", 'written in [ ]. Write [[models]] and name = "foo".'),
        ('[mcp.a]\nurl = "http://x"\n', 'written in [ ]. Write [[mcp]] and label = "a".'),
        ("[model]\nx = 1\n", "model: a table is not a list of texts, written in [ ]."),
        ('[[mcp]]\nlabel = "a"\ncommand = "x"\n', ", line 3: mcp[0].command: 'x' is not a list"),
        ('[[mcp]]\nurl = "http://x"\n', ", line 1: mcp[0]: label is missing."),
        ('[[mcp]]\nlabel = "a b"\nurl = "http://x"\n', "mcp[0].label: 'a b' is not 1 to 64 of"),
        (
            '[[mcp]]\nlabel = "a"\nurl = "http://x"\ncommand = ["x"]\n',
            "mcp[0]: 'a' has url and command: set exactly one of url, sse_url, command.",
        ),
        ('[[mcp]]\nlabel = "a"\n', "mcp[0]: 'a' has none: set exactly one of"),
        ('[[mcp]]\nlabel = "a"\nurl = "x"\n', ", line 3: mcp[0].url: 'x' is not a URL"),
        (
            '[[mcp]]\nlabel="a"\nurl="http://x"\n[[mcp]]\nlabel="a"\nurl="http://x"\n',
            ", line 5: mcp[1].label: two servers have the label 'a'.",
        ),
        ("[guard_rules]\nchars_max = -1\n", ", line 2: guard_rules.chars_max: -1 is not a whole"),
        (
            "[guard_rules]\npatterns = ['a', 1]\n",
            ", line 2: guard_rules.patterns[1]: 1 is not a text, written in quotes.",
        ),
        ("guard_rules.chars = 1\n", ", line 1: guard_rules.chars: 'chars' is not a setting of"),
        ("[guard_owners]\nada = 'x'\n", ", line 2: guard_owners.ada: 'x' is not a list of texts"),
    ],
)
def test_wrong_file_is_told_with_its_line(tmp_path: Path, text: str, told: str) -> None:
    file = write(tmp_path, text)
    with pytest.raises(Misconfigured) as error:
        load(file)
    assert str(error.value).startswith(f"{file['config']}, ")
    assert told in str(error.value)
    assert "$" not in str(error.value)


@pytest.mark.parametrize(
    "text, is_one",
    [
        ("http://h", True),
        ("https://[::1]:80/v1", True),
        ("h:80", False),
        ("ftp://h", False),
        ("http://", False),
        ("http://h:x", False),
        ("http://[", False),
    ],
)
def test_web_url_has_a_scheme_and_a_host(text: str, is_one: bool) -> None:
    assert is_web_url(text) is is_one
