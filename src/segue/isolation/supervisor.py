"""What runs the commands inside a sandbox? This one file of the standard library, the first process of the sandbox.

It speaks with the keeper over one socket, which commands do not inherit. A frame is the length of its body, a kind,
the number of a command, and the body. As the first process of its namespace it gets no signal from the commands that
would end or stop it, and when it ends, all processes of the sandbox end. The keeper trusts nothing that it says.

    from the keeper   r run, s source of the interpreter, n source of the way to the network, p run Python, k terminate,
                      f kill
    to the keeper     + ready, o out, e err, d Python code is done, x exited, i nothing runs

Python code runs in one process, which stays for the next code: to terminate it is to interrupt it.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress

HEADER = struct.Struct("<IcI")
LENGTH = struct.Struct("<I")
PIECE_BYTES = 65536
# What commands print is read so much at a time, all of them together, and then nothing for so long: one that floods
# waits at its pipe, and costs the machine little.
PAUSE_S = 0.005
# What of a command is read after its shell has ended: what its pipes hold.
REST_BYTES = 1048576
# Above this nothing more is read from commands until the keeper has taken it.
UNSENT_BYTES_MAX = 1048576
# What the interpreter may say of one code: the names of its pictures.
ANSWER_BYTES_MAX = 65536


class CommandRunner:
    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel
        self.unsent = bytearray()
        self.received = bytearray()
        self.poller = select.epoll()
        # What commands print, as one source of the poller, which is left alone until then (0: it is not).
        self.outputs = select.epoll()
        self.paused_until = 0.0
        # The number and kind of each pipe; the process of each command, and its pipes.
        self.pipes: dict[int, tuple[int, bytes]] = {}
        self.commands: dict[int, tuple[int, list[int]]] = {}
        # The interpreter: its source, its process (0: none), the pipes for code, answers and what it prints, what it
        # has answered so far, and the number of the command that it works on (0: none).
        self.source = ""
        self.python = 0
        self.code_in = self.answers = self.printing = -1
        self.answered = bytearray()
        self.coding = 0
        # The number of the last command that came.
        self.last = 0
        # The way to the network, if there is one.
        self.forward: Callable[[int, int], object] = lambda fd, events: None
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
        self.poller.register(self.outputs, select.EPOLLIN)
        self.send(b"+", 0, b"")
        while True:
            left = self.paused_until - time.monotonic() if self.paused_until else None
            if left is not None and left <= 0:
                self.paused_until, left = 0.0, None
                self.listen()
            for fd, events in self.poller.poll(left):
                if fd == self.channel.fileno():
                    if events & select.EPOLLOUT:
                        self.flush()
                    if events & ~select.EPOLLOUT:
                        self.receive()
                elif fd == woken:
                    os.read(woken, 4096)
                    self.reap()
                elif fd == self.outputs.fileno():
                    self.read_outputs()
                elif fd == self.answers:
                    self.read_answer()
                else:
                    self.forward(fd, events)

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
            self.last = max(self.last, number)
            if kind == b"r":
                self.start(number, body)
            elif kind == b"s":
                self.source = body.decode()
            elif kind == b"n":
                self.connect(body)
            elif kind == b"p":
                self.start_code(number, body)
            elif number in self.commands:
                self.end(number, is_asked=kind == b"k")

    def connect(self, source: bytes) -> None:
        """Open the way to the network, and tell the commands to come of it."""
        names: dict[str, Callable[..., Callable[[int, int], object]]] = {}
        exec(source, names)
        self.forward = names["forwarding"](self.poller, os.environ)

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
        if was_full != (len(self.unsent) > UNSENT_BYTES_MAX):
            self.listen()

    def listen(self) -> None:
        """Whether what commands print is read."""
        is_held = self.paused_until or len(self.unsent) > UNSENT_BYTES_MAX
        self.poller.modify(self.outputs, 0 if is_held else select.EPOLLIN)

    # --- commands ---

    def start(self, number: int, command: bytes) -> None:
        pipes = [os.pipe(), os.pipe()]
        places = [(pipe[1], fd) for fd, pipe in enumerate(pipes, 1)]
        try:
            pid = spawn("/bin/sh", [b"/bin/sh", b"-c", command], places)
        except OSError as error:
            self.refuse(number, f"sh: {error.strerror}\n", pipes)
            return
        for kind, (readable, writable) in zip((b"o", b"e"), pipes, strict=True):
            os.close(writable)
            self.follow(readable, number, kind)
        self.commands[number] = (pid, [pipe[0] for pipe in pipes])

    def refuse(self, number: int, words: str, pipes: list[tuple[int, int]]) -> None:
        self.send(b"e", number, words.encode())
        self.send(b"x", number, struct.pack("<i", 126))
        for fd in (fd for pipe in pipes for fd in pipe):
            os.close(fd)

    def follow(self, readable: int, number: int, kind: bytes) -> None:
        os.set_blocking(readable, False)
        self.pipes[readable] = (number, kind)
        self.outputs.register(readable, select.EPOLLIN)

    # --- Python ---

    def start_code(self, number: int, code: bytes) -> None:
        """Give code to the interpreter, which is started if there is none. The keeper sends one code at a time."""
        if self.coding:
            self.refuse(number, "Other code is running.\n", [])
            return
        if not self.python and not self.start_python(number):
            return
        self.read_rest(self.printing)
        self.coding = number
        self.commands[number] = (self.python, [])
        self.pipes[self.printing] = (number, b"o")
        # One that has died is noticed when it is reaped.
        with suppress(BrokenPipeError):
            data = memoryview(LENGTH.pack(len(code)) + code)
            while data:
                data = data[os.write(self.code_in, data) :]

    def start_python(self, number: int) -> bool:
        pipes = [os.pipe(), os.pipe(), os.pipe()]
        (code_out, code_in), (answers, answering), (printing, printed) = pipes
        # Above the numbers that they get inside.
        given = [
            fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 10) for fd in (printed, code_out, answering)
        ]
        places = [(given[0], 1), (given[0], 2), (given[1], 3), (given[2], 4)]
        safe = ["-P"] if sys.version_info >= (3, 11) else []
        try:
            self.python = spawn(sys.executable, [sys.executable, *safe, "-c", self.source], places)
        except OSError as error:
            self.refuse(number, f"python: {error.strerror}\n", pipes)
            return False
        finally:
            for fd in given:
                os.close(fd)
        for fd in (code_out, answering, printed):
            os.close(fd)
        self.code_in, self.answers, self.printing = code_in, answers, printing
        self.answered.clear()
        self.poller.register(answers, select.EPOLLIN)
        self.follow(printing, 0, b"o")
        return True

    def read_answer(self) -> None:
        data = os.read(self.answers, PIECE_BYTES)
        self.answered += data
        if not data or len(self.answered) > ANSWER_BYTES_MAX:
            # It does not speak any more, or something else speaks in its place.
            with suppress(ProcessLookupError):
                os.killpg(self.python, signal.SIGKILL)
            self.poller.modify(self.answers, 0)
            return
        if len(self.answered) >= LENGTH.size:
            (size,) = LENGTH.unpack_from(self.answered)
            if len(self.answered) >= LENGTH.size + size:
                body = bytes(self.answered[LENGTH.size : LENGTH.size + size])
                del self.answered[: LENGTH.size + size]
                self.finish_code(1 if body[:1] == b"1" else 0, body[1:])

    def finish_code(self, code: int, answer: bytes | None = None) -> None:
        """The code is done, or has ended with its process."""
        number, self.coding = self.coding, 0
        if not number:
            return
        del self.commands[number]
        self.read_rest(self.printing)
        if self.printing in self.pipes:
            # What threads print later belongs to no code.
            self.pipes[self.printing] = (0, b"o")
        if answer is not None:
            self.send(b"d", number, answer)
        self.send(b"x", number, struct.pack("<i", code))

    def python_ended(self, code: int) -> None:
        self.finish_code(code)
        self.poller.unregister(self.answers)
        for fd in (self.code_in, self.answers):
            os.close(fd)
        if self.printing in self.pipes:
            self.drop_pipe(self.printing)
        self.python, self.code_in, self.answers, self.printing = 0, -1, -1, -1

    def end(self, number: int, *, is_asked: bool) -> None:
        """End a command; Python code is interrupted first, so that its variables stay."""
        if number != self.coding:
            self.ending.add(number)
            self.end_group(number, signal.SIGTERM if is_asked else signal.SIGKILL)
        elif is_asked:
            with suppress(ProcessLookupError):
                os.kill(self.python, signal.SIGINT)
        else:
            self.end_group(number, signal.SIGKILL)

    def read_outputs(self) -> None:
        ready = self.outputs.poll(0)
        for fd, _ in ready:
            self.read_pipe(fd, PIECE_BYTES // len(ready))
        self.paused_until = time.monotonic() + PAUSE_S
        self.listen()

    def read_pipe(self, fd: int, size: int) -> int:
        number, kind = self.pipes[fd]
        try:
            data = os.read(fd, size)
        except BlockingIOError:
            return 0
        if not data:
            self.drop_pipe(fd)
        elif number:
            self.send(kind, number, data)
        return len(data)

    def drop_pipe(self, fd: int) -> None:
        del self.pipes[fd]
        self.outputs.unregister(fd)
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
                # Orphans are children of the first process: without a child it is alone.
                self.send(b"i", self.last, b"")
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            # As shells say it: 128 and the signal.
            code = 128 - code if code < 0 else code
            if pid == self.python:
                self.python_ended(code)
                continue
            for number, (shell, pipes) in list(self.commands.items()):
                if shell == pid:
                    self.finish(number, pipes, code)

    def finish(self, number: int, pipes: list[int], code: int) -> None:
        if number in self.ending:
            self.ending.discard(number)
            self.end_group(number, signal.SIGKILL)
        del self.commands[number]
        for fd in pipes:
            self.read_rest(fd)
            if fd in self.pipes:
                self.drop_pipe(fd)
        self.send(b"x", number, struct.pack("<i", code))

    def read_rest(self, fd: int) -> None:
        left = REST_BYTES
        while fd in self.pipes and left > 0 and (size := self.read_pipe(fd, PIECE_BYTES)):
            left -= size


def spawn(program: str, words: list[str] | list[bytes], places: list[tuple[int, int]]) -> int:
    """Start a process in a session of its own, with these descriptors at these places."""
    actions = (
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        *((os.POSIX_SPAWN_DUP2, fd, place) for fd, place in places),
    )
    reset = range(1, signal.NSIG)
    return os.posix_spawn(
        program,
        words,
        os.environ,
        file_actions=actions,
        setsid=True,
        setsigdef=[each for each in reset if each not in (signal.SIGKILL, signal.SIGSTOP)],
        setsigmask=[],
    )


def confine(limits: list[int]) -> None:
    """What no process of the sandbox may exceed, of files, processes and sizes."""
    kinds = (resource.RLIMIT_NOFILE, resource.RLIMIT_NPROC, resource.RLIMIT_FSIZE)
    for kind, most in zip(kinds, limits, strict=True):
        if most:
            _, hard = resource.getrlimit(kind)
            most = most if hard == resource.RLIM_INFINITY else min(most, hard)
            resource.setrlimit(kind, (most, most))
    # At 0 a program of the host that takes crashes would still be started, as root; at 1 the kernel starts none.
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_CORE, (1, 1))


if __name__ == "__main__":
    confine([int(word) for word in sys.argv[2:5]])
    # Signals that Python itself would act on.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=int(sys.argv[1]))
    channel.set_inheritable(False)
    CommandRunner(channel).serve()
