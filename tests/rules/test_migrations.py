"""Does every change of the tables have two halves (docs/inside/release.md)?

A script adds, and the version before goes on beside it; or it takes away and tightens, and says that older versions are
refused from then on: `UPDATE needs SET schema = N`, its own number. Scripts up to those of 0.3.0 are older than the
rule. Made-up scripts show that it can fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from segue.stores.sql_files import load_migrations

# The last scripts before the rule.
FIRST = {"sqlite": 9, "postgres": 11}
# Scripts with a trigger, which runs for what an older version writes: it only adds up what was written, in a table that
# no older version knows (tests/scenarios/test_side_by_side.py plays both versions).
COUNTING = {("sqlite", 13), ("postgres", 15)}
# What an older version does not notice.
ADDS = re.compile(
    r"CREATE (UNLOGGED )?TABLE \w+ \(.*\)"
    r"|CREATE INDEX .*"
    r"|ALTER TABLE \w+ ADD COLUMN \w+ (?!.*NOT NULL)(?!.*(UNIQUE|REFERENCES|CHECK)).*"
    r"|ALTER TABLE \w+ ADD COLUMN \w+ \w+ NOT NULL DEFAULT \S+"
    r"|INSERT INTO .*|PRAGMA user_version = \d+",
    re.DOTALL,
)


def complaints(number: int, script: str) -> Iterator[str]:
    """What is wrong with a script that has this number."""
    bare = re.sub(r"--[^\n]*", "", script)
    statements = [" ".join(part.split()) for part in bare.split(";") if part.strip()]
    if f"UPDATE needs SET schema = {number}" in statements:
        return
    for statement in statements:
        if not ADDS.fullmatch(statement):
            yield f"{number}: an older version may stumble over: {statement}"


@pytest.mark.parametrize("backend", FIRST)
def test_scripts_only_add_or_refuse_older_versions(backend: str) -> None:
    found = [
        complaint
        for number, script in load_migrations(backend)
        if number > FIRST[backend] and (backend, number) not in COUNTING
        for complaint in complaints(number, script)
    ]
    assert found == []


@pytest.mark.parametrize(
    "script, is_right",
    [
        ("-- Why.\nALTER TABLE turns ADD COLUMN colour text;", True),
        ("ALTER TABLE turns ADD COLUMN size bigint NOT NULL DEFAULT 0;", True),
        ("CREATE TABLE files (id text PRIMARY KEY);\nCREATE INDEX a ON files (id);", True),
        ("ALTER TABLE turns ADD COLUMN colour text NOT NULL;", False),
        ("ALTER TABLE turns ADD COLUMN part text REFERENCES parts (id);", False),
        ("ALTER TABLE turns DROP COLUMN colour;", False),
        ("ALTER TABLE turns RENAME COLUMN colour TO color;", False),
        ("CREATE UNIQUE INDEX a ON turns (id);", False),
        ("DROP TABLE files;", False),
        ("DROP TABLE files;\nUPDATE needs SET schema = 12;", True),
        ("DROP TABLE files;\nUPDATE needs SET schema = 13;", False),
        ("CREATE TRIGGER a AFTER INSERT ON turns EXECUTE FUNCTION b();", False),
    ],
)
def test_rule_sees_what_an_older_version_cannot_live_with(script: str, is_right: bool) -> None:
    assert (not list(complaints(12, script))) is is_right
