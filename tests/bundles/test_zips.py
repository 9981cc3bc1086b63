"""A skill is looked at before a byte is written; what is bad is refused as a whole, in bounded memory and time."""

from __future__ import annotations

import time
import tracemalloc
import zipfile
from io import BytesIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.bundles.bundle import inline_bundle, stored_bundle
from segue.bundles.zips import UNPACKED_BYTES_MAX, BadBundle, list_zip, zip_reader
from segue.errors import InvalidRequest
from tests.bundles.bad import BAD, GOOD, MIB, packed, skill_zip


def unpacked(data: bytes) -> dict[str, bytes]:
    file = BytesIO(data)
    files = list_zip(file)
    with zip_reader(file) as read:
        return {each.path: b"".join(read(each.entry)) for each in files}


def test_skill_is_unpacked_without_its_top_folder() -> None:
    found = unpacked(packed(GOOD))
    assert found == {"SKILL.md": GOOD["csv/SKILL.md"], "scripts/a.py": b"print(1)"}


def test_what_a_mac_adds_and_a_comment_are_no_part_of_it() -> None:
    data = BytesIO(packed({**GOOD, "__MACOSX/csv/._SKILL.md": b"x"}))
    with zipfile.ZipFile(data, "a") as archive:
        archive.comment = b"made by hand"
    assert unpacked(data.getvalue()).keys() == {"SKILL.md", "scripts/a.py"}


def test_zip_in_a_zip_is_a_file() -> None:
    inner = packed({"SKILL.md": b"x", "../up": b""})
    assert unpacked(skill_zip({"more.zip": inner}))["more.zip"] == inner


@pytest.mark.parametrize("name", BAD)
def test_bad_bundle_is_refused_in_little_memory_and_time(name: str) -> None:
    make, words = BAD[name]
    data = make()
    began = time.process_time()
    tracemalloc.start()
    try:
        for look in (
            lambda: inline_bundle("csv-insights", "Sums.", data, "tools[0]"),
            lambda: stored_bundle(BytesIO(data), "tools[0]"),
        ):
            with pytest.raises(InvalidRequest) as refused:
                look()
            assert words in refused.value.message
            assert (refused.value.code, refused.value.param) == ("invalid_skill", "tools[0]")
        assert tracemalloc.get_traced_memory()[1] < 8 * MIB
    finally:
        tracemalloc.stop()
    # About a second at most where nothing else runs.
    assert time.process_time() - began < 20


PATHS = st.lists(
    st.text(st.characters(codec="utf-8"), min_size=1, max_size=12)
    | st.sampled_from(["SKILL.md", "a/SKILL.md", "../x", "/x", "a/b", "a", ".", "a/./b", "A/B"]),
    max_size=5,
)


@settings(max_examples=150, deadline=None)
@given(paths=PATHS, data=st.binary(max_size=40), cut=st.integers(0, 400), flip=st.integers(0, 4000))
def test_whatever_comes_is_refused_or_stays_below_its_folder(
    paths: list[str], data: bytes, cut: int, flip: int
) -> None:
    """A zip of any names, cut or with a bit turned over: no error but the one, no path that leads elsewhere."""
    buffer = BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for path in dict.fromkeys(paths):
            archive.writestr(zipfile.ZipInfo(path), data)
    made = bytearray(buffer.getvalue())
    if cut < 100:
        del made[len(made) - cut :]
    elif made:
        made[flip // 8 % len(made)] ^= 1 << flip % 8
    try:
        found = unpacked(bytes(made))
    except BadBundle:
        return
    assert sum(map(len, found.values())) <= UNPACKED_BYTES_MAX
    assert sum(path.casefold() == "skill.md" for path in found) == 1
    for path in found:
        assert not path.startswith("/")
        assert not {"", ".", ".."} & {*path.split("/")}
        assert "\\" not in path
        assert path.isprintable()
