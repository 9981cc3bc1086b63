"""How does a person who has no checkout get the files of deploy/? `segue deploy` lists them, and writes one.

They are in the wheel. In a checkout the folder beside this one is a link to deploy/: there is one copy of each.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from segue.errors import Misconfigured
from segue.printable import say
from segue_cli.terminal import as_columns

FOLDER = Path(__file__).parents[1] / "deploy"


class DeployFile(NamedTuple):
    """A file: where it is in the folder, and what it is."""

    path: str
    about: str


FILES = {
    "systemd": DeployFile("segue.service", "unit of systemd for one machine"),
    "compose": DeployFile(
        "compose.yaml",
        "PostgreSQL, Segue and vLLM in containers; Segue's image is built from a checkout",
    ),
    "kubernetes": DeployFile("kubernetes/segue.yaml", "Deployment, Service, Ingress and more"),
    "discovery": DeployFile(
        "kubernetes/discovery.yaml", "account of Kubernetes that may list an engine's pods"
    ),
    "haproxy": DeployFile("haproxy.cfg", "HAProxy in front of several machines"),
    "nginx": DeployFile("nginx.conf", "nginx in front of several machines"),
    "prometheus": DeployFile("prometheus/prometheus.yml", "what Prometheus reads of a server"),
    "alerts": DeployFile("prometheus/alerts.yml", "alerts and objectives for Prometheus"),
    "grafana": DeployFile("grafana/segue.json", "board for Grafana (Dashboards, New, Import)"),
}
EXAMPLES = """\
examples:
  segue deploy list
  segue deploy write systemd -o /etc/systemd/system/segue.service
  segue deploy write grafana -o -           # to standard output
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `segue deploy`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    about = "list the files"
    actions.add_parser("list", help=about, description=about)
    about = "write one of the files"
    write = actions.add_parser("write", help=about, description=about)
    write.add_argument("name", choices=tuple(FILES), metavar="NAME", help=", ".join(FILES))
    where = "where to (default: its own name in this folder; '-': standard output)"
    write.add_argument("-o", "--output", metavar="FILE", help=where)
    write.add_argument("--force", action="store_true", help="replace a file that exists")


def run(options: argparse.Namespace) -> int:
    """List the files or write one; returns the exit status."""
    if options.action == "list":
        rows = [(name, Path(file.path).name, file.about) for name, file in FILES.items()]
        say(as_columns([("NAME", "FILE", "WHAT IT IS"), *rows]))
        return 0
    source = FOLDER / FILES[options.name].path
    if options.output == "-":
        say(source.read_text(), end="")
        return 0
    path = Path(options.output or source.name)
    path = path / source.name if path.is_dir() else path
    try:
        with path.open("w" if options.force else "x") as file:
            file.write(source.read_text())
    except FileExistsError:
        raise Misconfigured(f"{path}: this file exists. Replace it with --force.") from None
    except OSError as error:
        raise Misconfigured(f"{path}: cannot be written: {error.strerror}.") from error
    say(f"{path} is written.", file=sys.stderr)
    return 0
