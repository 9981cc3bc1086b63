"""`python -m bench.gpu COMMAND`: the agent loop in front of a real vLLM, on the GPU machine. README.md says how.

all      make the models, then every stage: start its engines, measure its cases, stop them
models   only make the models
start    start engines by name, and wait for them
measure  the cases of engines that run; a case that is measured already is left out
stop     stop engines by name
report   the tables, one JSON and one chart from the results
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

from bench.gpu.cases import Case, in_words, measure, stages
from bench.gpu.report import report, results
from bench.gpu.servers import GATEWAYS, Servers

RESULTS = "results.jsonl"


def make_models(folder: Path) -> None:
    """All at once: they take a quarter of a minute."""
    extra = {"written": [], "small": [], "real": [str(folder / "smollm2.gguf")]}
    # The machine's own transformers, and the reader of GGUF files that came with vLLM's packages.
    environment = {**os.environ, "PYTHONPATH": f"{folder / 'own'}:{folder / 'vllm'}"}
    making = [
        subprocess.Popen(
            [
                *(sys.executable, "-m", "bench.gpu.models", kind),
                *(str(folder / "models" / kind), str(folder / "tokenizer"), *more),
            ],
            env=environment,
        )
        for kind, more in extra.items()
        if not (folder / "models" / kind / "model.safetensors").exists()
    ]
    if sum(process.wait() for process in making):
        raise SystemExit("bench: a model could not be made")


def start(servers: Servers, engines: Sequence[str]) -> list[str]:
    """Those of these engines that answer, with their gateways."""
    began = time.monotonic()
    servers.start([name for name in engines if not servers.is_up(name)])
    ready = servers.await_engines(engines)
    for name in ready:
        if not servers.is_up(f"{name}-{next(iter(GATEWAYS))}"):
            servers.start_gateways(name)
    print(f"up after {time.monotonic() - began:.0f} s: {', '.join(ready)}", flush=True)
    return ready


def run(servers: Servers, cases: Sequence[Case], ready: Sequence[str], until: float) -> None:
    """Measure what is not measured yet, as long as there is time."""
    path = servers.folder / RESULTS
    done = {figures.case for figures in results(path)}
    with path.open("ab") as file:
        for case in cases:
            if case in done or case.engine not in ready:
                continue
            if time.monotonic() > until:
                print(f"no time left for {case}", flush=True)
                return
            figures = measure(case, servers)
            print(in_words(figures), flush=True)
            file.write(msgspec.json.encode(figures) + b"\n")
            file.flush()
    print("all measured", flush=True)


def main(arguments: Sequence[str]) -> None:
    """Do what the command says."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = ("all", "models", "start", "measure", "stop", "report")
    parser.add_argument("command", choices=commands)
    parser.add_argument("engines", nargs="*", help="by name: bench/gpu/servers.py")
    parser.add_argument("--folder", type=Path, default=Path.home() / "segue-gpu")
    parser.add_argument("--seconds", type=float, default=3_600, help="begin no case after these")
    parser.add_argument("--flags", default="", help="more flags for vLLM")
    parser.add_argument("--contexts", type=int, nargs="*", help="only these")
    parser.add_argument("--results", type=Path, nargs="*", help="of each machine, for the report")
    parser.add_argument("--json", type=Path, help="of the report")
    parser.add_argument("--svg", type=Path, help="of the report")
    options = parser.parse_args(arguments)
    until = time.monotonic() + options.seconds
    servers = Servers(options.folder, options.flags.split())
    every = stages()
    match options.command:
        case "models":
            make_models(options.folder)
        case "start":
            start(servers, options.engines)
        case "measure":
            ready = options.engines or [name for stage in every for name in stage.engines]
            cases = [case for stage in every for case in stage.cases]
            if options.contexts:
                cases = [case for case in cases if case.context in options.contexts]
            run(servers, cases, [name for name in ready if servers.is_up(name)], until)
        case "stop":
            servers.stop(options.engines or [name for stage in every for name in stage.engines])
        case "report":
            report(options.results or [servers.folder / RESULTS], options.json, options.svg)
        case _:
            make_models(options.folder)
            for stage in every:
                try:
                    run(servers, stage.cases, start(servers, stage.engines), until)
                finally:
                    servers.stop(stage.engines)
            report(options.results or [servers.folder / RESULTS], options.json, options.svg)


if __name__ == "__main__":
    main(sys.argv[1:])
