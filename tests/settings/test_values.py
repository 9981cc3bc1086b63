"""The models of the settings: what is set for all, and for each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from segue.settings.checks import load_settings
from segue.settings.values import Settings


def load(flags: dict[str, Any] | None = None, **environment: str) -> Settings:
    return load_settings(flags or {}, environment)


def write(folder: Path, text: str) -> dict[str, str]:
    path = folder / "segue.toml"
    path.write_text(text)
    return {"config": str(path)}


def test_named_models_share_what_is_set_for_all() -> None:
    models = load(SEGUE_MODEL="a,b", SEGUE_TPS="65").named_models()

    assert [(model.name, model.tps) for model in models] == [("a", 65), ("b", 65)]


def test_tables_of_the_file_set_what_is_their_own(tmp_path: Path) -> None:
    file = write(
        tmp_path,
        'tps = 5\n[[models]]\nname = "a"\naliases = ["x"]\n[[models]]\nname = "b"\ntps = 9\n',
    )

    models = load({**file, "model": ["b", "c"]}).named_models()

    assert [(model.name, model.aliases, model.tps) for model in models] == [
        ("a", ("x",), 5),
        ("b", (), 9),
        ("c", (), 5),
    ]


def test_table_of_a_model_may_hold_a_switch(tmp_path: Path) -> None:
    file = write(tmp_path, '[[models]]\nname = "m"\nengine = "chat"\nsees_images = true\n')
    assert load(file).named_models()[0].sees_images is True


def test_templates_values_are_a_table_of_the_file_or_of_a_model(tmp_path: Path) -> None:
    own = '[[models]]\nname = "a"\n[[models]]\nname = "b"\ntemplate_values = {thinking = true}\n'
    first, second = load(write(tmp_path, "template_values = {mode = 1}\n" + own)).named_models()

    assert first.template_values == {"mode": 1}
    assert second.template_values == {"thinking": True}
