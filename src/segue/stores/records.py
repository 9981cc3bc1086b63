"""How does a turn become bytes and a turn again, for every store that keeps bytes?

In: a `Turn`. Out: `TurnColumns`, which a database keeps as one row, and back. Items are kept to the
byte, sampled ids to the id. What a response echoes at length (tools, instructions) is split off as a
`LongField`, so that a store can keep it once for many turns. Warmth and decoded tools only save time
and are not kept. Events, items of conversations and API keys become rows here too. Nothing here does
I/O.

A response is kept compressed: nine tenths of a short one are the same in all of them.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b
from typing import Generic, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, structs

from segue.limits import Key
from segue.seams.history import Owner, Round, Turn, UsageEntry
from segue.seams.prompt import IdArray
from segue.seams.store import Conversation, ConversationItem
from segue.turn.commit import entry_of
from segue.wire.codec import encode, snapshot_event
from segue.wire.events import Event, Failed
from segue.wire.items import Call, Item, ItemValue, Reasoning, weigh_values
from segue.wire.response import Fault, Response

FieldName = TypeVar("FieldName")

# A field shorter than this costs less inside its response than in a row of its own.
FIELD_BYTES_MIN = 64
# Measured on small turns: the Python objects around one turn and around one item.
TURN_BYTES = 2_000
ITEM_BYTES = 600

SHORT = Raw(b"null")

# Events repeat one another, so the fastest compression level finds most of it.
EVENTS_LEVEL = 1

# An idempotency key may have any length and any characters; its digest has a fixed size.
DIGEST_BYTES = 32

# What most responses have in common, for the compressor to refer to. Rows need it to be read, so it never changes: a
# better one gets a mark of its own. What begins with no mark is JSON, from before.
RESPONSE_MARK = b"\x01"
RESPONSE_COMMON = (
    b'{"id":"resp_","object":"response","created_at":17,"completed_at":17,"status":"completed","background":false,'
    b'"error":null,"incomplete_details":null,"instructions":null,"max_output_tokens":null,"max_tool_calls":null,'
    b'"model":"","output":[],"parallel_tool_calls":true,"previous_response_id":null,"prompt_cache_key":null,'
    b'"reasoning":{"effort":null,"summary":null},"safety_identifier":null,"service_tier":"default","store":true,'
    b'"temperature":1.0,"text":{"format":{"type":"text"},"verbosity":"medium"},"tool_choice":"auto","tools":null,'
    b'"top_logprobs":0,"top_p":1.0,"presence_penalty":0.0,"frequency_penalty":0.0,"truncation":"disabled",'
    b'"usage":{"input_tokens":,"input_tokens_details":{"cached_tokens":0,"cache_write_tokens":0},"output_tokens":,'
    b'"output_tokens_details":{"reasoning_tokens":0},"total_tokens":},"user":null,"metadata":{}}'
)
# A raw stream with a small window: 15 us for a short response, where zlib's own sizes take 150 to be set up.
RESPONSE_WINDOW = -11
RESPONSE_LEVEL = 3
RESPONSE_MEMORY = 4

# A turn of this weight takes some milliseconds to pack.
LONG_TURN_BYTES = 1024 * 1024
ABANDONED = Fault("server_error", "The server stopped before the response was finished.")


class LongField(NamedTuple):
    """A long field of a response, by its digest."""

    digest: bytes
    body: bytes


class TurnColumns(NamedTuple, Generic[FieldName]):
    """One turn as bytes: its history, its response, and the fields split off the response. In a row of a database the
    long fields are only named, by the database's own kind of key."""

    id: str
    parent_id: str | None
    history: bytes
    response: bytes
    instructions: FieldName | None
    tools: FieldName | None


class _Tagged(Struct):
    """The field that says whether the bytes of an item name their own type."""

    type: str | UnsetType | None = UNSET


class _KeptItem(Struct, array_like=True):
    """`form` is the value once more, only where the bytes alone would not decode to it."""

    raw: bytes
    kind: str
    form: bytes | None


class _KeptRound(Struct, array_like=True):
    given: list[_KeptItem]
    wrote: list[_KeptItem]
    ids: list[bytes]
    tail: bytes
    fingerprint: str | None
    did_sample: bool
    is_fresh: bool = False


class _History(Struct, array_like=True):
    """`output` is None where it is what the rounds wrote, which is the rule."""

    rounds: list[_KeptRound]
    open_calls: list[Call]
    model_turns: int
    root_at: int
    output: list[bytes] | None
    # Records from before guards have none.
    passed: list[str] = []
    # Only of a turn that is queued.
    request: bytes = b""
    # Records from before routes were kept have none of these.
    chain: str = ""
    fork: str = ""
    route: str | None = None


def _kind_of(kind: type[ItemValue]) -> str:
    """The tag of this type of item on the wire."""
    return str(kind.__struct_config__.tag)


_TAGGED = msgspec.json.Decoder(_Tagged)
_HISTORY = msgspec.msgpack.Decoder(_History)
_EVENTS = msgspec.msgpack.Decoder(list[tuple[str, int, bytes]])
_RESPONSE = msgspec.json.Decoder(Response)
_KEPT_ITEM = msgspec.msgpack.Decoder(_KeptItem)
# One for each type rather than one for all: a decoder of a single type forgives a missing tag.
_VALUES: dict[str, msgspec.json.Decoder[ItemValue]] = {
    _kind_of(kind): msgspec.json.Decoder(kind) for kind in get_args(ItemValue)
}


def link(
    owner: Owner,
    turn_id: str,
    rows: Iterable[TurnColumns[FieldName]],
    load: Callable[[FieldName], LongField],
) -> Turn | None:
    """The turn with this id, linked to its ancestors as far as they are among the rows."""
    by_id: dict[str | None, TurnColumns[FieldName]] = {row.id: row for row in rows}
    chain: list[TurnColumns[FieldName]] = []
    above: str | None = turn_id
    while (row := by_id.pop(above, None)) is not None:
        chain.append(row)
        above = row.parent_id
    turn: Turn | None = None
    for row in reversed(chain):
        instructions = None if row.instructions is None else load(row.instructions)
        tools = None if row.tools is None else load(row.tools)
        record = TurnColumns(*row[:4], instructions, tools)
        turn = unpack(owner, record, turn, is_whole=above is None)
    return turn


def usage_of(turn: Turn) -> UsageEntry | None:
    """The usage row of this turn, counted again if it was reloaded; None while it runs."""
    return turn.usage or entry_of(turn.owner, turn.response)


def is_left(turn: Turn) -> bool:
    """Whether another process can run this turn, which a dead one has never begun."""
    return turn.response.status == "queued" and bool(turn.request)


def abandon(turn: Turn, last: int | None) -> tuple[Turn, UsageEntry, list[Event]]:
    """A turn whose process has died, as failed; its usage row, which may count too little; and its terminal event, if
    events of it were logged."""
    response = msgspec.structs.replace(turn.response, status="failed", error=ABANDONED)
    failed = structs.replace(turn, response=response)
    entry = usage_of(failed)
    assert entry is not None, "a failed turn has ended"
    if last is None:
        return failed, entry, []
    return failed, entry, [snapshot_event(Failed, last + 1, encode(response))]


def pack_events(events: Sequence[Event]) -> bytes:
    """Events as one compressed batch."""
    kept = [(event.type, event.number, event.data) for event in events]
    return zlib.compress(msgspec.msgpack.encode(kept), EVENTS_LEVEL)


def unpack_events(batches: Iterable[bytes], number: int) -> list[Event] | None:
    """The events after this number, from batches in order; None if one is missing. An event that was logged twice
    is returned once."""
    events: list[Event] = []
    for batch in batches:
        for kind, its_number, data in _EVENTS.decode(zlib.decompress(batch)):
            if its_number > number + 1:
                return None
            if its_number == number + 1:
                events.append(Event(kind, its_number, data))
                number = its_number
    return events


def is_text(*names: str) -> bool:
    """Whether these can be in a column of text at all: halves of surrogate pairs and NUL cannot, so nothing has
    that name."""
    try:
        return b"\0" not in "".join(names).encode()
    except UnicodeEncodeError:
        return False


def digest_key(key: str) -> bytes:
    """An idempotency key as stores keep it."""
    return blake2b(key.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES).digest()


def pack(turn: Turn) -> TurnColumns[LongField]:
    history = _History(
        rounds=[_pack_round(round_) for round_ in turn.rounds],
        open_calls=list(turn.open_calls.values()),
        model_turns=turn.model_turns,
        root_at=turn.root_at,
        output=_output_beside(turn),
        passed=list(turn.passed),
        request=turn.request,
        chain=turn.chain,
        fork=turn.fork,
        route=turn.route,
    )
    instructions = _long_field(turn.response.instructions)
    tools = _long_field(turn.response.tools)
    split = {"instructions": instructions, "tools": tools}
    short = {name: SHORT for name, field in split.items() if field}
    response = msgspec.structs.replace(turn.response, output=[], **short)
    return TurnColumns(
        turn.id,
        turn.parent_id,
        msgspec.msgpack.encode(history),
        compress_response(msgspec.json.encode(response)),
        instructions,
        tools,
    )


def compress_response(body: bytes) -> bytes:
    """A response as it is kept."""
    how = (RESPONSE_LEVEL, zlib.DEFLATED, RESPONSE_WINDOW, RESPONSE_MEMORY)
    packer = zlib.compressobj(*how, zdict=RESPONSE_COMMON)
    return RESPONSE_MARK + packer.compress(body) + packer.flush()


def expand_response(kept: bytes) -> bytes:
    """The JSON of a response, also of one that was kept as JSON."""
    if not kept.startswith(RESPONSE_MARK):
        return kept
    try:
        return zlib.decompressobj(RESPONSE_WINDOW, zdict=RESPONSE_COMMON).decompress(kept[1:])
    except zlib.error as error:
        raise ValueError("the response cannot be decompressed") from error


def unpack(
    owner: Owner, record: TurnColumns[LongField], parent: Turn | None, *, is_whole: bool
) -> Turn:
    """The turn from its record, linked to its parent."""
    history = _HISTORY.decode(record.history)
    rounds = tuple(_unpack_round(round_) for round_ in history.rounds)
    written = [item.raw for round_ in rounds for item in round_.wrote]
    output = [Raw(raw) for raw in (written if history.output is None else history.output)]
    split = {"instructions": record.instructions, "tools": record.tools}
    restored = {name: Raw(field.body) for name, field in split.items() if field}
    response = _RESPONSE.decode(expand_response(record.response))
    response = msgspec.structs.replace(response, output=output, **restored)
    return Turn(
        id=record.id,
        owner=owner,
        parent_id=record.parent_id,
        parent=parent,
        rounds=rounds,
        response=response,
        is_stored=True,
        open_calls={call.call_id: call for call in history.open_calls},
        model_turns=history.model_turns,
        root_at=history.root_at,
        chain=history.chain or (record.id if parent is None else parent.chain),
        fork=history.fork,
        route=history.route,
        is_whole=is_whole,
        passed=tuple(history.passed),
        bytes=_weigh(record, rounds, response, parent),
        request=history.request,
    )


def _weigh(
    record: TurnColumns[LongField],
    rounds: tuple[Round, ...],
    response: Response,
    parent: Turn | None,
) -> int:
    """What a reloaded turn costs in memory: its bytes, the same text again in decoded values, the objects around them,
    and the long fields of the response that it does not share with its parent."""
    items = sum(len(round_.given) + len(round_.wrote) for round_ in rounds)
    fields = [(response.instructions, parent and parent.response.instructions)]
    fields.append((response.tools, parent and parent.response.tools))
    unshared = sum(len(bytes(mine)) for mine, theirs in fields if mine != theirs)
    text = len(record.history) + len(record.response)
    inside = sum(
        weigh_values(item.value) for round_ in rounds for item in (*round_.given, *round_.wrote)
    )
    return TURN_BYTES + ITEM_BYTES * items + inside + 2 * text + response.echo_bytes + unshared


def _long_field(raw: Raw) -> LongField | None:
    """The bytes with their digest if they are worth a row of their own."""
    body = bytes(raw)
    if len(body) < FIELD_BYTES_MIN:
        return None
    return LongField(blake2b(body, digest_size=16).digest(), body)


def _output_beside(turn: Turn) -> list[bytes] | None:
    """The output where it is not simply what the rounds wrote."""
    output = [bytes(raw) for raw in turn.response.output]
    written = [item.raw for round_ in turn.rounds for item in round_.wrote]
    return None if output == written else output


def _pack_round(round_: Round) -> _KeptRound:
    return _KeptRound(
        given=[_pack_item(item) for item in round_.given],
        wrote=[_pack_item(item) for item in round_.wrote],
        ids=[_pack_ids(ids) for ids in round_.ids],
        tail=_pack_ids(round_.tail),
        fingerprint=round_.fingerprint,
        did_sample=round_.did_sample,
        is_fresh=round_.is_fresh,
    )


def _unpack_round(kept: _KeptRound) -> Round:
    return Round(
        given=tuple(map(_unpack_item, kept.given)),
        wrote=tuple(map(_unpack_item, kept.wrote)),
        ids=tuple(map(_unpack_ids, kept.ids)),
        tail=_unpack_ids(kept.tail),
        fingerprint=kept.fingerprint,
        did_sample=kept.did_sample,
        is_fresh=kept.is_fresh,
    )


def _pack_item(item: Item) -> _KeptItem:
    """The item's bytes and type. Clients may leave the type out, or send null for it (docs/protocol.md
    3); sealed reasoning is kept as it was decrypted."""
    kind = _kind_of(type(item.value))
    is_enough = _TAGGED.decode(item.raw).type in (kind, UNSET)
    if is_enough and isinstance(item.value, Reasoning):
        is_enough = _VALUES[kind].decode(item.raw) == item.value
    return _KeptItem(item.raw, kind, None if is_enough else msgspec.json.encode(item.value))


def _unpack_item(kept: _KeptItem) -> Item:
    return Item(kept.raw, _VALUES[kept.kind].decode(kept.form or kept.raw))


def _pack_ids(ids: IdArray[int]) -> bytes:
    """Token ids as four bytes each, little-endian on every machine."""
    if sys.byteorder == "big":
        ids = array("I", ids)
        ids.byteswap()
    return ids.tobytes()


def _unpack_ids(packed: bytes) -> IdArray[int]:
    ids = array("I", packed)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


# created_at, metadata, tip_id, tip_items, count, version, speaker
ConversationColumns = tuple[int, bytes, str | None, int, int, int, str | None]


def unpack_conversation(
    owner: Owner, conversation_id: str, columns: ConversationColumns
) -> Conversation:
    """A conversation from its row."""
    texts = msgspec.json.decode(columns[1], type=dict[str, str])
    return Conversation(conversation_id, owner, columns[0], texts, *columns[2:])


def pack_added(added: ConversationItem) -> bytes:
    """An item of a conversation as its row keeps it."""
    return msgspec.msgpack.encode(_pack_item(added.item))


def unpack_added(item_id: str, body: bytes) -> ConversationItem:
    """An item of a conversation from its row."""
    return ConversationItem(item_id, _unpack_item(_KEPT_ITEM.decode(body)))


def pack_key(key: Key, digest: str) -> dict[str, object]:
    """The columns of an API key by name: its digest, then its fields in their order."""
    fields = msgspec.structs.asdict(key)
    texts = {name: msgspec.json.encode(fields[name]).decode() for name in ("scopes", "limits")}
    return {"digest": digest} | fields | texts


def unpack_key(digest: str, *columns: str | int | None) -> tuple[str, Key]:
    """The digest and the key from its columns."""
    fields = dict(zip(Key.__struct_fields__, columns, strict=True))
    for name in ("scopes", "limits"):
        fields[name] = msgspec.json.decode(str(fields[name]))
    return digest, msgspec.convert(fields, Key)
