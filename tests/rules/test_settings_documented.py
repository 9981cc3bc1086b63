"""Every setting is in docs/settings.md, under its three names, with its default and its meaning.

The tables there are written from the settings themselves: `python -m tests.rules.test_settings_documented` brings
the file up to date.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from segue.settings.help import FLAGS, HELP
from segue.settings.validation import choices_of
from segue.settings.values import FIELDS, ModelSettings

PAGE = Path(__file__).parent.parent.parent / "docs" / "settings.md"
HEADER = "| flag | environment | `segue.toml` | default | meaning |\n|---|---|---|---|---|\n"


MEANINGS = {name: text for group in HELP.values() for name, text in group.items()}


def meaning_of(field: msgspec.structs.FieldInfo) -> str:
    """The description that `--help` shows too."""
    choices = ", ".join(f"`{value}`" for value in choices_of(field.type))
    return MEANINGS[field.name] + (f"; one of {choices}" if choices else "")


def default_of(field: msgspec.structs.FieldInfo) -> str:
    value = field.default
    if value in ("", (), None):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, int) and value and value % (1024 * 1024) == 0:
        return f"`{value}` ({value // 1024 // 1024} Mi)"
    if isinstance(value, tuple):
        return f"`{','.join(map(str, value))}`"
    return f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def row(field: msgspec.structs.FieldInfo) -> str:
    name = field.name
    flag, variable = f"`--{name.replace('_', '-')}`", f"`SEGUE_{name.upper()}`"
    return f"| {flag} | {variable} | `{name}` | {default_of(field)} | {meaning_of(field)} |\n"


def tables() -> dict[str, str]:
    """The generated parts of the page, by the name of their marker."""
    of_models = [name for name in FLAGS if name in ModelSettings.__struct_fields__]
    of_server = [name for name in FLAGS if name not in of_models]
    return {
        "server": HEADER + "".join(row(FIELDS[name]) for name in of_server),
        "model": HEADER + "".join(row(FIELDS[name]) for name in of_models),
    }


def filled(page: str) -> str:
    """The page with its tables as they must be."""
    for name, table in tables().items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert between.search(page), f"docs/settings.md has no place for {name}"
        page = between.sub(lambda found, table=table: found[1] + table + found[2], page)
    return page


def test_page_says_what_the_settings_say() -> None:
    page = PAGE.read_text()
    assert page == filled(page), "run: python -m tests.rules.test_settings_documented"


def test_every_setting_has_a_meaning() -> None:
    for name in FLAGS:
        assert MEANINGS[name], f"{name} has no description"


def test_settings_of_a_models_own_table_are_on_the_page() -> None:
    page = PAGE.read_text()
    for name in FIELDS.keys() - set(FLAGS):
        assert f"`{name}`" in page or f"[[{name}]]" in page, name


def test_place_of_the_file_is_on_the_page() -> None:
    page = PAGE.read_text()
    assert "`--config`" in page
    assert "`SEGUE_CONFIG`" in page


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text()))
