"""Every setting is in docs/settings.md or docs/settings-advanced.md, under its three names, with its default and its
meaning.

The tables there are written from the settings themselves: `python -m tests.rules.test_settings_documented` brings
the files up to date.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from segue.settings.validation import choices_of
from segue.settings.values import FIELDS, NAMES, RETIRED, ModelSettings
from segue_cli.commands.settings_help import COMMON, FLAGS, HELP

DOCS = Path(__file__).parent.parent.parent / "docs"
PAGES = (DOCS / "settings.md", DOCS / "settings-advanced.md")
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


def tables(page: Path) -> dict[str, str]:
    """The generated parts of a page, by the name of their marker."""
    is_common = page == PAGES[0]
    names = [name for name in FLAGS if (name in COMMON) == is_common]
    of_models = [name for name in names if name in ModelSettings.__struct_fields__]
    of_server = [name for name in names if name not in of_models]
    found = {
        "server": HEADER + "".join(row(FIELDS[name]) for name in of_server),
        "model": HEADER + "".join(row(FIELDS[name]) for name in of_models),
    }
    rules = "".join(f"| `{name}` | {rule} |\n" for name, rule in RETIRED.items())
    return found | ({} if is_common else {"retired": f"| setting | now |\n|---|---|\n{rules}"})


def filled(path: Path) -> str:
    """The page with its tables as they must be."""
    page = path.read_text()
    for name, table in tables(path).items():
        between = re.compile(rf"(<!-- {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        assert between.search(page), f"{path.name} has no place for {name}"
        page = between.sub(lambda found, table=table: found[1] + table + found[2], page)
    return page


def test_pages_say_what_the_settings_say() -> None:
    for page in PAGES:
        assert page.read_text() == filled(page), (
            "run: python -m tests.rules.test_settings_documented"
        )


def test_few_settings_are_common_and_none_of_them_is_retired() -> None:
    """With --config, --help and --help-all, `segue serve --help` shows forty flags at most."""
    assert len(COMMON) + 3 <= 40
    assert set(FLAGS) >= COMMON
    assert not RETIRED.keys() & set(FLAGS)


def test_every_setting_has_a_meaning() -> None:
    for name in set(NAMES) - RETIRED.keys():
        assert MEANINGS.get(name), f"{name} has no description"


def test_settings_of_a_models_own_table_are_on_the_page() -> None:
    page = "".join(page.read_text() for page in PAGES)
    for name in FIELDS.keys() - set(NAMES):
        assert f"`{name}`" in page or f"[[{name}]]" in page, name


def test_place_of_the_file_is_on_the_page() -> None:
    page = PAGES[0].read_text()
    assert "`--config`" in page
    assert "`SEGUE_CONFIG`" in page


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page))
