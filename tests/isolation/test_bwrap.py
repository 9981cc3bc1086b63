"""What of the host or of an image is seen in a sandbox: what programs need, and nothing that links name outside."""

from __future__ import annotations

import os
from pathlib import Path

from segue.isolation.bwrap import ETC, lay_out


def test_sandbox_has_the_settings_of_an_image_that_everybody_may_read(tmp_path: Path) -> None:
    host, image = tmp_path / "host", tmp_path / "image"
    (host / "keys").mkdir(parents=True)
    (host / "keys/secret").write_text("of the host")
    etc = image / "etc"
    for name in ("ssl", "java-17-openjdk/security", "closed", "sandbox"):
        (etc / name).mkdir(parents=True)
    for name in ("java-17-openjdk/security/java.security", "closed/key", "sandbox/supervisor.py"):
        (etc / name).write_text("of the image")
    (etc / "shadow").write_text("root:*:")
    (etc / "shadow").chmod(0o640)
    (etc / "closed").chmod(0o750)
    os.mkfifo(etc / "fifo")
    # What would be read or written on the host, if it were followed.
    (etc / "ssl/certs").symlink_to(host / "keys")
    (etc / "ld.so.conf").symlink_to("../../host/keys/secret")
    (etc / "resolv.conf").symlink_to(host / "keys/secret")
    (etc / "passwd").write_text("of the image")
    (etc / "os-release").symlink_to("../usr/lib/os-release")
    made = Path(lay_out(tmp_path / "own", str(image))) / "etc"
    assert (made / "java-17-openjdk/security/java.security").read_text() == "of the image"
    for name in ("shadow", "closed", "fifo"):
        assert not (made / name).exists()
    for name, text in ETC.items():
        assert not (made / name).is_symlink()
        assert (made / name).read_text() == text
    assert (host / "keys/secret").read_text() == "of the host"
    for name in ("ssl/certs", "ld.so.conf", "os-release"):
        assert (made / name).readlink() == (etc / name).readlink()
    assert "def serve" in (made / "sandbox/supervisor.py").read_text()


def test_image_whose_settings_are_a_link_has_those_that_are_made(tmp_path: Path) -> None:
    (tmp_path / "host").mkdir()
    (tmp_path / "host/secret").touch()
    (tmp_path / "image").mkdir()
    (tmp_path / "image/etc").symlink_to(tmp_path / "host")
    made = Path(lay_out(tmp_path / "own", str(tmp_path / "image"))) / "etc"
    assert {*os.listdir(made)} == {*ETC, "sandbox"}


def test_sandbox_has_of_the_host_what_programs_need(tmp_path: Path) -> None:
    made = Path(lay_out(tmp_path, "")) / "etc"
    assert {"passwd", "ld.so.conf", "os-release"} <= {*os.listdir(made)}
    assert "shadow" not in os.listdir(made)
