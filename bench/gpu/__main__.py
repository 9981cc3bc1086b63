"""`python -m bench.gpu COMMAND`: the agent loop in front of a real vLLM, on the GPU machine. README.md says how.

all      make the models, then every stage: start its engines, measure its cases, stop them
agents   the same with Claude Code's recorded loop alone, through vLLM's own APIs and through Segue on both
models   only make the models
start    start engines by name, and wait for them
measure  the cases of engines that run; a case that is measured already is left out
stop     stop engines by name
report   the tables, one JSON and one chart from the results
dry      start, measure, report and stop here, without a GPU: vLLMs without a model take the place of the engines

measure and dry play every case of README.md, or, with --ways, --conversations, --turns or --rounds, just what the
flags say: round by round, the ways in turn within each, so that rounds are complete when --seconds are over.

  python -m bench.gpu measure plain --ways ids ws --contexts 20000 --conversations 8 32 --rounds 3 --seconds 300
  python -m bench.gpu dry --conversations 8 32 --rounds 3 --turns 3
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec.structs import replace

from bench.gpu.cases import (
    CASE_S_MAX,
    WAYS,
    Case,
    Choice,
    Stage,
    agent_cases,
    in_words,
    measure,
    stages,
)
from bench.gpu.report import report, results
from bench.gpu.servers import ENGINES, GATEWAYS, USUAL_GATEWAYS, Servers

RESULTS = "results.jsonl"
MODELS = ("written", "small", "real")


def make_models(folder: Path, kinds: Sequence[str] = MODELS) -> None:
    """All at once: they take a quarter of a minute."""
    extra = {"real": [str(folder / "smollm2.gguf")]}
    # The machine's own transformers, and the reader of GGUF files that came with vLLM's packages.
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'own'}:{folder / 'vllm'}"}
    making = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "bench.gpu.models", kind),
                *(str(folder / "models" / kind), str(folder / "tokenizer"), *extra.get(kind, ())),
            ],
            env=environment,
        )
        for kind in kinds
        if not (folder / "models" / kind / "model.safetensors").exists()
    ]
    if sum(process.wait() for process in making):
        raise SystemExit("bench: a model could not be made")


def start(
    servers: Servers, engines: Sequence[str], gateways: Sequence[str] = USUAL_GATEWAYS
) -> list[str]:
    """Those of these engines that answer, with their gateways."""
    began = time.monotonic()
    servers.start([name for name in engines if not servers.is_up(name)])
    ready = servers.await_engines(engines)
    for name in ready:
        if not servers.is_up(f"{name}-{gateways[0]}"):
            servers.start_gateways(name, gateways)
    print(f"up after {time.monotonic() - began:.0f} s: {', '.join(ready)}", flush=True)
    return ready


def run(servers: Servers, cases: Sequence[Case], until: float) -> bool:
    """Measure what is not measured yet, as long as there is time; whether nothing failed or was left out."""
    path = servers.folder / RESULTS
    done = {figures.case for figures in results(path) if not figures.failed}
    cases = [case for case in cases if case not in done]
    took_s: dict[Case, float] = {}
    failed = 0
    with path.open("ab") as file:
        for number, case in enumerate(cases, 1):
            alike, began = replace(case, way="", round=0), time.monotonic()
            if began + took_s.get(alike, 0.0) > until:
                print(
                    f"no time left for {len(cases) - number + 1} of {len(cases)} cases", flush=True
                )
                return False
            figures = measure(case, servers, min(CASE_S_MAX, until - began))
            failed += bool(figures.failed)
            took_s[alike] = max(took_s.get(alike, 0.0), time.monotonic() - began)
            took = f"took {time.monotonic() - began:.0f} s"
            print(f"{number}/{len(cases)} {in_words(figures)}  {took}", flush=True)
            file.write(msgspec.json.encode(figures) + b"\n")
            file.flush()
    print(f"all measured, {failed} failed" if failed else "all measured", flush=True)
    return not failed


def chosen(options: argparse.Namespace) -> Choice | None:
    """What the flags ask for; None means every case."""
    asked = {
        name: value
        for name in ("ways", "pairs", "contexts", "conversations", "turns", "rounds")
        if (value := getattr(options, name)) is not None
    }
    return Choice(**asked) if asked.keys() - {"contexts"} else None


def cases_of(options: argparse.Namespace, engines: Sequence[str]) -> list[Case]:
    """What to measure of these engines."""
    if choice := chosen(options):
        return choice.cases(engines)
    cases = [case for stage in stages() for case in stage.cases if case.engine in engines]
    return [case for case in cases if not options.contexts or case.context in options.contexts]


def dry(options: argparse.Namespace, until: float) -> bool:
    """Everything that a measurement does, here; the engines are `plain` if none is named."""
    from bench.gpu.dry import hollow_servers

    engines = options.engines or ["plain"]
    with hollow_servers(options.flags.split()) as servers:
        try:
            ready = start(servers, engines, options.gateways)
            whole = run(servers, cases_of(options, ready), until) and ready == engines
        finally:
            servers.stop(engines)
        report([servers.folder / RESULTS], options.json, options.svg)
    return whole


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The command and its flags."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = ("all", "agents", "models", "start", "measure", "stop", "report", "dry")
    parser.add_argument("command", choices=commands)
    engines = f"by name: {', '.join(ENGINES)}; measure and stop: all that run; dry: plain"
    parser.add_argument("engines", nargs="*", metavar="engine", help=engines)
    home = Path.home() / "segue-gpu"
    folder = f"models, packages, logs and results (default: {home}; dry: one that goes away)"
    parser.add_argument("--folder", type=Path, default=home, help=folder)
    seconds = "begin no case that would end after these (default: 3600)"
    parser.add_argument("--seconds", type=float, default=3_600, metavar="S", help=seconds)
    parser.add_argument("--flags", default="", help="more flags for vLLM; they win over its others")
    parser.add_argument("--ways", nargs="+", choices=WAYS, metavar="WAY", help=", ".join(WAYS))
    pairs = "engine and way, in place of --ways: only these, in turn within a round"
    parser.add_argument("--pairs", nargs="+", type=_pair, metavar="ENGINE:WAY", help=pairs)
    parser.add_argument(
        "--models", nargs="+", choices=(*MODELS, "big"), default=MODELS, help="which to make"
    )
    parser.add_argument(
        "--gateways", nargs="+", choices=GATEWAYS, default=USUAL_GATEWAYS, help="which to start"
    )
    counts = {
        "contexts": "tokens of history (with the flags below: 20000)",
        "conversations": "at the same time, such as 8 32 (default: 1)",
    }
    for name, words in counts.items():
        parser.add_argument(f"--{name}", type=_count, nargs="+", metavar="N", help=words)
    parser.add_argument("--turns", type=_count, metavar="N", help="of a conversation (default: 10)")
    parser.add_argument("--rounds", type=_count, metavar="N", help="of all cases (default: 3)")
    parser.add_argument("--results", type=Path, nargs="*", help="of each machine, for the report")
    parser.add_argument("--json", type=Path, help="of the report")
    parser.add_argument("--svg", type=Path, help="of the report")
    options = parser.parse_args(arguments)
    if unknown := set(options.engines) - set(ENGINES):
        parser.error(
            f"no engine named {', '.join(sorted(unknown))}; there are {', '.join(ENGINES)}"
        )
    return options


def _pair(text: str) -> tuple[str, str]:
    engine, _, way = text.partition(":")
    if engine not in ENGINES or way not in WAYS:
        raise argparse.ArgumentTypeError(f"{text} is not an engine and a way, such as plain:ids")
    return engine, way


def _count(text: str) -> int:
    if (count := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return count


def main(arguments: Sequence[str]) -> int:
    """Do what the command says; 1 if a case failed or was left out."""
    options = parse(arguments)
    until = time.monotonic() + options.seconds
    if options.command == "dry":
        return 0 if dry(options, until) else 1
    servers = Servers(options.folder, options.flags.split())
    named = options.engines or list(ENGINES)
    match options.command:
        case "models":
            make_models(options.folder, options.models)
        case "start":
            ready = start(servers, options.engines, options.gateways)
            return 0 if ready == options.engines else 1
        case "measure":
            ready = [name for name in named if servers.is_up(name)]
            if not ready:
                raise SystemExit(f"bench: none of {', '.join(named)} runs: start it first")
            return 0 if run(servers, cases_of(options, ready), until) else 1
        case "stop":
            servers.stop(named)
        case "report":
            report(options.results or [servers.folder / RESULTS], options.json, options.svg)
        case "agents":
            return every(servers, options, until, [Stage(("plain", "rust"), agent_cases())])
        case _:
            return every(servers, options, until, stages())
    return 0


def every(
    servers: Servers, options: argparse.Namespace, until: float, wanted: Sequence[Stage]
) -> int:
    """All of these stages; 1 if a case failed or was left out."""
    make_models(options.folder)
    whole = True
    for stage in wanted:
        try:
            ready = start(servers, stage.engines)
            whole &= run(servers, [case for case in stage.cases if case.engine in ready], until)
        finally:
            servers.stop(stage.engines)
    report(options.results or [servers.folder / RESULTS], options.json, options.svg)
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
