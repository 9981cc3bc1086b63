"""For each case of the suite a server that is wrong in the way that the case is about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from segue_conform.responses_http import WEATHER
from tests.conform.proxy import Json, Mutant


def put(**values: object) -> Callable[[Json], None]:
    """Sets keys; a name with `__` is a path; None takes a key out."""

    def change(body: Json) -> None:
        for name, value in values.items():
            *path, last = name.split("__")
            place: Any = body
            for key in path:
                place = place.get(key) if isinstance(place, dict) else None
            if isinstance(place, dict) and (last in place or path == []):
                if value is None:
                    place.pop(last, None)
                else:
                    place[last] = value

    return change


def when(
    condition: Callable[[Json], bool], change: Callable[[Json], None]
) -> Callable[[Json], None]:
    return lambda body: change(body) if condition(body) else None


def of_type(name: str, change: Callable[[Json], None]) -> Callable[[Json], None]:
    return when(lambda event: event.get("type") == name, change)


def renamed(old: str, new: str) -> Callable[[Json], None]:
    return of_type(old, put(type=new))


def later(event: Json) -> None:
    event["sequence_number"] = event.get("sequence_number", 0) + 1


def items(keep: Callable[[Json], bool], key: str = "input") -> Callable[[Json], None]:
    """Leaves items out of a list."""

    def change(body: Json) -> None:
        if isinstance(body.get(key), list):
            body[key] = [item for item in body[key] if keep(item)]

    return change


def one_call_id(body: Json) -> None:
    for item in body.get("output", []):
        if item["type"] == "function_call":
            item["call_id"] = "call_of_both"


def empty_arguments(body: Json) -> None:
    for item in body.get("output", []):
        if "arguments" in item:
            item["arguments"] = "{}"


def is_hello(body: Json) -> bool:
    return body.get("input") == "Say hello."


def without_wide(event: Json) -> None:
    """A wide character is lost on the way, wherever a delta has it."""
    delta = event.get("delta")
    if isinstance(delta, str):
        event["delta"] = delta.replace("五", "?")
    elif isinstance(delta, dict) and "text" in delta:
        delta["text"] = delta["text"].replace("五", "?")
    for choice in event.get("choices", []):
        if choice["delta"].get("content"):
            choice["delta"]["content"] = choice["delta"]["content"].replace("五", "?")


def lanes(names: Iterator[int]) -> Callable[[Json], None]:
    def change(body: Json) -> None:
        if body.get("stream_id"):
            body["stream_id"] = f"lane-{next(names)}"

    return change


def goes_on(body: Json) -> bool:
    return body.get("previous_response_id") is not None


def waits(body: Json) -> bool:
    return "Waited." in str(body.get("input"))


def first_of_list(body: Json) -> None:
    if isinstance(body.get("data"), list):
        body["data"] = body["data"][:1]


def reversed_list(body: Json) -> None:
    if isinstance(body.get("data"), list):
        body["data"].reverse()


def of_all(kind: str, change: Callable[[Json], None]) -> Callable[[Json], None]:
    """Changes each item of this type, in a response's output."""

    def changes(body: Json) -> None:
        for item in body.get("output", []):
            if item.get("type") == kind:
                change(item)

    return changes


def without_words(key: str, words: str) -> Callable[[Json], None]:
    """Leaves out what says these words."""
    return items(lambda item: words not in str(item), key)


def index_again(event: Json) -> None:
    if event.get("type") == "content_block_start":
        event["index"] = 0


def one_index(event: Json) -> None:
    for choice in event.get("choices", []):
        for call in choice["delta"].get("tool_calls") or []:
            call["index"] = 0


def same_call_id(body: Json) -> None:
    for choice in body.get("choices", []):
        for call in choice["message"].get("tool_calls") or []:
            call["id"] = "call_of_both"


def no_results(body: Json) -> None:
    for message in body.get("messages", []):
        for block in message["content"] if isinstance(message["content"], list) else []:
            if block.get("type") == "tool_result":
                block["content"] = "Nothing."


def thoughts_in_text(body: Json) -> None:
    for choice in body.get("choices", []):
        message = choice["message"]
        message["content"] = f"{message.pop('reasoning_content', '')}{message['content']}"
        message.pop("reasoning", None)


def text_at_the_end(event: Json) -> None:
    for choice in event.get("choices", []):
        if choice.get("finish_reason"):
            choice["delta"]["content"] = "more"


def no_parent(body: Json) -> None:
    body.pop("previous_response_id", None)


def pirate(body: Json) -> None:
    body["instructions"] = f"Speak like a pirate. {body.get('instructions', '')}"


def content_input(body: Json) -> None:
    for block in body.get("content", []):
        if block["type"] == "tool_use":
            block["input"] = {}


def without_signature(body: Json) -> None:
    for block in body.get("content", []):
        block.pop("signature", None)


def one_use_id(body: Json) -> None:
    for block in body.get("content", []):
        if block["type"] == "tool_use":
            block["id"] = "toolu_of_both"


def new_head(body: Json) -> None:
    """A thread that goes on begins with another system prompt."""
    if body.get("thread", {}).get("type") == "continue":
        body["system"] = "Be brief."


def steered_to(words: str) -> Callable[[Json], None]:
    return lambda body: body.update(input=[{"role": "user", "content": words}])


def chat_arguments(body: Json) -> None:
    for choice in body.get("choices", []):
        for call in choice["message"].get("tool_calls") or []:
            call["function"]["arguments"] = "{}"


def chat_ids(numbers: Iterator[int]) -> Callable[[Json], None]:
    return lambda event: event.update(id=f"chatcmpl-{next(numbers)}")


def chat_delta(body: Json) -> None:
    for choice in body.get("choices", []):
        for call in choice["delta"].get("tool_calls") or []:
            call["id"] = "call_again"


def finish(reason: str) -> Callable[[Json], None]:
    def change(body: Json) -> None:
        for choice in body.get("choices", []):
            choice["finish_reason"] = reason

    return change


ACCEPTS = Mutant(status=200)
REFUSES = Mutant(status=400)
FAILS = Mutant(event=renamed("response.completed", "response.failed"))
NO_PARENT = Mutant(request=no_parent)
OTHER_CODE = Mutant(event=put(error__code="not_found"))
CLIENTS_FAULT = Mutant(answer=put(error__type="invalid_request_error"))
NO_CHOICE = Mutant(request=put(tool_choice="auto"))
NO_CHOICE_OF_MESSAGES = Mutant(request=put(tool_choice={"type": "auto"}))
NOT_CANCELLED = Mutant(
    answer=when(lambda body: body.get("status") == "cancelled", put(status="completed"))
)

MUTANTS: dict[str, Mutant] = {
    "responses.create.models": Mutant(answer=put(object="models")),
    "responses.create.whole": Mutant(answer=put(service_tier=None)),
    "responses.create.usage": Mutant(answer=put(usage__total_tokens=1)),
    "responses.create.fields": Mutant(answer=put(temperature=1.0)),
    "responses.create.tools": Mutant(answer=put(tools=[])),
    "responses.create.format": Mutant(answer=put(text__format={"type": "text"})),
    "responses.create.client-metadata": REFUSES,
    "responses.create.unknown-keys": REFUSES,
    "responses.create.roles": REFUSES,
    "responses.create.phases": REFUSES,
    "responses.create.image": REFUSES,
    "responses.create.request-id": Mutant(hides=("x-request-id",)),
    "responses.create.idempotency": Mutant(forgets=("idempotency-key",)),
    "responses.errors.json": Mutant(answer=put(error__param=None)),
    "responses.errors.type": Mutant(answer=put(error__type="server_error")),
    "responses.errors.range": ACCEPTS,
    "responses.errors.model": ACCEPTS,
    "responses.errors.metadata": ACCEPTS,
    "responses.errors.output": ACCEPTS,
    "responses.errors.key": Mutant(adds_key=True),
    "responses.errors.engine": CLIENTS_FAULT,
    "responses.calls.call": Mutant(answer=empty_arguments),
    "responses.calls.round": Mutant(request=items(lambda item: "output" not in item)),
    "responses.calls.parallel": Mutant(answer=one_call_id),
    "responses.calls.length": Mutant(answer=put(status="completed")),
    "responses.calls.reasoning": Mutant(
        answer=items(lambda item: item["type"] != "reasoning", "output")
    ),
    "responses.state.retrieve": Mutant(verb="GET", answer=put(output=[])),
    "responses.state.unknown": ACCEPTS,
    "responses.state.unstored": Mutant(request=put(store=True)),
    "responses.state.delete": Mutant(answer=put(deleted=False)),
    "responses.state.input-items": Mutant(answer=put(has_more=False)),
    "responses.state.parent": NO_PARENT,
    "responses.state.chain": Mutant(
        request=when(lambda body: body["input"] == "Fact 2.", no_parent)
    ),
    "responses.state.instructions": Mutant(request=pirate),
    "responses.state.fork": Mutant(
        request=when(
            lambda body: "conform-script" in str(body["input"]),
            lambda body: body.update(input=f"Left. {body['input']}"),
        )
    ),
    "responses.state.unknown-parent": NO_PARENT,
    "responses.state.unknown-parent-param": Mutant(answer=put(error__param="input")),
    "responses.state.pending-call": NO_PARENT,
    "responses.state.item-reference": Mutant(
        request=items(lambda item: item.get("type") != "item_reference")
    ),
    "responses.tokens.count": Mutant(answer=put(input_tokens=0)),
    "responses.compaction.window": Mutant(
        answer=items(lambda item: item["type"] != "compaction", "output")
    ),
    "responses.compaction.model": ACCEPTS,
    "responses.conversations.life": Mutant(answer=put(deleted=False)),
    "responses.conversations.items": Mutant(request=put(conversation=None)),
    "responses.conversations.read": Mutant(request=put(conversation=None)),
    "responses.conversations.parent": Mutant(request=put(conversation=None)),
    "responses.background.poll": Mutant(request=put(background=None)),
    "responses.background.cancel": NOT_CANCELLED,
    "responses.background.foreground": ACCEPTS,
    "responses.stream.framing": Mutant(name="message"),
    "responses.stream.order": Mutant(drops="response.output_item.done"),
    "responses.stream.snapshots": Mutant(
        event=of_type("response.created", put(response__tools=None))
    ),
    "responses.stream.zero": Mutant(event=later),
    "responses.stream.usage": Mutant(
        event=of_type("response.completed", put(response__usage=None))
    ),
    "responses.stream.parts": Mutant(drops="response.content_part.done"),
    "responses.stream.exact": Mutant(event=without_wide),
    "responses.stream.call": Mutant(drops="response.function_call_arguments.done"),
    "responses.stream.calls": Mutant(doubles="response.output_item.added"),
    "responses.stream.reasoning": Mutant(drops="response.reasoning"),
    "responses.stream.length": Mutant(event=renamed("response.incomplete", "response.completed")),
    "responses.stream.failure": Mutant(doubles="response.failed"),
    "responses.stream.refused": ACCEPTS,
    "responses.stream.stored": Mutant(verb="GET", answer=put(output=[])),
    "responses.stream.done": Mutant(has_no_end_mark=True),
    "responses.stream.replay": Mutant(path=lambda path: path.replace("starting_after=1", "")),
    "responses.socket.turn": Mutant(drops="response.in_progress"),
    "responses.socket.stored": Mutant(request=put(store=False)),
    "responses.socket.sequence": Mutant(event=put(response__id="resp_of_all")),
    "responses.socket.zero": Mutant(event=later),
    "responses.socket.same": Mutant(drops="response.content_part", only="socket"),
    "responses.socket.stream-flag": FAILS,
    "responses.socket.queue": FAILS,
    "responses.socket.ping": FAILS,
    "responses.socket.twenty": FAILS,
    "responses.socket.bad-json": Mutant(event=put(status="bad")),
    "responses.socket.bad-type": Mutant(event=renamed("error", "notice")),
    "responses.socket.envelope": Mutant(event=put(status=500)),
    "responses.socket.background": Mutant(event=renamed("error", "response.created")),
    "responses.socket.failure": Mutant(event=put(response__error__message="", error__message="")),
    "responses.socket.key": Mutant(adds_key=True),
    "responses.socket.close": Mutant(lingers_s=6.0),
    "responses.cache.continue": NO_PARENT,
    "responses.cache.call": NO_PARENT,
    "responses.cache.connection": OTHER_CODE,
    "responses.cache.stored": NO_PARENT,
    "responses.cache.http": NO_PARENT,
    "responses.cache.unknown": OTHER_CODE,
    "responses.cache.evict": Mutant(request=when(is_hello, no_parent)),
    "responses.cache.fork-fails": Mutant(request=put(stream_id=None)),
    "responses.cache.instructions": Mutant(request=pirate),
    "responses.lanes.names": Mutant(event=put(stream_id=None)),
    "responses.lanes.order": Mutant(request=lanes(count())),
    "responses.lanes.beside": Mutant(request=put(stream_id="left")),
    "responses.lanes.fork": NO_PARENT,
    "responses.lanes.bad": Mutant(event=put(stream_id="no blanks please")),
    "responses.lanes.count": Mutant(
        request=when(lambda body: body.get("stream_id") == "lane-32", put(stream_id="lane-31"))
    ),
    "responses.lanes.error": Mutant(event=put(stream_id=None)),
    "responses.warm.id": Mutant(request=put(generate=None)),
    "responses.warm.empty": Mutant(
        request=when(
            lambda body: body["input"] == [], put(input="Say hello.", previous_response_id=None)
        )
    ),
    "responses.steer.accepted": Mutant(
        event=renamed("response.steer.accepted", "response.steer.failed")
    ),
    "responses.steer.successor": Mutant(
        request=when(lambda body: body.get("type") == "response.steer", steered_to("Go on."))
    ),
    "responses.steer.failed": Mutant(
        event=renamed("response.steer.failed", "response.steer.accepted")
    ),
    "messages.create.whole": Mutant(answer=put(stop_reason="stop")),
    "messages.create.system": Mutant(request=put(system=None)),
    "messages.create.length": Mutant(answer=put(stop_reason="end_turn")),
    "messages.create.thinking": Mutant(answer=without_signature),
    "messages.stream.order": Mutant(drops="message_delta"),
    "messages.stream.exact": Mutant(event=without_wide),
    "messages.tools.round": Mutant(answer=content_input),
    "messages.tools.stream": Mutant(drops="content_block_delta"),
    "messages.tokens.count": Mutant(answer=put(input_tokens=0)),
    "messages.errors.request": Mutant(answer=put(error__type="api_error")),
    "messages.errors.model": ACCEPTS,
    "messages.errors.engine": CLIENTS_FAULT,
    "messages.errors.key": Mutant(adds_key=True),
    "messages.tools.parallel": Mutant(answer=one_use_id),
    "messages.stream.failure": Mutant(drops="error"),
    "messages.threads.continue": Mutant(request=put(thread=None)),
    "messages.threads.call": Mutant(request=new_head),
    "messages.threads.fork": Mutant(
        request=when(
            lambda body: "conform-script" in str(body["messages"]),
            lambda body: body["messages"].insert(0, {"role": "user", "content": "Left."}),
        )
    ),
    "messages.threads.unknown": Mutant(request=put(thread=None)),
    "chat.create.whole": Mutant(answer=put(usage__total_tokens=1)),
    "chat.create.roles": Mutant(request=items(lambda item: item["role"] != "system", "messages")),
    "chat.create.length": Mutant(answer=finish("stop")),
    "chat.stream.chunks": Mutant(event=chat_ids(count())),
    "chat.stream.usage": Mutant(request=put(stream_options=None)),
    "chat.stream.exact": Mutant(event=without_wide),
    "chat.tools.round": Mutant(answer=chat_arguments),
    "chat.tools.stream": Mutant(event=chat_delta),
    "chat.errors.request": ACCEPTS,
    "chat.errors.model": ACCEPTS,
    "chat.errors.engine": CLIENTS_FAULT,
    "chat.errors.result": ACCEPTS,
    "responses.create.defaults": Mutant(answer=put(truncation="auto")),
    "responses.create.times": Mutant(answer=put(completed_at="now")),
    "responses.create.names": Mutant(answer=put(prompt_cache_key="")),
    "responses.create.effort": Mutant(request=put(reasoning={"effort": "high"})),
    "responses.create.file": REFUSES,
    "responses.create.instructions": Mutant(request=put(instructions=None)),
    "responses.create.limit": Mutant(request=put(max_output_tokens=None)),
    "responses.create.schema": Mutant(request=put(text=None)),
    "responses.stream.options": Mutant(
        event=of_type("response.output_text.delta", put(obfuscation="x"))
    ),
    "responses.stream.fails": Mutant(drops="response.failed"),
    "responses.errors.truncation": ACCEPTS,
    "responses.tools.offered": Mutant(request=without_words("tools", "get_time")),
    "responses.tools.none": NO_CHOICE,
    "responses.tools.required": NO_CHOICE,
    "responses.tools.function": NO_CHOICE,
    "responses.tools.allowed": NO_CHOICE,
    "responses.tools.unknown": ACCEPTS,
    "responses.tools.custom": REFUSES,
    "responses.tools.parts": Mutant(
        request=when(goes_on, lambda body: body["input"][0].update(output="Nothing."))
    ),
    "responses.include.round": Mutant(
        request=items(lambda item: item.get("type") != "function_call")
    ),
    "responses.include.encrypted": Mutant(answer=of_all("reasoning", put(encrypted_content=None))),
    "responses.errors.input": ACCEPTS,
    "responses.errors.role": ACCEPTS,
    "responses.errors.item": ACCEPTS,
    "responses.errors.part": ACCEPTS,
    "responses.errors.tool": ACCEPTS,
    "responses.errors.format": ACCEPTS,
    "responses.errors.effort": ACCEPTS,
    "responses.errors.value": ACCEPTS,
    "responses.errors.limit": ACCEPTS,
    "responses.errors.wrong-key": Mutant(adds_key=True),
    "responses.errors.path": Mutant(answer=put(error=None)),
    "responses.errors.context": Mutant(answer=put(error__code="bad_request")),
    "responses.errors.busy": Mutant(status=400),
    "responses.state.deleted-parent": Mutant(answer=put(error__code="not_found")),
    "responses.state.delete-unknown": ACCEPTS,
    "responses.state.model": Mutant(answer=when(goes_on, put(model="another"))),
    "responses.state.tools": Mutant(
        request=when(goes_on, lambda body: body.update(tools=[WEATHER]))
    ),
    "responses.state.items-order": Mutant(answer=reversed_list),
    "responses.state.unstored-parent": Mutant(request=put(store=True)),
    "responses.tokens.parent": NO_PARENT,
    "responses.background.resume": Mutant(drops="response.output_text.delta"),
    "responses.background.resume-late": Mutant(
        path=lambda path: path.partition("&starting_after")[0]
    ),
    "responses.background.store": ACCEPTS,
    "responses.background.cancel-twice": NOT_CANCELLED,
    "responses.background.failure": Mutant(
        verb="GET", answer=when(lambda body: body.get("status") == "failed", put(error=None))
    ),
    "responses.background.continue": NO_PARENT,
    "responses.conversations.unknown": ACCEPTS,
    "responses.conversations.named": Mutant(answer=put(conversation=None)),
    "responses.conversations.added": Mutant(answer=put(has_more=False)),
    "responses.conversations.forgets": Mutant(verb="DELETE", method="GET"),
    "responses.conversations.beside": Mutant(
        request=when(
            lambda body: "conversation" in body,
            lambda body: body.update(input=f"Left. {body['input']}"),
        )
    ),
    "responses.conversations.at-once": Mutant(verb="GET", answer=first_of_list),
    "responses.compaction.chain": Mutant(answer=without_words("output", "7421")),
    "responses.compaction.usage": Mutant(answer=put(usage=None)),
    "responses.compaction.forged": Mutant(
        request=items(lambda item: item.get("encrypted_content") != "bm90IHNlYWxlZCBoZXJl")
    ),
    "responses.compaction.trigger": Mutant(answer=of_all("compaction", put(type="message"))),
    "responses.socket.unstored": Mutant(request=put(store=True)),
    "responses.socket.large": FAILS,
    "responses.socket.model": Mutant(event=put(error__message="")),
    "responses.socket.parents-model": Mutant(
        event=when(
            lambda event: event.get("response", {}).get("previous_response_id") is not None,
            put(response__model="another"),
        )
    ),
    "responses.cache.tools": Mutant(
        request=when(goes_on, lambda body: body.update(tools=[WEATHER]))
    ),
    "responses.cache.by-http": Mutant(request=put(store=True)),
    "responses.cache.evict-stored": Mutant(request=put(store=False)),
    "responses.cache.evict-lane": FAILS,
    "responses.cache.incomplete": Mutant(
        event=renamed("response.incomplete", "response.completed")
    ),
    "responses.cache.bad-frame": FAILS,
    "responses.lanes.back": NO_PARENT,
    "responses.lanes.running": NO_PARENT,
    "responses.lanes.running-elsewhere": Mutant(request=put(stream_id="left")),
    "responses.lanes.error-beside": FAILS,
    "responses.warm.events": Mutant(doubles="response.in_progress"),
    "responses.warm.usage": Mutant(event=put(response__usage__output_tokens=1)),
    "responses.warm.option": Mutant(request=put(prompt_cache_options=None)),
    "responses.steer.numbers": Mutant(
        event=of_type("response.steer.accepted", put(sequence_number=0))
    ),
    "responses.steer.output": Mutant(
        event=renamed("response.steer.failed", "response.steer.accepted")
    ),
    "responses.steer.first": Mutant(request=when(waits, put(stream_id="other"))),
    "responses.steer.pending": Mutant(
        request=when(lambda body: body.get("type") == "response.steer", steered_to("Go on."))
    ),
    "responses.steer.back": Mutant(event=of_type("response.steer.failed", put(steer__input=[]))),
    "responses.recovery.full": Mutant(request=without_words("input", "7421")),
    "responses.recovery.stored": Mutant(request=put(store=False)),
    "messages.create.stop": Mutant(answer=put(stop_sequence="other")),
    "messages.create.limit": Mutant(request=put(max_tokens=9)),
    "messages.create.agents": REFUSES,
    "messages.create.history": Mutant(
        request=items(lambda item: item["role"] != "assistant", "messages")
    ),
    "messages.create.image": REFUSES,
    "messages.create.models": Mutant(answer=put(has_more=True)),
    "messages.create.request-id": Mutant(hides=("request-id",)),
    "messages.stream.start": Mutant(event=of_type("message_start", put(message__usage={}))),
    "messages.stream.blocks": Mutant(event=index_again),
    "messages.stream.thinking": Mutant(
        event=of_type("content_block_delta", put(delta__signature=None, delta__type="text_delta"))
    ),
    "messages.tools.any": NO_CHOICE_OF_MESSAGES,
    "messages.tools.forced": NO_CHOICE_OF_MESSAGES,
    "messages.tools.none": NO_CHOICE_OF_MESSAGES,
    "messages.tools.error": Mutant(request=no_results),
    "messages.tools.lone-result": ACCEPTS,
    "messages.tools.no-result": ACCEPTS,
    "messages.tokens.tools": Mutant(request=put(tools=[])),
    "messages.errors.json": Mutant(answer=put(error__type="api_error")),
    "messages.errors.block": ACCEPTS,
    "messages.errors.role": ACCEPTS,
    "messages.errors.busy": Mutant(answer=put(error__type="api_error")),
    "messages.threads.stream": Mutant(request=put(thread=None)),
    "messages.threads.long": Mutant(
        request=when(
            lambda body: "Fact 2." in str(body.get("messages")), put(thread={"type": "create"})
        )
    ),
    "messages.threads.none": ACCEPTS,
    "chat.create.head": Mutant(answer=put(model=None)),
    "chat.create.limits": Mutant(request=put(max_tokens=None)),
    "chat.create.stop": Mutant(request=put(stop=None)),
    "chat.create.format": Mutant(request=put(response_format=None)),
    "chat.create.developer": Mutant(
        request=items(lambda item: item["role"] != "developer", "messages")
    ),
    "chat.create.several": Mutant(request=put(n=None)),
    "chat.create.image": REFUSES,
    "chat.create.reasoning": Mutant(answer=thoughts_in_text),
    "chat.stream.no-usage": Mutant(
        request=lambda body: body.update(stream_options={"include_usage": True})
    ),
    "chat.stream.usage-once": Mutant(event=lambda event: event.update(usage={"total_tokens": 1})),
    "chat.stream.finish": Mutant(event=text_at_the_end),
    "chat.stream.failure": Mutant(event=put(error=None)),
    "chat.tools.stream-two": Mutant(event=one_index),
    "chat.tools.parallel": Mutant(answer=same_call_id),
    "chat.tools.required": NO_CHOICE,
    "chat.tools.function": NO_CHOICE,
    "chat.tools.none": NO_CHOICE,
    "chat.errors.json": ACCEPTS,
    "chat.errors.role": ACCEPTS,
    "chat.errors.key": Mutant(adds_key=True),
    "chat.errors.busy": Mutant(status=400),
}
# What Segue does otherwise on purpose: the case, and a server that is mended in this way.
OTHERWISE: dict[str, Mutant] = {
    # docs/apis/messages.md: without it the answer may fill the context.
    "messages.errors.max-tokens": Mutant(
        status=400,
        answer=lambda body: body.update(
            type="error",
            error={"type": "invalid_request_error", "message": "max_tokens: Field required"},
        ),
    ),
}
