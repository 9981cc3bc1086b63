"""Can the grammar library of llama.cpp hold this schema or grammar, and live?

The library runs in the process of the model, and a client's grammar can end it: a thousand parts that lead to each
other overflow its stack, large ones take memory without an end. So each grammar is tried first in a child process that
has the same weights, which it shares, a smaller stack, and a limit on memory and time. What the child does not survive
is never given to the model. In: a request as llama.cpp takes it. Out: what llama.cpp said to it, or None. The child is
started by the first trial, and again after one that has ended it.

Both directions are frames: four bytes with the length, then the bytes. The child sends an empty frame when it is
loaded, and after each answer.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from segue.errors import EngineFailed
from segue_embedded.loading import load_server

log = logging.getLogger(__name__)

# How much CPU time a trial may take; how long it may take where the machine is busy with other things; and how long the
# child may take to load the weights.
TRIAL_CPU_S_MAX = 10.0
TRIAL_S_MAX = 40.0
LOAD_S_MAX = 120.0
# What a grammar may take in the child, and so for each slot of the model. Those of real tools take some megabytes.
TRIAL_BYTES_MAX = 256 * 1024 * 1024
# Of the stack that the model's threads have: what just fits here fits there with room to spare.
STACK_SHARE = 0.75
STACK_BYTES = 8 * 1024 * 1024
# A trial has one token of a prompt and one of an answer.
CONTEXT_TOKENS = 64
LENGTH_BYTES = 4


class Trial:
    """The child of one model. Called from the threads of its slots; one trial at a time."""

    def __init__(self, weights: Path) -> None:
        self._weights = weights
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_closed = False

    def run(self, request: bytes) -> list[bytes] | None:
        """What llama.cpp answers; None: the child has not lived to say it."""
        with self._lock:
            child = self._child
            if child is None or child.poll() is not None:
                child = self._child = self._started()
            answer = _answer(child, request, TRIAL_S_MAX)
            if answer is None:
                self._end()
            return answer

    def close(self) -> None:
        """End the child; one that is busy too."""
        self._is_closed = True
        if self._child is not None:
            self._child.kill()
        with self._lock:
            self._end()

    def _started(self) -> subprocess.Popen[bytes]:
        if self._is_closed:
            raise EngineFailed("The engine was stopped.")
        child = subprocess.Popen(
            [sys.executable, "-m", "segue_embedded.trial", str(self._weights)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self._child = child
        if _answer(child, None, LOAD_S_MAX) is None:
            self._end()
            log.error("the process that tries grammars could not be started")
            raise EngineFailed("The engine could not try the schema or grammar of this request.")
        return child

    def _end(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            for pipe in (child.stdin, child.stdout):
                if pipe is not None:
                    pipe.close()


def _answer(
    child: subprocess.Popen[bytes], request: bytes | None, limit_s: float
) -> list[bytes] | None:
    """The frames up to the empty one; None where the child has ended, or was ended because it took too long."""
    requests, answers = child.stdin, child.stdout
    assert requests is not None
    assert answers is not None
    timer = threading.Timer(limit_s, child.kill)
    timer.start()
    try:
        if request is not None:
            _write(requests, request)
        frames = [*iter(lambda: _read(answers), b"")]
    except (OSError, EOFError):
        return None
    finally:
        timer.cancel()
    return frames


def _write(pipe: IO[bytes], data: bytes) -> None:
    pipe.write(len(data).to_bytes(LENGTH_BYTES, "big") + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> bytes:
    length = pipe.read(LENGTH_BYTES)
    data = pipe.read(int.from_bytes(length, "big"))
    if len(length) < LENGTH_BYTES or len(data) < int.from_bytes(length, "big"):
        raise EOFError
    return data


# --- the child ----------------------------------------------------------------------------------------


def main(weights: str) -> None:
    """Answer requests until the parent is gone."""
    answers = os.fdopen(os.dup(1), "wb")
    # What llama.cpp prints must not stand between the frames.
    os.dup2(2, 1)
    server = load_server(
        Path(weights),
        context_tokens=CONTEXT_TOKENS,
        parallel=1,
        threads=1,
        key=os.urandom(16).hex(),
    )
    _limit_memory()
    _write(answers, b"")

    def send(said: bytes) -> bool:
        _write(answers, said)
        return False

    for request in _requests(sys.stdin.buffer):
        # At its end the signal ends the process, also while the library computes.
        signal.setitimer(signal.ITIMER_PROF, TRIAL_CPU_S_MAX)
        server.handle_completions(request, send)
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(answers, b"")
    # Nothing is worth the time that it takes to unload.
    os._exit(0)


def _requests(pipe: IO[bytes]) -> Iterator[bytes]:
    try:
        while True:
            yield _read(pipe)
    except EOFError:
        return


def _limit_memory() -> None:
    """From now on no more than a trial may take; only where the system says what is in use."""
    status = Path("/proc/self/status")
    if not status.exists():
        return
    import resource

    lines = status.read_text().splitlines()
    used = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmData:"))
    limit = used + TRIAL_BYTES_MAX
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _with_small_stack() -> None:
    """Start again with less of a stack: threads take its size when a program begins."""
    if sys.platform == "win32":
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_STACK)
    size = STACK_BYTES if soft == resource.RLIM_INFINITY else soft
    resource.setrlimit(resource.RLIMIT_STACK, (int(size * STACK_SHARE), hard))
    os.execv(sys.executable, [sys.executable, "-m", "segue_embedded.trial", sys.argv[1], "again"])


if __name__ == "__main__":
    if len(sys.argv) < 3:
        _with_small_stack()
    main(sys.argv[1])
