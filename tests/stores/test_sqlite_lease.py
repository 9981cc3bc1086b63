"""A lease holds exactly as long as its process."""

import fcntl
import os
import stat
import time
from pathlib import Path

import pytest

from segue.stores.sql_files import Abilities
from segue.stores.sqlite_lease import Lease, lease_path

KNOWN = Abilities(9, 1, "0.3.0")


@pytest.fixture
def database(tmp_path: Path) -> Path:
    return tmp_path / "segue.db"


def test_living_process_is_alive_and_one_that_left_is_not(database: Path) -> None:
    mine, theirs = Lease.acquire(database, "mine", KNOWN), Lease.acquire(database, "theirs", KNOWN)
    assert mine.is_alive("mine")
    assert mine.is_alive("theirs")
    assert mine.others() == {"theirs"}
    theirs.release()
    assert not mine.is_alive("theirs")
    assert mine.others() == set()
    mine.release()
    assert list(database.parent.iterdir()) == []


def test_asking_twice_changes_nothing(database: Path) -> None:
    mine, theirs = Lease.acquire(database, "mine", KNOWN), Lease.acquire(database, "theirs", KNOWN)
    assert all(mine.is_alive("theirs") and theirs.is_alive("mine") for _ in range(3))
    mine.release()
    theirs.release()


def test_dead_process_is_known_until_it_is_buried(database: Path) -> None:
    mine, dead = Lease.acquire(database, "mine", KNOWN), Lease.acquire(database, "dead", KNOWN)
    os.close(dead.descriptor)
    for _ in range(2):
        assert mine.others() == {"dead"}
        assert not mine.is_alive("dead")
    mine.remove("dead")
    mine.remove("dead")
    assert mine.others() == set()
    mine.release()


def test_lease_is_private_and_two_databases_do_not_meet(database: Path) -> None:
    mine = Lease.acquire(database, "mine", KNOWN)
    other = Lease.acquire(database.with_name("other.db"), "theirs", KNOWN)
    assert mine.others() == set()
    assert stat.S_IMODE(lease_path(database, "mine").stat().st_mode) == 0o600
    mine.release()
    other.release()


def test_process_says_in_its_lease_what_it_knows(database: Path) -> None:
    mine, theirs = Lease.acquire(database, "mine", KNOWN), Lease.acquire(database, "theirs", KNOWN)
    assert mine.older(KNOWN) == []
    assert mine.older(Abilities(10, 1)) == mine.older(Abilities(9, 2)) == ["0.3.0"]
    os.close(theirs.descriptor)
    assert mine.older(Abilities(10, 1)) == [], "a dead process reads nothing"
    mine.release()


def test_lease_that_somebody_only_checks_keeps_nobody_from_starting(
    database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, dead = Lease.acquire(database, "mine", KNOWN), Lease.acquire(database, "dead", KNOWN)
    os.close(dead.descriptor)
    checking = os.open(lease_path(database, "dead"), os.O_RDWR)
    fcntl.flock(checking, fcntl.LOCK_EX)
    monkeypatch.setattr(time, "sleep", lambda _: fcntl.flock(checking, fcntl.LOCK_UN))
    assert mine.older(Abilities(10, 1)) == []
    os.close(checking)
    mine.release()


def test_process_that_says_nothing_is_older_than_all(database: Path) -> None:
    mine, theirs = Lease.acquire(database, "mine", KNOWN), Lease.acquire(database, "theirs", KNOWN)
    os.truncate(theirs.descriptor, 0)
    assert mine.older(Abilities(1, 1)) == [""]
    mine.release()
    theirs.release()
