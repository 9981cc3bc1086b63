"""Does every module live in its room?

Reads the syntax trees of all modules under src/segue, never runs them, and holds them against the
tables below: who may know whom, which rooms are pure, what a file may be called, how deep a folder
may be. A made-up tree shows that each rule can fail.
"""

import ast
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "segue"

GROUND = {
    "aio",
    "errors",
    "framing",
    "ids",
    "limits",
    "printable",
    "rests",
}
INNER = GROUND | {"wire", "seams"}

# Room -> the other rooms that it may know. Inside a room everyone knows everyone. The package itself (its version) is
# known to all and knows nobody.
MAY_IMPORT: dict[str, set[str]] = {
    # 0: what can fail; how two processes exchange messages; how ids look; what the operator asked for
    "__init__": set(),
    "aio": set(),
    "errors": set(),
    "framing": set(),
    "ids": set(),
    "limits": set(),
    "printable": set(),
    "rests": set(),
    # Only the server and the packages beside it know what the operator asked for; all others get values of their own.
    "settings": {"errors", "printable"},
    # 1: what do the nouns mean? Every way the product may vary.
    "wire": GROUND,
    "seams": GROUND | {"wire"},
    # 2: whose turn is it; what happens in one turn? They do not know each other.
    "session": INNER,
    "turn": INNER,
    # 3: which turns run here; how much may be held; who is asking?
    "memory": INNER,
    "process": INNER | {"turn", "memory"},
    "budgets": INNER,
    "accounts": INNER | {"budgets"},
    "resent": INNER | {"turn", "memory"},
    # 4a: the model's side
    "vocabularies": INNER,
    "schemas": INNER,
    "readers": INNER | {"vocabularies", "schemas"},
    # How a template writes that no row of the table knows.
    "derivation": INNER | {"vocabularies", "readers"},
    "dialects": INNER | {"vocabularies", "schemas", "readers", "derivation"},
    # Guards see what the model reads: the functions that write it for the model write it for them.
    "guards": INNER | {"turn", "vocabularies", "readers", "dialects", "border"},
    "border": INNER,
    "engines": INNER | {"schemas", "border"},
    # For a vLLM that keeps conversations; the frames of its connection are bytes in, values out.
    "engine_sessions": INNER | {"border", "engines"},
    # Which of several servers takes a job? Other processes are known through seams.
    "replicas": INNER | {"engines"},
    # 4b: what is remembered, and by whom else
    "seals": INNER,
    "stores": INNER | {"turn", "seals"},
    "archives": INNER | {"stores"},
    "cluster": INNER | {"turn"},
    # 4c: what the server does for the model
    "documents": INNER,
    "web": INNER | {"documents", "border"},
    "mcp": INNER | {"web"},
    "bundles": INNER,
    "egress": GROUND | {"seams", "wire", "documents", "web", "isolation"},
    "isolation": {"errors"},
    "sandbox": INNER | {"bundles", "egress", "isolation"},
    "interpreter": INNER | {"sandbox"},
    "tools": INNER | {"turn", "documents"},
    # 4d: bytes in and out
    "openapi": INNER,
    "listener": INNER | {"turn", "process", "memory", "accounts", "budgets", "resent"},
    "files": INNER | {"listener"},
    "containers": INNER | {"listener", "files", "sandbox", "egress", "isolation"},
    "skills": INNER | {"listener", "files", "bundles"},
    "responses": INNER | {"listener", "session", "turn", "process", "memory", "accounts"},
    "messages": INNER | {"listener", "turn", "process", "memory", "accounts", "budgets", "resent"},
    "completions": INNER | {"listener", "turn", "process", "memory", "accounts", "resent"},
    "passthrough": INNER | {"listener", "turn", "process", "memory", "accounts", "completions"},
    # 5: who is wired to whom?
    "observe": INNER | {"turn", "process", "listener"},
    # Where the operator asks for them.
    "exports": INNER | {"turn", "process", "listener", "observe", "border"},
    "reports": INNER | {"turn", "process", "listener"},
    "server": INNER
    | {"accounts", "cluster", "completions", "dialects", "documents", "engines", "exports", "files"}
    | {"archives", "budgets", "derivation", "engine_sessions"}
    | {"containers", "egress", "isolation", "sandbox", "skills", "interpreter"}
    | {
        "guards",
        "listener",
        "mcp",
        "memory",
        "messages",
        "observe",
        "openapi",
        "passthrough",
        "process",
    }
    | {"replicas", "reports", "resent", "responses", "session", "settings", "stores", "tools"}
    | {"seals", "turn", "vocabularies", "web"},
    # How do several processes serve one port?
    "workers": INNER | {"cluster", "observe", "server", "settings"},
}

# Values in, values out: a room, or one module of a room.
PURE = {
    "wire",
    "session",
    "vocabularies",
    "schemas",
    "readers",
    "derivation",
    "dialects",
    "completions.answer",
    "completions.messages",
    "completions.request",
    "completions.stream",
    "completions.tools",
    "passthrough.body",
    "seams.history",
    "seams.prompt",
    "turn.checks",
    "turn.resolve",
    "turn.assemble",
    "turn.decide",
    "turn.notices",
    "messages.history",
    "messages.tools",
    "messages.request",
    "messages.answer",
    "messages.words",
}
# A module of a pure room that is not, and why.
IMPURE = {"vocabularies.fast_tokenizer": "a thread beside the start; the builders hand it in"}
IMPURE_LIBRARIES = {"asyncio", "logging", "random", "secrets", "socket", "time"}
# What a pure module may import although it is not pure itself, and why.
NOT_QUITE_PURE = {
    "turn.plan": "the tally of a turn reads the clock",
    "rests": "long work gives way, and what comes of it stays the same",
}

EMPTY_NAMES = {
    "base",
    "common",
    "context",
    "handler",
    "helpers",
    "impl",
    "manager",
    "service",
    "utils",
}


class Module(NamedTuple):
    """One source file: where it is, and what it says."""

    place: tuple[str, ...]
    """("turn", "resolve") for turn/resolve.py; ("turn", "__init__") for the room itself."""
    tree: ast.Module

    @property
    def name(self) -> str:
        return ".".join(self.place)

    @property
    def room(self) -> str:
        return self.place[0]

    @property
    def is_pure(self) -> bool:
        return (self.room in PURE and self.name not in IMPURE) or self.name in PURE


@cache
def modules(package: Path) -> list[Module]:
    return [
        Module(path.relative_to(package).with_suffix("").parts, ast.parse(path.read_bytes()))
        for path in sorted(package.rglob("*.py"))
    ]


def imported_names(module: Module) -> Iterator[str]:
    """Absolute dotted names of all that is imported, at the top, inside functions and for types only."""
    for node in ast.walk(module.tree):
        yield from imported_by(node, module)


def imported_by(node: ast.AST, module: Module) -> Iterator[str]:
    folder = ("segue", *module.place[:-1])
    match node:
        case ast.Import(names=names):
            yield from (alias.name for alias in names)
        case ast.ImportFrom(module=source, names=names, level=level):
            above = folder[: len(folder) - level + 1] if level else ()
            origin = ".".join((*above, *([source] if source else [])))
            yield from (f"{origin}.{alias.name}" for alias in names)


def room_of(name: str) -> str | None:
    """The room that a dotted name leads to; None if it is not ours."""
    top, *rest = name.split(".")
    if top != "segue":
        return None
    # `from segue import __version__` leads to the package itself.
    return rest[0] if rest and not rest[0].startswith("__version") else "__init__"


def upward_imports(module: Module) -> Iterator[str]:
    known = MAY_IMPORT.get(module.room, set()) | {module.room, "__init__"}
    for name in imported_names(module):
        room = room_of(name)
        if room is not None and room not in known:
            yield f"{module.name} imports {name}: {module.room} must not know {room}"


# Package beside the server -> the rooms of the server that it may know, and other packages.
BESIDE: dict[str, set[str]] = {
    "segue_bench": GROUND | {"vocabularies"},
    "segue_fleet": GROUND | {"vocabularies"},
    # Knows a server only by its URL.
    "segue_conform": set(),
    "segue_embedded": INNER | {"engines", "schemas", "vocabularies"},
    "segue_dashboard": INNER
    | {"turn", "process", "accounts", "budgets", "listener", "observe", "cluster", "server"},
    "segue_cli": INNER
    | {
        "accounts",
        "cluster",
        "dialects",
        "engines",
        "files",
        "observe",
        "replicas",
        "server",
        "settings",
    }
    | {"archives", "seals", "stores", "vocabularies", "workers"}
    | {"segue_embedded", "engine_sessions"},
}
# What a server may load if it is installed: in the room that wires it, where a function needs it.
OPTIONAL = {"segue_embedded", "segue_dashboard"}


def beside_imports(module: Module) -> Iterator[str]:
    """The server loads no command line, bench or fleet; model inside and dashboard where a function of `server/`
    needs them."""
    late = {id(node) for function in _functions(module) for node in ast.walk(function)}
    for node in ast.walk(module.tree):
        for name in imported_by(node, module):
            package = name.split(".")[0]
            if package in BESIDE and not (package in OPTIONAL and module.room == "server"):
                yield f"{module.name} imports {name}: the server must not know it"
            elif package in OPTIONAL and id(node) not in late:
                yield f"{module.name} imports {name}, which may be missing, before it is needed"


def _functions(module: Module) -> Iterator[ast.AST]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def foreign_imports(module: Module, package: str) -> Iterator[str]:
    """What a package beside the server imports of it, or of another one, and must not know."""
    for name in imported_names(module):
        top = name.split(".")[0]
        room = room_of(name) if top == "segue" else top
        known = BESIDE[package] | {package, "__init__"}
        if top.partition("_")[0] == "segue" and room not in known:
            yield f"{package}.{module.name} imports {name}: {package} must not know {room}"


def unknown_rooms(module: Module) -> Iterator[str]:
    if module.room not in MAY_IMPORT:
        yield f"{module.name}: there is no room called {module.room}"


def impurities(module: Module) -> Iterator[str]:
    if not module.is_pure:
        return
    for name in imported_names(module):
        if name.split(".")[0] in IMPURE_LIBRARIES:
            yield f"{module.name} is pure and imports {name}"
    for node in ast.walk(module.tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith):
            yield f"{module.name} is pure and awaits (line {node.lineno})"


def indirect_impurities(package: Path) -> Iterator[str]:
    """Pure modules that reach an impure library through other modules of the package."""
    known = {module.name: module for module in modules(package)}
    below = {name: set(ours(module, known)) for name, module in known.items()}
    for name, module in known.items():
        if not module.is_pure:
            continue
        reached, todo = {name}, [name]
        while todo:
            new = below[todo.pop()] - reached - NOT_QUITE_PURE.keys()
            reached |= new
            todo += new
        for other in sorted(reached - {name}):
            libraries = {one.split(".")[0] for one in imported_names(known[other])}
            if not known[other].is_pure and (found := libraries & IMPURE_LIBRARIES):
                yield f"{name} is pure and reaches {', '.join(sorted(found))} through {other}"


def cycles(package: Path) -> list[str]:
    """Modules that import each other in a circle, imports for types and inside functions included."""
    known = {module.name: module for module in modules(package)}
    below = {name: set(imported_modules(module, known)) - {name} for name, module in known.items()}
    # What nobody imports, or what imports nothing, is in no circle.
    while True:
        above = {other for names in below.values() for other in names}
        outside = {name for name, names in below.items() if not names or name not in above}
        if not outside:
            return sorted(below)
        below = {name: names - outside for name, names in below.items() if name not in outside}


def imported_modules(module: Module, known: Mapping[str, Module]) -> Iterator[str]:
    """The modules of the package that a module names anywhere."""
    for name in imported_names(module):
        top, *parts = name.split(".")
        names = (".".join(parts), ".".join(parts[:-1]))
        if top == "segue":
            yield from [one for one in names if one in known][:1]


def ours(module: Module, known: Mapping[str, Module]) -> Iterator[str]:
    """The modules of the package that a module imports when it runs, by name."""
    typing = {
        inner
        for node in ast.walk(module.tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    running = (node for node in ast.walk(module.tree) if node not in typing)
    for name in (name for node in running for name in imported_by(node, module)):
        top, *parts = name.split(".")
        # The last part is a module, or something in one.
        names = (".".join(parts), ".".join(parts[:-1]))
        if top == "segue":
            yield from [one for one in names if one in known][:1]


def missing_docstrings(module: Module) -> Iterator[str]:
    if not ast.get_docstring(module.tree):
        yield f"{module.name} does not say which question it answers"


def empty_names(module: Module) -> Iterator[str]:
    for part in module.place:
        if part.strip("_") in EMPTY_NAMES:
            yield f"{module.name}: {part} says nothing"


def deep_folders(module: Module) -> Iterator[str]:
    if len(module.place) > 2:
        yield f"{module.name} lies deeper than package, room, file"


Rule = Callable[[Module], Iterator[str]]
RULES: list[Rule] = [
    upward_imports,
    beside_imports,
    unknown_rooms,
    impurities,
    missing_docstrings,
    empty_names,
    deep_folders,
]


def complaints(package: Path, rule: Rule) -> list[str]:
    return [complaint for module in modules(package) for complaint in rule(module)]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_source_tree_keeps_the_rule(rule: Rule) -> None:
    assert complaints(PACKAGE, rule) == []


@pytest.fixture(scope="module", autouse=True)
def forget_trees() -> Iterator[None]:
    """They are large, and other tests follow in this process."""
    yield
    modules.cache_clear()


@pytest.mark.parametrize("package", BESIDE)
def test_package_beside_knows_what_it_may(package: str) -> None:
    rule = partial(foreign_imports, package=package)
    assert complaints(PACKAGE.parent / package, rule) == []


@pytest.mark.parametrize(
    "text, complains",
    [
        ("from segue.engines import llamacpp", False),
        ("from segue import errors", False),
        ("from segue_embedded import weights", False),
        ("import segueless", False),
        ("from segue.server import models", True),
        ("def late():\n    import segue_cli.cli", True),
    ],
)
def test_rule_sees_what_a_package_beside_must_not_know(
    tmp_path: Path, text: str, complains: bool
) -> None:
    (tmp_path / "embedded.py").write_text(text)
    rule = partial(foreign_imports, package="segue_embedded")
    assert bool(complaints(tmp_path, rule)) is complains


def test_pure_modules_are_pure_all_the_way_down() -> None:
    assert list(indirect_impurities(PACKAGE)) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert cycles(PACKAGE) == []


def test_rule_sees_a_circle_that_is_for_types_only(tmp_path: Path) -> None:
    typed = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from segue.turn.plan import Plan"
    )
    files = {"plan": "from segue.turn.loop import Loop", "loop": typed, "decide": "import re"}
    (tmp_path / "turn").mkdir()
    for name, text in files.items():
        (tmp_path / "turn" / f"{name}.py").write_text(text)
    assert cycles(tmp_path) == ["turn.loop", "turn.plan"]


def test_table_points_down_only() -> None:
    """No two rooms may know each other, directly or in a circle."""

    def below(room: str) -> set[str]:
        known = MAY_IMPORT[room]
        return known.union(*map(below, known))

    assert all(room not in below(room) for room in MAY_IMPORT)


FINE = '"""A question."""\n'

# (rule, file, text, does the rule complain?)
CASES: list[tuple[Rule, str, str, bool]] = [
    (upward_imports, "wire/codec.py", "from segue import errors", False),
    (upward_imports, "wire/codec.py", "import segue.wire.items", False),
    (upward_imports, "wire/codec.py", "from . import items", False),
    (upward_imports, "wire/codec.py", "from .items import Item", False),
    (upward_imports, "wire/codec.py", "from .. import errors", False),
    (upward_imports, "wire/codec.py", "import json", False),
    (upward_imports, "wire/codec.py", "from segue import __version__", False),
    (upward_imports, "wire/codec.py", "from segue.turn import loop", True),
    (upward_imports, "wire/codec.py", "from ..turn import loop", True),
    (upward_imports, "wire/codec.py", "from .. import turn", True),
    (upward_imports, "wire/codec.py", "def late():\n    import segue.server.app", True),
    (upward_imports, "wire/__init__.py", "from .codec import decode", False),
    (upward_imports, "ids.py", "from segue import errors", True),
    (upward_imports, "ids.py", "from . import errors", True),
    (upward_imports, "settings/values.py", "from segue.errors import ApiError", False),
    (upward_imports, "settings/checks.py", "from segue.server import models", True),
    (upward_imports, "server/app.py", "from segue.settings.values import Settings", False),
    (upward_imports, "guards/rules.py", "from segue.settings.values import Settings", True),
    (upward_imports, "__init__.py", "from segue.server.app import create", True),
    (upward_imports, "session/lanes.py", "from segue.turn.plan import Plan", True),
    (upward_imports, "process/runner.py", "from segue.session.lanes import Lanes", True),
    (upward_imports, "process/runner.py", "from segue import wire, stores", True),
    (upward_imports, "stores/sqlite.py", "from segue.seams.store import Turns", False),
    (upward_imports, "stores/sqlite.py", "from segue.engines import scripted", True),
    (upward_imports, "engines/scripted.py", "from segue.dialects import chatml", True),
    (upward_imports, "engines/queued.py", "from segue.replicas.router import RoutedEngine", True),
    (upward_imports, "replicas/fleet.py", "from segue.cluster.peers import Peers", True),
    (upward_imports, "dialects/chatml.py", "from segue.session import lanes", True),
    (upward_imports, "responses/websocket.py", "from segue.session import lanes", False),
    (upward_imports, "responses/websocket.py", "from segue.stores import memory", True),
    (upward_imports, "responses/api.py", "from segue.listener.api import Api", False),
    (upward_imports, "responses/api.py", "from segue.openapi import pages", True),
    (upward_imports, "listener/http.py", "from segue.responses.api import RESPONSES", True),
    (upward_imports, "listener/http.py", "from segue.openapi import pages", True),
    (upward_imports, "listener/socket.py", "from segue.session import lanes", True),
    (upward_imports, "listener/http.py", "from segue.observe.metrics import counters", True),
    (upward_imports, "observe/metrics.py", "from segue.server.app import create", True),
    (upward_imports, "server/app.py", "from segue.stores.sqlite import SqliteTurns", False),
    (upward_imports, "observe/metrics.py", "from segue.server import app", True),
    (upward_imports, "cli.py", "from segue_cli.commands import serve", False),
    (upward_imports, "cli.py", "from segue.stores import sqlite", True),
    (beside_imports, "server/app.py", "def late():\n    import segue_bench.machine", True),
    (beside_imports, "server/app.py", "def late():\n    import segue_fleet.blocks", True),
    (beside_imports, "server/app.py", "def late():\n    from segue_cli import cli", True),
    (beside_imports, "server/models.py", "import segue_embedded.weights", True),
    (beside_imports, "server/models.py", "def late():\n    import segue_embedded.weights", False),
    (beside_imports, "engines/vllm.py", "def late():\n    import segue_embedded.weights", True),
    (beside_imports, "server/app.py", "import segue_dashboard.pages", True),
    (beside_imports, "server/app.py", "def late():\n    import segue_dashboard.pages", False),
    (beside_imports, "listener/http.py", "def late():\n    import segue_dashboard.pages", True),
    (unknown_rooms, "wire/items.py", "", False),
    (unknown_rooms, "plugins/items.py", "", True),
    (unknown_rooms, "items.py", "", True),
    (impurities, "wire/codec.py", "import re", False),
    (impurities, "wire/codec.py", "import time", True),
    (impurities, "session/lanes.py", "from asyncio import Queue", True),
    (impurities, "session/lanes.py", "async def go(): ...", True),
    (impurities, "dialects/chatml.py", "def f():\n    import logging.config", True),
    (impurities, "turn/resolve.py", "import secrets", True),
    (impurities, "process/runner.py", "import asyncio", False),
    (impurities, "ids.py", "import secrets", False),
    (missing_docstrings, "wire/items.py", "", True),
    (missing_docstrings, "wire/items.py", "import re\n'late'", True),
    (missing_docstrings, "wire/items.py", FINE, False),
    (empty_names, "wire/utils.py", "", True),
    (empty_names, "wire/_base.py", "", True),
    (empty_names, "helpers/items.py", "", True),
    (empty_names, "wire/items.py", "", False),
    (deep_folders, "stores/sql/rows.py", "", True),
    (deep_folders, "stores/sqlite.py", "", False),
]


@pytest.mark.parametrize(
    "rule, file, text, complains",
    CASES,
    ids=[f"{c[0].__name__}-{c[1]}-{n}" for n, c in enumerate(CASES)],
)
def test_rule_tells_a_good_tree_from_a_bad_one(
    tmp_path: Path, rule: Rule, file: str, text: str, complains: bool
) -> None:
    path = tmp_path / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)

    assert bool(complaints(tmp_path, rule)) is complains


def test_empty_tree_has_no_complaints(tmp_path: Path) -> None:
    assert [complaints(tmp_path, rule) for rule in RULES] == [[]] * len(RULES)


@pytest.mark.parametrize(
    "middle, complains",
    [
        ("import re", False),
        ("import asyncio", True),
        ("from segue.turn import clock", True),
        ("from segue.turn.clock import Clock", True),
        ("def late():\n    from .clock import Clock", True),
    ],
)
def test_rule_sees_an_impure_library_two_steps_away(
    tmp_path: Path, middle: str, complains: bool
) -> None:
    files = {
        "resolve": "from segue.turn.compose import compose",
        "compose": middle,
        "clock": "import time",
    }
    for name, text in files.items():
        (tmp_path / "turn").mkdir(exist_ok=True)
        (tmp_path / "turn" / f"{name}.py").write_text(text)
    assert bool(list(indirect_impurities(tmp_path))) is complains
