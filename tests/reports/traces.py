"""Real agent sessions replayed with faults put in: is every fault named rightly, and is nothing said of clean turns?

    python -m tests.reports.traces [FILE [TOKENS_OF_AN_ITEM]]

The sessions are numbers (`segue_bench/agent_sessions.json`, with its notice): how long each prompt was, and how much of
it an earlier one began with; without a file three are replayed. Here they become requests of a client that sends
its whole history: text with exactly this sharing, a block of it an item, now and then reasoning. Each request is
compared as the server compares it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Any, NamedTuple

from msgspec import structs

from segue.reports.compare import nearest, part
from segue.reports.prompts import KnownPrompt
from segue.reports.watch import RECENT_MAX
from segue.seams.prompt import NO_TOKENS, id_array
from segue.wire.items import Item
from tests.contracts.turns import item, response_of

ALL = Path(str(files("segue_bench") / "agent_sessions.json"))
SAMPLE = frozenset({"trace_0094", "trace_0038", "trace_0606"})
# Tokens of an item: a few messages of an agent, and a multiple of the blocks in which sharing was measured.
BLOCK = 512
# Every so many items the model has thought; and every so many turns there is a fault.
THOUGHT_EVERY, FAULT_EVERY = 5, 5
TOOLS = [{"type": "function", "name": f"tool_{n}", "parameters": {}} for n in range(8)]


class Request(NamedTuple):
    """What a client sends: blocks by name; the same name is the same text."""

    blocks: tuple[str, ...]
    head: int
    date: str = "Monday"
    tools: tuple[int, ...] = tuple(range(len(TOOLS)))


def requests(session: dict[str, Any], block: int) -> Iterator[Request]:
    """The requests of a session, in order."""
    made: list[tuple[str, ...]] = []
    head = session["tools"] + session["system"]
    for number, (parent, shared, given, *_) in enumerate(session["turns"]):
        kept = made[parent][: max(0, shared - head) // block] if parent >= 0 else ()
        new = max(1, (given - head) // block - len(kept))
        made.append((*kept, *(f"{session['id']} {number} {n}" for n in range(new))))
        yield Request(made[-1], head)


def _block(name: str) -> Item:
    number = int(name.rpartition(" ")[2])
    text = f"{name}; " * 10
    if name.startswith("summary"):
        return item(json.dumps({"type": "compaction", "encrypted_content": text}))
    if number % THOUGHT_EVERY == THOUGHT_EVERY - 1:
        content = [{"type": "reasoning_text", "text": text}]
        return item(json.dumps({"type": "reasoning", "content": content}))
    role = "assistant" if number % 2 else "user"
    return item(json.dumps({"role": role, "content": text, "type": "message"}))


@dataclass
class Writer:
    """Makes prompts of requests; the same text always becomes the same ids."""

    block: int
    items: dict[str, Item] = field(default_factory=dict)
    ids: dict[str, int] = field(default_factory=dict)

    def prompt(self, request: Request) -> KnownPrompt:
        """Tools first, then the system prompt, then the blocks."""
        tools = json.dumps([TOOLS[n] for n in request.tools])
        rules = f"It is {request.date}.\nBe an agent."
        response = response_of(
            "resp_1", tools=tools.encode(), instructions=json.dumps(rules).encode()
        )
        ids = id_array([self._id(tools)] * (request.head // 2))
        ids.extend([self._id(rules)] * (request.head - len(ids)))
        for name in request.blocks:
            ids.extend([self._id(name)] * self.block)
        prompt = NO_TOKENS.plus(ids)
        given = tuple(self.items.setdefault(name, _block(name)) for name in request.blocks)
        response = structs.replace(response, prompt_cache_key=None)
        return KnownPrompt(response, response.model, "default", given, prompt, "f", prompt.length)

    def _id(self, text: str) -> int:
        return self.ids.setdefault(text, len(self.ids))


def _without_thought(blocks: Sequence[str]) -> tuple[str, ...]:
    """The first thought is gone, if something stands after it that is lost with it."""
    numbers = [int(one.rpartition(" ")[2]) for one in blocks[:-2]]
    is_thought = [number % THOUGHT_EVERY == THOUGHT_EVERY - 1 for number in numbers]
    at = is_thought.index(True) if True in is_thought else len(blocks)
    return (*blocks[:at], *blocks[at + 1 :])


Fault = Callable[[Request], Request]
# By the reason that must be named.
FAULTS: dict[str, tuple[str, Fault]] = {
    "tool order": ("tools_changed", lambda one: one._replace(tools=one.tools[::-1])),
    "date": ("input_changed", lambda one: one._replace(date="Tuesday")),
    "dropped reasoning": (
        "reasoning_dropped",
        lambda one: one._replace(blocks=_without_thought(one.blocks)),
    ),
    "compaction": (
        "context_compacted",
        lambda one: one._replace(blocks=("summary of it 0", *one.blocks[-2:])),
    ),
}


@dataclass(frozen=True)
class Replayed:
    """What came of it: turns, faults by name, and what was named wrongly."""

    turns: int = 0
    faults: int = 0
    wrong: tuple[str, ...] = ()


def replay(sessions: Sequence[dict[str, Any]], block: int = BLOCK) -> Replayed:
    """All sessions, one after the other, of one owner. A fault is a turn of its own: the client forgets it again."""
    found = Replayed()
    recent: deque[KnownPrompt] = deque(maxlen=RECENT_MAX)
    names = list(FAULTS)
    for session in sessions:
        writer = Writer(block)
        for number, request in enumerate(requests(session, block)):
            new = writer.prompt(request)
            found = _judge(found, recent, new, None, f"{session['id']} turn {number}")
            recent.appendleft(new)
            if number % FAULT_EVERY != FAULT_EVERY - 1:
                continue
            name = names[found.faults % len(names)]
            reason, fault = FAULTS[name]
            broken = fault(request)
            # There must be something to lose, and a thought to drop.
            if len(request.blocks) > 2 * THOUGHT_EVERY and broken != request:
                where = f"{session['id']} turn {number} with {name}"
                found = _judge(found, recent, writer.prompt(broken), reason, where)
                found = replace(found, faults=found.faults + 1)
    return found


def _judge(
    found: Replayed, recent: deque[KnownPrompt], new: KnownPrompt, reason: str | None, where: str
) -> Replayed:
    old = nearest(recent, new)
    parting = part(old, new) if old is not None else None
    said = parting.reason if parting is not None and parting.lost else None
    wrong = found.wrong if said == reason else (*found.wrong, f"{where}: {said}, not {reason}")
    return replace(found, turns=found.turns + 1, wrong=wrong)


def load() -> list[dict[str, Any]]:
    """Three of them."""
    return [one for one in load_all(ALL) if one["id"] in SAMPLE]


def load_all(path: Path) -> list[dict[str, Any]]:
    sessions: list[dict[str, Any]] = json.loads(path.read_text("utf-8"))["sessions"]
    return sessions


def main(arguments: Sequence[str]) -> int:
    """Replay a whole file; 1 if anything was named wrongly."""
    path, block = (*arguments, *("", "")[len(arguments) :])
    sessions = load_all(Path(path)) if path else load()
    found = replay(sessions, int(block or BLOCK))
    kinds = Counter(one.rpartition(": ")[2] for one in found.wrong)
    print(f"{len(sessions)} sessions, {found.turns} turns, {found.faults} of them with a fault")
    print(f"{len(found.wrong)} named wrongly", *kinds.most_common(), *found.wrong[:20], sep="\n  ")
    return int(bool(found.wrong))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
