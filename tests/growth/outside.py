"""What others say besides requests, as a table: pages, hits, names, tools of MCP servers, forms, skills, templates,
patterns of operators, and the streams of engines. Each is made at any size, and walked by the code that walks it in the
product, on the event loop or in a thread as there.

A walk that raises, or gives a result that cannot be, is a finding as well as one that grows.
"""

from __future__ import annotations

import asyncio
import json
import zipfile
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import httpx2
import msgspec

from segue.border.numbers import BRACKETS_MAX, COMMAS_FOR_BRACKET, few
from segue.bundles.bundle import inline_bundle
from segue.engine_sessions.frames import ProtocolBroken, SessionTokens, read_said
from segue.engines.facts import facts_in
from segue.errors import ApiError
from segue.guards.rules import Rules, RulesGuard
from segue.mcp.bounded import BoundedTransport, within_limits
from segue.mcp.definitions import listed_offers, listing, servers_of
from segue.printable import printable
from segue.readers.plain_names import PLAIN_NAME_MAX, PlainNames
from segue.schemas.followed import UNROLLED_MAX, unrolled
from segue.tools.tool_search import search
from segue.vocabularies.chat_template import ChatTemplate, TemplateRunner
from segue.web.cite import cite
from segue.web.fetch import Fetcher, Policy
from segue.web.html import Page, open_page, read_page
from segue.web.search import JsonEngine, read_answer, read_hits
from segue.web.web import PATTERN_CHARS_MAX, PATTERN_WORDS_MAX, matches_text
from segue.wire.codec import decode_tools
from segue.wire.effects import Effects
from segue.wire.items import RemoteTool
from segue.wire.tools import FunctionTool, NamespaceTool, Offer, Tools
from segue_embedded.weights import find_weights
from tests.contracts.dialect import tools_of
from tests.growth.client import Client, create
from tests.growth.lying_engine import (
    AFTER_THE_END,
    AT_ONCE,
    GOOD,
    ONE_BY_ONE,
    WHOLE,
    lying_engine,
)
from tests.growth.measure import Bench, Case, Structure, bench

Json = Any
Walk = Callable[[Any], Awaitable[object]]
RESPONSES = "/v1/responses"
# In an answer with as many values as are read.
SLOW = (20_000, 65_000)
# No count of tokens is larger in earnest.
COUNT_MAX = 2**31


@dataclass(frozen=True)
class Outside:
    """Something that others say: how it is made, how it is walked, how much of it in `make test`, and at its limit."""

    name: str
    make: Callable[[int], Any]
    walk: Walk
    short: int
    limit: int


def on_loop(call: Callable[[Any], object]) -> Walk:
    async def walk(value: Any) -> object:
        return call(value)

    return walk


def in_thread(call: Callable[[Any], object]) -> Walk:
    return lambda value: asyncio.to_thread(call, value)


# --- pages and hits ---------------------------------------------------------------------------------------

PAGE = "https://pages.example/a.html"


def page(text: str) -> Callable[[int], bytes]:
    """A page in which this is repeated."""
    return lambda size: b"<html><body>" + text.encode() * size


async def read(data: bytes) -> object:
    return await open_page(PAGE, data, "text/html")


async def fetch(sent: bytes) -> None:
    """From a site that sends this, and does not care whether it is read."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(sent)
        with suppress(ConnectionError):
            await writer.drain()
        writer.close()

    fetcher = Fetcher(Policy("own"))
    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        with suppress(ApiError):
            await fetcher.fetch(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
    fetcher.close()


def interim(size: int) -> bytes:
    return b"HTTP/1.1 100 Continue\r\n\r\n" * size + b"HTTP/1.1 204 Nothing\r\n\r\n"


def said_charset(charset: str, text: bytes) -> Callable[[int], bytes]:
    """A page that says how it is to be decoded."""
    return lambda size: f"<meta charset={charset}>".encode() + text * size


async def read_markdown(data: bytes) -> object:
    return await asyncio.to_thread(read_page, "https://pages.example/a.md", data, "text/markdown")


async def find(text: str) -> object:
    page = Page(PAGE, "a", text)
    patterns = ("a" * (PATTERN_CHARS_MAX - 1) + "b", "a " * (PATTERN_WORDS_MAX - 1) + "b")
    return [await asyncio.to_thread(matches_text, page, pattern) for pattern in patterns]


def open_tag(size: int) -> bytes:
    return b"<a" + b" b" * size


def open_script(size: int) -> bytes:
    return b"<script>" + b"</" * size


# Just short of what may be open.
MANY_ATTRIBUTES = "<a" + " b" * 30_000 + ">"


def hits(size: int) -> Json:
    row = {"title": "<b>About</b> rain", "content": "Clouds <i>bring</i> rain. " * 3}
    return {"results": [{"url": f"https://a.example/{n}", **row} for n in range(size)]}


def marked_hit(size: int) -> Json:
    return {"results": [{"url": "https://a.example", "title": "<" * size, "content": "<b" * size}]}


def cited(size: int) -> str:
    return "As [1], https://a.example/x[ and [2, 3, 4] say. " * size


def full_answer(size: int) -> bytes:
    return b'{"results":[' + b"[]," * size + b"[]]}"


def slow_answer(size: int) -> bytes:
    """Numbers that the JSON library reads slowly."""
    return b'{"results":[1e300' + b",1e300" * size + b"]}"


def read_full_answer(data: bytes) -> None:
    """It may be refused."""
    with suppress(ValueError):
        read_answer(data)


def read_mcp_answer(data: bytes) -> None:
    """It may be refused."""
    with suppress(httpx2.ReadError):
        msgspec.json.decode(within_limits(data))


def read_event(data: bytes) -> None:
    msgspec.json.decode(few(data) or b"0")


def long_description(size: int) -> tuple[Offer, ...]:
    return tools_of(FunctionTool(name="f", description="aB" * size, parameters=None)).offers


def one_about(size: int) -> tuple[Offer, ...]:
    """Many tools of a namespace whose description is long, too."""
    own = [FunctionTool(name=f"f{n}", parameters=None) for n in range(size)]
    return tools_of(NamespaceTool(name="n", description="ab cd " * size, tools=own)).offers


def all_models(size: int) -> bytes:
    return b'{"data":[' + b"{}," * size + b"{}]}"


def read_models(data: bytes) -> None:
    """As an engine's answers are read."""
    facts_in(few(data), "m")


def said_at_once(size: int) -> bytes:
    return msgspec.msgpack.encode([SessionTokens(1, [1])] * size)


def hear(data: bytes) -> None:
    with suppress(ProtocolBroken):
        read_said(data)


SOURCES = [msgspec.defstruct("Source", ["url", "title"])("https://a.example/x", "x")] * 4

# --- names ------------------------------------------------------------------------------------------------


def like_names(size: int) -> Json:
    """Names that are alike where they are cut, and that are told apart by what is not allowed."""
    long = "server_with_a_long_name_" * 3
    names = [f"{long}{n}" for n in range(size // 2)]
    return [*names, *(f"a{'.' * (n % 7)}_{n // 7}" for n in range(size - len(names)))]


def check_names(names: Sequence[str]) -> None:
    """Each tool has a name of its own at an endpoint, and is found by it."""
    given = dict.fromkeys(names)
    tools = tools_of(*(FunctionTool(name=name, parameters=None) for name in given))
    table = PlainNames(tools.offers)
    plain = [table.name(name) for name in given]
    assert len({*plain}) == len(plain), "two tools have one name"
    assert max(map(len, plain)) <= PLAIN_NAME_MAX
    for name, called in zip(given, plain, strict=True):
        offer = table.offer(called)
        assert offer is not None
        assert offer.qualified_name == name, f"{called} is another tool"


# --- tools of MCP servers ---------------------------------------------------------------------------------


def named_tools(size: int) -> tuple[Tools, list[RemoteTool]]:
    """A server whose tools are all named: as allowed, as those that need a yes, as those that do not."""
    names = [f"tool_{n}" for n in range(size)]
    rule = {"always": {"tool_names": names[::2]}, "never": {"tool_names": names[1::2]}}
    about = {"type": "mcp", "server_label": "s", "allowed_tools": names, "require_approval": rule}
    search = {"type": "tool_search"}
    tools, _ = decode_tools(json.dumps([{**about, "defer_loading": True}, search]).encode(), None)
    return tools, [RemoteTool(name) for name in names]


def list_tools(given: tuple[Tools, list[RemoteTool]]) -> None:
    """They are listed, and offered to the model, which has to search for them."""
    tools, remote = given
    listed = listing("mcpl_1", servers_of(tools)["s"], remote)
    offers = listed_offers(tools, Effects(listed=(listed,)), None)
    assert len(tools.with_hosted(offers).deferred) == len(remote)


# --- forms, skills, templates, patterns -------------------------------------------------------------------


def form(part: bytes) -> Callable[[int], bytes]:
    """A form in which this is repeated before the file."""
    end = b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nx\r\n--xyz--\r\n'
    return lambda size: part * size + end


FIELD = b'--xyz\r\nContent-Disposition: form-data; name="a"\r\n\r\nb\r\n'
ALMOST = b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\n'


def long_header(size: int) -> bytes:
    return (
        b'--xyz\r\nContent-Disposition: form-data; name="'
        + b"a;" * size
        + b'"\r\n\r\nx\r\n--xyz--\r\n'
    )


def almost_ends(size: int) -> bytes:
    """A file that is full of what looks like its end."""
    head = b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
    return head + b"\r\n--xy" * size + b"\r\n--xyz--\r\n"


def uploaded(make: Callable[[int], bytes]) -> Case:
    """A form that is sent to a server; it may refuse it."""

    def case(client: Client, size: int) -> Callable[[], object]:
        data = make(size)
        head = client.head(
            "POST", "/v1/files", {"Content-Type": "multipart/form-data; boundary=xyz"}
        )

        def work() -> None:
            with client.connect() as connection:
                connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(data) + data)
                status = connection.recv(1 << 16).split(b" ")[1]
            assert status in (b"200", b"400", b"413"), status

        return work

    return case


def skill(make: Callable[[int], dict[str, str]]) -> Callable[[int], str]:
    def packed(size: int) -> str:
        target = BytesIO()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for name, text in make(size).items():
                archive.writestr(name, text)
        return b64encode(target.getvalue()).decode()

    return packed


def unpack_skill(data: str) -> None:
    try:
        inline_bundle("poet", "Writes.", b64decode(data), "tools")
    except ApiError:
        return


def front_matter(size: int) -> dict[str, str]:
    return {"SKILL.md": "---\n" + "a: [" * size + "\n---\n"}


def many_skill_files(size: int) -> dict[str, str]:
    return {"SKILL.md": "x", **{f"f{n}.txt": "x" for n in range(size)}}


def long_template(size: int) -> str:
    return (
        "{% for message in messages %}{{ message.content }}{% if message.role == 'x' %}y{% endif %}{% endfor %}"
        * size
    )


def run_template(text: str) -> None:
    """A template of a model is read once, and run for a conversation."""
    runner = TemplateRunner(ChatTemplate(text))
    runner.run([{"role": "user", "content": "Hi"}], None, 0, is_cued=True)


TEMPLATE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% endfor %}"


def conversation(size: int) -> Json:
    return [{"role": "user", "content": f"Message {n}."} for n in range(size)]


def run_conversation(messages: Json) -> None:
    TemplateRunner(ChatTemplate(TEMPLATE)).run(messages, None, 0, is_cued=True)


async def guard(text: str) -> None:
    rules = Rules(
        patterns=(r"project\s+falcon", r"\b\d{4} ?\d{4} ?\d{4}\b"), domains_denied=("a.example",)
    )
    await RulesGuard(rules).check([text])


def long_lists(size: int) -> bytes:
    return json.dumps({"type": "array", "items": {"type": "integer"}, "minItems": size}).encode()


def check_lists(schema: bytes) -> None:
    """What the grammar library would write out is known, and refused where it is too much."""
    value = json.loads(schema)
    wanted = value["minItems"]
    assert wanted <= UNROLLED_MAX or unrolled(value) > UNROLLED_MAX, (
        f"{wanted} items are written out"
    )


def escapes(size: int) -> str:
    return "\x1b]52;c;aGk=\x07\u202e" * size


OUTSIDE = [
    # Up to what is fetched, also in `make test`.
    Outside("page: an open tag", open_tag, read, 4_000_000, 4_000_000),
    Outside("page: an open script", open_script, read, 4_000_000, 4_000_000),
    Outside("page: tags of many attributes", page(MANY_ATTRIBUTES), read, 8, 140),
    Outside("page: tags", page("<p><b>It</b> rains.</p>"), read, 5_000, 200_000),
    Outside("page: tags that nobody closes", page("<div><a href=x>"), read, 5_000, 200_000),
    Outside("page: links", page('<a href="/a">rain</a> '), read, 5_000, 200_000),
    Outside("page: less-than signs", page("<"), read, 50_000, 4_000_000),
    Outside("page: open comments", page("<!--"), read, 20_000, 1_000_000),
    Outside("page: declarations", page("<![if "), read, 20_000, 1_000_000),
    Outside("page: entities", page("&amp;&#x41;&nope"), read, 10_000, 500_000),
    Outside("page: attributes", page("<p a=\"b\" c='d' e>"), read, 5_000, 200_000),
    Outside("page: scripts", page("<script>var a = '</scrip';"), read, 5_000, 200_000),
    Outside("page: blanks", page("a b "), read, 50_000, 200_000),
    Outside("page: line breaks", page("a<br> <br>"), read, 5_000, 200_000),
    Outside("page: punycode", said_charset("punycode", b"a-"), read, 100_000, 4_000_000),
    Outside("page: no letters", said_charset("tis-620", b"\xff"), read, 50_000, 8_000_000),
    Outside("page: UTF-7", said_charset("utf-7", b"+AGE-"), read, 50_000, 1_500_000),
    Outside(
        "page: letters in Chinese", said_charset("gb18030", b"\x81\x30"), read, 50_000, 4_000_000
    ),
    Outside("page: interim answers", interim, fetch, 50_000, 400_000),
    Outside("page: a word that is nearly everywhere", lambda n: "a" * n, find, 100_000, 400_000),
    Outside("page: words that are nearly everywhere", lambda n: "a  " * n, find, 50_000, 130_000),
    Outside("page: Markdown", lambda n: b"# a\n    ###### \n" * n, read_markdown, 20_000, 500_000),
    Outside(
        "hits of a search", hits, on_loop(partial(read_hits, engine=JsonEngine("x"))), 1_000, 3_000
    ),
    Outside(
        "marks in a hit",
        marked_hit,
        on_loop(partial(read_hits, engine=JsonEngine("x"))),
        20_000,
        200_000,
    ),
    Outside("answer of a search engine", full_answer, in_thread(read_full_answer), 400_000, 10**6),
    Outside("slow numbers of a search engine", slow_answer, in_thread(read_full_answer), *SLOW),
    Outside("slow numbers of an MCP server", slow_answer, in_thread(read_mcp_answer), *SLOW),
    Outside("slow numbers of an engine", slow_answer, on_loop(read_event), *SLOW),
    Outside(
        "description of a tool that is searched",
        long_description,
        in_thread(partial(search, "zebra")),
        1_000_000,
        4_500_000,
    ),
    Outside(
        "description of a namespace that is searched",
        one_about,
        in_thread(partial(search, "zebra")),
        1_600,
        4_096,
    ),
    Outside("models of an engine", all_models, on_loop(read_models), 1_000_000, 1_300_000),
    Outside("what segue-vllm says at once", said_at_once, on_loop(hear), 150_000, 170_000),
    Outside("citations", cited, on_loop(partial(cite, sources=SOURCES)), 1_000, 2_000),
    Outside("names of tools", like_names, in_thread(check_names), 1_000, 4_096),
    Outside("tools of an MCP server, by name", named_tools, on_loop(list_tools), 2_000, 4_096),
    Outside("skill: front matter", skill(front_matter), in_thread(unpack_skill), 20_000, 500_000),
    Outside("skill: files", skill(many_skill_files), in_thread(unpack_skill), 200, 2_000),
    Outside("template: its length", long_template, in_thread(run_template), 20, 80),
    Outside("template: messages", conversation, in_thread(run_conversation), 5_000, 50_000),
    Outside("patterns: blanks", lambda n: "project" + " " * n, guard, 50_000, 4_000_000),
    Outside("patterns: digits", lambda n: "1234 " * n, guard, 10_000, 800_000),
    Outside("patterns: domains", lambda n: "http://a.b." * n, guard, 5_000, 400_000),
    Outside(
        "items of a list that is written out", long_lists, on_loop(check_lists), 100_000, 10**9
    ),
    Outside("control characters", escapes, on_loop(printable), 5_000, 50_000),
]


def outside_case(server: Bench, one: Outside) -> Case:
    """What is measured of one of them, on the loop of a server."""

    def case(client: Client, size: int) -> Callable[[], object]:
        value = one.make(size)

        async def walk() -> None:
            await one.walk(value)

        return lambda: server.run(walk())

    return case


# --- MCP servers ------------------------------------------------------------------------------------------


class Sent(httpx2.AsyncBaseTransport, httpx2.AsyncByteStream):
    """What comes over the wire, in these pieces."""

    def __init__(self, pieces: Iterable[bytes]) -> None:
        self._pieces = pieces

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, stream=self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


async def hear_mcp(pieces: Iterable[bytes]) -> object:
    """As the library for the protocol reads it: line by line."""
    transport = BoundedTransport(Sent(pieces), lambda fault: None)
    async with httpx2.AsyncClient(transport=transport) as client:
        with suppress(httpx2.ReadError):
            async with client.stream("GET", "http://tools.example/mcp") as response:
                return [line async for line in response.aiter_lines() if line]
    return None


def in_pieces(data: bytes) -> list[bytes]:
    """As they come from a socket."""
    return [data[at : at + 65_536] for at in range(0, len(data), 65_536)]


def numbered(size: int) -> list[bytes]:
    values = b",".join([b"7" * 4_000] * (size // 4_000))
    return in_pieces(b'data: {"id":1,"result":{"structuredContent":[' + values + b"]}}\n\n")


MCP = [
    Outside(
        "MCP server: pieces of an event",
        lambda n: [b"data: ", *[b"a"] * n, b"\n\n"],
        hear_mcp,
        60_000,
        1_000_000,
    ),
    Outside(
        "MCP server: pieces of a text",
        lambda n: in_pieces(b"data: 1\n" * n),
        hear_mcp,
        10_000,
        130_000,
    ),
    Outside(
        "MCP server: blank lines", lambda n: in_pieces(b"\n" * n), hear_mcp, 500_000, 4_000_000
    ),
    Outside(
        "MCP server: comments", lambda n: in_pieces(b":\n\n" * n), hear_mcp, 200_000, 1_300_000
    ),
    Outside("MCP server: other lines", lambda n: in_pieces(b"a\n" * n), hear_mcp, 200_000, 500_000),
    Outside("MCP server: long numbers", numbered, hear_mcp, 400_000, 900_000),
]
OUTSIDE += MCP

FORMS = [
    Structure("form: fields", uploaded(form(FIELD)), 2_000, 20_000),
    Structure("form: beginnings of parts", uploaded(form(ALMOST)), 2_000, 20_000),
    Structure("form: a long header", uploaded(long_header), 20_000, 1_000_000),
    Structure("form: what looks like the end", uploaded(almost_ends), 20_000, 1_000_000),
]


# --- engines ----------------------------------------------------------------------------------------------


def said_by_engine(kind: str, output_tokens_max: int | None = None, **fields: Json) -> Case:
    """A turn in which the engine says this."""

    def case(client: Client, size: int) -> Callable[[], object]:
        asked = {"input": f"{kind} {size}", "max_output_tokens": output_tokens_max, **fields}
        body = create(model="liar", **asked)
        return lambda: check_answer(client.post(RESPONSES, body))

    return case


def said_in_tokens(model: str, kind: int) -> Case:
    """A turn in which an engine of token ids says this; too much in one event is refused."""

    def case(client: Client, size: int) -> Callable[[], object]:
        body = create(model=model, temperature=kind / 100, max_output_tokens=max(size, 16))

        def work() -> None:
            if kind == AT_ONCE and size > IDS_AT_ONCE:
                client.post(RESPONSES, body, status=502)
            else:
                check_answer(client.post(RESPONSES, body))

        return work

    return case


def event_of_engine(kind: str) -> Case:
    """A turn in which the engine says so much in one event; it may be refused."""

    def case(client: Client, size: int) -> Callable[[], object]:
        body = create(
            model="liar",
            input=f"{kind} {size}",
            include=["message.output_text.logprobs"],
            tools=[TOOL],
        )
        head = client.head("POST", RESPONSES) + b"Content-Length: %d\r\n\r\n" % len(body)

        def work() -> None:
            with client.connect() as connection:
                connection.sendall(head + body)
                status = connection.recv(1 << 16).split(b" ")[1]
            assert status in (b"200", b"502"), status

        return work

    return case


def check_answer(data: bytes) -> None:
    """The turn has ended, and what it is charged for can be."""
    response = json.loads(data)
    assert response["status"] in ("completed", "incomplete"), response
    counts = msgspec.json.decode(msgspec.json.encode(response["usage"]), type=dict[str, Any])
    details = counts.pop("input_tokens_details") | counts.pop("output_tokens_details")
    for name, count in (counts | details).items():
        assert 0 <= count < COUNT_MAX, f"{name}: {count}"
    assert details["cached_tokens"] <= counts["input_tokens"]


def cut_streams(client: Client, size: int) -> Callable[[], object]:
    """The same stream, cut after each of so many bytes: an answer or an error that names the engine."""

    def work() -> None:
        for at in range(size):
            cut = at * len(WHOLE) // size
            body = create(model="liar", input=f"cut {cut}", max_output_tokens=None)
            head = client.head("POST", RESPONSES) + b"Content-Length: %d\r\n\r\n" % len(body)
            with client.connect() as connection:
                connection.sendall(head + body)
                status = connection.recv(1 << 16).split(b" ")[1]
            assert status in (b"200", b"502"), (cut, status)

    return work


def broken_streams(client: Client, size: int) -> Callable[[], object]:
    """The same stream in chunks, which ends without its last one: an answer, if its reason has come."""

    def work() -> None:
        for at in range(size):
            cut = at * len(WHOLE) // size
            body = create(model="liar", input=f"cut-chunks {cut}", max_output_tokens=None)
            # An event may be read when its line has ended.
            is_whole = cut >= WHOLE.index(GOOD) - 1
            client.post(RESPONSES, body, status=200 if is_whole else 502)

    return work


TOOL = {"type": "function", "name": "f", "parameters": {"type": "object"}}
TOKEN_ENGINES = ("vllm", "sglang", "llamacpp")
# More of them in one event are refused.
IDS_AT_ONCE = BRACKETS_MAX * COMMAS_FOR_BRACKET
# None of them begins in an answer.
STOPS = [letter * 256 for letter in "åéîø"]
# Fewer than an event may have; and some megabytes of them.
FEW, N = 64_000, 1_000_000
ENGINES = [
    Structure("engine: deltas at once", said_by_engine("deltas"), 4_000, 60_000),
    Structure("engine: deltas, and stops", said_by_engine("deltas", stop=STOPS), 4_000, 60_000),
    Structure("engine: empty deltas", said_by_engine("empty-deltas"), 4_000, 60_000),
    Structure("engine: thoughts", said_by_engine("thoughts"), 4_000, 60_000),
    Structure("engine: comments", said_by_engine("comments"), 10_000, 200_000),
    Structure("engine: blank lines", said_by_engine("blank-lines"), 50_000, 1_000_000),
    Structure("engine: one long delta", said_by_engine("one-delta"), 20_000, 400_000),
    Structure("engine: open marks", said_by_engine("open-marks"), 5_000, 100_000),
    Structure("engine: fields of a delta", said_by_engine("fields"), 5_000, 50_000),
    Structure("engine: calls", said_by_engine("calls", tools=[TOOL]), 500, 4_000),
    Structure("engine: arguments", said_by_engine("arguments", tools=[TOOL]), 4_000, 60_000),
    Structure("engine: other choices", said_by_engine("choices"), 4_000, 60_000),
    Structure("engine: late deltas", said_by_engine("late-deltas"), 4_000, 60_000),
    Structure("engine: reports of usage", said_by_engine("usages"), 4_000, 60_000),
    Structure("engine: lies about usage", said_by_engine("lies"), 2**63 - 1, 10**30),
    Structure("engine: negative usage", said_by_engine("negative"), 1_000, 2**63 - 1),
    Structure("engine: lies about the cache", said_by_engine("cached"), 10**9, 10**30),
    Structure("engine: choices of one event", event_of_engine("choices-at-once"), FEW, 5 * N),
    Structure("engine: calls of one event", event_of_engine("calls-at-once"), FEW, 5 * N),
    Structure("engine: parts of one event", event_of_engine("parts-at-once"), FEW, 5 * N),
    Structure("engine: logprobs of one event", event_of_engine("logprobs-at-once"), FEW, 5 * N),
    Structure("engine: arguments as an object", event_of_engine("arguments-at-once"), N, 8 * N),
    Structure("engine: the name of an error", event_of_engine("an-error"), N, 8 * N),
    Structure("engine: streams cut at any byte", cut_streams, 60, len(WHOLE)),
    Structure("engine: streams that break off", broken_streams, 60, len(WHOLE)),
    Structure("engine: much after the end", said_by_engine("late-deltas", 16), 4_000, 60_000),
    Structure("engine: bytes of one token", event_of_engine("bytes-at-once"), 500_000, 4_000_000),
]
for _model in TOKEN_ENGINES:
    ENGINES += [
        Structure(f"{_model}: ids", said_in_tokens(_model, ONE_BY_ONE), 4_000, 60_000),
        Structure(
            f"{_model}: ids of one event", said_in_tokens(_model, AT_ONCE), 250_000, 1_900_000
        ),
        Structure(
            f"{_model}: much after the end", said_in_tokens(_model, AFTER_THE_END), 4_000, 60_000
        ),
    ]


def written_models(folder: Path, url: str) -> str:
    """Settings of a model for each kind of engine, all of them at this address."""
    tokenizer = find_weights("smollm2")
    tables = ['name = "liar"\nengine = "chat"']
    for name in TOKEN_ENGINES:
        tables.append(f'name = "{name}"\nengine = "{name}"\ntokenizer = "{tokenizer}"')
    file = folder / "segue.toml"
    file.write_text("".join(f'[[models]]\n{one}\nengine_url = ["{url}"]\n' for one in tables))
    return str(file)


@contextmanager
def engine_bench() -> Iterator[Bench]:
    """A server in front of the engine that says whatever it is asked to, as each kind of engine."""
    with (
        lying_engine() as url,
        # An engine that breaks off is not asked for a moment; here each of its answers counts.
        patch("segue.engines.queued.PAUSE_S", 0.0),
        TemporaryDirectory() as folder,
        bench(config=written_models(Path(folder), url), engine=None) as server,
    ):
        yield server
