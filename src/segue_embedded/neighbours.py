"""Which models have other programs on this machine? `ollama:NAME[:TAG]` and `lmstudio:NAME`.

Ollama keeps a manifest for each model, which names the blob with the weights by its SHA-256; LM Studio keeps the files
themselves, as PUBLISHER/REPOSITORY/FILE.gguf. Both are only read. A name that fits several files is refused with the
names that do not, one that fits none with a list of what is there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from segue.errors import Misconfigured
from segue.vocabularies.gguf import MAGIC
from segue_embedded.hub import PIECE, first_files

OLLAMA = "ollama:"
LMSTUDIO = "lmstudio:"
# Where Ollama's own manifests lie, and how models are called there.
REGISTRY = ("registry.ollama.ai", "library")
TAG = "latest"
WEIGHTS = "application/vnd.ollama.image.model"
DIGEST = re.compile("sha256:[0-9a-f]{64}")
MANIFEST_BYTES_MAX = 1024 * 1024
# In an answer to a name that fits nothing.
NAMES_MAX = 40


class _Layer(Struct, frozen=True, rename="camel"):
    media_type: str
    digest: str


class _Manifest(Struct, frozen=True):
    layers: list[_Layer] = []


def is_named(name: str) -> bool:
    """Whether this is a name of another program's model."""
    return name.startswith((OLLAMA, LMSTUDIO))


def find(name: str) -> Path:
    """The GGUF file of such a model; `Misconfigured` says what is there instead."""
    if name.startswith(OLLAMA):
        return _find_in_ollama(name.removeprefix(OLLAMA))
    return _find_in_lmstudio(name.removeprefix(LMSTUDIO))


def list_all() -> Iterator[tuple[str, Path, str]]:
    """Every model of them whose file can be used: its name, its file, and whose it is."""
    for folder in _ollama_folders():
        for name, manifest in _manifests(folder):
            blob = _blob(folder, manifest)
            if blob is not None:
                yield OLLAMA + name, blob, "of Ollama on this machine"
    for name, path in _lmstudio_files():
        yield LMSTUDIO + name, path, "of LM Studio on this machine"


# --- Ollama -----------------------------------------------------------------------------------------


def _ollama_folders() -> list[Path]:
    """The folder that OLLAMA_MODELS names; else the person's own, and that of Ollama as a service."""
    named = os.environ.get("OLLAMA_MODELS")
    homes = [Path.home(), Path("/usr/share/ollama")]
    places = [Path(named)] if named else [home / ".ollama" / "models" for home in homes]
    return [place for place in places if os.access(place / "manifests", os.R_OK | os.X_OK)]


def _find_in_ollama(name: str) -> Path:
    folders = _ollama_folders()
    for folder in folders:
        manifest = folder / "manifests" / Path(*_parts(name))
        if ".." not in name and manifest.is_file():
            blob = _blob(folder, manifest)
            if blob is None:
                raise Misconfigured(
                    f"model: Ollama's '{name}' has no GGUF file that this account may read in {folder}."
                )
            return blob
    names = [name for folder in folders for name, _ in _manifests(folder)]
    where = f"in {', '.join(map(str, folders))}" if folders else "(OLLAMA_MODELS, ~/.ollama/models)"
    raise _unknown(OLLAMA, name, names, f"Ollama's models {where}")


def _parts(name: str) -> tuple[str, ...]:
    """HOST, NAMESPACE, NAME and TAG, of which Ollama lets the usual ones be left out."""
    *spaces, last = name.split("/")
    model, _, tag = last.partition(":")
    return (*REGISTRY[: max(0, 2 - len(spaces))], *spaces, model, tag or TAG)


def _manifests(folder: Path) -> Iterator[tuple[str, Path]]:
    """The models of a folder, as Ollama writes their names."""
    root = folder / "manifests"
    for path in sorted(root.glob("*/*/*/*")):
        host, space, model, tag = path.relative_to(root).parts
        is_usual = host == REGISTRY[0]
        lead = "" if (host, space) == REGISTRY else f"{space}/" if is_usual else f"{host}/{space}/"
        if path.is_file():
            yield f"{lead}{model}:{tag}", path


def _blob(folder: Path, manifest: Path) -> Path | None:
    """The file with the weights, if it is one GGUF file that can be read."""
    try:
        with manifest.open("rb") as file:
            found = msgspec.json.decode(file.read(MANIFEST_BYTES_MAX), type=_Manifest)
        (digest,) = [layer.digest for layer in found.layers if layer.media_type == WEIGHTS]
        if not DIGEST.fullmatch(digest):
            return None
        blob = folder / "blobs" / digest.replace(":", "-")
        with blob.open("rb") as file:
            return blob if file.read(4) == MAGIC else None
    except (OSError, msgspec.DecodeError, ValueError):
        return None


# --- LM Studio --------------------------------------------------------------------------------------


def _lmstudio_files() -> Iterator[tuple[str, Path]]:
    """Each model by PUBLISHER/REPOSITORY/FILE."""
    for place in (".lmstudio/models", ".cache/lm-studio/models"):
        root = Path.home() / place
        for path in first_files(root):
            yield path.relative_to(root).as_posix(), path


def _find_in_lmstudio(name: str) -> Path:
    files = list(_lmstudio_files())
    fitting = {full: path for full, path in files if name.casefold() in _names(full)}
    if len(fitting) > 1 and name not in fitting:
        raise Misconfigured(
            f"model: '{LMSTUDIO}{name}' fits several files. Name one: "
            f"{', '.join(LMSTUDIO + full for full in fitting)}."
        )
    if not fitting:
        names = [full for full, _ in files]
        raise _unknown(
            LMSTUDIO,
            name,
            names,
            "the folders of LM Studio (~/.lmstudio/models, ~/.cache/lm-studio/models)",
        )
    return fitting.get(name) or next(iter(fitting.values()))


def _names(full: str) -> set[str]:
    """What a file may be called by: any of its last parts, or its repository, without case, suffix, or `-GGUF`."""
    parts = full.casefold().split("/")
    file = PIECE.sub("", parts[-1]).removesuffix(".gguf")
    repository = parts[-2] if len(parts) > 1 else file
    publisher = parts[0]
    return {
        full.casefold(),
        parts[-1],
        file,
        repository,
        repository.removesuffix("-gguf"),
        f"{publisher}/{repository}",
        f"{publisher}/{repository.removesuffix('-gguf')}",
        f"{repository}/{parts[-1]}",
    }


def _unknown(prefix: str, name: str, names: list[str], where: str) -> Misconfigured:
    shown = ", ".join(prefix + each for each in names[:NAMES_MAX])
    there = f"There are: {shown}." if names else "There is no model."
    return Misconfigured(f"model: '{prefix}{name}' is not in {where}. {there}")
