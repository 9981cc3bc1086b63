"""What is in a backup, and how does it become a store again?

A backup is one tar file: `manifest.json` (version, schema, counts, checksums), `segue.db` (SQLite), `segue.db.seals`
(the seal keys, without which no API key is valid) and the files that clients have uploaded. Everything in it is
checked before the file gets its name, and again before anything is restored from it. It is not encrypted and holds
all responses and the seal keys, so only its owner may read it. PostgreSQL has its own tools; of such a store only a
file of seal keys is kept here.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import os
import re
import secrets
import shutil
import tarfile
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct

from segue import __version__
from segue.archives.sqlite_copy import Contents, check_database, copy_database, is_in_use
from segue.errors import Misconfigured, need_package
from segue.files.objects import folder_path
from segue.seals.ring import read_ring, sync_folder, write_ring
from segue.settings.values import Settings
from segue.stores.sqlite import SqliteStore
from segue_cli.terminal import Steps

# What this version reads. A backup with uploaded files has the second and one with skills the third, which versions
# before them refuse.
FORMATS = (1, 2, 3)
FILE_ID = re.compile("(file|skill)-[0-9a-f]{32}")
MANIFEST, DATABASE, SEALS, FILES = "manifest.json", "segue.db", "segue.db.seals", "files"
MANIFEST_BYTES_MAX = 1024 * 1024
CHUNK_BYTES = 1024 * 1024


class Manifest(Struct, frozen=True, kw_only=True):
    """What a backup says of itself."""

    format: int
    version: str
    created_at: int
    store: str
    # None where the database is kept by its own tools.
    contents: Contents | None
    # Name of each file in the backup -> its SHA-256.
    sha256: dict[str, str]


def back_up(
    settings: Settings, file: Path, steps: Steps, *, is_forced: bool, is_portable: bool = False
) -> Manifest:
    """Write a backup of the store, whether servers use it or not. A portable one of PostgreSQL is the same as one of
    SQLite: it can be restored into either."""
    if settings.store_kind == "memory":
        raise Misconfigured("store: memory keeps nothing that could be backed up.")
    if file.exists() and not is_forced:
        raise Misconfigured(f"backup: {file} exists. Name another file, or overwrite it: --force.")
    with _scratch(file.parent, "backup") as folder:
        contents = None
        names: list[str] = []
        if is_portable or settings.store_path:
            # Before the database and after it: a file that is uploaded or deleted meanwhile is whole or absent.
            _collect_files(settings, folder)
            if settings.store_path:
                copy_database(settings.store_path, folder / DATABASE, partial(steps, "Copying"))
            else:
                _copy_postgres(settings, folder, steps)
            contents = check_database(folder / DATABASE, partial(steps, "Checking"))
            _collect_files(settings, folder)
            names = _file_names(settings, contents, folder)
        # After the database: a seal key that an API key of the copy needs is never younger than the copy.
        if not (is_portable and settings.is_ring_stored):
            _copy_seals(settings, folder / SEALS)
        _check_seals(contents, folder / SEALS)
        has_skills = any(name.startswith(f"{FILES}/skill-") for name in names)
        number = 2 if has_skills else bool(names)
        names = [*(name for name in (DATABASE, SEALS) if (folder / name).exists()), *names]
        manifest = Manifest(
            format=FORMATS[number],
            version=__version__,
            created_at=int(time.time()),
            store="sqlite" if is_portable else settings.store_kind,
            contents=contents,
            sha256={name: _digest((folder / name).open("rb")) for name in names},
        )
        made = folder / "made"
        _pack(made, folder, manifest)
        read_backup(made)
        _put(made, file)
    return manifest


def restore(settings: Settings, file: Path, steps: Steps, *, is_forced: bool) -> Manifest:
    """Put the database and the seal keys of a backup where the settings say."""
    manifest = read_backup(file)
    if is_transfer(settings, manifest):
        return _restore_into_postgres(settings, file, manifest, steps, is_forced=is_forced)
    targets = _targets(settings, manifest)
    database = targets.get(DATABASE)
    if database is not None and is_in_use(database):
        raise Misconfigured(f"store: a server uses {database}. Stop it first: segue stop.")
    existing = [str(path) for path in targets.values() if path.exists()]
    if existing and not is_forced:
        raise Misconfigured(
            f"restore: {' and '.join(existing)} would be replaced. Name another --store, or replace: --force."
        )
    for path in targets.values():
        path.parent.mkdir(parents=True, exist_ok=True)
    with (
        tarfile.open(file) as archive,
        _scratch(next(iter(targets.values())).parent, "restore") as folder,
    ):
        (folder / FILES).mkdir()
        for name in targets:
            _unpack(archive, name, folder / name)
        if database is not None:
            check_database(folder / DATABASE, partial(steps, "Checking"))
            # A log of the database that is replaced must never be read into the new one.
            for suffix in ("-wal", "-shm"):
                Path(f"{database}{suffix}").unlink(missing_ok=True)
        for name, path in targets.items():
            _put(folder / name, path)
    return manifest


def is_transfer(settings: Settings, manifest: Manifest) -> bool:
    """Whether a backup of SQLite is to become a PostgreSQL database."""
    return manifest.store == "sqlite" and settings.store_kind == "postgresql"


def _restore_into_postgres(
    settings: Settings, file: Path, manifest: Manifest, steps: Steps, *, is_forced: bool
) -> Manifest:
    """All rows in one transaction. Files come before: without their rows they are nothing."""
    need_package("store", "asyncpg", "postgres")
    # Imported here: most commands need no PostgreSQL.
    from segue.archives.transfer import into_postgres

    names = [name for name in manifest.sha256 if name.startswith(f"{FILES}/")]
    if names and settings.files_path is None:
        raise Misconfigured(
            "files_dir: this backup holds files. Name a folder that all machines share: --files-dir DIR."
        )
    seals = None if settings.is_ring_stored else settings.seal_path
    if seals is not None and seals.exists() and not is_forced:
        raise Misconfigured(f"seal_keys: {seals} would be replaced: --force.")
    parent = settings.files_path or Path(tempfile.gettempdir()) / "x"
    parent.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file) as archive, _scratch(parent.parent, "restore") as folder:
        (folder / FILES).mkdir()
        for name in manifest.sha256:
            _unpack(archive, name, folder / name)
        database = folder / DATABASE
        # The tables of an older version are brought up to date; the copy is ours.
        asyncio.run(_bring_up_to_date(database))
        contents = check_database(database, partial(steps, "Checking"))
        _check_seals(contents, folder / SEALS)
        ring = read_ring(folder / SEALS) if (folder / SEALS).exists() else []
        for name in names:
            path = _file_path(settings, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            _put(folder / name, path)
        stored = ring if seals is None else []
        moving = into_postgres(database, settings.direct_store, stored, steps, is_forced=is_forced)
        asyncio.run(moving)
        # The keys that were there open what the database holds: they go when that has gone.
        if seals is not None and ring:
            _put(folder / SEALS, seals)
    return manifest


async def _bring_up_to_date(database: Path) -> None:
    await (await SqliteStore.open(database)).close()


def _copy_postgres(settings: Settings, folder: Path, steps: Steps) -> None:
    """Everything that a PostgreSQL database holds, as a SQLite file with its seal keys."""
    need_package("store", "asyncpg", "postgres")
    from segue.archives.transfer import out_of_postgres

    asyncio.run(_bring_up_to_date(folder / DATABASE))
    ring = asyncio.run(out_of_postgres(settings.direct_store, folder / DATABASE, steps))
    if settings.is_ring_stored and ring:
        write_ring(folder / SEALS, ring)


def _file_path(settings: Settings, name: str) -> Path:
    assert settings.files_path is not None
    file_id = name.removeprefix(f"{FILES}/")
    if not FILE_ID.fullmatch(file_id):
        raise Misconfigured(f"backup: '{file_id}' is no name of a file.")
    return folder_path(settings.files_path, file_id)


def read_backup(file: Path) -> Manifest:
    """The manifest of a backup whose files are all there and have their checksums."""
    try:
        with tarfile.open(file) as archive:
            body = _member(archive, MANIFEST).read(MANIFEST_BYTES_MAX)
            manifest = msgspec.json.decode(body, type=Manifest)
            if manifest.format not in FORMATS:
                raise Misconfigured(
                    f"backup: {file} has format {manifest.format} (Segue {manifest.version}); "
                    f"this one reads {FORMATS[-1]}."
                )
            for name, expected in manifest.sha256.items():
                if _digest(_member(archive, name)) != expected:
                    raise Misconfigured(
                        f"backup: {name} in {file} has another checksum: it is damaged."
                    )
    except OSError as error:
        raise Misconfigured(f"backup: {file} cannot be read: {error.strerror or error}.") from None
    except (tarfile.TarError, KeyError, msgspec.MsgspecError):
        raise Misconfigured(f"backup: {file} is not a backup of Segue, or is damaged.") from None
    return manifest


def _targets(settings: Settings, manifest: Manifest) -> dict[str, Path]:
    """Where each file of a backup goes."""
    if manifest.store != settings.store_kind:
        raise Misconfigured(
            f"store: this is a backup of {manifest.store}, which cannot become {settings.shown_store}."
        )
    places = {DATABASE: settings.store_path, SEALS: settings.seal_path}
    targets = {name: path for name, path in places.items() if name in manifest.sha256 and path}
    ids = [
        name.removeprefix(f"{FILES}/") for name in manifest.sha256 if name.startswith(f"{FILES}/")
    ]
    if ids and settings.files_path is None:
        raise Misconfigured(
            "files_url: this backup holds files, and a bucket is not restored into."
        )
    for file_id in filter(FILE_ID.fullmatch, ids):
        assert settings.files_path is not None
        targets[f"{FILES}/{file_id}"] = folder_path(settings.files_path, file_id)
    return targets


def _collect_files(settings: Settings, folder: Path) -> None:
    """Uploaded files that are not collected yet. A file never changes, so a second name for it is a copy."""
    collected = folder / FILES
    collected.mkdir(exist_ok=True)
    source = settings.files_path
    paths = () if source is None else source.glob("??/*-*")
    for path in filter(lambda path: FILE_ID.fullmatch(path.name), paths):
        with suppress(FileNotFoundError, FileExistsError):
            try:
                os.link(path, collected / path.name)
            except FileExistsError:
                raise
            except OSError:
                shutil.copyfile(path, collected / path.name)


def _file_names(settings: Settings, contents: Contents, folder: Path) -> list[str]:
    """The files that the copied database names; those in a bucket stay there."""
    if settings.files_path is None:
        return []
    names = [f"{FILES}/{file_id}" for file_id in contents.file_ids]
    if missing := [name for name in names if not (folder / name).exists()]:
        raise Misconfigured(
            f"backup: {len(missing)} uploaded files were deleted while it was made, or are missing in "
            f"{settings.files_path}. Run it again."
        )
    return names


def _copy_seals(settings: Settings, target: Path) -> None:
    source = None if settings.is_ring_stored else settings.seal_path
    if source is not None and (source.exists() or settings.seal_keys):
        # Read as a server would: a file that cannot be read is no backup.
        read_ring(source)
        shutil.copyfile(source, target)


def _check_seals(contents: Contents | None, seals: Path) -> None:
    """Every API key that is valid must be valid again after the backup was restored."""
    known = {key.name.hex() for key in read_ring(seals)} if seals.exists() else set()
    if contents is not None and (missing := set(contents.rings) - known):
        raise Misconfigured(
            f"seal_keys: {len(missing)} seal keys are missing that API keys in this store were created with. "
            "Name their file with --seal-keys."
        )


@contextmanager
def _scratch(parent: Path, what: str) -> Iterator[Path]:
    """A folder beside the result, so that a finished file only has to be renamed. Others may not look into it."""
    try:
        with tempfile.TemporaryDirectory(prefix=f".segue-{what}-", dir=parent) as name:
            yield Path(name)
    except OSError as error:
        raise Misconfigured(f"{what}: {error.filename or parent}: {error.strerror}.") from None


def _pack(file: Path, folder: Path, manifest: Manifest) -> None:
    body = msgspec.json.format(msgspec.json.encode(manifest))
    with open(os.open(file, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as out:
        with tarfile.open(fileobj=out, mode="w") as archive:
            _add(archive, MANIFEST, io.BytesIO(body), len(body), manifest)
            for name in manifest.sha256:
                with open(folder / name, "rb") as source:
                    _add(archive, name, source, (folder / name).stat().st_size, manifest)
        out.flush()
        os.fsync(out.fileno())


def _add(
    archive: tarfile.TarFile, name: str, source: IO[bytes], size: int, manifest: Manifest
) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = size, 0o600, manifest.created_at
    archive.addfile(entry, source)


def _unpack(archive: tarfile.TarFile, name: str, target: Path) -> None:
    descriptor = os.open(target, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    with open(descriptor, "wb") as out:
        shutil.copyfileobj(_member(archive, name), out, CHUNK_BYTES)
        out.flush()
        os.fsync(out.fileno())


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    """A file in a backup, read where it is: nothing is ever unpacked under a name that the tar file says."""
    found = archive.extractfile(name)
    if found is None:
        raise KeyError(name)
    return found


def _digest(source: IO[bytes]) -> str:
    with source:
        digest = hashlib.sha256()
        while chunk := source.read(CHUNK_BYTES):
            digest.update(chunk)
        return digest.hexdigest()


def _put(made: Path, path: Path) -> None:
    """Rename a finished file, and keep the name through a power cut. One on another disk is copied beside it first."""
    try:
        os.replace(made, path)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            descriptor = os.open(beside, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
            with made.open("rb") as source, open(descriptor, "wb") as target:
                shutil.copyfileobj(source, target)
                target.flush()
                os.fsync(target.fileno())
            os.replace(beside, path)
        finally:
            beside.unlink(missing_ok=True)
    sync_folder(path)
