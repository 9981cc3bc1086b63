"""How much does the folder of a sandbox hold? Counted in a process of its own: `python -m segue.sandbox.counter`.

A folder with many files takes long to count: this process gives way to all that the server does. A line on standard
input is a number of files and a folder, a line of the answer is its bytes and its files. Folders that a sandbox has
closed to everybody are counted too: where the keeper is not root, this process is that in a namespace of its own.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import sys
from contextlib import suppress

from segue.sandbox.beneath import open_beneath

# More than sandboxes have, less than others.
NICE = 3
# Shorter than what the kernel takes as a path.
PATH_BYTES_MAX = 3_500
NEW_USERS, PARENT_DEATH = 0x10000000, 1


def disk_use(folder: str, files_max: int) -> tuple[int, int]:
    """The bytes and the files below a folder; stops counting shortly after the limit of files. Folders that are too
    deep to be looked into, or closed, count as too many files."""
    size = count = 0
    root = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    todo = ["."]
    try:
        while todo and count <= files_max:
            place = todo.pop()
            if len(os.fsencode(place)) > PATH_BYTES_MAX:
                return size, files_max + 1
            try:
                at = _opened(root, place)
            except PermissionError:
                return size, files_max + 1
            except OSError:
                continue
            try:
                with os.scandir(at) as entries:
                    for entry in entries:
                        count += 1
                        with suppress(OSError):
                            size += entry.stat(follow_symlinks=False).st_blocks * 512
                            if entry.is_dir(follow_symlinks=False):
                                todo.append(f"{place}/{entry.name}")
                        if count > files_max:
                            break
            finally:
                os.close(at)
    finally:
        os.close(root)
    return size, count


def _opened(root: int, place: str) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
    try:
        return open_beneath(root, place, flags)
    except OSError as error:
        # Before Linux 5.6; a link on the way leads to a wrong sum, and to nothing else.
        if error.errno != errno.ENOSYS:
            raise
        return os.open(place, flags | os.O_NOFOLLOW, dir_fd=root)


def become_root_of_own() -> None:
    """Root of a user namespace that has this user alone, where one may be made: it may look into what is closed."""
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0 or ctypes.CDLL(None).unshare(NEW_USERS):
        return
    for name, line in (("setgroups", "deny"), ("uid_map", f"0 {uid} 1"), ("gid_map", f"0 {gid} 1")):
        with suppress(OSError), open(f"/proc/self/{name}", "w") as file:
            file.write(line)


def main() -> None:
    ctypes.CDLL(None).prctl(PARENT_DEATH, signal.SIGKILL, 0, 0, 0)
    os.nice(NICE)
    become_root_of_own()
    for line in sys.stdin.buffer:
        files_max, _, folder = line.decode().strip().partition(" ")
        size = count = 0
        # It may be gone already.
        with suppress(OSError):
            size, count = disk_use(folder, int(files_max))
        sys.stdout.write(f"{size} {count}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
