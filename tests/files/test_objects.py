"""Does every place for the bytes of files keep them whole, and nothing else?

The folder is real. The bucket is one of moto's imitation of S3, over HTTP: what the real one does beyond it is not seen
here.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from moto.server import ThreadedMotoServer

from segue.errors import Unavailable
from segue.files.bucket import open_bucket
from segue.files.objects import ABANDONED_S, FolderObjects, Objects, temporary_folder

NAME = "file-00ff"


@pytest.fixture(scope="module")
def imitation() -> Iterator[str]:
    """The URL of an imitation of S3."""
    server = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["folder", "bucket"])
def objects(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Objects:
    if request.param == "folder":
        return FolderObjects(tmp_path / "files")
    url: str = request.getfixturevalue("imitation")
    for name, value in (
        ("AWS_ENDPOINT_URL", url),
        ("AWS_ACCESS_KEY_ID", "a"),
        ("AWS_SECRET_ACCESS_KEY", "b"),
        ("AWS_REGION", "us-east-1"),
    ):
        monkeypatch.setenv(name, value)
    bucket = f"segue-{abs(hash(request.node.name)) % 10**9}"
    urlopen(Request(f"{url}/{bucket}", method="PUT"), timeout=10).close()
    return open_bucket(f"s3://{bucket}/some/prefix")


async def put(objects: Objects, name: str, *parts: bytes) -> None:
    upload = await objects.begin(name)
    for part in parts:
        await upload.write(part)
    await upload.finish()


async def whole(objects: Objects, name: str) -> bytes:
    return b"".join([part async for part in objects.read(name)])


@pytest.mark.parametrize("size", [1, 3 * 1024 * 1024, 14 * 1024 * 1024])
async def test_file_comes_back_to_the_byte(objects: Objects, size: int) -> None:
    data = bytes(range(256)) * (size // 256 + 1)
    data = data[:size]
    parts = [data[at : at + 1024 * 1024] for at in range(0, size, 1024 * 1024)]
    await put(objects, NAME, *parts)
    assert await whole(objects, NAME) == data


async def test_file_that_was_given_up_leaves_nothing(objects: Objects) -> None:
    upload = await objects.begin(NAME)
    await upload.write(b"a" * 6 * 1024 * 1024)
    await upload.abort()
    assert await objects.ids(time.time() + 60) == []


async def test_deleted_file_is_gone_and_may_be_deleted_again(objects: Objects) -> None:
    await put(objects, NAME, b"secret")
    assert await objects.ids(time.time() + 60) == [NAME]
    assert await objects.ids(time.time() - 60) == []
    await objects.delete(NAME)
    await objects.delete(NAME)
    assert await objects.ids(time.time() + 60) == []
    # Its row may still be there for a moment.
    with pytest.raises(Unavailable):
        await whole(objects, NAME)


async def test_folder_keeps_files_from_other_users_and_tidies_up(tmp_path: Path) -> None:
    folder = tmp_path / "files"
    objects = FolderObjects(folder)
    await put(objects, NAME, b"secret")
    assert folder.stat().st_mode & 0o077 == 0
    assert (folder / "ff" / NAME).stat().st_mode & 0o077 == 0
    left = await objects.begin("file-1111")
    await left.write(b"half")
    await objects.tidy()
    assert [path.name for path in (folder / "uploads").iterdir()] == ["file-1111"]
    old = time.time() - ABANDONED_S - 1
    os.utime(folder / "uploads" / "file-1111", (old, old))
    await objects.tidy()
    assert [*(folder / "uploads").iterdir()] == []
    await left.abort()
    assert await whole(objects, NAME) == b"secret"


async def test_bucket_that_cannot_be_reached_is_unavailable(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "b")
    objects = open_bucket("s3://segue")
    upload = await objects.begin(NAME)
    with pytest.raises(Unavailable):
        await upload.finish()


KILLED = """
import os, signal
from segue.files.objects import temporary_folder
folder = temporary_folder()
(folder / "file").write_text("words")
print(folder, flush=True)
signal.pause()
"""


def test_files_of_a_server_that_was_killed_go_with_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    started = [
        subprocess.Popen([sys.executable, "-c", KILLED], env=env, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    dead, alive = (Path(each.stdout.readline().strip()) for each in started if each.stdout)
    started[0].kill()
    started[0].wait()
    # A link of another user is not followed, and what somebody else has made is left alone.
    link = Path(f"{dead}-link")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/file").touch()
    link.symlink_to(tmp_path / "other")
    # One that was made a moment ago may not be locked yet.
    young = temporary_folder()
    assert dead.exists()
    for folder in (dead, alive, young):
        os.utime(folder, (1, 1))
    assert temporary_folder().stat().st_mode & 0o777 == 0o700
    assert [each.exists() for each in (dead, alive, young, link)] == [False, True, True, True]
    assert (tmp_path / "other/file").exists()
    started[1].kill()
    for each in started:
        with each:
            pass
