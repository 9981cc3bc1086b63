"""What of an image is seen in a sandbox: nothing that its links name outside of it."""

from __future__ import annotations

from pathlib import Path

from segue.isolation.bwrap import lay_out


def test_links_of_an_image_lead_to_no_file_of_the_host(tmp_path: Path) -> None:
    host, image = tmp_path / "host", tmp_path / "image"
    (host / "keys").mkdir(parents=True)
    (host / "keys/secret").write_text("of the host")
    (image / "etc/ssl").mkdir(parents=True)
    (image / "etc/pki").mkdir()
    (image / "etc/ssl/certs").symlink_to(host / "keys")
    (image / "etc/ld.so.conf").symlink_to("../../host/keys/secret")
    (image / "etc/pki/types").write_text("text/plain txt")
    (image / "etc/mime.types").symlink_to("pki/types")
    alike = Path(lay_out(tmp_path / "own", str(image)))
    copied = {path.name: path for path in alike.rglob("*") if path.is_file()}
    assert "secret" not in copied
    assert "ld.so.conf" not in copied
    # A link within the image is followed.
    assert copied["mime.types"].read_text() == "text/plain txt"
