"""What a skill says of itself is read as texts, and must be as the contract has it."""

from __future__ import annotations

import time
from io import BytesIO

import pytest

from segue.bundles.bundle import inline_bundle, stored_bundle
from segue.errors import InvalidRequest
from tests.bundles.bad import BAD_FRONT, GOOD, manifest, packed


@pytest.mark.parametrize("name", BAD_FRONT)
def test_bad_front_matter_is_refused_in_little_time(name: str) -> None:
    text, words = BAD_FRONT[name]
    began = time.process_time()
    with pytest.raises(InvalidRequest, match="skill is refused") as refused:
        stored_bundle(BytesIO(manifest(text)), "files")
    assert words in refused.value.message
    assert refused.value.code == "invalid_skill"
    assert time.process_time() - began < 5


def test_front_matter_says_what_a_kept_skill_is_for() -> None:
    text = b"---\r\nname:  csv-2 \r\nother: [1, {a: b}]\r\ndescription: >\r\n  Sums\r\n  of files.\r\n---\r\nRead."
    bundle = stored_bundle(BytesIO(manifest(text)), "files")
    assert (bundle.name, bundle.description) == ("csv-2", "Sums of files.")
    assert (bundle.manifest, bundle.bytes) == ("SKILL.md", len(text))
    marked = stored_bundle(
        BytesIO(manifest("\ufeff---\nname: 1\ndescription: é\n---".encode())), "f"
    )
    assert (marked.name, marked.description) == ("1", "é")


def test_request_says_what_a_skill_of_its_own_is_for() -> None:
    bundle = inline_bundle("sums", "Words.", packed(GOOD), "tools[0]")
    assert (bundle.name, bundle.description) == ("sums", "Words.")
    assert inline_bundle("a", "b", packed({"skill.md": b"x"}), "tools[0]").manifest == "skill.md"


@pytest.mark.parametrize("name", ["", "A", "-a", "a-", "a--b", "a" * 65, "a/b", "ä", "a\n"])
def test_bad_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="name"):
        inline_bundle(name, "Sums.", packed(GOOD), "tools[0]")


@pytest.mark.parametrize("description", ["", "x" * 1025])
def test_bad_description_is_refused(description: str) -> None:
    with pytest.raises(InvalidRequest, match="description"):
        inline_bundle("csv", description, packed(GOOD), "tools[0]")
