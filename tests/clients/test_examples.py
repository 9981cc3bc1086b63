"""Every small example runs as it is, on one server with an index of documents and an MCP server."""

from __future__ import annotations

import os
import re
from pathlib import Path

from segue_cli.cli import main
from tests.clients.agents import EXAMPLES
from tests.clients.outside import PYTHON, run_python
from tests.documents.papers import pdf
from tests.support import served_process

# What each example says, among other things, in front of the engine that plays a script.
SAYS: dict[str, tuple[str, ...]] = {
    "conversation.py": (
        "You said: Name a fruit.",
        "You said: And a vegetable.",
        "items: message message message message",
    ),
    "background.py": ("started: queued", "completed: ", "cancelled: True"),
    "structured_output.py": ("Fruit name='name' colour='colour' grams=1",),
    "file.py paper.pdf": ("You said: ", "input tokens: "),
    "web_search.py": (
        "searched: When does the ferry leave?",
        "found: https://harbour.example/ferry.txt",
    ),
    "mcp_tools.py": ("tools: now", "called: now -> 20"),
    "forks.py": (
        "root: ",
        "fork: ",
        "You said: How does it taste?",
        "tokens cached by the engine)",
    ),
    "lanes.py": ("fruit: ", "vegetable: ", "tree: ", "You said: Name a tree."),
}
# Their own tests run them, or they are no programs.
ELSEWHERE = {
    *("openai_python.py", "fix_the_bug.py", "agents_python.py", "openai_node.mjs"),
    *("agents_js.mjs", "ai_sdk.mjs", "curl.sh", "websocat.sh"),
    *("steer.py", "server.py", "clock.py", "workspace.py", "workspace.mjs"),
}


def test_examples_run(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(EXAMPLES)
    (tmp_path / "documents").mkdir()
    (tmp_path / "documents" / "ferry.txt").write_text("The ferry does leave at seven.")
    index = ["--into", str(tmp_path / "segue.index"), "--url", "https://harbour.example"]
    assert main(["index", str(tmp_path / "documents"), *index]) == 0
    paper = tmp_path / "paper.pdf"
    paper.write_bytes(pdf("Glaciers move slowly."))
    path = {"PATH": f"{PYTHON.parent}:{os.environ['PATH']}"}
    flags = ("--config", "examples/segue.toml", "--store", "memory", "--model", "agent")
    lines = [line.replace("paper.pdf", str(paper)) for line in SAYS]
    with served_process(*flags, cwd=tmp_path, environment=path) as served:
        printed = run_python("python_examples.py", served, *lines)
    for line, texts in zip(lines, SAYS.values(), strict=True):
        said = printed[line].replace("\n", " ")
        for text in texts:
            assert text in said, f"{line}: {printed[line]}"


def test_every_example_is_listed_and_run() -> None:
    listed = set(re.findall(r"\]\(([^)]+)\)", (EXAMPLES / "README.md").read_text()))
    programs = {path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".mjs", ".sh")}
    assert programs == {line.split()[0] for line in SAYS} | ELSEWHERE
    assert programs - {"workspace.py", "workspace.mjs"} <= listed
    assert all((EXAMPLES / name).exists() for name in listed)
