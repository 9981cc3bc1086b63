"""How does a message reach the listeners of its topic in this process?

`TopicListeners` is the last step of every bus. `LocalBus` is that step alone: the bus of workers that share a process,
as in tests.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from segue.seams.bus import Hear

log = logging.getLogger(__name__)


class TopicListeners:
    """The listeners of this process, by topic."""

    def __init__(self) -> None:
        self._by_topic: dict[str, list[Hear]] = {}

    @property
    def topics(self) -> list[str]:
        """The topics that have a listener."""
        return list(self._by_topic)

    def add(self, topic: str, hear: Hear) -> bool:
        """Add a listener; True if it is the first of its topic."""
        listeners = self._by_topic.setdefault(topic, [])
        listeners.append(hear)
        return len(listeners) == 1

    def remove(self, topic: str, hear: Hear) -> bool:
        """Remove a listener; True if it was the last of its topic."""
        listeners = self._by_topic[topic]
        listeners.remove(hear)
        if not listeners:
            del self._by_topic[topic]
        return not listeners

    def deliver(self, topic: str, body: bytes) -> None:
        """Call every listener of the topic. One that fails must not keep the message from the others."""
        for hear in tuple(self._by_topic.get(topic, ())):
            try:
                hear(body)
            except Exception:
                # What follows the slash names a worker or a turn.
                log.exception("listener for bus topic %s failed", topic.partition("/")[0])


class LocalBus:
    """A `Bus` within one process."""

    def __init__(self) -> None:
        self._listeners = TopicListeners()

    async def publish(self, topic: str, body: bytes) -> None:
        self._listeners.deliver(topic, body)

    @asynccontextmanager
    async def subscribe(self, topic: str, hear: Hear) -> AsyncIterator[None]:
        self._listeners.add(topic, hear)
        try:
            yield
        finally:
            self._listeners.remove(topic, hear)
