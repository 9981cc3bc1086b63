"""A model comes from a hub whole or not at all: a stand-in for the hub, on loopback, that cuts, lies and refuses."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

import pytest

from segue.errors import Misconfigured
from segue.settings.checks import load_settings
from segue_cli.commands.first_model import with_first_model
from segue_embedded import hub
from segue_embedded.hub import fetch, find_fetched, list_fetched, remove_fetched
from segue_embedded.weights import add_weights, find_weights, found_weights, weights_bytes

DATA = b"GGUF" + os.urandom(300_000)
NAME = "hf:anna/Small-GGUF"
FILE = "small-Q4_K_M.gguf"


@dataclass
class Standin:
    """What the hub has, how it behaves, and what it was asked."""

    files: dict[str, bytes] = field(default_factory=lambda: {FILE: DATA, "README.md": b"# Small"})
    # Bytes that are sent before the connection is cut, of one answer after the other.
    cuts: list[int] = field(default_factory=list)
    # How files are listed where that is not the truth.
    lies: dict[str, dict[str, object]] = field(default_factory=dict)
    # The answer to a question for the list, or for a file.
    status: int = 200
    file_status: int = 200
    error_code: str = ""
    ranges: bool = True
    storage: str = ""
    url: str = ""
    asked: list[tuple[str, str, str]] = field(default_factory=list)

    def listing(self) -> bytes:
        rows: list[dict[str, object]] = []
        for name, data in self.files.items():
            blob = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
            is_large = name.endswith(".gguf")
            rows.append(
                {"rfilename": name} | ({"lfs": blob | self.lies.get(name, {})} if is_large else {})
            )
        return json.dumps({"sha": "c0ffee", "siblings": rows, "gated": False}).encode()


class Answers(BaseHTTPRequestHandler):
    standin: ClassVar[Standin]

    def do_GET(self) -> None:
        standin = self.standin
        path = unquote(urlsplit(self.path).path)
        token, span = self.headers.get("Authorization", ""), self.headers.get("Range", "")
        standin.asked.append((path, token, span))
        if path == "/api/models/anna/Small-GGUF":
            self.send(standin.status, standin.listing() if standin.status == 200 else b"{}")
        elif path.startswith("/anna/Small-GGUF/resolve/c0ffee/"):
            name = path.partition("c0ffee/")[2]
            if standin.file_status != 200:
                self.send(standin.file_status, b"")
            elif standin.storage:
                self.send(302, b"", Location=f"{standin.storage}/stored/{name}")
            else:
                self.send_file(standin.files[name], span)
        elif path.startswith("/stored/"):
            self.send_file(standin.files[path.removeprefix("/stored/")], span)
        else:
            self.send(404, b"{}")

    def send_file(self, data: bytes, span: str) -> None:
        first = int(span.removeprefix("bytes=").rstrip("-") or 0) if self.standin.ranges else 0
        if first >= len(data):
            self.send(416, b"")
            return
        headers = {"Content-Range": f"bytes {first}-{len(data) - 1}/{len(data)}"} if first else {}
        self.send(206 if first else 200, data[first:], **headers)

    def send(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.standin.error_code:
            self.send_header("X-Error-Code", self.standin.error_code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        cut = self.standin.cuts.pop(0) if len(body) > 1_000 and self.standin.cuts else len(body)
        self.wfile.write(body[:cut])
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        pass


def served(standin: Standin) -> ThreadingHTTPServer:
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Mine", (Answers,), {"standin": standin}))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    standin.url = f"http://127.0.0.1:{server.server_address[1]}"
    return server


@pytest.fixture
def standin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Standin]:
    standin = Standin()
    server = served(standin)
    monkeypatch.setenv("HF_ENDPOINT", standin.url + "/")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setattr(hub, "CUT_WAIT_S", 0.0)
    yield standin
    server.shutdown()
    server.server_close()


def file_requests(standin: Standin) -> list[str]:
    """The ranges that were asked for."""
    return [span for path, _, span in standin.asked if "/resolve/" in path]


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


def test_operator_serves_a_hubs_model_which_is_fetched_once(
    standin: Standin, tmp_path: Path
) -> None:
    settings = load_settings({"model": [NAME]}, environment={})
    assert [model.name for model in settings.named_models()] == ["Small-GGUF"]
    for _ in range(2):
        with_first_model(settings)
    path = find_weights(NAME)
    assert path == tmp_path / "cache/segue/hub/anna/Small-GGUF" / FILE
    assert path.read_bytes() == DATA
    assert len(standin.asked) == 2, "the list and the file, once"
    # By the name of its file it is the same.
    assert find_weights(f"{NAME}/{FILE}") == path
    assert [(row.name, row.path) for row in found_weights() if row.name.startswith("hf:")] == [
        (NAME, path)
    ]
    assert remove_fetched(NAME) == [path]
    assert find_fetched(NAME) is None
    assert left_in(tmp_path / "cache") == []


def test_operator_sees_progress(standin: Standin) -> None:
    heard: list[tuple[int, int]] = []
    add_weights(NAME, lambda done, total: heard.append((done, total)))
    assert heard == sorted(heard)
    assert heard[-1] == (len(DATA), len(DATA))


@pytest.mark.parametrize("ranges", [True, False])
def test_cut_download_goes_on_where_it_was(standin: Standin, ranges: bool) -> None:
    standin.cuts = [100_000, 50_000]
    standin.ranges = ranges
    assert fetch(NAME).read_bytes() == DATA
    goes_on = "bytes=150000-" if ranges else "bytes=50000-"
    assert file_requests(standin) == ["", "bytes=100000-", goes_on]


def test_download_goes_on_in_another_process(standin: Standin, tmp_path: Path) -> None:
    standin.cuts = [100_000, *[0] * hub.CUTS_MAX]
    with pytest.raises(
        Misconfigured, match=r"cut off after 100,000 of 300,004 bytes.*say the same again"
    ):
        fetch(NAME)
    assert find_fetched(NAME) is None
    asked = len(file_requests(standin))
    assert asked == hub.CUTS_MAX + 1
    assert fetch(NAME).read_bytes() == DATA
    assert file_requests(standin)[asked:] == ["bytes=100000-"]
    assert left_in(tmp_path / "cache") == [".chosen", FILE]


def test_hub_that_is_busy_is_asked_again_but_not_for_ever(standin: Standin) -> None:
    standin.file_status = 503
    with pytest.raises(Misconfigured, match="cut off after 0 of 300,004 bytes"):
        fetch(NAME)
    assert len(file_requests(standin)) == hub.CUTS_MAX + 1
    standin.file_status = 403
    with pytest.raises(Misconfigured, match="refuses the file with status 403"):
        fetch(NAME)


@pytest.mark.parametrize(
    "lie, words",
    [
        ({"size": len(DATA) - 1}, "lists .* with 300,003 bytes, and sends 300,004"),
        ({"size": len(DATA) + 1}, "lists .* with 300,005 bytes, and sends 300,004"),
        ({"sha256": "0" * 64}, "its sha256 is .*the hub lists 000000000000…. The file was deleted"),
        ({"size": 10**18}, "no room for its 1,000,000,000,000,000,000 bytes"),
        ({"sha256": ""}, "no GGUF file"),
        ({"sha256": "../" * 20 + "x"}, "no GGUF file"),
    ],
)
def test_file_that_is_not_what_the_hub_lists_is_not_used(
    standin: Standin, tmp_path: Path, lie: dict[str, object], words: str
) -> None:
    standin.lies = {FILE: lie}
    with pytest.raises(Misconfigured, match=words):
        fetch(NAME)
    assert find_fetched(NAME) is None
    assert all(
        (path.stat().st_size == 0) for path in (tmp_path / "cache").rglob("*") if path.is_file()
    )


def test_token_goes_to_the_hub_and_not_to_its_storage(
    standin: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    storage = Standin()
    server = served(storage)
    standin.storage = storage.url
    storage.cuts = [100_000]
    assert fetch(NAME).read_bytes() == DATA
    assert {token for _, token, _ in standin.asked} == {"Bearer hf_secret"}
    assert [(token, span) for _, token, span in storage.asked] == [("", ""), ("", "bytes=100000-")]
    # Another path of the hub itself is the hub.
    standin.storage = standin.url
    remove_fetched(NAME)
    fetch(NAME)
    assert standin.asked[-1][:2] == (f"/stored/{FILE}", "Bearer hf_secret")
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(
    "status, code, token, words",
    [
        (
            401,
            "GatedRepo",
            "",
            "is gated: agree to its terms at http://.*/anna/Small-GGUF, and set HF_TOKEN",
        ),
        (403, "", "t", "is gated"),
        (401, "", "", "does not exist .* or is private or gated.*HF_TOKEN"),
        (401, "", "t", "does not accept the token of HF_TOKEN"),
        (404, "", "", "does not exist"),
        (500, "", "", "answers with status 500"),
    ],
)
def test_refusals_of_the_hub_say_what_helps(
    standin: Standin,
    monkeypatch: pytest.MonkeyPatch,
    status: int,
    code: str,
    token: str,
    words: str,
) -> None:
    standin.status, standin.error_code = status, code
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(Misconfigured, match=words):
        fetch(NAME)


def test_hub_that_cannot_be_reached_is_named(
    standin: Standin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    with pytest.raises(
        Misconfigured, match=r"the hub http://127.0.0.1:1 cannot be reached.*HF_ENDPOINT"
    ):
        fetch(NAME)
    monkeypatch.setenv("HF_ENDPOINT", "file:///etc")
    with pytest.raises(Misconfigured, match="no URL of a hub"):
        fetch(NAME)


@pytest.mark.parametrize(
    "files, chosen",
    [
        (["m-F16.gguf", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "m-Q2_K.gguf", "mmproj-Q4_K_M.gguf"], "m-Q4_K_M.gguf"),
        (["m-q8_0.gguf", "m-f16.gguf"], "m-q8_0.gguf"),
        (["m.gguf"], "m.gguf"),
        (["UD-IQ1/m-IQ1_S.gguf", "Q5/m-Q5_K_M-00001-of-00002.gguf", "Q5/m-Q5_K_M-00002-of-00002.gguf"],
         "Q5/m-Q5_K_M-00001-of-00002.gguf"),
    ],
)  # fmt: skip
def test_quantization_is_chosen_that_most_people_take(
    standin: Standin, files: list[str], chosen: str
) -> None:
    standin.files = {name: b"GGUF" + name.encode() for name in files}
    path = fetch(NAME)
    assert path.as_posix().endswith(f"/Small-GGUF/{chosen}")
    assert find_fetched(NAME) == path
    pieces = [name for name in files if name.startswith("Q5/")] or [chosen]
    assert weights_bytes(path) == sum(len(standin.files[name]) for name in pieces)
    assert [listed for _, listed in list_fetched()] == [path]
    other = files[0]
    assert fetch(f"{NAME}/{other}").name == other.rpartition("/")[2]


@pytest.mark.parametrize(
    "files, name, words",
    [
        (
            ["README.md", "model.safetensors"],
            NAME,
            "has no GGUF file, and nothing else can be run inside",
        ),
        (["m-Q4_0.gguf"], f"{NAME}/other.gguf", "has no file other.gguf. It has: m-Q4_0.gguf"),
        (["m-Q4_0-00001-of-00003.gguf"], NAME, "pieces of m-Q4_0-00001-of-00003.gguf are missing"),
        (["../../up-Q4_0.gguf"], NAME, "has no GGUF file"),
        ([], "hf:anna", "is no name of a hub's model"),
        ([], "hf:anna/../x", "is no name"),
        ([], "hf:anna/x/../../y.gguf", "is no name"),
        ([], "hf:anna/x/README.md", "is no name"),
    ],
)
def test_names_and_repositories_without_a_model_are_explained(
    standin: Standin, files: list[str], name: str, words: str
) -> None:
    standin.files = dict.fromkeys(files, b"GGUF")
    with pytest.raises(Misconfigured, match=words):
        fetch(name)


def test_two_processes_do_not_write_the_same_file(standin: Standin) -> None:
    folder = hub.cache_folder() / "anna" / "Small-GGUF"
    folder.mkdir(parents=True)
    part = folder / f"{FILE}.{hashlib.sha256(DATA).hexdigest()[:12]}.part"
    with part.open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with pytest.raises(Misconfigured, match="another process is fetching"):
            fetch(NAME)
    assert fetch(NAME).read_bytes() == DATA


def test_folder_that_cannot_be_written_is_named(standin: Standin, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, and no folder")
    with pytest.raises(Misconfigured, match=r"cannot be written into .*XDG_CACHE_HOME"):
        fetch(NAME)


def test_model_that_was_not_fetched_says_how(standin: Standin) -> None:
    with pytest.raises(Misconfigured, match=f"Run `segue models add {NAME}`"):
        find_weights(NAME)
