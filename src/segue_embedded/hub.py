"""How does a GGUF file come from a hub of models? `hf:OWNER/NAME`, or `hf:OWNER/NAME/FILE`.

    list     GET HUB/api/models/OWNER/NAME?blobs=true   the files, their sizes and SHA-256, the commit
    fetch    GET HUB/OWNER/NAME/resolve/COMMIT/FILE     redirected to the hub's storage; what is there already is not
                                                        asked again (Range), also after a cut or another start

The hub is Hugging Face's, or what HF_ENDPOINT names; HF_TOKEN goes to the hub alone, and not where it redirects to. A
file is moved to its place when its size and sum are right, the first piece of a model last: what is found is whole.
Without FILE the quantization is chosen by `PREFERRED`, and the choice is noted, so that the hub is asked once.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import http.client
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.error import HTTPError, URLError
from urllib.parse import quote, urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import msgspec
from msgspec import Struct

from segue.errors import Misconfigured

log = logging.getLogger(__name__)

PREFIX = "hf:"
HUB = "https://huggingface.co"
SLICE_BYTES = 1024 * 1024
LISTING_BYTES_MAX = 32 * 1024 * 1024
# A connection that says nothing.
SILENCE_S = 30.0
# Cuts without a new byte between them, and how long the first wait after one is; each wait is twice as long.
CUTS_MAX = 5
CUT_WAIT_S = 1.0
# Of a model that takes several: small, and as good as a small one can be, first.
PREFERRED = (
    "Q4_K_M", "Q4_K_L", "Q4_K_S", "Q4_K_XL", "Q4_0", "Q4_1", "MXFP4", "IQ4_XS", "IQ4_NL", "Q5_K_M", "Q5_K_S", "Q5_0",
    "Q6_K", "Q8_0", "Q3_K_L", "Q3_K_M", "Q3_K_S", "IQ3_M", "Q2_K", "BF16", "F16", "F32",
)  # fmt: skip
# What lies beside models: eyes and ears, statistics of a quantization, drafts.
BESIDE = re.compile(r"mmproj|imatrix|vocab|draft", re.IGNORECASE)
RANGE = re.compile(r"bytes (\d+)-\d+/(\d+|\*)")
# A model that is cut into pieces, which llama.cpp finds by the first one.
PIECE = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)")
SUM = re.compile("[0-9a-f]{64}")
# The note of which file was chosen where none was named.
CHOSEN = ".chosen"
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,95}")

Progress = Callable[[int, int], None]


class _Blob(Struct, frozen=True):
    size: int = 0
    sha256: str = ""


class _Sibling(Struct, frozen=True):
    rfilename: str
    lfs: _Blob | None = None


class _Listing(Struct, frozen=True):
    """What is used of the hub's answer about a model."""

    sha: str = "main"
    siblings: list[_Sibling] = []


class HubName(Struct, frozen=True):
    """A model by its name on the hub; without a file one is chosen."""

    owner: str
    name: str
    file: str = ""

    @property
    def path(self) -> str:
        return f"{self.owner}/{self.name}"

    @property
    def text(self) -> str:
        return PREFIX + self.path + (f"/{self.file}" if self.file else "")


class HubFile(Struct, frozen=True):
    """A file of a model, as the hub lists it."""

    path: str
    bytes: int
    sha256: str


def hub_name(text: str) -> HubName:
    """`hf:OWNER/NAME`, or `hf:OWNER/NAME/FILE`."""
    owner, _, rest = text.removeprefix(PREFIX).partition("/")
    name, _, file = rest.partition("/")
    is_file = not file or (file.endswith(".gguf") and _is_inside(file))
    if not (NAME.fullmatch(owner) and NAME.fullmatch(name) and is_file):
        raise Misconfigured(
            f"model: '{text}' is no name of a hub's model. Say {PREFIX}OWNER/NAME, or {PREFIX}OWNER/NAME/FILE.gguf."
        )
    return HubName(owner, name, file)


def cache_folder() -> Path:
    """Where files of a hub are kept: below XDG_CACHE_HOME if that is an absolute path, else ~/.cache."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "segue" / "hub"


def find_fetched(text: str, folder: Path | None = None) -> Path | None:
    """The file of a model that was fetched before: of a model in pieces, the first."""
    wanted = hub_name(text)
    place = _place(wanted, folder)
    note = place / CHOSEN
    file = wanted.file or (note.read_text().strip() if note.is_file() else "")
    return place / file if file and (place / file).is_file() else None


def list_fetched(folder: Path | None = None) -> Iterator[tuple[str, Path]]:
    """The models that were fetched, by name."""
    root = folder or cache_folder()
    for place in sorted(root.glob("*/*")):
        note = place / CHOSEN
        chosen = note.read_text().strip() if note.is_file() else ""
        for path in first_files(place):
            file = path.relative_to(place).as_posix()
            name = HubName(place.parent.name, place.name, "" if file == chosen else file)
            yield name.text, path


def remove_fetched(text: str, folder: Path | None = None) -> list[Path]:
    """Delete the files of a model; returns what was deleted."""
    wanted = hub_name(text)
    found = find_fetched(text, folder)
    removed = [] if found is None else list(pieces_of(found))
    for path in removed:
        path.unlink()
    if not wanted.file:
        (_place(wanted, folder) / CHOSEN).unlink(missing_ok=True)
    return removed


def _place(wanted: HubName, folder: Path | None) -> Path:
    return (folder or cache_folder()) / wanted.owner / wanted.name


def _is_inside(file: str) -> bool:
    """Whether a path stays below the folder that it is relative to."""
    parts = PurePosixPath(file).parts
    return bool(parts) and parts[0] != "/" and ".." not in parts and "\0" not in file


# --- files and pieces -------------------------------------------------------------------------------


def pieces_of(path: Path) -> Iterator[Path]:
    """The file, or all pieces of a model of which this is the first."""
    found = PIECE.search(path.name)
    for n in range(int(found[2]) if found else 1):
        yield path.with_name(PIECE.sub(f"-{n + 1:05}-of-{found[2]}", path.name)) if found else path


def first_files(folder: Path) -> Iterator[Path]:
    """The models below a folder: each GGUF file that is no later piece and nothing beside a model."""
    for path in sorted(folder.rglob("*.gguf")):
        piece = PIECE.search(path.name)
        if path.is_file() and not BESIDE.search(path.name) and (not piece or int(piece[1]) == 1):
            yield path


def _chosen(wanted: HubName, files: Sequence[HubFile]) -> list[HubFile]:
    """The file that is named or preferred, with all its pieces; the first piece is the last."""
    ggufs = {file.path: file for file in files if file.path.endswith(".gguf")}
    firsts = [
        file
        for file in ggufs.values()
        if not BESIDE.search(file.path.rpartition("/")[2])
        and (not (piece := PIECE.search(file.path)) or int(piece[1]) == 1)
    ]
    if wanted.file and wanted.file not in ggufs:
        raise Misconfigured(
            f"model: {PREFIX}{wanted.path} has no file {wanted.file}. {_has(firsts)}"
        )
    if not firsts:
        raise Misconfigured(
            f"model: {PREFIX}{wanted.path} has no GGUF file, and nothing else can be run inside. Look for a repository "
            "whose name ends in -GGUF, or serve it with an engine: --engine vllm --engine-url …"
        )
    first = ggufs[wanted.file] if wanted.file else min(firsts, key=_rank)
    pieces = [ggufs.get(str(path)) for path in pieces_of(Path(first.path))]
    whole = [piece for piece in pieces if piece is not None]
    if len(whole) < len(pieces):
        raise Misconfigured(f"model: pieces of {first.path} are missing in {PREFIX}{wanted.path}.")
    return whole[::-1]


def _has(files: Sequence[HubFile]) -> str:
    names = ", ".join(file.path for file in files[:20])
    return f"It has: {names}." if names else "It has no GGUF file."


def _rank(file: HubFile) -> tuple[int, int, str]:
    found = [
        kind
        for kind in PREFERRED
        if re.search(rf"(?<![A-Z0-9]){kind}(?![A-Z0-9_])", file.path.upper())
    ]
    return PREFERRED.index(found[0]) if found else len(PREFERRED), file.bytes, file.path


# --- fetching ---------------------------------------------------------------------------------------


def fetch(
    text: str, progress: Progress = lambda done, total: None, folder: Path | None = None
) -> Path:
    """Fetch a model; `progress` gets the bytes that are there and the bytes in all."""
    wanted = hub_name(text)
    hub = Hub(os.environ.get("HF_ENDPOINT") or HUB, os.environ.get("HF_TOKEN", ""))
    commit, files = hub.files(wanted)
    chosen = _chosen(wanted, files)
    place = _place(wanted, folder)
    total = sum(file.bytes for file in chosen)
    done = 0
    for file in chosen:
        target = place / file.path
        if not (target.is_file() and target.stat().st_size == file.bytes):
            log.info("fetching %s, %s: %s bytes", wanted.text, file.path, f"{file.bytes:,}")
            with _refusals(target, file):
                target.parent.mkdir(parents=True, exist_ok=True)
                _fetch(hub, wanted, commit, file, target, partial(_note, progress, done, total))
        done += file.bytes
        progress(done, total)
    if not wanted.file:
        (place / CHOSEN).write_text(chosen[-1].path)
    return place / chosen[-1].path


def _note(progress: Progress, before: int, total: int, have: int) -> None:
    progress(before + have, total)


def _fetch(
    hub: Hub, wanted: HubName, commit: str, file: HubFile, target: Path, note: Callable[[int], None]
) -> None:
    """Fetch one file into a file beside its place, which stays where the connection is cut; check it and move it."""
    part = target.with_name(f"{target.name}.{file.sha256[:12]}.part")
    with part.open("a+b") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise Misconfigured(f"model: another process is fetching {file.path} now.") from None
        have = out.seek(0, os.SEEK_END)
        free = shutil.disk_usage(target.parent).free
        if file.bytes - have > free:
            raise OSError(errno.ENOSPC, "")
        _fill(hub, f"{wanted.path}/resolve/{commit}/{quote(file.path)}", file, out, note)
        out.flush()
        os.fsync(out.fileno())
        out.seek(0)
        digest = hashlib.file_digest(out, "sha256").hexdigest()
        if digest != file.sha256:
            part.unlink()
            raise Misconfigured(
                f"model: {file.path} was fetched, but its sha256 is {digest[:12]}…, and the hub lists "
                f"{file.sha256[:12]}…. The file was deleted."
            )
        part.replace(target)


def _fill(hub: Hub, path: str, file: HubFile, out: IO[bytes], note: Callable[[int], None]) -> None:
    """Ask for what is missing, again after each cut."""
    cuts = most = 0
    while (have := out.seek(0, os.SEEK_END)) < file.bytes:
        note(have)
        try:
            for piece in hub.read(path, file, have):
                if piece is None:
                    # The hub sends everything again.
                    out.truncate(0)
                    have = 0
                    continue
                have += len(piece)
                if have > file.bytes:
                    out.truncate(0)
                    raise _other_size(file, "more")
                out.write(piece)
                note(have)
            why = "the connection was closed"
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in (
                errno.ENOSPC,
                errno.EDQUOT,
                errno.EFBIG,
            ):
                raise
            why = _reason(error)
        if have >= file.bytes:
            return
        # A hub that sends the same again and again is no progress.
        cuts = 1 if have > most else cuts + 1
        most = max(most, have)
        if cuts > CUTS_MAX:
            raise Misconfigured(
                f"model: {file.path} was cut off after {have:,} of {file.bytes:,} bytes ({why}). What is there is "
                "kept: say the same again to go on."
            )
        time.sleep(CUT_WAIT_S * 2 ** (cuts - 1))


def _other_size(file: HubFile, sent: str) -> Misconfigured:
    return Misconfigured(
        f"model: the hub lists {file.path} with {file.bytes:,} bytes, and sends {sent}: not a file to rely on."
    )


@contextmanager
def _refusals(target: Path, file: HubFile) -> Iterator[None]:
    """What the disk refuses, in words."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            why = f"there is no room for its {file.bytes:,} bytes"
        else:
            why = error.strerror or str(error)
        raise Misconfigured(
            f"model: {file.path} cannot be written into {target.parent}: {why}. XDG_CACHE_HOME names another disk."
        ) from None


def _reason(error: Exception) -> str:
    reason = error.reason if isinstance(error, URLError) else error
    return str(reason) or type(reason).__name__


# --- asking -----------------------------------------------------------------------------------------


class _SameHub(HTTPRedirectHandler):
    """Follows a redirect; the token goes along only within the hub, and nothing goes from https to http."""

    def redirect_request(
        self,
        req: Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> Request | None:
        before, after = urlsplit(req.full_url), urlsplit(newurl)
        if after.scheme not in ("http", "https") or (before.scheme, after.scheme) == (
            "https",
            "http",
        ):
            raise URLError(f"redirected to {after.scheme}://{after.netloc}")
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        token = req.unredirected_hdrs.get("Authorization")
        if new is not None and token and before[:2] == after[:2]:
            new.add_unredirected_header("Authorization", token)
        return new


class Hub:
    """One hub: asked with the operator's token, if there is one."""

    def __init__(self, url: str, token: str = "") -> None:
        self._url = url.rstrip("/")
        self._token = token
        self._opener = build_opener(_SameHub)
        if urlsplit(self._url).scheme not in ("http", "https"):
            raise Misconfigured(f"HF_ENDPOINT: '{url}' is no URL of a hub.")

    def files(self, wanted: HubName) -> tuple[str, list[HubFile]]:
        """The commit and the files of a model, those whose sum the hub knows."""
        try:
            with self._open(f"api/models/{wanted.path}?blobs=true", {}) as answer:
                listing = msgspec.json.decode(answer.read(LISTING_BYTES_MAX), type=_Listing)
        except HTTPError as error:
            raise self._refused(wanted, error) from None
        except msgspec.DecodeError:
            raise Misconfigured(
                f"model: {self._url} does not answer as a hub of models does."
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise Misconfigured(
                f"model: the hub {self._url} cannot be reached: {_reason(error)}. HF_ENDPOINT names another hub; "
                "a GGUF file that is on this machine needs none: --model FILE.gguf."
            ) from None
        files = [
            HubFile(each.rfilename, each.lfs.size, each.lfs.sha256)
            for each in listing.siblings
            if each.lfs and SUM.fullmatch(each.lfs.sha256) and _is_inside(each.rfilename)
        ]
        return listing.sha, files

    def read(self, path: str, file: HubFile, have: int) -> Iterator[bytes | None]:
        """The bytes of a file from here on; None: from the beginning, whatever was asked."""
        try:
            answer = self._open(path, {"Range": f"bytes={have}-"} if have else {})
        except HTTPError as error:
            if error.code == 416:
                yield None
                return
            if error.code in (408, 429) or error.code >= 500:
                raise
            raise Misconfigured(
                f"model: {self._url} refuses the file with status {error.code}."
            ) from None
        with answer:
            first, size = _span(answer)
            if size not in (None, file.bytes):
                raise _other_size(file, f"{size:,}")
            if first != have:
                yield None
            while piece := answer.read(SLICE_BYTES):
                yield piece

    def _open(self, path: str, headers: Mapping[str, str]) -> http.client.HTTPResponse:
        request = Request(f"{self._url}/{path}", headers={"User-Agent": "segue", **headers})
        if self._token:
            request.add_unredirected_header("Authorization", f"Bearer {self._token}")
        answer: http.client.HTTPResponse = self._opener.open(request, timeout=SILENCE_S)
        return answer

    def _refused(self, wanted: HubName, error: HTTPError) -> Misconfigured:
        """Why the hub does not list a model, and what helps."""
        name = f"model: {PREFIX}{wanted.path}"
        page = f"{self._url}/{wanted.path}"
        is_gated = error.headers.get("x-error-code") == "GatedRepo"
        if error.code == 403 or is_gated:
            return Misconfigured(
                f"{name} is gated: agree to its terms at {page}, and set HF_TOKEN to a token of that account."
            )
        if error.code == 401 and self._token:
            return Misconfigured(
                f"{name}: the hub does not accept the token of HF_TOKEN (status 401)."
            )
        if error.code == 401:
            return Misconfigured(
                f"{name} does not exist at {self._url}, or is private or gated: check the name; HF_TOKEN opens what "
                "your account may see."
            )
        if error.code == 404:
            return Misconfigured(f"{name} does not exist at {self._url}.")
        return Misconfigured(
            f"{name}: the hub {self._url} answers with status {error.code}. Try again later."
        )


def _span(answer: http.client.HTTPResponse) -> tuple[int, int | None]:
    """Where an answer begins in its file, and the size of the whole file if the hub says it."""
    ranged = RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    if answer.status == 206 and ranged:
        return int(ranged[1]), None if ranged[2] == "*" else int(ranged[2])
    return 0, answer.length
