"""What can an operator do with a running server? Ask for its status, stop it, have it read its settings again, and
take replicas of engines out of service.

The same for one process and for a parent with workers: a *member* is a process that serves, and takes orders itself or
over its socket. New settings come into force everywhere or nowhere: every member checks them first and prepares what is
new, and only then do all of them change over, which cannot fail. A member that dies in between starts with the new
settings.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

import msgspec
from msgspec import structs

from segue import __version__
from segue.errors import ApiError, Misconfigured
from segue.server.control import (
    ANSWER_S_MAX,
    RELOAD_S_MAX,
    Answer,
    NotRunning,
    Reloaded,
    ServerStatus,
    WorkerStatus,
)
from segue.server.reload import compare
from segue.settings.values import Settings

log = logging.getLogger(__name__)

# Reads flags, environment and file again.
ReadSettings = Callable[[], Settings]
# Takes a verb, a body and how long the answer may take.
Member = Callable[[str, bytes, float], Awaitable[bytes]]

encode = msgspec.json.encode
# How often an engine that does not answer is asked for the name of its model.
NAME_S = 2.0


class Operator:
    """Answers the operator of a server."""

    def __init__(
        self,
        settings: Settings,
        url: str,
        members: Callable[[], Mapping[str, Member]],
        stop: Callable[[], None],
        read_settings: ReadSettings,
        on_reload: Callable[[Settings], None] = lambda settings: None,
    ) -> None:
        """`members` are those that serve now, each by a name that no later one has; `on_reload` hears of new settings
        before they are in force."""
        self.settings = settings
        self._url = url
        self._members = members
        self._stop = stop
        self._read_settings = read_settings
        self._on_reload = on_reload
        self._started_at = time.time()
        self._reloaded_at: float | None = None
        self._reloading = asyncio.Lock()

    @property
    def answers(self) -> dict[str, Answer]:
        """What it does for each order."""
        return {
            "status": self._status,
            "stop": self._stopped,
            "reload": self._reload,
            "engines": partial(self._pass_on, "engines"),
            "drain": partial(self._pass_on, "drain"),
        }

    async def reload_at(self, signal: asyncio.Event) -> None:
        """Read the settings again each time that this is set; the log says how it went."""
        while True:
            await signal.wait()
            signal.clear()
            try:
                await self._reload(b"")
            except (Misconfigured, ApiError):
                # Logged where it was noticed.
                continue
            except Exception:
                log.exception("the settings were not reloaded")

    async def name_model(self) -> None:
        """Where no model is named and no engine answered at the start: serve the engine's own, once it answers."""
        known = ""
        while True:
            await asyncio.sleep(NAME_S)
            if not self.settings.is_unnamed:
                continue
            try:
                if not (await asyncio.to_thread(self._read_settings)).is_unnamed:
                    await self._reload(b"")
            except (Misconfigured, ApiError) as error:
                if str(error) != known:
                    log.error("the engine's model is not served: %s", error)
                known = str(error)

    async def _ask_members(self) -> list[WorkerStatus]:
        asked = (member("status", b"", ANSWER_S_MAX) for member in self._members().values())
        answers = await asyncio.gather(*asked, return_exceptions=True)
        found = [answer for answer in answers if isinstance(answer, bytes)]
        return [msgspec.json.decode(answer, type=WorkerStatus) for answer in found]

    async def _status(self, body: bytes) -> bytes:
        return encode(
            ServerStatus(
                pid=os.getpid(),
                version=__version__,
                url=self._url,
                store=self.settings.shown_store,
                started_at=self._started_at,
                reloaded_at=self._reloaded_at,
                grace_s=self.settings.grace_s,
                workers_wanted=self.settings.workers,
                workers=await self._ask_members(),
            )
        )

    async def _pass_on(self, verb: str, body: bytes) -> bytes:
        """An order that one member carries out for all."""
        members = list(self._members().values())
        if not members:
            raise Misconfigured("no worker is ready. Try again.")
        return await members[0](verb, body, ANSWER_S_MAX)

    async def _stopped(self, body: bytes) -> bytes:
        """`now` skips the grace period, as a second signal does."""
        self._stop()
        if body == b"now":
            self._stop()
        return b""

    async def _reload(self, body: bytes) -> bytes:
        async with self._reloading:
            try:
                result = await self._reload_all()
            except (Misconfigured, ApiError) as error:
                log.error("the settings were not reloaded, nothing has changed: %s", error)
                raise
        log.info("settings reloaded; changed: %s", ", ".join(result.changed) or "nothing")
        if result.needs_restart:
            log.warning("these settings need a restart: %s", ", ".join(result.needs_restart))
        if result.silent_engines:
            log.warning("these engines do not answer: %s", ", ".join(result.silent_engines))
        return encode(result)

    async def _reload_all(self) -> Reloaded:
        read = still_named(await asyncio.to_thread(self._read_settings), self.settings)
        wanted, result = compare(self.settings, read)
        members = self._members()
        body = encode(wanted)
        checks = (member("check", body, RELOAD_S_MAX) for member in members.values())
        found = await asyncio.gather(*checks, return_exceptions=True)
        problems = [error for error in found if isinstance(error, BaseException)]
        if len(members) < self.settings.workers or members.keys() != self._members().keys():
            problems.insert(0, Misconfigured("a worker is being restarted. Try again."))
        if problems:
            drops = (member("drop", b"", ANSWER_S_MAX) for member in members.values())
            await asyncio.gather(*drops, return_exceptions=True)
            raise problems[0]
        self.settings = wanted
        self._on_reload(wanted)
        applies = (member("apply", b"", ANSWER_S_MAX) for member in members.values())
        for error in await asyncio.gather(*applies, return_exceptions=True):
            # It is dead or hangs: the next one begins with the new settings.
            if isinstance(error, BaseException) and not isinstance(error, NotRunning):
                log.error("a worker did not take the new settings over: %s", error)
        self._reloaded_at = time.time()
        engines = [engine for worker in await self._ask_members() for engine in worker.engines]
        silent = {engine.name for engine in engines if not engine.is_up and not engine.is_drained}
        return structs.replace(result, silent_engines=sorted(silent))


def still_named(read: Settings, served: Settings) -> Settings:
    """The settings with the model that is served, where they name none and the engine does not say its name now."""
    is_same = (read.engine, read.engine_url) == (served.engine, served.engine_url)
    return structs.replace(read, model=served.model) if read.is_unnamed and is_same else read
