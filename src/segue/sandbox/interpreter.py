"""What runs the Python code of a model inside a sandbox? This one file of the standard library.

The supervisor starts it. Variables last from one piece of code to the next. The value of a last expression is shown as
a notebook shows it, and so is a traceback; open figures of matplotlib are saved as files. Code comes on descriptor 3,
each after its length; on 4 goes the length of an answer, `0` or `1` where the code has raised, and the names of the
pictures as JSON. Code that writes there itself deceives nobody but its own container.
"""

from __future__ import annotations

import ast
import builtins
import json
import linecache
import os
import signal
import struct
import sys
import traceback
import types
from itertools import count
from typing import NoReturn

LENGTH = struct.Struct("<I")
REQUESTS, ANSWERS = 3, 4
FOLDER = "/mnt/data"
# Pictures of one piece of code; more are saved, and not shown.
PICTURES_MAX = 16


def read(size: int) -> bytes:
    data = b""
    while len(data) < size:
        piece = os.read(REQUESTS, size - len(data))
        if not piece:
            os._exit(0)
        data += piece
    return data


def no_input(prompt: object = "", /) -> NoReturn:
    """There is no terminal."""
    raise RuntimeError(
        "input() cannot be used here: there is no terminal. Put the values into the code."
    )


def run(source: str, name: str, names: dict[str, object]) -> None:
    """Run the code, and show the value of its last expression."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    evaluate(compile(tree, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)
    if isinstance(last, ast.Expr):
        shown = compile(ast.Expression(last.value), name, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        value = evaluate(shown, names)
        if value is not None:
            names["_"] = value
            print(repr(value))


def evaluate(code: types.CodeType, names: dict[str, object]) -> object:
    value = eval(code, names)
    # A coroutine, where the code has an `await` outside of functions.
    if code.co_flags & 0x80:
        import asyncio

        return asyncio.run(value)
    return value


def save_figures() -> list[str]:
    """The open figures as files; their names."""
    pyplot = sys.modules.get("matplotlib.pyplot")
    if pyplot is None:
        return []
    names = []
    for number in pyplot.get_fignums()[:PICTURES_MAX]:
        free = (f"figure-{n}.png" for n in count(1))
        name = next(name for name in free if not os.path.exists(f"{FOLDER}/{name}"))
        pyplot.figure(number).savefig(f"{FOLDER}/{name}", bbox_inches="tight")
        names.append(name)
    pyplot.close("all")
    return names


def answer(source: str, name: str, names: dict[str, object]) -> bytes:
    has_raised, pictures = b"0", []
    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run(source, name, names)
        pictures = save_figures()
    except BaseException as error:
        has_raised = b"1"
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != name:
            trace = trace.tb_next
        traceback.print_exception(type(error), error, trace)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            has_raised = b"1"
    return has_raised + json.dumps(pictures).encode()


def serve() -> None:
    for fd in (REQUESTS, ANSWERS):
        os.set_inheritable(fd, False)
    builtins.input = no_input
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    sys.path.insert(0, "")
    sys.argv = [""]
    # What is printed is seen at once, and in the order of both streams.
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    for number in count(1):
        (size,) = LENGTH.unpack(read(LENGTH.size))
        said = answer(read(size).decode(), f"<code {number}>", module.__dict__)
        os.write(ANSWERS, LENGTH.pack(len(said)) + said)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve()
