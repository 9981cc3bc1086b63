"""Does a test fail when the fix is taken out that it was written for?

    python -m tests.proofs            # each removal and its test, one after the other; a minute or two
    python -m tests.proofs guard-windows

Each row takes one fix out of the real code and runs one test, which must fail then, and pass with it. What the growth
fuzzer and the simulator find without a fix is in `tests/growth/removals.py` and `tests/simulator/removals.py`.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import pytest

from segue.wire.codec import encode

VARIABLE = "SEGUE_TEST_WITHOUT"
RUN_S_MAX = 120


@dataclass(frozen=True)
class Proof:
    """A fix that is taken out: where, what stands there instead, and the test that must notice."""

    what: str
    place: str
    instead: Callable[[Any], Any]
    test: str


def slices(_: Any) -> Callable[[str], Iterator[tuple[str, bool]]]:
    """A guard that reads slices which know nothing of each other."""

    def windows(text: str) -> Iterator[tuple[str, bool]]:
        for start in range(0, len(text), 32_768):
            yield text[start : start + 32_768], start + 32_768 >= len(text)

    return windows


def in_the_clear(_: Any) -> Callable[..., Any]:
    """A request that is written as it came."""

    async def with_request(turn: Any, create: Any, key: str, _: Any) -> Any:
        return replace(turn, request=msgspec.msgpack.encode((key, encode(create))))

    return with_request


def unawaited(_: Any) -> Callable[..., Any]:
    """A beginning that nobody waits for any more once the turn is cancelled."""

    async def save_begun(_: Any, turn: Any, save: Any) -> None:
        await save(turn)

    return save_begun


PROOFS: dict[str, Proof] = {
    "sealed-requests": Proof(
        "a queued response has the secrets of its MCP servers in a file",
        "segue.process.runner:with_request",
        in_the_clear,
        "tests/scenarios/test_queued.py -k secrets_of_a_queued_response",
    ),
    "guard-windows": Proof(
        "a word that spans two slices of a long text passes a guard",
        "segue.guards.rules:_windows",
        slices,
        "tests/contracts/test_guards.py",
    ),
    "guard-escapes": Proof(
        "an escape in the arguments of a call hides a word from a guard",
        "segue.guards.gate:forms_of",
        lambda _: lambda text: [text],
        "tests/guards/test_gate.py -k escape",
    ),
    "postgres-nul": Proof(
        "a NUL in an id is a fault of the server on PostgreSQL",
        "segue.stores.postgres_database:is_text",
        lambda _: lambda *_: True,
        "tests/contracts/test_conversations.py -k postgres",
    ),
    "terminal": Proof(
        "what a model or a server says gives orders to a terminal",
        "segue.printable:printable",
        lambda _: lambda text: text,
        "tests/test_printable.py",
    ),
    "content-filter": Proof(
        "the content filter of an engine is a failure of the server",
        "segue.engines.chat:CUT_BY",
        lambda _: {"length": "length"},
        "tests/engines/test_chat.py -k 'filter or cut'",
    ),
    "quoted-reports": Proof(
        "the words of a deleted response stay in the report of the next one",
        "segue.reports.watch:_without_words",
        lambda _: lambda report: report,
        "tests/scenarios/test_cache_reports.py -k words_of_a_deleted",
    ),
    "begun-first": Proof(
        "a background response that is cancelled as it begins reads `in_progress` for ever",
        "segue.process.runner:Runner._save_begun",
        unawaited,
        "tests/process/test_runner.py -k end_of_a_background",
    ),
}


def pytest_configure(config: pytest.Config) -> None:
    """As a plugin: take out what the variable names."""
    if name := os.environ.get(VARIABLE):
        proof = PROOFS[name]
        module, _, path = proof.place.partition(":")
        holder: Any = importlib.import_module(module)
        *outer, attribute = path.split(".")
        for one in outer:
            holder = getattr(holder, one)
        setattr(holder, attribute, proof.instead(getattr(holder, attribute)))


def fails(proof: Proof, name: str) -> bool:
    """Whether its test fails, with this taken out."""
    words = [word.strip("'") for word in proof.test.split(" ", 2)]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "tests.proofs", *words]
    ran = subprocess.run(
        command, env={**os.environ, VARIABLE: name}, capture_output=True, text=True,
        timeout=RUN_S_MAX, check=False,
    )  # fmt: skip
    assert ran.returncode in (0, 1), ran.stdout[-2000:] + ran.stderr[-2000:]
    return ran.returncode == 1


def main() -> int:
    bad = 0
    for name in sys.argv[1:] or PROOFS:
        proof = PROOFS[name]
        is_good = not fails(proof, "") and fails(proof, name)
        bad += not is_good
        print(f"{'   ' if is_good else 'BAD'} {name:<18} {proof.what}: {proof.test}", flush=True)
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
