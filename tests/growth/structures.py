"""Every repeated structure of a request, as a table: how it is made at any size.

A case prepares its request first, which is not measured, and returns what is. Who adds something repeatable to the
protocol adds a row here. Regular expressions are tried by `tests.growth.patterns`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

from tests.growth.client import MODEL, Client, create, create_frame, frame, unique
from tests.growth.measure import Case, Structure

Json = Any
# The limits that the table goes up to: items of an input, tools, references, bytes of a body.
ITEMS, VALUES, TOOLS, REFERENCES, BODY = 100_000, 65_000, 4_096, 4_096, 33_000_000
# An input that is one text, and one that is all escapes.
TEXT, ESCAPED, FRAME = 10_000_000, 10_000_000, BODY
# Earlier prompts that a new one is compared with; their items fit into what is kept of them.
EARLIER, COMPARED = 12, 12_000
RESPONSES, CONVERSATIONS, MESSAGES = "/v1/responses", "/v1/conversations", "/v1/messages"
CHAT = "/v1/chat/completions"


def function(name: str, parameters: Json = None) -> Json:
    schema = parameters or {"type": "object", "properties": {"a": {"type": "string"}}}
    return {"type": "function", "name": name, "description": "It does it.", "parameters": schema}


def functions(count: int) -> list[Json]:
    return [function(f"tool_{index}") for index in range(count)]


def fresh(fields: Mapping[str, Json]) -> Mapping[str, Json]:
    """The same request with instructions that no request had before: nothing of its prompt is known."""
    return {"instructions": unique(), **fields}


def posted(make: Callable[[int], Mapping[str, Json] | bytes], status: int = 200) -> Case:
    """One create over HTTP with these fields."""

    def case(client: Client, size: int) -> Callable[[], object]:
        made = make(size)
        body = made if isinstance(made, bytes) else create(**fresh(made))
        return lambda: client.post(RESPONSES, body, status)

    return case


def framed(make: Callable[[int], Mapping[str, Json] | bytes]) -> Case:
    """One create over a WebSocket with these fields, or these bytes as a frame."""

    def case(client: Client, size: int) -> Callable[[], object]:
        made = make(size)
        data = frame(made) if isinstance(made, bytes) else create_frame(**fresh(made))

        def work() -> None:
            with client.socket() as socket:
                socket.send(data)
                socket.ended()

        return work

    return case


def items(make: Callable[[int], Json]) -> Callable[[int], Mapping[str, Json]]:
    """A request with so many items."""
    return lambda size: {"input": [make(index) for index in range(size)]}


def message(index: int) -> Json:
    return {"role": "user", "content": f"Message {index}."}


def parts(index: int) -> Json:
    return {"role": "user", "content": [{"type": "input_text", "text": f"Message {index}."}]}


def pairs(size: int) -> Mapping[str, Json]:
    calls: list[Json] = []
    for index in range(size // 2):
        call_id = f"call_{index}"
        calls.append({"type": "function_call", "call_id": call_id, "name": "f", "arguments": "{}"})
        calls.append({"type": "function_call_output", "call_id": call_id, "output": "done"})
    return {"input": calls}


def open_pairs(size: int) -> Mapping[str, Json]:
    """All calls first, then all outputs, the last call's first."""
    half = size // 2
    calls = [
        {"type": "function_call", "call_id": f"call_{index}", "name": "f", "arguments": "{}"}
        for index in range(half)
    ]
    outputs = [
        {"type": "function_call_output", "call_id": f"call_{index}", "output": "done"}
        for index in reversed(range(half))
    ]
    return {"input": calls + outputs}


def other_pairs(size: int) -> Mapping[str, Json]:
    calls: list[Json] = []
    for index in range(size // 2):
        call_id = f"call_{index}"
        calls.append({"type": "custom_tool_call", "call_id": call_id, "name": "f", "input": "x"})
        calls.append({"type": "custom_tool_call_output", "call_id": call_id, "output": "done"})
    return {"input": calls}


def shell_outputs(size: int) -> Mapping[str, Json]:
    """Outputs that do not say to which of many open calls they belong."""
    calls = [
        {
            "type": "local_shell_call",
            "id": f"lsh_{index}",
            "call_id": f"call_{index}",
            "status": "completed",
            "action": {"type": "exec", "command": ["ls"], "env": {}},
        }
        for index in range(size // 2)
    ]
    outputs = [
        {"type": "local_shell_call_output", "id": f"call_{index}", "output": "x"}
        for index in range(size // 2)
    ]
    return {"input": calls + outputs}


def nameless_outputs(size: int) -> Mapping[str, Json]:
    """Outputs without a call id, each of the only open call of its kind, while many of another kind are open."""
    third = range(size // 3)
    given: list[Json] = [
        {
            "type": "custom_tool_call",
            "call_id": f"c{index}",
            "name": "f",
            "input": "",
            "async": True,
        }
        for index in third
    ]
    for index in third:
        call = {"type": "function_call", "call_id": f"f{index}", "name": "f", "arguments": "{}"}
        given += [call, {"type": "function_call_output", "output": "done"}]
    return {"input": given}


def after_others(
    make: Callable[[int], Mapping[str, Json]], altered: Callable[[list[Json], int], list[Json]]
) -> Case:
    """A request after `EARLIER` others with the same key, of nearly the same items."""

    def case(client: Client, size: int) -> Callable[[], object]:
        given, named = make(size)["input"], fresh({"prompt_cache_key": unique()})
        for number in range(1, EARLIER + 1):
            client.post(RESPONSES, create(input=altered(given, number), **named))
        body = create(input=given, **named)
        return lambda: client.post(RESPONSES, body)

    return case


def turned(given: list[Json], number: int) -> list[Json]:
    return [*given[number:], *given[:number]]


def under_other_ids(given: list[Json], number: int) -> list[Json]:
    return [*({**one, "id": f"fc_{unique()}"} for one in given), message(number)]


def nested(depth: int) -> Json:
    schema: Json = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}}
    return schema


def wide(size: int) -> Json:
    properties = {f"field_{index}": {"type": "string", "description": "x"} for index in range(size)}
    return {"type": "object", "properties": properties, "required": list(properties)}


def schema_format(schema: Json) -> Json:
    return {"format": {"type": "json_schema", "name": "out", "schema": schema, "strict": True}}


def text_parts(kind: str, role: str) -> Callable[[int], Mapping[str, Json]]:
    def make(size: int) -> Mapping[str, Json]:
        return {"input": [{"role": role, "content": [{"type": kind, "text": "Hi. "}] * size}]}

    return make


def output_text(**fields: Json) -> Mapping[str, Json]:
    part = {"type": "output_text", "text": "Hello.", "annotations": [], **fields}
    answer = {"role": "assistant", "content": [part]}
    return {"input": [answer, {"role": "user", "content": "Go on."}]}


def annotations(size: int) -> Mapping[str, Json]:
    one = {"type": "url_citation", "start_index": 0, "end_index": 1, "title": "t", "url": "u"}
    return output_text(annotations=[one] * size)


def logprobs(size: int) -> Mapping[str, Json]:
    return output_text(logprobs=[{"token": "a", "logprob": -1.0, "bytes": [97]}] * size)


def references(client: Client, size: int) -> Callable[[], object]:
    """References to every item of a stored turn."""
    turn = client.turn(input=[message(index) for index in range(size)], store=True)
    listed = json.loads(
        client.request("GET", f"{RESPONSES}/{turn['id']}/input_items?limit=2&order=asc")
    )
    first, second = (one["id"] for one in listed["data"])
    ids = [first, second] * (size // 2)
    body = create(input=[{"type": "item_reference", "id": one} for one in ids])
    return lambda: client.post(RESPONSES, body)


def own_references(client: Client, size: int) -> Callable[[], object]:
    """References to items that have ids of the client's own, in the history."""
    given = [{**message(index), "id": f"msg_{index}"} for index in range(size)]
    turn = client.turn(input=[{"type": "message", **one} for one in given], store=True)
    named = [{"type": "item_reference", "id": one["id"]} for one in given]
    body = create(input=named, previous_response_id=turn["id"])
    return lambda: client.post(RESPONSES, body)


def lost_references(size: int) -> Mapping[str, Json]:
    return {"input": [{"type": "item_reference", "id": f"msg_{unique()}_1"} for _ in range(size)]}


def additional_tools(size: int) -> Mapping[str, Json]:
    brought = [
        {"type": "additional_tools", "role": "developer", "tools": [one]} for one in functions(size)
    ]
    return {"input": [*brought, message(0)]}


def many_additional(size: int) -> Mapping[str, Json]:
    brought = {"type": "additional_tools", "role": "developer", "tools": functions(size)}
    return {"input": [brought, message(0)]}


def allowed(size: int) -> Mapping[str, Json]:
    names = [{"type": "function", "name": f"tool_{index}"} for index in range(size)]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": names}
    return {"tools": functions(size), "tool_choice": choice}


def allowed_only(size: int) -> Mapping[str, Json]:
    names = [{"type": "function", "name": f"other_{index}"} for index in range(size)]
    choice = {"type": "allowed_tools", "mode": "auto", "tools": names}
    return {"tools": functions(10), "tool_choice": choice}


def updates(size: int) -> Mapping[str, Json]:
    one = {"type": "configuration_update", "reasoning": {"effort": "low"}}
    return {"input": [*([one] * size), message(0)]}


def listed_servers(size: int) -> Mapping[str, Json]:
    tools = [{"name": f"t{index}", "input_schema": {"type": "object"}} for index in range(size)]
    listed = {"type": "mcp_list_tools", "id": "mcpl_1", "server_label": "s", "tools": tools}
    return {"input": [listed, message(0)]}


def server_lists(size: int) -> Mapping[str, Json]:
    tools = [{"name": "t", "input_schema": {"type": "object"}}]
    listed = [
        {
            "type": "mcp_list_tools",
            "id": f"mcpl_{index}",
            "server_label": f"s{index}",
            "tools": tools,
        }
        for index in range(size)
    ]
    return {"input": [*listed, message(0)]}


def namespace(size: int) -> Mapping[str, Json]:
    return {
        "tools": [{"type": "namespace", "name": "n", "description": "d", "tools": functions(size)}]
    }


def searches(size: int) -> Mapping[str, Json]:
    """Tools that can be found, and as many searches that find them."""
    found = [{**one, "defer_loading": True} for one in functions(size // 2)]
    return {"tools": [*found, *[{"type": "tool_search"}] * (size // 2)]}


def one_search(size: int) -> Mapping[str, Json]:
    found = [{**one, "defer_loading": True} for one in functions(size - 1)]
    return {"tools": [{"type": "tool_search"}, *found]}


def added(make: Callable[[int], Mapping[str, Json]]) -> Callable[[int], Mapping[str, Json]]:
    """The tools come in an item."""

    def fields(size: int) -> Mapping[str, Json]:
        brought = {"type": "additional_tools", "role": "developer", **make(size)}
        return {"input": [brought, message(0)]}

    return fields


def raw_create(inner: bytes) -> bytes:
    return create(input="@", instructions=unique()).replace(b'"@"', inner)


def escapes(size: int) -> bytes:
    return raw_create(b'"' + b'\\"' * size + b'"')


def unicode_escapes(size: int) -> bytes:
    return raw_create(b'"' + b"\\u00e9" * size + b'"')


def quotes(size: int) -> bytes:
    """Not JSON: a string that is not closed, with many quotes in it, nested too deeply."""
    return b'{"type":"response.create","input":' + b"[" * 2_000 + b'"' + b'\\"' * size


def brackets(size: int) -> bytes:
    return b'{"type":"response.create","input":' + b"[" * size


def structure(size: int) -> bytes:
    """Too deep to decode, and then as many tokens as there are bytes."""
    return b'{"type":"response.create","input":' + b"[" * 2_000 + b"[]," * (size // 3)


def numbers(size: int) -> bytes:
    return raw_create(b"[" + b",".join([b"1"] * size) + b"]")


def unknown_fields(size: int) -> bytes:
    fields = b",".join(b'"f%d":%d' % (index, index) for index in range(size))
    return create()[:-1] + b"," + fields + b"}"


def unknown_item_fields(size: int) -> Mapping[str, Json]:
    return {"input": [{**message(0), **{f"f{index}": index for index in range(size)}}]}


def too_many_item_fields(size: int) -> bytes:
    return raw_create(b'[{"role":"user","content":"x",' + b'"f":1,' * size + b'"g":1}]')


def too_many_fields(size: int) -> bytes:
    return raw_create(b'"x",' + b'"f":1,' * size + b'"g":1')


def deep_item(size: int) -> Mapping[str, Json]:
    deep: Json = 1
    for _ in range(min(size, 200)):
        deep = [deep]
    return {"input": [{**message(0), "more": [deep] * max(size // 200, 1)}]}


def metadata(size: int) -> Mapping[str, Json]:
    return {"metadata": {f"key{index}": "value" for index in range(size)}}


def long_text(size: int) -> Mapping[str, Json]:
    return {"input": "word " * (size // 5)}


def one_word(size: int) -> Mapping[str, Json]:
    return {"input": "a" * size}


def spaces(size: int) -> Mapping[str, Json]:
    return {"input": " " * size + "."}


def new_lines(size: int) -> Mapping[str, Json]:
    return {"input": "\n" * size + "."}


def marks(size: int) -> Mapping[str, Json]:
    return {"input": "<|im_start|>" * (size // 12)}


def image(size: int) -> Mapping[str, Json]:
    url = "data:image/png;base64," + "A" * size
    return {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]}


def file_data(size: int) -> Mapping[str, Json]:
    part = {
        "type": "input_file",
        "filename": "a.txt",
        "file_data": "data:text/plain;base64," + "YWFh" * (size // 4),
    }
    return {"input": [{"role": "user", "content": [part]}]}


def many_files(size: int) -> Mapping[str, Json]:
    part = {"type": "input_file", "filename": "a.txt", "file_data": "data:text/plain;base64,YWFh"}
    return {"input": [{"role": "user", "content": [part] * size}]}


def named_files(client: Client, size: int) -> Callable[[], object]:
    """A picture, and beside it in the same item small files that are named."""
    form = b'--x\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    sent = form % (b"purpose", b"", b"user_data")
    sent += form % (b"file", b'; filename="a.txt"', b"hi") + b"--x--\r\n"
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    name = json.loads(client.request("POST", "/v1/files", sent, kind))["id"]
    picture = {"type": "input_image", "image_url": "data:image/png;base64," + "A" * size}
    files = [{"type": "input_file", "file_id": name}] * 31
    body = create(input=[{"role": "user", "content": [picture, *files]}])
    return lambda: client.post(RESPONSES, body)


def zipped(client: Client, size: int) -> Callable[[], object]:
    body = gzip.compress(create(input="word " * (size // 5)), 1)
    headers = {"Content-Encoding": "gzip"}
    return lambda: client.request("POST", RESPONSES, body, headers)


def chunked(client: Client, size: int) -> Callable[[], object]:
    """A body in chunks of one byte."""
    head = client.head("POST", RESPONSES, {"Transfer-Encoding": "chunked"}) + b"\r\n"
    body = create(input="a" * size)
    chunks = b"".join(b"1\r\n%c\r\n" % one for one in body) + b"0\r\n\r\n"
    return lambda: client.exchange([head + chunks], 200)


def headers(client: Client, size: int) -> Callable[[], object]:
    named = {f"X-{index}": "v" for index in range(size)}
    return lambda: client.request("POST", RESPONSES, create(), named)


def repeated_header(client: Client, size: int) -> Callable[[], object]:
    head = client.head("GET", "/v1/models") + b"Accept: x\r\n" * size + b"\r\n"
    return lambda: client.exchange([head], 200)


def cookies(client: Client, size: int) -> Callable[[], object]:
    named = {"Cookie": "; ".join(f"c{index}=v" for index in range(size))}
    return lambda: client.request("POST", RESPONSES, create(), named)


def protocols(client: Client, size: int) -> Callable[[], object]:
    named = {"Sec-WebSocket-Protocol": ", ".join(f"p{index}" for index in range(size))}

    def work() -> None:
        with client.socket(named) as socket:
            socket.send(create_frame())
            socket.ended()

    return work


def query(client: Client, size: int) -> Callable[[], object]:
    turn = client.turn(store=True)
    path = f"{RESPONSES}/{turn['id']}/input_items?" + "&".join(
        f"a{index}=b" for index in range(size)
    )
    return lambda: client.request("GET", path)


def include(size: int) -> Mapping[str, Json]:
    return {"include": ["reasoning.encrypted_content"] * size}


def stop_strings(size: int) -> Mapping[str, Json]:
    return {"stop": [f"stop{index}" for index in range(size)], "max_output_tokens": 400}


def frames(client: Client, size: int) -> Callable[[], object]:
    """Small frames of a type that is refused, all at once."""
    data = frame(b'{"type":"x"}') * size

    def work() -> None:
        with client.socket() as socket:
            socket.send(data)
            socket.ended(size)

    return work


def appended(size: int) -> bytes:
    """Outputs for a response that is not there."""
    output = b'{"type":"function_call_output","call_id":"a","output":"%b"}' % (b"a" * 1_000)
    return b'{"type":"response.append","response_id":"a","input":[%b]}' % b",".join([output] * size)


def steered_with(size: int) -> bytes:
    """A steer of a response that is not there."""
    return b'{"type":"response.steer","previous_response_id":"a","input":"%b"}' % (b"\\n" * size)


def lost_steer(client: Client, size: int) -> Callable[[], object]:
    data = frame(steered_with(size))

    def work() -> None:
        with client.socket() as socket:
            socket.send(data)
            assert b"response.steer.failed" in socket.message()[:200]

    return work


def fragments(client: Client, size: int) -> Callable[[], object]:
    """One message in frames of one byte."""
    text = create(type="response.create", input="a" * size)
    parts = [frame(text[:1], 1, is_last=False)]
    parts += [frame(text[at : at + 1], 0, is_last=False) for at in range(1, len(text) - 1)]
    parts.append(frame(text[-1:], 0))
    data = b"".join(parts)

    def work() -> None:
        with client.socket() as socket:
            socket.send(data)
            socket.ended()

    return work


def pings(client: Client, size: int) -> Callable[[], object]:
    data = frame(b"", 9) * size + create_frame()

    def work() -> None:
        with client.socket() as socket:
            socket.send(data)
            socket.ended()

    return work


def flood(client: Client, size: int) -> Callable[[], object]:
    """More frames than are allowed: the connection is closed."""
    data = frame(b"", 9) * (12_000 + size)

    def work() -> None:
        with client.socket() as socket:
            socket.send(data)
            assert socket.closed() == 1008

    return work


def empty_fragments(client: Client, size: int) -> Callable[[], object]:
    data = frame(b"", 1, is_last=False) + frame(b"", 0, is_last=False) * size
    data += frame(create(type="response.create"), 0)

    def work() -> None:
        with client.socket() as socket:
            socket.send(data)
            socket.ended()

    return work


def lanes(client: Client, size: int) -> Callable[[], object]:
    data = b"".join(create_frame(stream_id=f"lane{index}") for index in range(size))

    def work() -> None:
        with client.socket() as socket:
            socket.send(data)
            socket.ended(size)

    return work


def queue(client: Client, size: int) -> Callable[[], object]:
    """Creates that wait in one lane."""
    data = create_frame() * size

    def work() -> None:
        with client.socket() as socket:
            socket.send(data)
            socket.ended(size)

    return work


def chain(client: Client, size: int) -> Callable[[], object]:
    """A chain of so many turns over HTTP, stored."""

    def work() -> None:
        previous: str | None = None
        for _ in range(size):
            previous = client.turn(store=True, previous_response_id=previous)["id"]

    return work


def socket_chain(client: Client, size: int) -> Callable[[], object]:
    """The same over one socket, unstored."""

    def work() -> None:
        with client.socket() as socket:
            previous: str | None = None
            for _ in range(size):
                socket.send(create_frame(previous_response_id=previous))
                previous = json.loads(socket.message())["response"]["id"]
                socket.ended()

    return work


def forks(client: Client, size: int) -> Callable[[], object]:
    """Many children of one turn."""
    turn = client.turn(store=True)
    body = create(store=True, previous_response_id=turn["id"])

    def work() -> None:
        for _ in range(size):
            client.post(RESPONSES, body)

    return work


def sockets(client: Client, size: int) -> Callable[[], object]:
    """One turn beside so many sockets, and a look at the metrics."""
    stack = ExitStack()
    for _ in range(size):
        stack.enter_context(client.socket())

    def work() -> None:
        client.post(RESPONSES, create())
        client.request("GET", "/metrics")
        stack.close()

    return work


def input_page(client: Client, size: int) -> Callable[[], object]:
    turn = client.turn(input=[message(index) for index in range(size)], store=True)
    return lambda: client.request("GET", f"{RESPONSES}/{turn['id']}/input_items?limit=1")


def same_ids(client: Client, size: int) -> Callable[[], object]:
    """A page of items that have all the same id."""
    given = [{"type": "message", "id": "msg_1", **message(index)} for index in range(size)]
    turn = client.turn(input=given, store=True)
    return lambda: client.request("GET", f"{RESPONSES}/{turn['id']}/input_items?limit=1")


def twin_ids(client: Client, size: int) -> Callable[[], object]:
    """A page of items whose ids look like those that we make for repeated ones."""
    ids = ["msg_1"] * (size // 2) + [f"msg_1~{index}" for index in range(size // 2)]
    given = [{"type": "message", "id": one, **message(0)} for one in ids]
    turn = client.turn(input=given, store=True)
    return lambda: client.request("GET", f"{RESPONSES}/{turn['id']}/input_items?limit=1")


def large_page(client: Client, size: int) -> Callable[[], object]:
    """A page of a hundred long items."""
    item = {"role": "user", "content": "x" * (size // 100)}
    turn = client.turn(input=[item] * 100, store=True)
    return lambda: client.request("GET", f"{RESPONSES}/{turn['id']}/input_items?limit=100")


def conversation(client: Client, size: int) -> str:
    made = json.loads(client.post(CONVERSATIONS, {}))
    body = json.dumps({"items": [message(index) for index in range(20)]}).encode()
    for _ in range(max(size // 20, 1)):
        client.post(f"{CONVERSATIONS}/{made['id']}/items", body)
    return str(made["id"])


def conversation_page(client: Client, size: int) -> Callable[[], object]:
    name = conversation(client, size)
    return lambda: client.request("GET", f"{CONVERSATIONS}/{name}/items?limit=1")


def conversation_item(client: Client, size: int) -> Callable[[], object]:
    name = conversation(client, size)
    page = json.loads(client.request("GET", f"{CONVERSATIONS}/{name}/items?limit=1"))
    return lambda: client.request("GET", f"{CONVERSATIONS}/{name}/items/{page['data'][0]['id']}")


def conversation_turn(client: Client, size: int) -> Callable[[], object]:
    name = conversation(client, size)
    return lambda: client.turn(conversation=name, store=True)


def added_item(piece: bytes) -> Case:
    """One item for a conversation, of so many bytes of this."""

    def case(client: Client, size: int) -> Callable[[], object]:
        made = json.loads(client.post(CONVERSATIONS, {}))
        text = piece * (size // len(piece))
        body = b'{"items":[{"role":"user","content":"%b"}]}' % text
        return lambda: client.post(f"{CONVERSATIONS}/{made['id']}/items", body)

    return case


def odd_conversation(size: int) -> bytes:
    """A conversation with more values than are decoded."""
    return b'{"items":[' + b"[]," * size + b"[]]}"


def refused_conversation(client: Client, size: int) -> Callable[[], object]:
    body = odd_conversation(size)
    return lambda: client.post(CONVERSATIONS, body, 400)


def retrieved(client: Client, size: int) -> Callable[[], object]:
    """A stored response with many tools."""
    turn = client.turn(tools=functions(size), store=True)
    return lambda: client.request("GET", f"{RESPONSES}/{turn['id']}")


def followed(client: Client, size: int) -> Callable[[], object]:
    """The events of a background turn, once more."""
    turn = client.turn(background=True, store=True, input="x", max_output_tokens=size)
    path = f"{RESPONSES}/{turn['id']}?stream=true"
    client.request("GET", path)
    return lambda: client.request("GET", path)


def steered(client: Client, size: int) -> Callable[[], object]:
    """Steers of a turn that has ended."""

    def work() -> None:
        with client.socket() as socket:
            socket.send(create_frame())
            name = json.loads(socket.message())["response"]["id"]
            socket.ended()
            steer = {"type": "response.steer", "previous_response_id": name, "input": "Stop."}
            socket.send(frame(json.dumps(steer).encode()) * size)
            for _ in range(size):
                socket.message()

    return work


def input_tokens(client: Client, size: int) -> Callable[[], object]:
    body = json.dumps({"model": "scripted", **fresh(items(message)(size))})
    return lambda: client.post(f"{RESPONSES}/input_tokens", body.encode())


def compacted(client: Client, size: int) -> Callable[[], object]:
    body = json.dumps({"model": "scripted", **fresh(items(message)(size))})
    return lambda: client.post(f"{RESPONSES}/compact", body.encode())


def streamed(size: int) -> Mapping[str, Json]:
    return {"input": "x", "stream": True, "max_output_tokens": size}


# --- the Messages API


def of_messages(make: Callable[[int], Mapping[str, Json]], path: str = "") -> Case:
    """One request of the Messages API, with a system prompt that no request had before."""

    def case(client: Client, size: int) -> Callable[[], object]:
        usual = {"model": MODEL, "max_tokens": 16, "system": unique()}
        body = json.dumps({**usual, "messages": [message(0)], **make(size)}).encode()
        return lambda: client.post(MESSAGES + path, body)

    return case


def items_of_messages(size: int) -> Mapping[str, Json]:
    return {"messages": [message(index) for index in range(size)]}


def blocks(size: int) -> Mapping[str, Json]:
    content = [{"type": "text", "text": f"Block {index}."} for index in range(size)]
    return {"messages": [{"role": "user", "content": content}]}


def uses(size: int) -> Mapping[str, Json]:
    """Calls, each in a message of its own, with their results."""
    said: list[Json] = [message(0)]
    for index in range(size // 2):
        use = {"type": "tool_use", "id": f"toolu_{index}", "name": "f", "input": {"a": index}}
        result = {"type": "tool_result", "tool_use_id": f"toolu_{index}", "content": "done"}
        said.append({"role": "assistant", "content": [use]})
        said.append({"role": "user", "content": [result]})
    return {"messages": said}


def parallel_uses(size: int) -> Mapping[str, Json]:
    """All calls in one message, and their results in the other order."""
    half = range(size // 2)
    called = [{"type": "tool_use", "id": f"a{index}", "name": "f", "input": {}} for index in half]
    given = [{"type": "tool_result", "tool_use_id": f"a{index}"} for index in reversed(half)]
    answers = [{"role": "assistant", "content": called}, {"role": "user", "content": given}]
    return {"messages": [message(0), *answers]}


def given_tools(size: int, **fields: Json) -> list[Json]:
    return [
        {"name": f"tool_{index}", "input_schema": {"type": "object"}, **fields}
        for index in range(size)
    ]


def found_tools(size: int) -> Mapping[str, Json]:
    """Deferred tools, all of which a result names."""
    use = {"type": "tool_use", "id": "a", "name": "search", "input": {}}
    names = [{"type": "tool_reference", "tool_name": f"tool_{index}"} for index in range(size)]
    result = {"type": "tool_result", "tool_use_id": "a", "content": names}
    said = [message(0), {"role": "assistant", "content": [use]}]
    tools = given_tools(size, defer_loading=True)
    return {"messages": [*said, {"role": "user", "content": [result]}], "tools": tools}


def resent_messages(client: Client, size: int) -> Callable[[], object]:
    """A history that came before, with one more message."""
    usual = {"model": MODEL, "max_tokens": 16, "system": unique()}
    said = [message(index) for index in range(size)]
    client.post(MESSAGES, json.dumps({**usual, "messages": said}).encode())
    body = json.dumps({**usual, "messages": [*said, message(size)]}).encode()
    return lambda: client.post(MESSAGES, body)


def system_blocks(size: int) -> Mapping[str, Json]:
    """A system prompt in so many pieces, without an end of a line between them."""
    pieces = [{"type": "text", "text": f"Piece {index}."} for index in range(size)]
    return {"system": [{"type": "text", "text": unique()}, *pieces], "messages": [message(0)]}


def next_of_thread(client: Client, size: int) -> Callable[[], object]:
    """A short turn of a thread that began with a system prompt of so many words, and with tools."""
    usual = {"model": MODEL, "max_tokens": 16, "messages": [message(0)]}
    head = {
        "system": f"{unique()} " + "word " * (size // 5),
        "tools": given_tools(min(size // 2_500, TOOLS)),
    }
    first = client.post(
        MESSAGES, json.dumps({**usual, **head, "thread": {"type": "create"}}).encode()
    )
    thread = {"type": "continue", "previous_message_id": json.loads(first)["id"]}
    body = json.dumps({**usual, "thread": thread}).encode()
    return lambda: client.post(MESSAGES, body)


def used_with(size: int) -> Mapping[str, Json]:
    """A call with an argument of so many numbers."""
    use = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": [1] * size}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "done"}
    said = [{"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]
    return {"messages": [message(0), *said]}


# --- JSON that stands in a text: what a call was given, what it returned


def numbers_in_text(size: int) -> str:
    """An object with so many numbers, as the text that arguments are."""
    return '{"a":[1' + ",1" * size + "]}"


def escaped_text(size: int) -> str:
    """An object with a text of so many escapes."""
    return '{"a":"' + "\\u0041" * size + '"}'


def slow_numbers_in_text(size: int) -> str:
    """An object with so many numbers that the JSON library reads slowly, each in some eight microseconds."""
    return '{"a":[1e300' + ",1e300" * size + "]}"


def slow_numbers(size: int) -> bytes:
    return slow_numbers_in_text(size).encode()


def with_slow_numbers(fields: Json) -> Callable[[int], bytes]:
    """A request with such numbers where "@" stands."""
    return lambda size: create(**fresh(fields)).replace(b'"@"', slow_numbers(size))


def slow_calls(size: int) -> Mapping[str, Json]:
    """Calls with a few such numbers each."""
    arguments, name = slow_numbers_in_text(6), unique()
    calls: list[Json] = []
    for index in range(size // 2):
        call = {"type": "function_call", "call_id": f"{name}{index}", "name": "f"}
        output = {"type": "function_call_output", "call_id": f"{name}{index}", "output": "done"}
        calls += [{**call, "arguments": arguments}, output]
    return {"input": calls}


def slow_chat(fields: Json, status: int) -> Case:
    """A request for a completion with such numbers where "@" stands."""

    def case(client: Client, size: int) -> Callable[[], object]:
        usual = {"model": MODEL, "max_tokens": 16, "messages": [message(0)]}
        body = json.dumps({**usual, **fields}).encode().replace(b'"@"', slow_numbers(size))
        return lambda: client.post(CHAT, body, status)

    return case


def called_with(make: Callable[[int], str]) -> Callable[[int], Mapping[str, Json]]:
    def fields(size: int) -> Mapping[str, Json]:
        # Of the same call the meaning is known.
        text, name = make(size), unique()
        call = {"type": "function_call", "call_id": name, "name": "f", "arguments": text}
        output = {"type": "function_call_output", "call_id": name, "output": text}
        return {"input": [call, output, message(0)]}

    return fields


def chat_called_with(make: Callable[[int], str]) -> Callable[[int], Mapping[str, Json]]:
    def fields(size: int) -> Mapping[str, Json]:
        text, name = make(size), unique()
        call = {"id": name, "type": "function", "function": {"name": "f", "arguments": text}}
        answer = {"role": "assistant", "tool_calls": [call]}
        return {"messages": [answer, {"role": "tool", "tool_call_id": name, "content": text}]}

    return fields


def sealed_thought(size: int) -> Mapping[str, Json]:
    """A thought that is sealed, so it says, and cannot be opened."""
    item = {"type": "reasoning", "summary": [], "encrypted_content": "AAAA" * (size // 4)}
    return {"input": [item, message(0)]}


# --- Chat Completions


def of_chat(make: Callable[[int], Mapping[str, Json]], status: int = 200) -> Case:
    """One request for a completion, with a system message that no request had before."""

    def case(client: Client, size: int) -> Callable[[], object]:
        made = {"messages": [message(0)], **make(size)}
        said = [{"role": "system", "content": unique()}, *made["messages"]]
        body = json.dumps({"model": MODEL, "max_tokens": 16, **made, "messages": said}).encode()
        return lambda: client.post(CHAT, body, status)

    return case


def chat_calls(kind: str) -> Callable[[int], Mapping[str, Json]]:
    """Calls of this kind, each with its output."""

    def fields(size: int) -> Mapping[str, Json]:
        said: list[Json] = []
        for index in range(size // 2):
            own = {"name": "f", "input" if kind == "custom" else "arguments": '{"a": 1}'}
            call = {"id": f"call_{index}", "type": kind, kind: own}
            said.append({"role": "assistant", "tool_calls": [call]})
            said.append({"role": "tool", "tool_call_id": f"call_{index}", "content": "done"})
        return {"messages": said}

    return fields


def chat_parallel_calls(size: int) -> Mapping[str, Json]:
    half = range(size // 2)
    own = {"name": "f", "arguments": "{}"}
    calls = [{"id": f"a{index}", "type": "function", "function": own} for index in half]
    outputs = [{"role": "tool", "tool_call_id": f"a{index}", "content": "x"} for index in half]
    return {"messages": [{"role": "assistant", "tool_calls": calls}, *outputs]}


def chat_parts(size: int) -> Mapping[str, Json]:
    content = [{"type": "text", "text": f"Part {index}."} for index in range(size)]
    return {"messages": [{"role": "user", "content": content}]}


def chat_thoughts(size: int) -> Mapping[str, Json]:
    details = [{"type": "reasoning.text", "text": f"Thought {index}."} for index in range(size)]
    answer = {"role": "assistant", "content": "x", "reasoning_details": details}
    return {"messages": [answer, message(0)]}


def chat_tools(size: int) -> Mapping[str, Json]:
    own = [{"name": f"tool_{index}", "parameters": {"type": "object"}} for index in range(size)]
    return {"tools": [{"type": "function", "function": function} for function in own]}


def resent_chat(client: Client, size: int) -> Callable[[], object]:
    """A history that came before, with one more message."""
    said = [{"role": "system", "content": unique()}, *(message(index) for index in range(size))]
    usual = {"model": MODEL, "max_tokens": 16}
    client.post(CHAT, json.dumps({**usual, "messages": said}).encode())
    body = json.dumps({**usual, "messages": [*said, message(size)]}).encode()
    return lambda: client.post(CHAT, body)


STRUCTURES = (
    # --- items of an input
    Structure("messages", posted(items(message)), 2_000, ITEMS),
    Structure("messages on a socket", framed(items(message)), 2_000, ITEMS),
    Structure(
        "messages, stored", posted(lambda n: {**items(message)(n), "store": True}), 2_000, ITEMS
    ),
    Structure("calls with their outputs", posted(pairs), 2_000, ITEMS),
    Structure("calls first, then outputs", posted(open_pairs), 2_000, ITEMS),
    Structure("custom calls with their outputs", posted(other_pairs), 2_000, ITEMS),
    Structure("messages in another order", after_others(items(parts), turned), 6_000, COMPARED),
    Structure("calls under other ids", after_others(pairs, under_other_ids), 2_000, 2 * COMPARED),
    Structure("outputs without a call id", posted(shell_outputs), 2_000, ITEMS // 2),
    Structure("outputs of the only open call", posted(nameless_outputs), 24_000, ITEMS - 1),
    Structure("item references, two items", references, 1_000, REFERENCES),
    Structure("item references, in the history", own_references, 1_000, REFERENCES),
    Structure("item references that name nothing", posted(lost_references, 404), 2_000, REFERENCES),
    Structure("additional_tools items", posted(additional_tools), 1_000, 20_000),
    Structure("tools of one additional_tools item", posted(many_additional), 1_000, TOOLS),
    Structure("configuration updates", posted(updates), 2_000, ITEMS - 1),
    Structure("tools of an mcp_list_tools item", posted(listed_servers), 1_000, 12_000),
    Structure("mcp_list_tools items", posted(server_lists), 1_000, ITEMS // 2),
    Structure("unknown fields of an item", posted(unknown_item_fields), 5_000, VALUES),
    Structure("fields of an item, refused", posted(too_many_item_fields, 400), 640_000, 5_000_000),
    Structure("nested lists in an item", posted(deep_item), 20_000, VALUES),
    # --- parts
    Structure("input_text parts", posted(text_parts("input_text", "user")), 5_000, 20_000),
    Structure("output_text parts", posted(text_parts("output_text", "assistant")), 5_000, 20_000),
    Structure("annotations", posted(annotations), 2_000, 10_000),
    Structure("logprobs", posted(logprobs), 2_000, 10_000),
    Structure("bytes of an image", posted(image), 1_000_000, BODY),
    Structure("bytes of a file", posted(file_data), 200_000, FRAME),
    Structure("bytes of a sealed thought", posted(sealed_thought), 1_000_000, FRAME),
    Structure("files", posted(many_files), 500, 20_000),
    Structure("files that are named, beside a picture", named_files, 20_000_000, 24_000_000),
    # --- tools
    Structure("tools", posted(lambda n: {"tools": functions(n)}), 1_000, TOOLS),
    Structure("tools of a namespace", posted(namespace), 1_000, TOOLS),
    Structure("tools that a search finds", posted(one_search), 1_000, TOOLS),
    Structure("searches for tools", posted(searches, 400), 1_000, TOOLS),
    Structure("searches for tools, in an item", posted(added(searches), 400), 1_000, TOOLS),
    Structure("allowed tools of as many tools", posted(allowed), 1_000, TOOLS),
    Structure("allowed tools that are not there", posted(allowed_only), 2_000, TOOLS),
    Structure(
        "fields of a tool's schema",
        posted(lambda n: {"tools": [function("f", wide(n))]}),
        2_000,
        16_000,
    ),
    Structure(
        "depth of a tool's schema",
        posted(lambda n: {"tools": [function("f", nested(n))]}),
        120,
        120,
    ),
    Structure(
        "fields of a format's schema",
        posted(lambda n: {"text": schema_format(wide(n))}),
        1_000,
        16_000,
    ),
    Structure(
        "depth of a format's schema",
        posted(lambda n: {"text": schema_format(nested(n))}),
        120,
        120,
    ),
    # --- fields
    Structure("metadata", posted(metadata, 400), 5_000, 1_000_000),
    Structure("include", posted(include), 5_000, VALUES),
    Structure("stop strings", posted(stop_strings, 400), 5_000, 1_000_000),
    Structure("unknown fields of a request", posted(unknown_fields), 5_000, VALUES),
    # --- text
    Structure("words", posted(long_text), 100_000, TEXT),
    Structure("a word", posted(one_word), 20_000, TEXT),
    Structure("spaces", posted(spaces), 50_000, TEXT),
    Structure("line ends", posted(new_lines), 50_000, TEXT),
    Structure("marks of the prompt format", posted(marks), 50_000, TEXT),
    Structure("escapes", posted(escapes), 50_000, ESCAPED),
    Structure("Unicode escapes", posted(unicode_escapes), 50_000, ESCAPED // 2),
    # --- JSON that is refused
    # All sizes have more values than are taken as few.
    Structure("numbers as items", posted(numbers, 400), 800_000, BODY // 2),
    Structure("numbers as items, on a socket", framed(numbers), 800_000, FRAME),
    Structure("brackets", posted(brackets, 400), 200_000, BODY),
    Structure("brackets, on a socket", framed(brackets), 200_000, FRAME),
    Structure("brackets and commas, on a socket", framed(structure), 200_000, FRAME),
    Structure("quotes in an open string, on a socket", framed(quotes), 16_000, FRAME // 2),
    Structure("fields of a request, refused", posted(too_many_fields, 400), 640_000, 5_000_000),
    Structure(
        "parts of a message, refused",
        posted(text_parts("input_text", "user"), 400),
        200_000,
        500_000,
    ),
    # --- HTTP
    Structure("gzip", zipped, 400_000, TEXT),
    Structure("chunks of one byte", chunked, 5_000, 500_000),
    Structure("headers", headers, 1_000, 5_000),
    Structure("the same header", repeated_header, 1_000, 5_000),
    Structure("cookies", cookies, 2_000, 6_000),
    Structure("subprotocols", protocols, 600, 600),
    Structure("query parameters", query, 900, 900),
    # --- frames
    Structure("frames", frames, 1_000, 9_000),
    Structure("frames of one byte", fragments, 2_000, 9_000),
    Structure("empty fragments", empty_fragments, 2_000, 9_000),
    Structure("outputs for nothing, on a socket", framed(appended), 15_000, 30_000),
    Structure("a steer of nothing", lost_steer, FRAME // 4, FRAME // 2 - 100),
    Structure("pings", pings, 2_000, 9_000),
    Structure("frames beyond the limit", flood, 20_000, 200_000),
    Structure("lanes", lanes, 32, 64),
    Structure("creates that wait", queue, 32, 64),
    Structure("late steers", steered, 500, 5_000),
    # --- histories
    Structure("turns of a stored chain", chain, 40, 1_000),
    Structure("turns of a socket's chain", socket_chain, 40, 2_000),
    Structure("forks", forks, 40, 1_000),
    Structure("sockets", sockets, 50, 400),
    # --- lists
    Structure("input items, one page", input_page, 2_000, ITEMS),
    Structure("input items with one id, one page", same_ids, 2_000, ITEMS // 2),
    Structure("input items with made-up ids, one page", twin_ids, 2_000, ITEMS // 2),
    Structure("bytes of a page", large_page, 400_000, BODY),
    Structure("conversation items, one page", conversation_page, 400, 20_000),
    Structure("conversation items, one item", conversation_item, 400, 20_000),
    Structure("conversation items, a turn", conversation_turn, 400, 20_000),
    Structure("bytes of a conversation's item", added_item(b"a"), BODY // 2, BODY - 100),
    Structure("escapes of a conversation's item", added_item(b"\\n"), BODY // 4, BODY - 100),
    Structure("items of a conversation, refused", refused_conversation, 400_000, 4_000_000),
    Structure("tools of a retrieved response", retrieved, 1_000, TOOLS),
    Structure("events of a response, again", followed, 500, 20_000),
    # --- other routes
    Structure("input tokens of messages", input_tokens, 2_000, ITEMS),
    Structure("messages to compact", compacted, 500, ITEMS),
    Structure("output tokens", posted(streamed), 500, 20_000),
    # --- the Messages API
    Structure("Messages: messages", of_messages(items_of_messages), 2_000, ITEMS),
    Structure("Messages: messages, again", resent_messages, 2_000, ITEMS - 1),
    Structure("Messages: blocks", of_messages(blocks), 2_000, 20_000),
    Structure("Messages: calls with their results", of_messages(uses), 2_000, ITEMS // 2),
    Structure("Messages: parallel calls", of_messages(parallel_uses), 2_000, 20_000),
    Structure("Messages: tools", of_messages(lambda n: {"tools": given_tools(n)}), 500, TOOLS),
    Structure("Messages: tools that were found", of_messages(found_tools), 500, TOOLS),
    Structure("Messages: a count", of_messages(uses, "/count_tokens"), 2_000, ITEMS // 2),
    Structure("Messages: blocks of the system prompt", of_messages(system_blocks), 2_000, 20_000),
    Structure("Messages: a thread that goes on", next_of_thread, 1_000_000, TEXT // 2),
    Structure("Messages: numbers in an input", of_messages(used_with), 5_000, VALUES),
    # --- Chat Completions
    Structure("Chat: messages", of_chat(items_of_messages), 2_000, ITEMS - 1),
    Structure("Chat: messages, again", resent_chat, 2_000, ITEMS - 2),
    Structure("Chat: parts", of_chat(chat_parts), 2_000, 20_000),
    Structure("Chat: calls with their outputs", of_chat(chat_calls("function")), 2_000, ITEMS // 2),
    Structure("Chat: custom calls with outputs", of_chat(chat_calls("custom")), 2_000, ITEMS // 2),
    Structure("Chat: parallel calls", of_chat(chat_parallel_calls), 2_000, 20_000),
    Structure("Chat: thoughts", of_chat(chat_thoughts), 2_000, 20_000),
    Structure("Chat: tools", of_chat(chat_tools), 500, TOOLS),
    Structure(
        "Chat: numbers in arguments", of_chat(chat_called_with(numbers_in_text)), 400_000, 2_000_000
    ),
    Structure(
        "Chat: escapes in arguments", of_chat(chat_called_with(escaped_text)), 100_000, 1_000_000
    ),
    # --- numbers that are read slowly
    Structure(
        "slow numbers in arguments", posted(called_with(slow_numbers_in_text)), 40_000, 1_600_000
    ),
    Structure("calls with a few slow numbers", posted(slow_calls), 2_000, ITEMS),
    Structure(
        "slow numbers of an item",
        posted(with_slow_numbers({"input": [{"type": "web_search_call", "action": "@"}]}), 400),
        20_000,
        VALUES - 100,
    ),
    Structure(
        "slow numbers of what a text cites",
        posted(with_slow_numbers(output_text(annotations=["@"])), 400),
        20_000,
        VALUES - 100,
    ),
    Structure(
        "slow numbers of a tool",
        posted(with_slow_numbers({"tools": [function("f", "@")]}), 400),
        20_000,
        VALUES - 100,
    ),
    Structure(
        "slow numbers of a format",
        posted(with_slow_numbers({"text": schema_format("@")}), 400),
        20_000,
        VALUES - 100,
    ),
    Structure("Chat: slow numbers as bias", slow_chat({"logit_bias": "@"}, 400), 20_000, VALUES),
    Structure(
        "Chat: slow numbers of a thought",
        slow_chat({"messages": [{**message(0), "reasoning_details": "@"}]}, 200),
        20_000,
        VALUES - 100,
    ),
    # --- JSON in a text
    Structure("numbers in arguments", posted(called_with(numbers_in_text)), 400_000, 2_000_000),
    Structure("escapes in arguments", posted(called_with(escaped_text)), 100_000, 1_000_000),
)
