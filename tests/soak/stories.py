"""What do clients do in a soak? Each story is one short life of one client, and notes what it was promised.

A story raises `Wrong` where a promise was broken; any other error is excused only beside a trouble.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from tests.files.test_form import form
from tests.scenarios.test_tools import calling
from tests.soak.book import Body, Book, Wrong
from tests.support import WEATHER, Answer, Wire, fetch, wire

Story = Callable[[Book, random.Random], Awaitable[None]]

PAGES = "https://docs.soak.example"
ANSWER = "Clouds bring rain [1]."
# The models of the server under load, by what they say. The last turn of a script repeats.
SCRIPTS: dict[str, Sequence[Body]] = {
    "agent": [
        {"reasoning": "I look.", "calls": [{"name": "get_weather", "arguments": {"city": "Oslo"}}]},
        {"text": "It rains in Oslo.", "pad_tokens": 20},
        {"calls": [{"name": "get_weather", "arguments": {"city": "Rome"}}]},
        {"text": "That is all.", "pad_tokens": 10},
    ],
    "plain": [{"text": "Once upon a time", "pad_tokens": 30}],
    "short": [{"text": "Yes"}],
    "slow": [{"text": "Slowly", "pad_tokens": 60}],
    "web": [calling("web.search", query="rain"), {"text": ANSWER}],
    "mcp": [calling("own.echo", text="hello"), {"text": ANSWER}],
    "shell": [calling("shell", commands=["echo hello; seq 100 > x.csv"]), {"text": "Done."}],
}
SLOW_TPS = 40
# Chains that go on have their parents among so many.
NEW = 100
TERMINAL = {"response.completed", "response.failed", "response.incomplete"}


def words(chance: random.Random) -> str:
    """A text that was not said before, of some hundred to some thousand characters."""
    return " ".join(f"word{chance.randrange(10**6)}" for _ in range(chance.randrange(10, 300)))


def good(answer: Answer) -> Body:
    if answer.status != 200:
        raise ValueError(answer.body[:500])
    return dict(answer.json)


def completed(response: Body, text: str) -> Body:
    """A response that has come to its end and says this."""
    said = str(response["output"])
    if response["status"] != "completed" or text not in said:
        raise ValueError(
            f"{response['id']} is {response['status']}: {response.get('error')} {said[:200]}"
        )
    return response


async def heard(socket: Wire) -> Body:
    """The response of a turn; exactly one ending is a matter of the next turn, which would meet a second one."""
    begun = ""
    while True:
        event = await socket.next()
        if event["type"] == "error":
            raise ValueError(event)
        if event["type"] == "response.created":
            begun = event["response"]["id"]
        if event["type"] in TERMINAL:
            if event["response"]["id"] != begun:
                raise Wrong(f"an ending of {event['response']['id']} in {begun}")
            return dict(event["response"])


async def chain_on_socket(book: Book, chance: random.Random) -> None:
    """An agent on a socket, which leaves in one of three ways."""
    is_stored = chance.random() < 0.5
    parent: str | None = None
    given: Any = words(chance)
    async with wire(book.served) as socket:
        for _ in range(chance.randrange(2, 7)):
            await socket.create(
                model="agent",
                input=given,
                tools=[WEATHER],
                store=is_stored,
                previous_response_id=parent,
            )
            response = await heard(socket)
            if response["status"] != "completed":
                raise ValueError(response)
            if is_stored:
                book.keep(response)
            parent = response["id"]
            calls = [one for one in response["output"] if one["type"] == "function_call"]
            given = [
                {"type": "function_call_output", "call_id": one["call_id"], "output": words(chance)}
                for one in calls
            ] or words(chance)
        book.counts["turns on sockets"] += 1
        if chance.random() < 0.3:
            socket.socket.transport.abort()


async def vanish_in_mid_turn(book: Book, chance: random.Random) -> None:
    """A client that is lost, or closes, while its turn runs: a stored turn goes on after a loss, not after a close."""
    is_stored, is_closed = chance.random() < 0.6, chance.random() < 0.5
    async with wire(book.served) as socket:
        await socket.create(model="slow", input=words(chance), store=is_stored)
        while (event := await socket.next())["type"] != "response.output_text.delta":
            if event["type"] == "error":
                raise ValueError(event)
            if event["type"] == "response.created":
                turn_id = event["response"]["id"]
        if not is_closed:
            socket.socket.transport.abort()
    book.counts["closed in mid-turn" if is_closed else "lost in mid-turn"] += 1
    if not is_stored:
        return
    response = await book.ended(turn_id)
    wanted = "cancelled" if is_closed else "completed"
    if response["status"] != wanted:
        raise ValueError(
            f"{turn_id} is {response['status']}, not {wanted}: {response.get('error')}"
        )
    book.keep(response)


async def repeat(book: Book, chance: random.Random) -> None:
    """A chain over HTTP whose requests are sent twice."""
    parent: str | None = None
    for _ in range(3):
        body = {"model": "plain", "input": words(chance), "previous_response_id": parent}
        named = {"Idempotency-Key": f"{chance.getrandbits(64):x}"}
        first, second = [
            good(await fetch(book.served, "POST", "/v1/responses", body, named)) for _ in range(2)
        ]
        if first["id"] != second["id"]:
            raise Wrong(f"one key, two turns: {first['id']}, {second['id']}")
        book.keep(completed(first, "Once upon a time"))
        parent = first["id"]
    book.counts["repeated"] += 3


async def stream(book: Book, chance: random.Random) -> None:
    """Server-sent events, read to the end."""
    is_stored = chance.random() < 0.5
    body = {"model": "plain", "input": words(chance), "stream": True, "store": is_stored}
    answer = await fetch(book.served, "POST", "/v1/responses", body)
    if answer.status != 200 or not answer.body.endswith(b"data: [DONE]\n\n"):
        raise ValueError(answer.body[-300:])
    endings = [one for one in answer.events if one["type"] in TERMINAL]
    if len(endings) != 1:
        raise Wrong(f"{len(endings)} endings in a stream")
    response = completed(endings[0]["response"], "Once upon a time")
    if is_stored:
        book.keep(response)
    book.counts["streams"] += 1


async def leave_a_stream(book: Book, chance: random.Random) -> None:
    """A client that goes while its HTTP stream runs."""
    reader, writer = await asyncio.open_connection("127.0.0.1", book.served.port)
    body = b'{"model":"slow","input":"x","stream":true,"store":false}'
    writer.write(
        b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    async with asyncio.timeout(30):
        await reader.readuntil(b"response.created")
    writer.transport.abort()
    book.counts["streams left"] += 1


async def background(book: Book, chance: random.Random) -> None:
    """A turn in the background, awaited or cancelled."""
    body = {"model": "slow", "input": words(chance), "background": True}
    begun = good(await book.ask("POST", "responses", body))
    if chance.random() < 0.3:
        cancelled = await book.ask("POST", f"responses/{begun['id']}/cancel")
        good(cancelled)
    try:
        response = await book.ended(begun["id"])
    except LookupError as error:
        raise Wrong(str(error)) from None
    book.keep(response)
    if response["status"] not in ("completed", "cancelled"):
        raise ValueError(f"{begun['id']} is {response['status']}: {response.get('error')}")
    book.counts["in the background"] += 1


async def messages(book: Book, chance: random.Random) -> None:
    """The Messages API, with a thread."""
    fields: Body = {"model": "plain", "max_tokens": 200}
    thread: Body = {"type": "create"}
    for _ in range(3):
        said = [{"role": "user", "content": words(chance)}]
        body = {**fields, "messages": said, "thread": thread}
        answer = good(await book.ask("POST", "messages", body))
        if "Once upon a time" not in str(answer["content"]):
            raise Wrong(f"other words: {answer}")
        thread, fields = (
            {"type": "continue", "previous_message_id": answer["id"]},
            {"model": "plain", "max_tokens": 200},
        )
    book.counts["messages"] += 3


async def chat(book: Book, chance: random.Random) -> None:
    """Chat Completions, plain and streamed, with the whole history."""
    history = [{"role": "user", "content": words(chance)}]
    for _ in range(2):
        answer = good(
            await book.ask("POST", "chat/completions", {"model": "plain", "messages": history})
        )
        history += [answer["choices"][0]["message"], {"role": "user", "content": words(chance)}]
    body = {"model": "plain", "messages": history, "stream": True}
    streamed = await book.ask("POST", "chat/completions", body)
    if streamed.body.count(b"data: [DONE]") != 1:
        raise ValueError(streamed.body[-300:])
    book.counts["chats"] += 3


async def search(book: Book, chance: random.Random) -> None:
    """A turn in which the server searches."""
    body = {"model": "web", "input": words(chance), "tools": [{"type": "web_search"}]}
    book.keep(completed(good(await book.ask("POST", "responses", body)), ANSWER))
    book.counts["searches"] += 1


async def call_mcp(book: Book, chance: random.Random) -> None:
    """A turn in which the server calls an MCP server's tool."""
    tool = {"type": "mcp", "server_label": "own", "require_approval": "never"}
    body = {"model": "mcp", "input": words(chance), "tools": [tool], "store": chance.random() < 0.5}
    response = completed(good(await book.ask("POST", "responses", body)), ANSWER)
    if body["store"]:
        book.keep(response)
    book.counts["MCP calls"] += 1


async def shell(book: Book, chance: random.Random) -> None:
    """A turn with commands in a container, which is deleted afterwards."""
    tool = {"type": "shell", "environment": {"type": "container_auto"}}
    body = {"model": "shell", "input": words(chance), "tools": [tool]}
    response = completed(good(await book.ask("POST", "responses", body)), "hello")
    book.keep(response)
    container = response["tools"][0]["environment"]["container_id"]
    good(await book.ask("DELETE", f"containers/{container}"))
    book.counts["commands"] += 1


async def files(book: Book, chance: random.Random) -> None:
    """A file that is uploaded, used and deleted."""
    data = words(chance).encode()
    body = form(('purpose"', b"user_data"), ('file"; filename="poem.txt"', data))
    named = {"Content-Type": "multipart/form-data; boundary=xyz"}
    made = good(await fetch(book.served, "POST", "/v1/files", body, named))
    part = {"type": "input_file", "file_id": made["id"]}
    asked = {"model": "plain", "input": [{"role": "user", "content": [part]}]}
    book.keep(completed(good(await book.ask("POST", "responses", asked)), "Once upon a time"))
    content = await book.ask("GET", f"files/{made['id']}/content")
    if content.status == 200 and content.body != data:
        raise Wrong(f"another file: {made['id']}")
    good(content) if content.status != 200 else None
    good(await book.ask("DELETE", f"files/{made['id']}"))
    book.counts["files"] += 1


async def conversation(book: Book, chance: random.Random) -> None:
    """A conversation with turns in it, which is deleted with them."""
    name = good(await book.ask("POST", "conversations", {}))["id"]
    for _ in range(2):
        body = {"model": "plain", "input": words(chance), "conversation": name}
        book.keep(completed(good(await book.ask("POST", "responses", body)), "Once upon a time"))
    items = good(await book.ask("GET", f"conversations/{name}/items?limit=20"))["data"]
    if len(items) != 4:
        raise Wrong(f"{len(items)} items in {name}, not 4")
    good(await book.ask("DELETE", f"conversations/{name}"))
    book.counts["conversations"] += 1


async def look_back(book: Book, chance: random.Random) -> None:
    """Some of what was promised earlier is read again; some is deleted; the oldest always."""
    for turn_id in chance.sample(list(book.kept), min(3, len(book.kept))):
        await book.check(turn_id)
    # The newer ones may be the parents of chains that go on.
    older = [*book.kept][:-NEW]
    if older and chance.random() < 0.3:
        await book.erase(chance.choice(older))
    await book.settle()


async def operate(book: Book, chance: random.Random) -> None:
    """An operator looks at the pages."""
    for path in ("/metrics", "/health", "/dashboard/overview", "/openapi.json"):
        await fetch(book.served, "GET", path)


async def send_nonsense(book: Book, chance: random.Random) -> None:
    """Requests that are refused."""
    for body in (
        b"{",
        b'{"model":"nobody","input":"x"}',
        b'{"model":"plain","input":[{"type":"?"}]}',
    ):
        answer = await fetch(book.served, "POST", "/v1/responses", body)
        if answer.status not in (400, 404):
            raise ValueError(answer.body[:300])
    book.counts["refused"] += 3


# How often each is told, of a hundred.
STORIES: dict[Story, int] = {
    chain_on_socket: 20,
    vanish_in_mid_turn: 8,
    repeat: 8,
    stream: 10,
    leave_a_stream: 4,
    background: 6,
    messages: 8,
    chat: 8,
    search: 4,
    call_mcp: 4,
    shell: 2,
    files: 4,
    conversation: 4,
    look_back: 20,
    operate: 2,
    send_nonsense: 2,
}
