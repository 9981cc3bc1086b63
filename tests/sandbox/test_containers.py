"""When containers end: after idle time, by a clock that the test sets; and what is known of them then."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from segue.isolation.adapter import SandboxFailed
from segue.isolation.limits import Cgroups
from segue.sandbox.containers import ENDED_S, Containers, KeeperFault
from segue.sandbox.messages import ContainerSpec, MakeContainer
from tests.escapes.conftest import sandboxes_can_be_made
from tests.escapes.places import found_here

__all__ = ["sandboxes_can_be_made"]


class Clock:
    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


async def test_container_ends_after_idle_time_and_its_name_is_known_for_a_while(
    folder: Path,
) -> None:
    clock = Clock()
    containers = Containers(
        found_here("bwrap"), Cgroups(), folder, containers_max=8, idle_s=1_200.0, clock=clock
    )
    try:
        for name, idle_s in (("used", None), ("idle", None), ("short", 60.0)):
            containers.create(MakeContainer("me", name, ContainerSpec(idle_s=idle_s)))
            _, place = await containers.place("me", name)
        assert place.folder.exists()
        clock.now += 61
        await containers.sweep()
        assert containers.about(containers.find("me", "short")).status == "expired"
        assert not place.folder.exists()
        clock.now += 1_100
        # Any use keeps it alive, being looked at too.
        containers.find("me", "used")
        clock.now += 100
        await containers.sweep()
        status = {about.id: about.status for about in containers.list("me")}
        assert status == {"used": "active", "idle": "expired", "short": "expired"}
        with pytest.raises(KeeperFault) as refused:
            await containers.place("me", "idle")
        assert refused.value.failure.code == "container_expired"
        assert "not used for too long" in refused.value.failure.message
        clock.now += ENDED_S + 1
        await containers.sweep()
        assert [about.id for about in containers.list("me")] == ["used"]
    finally:
        await containers.close()


async def test_container_that_could_not_be_started_takes_no_place(folder: Path) -> None:
    broken = replace(found_here("bwrap"), program="/nowhere/bwrap")
    containers = Containers(broken, Cgroups(), folder, containers_max=1, idle_s=1_200.0)
    try:
        for name in ("first", "second"):
            containers.create(MakeContainer("me", name, ContainerSpec()))
            held = containers.find("me", name)
            with suppress(SandboxFailed):
                await held.starting
        for code in ("container_failed", "container_expired"):
            with pytest.raises(KeeperFault) as refused:
                await containers.place("me", "second")
            assert refused.value.failure.code == code
    finally:
        await containers.close()


@pytest.mark.parametrize("memory_limit", ["64g"])
async def test_container_larger_than_the_machine_is_refused(
    memory_limit: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("segue.sandbox.containers.memory_max", lambda: 5 << 30)
    containers = Containers(
        found_here("bwrap"), Cgroups(), folder, containers_max=8, idle_s=1_200.0
    )
    with pytest.raises(KeeperFault, match="room for 4g"):
        containers.create(MakeContainer("me", "x", ContainerSpec(memory_limit=memory_limit)))
    await containers.close()
