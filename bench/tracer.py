"""Which functions of the package does a turn go through? A server in this process, with a profile hook around it.

    python -m bench.tracer CONTROL PACKAGE serve …

`CONTROL` is the number of an open socket, `PACKAGE` the folder of the package to watch, the rest goes to `segue`. Each
line that comes over the socket is answered with one line of JSON: `on` forgets everything and records, `hops` is the
number of hops since then, `calls` the number of all calls and resumptions, which says whether anything goes on, `off`
ends the recording and gives it back, and `ignore` ends it so that its hops are left out from now on. The end of the
socket ends the server.

Of the package only the command line's `main` is named here, so that the same tracer runs on any checkout.
"""

from __future__ import annotations

import dis
import inspect
import json
import os
import signal
import socket
import sys
import threading
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

# A file below the package, and the name of a function in it.
Spot = tuple[str, str]

IS_RESUMED = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
# `RESUME 0` is the start of a function; after a yield or an await the lowest two bits are not zero.
RESUME_PLACE = 0b11


def spot_of(code: CodeType, package: str) -> Spot | None:
    """Where this code is written; None for other people's code, and for what is no function with a name."""
    if not code.co_filename.startswith(package):
        return None
    # Class bodies and modules have no fast locals. The names of comprehensions and lambdas are in angle brackets.
    if not code.co_flags & inspect.CO_OPTIMIZED or code.co_name.startswith("<"):
        return None
    return code.co_filename.removeprefix(package), code.co_qualname


def start_of(code: CodeType) -> int:
    """The offset of the instruction at which a call of this code is reported for the first time."""
    for step in dis.get_instructions(code):
        if step.opname == "RESUME" and (step.arg or 0) & RESUME_PLACE == 0:
            return step.offset
    return 0


@dataclass
class Recorder:
    """Hops, in the order in which each occurs for the first time."""

    # The folder, with a separator at its end.
    package: str
    is_on: bool = False
    hops: dict[tuple[Spot | None, Spot], None] = field(default_factory=dict)
    tasks: int = 0
    calls: int = 0
    _ignored: set[tuple[Spot | None, Spot]] = field(default_factory=set)
    _spots: dict[CodeType, Spot | None] = field(default_factory=dict)
    _starts: dict[CodeType, int] = field(default_factory=dict)
    # What runs the event loop: it is below every callback on the stack, and calls none of them.
    _below: frozenset[FrameType] = frozenset()

    def on(self) -> None:
        """Forget what was recorded, and record."""
        stack = sys._current_frames()[threading.main_thread().ident or 0]
        self._below = frozenset(
            frame for frame in _frames(stack) if not frame.f_code.co_flags & IS_RESUMED
        )
        self.hops, self.tasks, self.is_on = {}, 0, True

    def off(self) -> dict[str, Any]:
        """End the recording; what was recorded."""
        self.is_on, self._below = False, frozenset()
        return {"hops": list(self.hops), "tasks": self.tasks}

    def ignore(self) -> None:
        """End the recording; what was recorded is nobody's turn, now and later."""
        self._ignored.update(self.hops)
        self.off()

    def see(self, frame: FrameType, event: str, _: object) -> None:
        """The profile hook: a function begins, is resumed, or ends."""
        if event != "call" or (callee := self._spot(frame.f_code)) is None:
            return
        self.calls += 1
        if not self.is_on or not self._begins(frame):
            return
        caller = self._caller(frame)
        if (caller, callee) in self._ignored:
            return
        self.hops.setdefault((caller, callee))
        if caller is None and frame.f_code.co_flags & inspect.CO_COROUTINE:
            self.tasks += 1

    def _begins(self, frame: FrameType) -> bool:
        code = frame.f_code
        if not code.co_flags & IS_RESUMED:
            return True
        if code not in self._starts:
            self._starts[code] = start_of(code)
        return frame.f_lasti <= self._starts[code]

    def _caller(self, frame: FrameType) -> Spot | None:
        above = frame.f_back
        while above is not None and above not in self._below:
            if (spot := self._spot(above.f_code)) is not None:
                return spot
            above = above.f_back
        return None

    def _spot(self, code: CodeType) -> Spot | None:
        try:
            return self._spots[code]
        except KeyError:
            found = self._spots[code] = spot_of(code, self.package)
            return found


def _frames(frame: FrameType | None) -> list[FrameType]:
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def obey(control: socket.socket, recorder: Recorder) -> None:
    """Answer each line of the socket; at its end, stop the server."""
    with control, control.makefile("rw") as lines:
        for line in lines:
            answer: object = None
            match line.strip():
                case "on":
                    recorder.on()
                case "hops":
                    answer = len(recorder.hops)
                case "calls":
                    answer = recorder.calls
                case "ignore":
                    recorder.ignore()
                case "off":
                    answer = recorder.off()
                case word:
                    answer = f"'{word}' is not known"
            lines.write(json.dumps(answer) + "\n")
            lines.flush()
    os.kill(os.getpid(), signal.SIGTERM)


def main(arguments: list[str]) -> int:
    """Serve, watched."""
    control, package, *command = arguments
    import segue

    assert segue.__file__ is not None
    if Path(segue.__file__).parent != Path(package):
        print(f"walk: the package is loaded from {segue.__file__}, not from {package}")
        return 1
    recorder = Recorder(package + os.sep)
    listener = socket.socket(fileno=int(control))
    threading.Thread(target=obey, args=(listener, recorder), daemon=True).start()
    threading.setprofile(recorder.see)
    sys.setprofile(recorder.see)
    # Up to 0.3.0 the command line was a part of the package.
    has_cli = (Path(package).parent / "segue_cli").is_dir()
    cli = import_module("segue_cli.cli" if has_cli else "segue.cli")
    return int(cli.main(command))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
