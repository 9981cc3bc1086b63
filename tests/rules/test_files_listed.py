"""Does docs/inside/rooms.md name every file, with the question that the file answers?

The section between `<!-- files -->` and `<!-- end of files -->` is made from the first lines of the module docstrings:
`python -m tests.rules.test_files_listed` writes it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "segue"
PAGE = ROOT / "docs" / "inside" / "rooms.md"
PLACE = re.compile(r"(?<=<!-- files -->\n).*?(?=<!-- end of files -->)", re.DOTALL)

# The rooms by level, with their questions.
ROOMS = {
    "settings": "0: what did the operator ask for? Only `server/` and the commands know it.",
    "wire": "1: what do the nouns of the API mean, and the bytes?",
    "seams": "1: every way the product may vary, as protocols with the values they speak",
    "session": "2: whose turn is it on this connection, and what may be forgotten?",
    "turn": "2: what happens in one turn? Nothing else lives here.",
    "process": "3: which turns run in this process, how do they begin, repeat, replay and end?",
    "memory": "3: how much may this process hold, and what gives way when it holds more?",
    "budgets": "3: how many tokens of a day and a month may a key still use? Loaded with the first such key.",
    "accounts": "3: who is asking, and how much is left?",
    "resent": "3: what of a history that is sent again is known here already?",
    "vocabularies": "4a: which token ids are this text?",
    "schemas": "4a: what does a schema say that a client has sent, and how is a model held to it?",
    "readers": "4a: what did the model say, and how is it made to say it?",
    "derivation": "4a: how does a model write that no table knows? Worked out from its template, and proven.",
    "dialects": "4a: how does this model family write and read?",
    "guards": "4a: is it allowed?",
    "border": "4a: what of that which a server of an engine says is believed?",
    "engines": "4a: who produces tokens?",
    "engine_sessions": "4a: which ids does an engine have already, so that only the rest is sent?",
    "replicas": "4a: which of several servers takes a job? Loaded only where several servers or processes are.",
    "seals": "4b: how is what clients keep for us kept from everybody else?",
    "stores": "4b: what is remembered? One class for one backend.",
    "archives": "4b: how does what a store holds get out: copied, moved, erased? Loaded by commands alone.",
    "cluster": "4b: what do several processes owe each other? Not loaded where there is one.",
    "tools": "4c: how does a turn use the tools that this server runs?",
    "documents": "4c: what text is in a document?",
    "web": "4c: how does the model search the web and read pages?",
    "mcp": "4c: how does the model use the tools of remote servers (MCP)?",
    "egress": "4c: what may sandboxes reach of the network, and through what?",
    "bundles": "4c: what is in a skill, and can it be unpacked without harm?",
    "isolation": "4c: how is a sandbox made on this machine, and what is it held to?",
    "sandbox": "4c: where do the commands of a model run? Loaded only where the operator has switched it on.",
    "interpreter": "4c: how does a turn run Python code? What runs it is loaded only where there are sandboxes.",
    "listener": "4d: how do bytes arrive and leave, whatever API they belong to?",
    "skills": "4d: which skills do clients keep here, and how do they come in and go out?",
    "containers": "4d: how do clients make, see and delete containers and their files?",
    "files": "4d: which files do clients keep here, and how do they come in and go out?",
    "completions": "4d: how do clients of Chat Completions ask for turns, and how do they read them?",
    "passthrough": "4d: which requests go to the engine as they came?",
    "responses": "4d: how does the Responses API become turns, and their events bytes?",
    "messages": "4d: how does the Messages API become turns, and their events its own? Loaded by its first request.",
    "openapi": "4d: what does the API look like to a machine?",
    "server": "5: who is wired to whom?",
    "workers": "5: how do several processes serve one port? Not loaded where one does.",
    "observe": "5: how much, how often, and who asked?",
    "exports": "5: how do access lines, audit lines and traces leave the server, where the operator asks for them?",
    "reports": "5: what of a prompt could have been reused, and was not? Found out after the turn.",
}


def question(path: Path) -> str:
    """The first sentence of a module's docstring."""
    text = ast.get_docstring(ast.parse(path.read_bytes())) or ""
    paragraph = " ".join(text.partition("\n\n")[0].split())
    return re.split(r"(?<=[.?])\s", paragraph)[0].replace("|", "/")


def lines() -> Iterator[str]:
    """The section as it should be."""
    tops = [path for path in sorted(PACKAGE.glob("*.py")) if not path.name.startswith("__")]
    yield "\n**Beside the rooms** (0: what can fail, how ids look)\n\n"
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
    assert found[0] == "".join(lines()), "run: python -m tests.rules.test_files_listed"


if __name__ == "__main__":
    PAGE.write_text(PLACE.sub(lambda _: "".join(lines()), PAGE.read_text("utf-8")), "utf-8")
