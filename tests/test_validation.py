"""Values that do not fit a struct, and the lines of a TOML text."""

from __future__ import annotations

from typing import Annotated, Literal

import pytest
from msgspec import Meta, Struct

from segue.validation import SettingPath, expected, is_web_url, line_of, misfits, nearest

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


class Inner(Struct):
    """A table in a table."""

    label: str
    size: Annotated[int, Meta(ge=1)] = 1


class Outer(Struct):
    """A table."""

    inner: Inner | None = None
    rows: tuple[Inner, ...] = ()
    kind: Literal["one", "two"] = "one"


def test_every_misfit_is_found_with_its_path() -> None:
    values = {"rows": [{"label": "a", "size": 0}, {"lable": "b"}], "kind": "tow", "rwos": 1}
    assert {one.setting: one.sentence for one in misfits(values, Outer)} == {
        "rows[0].size": "0 is not a whole number of at least 1.",
        "rows[1].lable": "'lable' is not a setting of [[rows]]. Did you mean label?",
        "rows[1]": "label is missing.",
        "kind": "'tow' is not one of: one, two. Did you mean two?",
        "rwos": "'rwos' is not a setting. Did you mean rows?",
    }
    assert list(misfits({"rows": [{"label": "a"}], "kind": "two"}, Outer)) == []


def test_what_fits_is_told_in_words() -> None:
    assert expected(tuple[Annotated[int, Meta(gt=0)], ...]) == "a list of numbers, written in [ ]"
    assert expected(tuple[Inner, ...]) == "a list of tables, written in [ ]"
    assert expected(Annotated[float, Meta(gt=0, le=1)]) == "a number above 0 and up to 1"


def test_name_that_is_like_no_other_gets_no_hint() -> None:
    assert nearest("xyzzy", ["port", "host"]) == ""


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
