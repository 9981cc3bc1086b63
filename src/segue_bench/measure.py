"""How is a whole plan measured? Servers started, stories fitted to their contexts, loops run in turn, figures made.

In: a plan, and somebody to tell how far it is. Out: the runs, and for each way that was left out the reason.
"""

from __future__ import annotations

import ssl
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import msgspec

from segue_bench.figures import Run, sum_up
from segue_bench.line import Address, Line, post, read_body
from segue_bench.loop import Loop, run_loop
from segue_bench.plan import (
    ALL,
    BARE,
    NOT_RENDERED,
    UNKNOWN,
    Caches,
    Case,
    Plan,
    cases,
    model_name,
    order,
)
from segue_bench.server import (
    Peer,
    Played,
    Process,
    Served,
    make_certificate,
    relay,
    serve,
    trust,
)
from segue_bench.story import Story, Teller
from segue_bench.ways import Reply, Talk, TurnFailed, Unknown, WayName, body

# Tokens of a call and of what frames it, beside its output.
CALL_TOKENS = 60
# A probe wants to know how long the prompt is, and nothing else.
PROBE_OUTPUT_TOKENS = 16


class Onlooker(Protocol):
    """Somebody who wants to know how far it is."""

    def began(self, case: Case) -> None:
        """A loop begins."""

    def advanced(self) -> None:
        """A turn is over."""

    def ended(self, case: Case, loop: Loop) -> None:
        """A loop is over."""

    def left_out(self, way: WayName, why: str) -> None:
        """A way cannot be measured here."""


@dataclass(slots=True)
class Measured:
    """What came of a plan."""

    runs: list[Run] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


Peers = dict[Caches, Peer]

FLAGS: dict[Caches, tuple[str, ...]] = {
    ALL: (),
    NOT_RENDERED: ("--render-cache-bytes-max", "0"),
    BARE: ("--render-cache-bytes-max", "0", "--piece-cache", "false"),
}


def measure(plan: Plan, onlooker: Onlooker) -> Measured:
    """Run the plan."""
    teller = Teller(plan.shape, plan.seed)
    found = Measured()
    loops: dict[Case, list[Loop]] = {}
    with open_peers(plan, teller) as peers:
        stories = {
            context: _fitted(plan, teller, next(iter(peers.values())).counted_at, context)
            for context in plan.contexts
        }
        for case in order(cases(plan), plan.repeat):
            if case.way in found.left_out:
                continue
            talk = _talk(plan, case, peers[case.caches], stories[case.context_tokens])
            onlooker.began(case)
            try:
                peer = peers[case.caches]
                loop = run_loop(case, talk, peer, plan.tool_ms / 1e3, onlooker.advanced)
            except Unknown as why:
                found.left_out[case.way] = str(why)
                onlooker.left_out(case.way, str(why))
                continue
            except TurnFailed as error:
                raise TurnFailed(f"{case.way} at {case.context_tokens} tokens: {error}") from None
            loops.setdefault(case, []).append(loop)
            onlooker.ended(case, loop)
    found.runs = [
        sum_up(case, loops[case])
        for group in cases(plan)
        for case in group
        if case in loops and case.way not in found.left_out
    ]
    return found


def _talk(plan: Plan, case: Case, peer: Peer, story: Story) -> Talk:
    if plan.url:
        return Talk(peer.address, plan.model, story, plan.shape.output_tokens)
    assert case.tokens_per_s is not None, "our own server has a speed"
    return Talk(peer.address, model_name(case.tokens_per_s, case.context_tokens), story)


# --- fitting a story to its context ---------------------------------------------------------------


def _fitted(plan: Plan, teller: Teller, address: Address, context_tokens: int) -> Story:
    """A story whose prompt has about so many tokens in the vocabulary of the server's model."""
    calls = teller.calls_before(context_tokens)
    model = plan.model or model_name(plan.speeds[-1] or 0, context_tokens)
    scale = 1.0
    if calls:
        head = _prompt_tokens(address, model, teller.story(0, 1.0, 0))
        whole = _prompt_tokens(address, model, teller.story(calls, 1.0, 0))
        fixed = head + calls * CALL_TOKENS
        if whole > fixed:
            scale = max(0.1, (context_tokens - fixed) / (whole - fixed))
    return teller.story(calls, scale, plan.turns)


def _prompt_tokens(address: Address, model: str, story: Story) -> int:
    """How long the server says this prompt is."""
    talk = Talk(address, model, story, PROBE_OUTPUT_TOKENS)
    line = Line(address)
    try:
        answer = post(line, body(talk, story.opening, store=False, parent=None), is_last=True)
        data = read_body(line, answer)
    finally:
        line.close()
    if answer.status != 200:
        raise TurnFailed(f"status {answer.status}: {data.decode('utf-8', 'replace')[:300]}")
    reply = msgspec.json.decode(data, type=Reply)
    return reply.usage.input_tokens if reply.usage else 0


# --- servers --------------------------------------------------------------------------------------


@contextmanager
def open_peers(plan: Plan, teller: Teller) -> Iterator[Peers]:
    """The server that was named, or one of our own for each set of caches."""
    if plan.url:
        peer = _named(plan)
        yield {UNKNOWN: peer}
        return
    models = [
        Played(
            model_name(speed or 0, context),
            teller.script(teller.calls_before(context), plan.turns_at(speed)),
            speed or 0,
        )
        for context in plan.contexts
        for speed in plan.speeds
    ]
    with ExitStack() as stack:
        certificate = None
        if plan.tls:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="segue-bench-"))
            certificate = make_certificate(Path(folder))

        def start(*flags: str) -> Peer:
            process = stack.enter_context(serve(Served(models, flags)))
            return stack.enter_context(_reached(plan, process, certificate))

        wanted = dict.fromkeys(case.caches for group in cases(plan) for case in group)
        yield {caches: start(*FLAGS[caches]) for caches in wanted}


@contextmanager
def _reached(plan: Plan, process: Process, certificate: Path | None) -> Iterator[Peer]:
    """A server of ours, through the relay where a network was asked for."""
    direct = Address(f"http://127.0.0.1:{process.port}")
    if not plan.rtt_ms and certificate is None:
        yield Peer(direct, direct, process)
        return
    with relay(process.port, plan.rtt_ms / 1e3, certificate) as between:
        url, tls = f"http://127.0.0.1:{between.port}", None
        if certificate is not None:
            url, tls = f"https://localhost:{between.port}", trust(certificate)
        yield Peer(Address(url, tls=tls), direct, process)


def _named(plan: Plan) -> Peer:
    tls = ssl.create_default_context() if plan.url.startswith("https:") else None
    address = Address(plan.url, plan.key, tls)
    Line(address).close()  # Whether anybody is there is said before anything else.
    return Peer(address, address)
