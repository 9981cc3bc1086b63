"""What would be on the disk if the power had gone at this step?

In: the steps of a recording, where the power goes, and chance. Out: the files by name. What was synced is there. Of
what was written since, each sector may be there or not: by chance nothing, everything, the first few writes with the
next one torn, or any sectors in no order. Where a file has grown without its data there are zeros, or what the disk
held before. Names that were given or taken since the folder was synced are there up to some one of them, as the
journals of file systems have it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tests.disk import Cut, FolderSynced, Named, Step, Synced, Told, Wrote

# The least that a disk writes as a whole.
SECTOR = 512
SHM_BYTES = 32_768
WAYS = ("nothing", "everything", "torn", "scattered")

Change = Wrote | Cut


@dataclass
class Disk:
    """What has come for certain, and what may have, with the step that it came in."""

    files: dict[int, bytearray] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    changes: dict[int, list[tuple[int, Change]]] = field(default_factory=dict)
    renames: list[tuple[int, Named]] = field(default_factory=list)

    def take(self, number: int, step: Step) -> None:
        match step:
            case Wrote() | Cut():
                self.changes.setdefault(step.file, []).append((number, step))
            case Named():
                self.renames.append((number, step))
            case Synced():
                waiting = self.changes.get(step.file, [])
                for _, change in (one for one in waiting if one[0] < step.since):
                    apply(self.files.setdefault(step.file, bytearray()), change, bytes)
                self.changes[step.file] = [one for one in waiting if one[0] >= step.since]
            case FolderSynced():
                for _, named in (one for one in self.renames if one[0] < step.since):
                    rename(self.names, named)
                self.renames = [one for one in self.renames if one[0] >= step.since]
            case Told():
                pass


def cut_at(steps: Sequence[Step], place: int, chance: random.Random, way: str) -> dict[str, bytes]:
    """The files that are found after the power went just before this step, in this way."""
    disk = Disk()
    for number, step in enumerate(steps[:place]):
        disk.take(number, step)
    fill = chance.choice((bytes, chance.randbytes))
    for file, waiting in disk.changes.items():
        content = disk.files.setdefault(file, bytearray())
        for change in survivors([change for _, change in waiting], way, chance):
            apply(content, change, fill)
    kept = {"nothing": 0, "everything": len(disk.renames)}.get(way)
    count = chance.randint(0, len(disk.renames)) if kept is None else kept
    for _, named in disk.renames[:count]:
        rename(disk.names, named)
    return {name: bytes(disk.files.get(file, b"")) for name, file in disk.names.items()}


def survivors(changes: Sequence[Change], way: str, chance: random.Random) -> Iterator[Change]:
    """Those of these changes, or pieces of them, that have reached the disk, in their order."""
    match way:
        case "everything":
            yield from changes
        case "torn":
            whole = chance.randint(0, len(changes))
            yield from changes[:whole]
            for change in changes[whole : whole + 1]:
                pieces = list(sectors(change))
                yield from pieces[: chance.randint(0, len(pieces))]
        case "scattered":
            odds = chance.random()
            for change in changes:
                yield from (piece for piece in sectors(change) if chance.random() < odds)


def sectors(change: Change) -> Iterator[Change]:
    """A change in pieces that reach a disk or do not."""
    if isinstance(change, Cut):
        yield change
        return
    start, end = change.offset, change.offset + len(change.data)
    while start < end:
        stop = min(end, (start // SECTOR + 1) * SECTOR)
        data = change.data[start - change.offset : stop - change.offset]
        yield Wrote(change.file, start, data)
        start = stop


def apply(content: bytearray, change: Change, fill: object) -> None:
    """Make the change; a hole before it is filled."""
    assert callable(fill)
    size = change.size if isinstance(change, Cut) else change.offset
    if len(content) < size:
        content.extend(fill(size - len(content)))
    if isinstance(change, Cut):
        del content[change.size :]
    else:
        content[change.offset : change.offset + len(change.data)] = change.data


def rename(names: dict[str, int], named: Named) -> None:
    """Give the name to the file, or take it away."""
    if named.file is None:
        names.pop(named.name, None)
    else:
        names[named.name] = named.file
