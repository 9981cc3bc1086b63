"""How does the model inside go on with a long conversation after a restart, without reading it again?

    save     llama.cpp writes a slot into memory -> its tokens are a stored chain's? -> encrypted, beside the store
    restore  at the start, the newest first: decrypted into memory, read into a slot; llama.cpp finds the prefix

Only where the operator gives it room (`embedded_state_bytes_max`). A slot is saved when the engine is idle and when the
server stops. What a slot holds is judged by the tokens in the saved state itself, compared with the prompts of stored
responses in memory: an unstored response, alone or as an ancestor, never reaches the disk. The file names the responses
of its chain and goes when one of them is deleted or too old. Nothing depends on these files: a conversation without one
is read again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import struct
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import Protocol

import msgspec
from msgspec import Struct

from segue.aio import in_background
from segue.errors import Misconfigured
from segue.seams.history import Owner, Turn, ancestors
from segue.seams.prompt import IdArray, Tokens, id_array
from segue.seams.store import Turns

log = logging.getLogger(__name__)

# A file system that is memory: what a slot holds is never on a disk as it is.
MEMORY = Path("/dev/shm")
MEMORY_PREFIX = "segue-slots-"
# Shorter prompts are read again in a moment.
TOKENS_MIN = 256
# How often an idle engine is looked at: another conversation may take the slot.
IDLE_S = 10.0
# The head of a saved slot: what kind of file, its version, and how many tokens follow.
SLOT_HEAD = struct.Struct("<III")
# What the list of a slot's tokens begins with: that it is one, and its version.
LISTED = array("I", [0xFFFFFFFF, 1])
LENGTH = struct.Struct("<I")
SUFFIX = ".state"


class SlotEngine(Protocol):
    """What is used of the engine. Both block, and wait for a job that runs in the slot."""

    # What a state must fit: weights, context, version of llama.cpp.
    fingerprint: str
    slots: int
    # How many jobs have ended so far.
    jobs_ended: int

    @property
    def load(self) -> tuple[int, int]:
        """How many jobs run, and how many wait."""

    def save_slot(self, slot: int, name: str) -> None:
        """Write what this slot holds to a file of this name in the memory folder."""

    def restore_slot(self, slot: int, name: str) -> None:
        """Read such a file into this slot."""


class Ciphers(Protocol):
    """Encryption that is bound to an owner."""

    def seal_bytes(self, owner: Owner, body: bytes) -> bytes:
        """These bytes, encrypted."""

    def open_bytes(self, owner: Owner, data: bytes) -> bytes | None:
        """The bytes; None if this is not ours."""


class _Head(Struct, frozen=True):
    """What stands before the encrypted state."""

    owner: Owner
    fingerprint: str
    tokens: int
    # The responses of the chain, the oldest first.
    turns: list[str]


class SlotStates:
    """The saved states of one engine."""

    def __init__(
        self,
        engine: SlotEngine,
        folder: Path,
        memory: Path,
        ciphers: Ciphers,
        bytes_max: int,
        tips: Callable[[], Iterable[Turn]],
    ) -> None:
        """`folder` holds the files, `memory` is where the engine writes and reads; `tips` are the newest stored
        responses of their chains."""
        self._engine = engine
        self._folder = folder
        self._memory = memory
        self._ciphers = ciphers
        self._bytes_max = bytes_max
        self._tips = tips
        self._files: dict[Path, _Head] = {}
        self._saved_at = 0
        # Deleted since the last save began: a state that was being written may have read them.
        self._erased: set[tuple[Owner, str]] = set()

    async def restore(self, turns: Turns) -> int:
        """Fill the slots from the newest files whose chains are still stored; how many. Others are deleted."""
        self._folder.mkdir(mode=0o700, exist_ok=True)
        paths = sorted(self._folder.glob(f"*{SUFFIX}"), key=lambda path: -path.stat().st_mtime)
        slot = 0
        for path in paths:
            head = _read_head(path)
            if head is None or not await _is_stored(head, turns):
                path.unlink(missing_ok=True)
                continue
            self._files[path] = head
            if slot < self._engine.slots and head.fingerprint == self._engine.fingerprint:
                slot += await asyncio.to_thread(self._restore, path, head, slot)
        return slot

    async def keep(self) -> None:
        """Save whenever the engine is idle."""
        while True:
            await asyncio.sleep(IDLE_S)
            if self._engine.load == (0, 0):
                await self.save()

    async def save(self) -> None:
        """Save every slot that holds a stored chain, if the engine has worked since the last time."""
        if self._saved_at == self._engine.jobs_ended:
            return
        self._saved_at = self._engine.jobs_ended
        self._erased.clear()
        chains = [*_saveable(self._tips())]
        for slot in range(self._engine.slots if chains else 0):
            await asyncio.to_thread(self._save, slot, chains)
            for owner, turn_id in self._erased:
                self._remove_all(owner, turn_id)

    async def forget(self, owner: Owner, turn_id: str) -> None:
        """A response was deleted: so is every state that has read it."""
        self._erased.add((owner, turn_id))
        self._remove_all(owner, turn_id)

    def _remove_all(self, owner: Owner, turn_id: str) -> None:
        for path, head in [*self._files.items()]:
            if head.owner == owner and turn_id in head.turns:
                self._remove(path)

    # In a thread.

    def _restore(self, path: Path, head: _Head, slot: int) -> bool:
        state = self._ciphers.open_bytes(head.owner, _read_state(path))
        if state is None:
            log.warning("%s was encrypted with a key that is gone: deleted", path.name)
            self._remove(path)
            return False
        file = self._memory / path.name
        try:
            file.write_bytes(state)
            self._engine.restore_slot(slot, file.name)
        except OSError as error:
            log.warning("%s cannot be restored: %s", path.name, error)
            return False
        finally:
            file.unlink(missing_ok=True)
        log.info("restored %s tokens of the model's state", f"{head.tokens:,}")
        return True

    def _save(self, slot: int, chains: list[tuple[Turn, IdArray[int]]]) -> None:
        file = self._memory / f"slot{slot}{SUFFIX}"
        try:
            self._engine.save_slot(slot, file.name)
            tokens = _tokens_in(file)
            turn = _owner_of(tokens, chains)
            if turn is not None:
                self._write(turn, len(tokens), file)
        except OSError as error:
            log.warning("the model's state cannot be saved: %s", error)
        finally:
            file.unlink(missing_ok=True)

    def _write(self, turn: Turn, tokens: int, file: Path) -> None:
        path = self._folder / f"{turn.id}{SUFFIX}"
        if path in self._files or file.stat().st_size > self._bytes_max:
            return
        head = _Head(
            turn.owner, self._engine.fingerprint, tokens, [link.id for link in ancestors(turn)]
        )
        packed = msgspec.msgpack.encode(head)
        sealed = self._ciphers.seal_bytes(turn.owner, file.read_bytes())
        beside = path.with_suffix(".new")
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            out.writelines((LENGTH.pack(len(packed)), packed, sealed))
        os.replace(beside, path)
        # What this one continues is of no more use.
        for older, known in [*self._files.items()]:
            if known.turns == head.turns[: len(known.turns)]:
                self._remove(older)
        self._files[path] = head
        self._shrink()

    def _shrink(self) -> None:
        """Delete the oldest until the rest has room."""
        sizes = {path: path.stat().st_size for path in self._files if path.exists()}
        for path in sorted(sizes, key=lambda path: path.stat().st_mtime):
            if sum(sizes.values()) <= self._bytes_max:
                return
            del sizes[path]
            self._remove(path)

    def _remove(self, path: Path) -> None:
        self._files.pop(path, None)
        path.unlink(missing_ok=True)


@asynccontextmanager
async def keep_states(
    engine: SlotEngine,
    memory: Path,
    bytes_max: int,
    folder: Path,
    ciphers: Ciphers,
    tips: Callable[[], Iterable[Turn]],
    turns: Turns,
) -> AsyncIterator[Callable[[Owner, str], Awaitable[None]]]:
    """Restore what was saved in `folder`, save while inside and on the way out. Yields what forgets a deleted
    response."""
    states = SlotStates(engine, folder, memory, ciphers, bytes_max, tips)
    await states.restore(turns)
    try:
        async with in_background("embedded_states", states.keep):
            yield states.forget
    finally:
        await states.save()


def _saveable(tips: Iterable[Turn]) -> Iterator[tuple[Turn, IdArray[int]]]:
    """Turns with all tokens up to their end, where these are known and everything before them is stored, too."""
    for turn in tips:
        prompt = None if turn.warm is None else turn.warm.prompt
        if isinstance(prompt, Tokens) and all(link.is_stored for link in ancestors(turn)):
            yield turn, prompt.flat()


def _owner_of(tokens: IdArray[int], chains: list[tuple[Turn, IdArray[int]]]) -> Turn | None:
    """The turn whose prompt and answer begin with these tokens, if there are enough of them."""
    if len(tokens) < TOKENS_MIN:
        return None
    return next((turn for turn, ids in chains if ids[: len(tokens)] == tokens), None)


def _tokens_in(file: Path) -> IdArray[int]:
    """The tokens that a saved slot has read; none where the file says it in a way that is not known here."""
    with file.open("rb") as saved:
        _, _, count = SLOT_HEAD.unpack(saved.read(SLOT_HEAD.size))
        words = array("I", saved.read(4 * count))
    # A mark, its version, how many tokens, the tokens, and how many images.
    if words[:2] != LISTED or words[2:3] != array("I", [count - len(LISTED) - 2]) or words[-1]:
        return id_array()
    return words[len(LISTED) + 1 : -1]


def _read_head(path: Path) -> _Head | None:
    with suppress(OSError, struct.error, msgspec.MsgspecError), path.open("rb") as file:
        (length,) = LENGTH.unpack(file.read(LENGTH.size))
        return msgspec.msgpack.decode(file.read(length), type=_Head)
    return None


def _read_state(path: Path) -> bytes:
    with path.open("rb") as file:
        (length,) = LENGTH.unpack(file.read(LENGTH.size))
        file.seek(length, os.SEEK_CUR)
        return file.read()


async def _is_stored(head: _Head, turns: Turns) -> bool:
    """Whether the store has the chain as it was."""
    found = await turns.find(head.owner, head.turns[-1]) if head.turns else None
    return (
        found is not None
        and found.is_whole
        and [turn.id for turn in ancestors(found)] == head.turns
    )


def memory_folder() -> Path:
    """A new folder in memory, for this process; those of processes that died are deleted."""
    if not MEMORY.is_dir():
        raise Misconfigured(
            f"embedded_state_bytes_max: this system has no {MEMORY}, a file system in memory. Leave it at 0."
        )
    for old in MEMORY.glob(f"{MEMORY_PREFIX}*"):
        number = old.name.removeprefix(MEMORY_PREFIX).partition("-")[0]
        if not Path("/proc", number).exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(mkdtemp(prefix=f"{MEMORY_PREFIX}{os.getpid()}-", dir=MEMORY))
