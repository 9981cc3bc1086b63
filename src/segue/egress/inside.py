"""How do programs in a sandbox reach the proxy? At 127.0.0.1:3128, from where connections go to its door.

This is read by the supervisor inside the sandbox and run there, in its loop: one file of the standard library. It
copies bytes and understands nothing of them.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable, MutableMapping
from contextlib import suppress

PORT = 3128
DOOR = "/run/door/proxy"
# Two descriptors for each; the supervisor needs some for commands.
PAIRS_MAX = 128
PIECE_BYTES = 65536
URL = f"http://127.0.0.1:{PORT}"
NEVER = "localhost,127.0.0.1,::1"
VARIABLES = {
    **dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), URL),
    **dict.fromkeys(("no_proxy", "NO_PROXY"), NEVER),
    # Node takes the variables above only if it is told to.
    "NODE_USE_ENV_PROXY": "1",
}


def forwarding(
    poller: select.epoll, environment: MutableMapping[str, str]
) -> Callable[[int, int], None]:
    """Listen, and set the variables by which programs find the proxy; returns what takes the events of the poller."""
    forwarder = Forwarder(poller)
    environment.update(VARIABLES)
    return forwarder.on_event


class Forwarder:
    def __init__(self, poller: select.epoll) -> None:
        self.poller = poller
        self.listener = socket.create_server(("127.0.0.1", PORT), backlog=PAIRS_MAX)
        self.listener.setblocking(False)
        # The other end of each, by its number; what waits to be written to it; those from which nothing follows.
        self.ends: dict[int, tuple[socket.socket, socket.socket]] = {}
        self.unsent: dict[int, bytes] = {}
        self.finished: set[int] = set()
        self.polled: set[socket.socket] = set()
        poller.register(self.listener, select.EPOLLIN)

    def on_event(self, fd: int, events: int) -> None:
        if fd == self.listener.fileno():
            self.accept()
        elif fd in self.ends:
            own, other = self.ends[fd]
            try:
                if events & select.EPOLLOUT:
                    self.flush(own, other)
                if events & ~select.EPOLLOUT and fd in self.ends:
                    self.copy(own, other)
            except OSError:
                self.drop(fd)

    def accept(self) -> None:
        with suppress(OSError):
            near, _ = self.listener.accept()
            far = socket.socket(socket.AF_UNIX)
            far.setblocking(False)
            near.setblocking(False)
            try:
                far.connect(DOOR)
            except OSError:
                near.close()
                far.close()
                return
            for own, other in ((near, far), (far, near)):
                self.ends[own.fileno()] = (own, other)
                self.unsent[own.fileno()] = b""
            self.follow(near, far)
            self.follow(far, near)
        self.admit()

    def admit(self) -> None:
        """Further connections wait while there are many."""
        is_full = len(self.ends) >= 2 * PAIRS_MAX
        self.poller.modify(self.listener, 0 if is_full else select.EPOLLIN)

    def copy(self, own: socket.socket, other: socket.socket) -> None:
        if own.fileno() in self.finished or self.unsent[other.fileno()]:
            # Nothing is to be read from it now.
            return
        data = own.recv(PIECE_BYTES)
        if data:
            self.unsent[other.fileno()] = data
        else:
            self.finished.add(own.fileno())
        self.flush(other, own)

    def flush(self, own: socket.socket, other: socket.socket) -> None:
        """Write what waits for `own`, which came from `other`."""
        with suppress(BlockingIOError):
            while self.unsent[own.fileno()]:
                sent = own.send(self.unsent[own.fileno()])
                self.unsent[own.fileno()] = self.unsent[own.fileno()][sent:]
        if not self.unsent[own.fileno()] and other.fileno() in self.finished:
            own.shutdown(socket.SHUT_WR)
            if own.fileno() in self.finished:
                self.drop(own.fileno())
                return
        self.follow(own, other)
        self.follow(other, own)

    def follow(self, own: socket.socket, other: socket.socket) -> None:
        """Read while the other end takes it; write while something waits. One that is neither read nor written is not
        polled: that it was closed would be said again and again."""
        is_read = own.fileno() not in self.finished and not self.unsent[other.fileno()]
        events = select.EPOLLIN if is_read else 0
        events |= select.EPOLLOUT if self.unsent[own.fileno()] else 0
        if events and own in self.polled:
            self.poller.modify(own, events)
        elif events:
            self.polled.add(own)
            self.poller.register(own, events)
        elif own in self.polled:
            self.polled.discard(own)
            self.poller.unregister(own)

    def drop(self, fd: int) -> None:
        for end in self.ends[fd]:
            number = end.fileno()
            del self.ends[number], self.unsent[number]
            self.finished.discard(number)
            if end in self.polled:
                self.polled.discard(end)
                self.poller.unregister(end)
            end.close()
        self.admit()
