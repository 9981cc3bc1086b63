"""Settings: three places, one order, and a clear word for what is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from segue.cli import main
from segue.errors import Misconfigured
from segue.settings import FLAGS, EngineName, Settings, load_settings, shown_address


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
        text, toml = ",".join(map(str, default)) or "x", str(list(default) or ["x"])
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


@pytest.mark.parametrize(
    "flags, word",
    [
        ({"port": "many"}, "port"),
        ({"port": "70000"}, "port"),
        ({"port": "-1"}, "port"),
        ({"tps": "-1"}, "tps"),
        ({"heartbeat_s": "0"}, "heartbeat_s"),
        ({"context_tokens": "-1"}, "context_tokens"),
        ({"websocket": "perhaps"}, "websocket"),
        ({"durability": "none"}, "durability"),
        ({"reasoning": "loud"}, "reasoning"),
        ({"log_level": "chatty"}, "log_level"),
        ({"workers": "0"}, "workers"),
        ({"engine": "steam"}, "engine"),
        ({"dialect": "klingon"}, "dialect"),
        ({"store": "mysql://somewhere"}, "store"),
        ({"store": "sqlite://relative"}, "store"),
        ({"auth": "sometimes"}, "auth"),
        ({"tls_cert": "only.pem"}, "tls_key"),
        ({"host": "0.0.0.0", "auth": "off"}, "host"),
        ({"host": "192.0.2.1", "auth": "off"}, "host"),
        ({"host": "::", "auth": "off"}, "host"),
        ({"host": "example.com", "auth": "off"}, "host"),
    ],
)
def test_wrong_value_is_told_with_the_settings_name(flags: dict[str, str], word: str) -> None:
    with pytest.raises(Misconfigured, match=word):
        load(flags)


def test_unknown_choice_is_told_with_all_choices(tmp_path: Path) -> None:
    choices = f"'steam' is not one of: {', '.join(get_args(EngineName))}"
    with pytest.raises(Misconfigured, match=f"^engine: {choices}"):
        load({"engine": "steam"})
    with pytest.raises(Misconfigured, match=f"^models: engine: {choices}"):
        load(write(tmp_path, '[[models]]\nname = "a"\nengine = "steam"\n'))
    with pytest.raises(Misconfigured, match=r"^log_level: 'loud' is not one of: debug, info, "):
        load(SEGUE_LOG_LEVEL="loud")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_keys(host: str) -> None:
    assert load({"host": host}).host == host


@pytest.mark.parametrize(
    "text, word",
    [
        ("port = ", "not TOML"),
        ("\x00", "not TOML"),
        ("prot = 8080\n", "prot"),
        ('port = "many"\n', "port"),
        ('model = "one"\n', "model"),
        ("[[models]]\nname = 7\n", "name"),
        ('[[models]]\nname = "a"\nspeed = 7\n', "speed"),
        ('[[models]]\nname = "a"\nengine = "steam"\n', "engine"),
        ("[models]\n", "models"),
    ],
)
def test_wrong_file_is_told_with_what_is_wrong(tmp_path: Path, text: str, word: str) -> None:
    with pytest.raises(Misconfigured, match=word):
        load(write(tmp_path, text))


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
