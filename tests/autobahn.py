"""Does the shipped server stack speak WebSocket as the RFC has it? Autobahn's cases against it, with a verdict.

    python -m tests.autobahn --wstest .cache/autobahn/bin/wstest      (`make test-autobahn` does both halves)

The port is the product's own: `build_server`, with uvicorn, our HTTP class, our socket class and the default limits but
one: 9.3.1 and 9.3.2 send 65,536 and 16,384 frames at once, which `frames_per_s` is there to refuse. Only the session
behind a socket is another one, because Autobahn wants an echo. Sections 1 to 7, 9 and 10 are run, and 12 and 13, which
ask for compression, to see that it is declined. No case may fail. Binary messages are refused by contract: for those
cases that would have them echoed, the pass is a close with 1003.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import uvloop

from segue.listener.socket import MessageFault, Socket, SocketClosed
from segue.memory.budget import Memory
from segue.memory.intake import Inflow, Intake
from segue.server.app import App
from segue.server.serve import build_server
from segue.settings.checks import load_settings

SECTIONS = ("1", "2", "3", "4", "5", "6", "7", "9", "10", "12", "13")
# What release 25.10.1 has in them; fewer would be a run that ended early.
CASES_MAX = {
    "1": 16, "2": 11, "3": 7, "4": 10, "5": 20, "6": 145, "7": 37, "9": 54, "10": 1, "12": 90, "13": 126,
}  # fmt: skip
BINARY = re.compile(r"1\.2\.|9\.[2468]\.")
UNSUPPORTED_DATA = 1003
GOOD = {"OK", "NON-STRICT", "INFORMATIONAL"}
# The whole takes a minute or two.
RUN_S_MAX = 1800
AGENT = "segue"


class Echo:
    """A session that says what it hears."""

    socket: Socket
    inflow = Inflow(Intake(1 << 30), "")

    def opened(self, socket: Socket) -> None:
        self.socket = socket

    def received(self, text: bytes) -> None:
        self.socket.send([text])

    def refused(self, kind: MessageFault, size: int) -> bytes | None:
        """Autobahn takes nothing but the close frame here; that an event goes first is tested elsewhere."""
        return None

    def resumed(self) -> None: ...

    def closed(self, how: SocketClosed) -> None: ...


@dataclass(frozen=True)
class Verdict:
    """How one case went; `outcome` is Autobahn's word, or ours for what the contract refuses."""

    case: str
    outcome: str
    has_passed: bool

    @property
    def section(self) -> str:
        return self.case.partition(".")[0]


def judge(case: str, result: Mapping[str, Any]) -> Verdict:
    """One entry of Autobahn's report."""
    behavior, ending = result["behavior"], result["behaviorClose"]
    if BINARY.match(case):
        is_refused = result["remoteCloseCode"] == UNSUPPORTED_DATA
        return Verdict(case, "refused" if is_refused else "FAILED", is_refused)
    if behavior == "UNIMPLEMENTED":
        return Verdict(case, "declined", case.startswith(("12.", "13.")))
    if behavior in GOOD and ending not in GOOD:
        return Verdict(case, "BAD CLOSE", False)
    return Verdict(case, behavior if behavior in GOOD else "FAILED", behavior in GOOD)


def table(verdicts: Sequence[Verdict]) -> str:
    """Outcomes by section."""
    outcomes = sorted({one.outcome for one in verdicts})
    lines = [f"{'section':8}{'cases':>7}" + "".join(f"{one:>15}" for one in outcomes)]
    rows = {section: [v for v in verdicts if v.section == section] for section in SECTIONS}
    for name, row in {**rows, "all": list(verdicts)}.items():
        if row:
            counts = Counter(one.outcome for one in row)
            cells = "".join(f"{counts[one] or '-':>15}" for one in outcomes)
            lines.append(f"{name:8}{len(row):>7}{cells}")
    return "\n".join(lines)


async def run(wstest: str, cases: Sequence[str]) -> list[Verdict]:
    """Serve, let Autobahn loose on it, and judge its report."""
    settings = load_settings({"engine": "scripted", "port": 0, "frames_per_s": 0}, environment={})
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    echoing = SimpleNamespace(
        http=_no_http,
        upgrades=SimpleNamespace(accept=lambda request, socket: Echo()),
        memory=Memory(),
    )
    server = build_server(cast(App, echoing), settings, listening.set_result)
    serving = asyncio.create_task(server.serve())
    try:
        url = (await asyncio.wait_for(listening, 10)).replace("http", "ws", 1)
        with tempfile.TemporaryDirectory() as folder:
            return await _ask(wstest, url, cases, Path(folder))
    finally:
        server.should_exit = True
        await serving


async def _ask(wstest: str, url: str, cases: Sequence[str], folder: Path) -> list[Verdict]:
    spec = {
        "outdir": str(folder),
        "servers": [{"agent": AGENT, "url": url}],
        "cases": list(cases),
        "exclude-cases": [],
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    asking = await asyncio.create_subprocess_exec(
        wstest, "-m", "fuzzingclient", "-s", str(folder / "spec.json"),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, cwd=folder,
    )  # fmt: skip
    try:
        printed, _ = await asyncio.wait_for(asking.communicate(), RUN_S_MAX)
    except TimeoutError:
        asking.kill()
        await asking.wait()
        raise SystemExit(f"Autobahn was not done after {RUN_S_MAX} s") from None
    if asking.returncode or not (folder / "index.json").exists():
        raise SystemExit(f"Autobahn ended with {asking.returncode}:\n{printed.decode()[-2000:]}")
    report = json.loads((folder / "index.json").read_text())[AGENT]
    return [judge(case, report[case]) for case in sorted(report, key=_order)]


def _order(case: str) -> list[int]:
    return [int(part) for part in case.split(".")]


async def _no_http(scope: object, receive: object, send: object) -> None:
    raise AssertionError("Autobahn asks for nothing but sockets")


def missing(verdicts: Sequence[Verdict]) -> list[str]:
    """Sections that were not run to their end."""
    counts = Counter(one.section for one in verdicts)
    return [
        f"section {section}: {counts[section]} of {count} cases"
        for section, count in CASES_MAX.items()
        if counts[section] != count
    ]


def main() -> int:
    """Run, print, and say by the exit status whether all is well."""
    parser = argparse.ArgumentParser(
        description="Autobahn's cases against the shipped socket class."
    )
    parser.add_argument("--wstest", required=True, help="where the command of autobahntestsuite is")
    parser.add_argument("--cases", help="only these, such as 1.*,7.1.* (default: all that count)")
    asked = parser.parse_args()
    cases = asked.cases.split(",") if asked.cases else [f"{one}.*" for one in SECTIONS]
    # It runs in a folder of its own.
    verdicts = uvloop.run(run(str(Path(asked.wstest).absolute()), cases))
    print(table(verdicts))
    odd = [one for one in verdicts if one.outcome in ("NON-STRICT", "INFORMATIONAL")]
    print("not strict or only told: " + (", ".join(one.case for one in odd) or "none"))
    failed = [one.case for one in verdicts if not one.has_passed]
    gaps = [] if asked.cases else missing(verdicts)
    print("failed: " + (", ".join([*failed, *gaps]) or "none"))
    return 1 if failed or gaps or not verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
