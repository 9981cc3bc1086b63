"""Does an engine that keeps a conversation answer as one that gets the whole prompt? Real weights, temperature 0.

    python -m bench.gpu.exact exact [--folder FOLDER] [--conversations 8] [--turns 10] [--json FILE]

The same conversations are held three times in front of the same vLLM, which has so little room that it preempts: all at
once with sessions (`segue`), all at once by whole prompts (`segue-plain`), and by whole prompts one after the other.
Answers are compared up to the first that differs in each conversation; in what whole prompts differ among themselves,
the engine differs.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

from bench.gpu.cases import SHAPE
from bench.gpu.servers import Servers
from bench.gpu.talk import Place, SocketTalk, TalkUsage, _ended
from segue_bench.client import read_message
from segue_bench.workload import WorkloadMaker

Answers = list[str]


class Recorded(SocketTalk):
    """A chain on a socket whose answers are kept."""

    answers: Answers

    def _exchange(self, body: bytes) -> TalkUsage:
        self.connection.send(body)
        while (last := self._seen(read_message(self.connection))) is None:
            pass
        response = _ended(last)
        parts = (part.text for item in response.output for part in item.content or ())
        self.answers.append("".join(parts))
        self._parent = b'"previous_response_id":"' + response.id.encode() + b'",'
        self.said = []
        return response.usage or TalkUsage()


def converse(url: str, model: Path, number: int, turns: int) -> Answers:
    """One conversation; the same number says the same."""
    talk = Recorded(Place(url, [], model, 64, 0.0))
    talk.answers = []
    outputs = WorkloadMaker(SHAPE, 1 + number).workload(0, 1.0, turns).outputs
    for place, text in enumerate(outputs):
        talk.say("user", f"Part {place} of {number}: {text[:400]}")
        talk.turn()
    return talk.answers


def hold(url: str, model: Path, conversations: int, turns: int, at_once: int) -> list[Answers]:
    """All conversations."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(
            pool.map(lambda number: converse(url, model, number, turns), range(conversations))
        )


def alike(first: Sequence[Answers], second: Sequence[Answers]) -> dict[str, object]:
    """How many answers are the same, up to the first that differs in each conversation."""
    same = compared = 0
    differing: list[tuple[int, int]] = []
    for number, (ours, theirs) in enumerate(zip(first, second, strict=True)):
        for turn, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            compared += 1
            if a != b:
                differing.append((number, turn))
                break
            same += 1
    return {"same": same, "compared": compared, "first_differing": differing}


def asked(url: str) -> str:
    """What a page says; nothing if it is not there."""
    try:
        with urlopen(url, timeout=10) as answer:
            return str(answer.read().decode())
    except (URLError, OSError):
        return ""


def preemptions(engine_url: str) -> float:
    """So far."""
    found = re.findall(
        r"^vllm:num_preemptions_total(?:{[^}]*})? (\S+)", asked(f"{engine_url}/metrics"), re.M
    )
    return sum(map(float, found))


def main(arguments: Sequence[str]) -> int:
    """Hold the conversations and compare; 1 if sessions differ where whole prompts do not."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.exact", description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--folder", type=Path, default=Path.home() / "segue-gpu")
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--port-from", type=int, default=0)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    servers = Servers(options.folder)
    many, turns = options.conversations, options.turns

    def url(gateway: str) -> str:
        return f"http://127.0.0.1:{options.port_from + servers.port(options.engine, gateway)}"

    model = servers.model(options.engine)
    told: dict[str, Any] = {"engine": options.engine, "conversations": many, "turns": turns}
    held: dict[str, list[Answers]] = {}
    for name, gateway, at_once in (
        ("sessions", "segue", many),
        ("whole, at once", "segue-plain", many),
        ("whole, one by one", "segue-plain", 1),
    ):
        before = preemptions(url(""))
        held[name] = hold(url(gateway), model, many, turns, at_once)
        told[f"{name}: preemptions"] = preemptions(url("")) - before
    told["sessions against whole, one by one"] = alike(held["sessions"], held["whole, one by one"])
    told["whole, at once against one by one"] = alike(
        held["whole, at once"], held["whole, one by one"]
    )
    told["distinct answers"] = len({answer for one in held["sessions"] for answer in one})
    told["plugin"] = asked(f"{url('')}/segue/session")[:2_000]
    print(json.dumps(told, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(told | {"answers": held}))
    sessions, whole = (
        told["sessions against whole, one by one"],
        told["whole, at once against one by one"],
    )
    return int(sessions["same"] < whole["same"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
