"""How does a word reach those who listen in this process?

In: topics and what is said about them. Out: calls of everybody who listens to that topic. It is the whole `Bus` of a
server that is alone, and the last step of every other one.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from segue.turn.seams import Hear

log = logging.getLogger(__name__)


class Hearers:
    """Who listens to what."""

    def __init__(self) -> None:
        self._by_topic: dict[str, list[Hear]] = {}

    @property
    def topics(self) -> list[str]:
        """Everything that somebody listens to."""
        return list(self._by_topic)

    def add(self, topic: str, hear: Hear) -> bool:
        """Listen; whether this is the first one for the topic."""
        hearers = self._by_topic.setdefault(topic, [])
        hearers.append(hear)
        return len(hearers) == 1

    def remove(self, topic: str, hear: Hear) -> bool:
        """Listen no more; whether this was the last one for the topic."""
        hearers = self._by_topic[topic]
        hearers.remove(hear)
        if not hearers:
            del self._by_topic[topic]
        return not hearers

    def deliver(self, topic: str, body: bytes) -> None:
        """Call everybody. One who fails must not keep it from the others."""
        for hear in tuple(self._by_topic.get(topic, ())):
            try:
                hear(body)
            except Exception:
                log.exception("a message about %s could not be heard", topic.partition("/")[0])


class LocalBus:
    """The bus of a process that is alone."""

    def __init__(self) -> None:
        self._hearers = Hearers()

    async def publish(self, topic: str, body: bytes) -> None:
        """Call everybody who listens, now."""
        self._hearers.deliver(topic, body)

    @asynccontextmanager
    async def subscribe(self, topic: str, hear: Hear) -> AsyncIterator[None]:
        """Listen while inside."""
        self._hearers.add(topic, hear)
        try:
            yield
        finally:
            self._hearers.remove(topic, hear)
