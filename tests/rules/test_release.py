"""Do version, changelog and the record of releases agree? (Manifest: tests/rules/test_deploy.py.)

A version names one tree: as soon as the package differs from that of a release, it has another version.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

from segue import __version__
from segue.stores.sql_files import ROWS_READ, ROWS_WRITTEN, load_migrations
from tests.releases import RECORD, Release, released
from tests.rules.test_citations import ROOT

HEADING = re.compile(r"^## (\d+\.\d+\.\d+) \(\d{4}-\d\d-\d\d\)$", re.MULTILINE)


def ordered(version: str) -> tuple[int, ...]:
    """The numbers of a version; one that is being made is just before its release."""
    numbers, _, is_made = version.partition(".dev")
    return (*map(int, numbers.split(".")), -1 if is_made else 0)


def changes_since(commit: str) -> str:
    """The files of the packages that differ from this commit."""
    words = ["git", "diff", "--name-only", commit, "--", "src", "pyproject.toml", "segue-server"]
    return subprocess.run(words, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def complaints(version: str, newest: Release, changes: str) -> Iterator[str]:
    """What is wrong with the version of a tree that differs so from the newest release."""
    if version == newest.version and changes:
        yield f"{version} was released as {newest.commit[:7]}, and this tree differs: {changes}"
    if ordered(version) < ordered(newest.version):
        yield f"{version} is older than {newest.version}, which was released"


def test_version_names_one_tree() -> None:
    (newest, *_) = released()
    assert list(complaints(__version__, newest, changes_since(newest.commit))) == []


def test_rule_sees_two_trees_with_one_version() -> None:
    newest = Release("0.3.0", "abc", "")
    assert not list(complaints("0.3.0", newest, ""))
    assert not list(complaints("0.4.0.dev0", newest, "src/segue/app.py"))
    assert list(complaints("0.3.0", newest, "src/segue/app.py"))
    assert list(complaints("0.3.0.dev0", newest, "src/segue/app.py"))


def test_changelog_has_a_section_for_every_release_and_one_on_top() -> None:
    page = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert page.index("## Unreleased") < page.index("\n## 0.")
    versions = HEADING.findall(page)
    assert versions == sorted(versions, key=ordered, reverse=True)
    assert {one.version for one in released()} <= set(versions)
    assert ".dev" in __version__ or __version__ == versions[0]


def test_page_about_installing_names_no_version_that_could_be_old() -> None:
    page = (ROOT / "docs" / "install.md").read_text("utf-8")
    assert not re.findall(r"segue(?:_server)?-\d\S*\.whl|segue(?:-server)?==\d", page)


def test_changelog_says_before_each_upgrade_what_to_do() -> None:
    page = (ROOT / "CHANGELOG.md").read_text("utf-8")
    sections = re.split(r"^## ", page, flags=re.MULTILINE)
    for section in sections[1:]:
        version = section.partition(" ")[0]
        if version[0].isdigit() and ordered(version) >= (0, 3, 0, 0):
            assert section.partition("\n### ")[2].startswith("Before you upgrade"), version


def test_record_has_the_numbers_of_the_release_that_this_tree_is() -> None:
    rows = re.findall(
        r"^\| (\d\S+) \|.*\| (\d+) \| (\d+) \| (\d+), (\d+) \|", RECORD.read_text(), re.M
    )
    found = {version: tuple(map(int, numbers)) for version, *numbers in rows}
    assert set(found) == {one.version for one in released()}, "each row has a commit and a digest"
    if __version__ in found:
        schemas = (load_migrations("sqlite")[-1][0], load_migrations("postgres")[-1][0])
        assert found[__version__] == (*schemas, ROWS_READ, ROWS_WRITTEN)
