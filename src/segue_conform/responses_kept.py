"""Which further claims are made about what a server keeps: responses, conversations, background, compactions?"""

from __future__ import annotations

import asyncio

from segue_conform.case import Absent, Case, Json, Need, equal, expect, shown
from segue_conform.responses_http import (
    ECHO,
    GUIDE,
    NOWHERE,
    TYPES,
    WEATHER,
    created,
    echoed,
    knows,
    poll,
    refused,
    texts,
)
from segue_conform.rules import check_error, text_of
from segue_conform.target import Target, script

SLOWLY: Json = {"text": "One two three four five six.", "pieces": 6, "gap_s": 0.1}


# --- responses ----------------------------------------------------------------------------------------------


async def _deleted_parent(target: Target) -> None:
    first = await created(target)
    (await target.delete(f"/responses/{first['id']}")).ok()
    error = await refused(target, target.create(previous_response_id=first["id"]), 400, 404)
    equal(error.get("code"), "previous_response_not_found", "the code")


async def _delete_unknown(target: Target) -> None:
    (await target.delete(f"/responses/{(await created(target))['id']}")).ok()
    answer = await target.delete(f"/responses/{NOWHERE}")
    check_error(answer.body, answer.status, (404,))


async def _parents_model(target: Target) -> None:
    first = await created(target)
    body = target.create(previous_response_id=first["id"])
    del body["model"]
    second = (await target.post("/responses", body)).ok()
    equal(second.get("model"), first["model"], "the model")


async def _tools_not_inherited(target: Target) -> None:
    first = await created(target, tools=[WEATHER])
    second = await created(target, script(ECHO), previous_response_id=first["id"])
    equal(echoed(second)["tools"], [], "the tools that the model was offered")


async def _items_order(target: Target) -> None:
    items = [{"role": "user", "content": f"Number {at}."} for at in range(2)]
    response = await created(target, items)
    page = (await target.get(f"/responses/{response['id']}/input_items")).ok()
    found = [item["content"][0]["text"] for item in page["data"]]
    equal(found, ["Number 1.", "Number 0."], "the items, newest first")


async def _unstored_parent(target: Target) -> None:
    first = await created(target, store=False)
    error = await refused(target, target.create(previous_response_id=first["id"]), 400, 404)
    equal(error.get("code"), "previous_response_not_found", "the code")


async def _tokens_of_parent(target: Target) -> None:
    first = await created(target, "My number is 7421. " * 20)
    alone, after = [
        (await target.post("/responses/input_tokens", target.create("Well?", **fields))).ok()
        for fields in ({}, {"previous_response_id": first["id"]})
    ]
    more = after["input_tokens"] - alone["input_tokens"]
    expect(more > 20, f"the history counts {more} tokens")


# --- background ---------------------------------------------------------------------------------------------


async def begun(target: Target, content: object) -> str:
    """The path of a background response."""
    body = target.create(content, background=True, store=True)
    return f"/responses/{(await target.post('/responses', body)).ok()['id']}"


async def _resume(target: Target) -> None:
    path = await begun(target, script(SLOWLY))
    stream = await target.stream(f"{path}?stream=true&starting_after=1")
    numbers = [event["sequence_number"] for event in stream.events]
    equal(numbers, [*range(2, 2 + len(numbers))], "the numbers after 1")
    equal(stream.types[-1], "response.completed", "the last event")
    deltas = [event["delta"] for event in stream.events if event["type"].endswith("text.delta")]
    equal("".join(deltas), SLOWLY["text"], "the joined deltas")


async def _resume_late(target: Target) -> None:
    path = await begun(target, script(SLOWLY))
    await poll(target, path)
    whole = await target.stream(f"{path}?stream=true")
    last = whole.events[-1]["sequence_number"]
    rest = await target.stream(f"{path}?stream=true&starting_after={last - 1}")
    equal(rest.types, ["response.completed"], "the events after the last but one")


async def _unstored_background(target: Target) -> None:
    await refused(target, target.create(background=True, store=False), 400)


async def _cancel_twice(target: Target) -> None:
    path = await begun(target, script({"pause_s": 10, "text": "Late."}))
    for _ in range(2):
        (await target.post(f"{path}/cancel", {})).ok()
        equal((await poll(target, path))["status"], "cancelled", "status")


async def _background_fails(target: Target) -> None:
    response = await poll(target, await begun(target, script({"fail": 500})))
    equal(response["status"], "failed", "status")
    error = response.get("error")
    expect(isinstance(error, dict) and error.get("message"), f"the error is {shown(error)}")


async def _background_continues(target: Target) -> None:
    path = await begun(target, "My number is 7421.")
    first = await poll(target, path)
    knows(await created(target, script(ECHO), previous_response_id=first["id"]), "7421")


# --- conversations ------------------------------------------------------------------------------------------


async def conversation(target: Target, *texts_of_user: str) -> str:
    """The path of a conversation with these words of a user."""
    items = [{"type": "message", "role": "user", "content": text} for text in texts_of_user]
    made = (await target.post("/conversations", {"items": items})).ok()
    return f"/conversations/{made['id']}"


async def _conversation_unknown(target: Target) -> None:
    made = await target.post("/conversations", {})
    made.ok()
    answer = await target.get("/conversations/conv_00000000000000000000000000000000")
    check_error(answer.body, answer.status, (404,))


async def _conversation_named(target: Target) -> None:
    name = (await conversation(target)).rpartition("/")[2]
    response = await created(target, conversation=name)
    equal(response.get("conversation"), {"id": name}, "conversation")


async def _conversation_added(target: Target) -> None:
    path = await conversation(target)
    items = [{"type": "message", "role": "user", "content": f"Fact {at}."} for at in range(3)]
    added = (await target.post(f"{path}/items", {"items": items})).ok()
    equal((added.get("object"), len(added["data"])), ("list", 3), "the pair of object and length")
    page = (await target.get(f"{path}/items?order=asc&limit=2")).ok()
    equal(page.get("has_more"), True, "has_more")
    rest = (await target.get(f"{path}/items?order=asc&after={page['last_id']}")).ok()
    equal([item["content"][0]["text"] for item in rest["data"]], ["Fact 2."], "the second page")


async def _conversation_forgets(target: Target) -> None:
    path = await conversation(target, "My number is 7421.", "My town is Rome.")
    page = (await target.get(f"{path}/items?order=asc")).ok()
    (await target.delete(f"{path}/items/{page['data'][0]['id']}")).ok()
    name = path.rpartition("/")[2]
    sent = " ".join(texts(await created(target, script(ECHO), conversation=name), "user"))
    expect("Rome" in sent and "7421" not in sent, f"the model was sent {shown(sent)}")


async def _conversation_beside(target: Target) -> None:
    names = [(await conversation(target, words)) for words in ("Left.", "Right.")]
    name = names[1].rpartition("/")[2]
    sent = " ".join(texts(await created(target, script(ECHO), conversation=name), "user"))
    expect("Right." in sent and "Left." not in sent, f"the model was sent {shown(sent)}")


# --- compaction ---------------------------------------------------------------------------------------------


async def _compact_chain(target: Target) -> None:
    first = await created(target, "My number is 7421.")
    body = {"model": target.model, "previous_response_id": first["id"]}
    window = (await target.post("/responses/compact", body)).ok()
    kinds = [item.get("type") for item in window["output"]]
    equal(kinds[-1:], ["compaction"], "the last item of the window")
    expect("7421" in str(window["output"]), "the window has not kept what the user said")
    await created(target, [*window["output"], {"role": "user", "content": "Go on."}])


async def _compact_usage(target: Target) -> None:
    window = (await target.post("/responses/compact", target.create("Hello."))).ok()
    usage = window.get("usage") or {}
    expect(isinstance(usage.get("total_tokens"), int), f"usage is {shown(usage)}")


async def _compact_forged(target: Target) -> None:
    known = await target.post("/responses/compact", target.create("Hello."))
    known.ok()
    items = [
        {"type": "compaction", "encrypted_content": "bm90IHNlYWxlZCBoZXJl"},
        {"role": "user", "content": "Go on."},
    ]
    await refused(target, target.create(items), 400)


async def _compact_trigger(target: Target) -> None:
    first = await created(target, "My number is 7421.")
    body = target.create([{"type": "compaction_trigger"}], previous_response_id=first["id"])
    answer = await target.post("/responses", body)
    if answer.status in (400, 422):
        raise Absent(f"HTTP {answer.status}: {shown(answer.body)}")
    response = answer.ok()
    kinds = [item.get("type") for item in response["output"]]
    equal(kinds, ["compaction"], "the output")
    after = await created(target, script({"text": "Yes."}), previous_response_id=response["id"])
    equal(text_of(after), "Yes.", "the answer after it")


async def _two_at_once(target: Target) -> None:
    """One response at a time in a conversation; the second waits or is refused, and nothing is lost."""
    name = (await conversation(target)).rpartition("/")[2]
    slow = target.create(script({"pause_s": 0.5, "text": "Slow."}), conversation=name)
    first, second = await asyncio.gather(
        target.post("/responses", slow), target.post("/responses", target.create(conversation=name))
    )
    answered = [answer for answer in (first, second) if answer.status == 200]
    statuses = {first.status, second.status}
    expect(answered and statuses <= {200, 400, 409, 429}, f"the statuses are {statuses}")
    page = (await target.get(f"/conversations/{name}/items")).ok()
    equal(len(page["data"]), 2 * len(answered), "the number of items that were kept")


SEGUE = "Segue: docs/protocol.md"

CASES: tuple[Case, ...] = (
    Case(
        "responses.state.deleted-parent",
        "a deleted response cannot be continued",
        "must",
        f"{TYPES}: responses.delete",
        _deleted_parent,
    ),
    Case(
        "responses.state.delete-unknown",
        "deleting an unknown response is 404",
        "should",
        f"{TYPES}: responses.delete",
        _delete_unknown,
    ),
    Case(
        "responses.state.model",
        "a create with a parent may leave out the model",
        "ours",
        f"{SEGUE} 9",
        _parents_model,
    ),
    Case(
        "responses.state.tools",
        "tools are not inherited from the parent",
        "ours",
        f"{SEGUE} 9",
        _tools_not_inherited,
        Need.SCRIPT,
    ),
    Case(
        "responses.state.items-order",
        "input items are listed newest first unless asked otherwise",
        "should",
        f"{TYPES}: responses.input_items",
        _items_order,
    ),
    Case(
        "responses.state.unstored-parent",
        "a response with store: false cannot be continued by HTTP",
        "must",
        f"{TYPES}: store",
        _unstored_parent,
    ),
    Case(
        "responses.tokens.parent",
        "the history of a parent is counted",
        "should",
        f"{TYPES}: responses.input_tokens",
        _tokens_of_parent,
    ),
    Case(
        "responses.background.resume",
        "a running background response is followed from a number on, without a gap",
        "should",
        f"{GUIDE}: Background mode",
        _resume,
        Need.SCRIPT,
    ),
    Case(
        "responses.background.resume-late",
        "one that has ended gives the events after a number, and no others",
        "should",
        f"{GUIDE}: Background mode",
        _resume_late,
        Need.SCRIPT,
    ),
    Case(
        "responses.background.store",
        "background without store is refused",
        "should",
        f"{GUIDE}: Background mode",
        _unstored_background,
    ),
    Case(
        "responses.background.cancel-twice",
        "cancelling twice is as once",
        "should",
        f"{GUIDE}: Background mode",
        _cancel_twice,
        Need.SCRIPT,
    ),
    Case(
        "responses.background.failure",
        "an engine that fails makes it failed, with its error",
        "should",
        f"{GUIDE}: Background mode",
        _background_fails,
        Need.SCRIPT,
    ),
    Case(
        "responses.background.continue",
        "a background response that has ended can be continued",
        "should",
        f"{TYPES}: previous_response_id",
        _background_continues,
        Need.SCRIPT,
    ),
    Case(
        "responses.conversations.unknown",
        "an unknown conversation is 404",
        "should",
        f"{TYPES}: conversations",
        _conversation_unknown,
    ),
    Case(
        "responses.conversations.named",
        "a response names its conversation",
        "should",
        f"{TYPES}: Response.conversation",
        _conversation_named,
    ),
    Case(
        "responses.conversations.added",
        "items are added in order, and listed in pages",
        "should",
        f"{TYPES}: conversations.items",
        _conversation_added,
    ),
    Case(
        "responses.conversations.forgets",
        "the model does not read an item that was deleted",
        "should",
        f"{TYPES}: conversations.items.delete",
        _conversation_forgets,
        Need.SCRIPT,
    ),
    Case(
        "responses.conversations.beside",
        "two conversations do not read each other",
        "should",
        f"{TYPES}: conversations",
        _conversation_beside,
        Need.SCRIPT,
    ),
    Case(
        "responses.conversations.at-once",
        "two responses at once in a conversation: none is lost",
        "should",
        f"{TYPES}: conversation",
        _two_at_once,
        Need.SCRIPT,
    ),
    Case(
        "responses.compaction.chain",
        "a chain is compacted to a window with what the user said",
        "should",
        f"{TYPES}: responses.compact",
        _compact_chain,
    ),
    Case(
        "responses.compaction.usage",
        "a compaction says what it has used",
        "should",
        f"{TYPES}: CompactedResponse",
        _compact_usage,
    ),
    Case(
        "responses.compaction.forged",
        "a compaction that the server has not made is refused",
        "ours",
        f"{SEGUE} 3",
        _compact_forged,
    ),
    Case(
        "responses.compaction.trigger",
        "a compaction_trigger at the end compacts the chain",
        "ours",
        f"{SEGUE} 6.12",
        _compact_trigger,
    ),
)
