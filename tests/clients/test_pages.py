"""What our pages and `segue connect` tell people to write runs as it is, and so do the small examples."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from segue_cli.client.clients import CLIENTS, settings_of
from segue_cli.client.codex import codex_block
from segue_cli.client.talk import URL, ModelEndpoint
from tests.clients.agents import AGENTS, CODEX, EXAMPLES, Ran, node_home, python_example, run
from tests.clients.outside import NODE, NODE_MODULES, PYTHON, ROOT
from tests.clients.stage import scripted, staged
from tests.clients.task import END, by_functions
from tests.support import ServedProcess, served_process

PAGES = ROOT / "docs" / "clients"
PAGE_OF = {name: f"{name}.md" for name in ("codex", *CLIENTS)} | {
    "python": "openai-python.md",
    "node": "openai-node.md",
}
# Node's clients are only installed for the long run, Python's and curl for the quick one too.
QUICK = {"python", "anthropic-python", "agents-python", "langchain", "pydantic-ai", "curl"}
PROGRAMS = QUICK | {"node", "anthropic-node", "agents-js", "ai-sdk"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    """A server that improvises."""
    folder = tmp_path_factory.mktemp("served")
    with served_process("--store", "memory", "--model", "agent", cwd=folder) as served:
        yield served


def connect(served: ServedProcess, *arguments: str, **environment: str) -> str:
    """What `segue connect` prints."""
    done = subprocess.run(
        [sys.executable, "-m", "segue_cli.cli", "connect", *arguments, "--url", served.url],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("client", PAGE_OF)
def test_page_shows_what_connect_prints(client: str) -> None:
    place = ModelEndpoint(f"{URL}/v1", "smollm2", context_tokens=8_192, sees_images=False)
    shown = codex_block(place) if client == "codex" else settings_of(client, place)
    assert f"\n{shown}\n```" in (PAGES / PAGE_OF[client]).read_text()


def test_every_page_is_listed_and_every_link_leads_somewhere() -> None:
    listed = (PAGES / "README.md").read_text()
    for page in PAGES.glob("*.md"):
        assert page.name == "README.md" or f"({page.name})" in listed
        for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (PAGES / link).exists(), f"{page.name}: {link}"


async def execute(program: str, client: str, folder: Path) -> Ran:
    """Run a snippet as a program of its own."""
    if client == "curl":
        return await run(["bash", "-c", program], {}, cwd=folder)
    if client in QUICK:
        file = folder / "snippet.py"
        command = [str(PYTHON), "-W", "error"]
    elif client == "anthropic-node":
        (folder / "node_modules").symlink_to(NODE_MODULES)
        file = folder / "snippet.mjs"
        command = [str(NODE), "--no-warnings"]
    else:
        file = node_home(folder) / "snippet.mjs"
        command = [str(NODE), "--no-warnings"]
    file.write_text(program)
    return await run([*command, str(file)], {}, cwd=folder)


@pytest.mark.parametrize(
    "client",
    [
        pytest.param(client, marks=() if client in QUICK else pytest.mark.clients)
        for client in sorted(PROGRAMS)
    ],
)
async def test_snippet_runs_as_it_is_printed(
    client: str, served: ServedProcess, tmp_path: Path
) -> None:
    ran = await execute(connect(served, client), client, tmp_path)
    assert ran.code == 0, ran.said[-3000:]
    said = re.sub(r'.*?"delta":"([^"]*)".*|.*', r"\1", ran.out) if client == "curl" else ran.out
    assert "You said: Name a fruit." in said.replace("\n", "") or "Name a fruit" in said


@pytest.mark.clients
async def test_newcomer_connects_codex_and_gets_an_answer(
    served: ServedProcess, tmp_path: Path
) -> None:
    home = tmp_path / "home"
    connect(served, "codex", "--yes", CODEX_HOME=str(home))
    command = [str(CODEX), "exec", "--skip-git-repo-check", "--json", "say hello"]
    # The improvising engine calls the first tool that it is offered, and answers once that has failed.
    ran = await run(command, {"CODEX_HOME": str(home)}, cwd=tmp_path)
    assert ran.code == 0, ran.said[-3000:]
    assert [item["type"] for item in ran.items][-1] == "agent_message"


@pytest.mark.clients
@pytest.mark.timeout(300)
async def test_newcomer_connects_codex_and_the_small_model_inside_answers(tmp_path: Path) -> None:
    """Codex's usual prompt and tools are more than this model takes in: `connect` sees to that."""
    home = tmp_path / "home"
    with served_process("--store", "memory", "--engine", "embedded", cwd=tmp_path) as served:
        connect(served, "codex", "--yes", CODEX_HOME=str(home))
        command = [str(CODEX), "exec", "--skip-git-repo-check", "--json", "say hello"]
        ran = await run(command, {"CODEX_HOME": str(home)}, cwd=tmp_path, run_s_max=280)
    assert ran.code == 0, ran.said[-3000:]
    assert [item["type"] for item in ran.items][-1] == "agent_message"


@pytest.mark.parametrize("file", ["curl.sh", "websocat.sh"])
async def test_shell_example_holds_a_conversation(
    file: str, served: ServedProcess, tmp_path: Path
) -> None:
    environment = {
        "OPENAI_BASE_URL": f"{served.url}/v1",
        "PATH": f"{PYTHON.parent}:{os.environ['PATH']}",
    }
    ran = await run(["bash", str(EXAMPLES / file)], environment, cwd=tmp_path)
    assert ran.code == 0, ran.said[-3000:]
    assert "Name a fruit." in ran.out
    assert "And a vegetable." in ran.out
    assert ran.out.count('"status":"completed"') >= 2


async def test_smallest_python_agent_fixes_the_bug(tmp_path: Path) -> None:
    async with staged(tmp_path, *scripted(tmp_path, by_functions())) as stage:
        start = python_example("openai_python.py")
        command, environment = start(stage.proxy.url, stage.repository, tmp_path, stage.model)
        ran = await run(command, environment)
        assert (ran.code, ran.out.strip()) == (0, END), ran.err
        assert stage.is_fixed
        assert stage.proxy.handshakes == [101]


@pytest.mark.clients
@pytest.mark.timeout(300)
async def test_small_model_inside_drives_the_agent_with_forced_calls(tmp_path: Path) -> None:
    """Every turn is a call of the right shape, on one socket; whether the bug is fixed is the model's affair."""
    async with staged(tmp_path, "--engine", "embedded", model="smollm2") as stage:
        start = python_example("fix_the_bug.py", "--plain", "--forced")
        command, environment = start(stage.proxy.url, stage.repository, tmp_path, stage.model)
        ran = await run(command, environment, run_s_max=280)
        # It may fill a string until it is cut; then it says so.
        assert not re.search(r"gave up: (?!the answer was cut)", ran.err), ran.said
        assert ran.code == (0 if stage.is_fixed else 1)
        names = ["list_files", "read_file", "edit_file", "run_tests"]
        forced = [frame["tool_choice"] for _, frame in stage.proxy.frames]
        assert len(forced) > 2
        assert [one["name"] for one in forced[:4]] == names[: len(forced)]
        assert stage.proxy.handshakes == [101]
        assert all(frame["previous_response_id"] for _, frame in stage.proxy.frames[1:])


def test_every_agent_has_its_page() -> None:
    listed = (PAGES / "README.md").read_text()
    assert all(name.removesuffix(", HTTP") in listed for name in AGENTS)
