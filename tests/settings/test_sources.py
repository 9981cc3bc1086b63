"""Three places, one order, and the place of every value."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from segue.errors import Misconfigured
from segue.settings.checks import load_settings, settings_of
from segue.settings.sources import line_of, read_sources
from segue.settings.validation import SettingPath
from segue.settings.values import NAMES, RETIRED, Settings


def load(flags: dict[str, Any] | None = None, **environment: str) -> Settings:
    return load_settings(flags or {}, environment)


def write(folder: Path, text: str) -> dict[str, str]:
    path = folder / "segue.toml"
    path.write_text(text)
    return {"config": str(path)}


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


@pytest.mark.parametrize("name", NAMES)
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


TEXT = """\
# a comment with port = 1
port = 1
guard_rules.chars_max = 2
[guard_owners]
"ada" = ["x"]
[[models]]
name = "a"
  [models.template_values]
  deep = true
[[models]]  # the second
name = "b"
"""


@pytest.mark.parametrize(
    "path, line",
    [
        (("port",), 2),
        (("guard_rules", "chars_max"), 3),
        (("guard_owners", "ada", 0), 5),
        (("models",), 6),
        (("models", 0, "name"), 7),
        (("models", 0, "template_values", "deep"), 9),
        (("models", 1), 10),
        (("models", 1, "name"), 11),
        (("models", 1, "absent"), 10),
        (("absent",), None),
    ],
)
def test_line_of_a_setting_is_found(path: SettingPath, line: int | None) -> None:
    assert line_of(TEXT, path) == line


@pytest.mark.parametrize("name", RETIRED)
def test_retired_setting_still_holds_with_a_warning(name: str, tmp_path: Path) -> None:
    file = {"config": str(tmp_path / "segue.toml")}
    default = getattr(Settings(), name)
    value = str(default).lower() if isinstance(default, bool) else repr(default)
    Path(file["config"]).write_text(f"\n{name} = {value}\n".replace("'", '"'))
    for sources, place in (
        (read_sources({name: default}, {}), f"--{name.replace('_', '-')}"),
        (read_sources({}, {f"SEGUE_{name.upper()}": str(default)}), f"SEGUE_{name.upper()}"),
        (read_sources(file, {}), f"{file['config']}, line 2"),
    ):
        (warning,) = sources.warnings()
        assert warning.level == "warning"
        assert str(warning).startswith(place)
        assert "no longer needed" in warning.message


def test_setting_of_one_model_that_is_retired_is_found_in_its_table(tmp_path: Path) -> None:
    sources = read_sources(write(tmp_path, '[[models]]\nname = "a"\npiece_cache = false\n'), {})
    (warning,) = sources.warnings()
    assert (warning.setting, warning.line) == ("models[0].piece_cache", 3)
    assert settings_of(sources).named_models()[0].piece_cache is False


@pytest.mark.parametrize(
    ("name", "url"),
    [("ollama", "http://127.0.0.1:11434"), ("lmstudio", "http://127.0.0.1:1234"), ("litellm", "http://127.0.0.1:4000")],
)  # fmt: skip
def test_server_that_speaks_chat_may_be_named(name: str, url: str, tmp_path: Path) -> None:
    found = load({"engine": name})
    assert (found.engine, found.engine_url) == ("chat", (url,))
    assert load({"engine": name, "engine_url": ["http://far:1"]}).engine_url == ("http://far:1",)
    table = load(write(tmp_path, f'[[models]]\nname = "a"\nengine = "{name}"\n'))
    assert table.named_models()[0].engine_url == (url,)
    sources = read_sources({}, {"SEGUE_ENGINE": name})
    assert sources.origin("engine_url") == "SEGUE_ENGINE"


def test_each_server_gets_its_own_url(tmp_path: Path) -> None:
    """What was put in for all models is not what one model's table means."""
    file = write(tmp_path, 'engine = "ollama"\n[[models]]\nname = "a"\nengine = "lmstudio"\n')
    assert load(file).named_models()[0].engine_url == ("http://127.0.0.1:1234",)
    named = write(
        tmp_path, 'engine_url = ["http://far:1"]\n[[models]]\nname = "a"\nengine = "ollama"\n'
    )
    assert load(named).named_models()[0].engine_url == ("http://far:1",)


def test_hosted_api_needs_its_url() -> None:
    assert load({"engine": "openai"}).engine_url == ()
