"""Values that do not fit a struct, in words."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from segue.settings.validation import expected, misfits, nearest


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
