"""Does ARCHITECTURE.md name every file, with the question that the file answers?

The section between `<!-- files -->` and `<!-- end of files -->` is made from the first lines of the module docstrings:
`python -m tests.rules.test_architecture` writes it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "segue"
PAGE = ROOT / "ARCHITECTURE.md"
PLACE = re.compile(r"(?<=<!-- files -->\n).*?(?=<!-- end of files -->)", re.DOTALL)

# The rooms by level, with their questions.
ROOMS = {
    "wire": "1: what do the bytes mean?",
    "session": "2: whose turn is it on this connection, and what may be forgotten?",
    "turn": "2: what happens in one turn? Nothing else lives here.",
    "reuse": "3: what of a prompt could have been reused, and was not? Values only.",
    "process": "3: which turns run in this process, how do they begin, repeat, replay and end?",
    "cluster": "3: what do several processes owe each other? Not loaded where there is one.",
    "accounts": "3: who is asking, and how much is left?",
    "vocabularies": "3: which token ids are this text?",
    "readers": "3: what did the model say, and how is it made to say it?",
    "dialects": "3: how does this model family write and read?",
    "engines": "3: who produces tokens?",
    "replicas": "3: which of several servers takes a job? Loaded only where several servers or processes are.",
    "inside": "3: how does a model run in this process?",
    "stores": "3: what is remembered? One class for one backend.",
    "tools": "3: what may the server do for the model?",
    "guards": "3: is it allowed?",
    "transports": "3: how do bytes arrive and leave?",
    "listener": "3: how does the port behave, before and after requests?",
    "observe": "4: how much, how often, and who asked?",
    "dashboard": "4: what does a person see of it?",
    "builders": "4: how is each part of a server built from the settings?",
    "commands": "5: how does a person start it, set it up, and see what is wrong?",
    "remote": "5: how does a person talk to a running server?",
}


def question(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.?])\s", paragraph)[0].replace("|", "/")


def lines() -> Iterator[str]:
    """The section as it should be."""
    tops = [path for path in sorted(PACKAGE.glob("*.py")) if not path.name.startswith("__")]
    yield "\n**Beside the rooms** (0, 4 and 5: what can fail, how ids look, who is wired to whom)\n\n"
    yield "".join(f"- `{path.name}`: {question(path)}\n" for path in tops)
    for room, about in ROOMS.items():
        yield f"\n**`{room}/`** ({about})\n\n"
        files = [path for path in sorted((PACKAGE / room).glob("*.py")) if path.stem != "__init__"]
        yield "".join(f"- `{path.stem}`: {question(path)}\n" for path in files)
    yield "\n"


def test_every_room_is_in_the_list() -> None:
    folders = {path.name for path in PACKAGE.iterdir() if (path / "__init__.py").is_file()}

    assert folders == set(ROOMS)


def test_page_names_every_file_with_its_question() -> None:
    found = PLACE.search(PAGE.read_text("utf-8"))

    assert found is not None
    assert found[0] == "".join(lines()), "run: python -m tests.rules.test_architecture"


if __name__ == "__main__":
    PAGE.write_text(PLACE.sub(lambda _: "".join(lines()), PAGE.read_text("utf-8")), "utf-8")
