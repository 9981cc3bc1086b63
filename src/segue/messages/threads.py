"""Which turn does a request of a thread continue, and what does it take from it?

`create` keeps the turn for an hour, `continue` has it as its parent, exactly as `previous_response_id` has: only new
messages are translated, rendered and sent to the engine. A request that leaves `system` or `tools` out has those of the
turn that it continues, as they were written then. One that repeats them is read as any other: where they mean the same,
the prompt goes on; where they differ, they are its new head. A turn may be continued more than once.

A thread is never ignored: it is continued, or refused with the code by which clients send everything again.
"""

from __future__ import annotations

import msgspec
from msgspec import UNSET, Raw, structs

from segue.aio import off_loop
from segue.errors import ID_CHARS_MAX, InvalidRequest
from segue.listener.exchange import Exchange
from segue.listener.services import Services
from segue.memory.budget import sent_bytes
from segue.messages.errors import ThreadRefused
from segue.messages.reading import MessageReading
from segue.messages.request import NONE_SHOWN, MessagesBody, ShownTools
from segue.seams.history import Owner, Turn
from segue.seams.store import Turns
from segue.turn.plan import Arrival
from segue.turn.resolve import is_continuable
from segue.wire.codec import LARGE_BYTES, encode
from segue.wire.requests import Create

# The system prompt, the tools and what was shown of them, as they were sent; nothing where no thread goes on.
HeadSent = tuple[bytes, ...]
NOTHING_SENT = (b"", b"", b"")
_shown = msgspec.json.Decoder(ShownTools)


async def enter_thread(
    reading: MessageReading, arrival: Arrival, exchange: Exchange, services: Services
) -> Arrival:
    """The next turn of the thread that the request names; refused where the thread is not there."""
    account = exchange.account
    if services.open_threads is None:
        message = "Threads are switched off here (--no-threads). Send the whole conversation without 'thread'."
        raise ThreadRefused(message, "thread_unsupported_request", unsupported=[])
    body, turns = reading.body, services.open_threads(account)
    parent = await _find_parent(body, account.owner, turns)
    inherited = parent.head_sent if parent is not None else ()
    system, tools, _ = inherited or NOTHING_SENT
    taken_over = len(system) * (body.system is UNSET) + len(tools) * (body.tools is UNSET)
    receipt = structs.replace(arrival.receipt, bytes_inherited=taken_over)
    exchange.hold(taken_over)
    with services.memory.preparing(sent_bytes(taken_over, 0)):
        is_large = receipt.bytes_read > LARGE_BYTES
        create, head_sent = await off_loop(is_large, _read, reading, inherited)
    caller = structs.replace(arrival.caller, turns=turns, known=parent, head_sent=head_sent)
    return structs.replace(arrival, create=create, caller=caller, receipt=receipt)


def _read(reading: MessageReading, inherited: HeadSent) -> tuple[Create, HeadSent]:
    """The request with what it takes over, and what the next turn may take over from it."""
    body, (system, tools, shown) = reading.body, inherited or NOTHING_SENT
    if body.system is UNSET and system:
        body = structs.replace(body, system=Raw(system))
    if body.tools is UNSET and tools:
        body = structs.replace(body, tools=Raw(tools))
    create = reading.compile(body, _shown.decode(shown) if shown else NONE_SHOWN)
    head_sent = (
        b"" if body.system is UNSET else bytes(body.system),
        b"" if body.tools is UNSET else bytes(body.tools),
        encode(reading.asked.shown) if reading.asked.shown != NONE_SHOWN else b"",
    )
    # Where it is the same, it is in memory once for the whole thread.
    return create, inherited if head_sent == inherited else head_sent


async def _find_parent(body: MessagesBody, owner: Owner, turns: Turns) -> Turn | None:
    """The turn that the request continues; None for a new thread."""
    thread = body.thread
    assert thread is not None, "only a request of a thread comes here"
    if thread.type == "create":
        return None
    if thread.type != "continue":
        raise _invalid("type", "Input should be 'create' or 'continue'")
    if body.parent_id is None or thread.previous_message_id is None:
        raise _invalid("previous_message_id", "Field required")
    turn = await turns.find(owner, body.parent_id)
    if turn is None or not is_continuable(turn):
        # The same for one that is unknown, expired, dropped, another owner's, or lost with its process.
        name = thread.previous_message_id[:ID_CHARS_MAX]
        message = f"No usable thread state was found for {name}."
        raise ThreadRefused(message, "thread_not_found", status=404)
    return turn


def _invalid(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"thread.{field}: {problem}", param=f"thread.{field}")
