"""Versions of Segue as programs that can be run beside this checkout: released ones, and made-up later ones.

A release is built again from its commit, which docs/inside/release.md names, with the tools of this checkout; its
wheels (one up to 0.3.0, then those of all distributions) are unpacked into `.cache/releases`. A made-up version is a
copy of this checkout's packages with what a later version may change: a new column that it writes, and a new kind of
row. By the rule of docs/inside/release.md one version reads such a row and the next one writes it.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from segue import __version__
from segue.stores.sql_files import ROWS_READ, load_migrations

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "docs" / "inside" / "release.md"
BUILT = ROOT / ".cache" / "releases"
BUILD_S = 120
# The first version that another may run beside.
FIRST = (0, 3, 0)


@dataclass(frozen=True)
class Release:
    """A row of the record."""

    version: str
    commit: str
    sha256: str

    @property
    def can_run_beside_others(self) -> bool:
        return tuple(map(int, self.version.split("."))) >= FIRST


@dataclass(frozen=True)
class Program:
    """A version of Segue that can be run: its name, and the folder of its packages."""

    version: str
    folder: Path

    @property
    def environment(self) -> Mapping[str, str]:
        """With this the interpreter of the tests runs that version."""
        return {"PYTHONPATH": str(self.folder)}

    @property
    def command(self) -> Sequence[str]:
        """Its command line; up to 0.3.0 that was a part of the package."""
        has_package = (self.folder / "segue_cli").is_dir()
        return (sys.executable, "-m", "segue_cli.cli" if has_package else "segue.cli")


def released() -> list[Release]:
    """All versions of the record, the newest first."""
    rows = re.findall(
        r"^\| (\d+\.\d+\.\d+) \|[^|]*\| `([0-9a-f]{40})` \|.*?\| `([0-9a-f]{64})` \|$",
        RECORD.read_text("utf-8"),
        re.MULTILINE,
    )
    return [Release(*row) for row in rows]


def newest_version() -> str:
    """The version that a person installs: that of the newest section of the changelog."""
    page = (ROOT / "CHANGELOG.md").read_text("utf-8")
    found = re.search(r"^## (\d+\.\d+\.\d+) \(", page, re.MULTILINE)
    assert found is not None
    return found[1]


def neighbour() -> Program:
    """The newest release that may run beside this checkout; this checkout itself while there is none."""
    found = next((one for one in released() if one.can_run_beside_others), None)
    return Program(__version__, ROOT / "src") if found is None else build(found)


def build(release: Release) -> Program:
    """The wheels of a release, built again from its commit; their files must be those of the record."""
    target = BUILT / f"{release.version}-{release.sha256[:12]}"
    if not target.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=BUILT) as name:
            wheels = build_wheels(release.commit, Path(name))
            found = digest(wheels)
            assert found == release.sha256, f"the files of {release.commit} have SHA-256 {found}"
            for wheel in wheels:
                with zipfile.ZipFile(wheel) as archive:
                    archive.extractall(Path(name, "unpacked"))
            try:
                Path(name, "unpacked").rename(target)
            except OSError:
                assert target.exists(), "another test run was faster"
    return Program(release.version, target)


def build_wheels(commit: str, folder: Path) -> list[Path]:
    """The wheels of this commit, in this folder."""
    tree = folder / "tree"
    tree.mkdir(parents=True)
    archive = subprocess.run(
        ["git", "archive", commit], cwd=ROOT, check=True, capture_output=True, timeout=BUILD_S
    )
    subprocess.run(["tar", "x"], cwd=tree, check=True, input=archive.stdout, timeout=BUILD_S)
    for project in (tree, tree / "segue-server", tree / "segue-conform", tree / "segue-vllm"):
        if project.exists():
            subprocess.run(
                [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)],
                cwd=project, check=True, capture_output=True, timeout=BUILD_S,
                env={name: value for name, value in os.environ.items() if name != "SOURCE_DATE_EPOCH"},
            )  # fmt: skip
    return sorted(folder.glob("*.whl"))


def digest(wheels: Iterable[Path]) -> str:
    """Of all files of the packages in these wheels. Compression and the builder's own files are left out: they depend
    on the machine that builds it."""
    files: dict[str, str] = {}
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if ".dist-info/" not in name]
            files |= {name: hashlib.sha256(archive.read(name)).hexdigest() for name in names}
    lines = [f"{files[name]}  {name}\n" for name in sorted(files)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


# --- versions that do not exist -----------------------------------------------------------------------------


def make_up(folder: Path, *, writes_new_rows: bool) -> Program:
    """A later version: it has one more column, knows one more kind of row, and perhaps writes it."""
    version = "99.1.0" if writes_new_rows else "99.0.0"
    # With what is compiled, but for what a process is just writing: it holds for each file that is not edited here.
    shutil.copytree(ROOT / "src", folder, ignore=shutil.ignore_patterns("*.pyc.*"))
    package = folder / "segue"
    _edit(package / "__init__.py", f'"{__version__}"', f'"{version}"')
    _add_columns(package / "stores" / "sql")
    files, records = package / "stores" / "sql_files.py", package / "stores" / "records.py"
    _edit(files, f"ROWS_READ = {ROWS_READ}", f"ROWS_READ = {ROWS_READ + 1}")
    _edit(
        records,
        "    if not kept.startswith(RESPONSE_MARK):",
        '    if kept.startswith(b"\\x7f"):\n        return zlib.decompress(kept[1:])\n'
        "    if not kept.startswith(RESPONSE_MARK):",
    )
    if writes_new_rows:
        _edit(files, "ROWS_WRITTEN = ", f"ROWS_WRITTEN = {ROWS_READ + 1}  # ")
        _edit(
            records,
            "    how = (RESPONSE_LEVEL,",
            '    return b"\\x7f" + zlib.compress(body)\n    how = (RESPONSE_LEVEL,',
        )
    return Program(version, folder)


def _add_columns(sql: Path) -> None:
    """The first half of a change: a column that the version before neither reads nor writes, and a table."""
    for backend, text in (("sqlite", "TEXT"), ("postgres", "text")):
        number = load_migrations(backend)[-1][0] + 1
        script = (
            f"ALTER TABLE turns ADD COLUMN colour {text};\n\nCREATE TABLE colours (name {text});\n"
        )
        script += f"\nPRAGMA user_version = {number};\n" if backend == "sqlite" else ""
        (sql / f"{backend}_{number:04}_colours.sql").write_text(script)
    _edit(
        sql / "sqlite_queries.sql",
        "worker, saved_at, instructions, tools)\nVALUES (\n",
        "worker, saved_at, instructions, tools, colour)\nVALUES (\n",
    )
    _edit(
        sql / "sqlite_queries.sql",
        "AND digest = :tools)\n)\n",
        "AND digest = :tools), 'red'\n)\n",
    )
    _edit(
        sql / "postgres_queries.sql",
        "worker, saved_by, saved_at)\n    SELECT $1, $2, $3, $4, $5, $6, $7, $8, $18, seconds_now()",
        "worker, saved_by, saved_at, colour)\n"
        "    SELECT $1, $2, $3, $4, $5, $6, $7, $8, $18, seconds_now(), 'red'",
    )


def main(commit: str) -> None:
    """Print the digest of a commit, for the record."""
    with tempfile.TemporaryDirectory() as name:
        print(digest(build_wheels(commit, Path(name))))


def _edit(path: Path, old: str, new: str) -> None:
    text = path.read_text("utf-8")
    assert text.count(old) == 1, f"{path.name} has {text.count(old)} times {old!r}"
    path.write_text(text.replace(old, new), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
