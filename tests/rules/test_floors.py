"""Are the locked versions safe to ship, and are the lock files whole?

A floor is the first release without a known hole in something that we or our tests may install. A
package that is not locked needs no floor; it stays in the table so that it cannot come back in an
old version.
"""

import re
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from segue import __version__

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))

FLOORS = {
    "aiohttp": "3.13.4",  # unbounded trailers
    "h11": "0.16",  # request smuggling by chunked encoding
    "python-multipart": "0.0.31",  # memory exhaustion
    "starlette": "1.0.1",  # the Host header changed the path that was checked
}

PIN = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;\\]+)(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL)


def pins(lock: str) -> Iterator[tuple[str, str, str]]:
    """Name, version and the rest (marker, hashes) of each pin."""
    for name, version, rest in PIN.findall(lock):
        yield canonicalize_name(name), version, rest


def too_old(lock: str) -> list[str]:
    return [
        f"{name} {version} is below {FLOORS[name]}"
        for name, version, _ in pins(lock)
        if name in FLOORS and Version(version) < Version(FLOORS[name])
    ]


def unhashed(lock: str) -> list[str]:
    """Requirements that pip could not check: not an exact pin, or a pin without a hash."""
    loose = [
        line for line in lock.splitlines() if re.match(r"[^\s#]", line) and not PIN.match(line)
    ]
    return loose + [name for name, _, rest in pins(lock) if "--hash=sha256:" not in rest]


def locked(name: str) -> set[tuple[str, str]]:
    lock = ROOT / "requirements" / f"{name}.lock"
    return {(name, version) for name, version, _ in pins(lock.read_text())}


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_no_lock_file_holds_a_version_with_a_known_hole(lock: Path) -> None:
    assert too_old(lock.read_text()) == []


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_every_locked_package_has_a_hash_and_no_address(lock: Path) -> None:
    text = lock.read_text()

    assert list(pins(text))
    assert unhashed(text) == []
    assert "://" not in text


def test_development_environment_holds_exactly_the_servers_versions() -> None:
    assert locked("runtime") | locked("build") <= locked("dev")


def project_file(folder: str = "") -> dict[str, Any]:
    return tomllib.loads((ROOT / folder / "pyproject.toml").read_text())


def required(distribution: str) -> list[Requirement]:
    """What a distribution needs; of `segue` also what its server and its suite need."""
    server = project_file("segue-server")["project"]
    if distribution != "segue":
        return [Requirement(text) for text in project_file(distribution)["project"]["dependencies"]]
    hook = project_file()["tool"]["hatch"]["metadata"]["hooks"]["custom"]
    own = [Requirement(text.format(version=__version__)) for text in hook["dependencies"]]
    (pinned,) = [one for one in own if one.name == "segue-server"]
    extras = [text for extra in pinned.extras for text in server["optional-dependencies"][extra]]
    return [
        *(one for one in own if not one.name.startswith("segue-")),
        *required("segue-conform"),
        *required("segue-server"),
        *map(Requirement, extras),
    ]


def test_lock_files_satisfy_the_project_files() -> None:
    groups = project_file()["dependency-groups"]
    wanted = {
        "runtime": required("segue"),
        "server": required("segue-server"),
        **{
            name: [Requirement(text) for text in lines if isinstance(text, str)]
            for name, lines in groups.items()
        },
    }
    for name, requirements in wanted.items():
        versions = dict(locked(name))
        for requirement in requirements:
            assert requirement.specifier.contains(versions[canonicalize_name(requirement.name)])


def test_server_is_locked_in_the_versions_of_the_whole() -> None:
    assert locked("server") <= locked("runtime")


def test_all_distributions_say_the_same_of_themselves() -> None:
    """One tree, one version, one licence; what is installed by either is in one of them only."""
    names = ("", "segue-server", "segue-conform", "segue-vllm")
    whole, *others = map(project_file, names)
    for other in others:
        for field in ("requires-python", "license", "license-files", "keywords", "classifiers"):
            assert whole["project"][field] == other["project"][field]
        assert whole["tool"]["hatch"]["version"] == other["tool"]["hatch"]["version"]
        licence = ROOT / other["project"]["name"] / "LICENSE"
        assert (ROOT / "LICENSE").read_bytes() == licence.read_bytes()
    packages = [
        one
        for project in (whole, *others)
        for one in project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    ]
    found = [f"src/{path.parent.name}" for path in (ROOT / "src").glob("*/__init__.py")]
    assert sorted(packages) == sorted(found)


# Lines of `.pth` files that we know: setuptools' own, which comes with Python's venv module on 3.11.
KNOWN_START = re.compile(r"import os; var = 'SETUPTOOLS_USE_DISTUTILS'; .*")


def run_at_start(text: str) -> list[str]:
    """The lines of a `.pth` file that the interpreter would run (`site`); others only name folders."""
    lines = [line for line in text.splitlines() if line.startswith(("import ", "import\t"))]
    return [line for line in lines if not KNOWN_START.fullmatch(line.strip())]


def test_environment_runs_no_code_of_others_at_its_start() -> None:
    """How stolen packages got at credentials: a file that every Python of the environment runs, imported or not."""
    folder = Path(sysconfig.get_path("purelib"))
    found = {path.name: run_at_start(path.read_text()) for path in folder.glob("*.pth")}
    assert {name: lines for name, lines in found.items() if lines} == {}
    assert [path.name for path in folder.glob("*customize.py")] == []


def test_code_in_a_path_file_is_found() -> None:
    assert run_at_start("/srv/mine/src\nimport base64; exec(base64.b64decode('…'))\n")
    assert not run_at_start("/srv/mine/src\n# import nothing\n")


def test_old_version_is_found() -> None:
    lock = "H11==0.14.0 ; sys_platform != 'emscripten' \\\n    --hash=sha256:00\nrich==1.0 \\\n    --hash=sha256:00\n"

    assert too_old(lock) == ["h11 0.14.0 is below 0.16"]


@pytest.mark.parametrize("lock", ["rich==1.0\n", "rich>=1.0 --hash=sha256:00\n", "-e .\n"])
def test_requirement_without_pin_or_hash_is_found(lock: str) -> None:
    assert unhashed(lock)
