"""Does a test fail when the fix is taken out that it was written for?

    python -m tests.proofs            # each removal and its test, one after the other; a minute or two
    python -m tests.proofs guard-windows

Each row takes one fix out of the real code and runs one test, which must fail then, and pass with it. What the growth
fuzzer and the simulator find without a fix is in `tests/growth/removals.py` and `tests/simulator/removals.py`.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from msgspec.structs import replace as replaced

from segue.files.objects import PART_BYTES
from segue.turn.notices import Append
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


def never(value: Any) -> Callable[[Any], Any]:
    """A function that always says this."""
    return lambda _: lambda *_, **__: value


def same(_: Any) -> Callable[[Any], Any]:
    """A function that gives back what it is given."""
    return lambda value, *_, **__: value


def uncounted_append(_: Any) -> Callable[..., Any]:
    """What a client appends weighs nothing until the model has read it, or for ever."""

    def accept_append(running: Any, items: Any, _: int) -> Any:
        running.awaited_calls = None
        return Append(items, 0)

    return accept_append


def taken_apart(text: str) -> Any:
    """The object that a text is, however large or deep."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def plainly_opened(_: Any) -> Callable[..., str | None]:
    """What was sealed is taken for a text, whatever it is."""

    def open_text(seals: Any, owner: str, sealed: str, _: str) -> str | None:
        body = seals.open(owner, sealed)
        return None if body is None else body.decode()

    return open_text


def compared_with_all(_: Any) -> Callable[..., int]:
    """Each beginning of a stop string is looked for at the end of what was written."""

    def read(begun: Any, text: str) -> int:
        stop = begun._stop
        begun.written = (getattr(begun, "written", "") + text)[-len(stop) :]
        ends = (n for n in range(len(stop) - 1, 0, -1) if begun.written.endswith(stop[:n]))
        return next(ends, 0)

    return read


def read_to_its_end(_: Any) -> Callable[..., Any]:
    """A body of any size."""

    async def whole(stream: Any) -> bytes:
        return b"".join([chunk async for chunk in stream])

    return whole


class Nested(msgspec.Struct):
    """A type that holds itself."""

    inner: Nested | None = None


def everybody(_: Any) -> Callable[..., None]:
    """What one owner meets at an engine closes it for all."""

    def hold(server: Any, now: float, _: str, reason: str, wait_s: float | None = None) -> None:
        server._note_failure(now, reason, wait_s)

    return hold


PROOFS: dict[str, Proof] = {
    "sealed-requests": Proof(
        "a queued response has the secrets of its MCP servers in a file",
        "segue.process.runner:with_request",
        in_the_clear,
        "tests/scenarios/test_queued.py -k secrets_of_a_queued_response",
    ),
    "long-stops": Proof(
        "a token costs sixty times as much beside long stop strings",
        "segue.turn.filters:_Begun.read",
        compared_with_all,
        "tests/turn/test_filters.py -k all_of_a_long_stop",
    ),
    "shared-about": Proof(
        "a search for tools reads what a namespace is for, again for each of its tools",
        "segue.tools.tool_search:ABOUT_CHARS_MAX",
        lambda _: 2**60,
        "tests/growth/test_outside.py -k namespace",
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
    "running-input": Proof(
        "a running turn weighs as much as nothing, whatever it was sent",
        "segue.process.runner:sent_bytes",
        never(0),
        "tests/scenarios/test_memory.py -k queued_turn_counts",
    ),
    "appended": Proof(
        "what a client appends to a rollout is in no budget",
        "segue.turn.running:Running.accept_append",
        uncounted_append,
        "tests/turn/test_loop.py -k rollout_waits_for_its_outputs",
    ),
    "written": Proof(
        "what the model and its tools write in a turn is in no budget",
        "segue.turn.running:Running.hold",
        never(None),
        "tests/turn/test_loop.py -k 'hosted_tools or rounds'",
    ),
    "full": Proof(
        "a server whose memory is full takes more",
        "segue.memory.budget:Memory.check",
        never(None),
        "tests/scenarios/test_rollout.py tests/scenarios/test_memory.py -k limit_of_all_memory",
    ),
    "names-of-tools": Proof(
        "two tools of one name are taken, and the call of one is the call of the other",
        "segue.wire.tools:check_names",
        never(None),
        "tests/wire/test_tools.py -k two_tools_of_one_name",
    ),
    "size-of-grammars": Proof(
        "a grammar of any size is written for an engine",
        "segue.readers.forced:check_size",
        never(None),
        "tests/readers/test_call_tags.py -k schema_of_an_answer",
    ),
    "counts": Proof(
        "counts of an engine that cannot be true are stored, charged and added up",
        "segue.border.believed:plausible",
        lambda _: lambda _, said: said,
        "tests/engines/test_queued.py -k miscounts",
    ),
    "ids": Proof(
        "an id that no vocabulary has is a fault of the server",
        "segue.border.believed:are_ids",
        never(True),
        "tests/engines/test_token_engine.py -k id_that_is_none",
    ),
    "length": Proof(
        "an engine that ignores its limit writes on",
        "segue.border.believed:_Answer.is_full",
        lambda _: property(lambda _: False, lambda *_: None),
        "tests/engines/test_token_engine.py tests/engines/test_chat.py -k 'ignores'",
    ),
    "late-deltas": Proof(
        "what comes after the end of an answer is added to it",
        "segue.engines.chat:_Answer._is_closed",
        lambda _: property(lambda _: False, lambda *_: None),
        "tests/engines/test_chat.py -k after_the_end_is_dropped",
    ),
    "words-of-engines": Proof(
        "the words of an engine that fails are in the log, and what they quote",
        "segue.engines.upstream:_fault",
        lambda fault: lambda body: replaced(fault(body), type=fault(body).message),
        "tests/engines/test_upstream.py -k no_log_line",
    ),
    "others-errors": Proof(
        "what one owner meets at an engine closes it for the others",
        "segue.engines.queued:QueuedEngine._hold",
        everybody,
        "tests/engines/test_queued.py -k 'one_of_several or whoever_hit_it'",
    ),
    "given-up": Proof(
        "an answer whose grammar the library has given up on is `completed`",
        "segue_embedded.embedded:EmbeddedEngine._forbidden_ids",
        never([]),
        "tests/embedded/test_embedded.py -k given_up_on",
    ),
    "header-lines": Proof(
        "a text in a header ends its line",
        "segue.listener.exchange:quote",
        same,
        "tests/listener/test_http.py -k text_in_a_header",
    ),
    "snippets": Proof(
        "the name of a model is code in the program that is printed to be run",
        "segue_cli.client.clients:_literal",
        lambda _: lambda value: f'"{value}"',
        "tests/client/test_connect.py -k name_of_a_model",
    ),
    "shell-words": Proof(
        "the name of a model is several words of a shell",
        "segue_cli.client.clients:shlex.quote",
        same,
        "tests/client/test_connect.py -k 'word_in_a_shell or value_of_a_variable'",
    ),
    "control-folder": Proof(
        "another user of the machine answers orders to a server",
        "segue.server.control:is_private",
        never(True),
        "tests/server/test_control.py -k folder_that_others",
    ),
    "others-tools": Proof(
        "an operator reads the tools and responses of other owners in the advice",
        "segue.reports.workers:unnamed",
        same,
        "tests/scenarios/test_cache_reports.py -k their_owner_reads_why",
    ),
    "other-requests": Proof(
        "requests that start no response count against no limit",
        "segue.accounts.quota:KeyQuota.count_other_request",
        never(None),
        "tests/scenarios/test_rate_limits.py tests/scenarios/test_keys.py -k 'counts or no_response'",
    ),
    "letters-as-escapes": Proof(
        "a letter that is written as an escape in the arguments of a call passes a guard",
        "segue.guards.texts:string_end",
        lambda _: lambda data, at: len(data),
        "tests/guards/test_texts.py -k no_escape",
    ),
    "errors-with-frames": Proof(
        "what a refused or failed request held stays until the garbage collector looks",
        "segue.errors:ApiError.kept",
        lambda _: lambda error: error,
        "tests/scenarios/test_memory.py -k refused_and_failed",
    ),
    "large-frames": Proof(
        "a large frame is copied and unmasked in one step",
        "segue.listener.pieces:_LARGE",
        lambda _: 0,
        "tests/listener/test_pieces.py -k while_it_comes",
    ),
    "many-reads": Proof(
        "a connection whose bytes come in many reads has the loop for itself",
        "segue.listener.socket:Socket._spent_s",
        lambda _: property(lambda _: 0.0, lambda *_: None),
        "tests/listener/test_socket.py -k many_reads",
    ),
    "charsets": Proof(
        "a page is decoded by whatever decoder it names",
        "segue.web.html:_CHARSETS",
        lambda known: known | {"punycode", "utf-7"},
        "tests/web/test_html.py -k charset_is_the_one",
    ),
    "answers-of-mcp": Proof(
        "what an MCP server answers is read to its end",
        "segue.mcp.bounded:_whole",
        read_to_its_end,
        "tests/mcp/test_bounded.py -k without_an_end",
    ),
    "values-of-mcp": Proof(
        "what an MCP server answers may have any number of values",
        "segue.mcp.bounded:within_limits",
        same,
        "tests/mcp/test_bounded.py",
    ),
    "bursts-of-a-script": Proof(
        "each of hundreds of scripted answers writes in every round of the loop",
        "segue.engines.scripted:ScriptedEngine._round",
        lambda _: lambda _: asyncio.sleep(0),
        "tests/engines/test_scripted.py -k one_round",
    ),
    "frames-without-rests": Proof(
        "a connection with frames that cost much to read has the loop for itself",
        "segue.listener.socket:thread_time",
        never(0.0),
        "tests/listener/test_socket.py -k lets_others_go_first",
    ),
    "inflated-on-the-loop": Proof(
        "a small body that becomes a large one is inflated on the event loop",
        "segue.listener.inflate:INLINE_PLAIN_BYTES",
        lambda _: 1 << 30,
        "tests/listener/test_inflate.py -k does_not_stop",
    ),
    "deep-arguments": Proof(
        "arguments that are very deep are a fault of the server where a template writes them",
        "segue.dialects.template_messages:inner_object",
        lambda _: taken_apart,
        "tests/dialects/test_template.py -k too_deep",
    ),
    "many-arguments": Proof(
        "arguments with a million values are taken apart and written anew on the way in",
        "segue.completions.messages:inner_object",
        lambda _: taken_apart,
        "tests/completions/test_messages.py -k too_much_for_an_item",
    ),
    "stalled-uploads": Proof(
        "uploads that stall hold a megabyte each",
        "segue.files.depot:Uploads.part_bytes",
        lambda _: property(lambda _: PART_BYTES),
        "tests/files/test_depot.py -k stall",
    ),
    "uploads-at-once": Proof(
        "an owner has as many uploads at once as it likes",
        "segue.files.depot:Uploads.one_of",
        lambda _: lambda *_: nullcontext(),
        "tests/files/test_depot.py -k so_many_uploads",
    ),
    "passed-bodies": Proof(
        "what is passed on to an engine is in no budget, or keeps what others send waiting",
        "segue.listener.exchange:Exchange.holding_body",
        lambda _: lambda _: nullcontext(),
        "tests/scenarios/test_passthrough.py -k is_weighed",
    ),
    "values-of-lists": Proof(
        "short values in the lists of an item are in no budget",
        "segue.wire.items:weigh_values",
        never(0),
        "tests/wire/test_weights.py",
    ),
    "repeated-fields": Proof(
        "what a response repeats of its request is in no budget",
        "segue.wire.response:Response.echo_bytes",
        lambda _: property(lambda _: 0),
        "tests/scenarios/test_memory.py -k response_repeats",
    ),
    "long-names": Proof(
        "a name of any length is repeated in every snapshot",
        "segue.turn.prepare:check_sizes",
        never(None),
        "tests/turn/test_prepare.py -k snapshot_repeats",
    ),
    "sealed-kinds": Proof(
        "what was sealed as something else is a fault of the server",
        "segue.turn.references:open_text",
        plainly_opened,
        "tests/scenarios/test_any_values.py -k sealed_as_something_else",
    ),
    "sealed-compactions": Proof(
        "a compaction that is no text is a fault of the server",
        "segue.turn.references:from_bytes",
        lambda _: lambda body: json.loads(body) and None,
        "tests/scenarios/test_any_values.py -k seals",
    ),
    "numbers-of-requests": Proof(
        "a number of a request is of any size",
        "segue.messages.tools:_tool",
        lambda _: msgspec.json.Decoder(list[int]),
        "tests/rules/test_request_types.py",
    ),
    "nested-choices": Proof(
        "a choice of tools holds choices that hold choices",
        "segue.completions.request:_request",
        lambda _: msgspec.json.Decoder(Nested),
        "tests/rules/test_request_types.py",
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
        setattr(holder, attribute, proof.instead(getattr(holder, attribute, None)))


def fails(proof: Proof, name: str) -> bool:
    """Whether its test fails, with this taken out."""
    words = shlex.split(proof.test)
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
