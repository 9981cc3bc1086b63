"""Frames as nobody should send them, several in a row on one socket, and what every one of them must get.

`scripts` makes them: valid frames of every type, from the examples of items and tools, with something changed in their
structure or in their bytes. `answered` sends a script to a real server and holds it to its word: each frame gets
exactly one answer on its own lane, the socket stays usable, and nothing that a client sends is our fault.

A script can be written down, one frame a line, also an empty one; `tests/corpus/frames` has those worth keeping. Lines
with `#` in front are remarks, but for `# begun` and `# answered`: there the client waits for what it has asked so far.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import websockets
from hypothesis import strategies as st

from tests.events import TERMINAL_STATUS, check_turn
from tests.support import MODEL, WEATHER, Served, Wire, wire
from tests.wire.test_items import EXAMPLES as ITEM_TEXTS
from tests.wire.test_tools import EXAMPLES as TOOL_TEXTS

Json = Any
WAITS = ("", "begun", "answered")
# In a frame these stand for the response and the call that the client has heard of last.
RESPONSE, CALL = "@RESPONSE@", "@CALL@"
LANE = re.compile(r"[A-Za-z0-9_.-]{1,256}\Z")
INVALID_DATA = 1007
# Every answer is there in milliseconds; a machine may be slow.
ANSWER_S_MAX = 20
# What is said where another message has ended the connection.
CLOSED = "The connection is closed because of another message on it."
# What Python makes an integer of.
DIGITS_MAX = 4_300
LANES = ("a", "b", "lane.1")


@dataclass(frozen=True)
class Step:
    """A frame, and what the client waits for behind it."""

    data: bytes
    then: str = ""


Script = tuple[Step, ...]


def read_script(text: bytes) -> Script:
    """A script as it is written down."""
    steps: list[Step] = []
    for line in text.removesuffix(b"\n").split(b"\n"):
        if line.startswith(b"#"):
            word = line[1:].strip().decode()
            if word in WAITS and steps:
                steps[-1] = Step(steps[-1].data, word)
        else:
            steps.append(Step(line))
    return tuple(steps)


def write_script(script: Script) -> bytes:
    """A script to be written down."""
    lines = [part for one in script for part in (one.data, f"# {one.then}".encode())]
    return b"".join(line + b"\n" for line in lines if line != b"# ")


# --- what is asked of a server -------------------------------------------------------------------


class Unknown:
    """The lane of a frame that nobody can be sure of."""


UNKNOWN = Unknown()


def lane_of(frame: bytes) -> str | Unknown | None:
    """The lane on which this frame must be answered."""
    try:
        value = json.loads(frame, parse_constant=_no_constant)
        # With each value of a name that stands there twice.
        pairs = json.loads(frame, object_pairs_hook=list)
        json.dumps(pairs, ensure_ascii=False).encode()
    except (ValueError, RecursionError):
        return UNKNOWN
    if not isinstance(value, dict):
        return None
    if value.get("type") in ("response.steer", "response.append"):
        return UNKNOWN  # that of the response that they are for
    lane = value.get("stream_id")
    return lane if isinstance(lane, str) and LANE.match(lane) else None


def _integer(digits: str) -> int:
    return int(digits[:DIGITS_MAX])


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


class Talk:
    """One connection: what was sent, and what has come of it."""

    def __init__(self, socket: Wire) -> None:
        self._socket = socket
        self.sent: list[bytes] = []
        # The lane of every answer.
        self.answers: list[str | None] = []
        self._steer_answers = 0
        self._turns: dict[str | None, list[dict[str, Any]]] = {}
        # Rollouts that wait, with what they wait for.
        self._waiting: dict[str | None, dict[str, Any]] = {}
        # Responses that were steered, and what may have been created behind them, by us or by the server.
        self._steered: set[str] = set()
        self._successors: set[str | None] = set()
        self._doubtful = 0
        self._names = {RESPONSE: "resp_none", CALL: "call_none"}

    async def send(self, frame: bytes) -> None:
        """A text frame of these bytes, whatever they are."""
        for name, value in self._names.items():
            frame = frame.replace(name.encode(), value.encode())
        self.sent.append(frame)
        await self._socket.socket.send(frame, text=True)

    async def run(self, script: Script) -> None:
        """Send all frames, hear all answers, and see that the socket still works."""
        for step in script:
            begun = len(self._turns)
            await self.send(step.data)
            if step.then == "begun":
                await self._hear_until(lambda b=begun: len(self._turns) > b or self._is_even)
            elif step.then == "answered":
                await self._hear_until(lambda: self._is_even)
        await self._finish()
        await self.send(json.dumps(create(input="Still there?", store=False)).encode())
        last = await self._hear_until(lambda: self._is_even)
        assert last.get("type") == "response.completed" or self._doubtful, last
        self._check_counts()

    @property
    def _asked(self) -> int:
        return len(self.sent)

    @property
    def _is_even(self) -> bool:
        """Whether every frame has its answer, and nothing runs but what waits for us."""
        answered = len(self.answers) + self._steer_answers
        is_blocked = bool(self._waiting) and set(self._turns) == set(self._waiting)
        return (answered >= self._asked and set(self._turns) <= set(self._waiting)) or (
            is_blocked and self._is_behind_a_wait(answered)
        )

    def _is_behind_a_wait(self, answered: int) -> bool:
        """A create behind a rollout that waits is silent until that is over."""
        blocked = [lane_of(one) for one in self.sent]
        return self._asked - answered <= sum(
            lane is UNKNOWN or lane in self._waiting for lane in blocked
        )

    async def _finish(self) -> None:
        """Give rollouts what they wait for, until nothing is open."""
        while True:
            for waiting in list(self._waiting.values()):
                await self.send(json.dumps(outputs_for(waiting)).encode())
                self._waiting.pop(waiting.get("stream_id"))
            await self._hear_until(lambda: bool(self._waiting) or self._is_even)
            if not self._waiting:
                return

    async def _hear_until(self, is_so: Any) -> dict[str, Any]:
        event: dict[str, Any] = {}
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                while not is_so():
                    # What is echoed may be a number that Python does not take.
                    event = json.loads(await self._socket.socket.recv(), parse_int=_integer)
                    self._hear(event)
        except TimeoutError:
            raise AssertionError(
                f"{self._asked} frames, {len(self.answers) + self._steer_answers} answers: {self.sent}"
            ) from None
        return event

    def _hear(self, event: dict[str, Any]) -> None:
        kind, lane = event["type"], event.get("stream_id")
        check_blame(event)
        if kind == "error":
            self.answers.append(lane)
        elif kind.startswith("response.steer."):
            self._hear_of_steer(event, lane)
        elif kind == "response.created":
            assert lane not in self._turns, f"two responses run on lane {lane}"
            self._turns[lane] = [event]
            self._names[RESPONSE] = event["response"]["id"]
            self._note_successor(event["response"]["previous_response_id"], lane)
        else:
            self._hear_of_turn(event, lane)

    def _hear_of_steer(self, event: dict[str, Any], lane: str | None) -> None:
        steer = event["steer"]
        if event["type"] == "response.steer.accepted":
            self._steered.add(steer["previous_response_id"])
            self._steer_answers += 1
        elif event["type"] == "response.steer.failed" and "id" not in steer:
            self._steer_answers += 1
        turn = self._turns.get(lane)
        if turn and turn[0]["response"]["id"] == steer["previous_response_id"]:
            turn.append(event)

    def _note_successor(self, parent: str | None, lane: str | None) -> None:
        """A response behind a steered one is the server's own, unless somebody has asked for it."""
        if parent in self._steered:
            if any(parent.encode() in one and b"steer" not in one for one in self.sent):
                self._doubtful += 1
            else:
                self._successors.add(lane)

    def _hear_of_turn(self, event: dict[str, Any], lane: str | None) -> None:
        kind = event["type"]
        assert lane in self._turns, f"{kind} on lane {lane}, where nothing runs"
        self._turns[lane].append(event)
        if kind == "response.output_item.done" and "call_id" in event["item"]:
            self._names[CALL] = event["item"]["call_id"] or "call_none"
        if kind == "response.done":
            self._waiting[lane] = event
            self.answers.append(lane)
        elif kind in TERMINAL_STATUS:
            self._waiting.pop(lane, None)
            check_turn(self._turns.pop(lane), lane)
            if lane in self._successors:
                self._successors.discard(lane)
            else:
                self.answers.append(lane)
        elif kind != "response.in_progress":
            self._waiting.pop(lane, None)

    def _check_counts(self) -> None:
        """Exactly one answer for each frame, on its lane; whose a response behind a steered one is may be in doubt."""
        wanted = Counter(lane for lane in map(lane_of, self.sent) if not isinstance(lane, Unknown))
        got = Counter(self.answers)
        assert not wanted - got or self._doubtful, f"no answer on {wanted - got}: {self.sent}"
        count = len(self.answers) + self._steer_answers
        assert self._asked <= count <= self._asked + self._doubtful, (
            f"{self._asked} frames, {count} answers: {self.sent}"
        )


def outputs_for(waiting: dict[str, Any]) -> dict[str, Any]:
    """The append that a rollout waits for."""
    outputs = []
    for owed in waiting["required_input"]:
        match owed["type"]:
            case "shell_call_output":
                outcome = {"type": "exit", "exit_code": 0}
                given: Json = [{"stdout": "", "stderr": "", "outcome": outcome}]
                outputs.append({**owed, "output": given})
            case "apply_patch_call_output":
                outputs.append({**owed, "status": "completed"})
            case "tool_search_output":
                outputs.append({**owed, "tools": []})
            case _:
                outputs.append({**owed, "output": "done"})
    return {"type": "response.append", "response_id": waiting["response_id"], "input": outputs}


def check_blame(event: dict[str, Any]) -> None:
    """Nothing that a client sends makes us fail; but what is no text ends the connection, and what runs on it."""
    error = event.get("error") or event.get("response", {}).get("error") or {}
    if error.get("message", "").startswith(CLOSED):
        return
    assert event.get("status", 400) < 500, event
    assert error.get("code") != "server_error", event


async def answered(served: Served, script: Script) -> None:
    """Hold a server to its word. Only text that is no text may end the connection, and with the code that says so."""
    async with wire(served, close_timeout=5) as socket:
        talk = Talk(socket)
        try:
            await talk.run(script)
        except websockets.ConnectionClosed as closed:
            code = closed.rcvd.code if closed.rcvd else None
            assert (code, any(map(_is_no_text, talk.sent))) == (INVALID_DATA, True), talk.sent
        except AssertionError as wrong:
            wrong.add_note(f"As it would stand in the corpus:\n{write_script(script)!r}")
            raise


def _is_no_text(frame: bytes) -> bool:
    try:
        frame.decode()
    except UnicodeDecodeError:
        return True
    return False


# --- what is sent --------------------------------------------------------------------------------


def create(**fields: Json) -> dict[str, Json]:
    """A `response.create`."""
    return {"type": "response.create", "model": MODEL, **fields}


ITEMS: list[Json] = [json.loads(one) for one in ITEM_TEXTS]
TOOLS: list[Json] = [json.loads(one) for one in TOOL_TEXTS]
CALLED = {"type": "function_call", "call_id": "call_1", "name": "get_weather", "arguments": "{}"}
ANSWERED = {"type": "function_call_output", "call_id": "call_1", "output": "sunny"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
INPUTS: list[Json] = [
    "Hello",
    "",
    [],
    [{"role": "user", "content": "Hello"}],
    [{"role": "user", "content": "Weather?"}, CALLED, ANSWERED],
    [{"type": "function_call_output", "call_id": CALL, "output": "sunny"}],
    [{"role": "user", "content": "Hello"}, {"type": "compaction_trigger"}],
]
# Creates that work, and go on from each other; what is drawn is put on top of them.
STARTS: list[dict[str, Json]] = [
    create(input="Hello"),
    create(input="Hello", previous_response_id=RESPONSE),
    create(input="Weather?", tools=[WEATHER]),
    create(input="Weather?", tools=[WEATHER], rollout=True),
    create(input="Weather?", tools=[WEATHER], rollout=True, store=False),
    create(
        input=[{"type": "function_call_output", "call_id": CALL, "output": "sunny"}],
        previous_response_id=RESPONSE,
        tools=[WEATHER],
    ),
    create(input="Hello", generate=False, store=False),
    # A remote server, and what it has listed before.
    create(
        input=[
            {"role": "user", "content": "Hello"},
            {
                "type": "mcp_list_tools",
                "server_label": "far",
                "tools": [{"name": "f", "input_schema": {"type": "object"}}],
            },
        ],
        tools=[{"type": "mcp", "server_label": "far", "server_url": "https://far.example/"}],
    ),
    # What others have run, told to the model as it came.
    create(
        input=[
            {"role": "user", "content": "Hello"},
            {
                "type": "file_search_call",
                "id": "fs_1",
                "queries": ["q"],
                "results": [{"text": "t"}],
            },
            {"type": "program", "id": "p_1", "call_id": "call_2", "code": "1"},
            {"type": "program_output", "call_id": "call_2", "result": {"a": [1]}},
        ],
        tools=[{"type": "custom", "name": "c", "format": {"type": "text"}}],
    ),
]
# Fields that a create may have, with values that are right at least sometimes.
USUAL: dict[str, list[Json]] = {
    "stream_id": list(LANES),
    "previous_response_id": [RESPONSE, None],
    "store": [True, False, None],
    "generate": [True, False],
    "instructions": ["Be brief.", None],
    "max_output_tokens": [1, 16, 2**63 - 1],
    "temperature": [0, 1.5],
    "top_p": [0, 1],
    "include": [["message.output_text.logprobs"], ["reasoning.encrypted_content"], []],
    "text": [
        {"format": {"type": "json_object"}},
        {"format": {"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": True}},
        {"verbosity": "low"},
    ],
    "reasoning": [{"effort": "low", "summary": "auto"}, {"context": "all_turns"}],
    "metadata": [{"a": "b"}, {}],
    "truncation": ["auto", "disabled"],
    "parallel_tool_calls": [True, False],
    "context_management": [[{"type": "compaction", "compact_threshold": 1000}]],
    "stream": [True, False],
    "stream_options": [{"include_obfuscation": True}],
    "client_metadata": [{"traceparent": "00-" + "1" * 32 + "-" + "2" * 16 + "-01"}],
    "service_tier": ["auto", "flex"],
}
RARE: dict[str, list[Json]] = {
    "previous_response_id": ["resp_none"],
    "tools": [[WEATHER], [], None, TOOLS[:4]],
    "tool_choice": ["auto", "none", "required", {"type": "function", "name": "get_weather"}],
    "rollout": [True, False],
    "top_logprobs": [0, 20],
    "max_tool_calls": [0, 1],
    "conversation": ["conv_none", {"id": "conv_none"}],
    "idempotency_key": ["k"],
    "background": [False, True],
    "prompt_cache_options": [{"prewarm": True}],
}
# Stand for JSON that Python would not write.
RAW: dict[str, bytes] = {
    "@NaN@": b"NaN",
    "@Infinity@": b"-Infinity",
    "@1e999@": b"1e999",
    "@digits@": b"9" * 5000,
    "@deep@": b"[" * 600 + b"]" * 600,
    "@deeper@": b"[" * 2000 + b"]" * 2000,
    "@bottomless@": b'{"a":' * 30_000,
    "@zero@": b"-0",
    "@lead@": b"007",
}
ODD: list[Json] = [
    None, True, False, 0, 1, -1, 21, 2**31, 2**53, 2**63, 2**64, 10**40, 1.5, 1e308, -1e-308,
    "", "\0", "\ud800", "\udfff\ud800", "a b", "å", "x" * 300, "null", "response.create", "auto",
    RESPONSE, CALL, MODEL, [], {}, [[]], [None], [[], {}], {"": {}}, {"type": None}, {"type": "message"},
    {"role": "user", "content": "Hi"}, {"id": RESPONSE}, {"type": "item_reference", "id": RESPONSE},
    *RAW,
]  # fmt: skip
CHUNKS = [
    b"\x00", b"\xff", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xc0\xaf", b'"', b"\\", b"\\u0000", b"\\ud800",
    b"{", b"}", b"[", b"]", b",", b":", b"\xef\xbb\xbf", b"\x1f", b"\t", b" ", b"0", b"-", b"e", b"//", b"null",
    b'"type":', b'"stream_id":"a",', b'"input":', b'"id":"@RESPONSE@",',
]  # fmt: skip


def _some(values: list[Json]) -> st.SearchStrategy[Json]:
    return st.sampled_from(values)


def _named(fields: dict[str, list[Json]], count_max: int) -> st.SearchStrategy[dict[str, Json]]:
    one = st.sampled_from(sorted(fields)).flatmap(lambda n: st.tuples(st.just(n), _some(fields[n])))
    return st.lists(one, max_size=count_max).map(dict)


_fields = st.builds(lambda usual, rare: usual | rare, _named(USUAL, 3), _named(RARE, 1))
_inputs = st.one_of(_some(INPUTS), st.lists(_some(ITEMS), min_size=1, max_size=3))
_tools = st.lists(_some(TOOLS), max_size=3)


@st.composite
def creates(draw: st.DrawFn) -> dict[str, Json]:
    """A create that is often right."""
    if draw(st.integers(0, 2)):
        return draw(_some(STARTS)) | draw(_named(USUAL, 2))
    made = create(input=draw(_inputs), **draw(_fields))
    return made | {"tools": draw(_tools)} if draw(st.booleans()) else made


_others = st.one_of(
    st.builds(
        lambda given: {"type": "response.steer", "previous_response_id": RESPONSE, "input": given},
        _some(["Shorter.", "", [{"role": "user", "content": "Shorter."}], ITEMS[2:4], 5]),
    ),
    st.builds(
        lambda given: {"type": "response.append", "response_id": RESPONSE, "input": given},
        _some([[{**ANSWERED, "call_id": CALL}], [], [ANSWERED], ITEMS[:2], "x", None]),
    ),
    st.builds(
        lambda kind: {"type": kind},
        _some(["response.cancel", "response.done", "session.update", "error", ""]),
    ),
)


def _paths(value: Json, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value."""
    yield path
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _paths(inner, (*path, key))


def _changed(value: Json, path: tuple[Any, ...], change: Any) -> Json:
    """The value with one place changed."""
    if not path:
        return change(value)
    key, *rest = path
    if isinstance(value, dict):
        return {**value, key: _changed(value[key], tuple(rest), change)}
    return [_changed(v, tuple(rest), change) if i == key else v for i, v in enumerate(value)]


def _without(value: Json, path: tuple[Any, ...]) -> Json:
    *above, key = path

    def drop(inner: Json) -> Json:
        if isinstance(inner, dict):
            return {name: one for name, one in inner.items() if name != key}
        return [one for index, one in enumerate(inner) if index != key]

    return _changed(value, tuple(above), drop)


@st.composite
def bent(draw: st.DrawFn, value: Json) -> Json:
    """A JSON value with one place of it replaced, dropped, wrapped, or put elsewhere."""
    paths = list(_paths(value))
    path = draw(st.sampled_from(paths))
    match draw(st.integers(0, 5)):
        case 0 if path:
            return _without(value, path)
        case 1:
            return _changed(value, path, lambda one: [one])
        case 2:
            return _changed(value, path, lambda one: {"type": one})
        case 3:
            other = draw(st.sampled_from(paths))
            return _changed(value, path, lambda _: _at(value, other))
        case _:
            odd = draw(_some(ODD))
            return _changed(value, path, lambda _: odd)


def every_place() -> Iterator[Step]:
    """Every example of an item, a tool and a field, with every odd value in every place of it: what chance would take
    long to find."""
    user = {"role": "user", "content": "Hello"}
    for item in ITEMS:
        for one in _with_odd(item):
            yield Step(encoded(create(input=[user, one])), "answered")
    for tool in TOOLS:
        for one in _with_odd(tool):
            yield Step(encoded(create(input="Hello", tools=[one])), "answered")
    for name, values in (*USUAL.items(), *RARE.items()):
        for value in values:
            for one in _with_odd(value):
                yield Step(encoded(create(input="Hello") | {name: one}), "answered")


def _with_odd(value: Json) -> Iterator[Json]:
    for path in _paths(value):
        for odd in ODD:
            yield _changed(value, path, lambda _, odd=odd: odd)


def _at(value: Json, path: tuple[Any, ...]) -> Json:
    for key in path:
        value = value[key]
    return value


def encoded(value: Json) -> bytes:
    """JSON, and what only looks like it."""
    data = json.dumps(value).encode()
    for name, raw in RAW.items():
        data = data.replace(f'"{name}"'.encode(), raw)
    return data


@st.composite
def torn(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes with something cut out, put in, doubled or flipped."""
    start = draw(st.integers(0, len(data)))
    end = min(len(data), start + draw(st.integers(0, 8)))
    match draw(st.integers(0, 4)):
        case 0:
            return data[:start] + data[end:]
        case 1:
            return data[:start]
        case 2:
            return data[:end] + data[start:]
        case 3 if start < len(data):
            flipped = data[start] ^ (1 << draw(st.integers(0, 7)))
            return data[:start] + bytes([flipped]) + data[start + 1 :]
        case _:
            return data[:start] + draw(st.sampled_from(CHUNKS)) + data[end:]


@st.composite
def doubled(draw: st.DrawFn, value: dict[str, Json]) -> bytes:
    """An object in which one key stands twice."""
    data = encoded(value)
    if not value or not data.startswith(b"{"):
        return data
    again = encoded({draw(st.sampled_from(sorted(value))): draw(_some(ODD))})
    if draw(st.booleans()):
        return again[:-1] + b"," + data[1:]
    return data[:-1] + b"," + again[1:]


@st.composite
def spoilt(draw: st.DrawFn, value: Json, kinds: tuple[str, ...]) -> bytes:
    """One frame: as it should be, bent, with a key twice, or torn."""
    kind = draw(st.sampled_from(kinds))
    if kind == "twice":
        return _one_line(draw(doubled(value)))
    if kind == "bent":
        for _ in range(draw(st.integers(1, 3))):
            value = draw(bent(value))
    data = encoded(value)
    return _one_line(draw(torn(data)) if kind == "torn" else data)


OFTEN = ("right", "right", "right", "bent", "bent", "twice", "torn")
SELDOM = ("right", "right", "right", "right", "bent")


@st.composite
def single(draw: st.DrawFn) -> list[Step]:
    """A frame by itself."""
    value: Json = draw(creates() if draw(st.integers(0, 3)) else _others)
    return [Step(draw(spoilt(value, OFTEN)), draw(st.sampled_from(WAITS)))]


@st.composite
def followed(draw: st.DrawFn) -> list[Step]:
    """A create that works, as a rule, and what belongs behind it: a steer, an append, a turn that goes on from it."""
    lane = draw(st.sampled_from(({}, {"stream_id": "a"})))
    first = draw(_some(STARTS[2:5] if draw(st.booleans()) else STARTS[:1])) | lane
    steps = [Step(draw(spoilt(first, SELDOM)), draw(st.sampled_from(("begun", "answered"))))]
    for _ in range(draw(st.integers(1, 3))):
        value = draw(st.one_of(_others, _others, _some(STARTS).map(lambda one: one | lane)))
        steps.append(Step(draw(spoilt(value, SELDOM)), draw(st.sampled_from(WAITS))))
    return steps


def _one_line(data: bytes) -> bytes:
    """Corpora have a frame a line, without a sharp in front."""
    return re.sub(rb"[\n\r]", b" ", data).replace(b"#", b"%")


scripts = st.lists(st.one_of(single(), single(), followed()), min_size=1, max_size=4).map(
    lambda parts: tuple(step for part in parts for step in part)
)
