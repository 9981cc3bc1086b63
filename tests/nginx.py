"""A real nginx with the settings that we ship, for the tests with several servers.

`make test-reliability` puts one under `.cache/nginx`; `SEGUE_TEST_NGINX` names another. There is no test without one: a
missing one is a failure.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.haproxy import START_S, Balanced, await_port, free_port

ROOT = Path(__file__).parents[1]
SHIPPED = ROOT / "deploy" / "nginx.conf"
# Around what we ship, which a system's own file includes.
AROUND = """
daemon off;
pid {folder}/nginx.pid;
error_log stderr warn;
events {{ worker_connections 500; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
{shipped}
}}
"""


def find_nginx() -> Path:
    """The balancer of this project, or the one that was named."""
    path = Path(os.environ.get("SEGUE_TEST_NGINX") or ROOT / ".cache" / "nginx" / "nginx")
    assert path.is_file(), f"there is no nginx at {path}: run 'make test-reliability', or name one"
    return path


def settings_for(folder: Path, port: int, servers: Sequence[int]) -> str:
    """What we ship, with the addresses of this test: no certificate, other ports, in turns instead of by count; and
    with shorter times, so that a silence of seconds is a long one."""
    text = SHIPPED.read_text()
    text = re.sub(r"listen 443 .*;", f"listen 127.0.0.1:{port};", text)
    text = re.sub(r"    ssl_certificate.*\n", "", text)
    text = text.replace("    least_conn;\n", "").replace("allow 10.0.0.0/8;", "allow 127.0.0.0/8;")
    text = text.replace("75s", "1s").replace("65m", "30s")
    server = re.search(r"    server 10\.0\.0\.11:8080(.*)\n", text)
    assert server, "the servers are named in another way"
    text = re.sub(r"    server 10\..*\n", "", text)
    named = "".join(f"    server 127.0.0.1:{one}{server[1]}\n" for one in servers)
    text = text.replace("    keepalive 64;\n", f"{named}    keepalive 64;\n")
    return AROUND.format(folder=folder, shipped=text)


@contextmanager
def nginx(folder: Path, servers: Sequence[int]) -> Iterator[Balanced]:
    """nginx in front of these ports."""
    port = free_port()
    path = folder / "nginx.conf"
    path.write_text(settings_for(folder, port, servers))
    process = subprocess.Popen(
        [find_nginx(), "-p", folder, "-e", "stderr", "-c", path],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    try:
        await_port(port, process)
        yield Balanced(port)
    finally:
        process.terminate()
        process.wait(START_S)
        assert process.stderr is not None
        process.stderr.close()
