"""What is a case, and what can come of it?

A case is one claim about a server, with its source and its level, and a coroutine that tries it. `must`: official
clients or the specification break without it. `should`: the documents ask for it, and clients go on without it. `ours`:
an extension, or a reading where the documents are silent.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from segue_conform.target import Target

# JSON of a server that may be wrong in any way: cases look for what they need, by `expect`.
Json = dict[str, Any]

Level = Literal["must", "should", "ours"]
LEVELS: tuple[Level, ...] = ("must", "should", "ours")


class Need(Enum):
    """What a case needs beside the server, in the words of the report."""

    NOTHING = ""
    SCRIPT = "the scripted upstream after the server (the command `upstream`)"
    CONTROL = "the address of the scripted upstream (`--upstream URL`)"
    KEY = "a key (`--key`)"


@dataclass(frozen=True)
class Case:
    """One claim about a server. The name is `api.part.claim`."""

    name: str
    claim: str
    level: Level
    source: str
    run: Callable[[Target], Awaitable[None]]
    need: Need = Need.NOTHING

    @property
    def api(self) -> str:
        return self.name.split(".")[0]

    @property
    def part(self) -> str:
        return ".".join(self.name.split(".")[:2])


class Wrong(Exception):
    """The server does not do what a case claims."""


class Absent(Exception):
    """The server says that it has no such thing at all: the case is counted as absent, and as not passed."""


def expect(holds: object, words: str) -> None:
    """Fail the case with these words unless it holds."""
    if not holds:
        raise Wrong(words)


def equal(seen: object, wanted: object, what: str) -> None:
    """Fail the case where a value is another one."""
    if seen != wanted:
        raise Wrong(f"{what} is {shown(seen)}, not {shown(wanted)}")


def printable(text: str) -> str:
    """Words of a server for a terminal: what is not shown as it is, is escaped."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )


def shown(value: object, length_max: int = 160) -> str:
    """A value of a server, short and printable."""
    text = ascii(value)
    return text if len(text) <= length_max else text[:length_max] + "…"


Verdict = Literal["passed", "failed", "absent", "not run"]


@dataclass(frozen=True)
class Result:
    """What came of a case: a verdict, why, and how long it took."""

    case: Case
    verdict: Verdict
    why: str = ""
    seconds: float = 0.0
