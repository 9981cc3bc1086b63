"""How a turn becomes bytes and a turn again, for every store that keeps bytes.

In: a `Turn`. Out: a `Record`, one row's worth, and back. Items are kept verbatim, sampled ids to
the id. What a response echoes at length (tools, instructions) is split off as a `Part`, so that a
store can keep it once for many turns. Warmth and decoded tools are only speed and are not kept.
The events of a turn become batches the same way. Nothing here does I/O.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.limits import KeyLimits
from segue.turn.commit import entry_of
from segue.turn.values import IdArray, Key, Owner, Round, Turn, UsageEntry
from segue.wire.codec import encode_event, encode_response
from segue.wire.events import Event, Failed
from segue.wire.items import Call, Item, ItemValue, Reasoning
from segue.wire.response import Fault, Response

PartName = TypeVar("PartName")

# A part shorter than this costs less inside its response than in a row of its own.
PART_BYTES_MIN = 64
# Measured on small turns: the Python objects around one turn and around one item.
TURN_BYTES = 2_000
ITEM_BYTES = 600

SHORT = Raw(b"null")

# Events repeat one another, so the quickest level finds most of what there is to find.
EVENTS_LEVEL = 1

# A key may be of any length and of any characters; its digest is neither.
KEY_BYTES = 32

ABANDONED = Fault("server_error", "The server stopped before the response was finished.")


class Part(NamedTuple):
    """A long piece of a response, by its digest."""

    digest: bytes
    body: bytes


class Record(NamedTuple):
    """One turn as bytes: its history, its response, and the parts split off the response."""

    history: bytes
    response: bytes
    instructions: Part | None
    tools: Part | None


class Row(NamedTuple, Generic[PartName]):
    """A turn as a database has it: a record whose parts are only named, in the database's own way."""

    id: str
    parent_id: str | None
    history: bytes
    response: bytes
    instructions: PartName | None
    tools: PartName | None


class Tagged(Struct):
    """The one field that tells whether the bytes of an item name their own type."""

    type: str | UnsetType | None = UNSET


class KeptItem(Struct, array_like=True):
    """`form` is the value once more, only where the bytes alone would not decode to it."""

    raw: bytes
    kind: str
    form: bytes | None


class KeptRound(Struct, array_like=True):
    given: list[KeptItem]
    wrote: list[KeptItem]
    ids: list[bytes]
    tail: bytes
    fingerprint: str | None
    did_sample: bool
    is_fresh: bool = False


class History(Struct, array_like=True):
    """`output` is None where it is what the rounds wrote, which is the rule."""

    rounds: list[KeptRound]
    open_calls: list[Call]
    model_turns: int
    root_at: int
    output: list[bytes] | None
    # Records from before guards have none.
    passed: list[str] = []


def kind_of(kind: type[ItemValue]) -> str:
    """The tag by which the wire knows this type of item."""
    return str(kind.__struct_config__.tag)


TAGGED: msgspec.json.Decoder[Tagged] = msgspec.json.Decoder(Tagged)
HISTORY: msgspec.msgpack.Decoder[History] = msgspec.msgpack.Decoder(History)
EVENTS: msgspec.msgpack.Decoder[list[tuple[str, int, bytes]]] = msgspec.msgpack.Decoder(
    list[tuple[str, int, bytes]]
)
RESPONSE: msgspec.json.Decoder[Response] = msgspec.json.Decoder(Response)
# One for each type rather than one for all: a decoder of a single type forgives a missing tag.
VALUES: dict[str, msgspec.json.Decoder[ItemValue]] = {
    kind_of(kind): msgspec.json.Decoder(kind) for kind in get_args(ItemValue)
}


def link(
    owner: Owner,
    turn_id: str,
    rows: Iterable[Row[PartName]],
    part: Callable[[PartName], Part],
) -> Turn | None:
    """The named turn with those of its ancestors that are among the rows."""
    by_id: dict[str | None, Row[PartName]] = {row.id: row for row in rows}
    chain: list[Row[PartName]] = []
    above: str | None = turn_id
    while (row := by_id.pop(above, None)) is not None:
        chain.append(row)
        above = row.parent_id
    turn: Turn | None = None
    for row in reversed(chain):
        record = Record(
            row.history,
            row.response,
            None if row.instructions is None else part(row.instructions),
            None if row.tools is None else part(row.tools),
        )
        turn = unpack((owner, row.id, row.parent_id, record), turn, is_whole=above is None)
    return turn


def abandon(turn: Turn, last: int | None) -> tuple[Turn, UsageEntry, list[Event]]:
    """A turn whose process has died, as failed; its usage, which nobody knows; and the last word of its events, if any
    were written down."""
    response = msgspec.structs.replace(turn.response, status="failed", error=ABANDONED)
    entry = entry_of(turn.owner, response)
    assert entry is not None, "a failed turn has ended"
    failed = replace(turn, response=response)
    if last is None:
        return failed, entry, []
    event = Failed(sequence_number=last + 1, response=encode_response(response))
    return failed, entry, [encode_event(event)]


def pack_events(events: Sequence[Event]) -> bytes:
    """Events as one compressed batch."""
    kept = [(event.type, event.number, event.data) for event in events]
    return zlib.compress(msgspec.msgpack.encode(kept), EVENTS_LEVEL)


def unpack_events(batches: Iterable[bytes], number: int) -> list[Event] | None:
    """The events after this number from batches in their order; None if one is missing. What is
    told twice counts once."""
    found: list[Event] = []
    for batch in batches:
        for kind, its_number, data in EVENTS.decode(zlib.decompress(batch)):
            if its_number > number + 1:
                return None
            if its_number == number + 1:
                found.append(Event(kind, its_number, data))
                number = its_number
    return found


def digest_key(key: str) -> bytes:
    """An idempotency key as stores know it."""
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=KEY_BYTES).digest()


def pack(turn: Turn) -> Record:
    """The turn as bytes."""
    history = History(
        [pack_round(round_) for round_ in turn.rounds],
        list(turn.open_calls.values()),
        turn.model_turns,
        turn.root_at,
        output_beside(turn),
        list(turn.passed),
    )
    instructions = part_of(turn.response.instructions)
    tools = part_of(turn.response.tools)
    response = msgspec.structs.replace(
        turn.response,
        output=[],
        instructions=SHORT if instructions else turn.response.instructions,
        tools=SHORT if tools else turn.response.tools,
    )
    return Record(
        msgspec.msgpack.encode(history), msgspec.json.encode(response), instructions, tools
    )


def unpack(
    row: tuple[str, str, str | None, Record], parent: Turn | None, *, is_whole: bool
) -> Turn:
    """The turn from its owner, id, parent's id and record, linked to its parent."""
    owner, turn_id, parent_id, record = row
    history = HISTORY.decode(record.history)
    rounds = tuple(unpack_round(round_) for round_ in history.rounds)
    written = [item.raw for round_ in rounds for item in round_.wrote]
    output = written if history.output is None else history.output
    restored: dict[str, Raw] = {}
    if record.instructions:
        restored["instructions"] = Raw(record.instructions.body)
    if record.tools:
        restored["tools"] = Raw(record.tools.body)
    response = msgspec.structs.replace(
        RESPONSE.decode(record.response), output=[Raw(raw) for raw in output], **restored
    )
    return Turn(
        id=turn_id,
        owner=owner,
        parent_id=parent_id,
        parent=parent,
        rounds=rounds,
        response=response,
        is_stored=True,
        open_calls={call.call_id: call for call in history.open_calls},
        model_turns=history.model_turns,
        root_at=history.root_at,
        is_whole=is_whole,
        passed=tuple(history.passed),
        bytes=weigh(record, rounds) + weigh_parts(response, parent),
    )


def weigh(record: Record, rounds: tuple[Round, ...]) -> int:
    """What a reloaded turn holds: its bytes, the same text again in decoded values, and the objects
    around them."""
    items = sum(len(round_.given) + len(round_.wrote) for round_ in rounds)
    return TURN_BYTES + ITEM_BYTES * items + 2 * (len(record.history) + len(record.response))


def weigh_parts(response: Response, parent: Turn | None) -> int:
    """What the response's parts add to what the parent holds: neighbours share equal ones."""
    if parent is None:
        return len(bytes(response.instructions)) + len(bytes(response.tools))
    before = parent.response
    return sum(
        len(bytes(mine))
        for mine, theirs in (
            (response.instructions, before.instructions),
            (response.tools, before.tools),
        )
        if mine != theirs
    )


def part_of(raw: Raw) -> Part | None:
    """The bytes with their digest if they are worth a row of their own."""
    body = bytes(raw)
    if len(body) < PART_BYTES_MIN:
        return None
    return Part(blake2b(body, digest_size=16).digest(), body)


def output_beside(turn: Turn) -> list[bytes] | None:
    """The output where it is not simply what the rounds wrote."""
    output = [bytes(raw) for raw in turn.response.output]
    written = [item.raw for round_ in turn.rounds for item in round_.wrote]
    return None if output == written else output


def pack_round(round_: Round) -> KeptRound:
    """One round for the record."""
    return KeptRound(
        [pack_item(item) for item in round_.given],
        [pack_item(item) for item in round_.wrote],
        [pack_ids(ids) for ids in round_.ids],
        pack_ids(round_.tail),
        round_.fingerprint,
        round_.did_sample,
        round_.is_fresh,
    )


def unpack_round(kept: KeptRound) -> Round:
    """One round from the record."""
    return Round(
        tuple(unpack_item(item) for item in kept.given),
        tuple(unpack_item(item) for item in kept.wrote),
        tuple(unpack_ids(ids) for ids in kept.ids),
        unpack_ids(kept.tail),
        kept.fingerprint,
        kept.did_sample,
        kept.is_fresh,
    )


def pack_item(item: Item) -> KeptItem:
    """The item's bytes and type. Clients may leave the type out, or send null for it (docs/protocol.md
    3); what was sealed is kept as it was opened."""
    kind = kind_of(type(item.value))
    speaks = TAGGED.decode(item.raw).type in (kind, UNSET)
    if speaks and isinstance(item.value, Reasoning):
        speaks = VALUES[kind].decode(item.raw) == item.value
    return KeptItem(item.raw, kind, None if speaks else msgspec.json.encode(item.value))


def unpack_item(kept: KeptItem) -> Item:
    """The item, checked again by its type."""
    return Item(kept.raw, VALUES[kept.kind].decode(kept.form or kept.raw))


def pack_ids(ids: IdArray[int]) -> bytes:
    """Token ids as four bytes each, little end first on every machine."""
    if sys.byteorder == "big":
        ids = array("I", ids)
        ids.byteswap()
    return ids.tobytes()


def unpack_ids(packed: bytes) -> IdArray[int]:
    """Token ids from their bytes."""
    ids = array("I", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


class KeyRow(NamedTuple):
    """An API key as a row of text and numbers."""

    digest: str
    id: str
    name: str
    owner: Owner
    scopes: str
    limits: str
    ring: str
    created_at: int
    revoked_at: int | None


def pack_key(key: Key, digest: str) -> KeyRow:
    """A key as its row."""
    scopes, limits = msgspec.json.encode(key.scopes), msgspec.json.encode(key.limits)
    return KeyRow(
        digest,
        key.id,
        key.name,
        key.owner,
        scopes.decode(),
        limits.decode(),
        key.ring,
        key.created_at,
        key.revoked_at,
    )


def unpack_key(row: KeyRow) -> Key:
    """A row as its key."""
    return Key(
        id=row.id,
        name=row.name,
        owner=row.owner,
        scopes=msgspec.json.decode(row.scopes, type=tuple[str, ...]),
        limits=msgspec.json.decode(row.limits, type=KeyLimits),
        ring=row.ring,
        created_at=row.created_at,
        revoked_at=row.revoked_at,
    )
