"""How does a PostgreSQL of our own run? From a folder, on a Unix socket in it, for as long as its process lives.

PostgreSQL refuses to run as root; there it runs as `nobody`, which must be able to reach the folder and the programs.
"""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path
from typing import Any

START_S = 60
# A Unix socket in a folder with a longer name cannot be opened.
SOCKET_PATH_CHARS_MAX = 80


def other_user() -> dict[str, Any]:
    """How a program is run as a user who may run PostgreSQL."""
    if os.getuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


def reachable(found: Path, folder: Path) -> Path:
    """The programs, or a copy of them and of their libraries where the other user may not go."""
    asked = [str(found / "bin" / "initdb"), "--version"]
    try:
        subprocess.run(asked, check=True, capture_output=True, cwd=folder, **other_user())
    except (OSError, subprocess.CalledProcessError):
        wheel = found.parent
        copied = folder / wheel.name / found.name
        shutil.copytree(found, copied, symlinks=True)
        # Where they look for their libraries.
        libraries = f"{wheel.name}.libs"
        if (wheel.parent / libraries).is_dir():
            shutil.copytree(wheel.parent / libraries, folder / libraries, symlinks=True)
        for path in folder.rglob("*"):
            if not path.is_symlink():
                path.chmod(0o755)
        return copied
    return found


def give_to_other_user(folder: Path) -> None:
    """PostgreSQL writes there."""
    user = other_user()
    if user:
        os.chown(folder, user["user"], user["group"])


def make_database(programs: Path, folder: Path) -> None:
    """The files of a server, below `data`."""
    asked = ["-D", str(folder / "data"), "-A", "trust", "-U", "segue", "-N", "-E", "UTF8"]
    subprocess.run(
        [str(programs / "bin" / "initdb"), *asked, "--locale=C"],
        cwd=folder,
        check=True,
        timeout=START_S,
        stdout=subprocess.DEVNULL,
        **other_user(),
    )


def is_ready(programs: Path, folder: Path) -> bool:
    """Whether it takes connections."""
    asked = [str(programs / "bin" / "pg_isready"), "-q", "-U", "segue", "-h", str(folder)]
    return subprocess.run(asked, check=False).returncode == 0
