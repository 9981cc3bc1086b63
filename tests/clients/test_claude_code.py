"""Claude Code in particular: threads and their loss, compaction, a long silence, subagents, deferred tools, images."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.clients.agents import Ran, run
from tests.clients.coders import CLAUDE, CODERS, started
from tests.clients.faulty import FaultyChat
from tests.clients.record import COUNTED, SUBAGENT, Relay, png, relayed, steps, with_subagent
from tests.clients.stage import scripted
from tests.clients.task import END, Turns, call, make_repository, passes
from tests.support import ServedProcess, metric, served_process

pytestmark = pytest.mark.clients

Record = Callable[[str, object], None]
THREADS = {"CLAUDE_CODE_TETHER_LIVE": "1"}
SUMMARY = "So far: money.py was read, and the first price is skipped."
# Words of the request for a summary.
COMPACTION = "Compact Instructions"


class Bench:
    """Claude Code in a repository, a relay that sees its requests, a server."""

    def __init__(self, served: ServedProcess, relay: Relay, folder: Path) -> None:
        self.served = served
        self.relay = relay
        self.folder = folder
        self.repository = folder / "repository"
        # Where it is one of its own.
        self.engine = FaultyChat()

    async def play(self, *words: str, run_s_max: float = 100, **more: str) -> Ran:
        """Let it work, with these words instead of the usual ones."""
        command, environment = started(
            "claude",
            words or CLAUDE,
            f"http://127.0.0.1:{self.relay.port}/v1",
            self.repository,
            self.folder,
            "agent",
            api="messages",
            more=more,
        )
        return await run(command, environment, cwd=self.repository, run_s_max=run_s_max)

    @property
    def bodies(self) -> list[dict[str, Any]]:
        return [exchange["body"] for exchange in self.relay.exchanges]

    async def count(self, name: str) -> float:
        return await metric(self.served, f"segue_{name}")


@asynccontextmanager
async def benched(folder: Path, *flags: str) -> AsyncIterator[Bench]:
    """Everything set up; whatever the server complained about is an error."""
    make_repository(folder / "repository")
    with served_process("--store", "memory", "--model", "agent", *flags, cwd=folder) as served:
        async with relayed(served.url, None, [], str(folder)) as relay:
            yield Bench(served, relay, folder)
        await asyncio.to_thread(served.stop)
    assert not [line for line in served.printed if "Traceback" in line], "".join(served.printed)


@asynccontextmanager
async def behind(folder: Path, *flags: str, **options: Any) -> AsyncIterator[Bench]:
    """The same, with an engine that is an endpoint of its own."""
    async with FaultyChat(**options) as engine:
        address = ("--engine", "chat", "--engine-url", engine.url)
        async with benched(folder, *address, *flags) as bench:
            bench.engine = engine
            yield bench


def result_of(ran: Ran) -> str:
    """The last words of a run that ended well."""
    assert ran.code == 0, ran.said[-3000:]
    return str(json.loads(ran.out)["result"])


def fixing() -> Turns:
    return CODERS["Claude Code"].turns()


async def test_threads_send_only_what_is_new(tmp_path: Path, record_property: Record) -> None:
    record_property("claude", "Claude Code, threads: each turn sends only its new messages")
    async with benched(tmp_path, *scripted(tmp_path, fixing())) as bench:
        assert result_of(await bench.play(**THREADS)) == END
        first, *others = [body["thread"] for body in bench.bodies]
        assert first == {"type": "create"}
        assert {thread["type"] for thread in others} == {"continue"}
        sent = [message["role"] for body in bench.bodies for message in body["messages"]]
        assert "assistant" not in sent
        assert sent.count("user") == len(fixing())
        assert await bench.count('state_lookups_total{where="missing"}') == 0
    assert passes(tmp_path / "repository")


async def test_lost_thread_is_sent_again_as_a_whole(
    tmp_path: Path, record_property: Record
) -> None:
    """The server can hold no state at all: every thread is evicted, and unknown when it is continued."""
    record_property("claude", "Claude Code, threads: a lost thread is sent again as a whole")
    none = ("--connections-state-bytes-max", "1")
    async with benched(tmp_path, *scripted(tmp_path, fixing()), *none) as bench:
        assert result_of(await bench.play(**THREADS)) == END
        assert bench.relay.refusals
        for refusal in bench.relay.refusals:
            assert json.loads(refusal)["error"]["details"]["error_code"] == "thread_not_found"
        assert max(len(body["messages"]) for body in bench.bodies) > 5
    assert passes(tmp_path / "repository")


async def test_threads_that_are_off_are_not_used(tmp_path: Path, record_property: Record) -> None:
    record_property("claude", "Claude Code, threads switched off at the server: goes on without")
    flags = (*scripted(tmp_path, fixing()), "--threads", "false")
    async with benched(tmp_path, *flags) as bench:
        assert result_of(await bench.play(**THREADS)) == END
    assert passes(tmp_path / "repository")


async def test_overflow_makes_it_compact_and_go_on(tmp_path: Path, record_property: Record) -> None:
    record_property("claude", "Claude Code, a prompt that does not fit: it compacts and goes on")
    parts = [call("Bash", command=f"tail -c +{at} NOTES.md | head -c 5000") for at in range(9)]
    turns = [*parts, {"text": "It must not come to this."}]
    # Some results of before are kept beside the summary, and count as turns.
    rest = [fixing()[2]] * len(parts) + fixing()[3:]
    others = {SUMMARY: rest, COMPACTION: [{"text": f"<summary>{SUMMARY}</summary>"}]}
    async with behind(tmp_path, turns=turns, others=others, body_bytes_max=70_000) as bench:
        notes = "All prices are in cents, whatever they say.\n" * 2_000
        (bench.repository / "NOTES.md").write_text(notes)
        assert result_of(await bench.play()).strip() == END
        messages = [json.loads(said)["error"]["message"] for said in bench.relay.refusals]
        known = re.compile(r"prompt is too long: \d+ tokens > 17500 maximum")
        assert messages
        assert all(known.fullmatch(message) for message in messages)
    assert passes(tmp_path / "repository")


@pytest.mark.timeout(400)
async def test_prefill_of_200_s_is_waited_for(tmp_path: Path, record_property: Record) -> None:
    """With its own timeouts, as they come: nothing is sent twice."""
    record_property("claude", "Claude Code, an engine that reads for 200 s: one request, no resend")
    async with behind(tmp_path, turns=fixing(), silent_s={2: 200.0}) as bench:
        own = {"API_TIMEOUT_MS": "", "CLAUDE_STREAM_IDLE_TIMEOUT_MS": ""}
        ran = await bench.play(run_s_max=350, **own)
        assert result_of(ran).strip() == END
        assert ran.seconds > 200
        assert len(bench.bodies) == bench.engine.asked == len(fixing())
    assert passes(tmp_path / "repository")


async def test_silence_is_no_longer_than_a_heartbeat(tmp_path: Path) -> None:
    """The same, with timeouts of its own that are shorter than the engine's silence."""
    async with behind(tmp_path, "--heartbeat-s", "0.3", turns=fixing(), silent_s={2: 6.0}) as bench:
        impatient = {
            "CLAUDE_STREAM_FIRST_BYTE_TIMEOUT_MS": "2000",
            "CLAUDE_BYTE_STREAM_IDLE_TIMEOUT_MS": "2000",
            "CLAUDE_ENABLE_BYTE_WATCHDOG": "1",
        }
        assert result_of(await bench.play(**impatient)).strip() == END
        assert len(bench.bodies) == bench.engine.asked == len(fixing())


async def test_subagent_works_beside_the_loop(tmp_path: Path, record_property: Record) -> None:
    record_property("claude", "Claude Code, a subagent")
    turns = with_subagent(tmp_path)
    async with behind(tmp_path, turns=turns, others=SUBAGENT) as bench:
        assert result_of(await bench.play()).strip() == END
        assert len({len(body["tools"]) for body in bench.bodies}) == 2
        assert COUNTED in json.dumps(bench.bodies[-1]["messages"])


async def test_deferred_tools_appear_where_they_were_found(
    tmp_path: Path, record_property: Record
) -> None:
    """Tools join in the middle of the list, and nothing before them is made again."""
    record_property("claude", "Claude Code, ToolSearch: deferred tools join where they appear")
    search = call("ToolSearch", query="select:WebFetch,NotebookEdit", max_results=5)
    turns = [*steps("Bash")[:2], search, *fixing()[2:]]
    async with benched(tmp_path, *scripted(tmp_path, turns)) as bench:
        assert result_of(await bench.play()) == END
        names = [[tool["name"] for tool in body["tools"]] for body in bench.bodies]
        assert "WebFetch" not in names[0]
        assert "WebFetch" in names[3]
        assert names[0][-1] == names[3][-1], "they join in the middle"
        tokenized = await bench.count("tokens_tokenized_total")
        assert await bench.count("tokens_reused_total") > 2 * tokenized
        assert await bench.count("reuse_lost_tokens_total") == 0
    assert passes(tmp_path / "repository")


async def test_reminder_after_every_result_loses_nothing(
    tmp_path: Path, record_property: Record
) -> None:
    record_property("claude", "Claude Code, a system message after every result")
    async with benched(tmp_path, *scripted(tmp_path, fixing())) as bench:
        assert result_of(await bench.play(CLAUDE_CODE_TOTAL_TOKENS_REMINDER="fixed")) == END
        roles = [message["role"] for message in bench.bodies[-1]["messages"]]
        assert roles.count("system") == len(fixing())
        assert await bench.count("reuse_lost_tokens_total") == 0


async def test_image_in_a_result_is_taken(tmp_path: Path, record_property: Record) -> None:
    record_property("claude", "Claude Code, an image in a tool result")
    make = partial(png, tmp_path / "repository")
    async with behind(tmp_path, turns=[]) as bench:
        bench.engine.turns = [call("Read", file_path=make("red.png", 200)), *fixing()[2:]]
        assert result_of(await bench.play()).strip() == END
        assert '"type": "image"' in json.dumps(bench.bodies[1]["messages"])


async def test_session_goes_on_in_a_new_process(tmp_path: Path, record_property: Record) -> None:
    record_property("claude", "Claude Code, `--continue` in a new process")
    async with benched(tmp_path, *scripted(tmp_path, fixing())) as bench:
        assert result_of(await bench.play()) == END
        before = await bench.count("tokens_tokenized_total")
        assert result_of(await bench.play(*CLAUDE, "--continue")) == END
        assert await bench.count("tokens_tokenized_total") - before < 1_000
