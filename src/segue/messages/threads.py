"""Which turn does a request of a thread continue, and what does it take from it?

`create` keeps the turn for an hour, `continue` has it as its parent, exactly as `previous_response_id` has: only new
messages are translated, rendered and sent to the engine. A request that leaves `system` or `tools` out has those of the
turn that it continues, as they were written then. One that repeats them is read as any other: where they mean the same,
the prompt goes on; where they differ, they are its new head. A turn may be continued more than once.

A thread is never ignored: it is continued, or refused with the code by which clients send everything again.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, structs

from segue.accounts.account import Account
from segue.errors import ID_CHARS_MAX, InvalidRequest
from segue.listener.services import Services
from segue.messages.errors import ThreadRefused
from segue.messages.request import NONE_SHOWN, MessagesBody, Shown, Thread
from segue.seams.history import Turn
from segue.seams.store import Turns
from segue.turn.plan import Arrival
from segue.turn.resolve import is_continuable
from segue.wire.codec import encode


class OpenedThread(Struct, frozen=True):
    """The threads of a caller, and the turn that the request continues."""

    turns: Turns
    parent: Turn | None = None
    # As earlier requests have written them, and which tools earlier messages have brought.
    system: Raw | UnsetType = UNSET
    tools: Raw | UnsetType = UNSET
    shown: Shown = NONE_SHOWN


_shown = msgspec.json.Decoder(Shown)


async def open_thread(
    body: MessagesBody, thread: Thread, account: Account, services: Services
) -> OpenedThread:
    """The thread that a request names; refused where it is not there."""
    if thread.type not in ("create", "continue"):
        raise _invalid("type", "Input should be 'create' or 'continue'")
    if services.open_threads is None:
        message = "Threads are switched off here (--no-threads). Send the whole conversation without 'thread'."
        raise ThreadRefused(message, "thread_unsupported_request", unsupported=[])
    turns = services.open_threads(account)
    if thread.type == "create":
        return OpenedThread(turns)
    if body.parent_id is None:
        raise _invalid("previous_message_id", "Field required")
    parent = await turns.find(account.owner, body.parent_id)
    if parent is None or not is_continuable(parent):
        # The same for one that is unknown, expired, dropped, another owner's, or lost with its process.
        name = (thread.previous_message_id or "")[:ID_CHARS_MAX]
        message = f"No usable thread state was found for {name}."
        raise ThreadRefused(message, "thread_not_found", status=404)
    system, tools, shown = parent.head_sent or (b"", b"", b"")
    return OpenedThread(
        turns,
        parent,
        Raw(system) if system else UNSET,
        Raw(tools) if tools else UNSET,
        _shown.decode(shown) if shown else NONE_SHOWN,
    )


def inherit(body: MessagesBody, thread: OpenedThread) -> MessagesBody:
    """The body with what it has left to its thread."""
    system = thread.system if body.system is UNSET else body.system
    tools = thread.tools if body.tools is UNSET else body.tools
    return structs.replace(body, system=system, tools=tools)


def enter(arrival: Arrival, thread: OpenedThread, body: MessagesBody, shown: Shown) -> Arrival:
    """The same arrival as the next turn of its thread. `shown`: the tools that messages have brought by now."""
    head = tuple(b"" if raw is UNSET else bytes(raw) for raw in (body.system, body.tools))
    head_sent = (*head, b"" if shown == NONE_SHOWN else encode(shown))
    if thread.parent is not None and thread.parent.head_sent == head_sent:
        # Then it is in memory once for the whole thread.
        head_sent = thread.parent.head_sent
    caller = replace(arrival.caller, turns=thread.turns, known=thread.parent, head_sent=head_sent)
    return structs.replace(arrival, caller=caller)


def _invalid(field: str, problem: str) -> InvalidRequest:
    return InvalidRequest(f"thread.{field}: {problem}", param=f"thread.{field}")
