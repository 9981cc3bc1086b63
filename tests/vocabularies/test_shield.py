"""Inside a template too, only what the template writes is a mark, whatever stands next to it."""

import re

from hypothesis import given
from hypothesis import strategies as st

from segue.vocabularies.shield import Shield, mended

MARKS = ("<think>", "</think>", "<|im_end|>", "[INST]", '<|"|>', "<｜User｜>")
MARK = re.compile("|".join(map(re.escape, MARKS)))
SHIELD = Shield(MARKS)
PIECES = [
    "<", "</", ">", "|", "｜", "think", "im_end", "User", "[", "]", "INST", '"', " ", "\n", "a", "\ufdd0", "\ufdd2",
    *MARKS,
]  # fmt: skip
texts = st.lists(st.sampled_from(PIECES), max_size=6).map("".join)


@given(one=texts, other=texts)
def test_no_mark_comes_of_texts_and_what_stands_around_them(one: str, other: str) -> None:
    first, second = SHIELD.text(one), SHIELD.text(other)
    bare = first.strip()
    for written in (
        f"{first}{second}", f"{bare}{second.strip()}", f"<{first}>", f"</{bare}>", f"<|{first}|>", f"<｜{bare}｜>",
        f"[{bare}]", f"a<{first}",
    ):  # fmt: skip
        assert MARK.search(written) is None
    assert mended(first) == one


def test_text_that_can_make_no_mark_is_left_alone() -> None:
    for text in ("Hello world.", " some\n", "", "  ", "a < b", "x[0] = 1", "names"):
        assert SHIELD.text(text) == text


def test_values_are_shielded_where_templates_do_not_look() -> None:
    value = {"type": "object", "properties": {"think": {"type": "string", "enum": ["<think>"]}}}

    shielded = SHIELD.value(value)

    assert isinstance(shielded, dict)
    assert shielded["type"] == "object"
    assert [*shielded["properties"]] != ["think"]
    assert MARK.search(str(shielded)) is None
