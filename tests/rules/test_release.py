"""Does the changelog have a section for the version that the package has? (Manifest: tests/rules/test_deploy.py.)"""

from __future__ import annotations

import re

from segue import __version__
from tests.rules.test_citations import ROOT


def test_changelog_has_a_section_for_this_version_below_unreleased() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert re.fullmatch(re.escape(__version__) + r" \(\d{4}-\d\d-\d\d\)", headings[1])
