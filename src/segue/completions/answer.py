"""How does an answer look to a client of Chat Completions? A response in, a completion out. Pure.

One turn of ours may have several messages and thoughts, with calls between them. A completion has one text, one thought
and a list of calls: texts are joined, calls keep their order, what the server did by itself is not shown.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, structs

from segue.completions.request import AnswerForm
from segue.wire.codec import encode
from segue.wire.response import IncompleteDetails, Response, Usage

FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "function_call"]


class PromptDetails(Struct, frozen=True):
    cached_tokens: int
    cache_write_tokens: int


class CompletionDetails(Struct, frozen=True):
    reasoning_tokens: int


class ChatUsage(Struct, frozen=True):
    """What a turn cost; prompt and completion sum up to the total."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class WrittenFunction(Struct, frozen=True):
    name: str
    arguments: str


class WrittenCustom(Struct, frozen=True):
    name: str
    input: str


class WrittenCall(Struct, frozen=True, kw_only=True):
    """A call that the client has to answer."""

    id: str
    type: Literal["function", "custom"]
    function: WrittenFunction | UnsetType = UNSET
    custom: WrittenCustom | UnsetType = UNSET


class ChatAnswer(Struct, frozen=True, kw_only=True):
    """The message of a completion. `reasoning_content` is in no contract; most clients read it."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: str | None = None
    reasoning_content: str | UnsetType = UNSET
    annotations: list[Raw] | UnsetType = UNSET
    tool_calls: list[WrittenCall] | UnsetType = UNSET
    function_call: WrittenFunction | UnsetType = UNSET


class TextLogprobs(Struct, frozen=True):
    content: list[Raw]
    refusal: None = None


class OnlyChoice(Struct, frozen=True, kw_only=True):
    index: int = 0
    message: ChatAnswer
    logprobs: TextLogprobs | None
    finish_reason: FinishReason


class Completion(Struct, frozen=True, kw_only=True):
    """The answer to a request that is not streamed."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[OnlyChoice]
    usage: ChatUsage | None
    service_tier: str


class WrittenPart(Struct, frozen=True):
    """A part of a message or of a thought."""

    text: str = ""
    refusal: str = ""
    annotations: list[Raw] | None = None
    logprobs: list[Raw] | None = None


class WrittenItem(Struct, frozen=True, kw_only=True):
    """What is read of an item of the output."""

    type: str
    content: list[WrittenPart] | None = None
    summary: list[WrittenPart] | None = None
    call_id: str = ""
    name: str = ""
    arguments: str = ""
    input: str = ""

    @property
    def call(self) -> WrittenCall | None:
        """The call that this is, if the client is to answer it."""
        if self.type == "function_call":
            function = WrittenFunction(self.name, self.arguments)
            return WrittenCall(id=self.call_id, type="function", function=function)
        if self.type == "custom_tool_call":
            custom = WrittenCustom(self.name, self.input)
            return WrittenCall(id=self.call_id, type="custom", custom=custom)
        return None


class _CitedPage(Struct, frozen=True):
    type: str
    start_index: int = 0
    end_index: int = 0
    title: str = ""
    url: str = ""


read_item = msgspec.json.Decoder(WrittenItem).decode
_page = msgspec.json.Decoder(_CitedPage)


def completion_id(turn_id: str) -> str:
    """The id of a turn as this API spells it."""
    return "chatcmpl-" + turn_id.removeprefix("resp_")


def encode_completion(response: Response, form: AnswerForm) -> bytes:
    """A response as a completion."""
    items = [read_item(item) for item in response.output]
    calls = [call for item in items if (call := item.call) is not None]
    texts = [part for item in items if item.type == "message" for part in item.content or ()]
    thought = "".join(map(_thought, items))
    text = "".join(part.text for part in texts)
    message = ChatAnswer(
        content=text if text or not calls else None,
        refusal="".join(part.refusal for part in texts) or None,
        reasoning_content=thought or UNSET,
        annotations=annotations_of(texts) or UNSET,
        tool_calls=calls or UNSET,
    )
    if form.is_old and calls:
        called = calls[0].function
        message = structs.replace(message, tool_calls=UNSET, function_call=called)
    likely = [raw for part in texts for raw in part.logprobs or ()]
    choice = OnlyChoice(
        message=message,
        logprobs=TextLogprobs(likely) if form.wants_logprobs else None,
        finish_reason=finish_reason(
            response.incomplete_details, has_calls=bool(calls), is_old=form.is_old
        ),
    )
    completion = Completion(
        id=completion_id(response.id),
        created=response.created_at,
        model=response.model,
        choices=[choice],
        usage=None if response.usage is None else usage_of(response.usage),
        service_tier=response.service_tier,
    )
    return encode(completion)


def _thought(item: WrittenItem) -> str:
    """What the model thought, as far as the operator lets clients see it."""
    if item.type != "reasoning":
        return ""
    return "".join(part.text for part in item.content or item.summary or ())


def annotations_of(parts: Iterable[WrittenPart]) -> list[Raw]:
    """The pages that a text cites; its places are counted from the beginning of the whole text."""
    found: list[Raw] = []
    start = 0
    for part in parts:
        for raw in part.annotations or ():
            page = _page.decode(raw)
            if page.type == "url_citation":
                places = page.start_index + start, page.end_index + start
                found.append(_citation(*places, page.title, page.url))
        start += len(part.text)
    return found


def _citation(start_index: int, end_index: int, title: str, url: str) -> Raw:
    cited = {"start_index": start_index, "end_index": end_index, "title": title, "url": url}
    return Raw(encode({"type": "url_citation", "url_citation": cited}))


def finish_reason(
    incomplete: IncompleteDetails | None, *, has_calls: bool, is_old: bool
) -> FinishReason:
    """Why an answer ended."""
    if incomplete is not None and incomplete.reason == "content_filter":
        return "content_filter"
    if incomplete is not None:
        return "length"
    if not has_calls:
        return "stop"
    return "function_call" if is_old else "tool_calls"


def usage_of(usage: Usage) -> ChatUsage:
    """What a turn cost, in the words of this API."""
    details = usage.input_tokens_details
    return ChatUsage(
        prompt_tokens=usage.input_tokens,
        completion_tokens=usage.output_tokens,
        total_tokens=usage.total_tokens,
        prompt_tokens_details=PromptDetails(details.cached_tokens, details.cache_write_tokens),
        completion_tokens_details=CompletionDetails(usage.output_tokens_details.reasoning_tokens),
    )
