"""How is a whole plan measured? Servers started, workloads fitted to their contexts, loops run in turn, figures made.

In: a plan, and a listener for the progress. Out: the runs, and for each way that was left out the reason.
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

from segue_bench.client import ClientConnection, ServerAddress, local, post, read_body
from segue_bench.figures import BenchRun, sum_up
from segue_bench.loop import MeasuredLoop, run_loop
from segue_bench.plan import (
    ALL,
    BARE,
    NOT_RENDERED,
    UNKNOWN,
    BenchCase,
    BenchPlan,
    ServerCaches,
    cases,
    model_name,
    order,
)
from segue_bench.server import (
    MeasuredServer,
    ScriptedModel,
    ServerOptions,
    ServerProcess,
    make_certificate,
    relay,
    serve,
    trust,
)
from segue_bench.ways import ResponseSummary, TurnFailed, WayName, WayNotSupported, WayTarget, body
from segue_bench.workload import Workload, WorkloadMaker

# Tokens of a call and its markup, without its output.
CALL_TOKENS = 60
# A probe asks how long the prompt is, and nothing else.
PROBE_OUTPUT_TOKENS = 16


class ProgressListener(Protocol):
    """Gets the progress of a run."""

    def began(self, case: BenchCase) -> None:
        """A loop begins."""

    def advanced(self) -> None:
        """A turn has ended."""

    def ended(self, case: BenchCase) -> None:
        """A loop has ended."""

    def left_out(self, way: WayName, why: str) -> None:
        """A way cannot be measured here."""


@dataclass(slots=True)
class MeasuredRuns:
    """The results of a plan."""

    runs: list[BenchRun] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)


MeasuredServers = dict[ServerCaches, MeasuredServer]

FLAGS: dict[ServerCaches, tuple[str, ...]] = {
    ALL: (),
    NOT_RENDERED: ("--render-cache-bytes-max", "0"),
    BARE: ("--render-cache-bytes-max", "0", "--piece-cache", "false", "--fast-tokenizer", "false"),
}


def measure(plan: BenchPlan, progress: ProgressListener) -> MeasuredRuns:
    """Run the plan."""
    maker = WorkloadMaker(plan.shape, plan.seed)
    results = MeasuredRuns()
    loops: dict[BenchCase, list[MeasuredLoop]] = {}
    with open_servers(plan, maker) as servers:
        address = next(iter(servers.values())).counted_at
        workloads = {context: _fitted(plan, maker, address, context) for context in plan.contexts}
        for case in order(cases(plan), plan.repeat):
            if case.way in results.left_out:
                continue
            server = servers[case.caches]
            target = _target(plan, case, server, workloads[case.context_tokens])
            progress.began(case)
            try:
                loop = run_loop(case, target, server, plan.tool_ms / 1e3, progress.advanced)
            except WayNotSupported as why:
                results.left_out[case.way] = str(why)
                progress.left_out(case.way, str(why))
                continue
            except TurnFailed as error:
                raise TurnFailed(f"{case.way} at {case.context_tokens} tokens: {error}") from None
            loops.setdefault(case, []).append(loop)
            progress.ended(case)
    results.runs = [
        sum_up(case, loops[case])
        for group in cases(plan)
        for case in group
        if case in loops and case.way not in results.left_out
    ]
    return results


def _target(
    plan: BenchPlan, case: BenchCase, server: MeasuredServer, workload: Workload
) -> WayTarget:
    if plan.url:
        return WayTarget(server.address, plan.model, workload, plan.shape.output_tokens)
    assert case.tokens_per_s is not None, "our own server has a speed"
    return WayTarget(server.address, model_name(case.tokens_per_s, case.context_tokens), workload)


# --- fitting a workload to its context ------------------------------------------------------------


def _fitted(
    plan: BenchPlan, maker: WorkloadMaker, address: ServerAddress, context_tokens: int
) -> Workload:
    """A workload whose prompt has about this many tokens in the vocabulary of the server's model."""
    calls = maker.calls_before(context_tokens)
    model = plan.model or model_name(plan.speeds[-1] or 0, context_tokens)
    scale = 1.0
    if calls:
        head = _prompt_tokens(address, model, maker.workload(0, 1.0, 0))
        whole = _prompt_tokens(address, model, maker.workload(calls, 1.0, 0))
        fixed = head + calls * CALL_TOKENS
        if whole > fixed:
            scale = max(0.1, (context_tokens - fixed) / (whole - fixed))
    return maker.workload(calls, scale, plan.turns)


def _prompt_tokens(address: ServerAddress, model: str, workload: Workload) -> int:
    """How many tokens the server counts in this prompt."""
    target = WayTarget(address, model, workload, PROBE_OUTPUT_TOKENS)
    connection = ClientConnection(address)
    try:
        request = body(target, workload.opening, store=False, parent=None)
        head = post(connection, request, is_last=True)
        data = read_body(connection, head)
    finally:
        connection.close()
    if head.status != 200:
        raise TurnFailed(f"status {head.status}: {data.decode('utf-8', 'replace')[:300]}")
    response = msgspec.json.decode(data, type=ResponseSummary)
    return response.usage.input_tokens if response.usage else 0


# --- servers --------------------------------------------------------------------------------------


@contextmanager
def open_servers(plan: BenchPlan, maker: WorkloadMaker) -> Iterator[MeasuredServers]:
    """The server that was named, or one of our own for each set of caches."""
    if plan.url:
        yield {UNKNOWN: _named(plan)}
        return
    models = [
        ScriptedModel(
            model_name(speed or 0, context),
            maker.script(maker.calls_before(context), plan.turns_at(speed)),
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

        def start(flags: tuple[str, ...]) -> MeasuredServer:
            process = stack.enter_context(serve(ServerOptions(models, flags)))
            return stack.enter_context(_reached(plan, process, certificate))

        wanted = dict.fromkeys(case.caches for group in cases(plan) for case in group)
        yield {caches: start(FLAGS[caches]) for caches in wanted}


@contextmanager
def _reached(
    plan: BenchPlan, process: ServerProcess, certificate: Path | None
) -> Iterator[MeasuredServer]:
    """A server of ours, through the relay where a network was asked for."""
    direct = local(process.port)
    if not plan.rtt_ms and certificate is None:
        yield MeasuredServer(direct, direct, process)
        return
    with relay(process.port, plan.rtt_ms / 1e3, certificate) as between:
        address = local(between.port)
        if certificate is not None:
            address = ServerAddress(f"https://localhost:{between.port}", tls=trust(certificate))
        yield MeasuredServer(address, direct, process)


def _named(plan: BenchPlan) -> MeasuredServer:
    tls = ssl.create_default_context() if plan.url.startswith("https:") else None
    address = ServerAddress(plan.url, plan.key, tls)
    ClientConnection(
        address
    ).close()  # Fails now, before anything else, if the server is not there.
    return MeasuredServer(address, address)
