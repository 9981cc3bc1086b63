"""What runs the commands inside a sandbox? This one file of the standard library, the first process of the sandbox.

It speaks with the keeper over one socket, which commands do not inherit. A frame is the length of its body, a kind,
the number of a command, and the body. As the first process of its namespace it gets no signal from the commands that
would end or stop it, and when it ends, all processes of the sandbox end. The keeper trusts nothing that it says.

    from the keeper   r run, k terminate, f kill           to the keeper   + ready, o out, e err, x exited
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import struct
import sys
from contextlib import suppress

HEADER = struct.Struct("<IcI")
PIECE_BYTES = 65536
# What of a command is read after its shell has ended: what its pipes hold.
REST_BYTES = 1048576
# Above this nothing more is read from commands until the keeper has taken it.
UNSENT_BYTES_MAX = 1048576


class CommandRunner:
    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.unsent = bytearray()
        self.received = bytearray()
        self.poller = select.epoll()
        # The number and kind of each pipe; the process of each command, and its pipes.
        self.pipes: dict[int, tuple[int, bytes]] = {}
        self.commands: dict[int, tuple[int, list[int]]] = {}
        # Commands that are to end: with their shell everything ends that is in its group.
        self.ending: set[int] = set()

    def serve(self) -> None:
        self.channel.setblocking(False)
        self.poller.register(self.channel, select.EPOLLIN)
        woken, wake = os.pipe()
        os.set_blocking(wake, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        self.poller.register(woken, select.EPOLLIN)
        self.send(b"+", 0, b"")
        while True:
            for fd, events in self.poller.poll():
                if fd == self.channel.fileno():
                    if events & select.EPOLLOUT:
                        self.flush()
                    if events & ~select.EPOLLOUT:
                        self.receive()
                elif fd == woken:
                    os.read(woken, 4096)
                    self.reap()
                elif fd in self.pipes:
                    self.read_pipe(fd)

    # --- the keeper ---

    def receive(self) -> None:
        data = self.channel.recv(PIECE_BYTES)
        if not data:
            os._exit(0)
        self.received += data
        while len(self.received) >= HEADER.size:
            size, kind, number = HEADER.unpack_from(self.received)
            if len(self.received) < HEADER.size + size:
                return
            body = bytes(self.received[HEADER.size : HEADER.size + size])
            del self.received[: HEADER.size + size]
            if kind == b"r":
                self.start(number, body)
            elif number in self.commands:
                self.ending.add(number)
                self.end_group(number, signal.SIGTERM if kind == b"k" else signal.SIGKILL)

    def send(self, kind: bytes, number: int, body: bytes) -> None:
        self.unsent += HEADER.pack(len(body), kind, number) + body
        self.flush()

    def flush(self) -> None:
        was_full = len(self.unsent) > UNSENT_BYTES_MAX
        while self.unsent:
            try:
                sent = self.channel.send(self.unsent)
            except BlockingIOError:
                break
            del self.unsent[:sent]
        self.poller.modify(self.channel, select.EPOLLIN | (select.EPOLLOUT if self.unsent else 0))
        is_full = len(self.unsent) > UNSENT_BYTES_MAX
        if is_full != was_full:
            for fd in self.pipes:
                self.poller.modify(fd, 0 if is_full else select.EPOLLIN)

    # --- commands ---

    def start(self, number: int, command: bytes) -> None:
        pipes = [os.pipe(), os.pipe()]
        actions = (
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            *((os.POSIX_SPAWN_DUP2, pipe[1], fd) for fd, pipe in enumerate(pipes, 1)),
        )
        words = [b"/bin/sh", b"-c", command]
        reset = range(1, signal.NSIG)
        try:
            pid = os.posix_spawn(
                "/bin/sh",
                words,
                os.environ,
                file_actions=actions,
                setsid=True,
                setsigdef=[each for each in reset if each not in (signal.SIGKILL, signal.SIGSTOP)],
                setsigmask=[],
            )
        except OSError as error:
            self.send(b"e", number, f"sh: {error.strerror}\n".encode())
            self.send(b"x", number, struct.pack("<i", 126))
            for fd in (fd for pipe in pipes for fd in pipe):
                os.close(fd)
            return
        for kind, (readable, writable) in zip((b"o", b"e"), pipes, strict=True):
            os.close(writable)
            os.set_blocking(readable, False)
            self.pipes[readable] = (number, kind)
            is_full = len(self.unsent) > UNSENT_BYTES_MAX
            self.poller.register(readable, 0 if is_full else select.EPOLLIN)
        self.commands[number] = (pid, [pipe[0] for pipe in pipes])

    def read_pipe(self, fd: int) -> int:
        number, kind = self.pipes[fd]
        try:
            data = os.read(fd, PIECE_BYTES)
        except BlockingIOError:
            return 0
        if data:
            self.send(kind, number, data)
        else:
            self.drop_pipe(fd)
        return len(data)

    def drop_pipe(self, fd: int) -> None:
        del self.pipes[fd]
        self.poller.unregister(fd)
        os.close(fd)

    def end_group(self, number: int, how: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.commands[number][0], how)

    def reap(self) -> None:
        """Commands that have ended, and orphans. A command is over when its shell is, whatever else has its pipes."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            for number, (shell, pipes) in list(self.commands.items()):
                if shell == pid:
                    self.finish(number, pipes, os.waitstatus_to_exitcode(status))

    def finish(self, number: int, pipes: list[int], code: int) -> None:
        if number in self.ending:
            self.ending.discard(number)
            self.end_group(number, signal.SIGKILL)
        del self.commands[number]
        for fd in pipes:
            left = REST_BYTES
            while fd in self.pipes and left > 0 and (size := self.read_pipe(fd)):
                left -= size
            if fd in self.pipes:
                self.drop_pipe(fd)
        # As shells say it: 128 and the signal.
        self.send(b"x", number, struct.pack("<i", 128 - code if code < 0 else code))


def confine(limits: list[int]) -> None:
    """What no process of the sandbox may exceed, of files, processes and sizes; and it is the first to go."""
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE)
    for kind, most in zip(kinds, limits, strict=True):
        if most:
            resource.setrlimit(kind, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


if __name__ == "__main__":
    confine([int(word) for word in sys.argv[2:5]])
    # Signals that Python itself would act on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    CommandRunner(channel).serve()
