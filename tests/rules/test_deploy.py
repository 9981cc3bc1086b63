"""Do the files in deploy/ say what is so? They parse, name settings and routes that exist, and fit our defaults.

What a parser cannot see is tried elsewhere: HAProxy in `make test`, nginx in `make test-reliability`.
"""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from argparse import Namespace
from collections.abc import Sequence
from configparser import RawConfigParser
from pathlib import Path
from typing import Any

import pytest
import yaml

from segue.settings.checks import load_settings
from segue.settings.values import Settings
from segue_cli.cli import parse
from segue_cli.commands.settings_help import FLAGS
from tests.releases import newest_version
from tests.rules.test_citations import ROOT

DEPLOY = Path(__file__).parents[2] / "deploy"
DEFAULTS = Settings()


@pytest.fixture(scope="module")
def manifests() -> dict[str, dict[str, Any]]:
    found = yaml.safe_load_all((DEPLOY / "kubernetes" / "segue.yaml").read_text())
    return {one["kind"]: one for one in found}


@pytest.fixture(scope="module")
def container(manifests: dict[str, dict[str, Any]]) -> dict[str, Any]:
    (found,) = manifests["Deployment"]["spec"]["template"]["spec"]["containers"]
    return dict(found)


def unit() -> RawConfigParser:
    read = RawConfigParser(strict=False)
    read.optionxform = str  # type: ignore[assignment, method-assign]
    read.read(DEPLOY / "segue.service")
    return read


def parsed(words: Sequence[str]) -> Namespace:
    """As the command line reads them."""
    return parse(words)


def cluster_settings(manifests: dict[str, dict[str, Any]]) -> Settings:
    """What a pod is told by its file and its environment."""
    told = tomllib.loads(manifests["ConfigMap"]["data"]["segue.toml"])
    return load_settings(told, environment=manifests["Secret"]["stringData"])


def test_manifests_name_settings_that_exist(
    manifests: dict[str, dict[str, Any]], container: dict[str, Any]
) -> None:
    assert sorted(manifests) == [
        "ConfigMap", "Deployment", "Ingress", "PodDisruptionBudget", "Secret", "Service",
    ]  # fmt: skip
    names = {name.removeprefix("SEGUE_").lower() for name in manifests["Secret"]["stringData"]}
    assert names <= set(FLAGS)
    settings = cluster_settings(manifests)
    assert settings.store.startswith("postgresql://")
    # A pod's port is public: without this it would not start until there is a key.
    assert settings.auth == "keys"
    options = parsed(container["args"])
    assert options.config == "/etc/segue/segue.toml"
    mounted = {one["mountPath"] for one in container["volumeMounts"]}
    assert {"/etc/segue", "/models"} <= mounted


def test_manifests_agree_with_each_other_and_with_the_server(
    manifests: dict[str, dict[str, Any]], container: dict[str, Any]
) -> None:
    settings = cluster_settings(manifests)
    pod = manifests["Deployment"]["spec"]["template"]
    (port,) = container["ports"]
    (served,) = manifests["Service"]["spec"]["ports"]
    assert port["containerPort"] == settings.port
    assert served["targetPort"] == port["name"]
    assert container["image"] == f"segue:{newest_version()}"
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    labels = pod["metadata"]["labels"]
    for kind in ("Service", "PodDisruptionBudget", "Deployment"):
        selector = manifests[kind]["spec"]["selector"]
        assert selector.get("matchLabels", selector) == labels
    command = container["lifecycle"]["preStop"]["exec"]["command"]
    pause_s = int(command[-1])
    assert pod["spec"]["terminationGracePeriodSeconds"] >= pause_s + settings.grace_s + 15
    notes = manifests["Ingress"]["metadata"]["annotations"]
    prefix = "nginx.ingress.kubernetes.io/proxy-"
    assert int(notes[f"{prefix}read-timeout"]) > DEFAULTS.connection_age_s
    assert notes[f"{prefix}body-size"] == f"{DEFAULTS.body_bytes_max // 1024**2}m"


def test_unit_runs_a_command_that_exists_and_waits_for_the_drain() -> None:
    service = unit()["Service"]
    command = shlex.split(service["ExecStart"])
    assert command[0].endswith("/segue")
    assert parsed(command[1:]).config == "/etc/segue/segue.toml"
    assert int(service["TimeoutStopSec"]) > DEFAULTS.grace_s + 15
    # The signal is for the parent alone.
    assert service["KillMode"] == "mixed"


def test_container_can_be_reached_and_asks_for_keys(container: dict[str, Any]) -> None:
    text = (DEPLOY / "Containerfile").read_text()
    environment = dict(re.findall(r"\b(SEGUE_\w+)=(\S+)", text))
    settings = load_settings({}, environment=environment)
    assert settings.host == "0.0.0.0"
    # It starts before there is a key.
    assert settings.auth == "keys"
    # Kubernetes compares numbers: a name would be refused by runAsNonRoot.
    assert re.findall(r"^USER (\d+)$", text, re.MULTILINE) == [
        str(container["securityContext"]["runAsUser"])
    ]
    asked = re.search(r"^HEALTHCHECK .*\n +CMD (\[.*\])$", text, re.MULTILINE)
    assert asked
    python, flag, program = json.loads(asked[1])
    assert (python, flag) == ("python", "-c")
    compile(program, "HEALTHCHECK", "exec")
    assert "/health'" in program
    assert f"EXPOSE {DEFAULTS.port}\n" in text


def test_container_runs_a_command_that_exists_as_nobody_in_particular() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    entry = re.search(r"^ENTRYPOINT (\[.*\])$", text, re.MULTILINE)
    command = re.search(r"^CMD (\[.*\])$", text, re.MULTILINE)
    assert entry
    assert command
    assert json.loads(entry[1])[0].endswith("/segue")
    parsed(json.loads(command[1]))
    root = DEPLOY.parent
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    read = re.findall(r"-r (\S+)", text)
    for name in [word for line in copied for word in line.split()] + read:
        assert (root / name).exists(), name
    user = re.search(r"^USER (\S+)$", text, re.MULTILINE)
    assert user
    assert user[1] != "root"


def test_balancers_wait_as_long_as_sockets_are_silent_and_take_what_we_take() -> None:
    nginx, haproxy = (DEPLOY / "nginx.conf").read_text(), (DEPLOY / "haproxy.cfg").read_text()
    age_min = DEFAULTS.connection_age_s / 60
    for text, setting in (
        (nginx, r"proxy_read_timeout (\d+)m;"),
        (haproxy, r"timeout tunnel (\d+)m"),
    ):
        found = re.search(setting, text)
        assert found
        assert int(found[1]) > age_min
    body = re.search(r"client_max_body_size (\d+)m;", nginx)
    assert body
    assert int(body[1]) * 1024**2 >= DEFAULTS.body_bytes_max
    silence = re.search(r"timeout server (\d+)s", haproxy)
    assert silence
    assert int(silence[1]) > 2 * DEFAULTS.heartbeat_s


def test_files_that_the_site_copies_are_there() -> None:
    """`make site` needs a set-up of its own, so nothing else would notice that a file has moved."""
    text = (ROOT / "deploy" / "site" / "build.py").read_text("utf-8")
    places = re.findall(r'ROOT((?: / "[\w.-]+")+)', text)
    paths = [ROOT.joinpath(*re.findall(r'"([^"]+)"', place)) for place in places]
    assert len(paths) > 2
    # Made by the build itself.
    made = ROOT / ".cache" / "site", ROOT / "site"
    assert [path for path in paths if path not in made and not path.exists()] == []
