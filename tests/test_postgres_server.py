"""Does the tests' own PostgreSQL run where only root may enter?"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from tests.postgres import other_user, programs, reachable, temporary_folder


def test_programs_run_from_a_folder_that_only_root_may_enter(tmp_path: Path) -> None:
    """As in root's home, with a strict umask: PostgreSQL runs as somebody else, who may not read there."""
    home, folder = tmp_path / "home", temporary_folder()
    wheel = programs().parent
    for name in (f"{wheel.name}/{programs().name}", f"{wheel.name}.libs"):
        shutil.copytree(wheel.parent / name, home / name, symlinks=True)
    for path in home.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o700)
    home.chmod(0o700)
    with folder:
        found = reachable(home / wheel.name / programs().name, Path(folder.name))
        for program in ("initdb", "postgres", "pg_isready"):
            asked = [found / "bin" / program, "--version"]
            subprocess.run(asked, check=True, cwd=folder.name, **other_user())
