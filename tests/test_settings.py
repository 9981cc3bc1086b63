"""Settings: three places, one order, and a clear word for what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from segue.errors import Misconfigured
from segue.settings import (
    FLAGS,
    EngineName,
    Settings,
    load_settings,
    read_sources,
    settings_of,
    shown_address,
)
from segue_cli.cli import main, parse


def load(flags: dict[str, Any] | None = None, **environment: str) -> Settings:
    return load_settings(flags or {}, environment)


def write(folder: Path, text: str) -> dict[str, str]:
    path = folder / "segue.toml"
    path.write_text(text)
    return {"config": str(path)}


# --- where a value comes from -----------------------------------------------------------------------


def test_nothing_set_gives_the_defaults() -> None:
    assert load() == Settings()


def test_flag_wins_over_environment_over_file_over_default(tmp_path: Path) -> None:
    file = write(tmp_path, "port = 1\ntps = 1\ngrace_s = 1\n")
    environment = {"SEGUE_PORT": "2", "SEGUE_TPS": "2"}

    settings = load_settings({**file, "port": "3"}, environment)

    assert (settings.port, settings.tps, settings.grace_s) == (3, 2, 1)
    assert settings.heartbeat_s == Settings().heartbeat_s


def test_file_may_be_named_in_the_environment(tmp_path: Path) -> None:
    file = write(tmp_path, "port = 7\n")

    assert load(SEGUE_CONFIG=file["config"]).port == 7


def test_flag_that_was_not_given_hides_nothing(tmp_path: Path) -> None:
    file = write(tmp_path, "port = 7\n")

    assert load_settings({**file, "port": None}, {}).port == 7


def test_variables_of_others_are_left_alone() -> None:
    assert load(SEGUEX_PORT="1", PORT="2", SEGUE_UNKNOWN="3", segue_port="4") == Settings()


@pytest.mark.parametrize("name", FLAGS)
def test_every_setting_can_come_from_each_place(name: str, tmp_path: Path) -> None:
    default = getattr(Settings(), name)
    if default is None:
        default = 1
    text, toml = str(default), repr(default)
    if isinstance(default, tuple):
        some = [str(value) for value in default] or ["http://x"]
        text, toml = ",".join(some), str(list(default) or some)
    elif isinstance(default, bool):
        text = toml = str(default).lower()
    elif isinstance(default, str):
        toml = f'"{default}"'

    flag = load({name: text.split(",") if isinstance(default, tuple) else text})
    variable = load(**{f"SEGUE_{name.upper()}": text})
    file = load(write(tmp_path, f"{name} = {toml}\n"))

    assert getattr(flag, name) == getattr(variable, name) == getattr(file, name)
    assert type(getattr(variable, name)) is type(default) or isinstance(default, float | int)


@pytest.mark.parametrize(
    "text, value", [("true", True), ("false", False), ("1", True), ("0", False)]
)
def test_switch_is_read_from_text(text: str, value: bool) -> None:
    assert load(SEGUE_WEBSOCKET=text).websocket is value


# --- models -----------------------------------------------------------------------------------------


def test_without_any_model_there_is_one() -> None:
    assert [model.name for model in load().served()] == ["smollm2"]
    assert [model.name for model in load(SEGUE_ENGINE="scripted").served()] == ["scripted"]


def test_named_models_share_what_is_set_for_all() -> None:
    models = load(SEGUE_MODEL="a,b", SEGUE_TPS="65").served()

    assert [(model.name, model.tps) for model in models] == [("a", 65), ("b", 65)]


def test_tables_of_the_file_set_what_is_their_own(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        'tps = 5\n[[models]]\nname = "a"\naliases = ["x"]\n[[models]]\nname = "b"\ntps = 9\n',
    )

    models = load({**file, "model": ["b", "c"]}).served()

    assert [(model.name, model.aliases, model.tps) for model in models] == [
        ("a", ("x",), 5),
        ("b", (), 9),
        ("c", (), 5),
    ]


# --- what is wrong ----------------------------------------------------------------------------------


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
        ({"engine": "ollama"}, f"'ollama' is not one of: {ENGINES}. Did you mean chat?"),
        ({"engine": "LM-Studio"}, f"'LM-Studio' is not one of: {ENGINES}. Did you mean chat?"),
        ({"reasoning": "loud"}, "--reasoning: 'loud' is not one of: text, summary, hidden."),
        ({"dialect": "qwen"}, "deepseek-v4, template. Did you mean qwen3?"),
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
        "--port",
        "--tps",
        "SEGUE_AUTH",
    ]


def test_unknown_variables_are_warned_of_with_the_nearest_name() -> None:
    environment = {
        "SEGUE_PROT": "3",
        "SEGUE_ZZZZZZ": "",
        "SEGUE_KEY": "sk",
        "SEGUE_URL": "http://x",
        "SEGUE_TEST_MCP": "1",
        "SEGUE_CONFIG": "none",
    }
    told = [
        "SEGUE_PROT: the environment variable is not a setting and is ignored. Did you mean SEGUE_PORT?",
        "SEGUE_ZZZZZZ: the environment variable is not a setting and is ignored.",
    ]
    assert list(map(str, read_sources({}, environment).warnings())) == told


def test_repairs_of_the_last_version_are_warned_of_and_ignored(tmp_path: Path) -> None:
    file = tmp_path / "segue.toml"
    file.write_text("port = 1\n\n[[repairs]]\nknown = 'netscape'\nx = 1\n\n[[repairs]]\n")
    sources = read_sources({"config": str(file)}, {})
    (warning,) = sources.warnings()
    assert str(warning).startswith(f"{file}, line 3: repairs: no longer supported and ignored")
    assert (warning.level, warning.line) == ("warning", 3)
    assert settings_of(sources) == Settings(config=str(file), port=1)


def test_variables_of_kubernetes_for_a_service_called_segue_are_no_settings() -> None:
    environment = {
        "SEGUE_PORT": "tcp://10.0.0.1:8080",
        "SEGUE_PORT_8080_TCP": "tcp://10.0.0.1:8080",
        "SEGUE_PORT_8080_TCP_PROTO": "tcp",
        "SEGUE_SERVICE_HOST": "10.0.0.1",
        "SEGUE_SERVICE_PORT_HTTP": "8080",
    }
    assert load(**environment).port == Settings().port
    assert read_sources({}, environment).warnings() == []


def test_later_error_is_told_with_the_place_of_its_setting(tmp_path: Path) -> None:
    file = write(tmp_path, 'tokenizer = "x"\n')
    sources = read_sources({**file, "script": "s.json"}, {"SEGUE_MODEL": "scripted"})
    assert sources.located("model: 'scripted' is not one of: x.").startswith("SEGUE_MODEL: 'scr")
    assert sources.located("script: no.") == "--script: no."
    assert sources.located("tokenizer: no.") == f"{file['config']}, line 1: tokenizer: no."
    assert sources.located("port: no.") == "port: no."
    assert sources.located("no setting") == "no setting"


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


def test_file_in_the_working_folder_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "port = 7\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SEGUE_CONFIG")
    sources = read_sources({})
    assert (settings_of(sources).port, sources.file) == (7, Path("segue.toml"))
    assert load_settings({"config": "none"}).port == 8080
    assert load().port == 8080, "the environment was given, so it is all there is"


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"absent\.toml"):
        load({"config": str(tmp_path / "absent.toml")})


def test_command_tells_what_is_wrong_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--port", "many"]) == 2

    told = capsys.readouterr().err
    assert told.startswith("segue: ")
    assert "port" in told


def test_help_shows_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", "--help"])

    assert left.value.code == 0
    text = capsys.readouterr().out
    for name in FLAGS:
        assert f"--{name.replace('_', '-')}" in text
    assert "none)" not in text
    assert text.startswith("usage: segue serve [FLAGS]\n")


def test_switch_needs_no_value() -> None:
    for words, value in (
        (["--websocket"], "true"),
        (["--no-websocket"], "false"),
        (["--websocket", "false"], "false"),
        (["--websocket=true", "--port", "1"], "true"),
        ([], None),
    ):
        assert parse(["serve", *words]).websocket == value


def test_commands_with_flags_of_serve_name_it_instead_of_repeating_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        main(["doctor", "--help"])
    text = capsys.readouterr().out
    assert "All flags of `segue serve`" in text
    assert "--port" not in text
    assert parse(["doctor", "--port", "1"]).port == "1"


def test_small_models_usual_sampling_gives_way_to_what_the_operator_says() -> None:
    usual = load().served()[0]
    said = load({"temperature": "1", "output_tokens_max": "50"}).served()[0]
    named = load({"model": ["smollm2"]}).served()[0]
    assert (usual.temperature, usual.output_tokens_max) == (0.2, 1_024)
    assert (said.temperature, said.top_p, said.output_tokens_max) == (1, 0.9, 50)
    assert named == usual


def test_table_of_a_model_may_hold_a_switch(tmp_path: Path) -> None:
    file = write(tmp_path, '[[models]]\nname = "m"\nengine = "chat"\nsees_images = true\n')
    assert load(file).served()[0].sees_images is True


def test_templates_values_are_a_table_of_the_file_or_of_a_model(tmp_path: Path) -> None:
    own = '[[models]]\nname = "a"\n[[models]]\nname = "b"\ntemplate_values = {thinking = true}\n'
    first, second = load(write(tmp_path, "template_values = {mode = 1}\n" + own)).served()

    assert first.template_values == {"mode": 1}
    assert second.template_values == {"thinking": True}


def test_model_inside_takes_one_slot_and_known_models_their_authors_sampling() -> None:
    coder, own = load({"model": ("qwen2.5-coder-1.5b", "own.gguf")}).served()
    assert (coder.engine_parallel, coder.temperature, coder.top_p) == (1, 0.7, 0.8)
    assert (own.engine_parallel, own.temperature, own.dialect) == (1, None, "auto")
    assert load({"engine_parallel": "3"}).served()[0].engine_parallel == 3


def test_address_of_an_engine_is_shown_without_its_password() -> None:
    assert shown_address("https://user:secret@h:1/v1") == "https://h:1/v1"
    assert shown_address("http://h:1") == "http://h:1"
