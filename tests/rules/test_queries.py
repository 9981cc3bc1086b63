"""Are queries to a database whole sentences, written down beforehand? (docs/inside/hazards.md T2)

Reads the syntax trees under src/segue: whatever is handed to a database as a query may be a name, an entry of a table
or a plain text, constants of its module in it included, and is never put together from other parts on the way.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "segue"
ASKING = {"execute", "executemany", "executescript", "fetch", "fetchrow", "fetchval", "prepare"}


def patched(tree: ast.AST) -> Iterator[int]:
    """The lines where a query is put together."""
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr=name), args=[query, *_]) if name in ASKING:
                if _is_made(query):
                    yield node.lineno


def _is_made(query: ast.expr) -> bool:
    match query:
        case ast.JoinedStr():
            return not _is_constant(query)
        case ast.BinOp():
            return True
        case ast.Call(func=ast.Attribute(attr="format" | "join" | "replace")):
            return True
        case ast.IfExp(body=one, orelse=other):
            return _is_made(one) or _is_made(other)
        case _:
            return False


def _is_constant(text: ast.JoinedStr) -> bool:
    """Whether nothing is put into it but constants of its module."""
    put = [one.value for one in text.values if isinstance(one, ast.FormattedValue)]
    return all(isinstance(one, ast.Name) and one.id.isupper() for one in put)


def spelt(tree: ast.AST) -> Iterator[int]:
    """The lines where a text that is put together looks like a query, whoever is to get it."""
    words = ("SELECT ", "INSERT ", "UPDATE ", "DELETE ", "WHERE ", "VALUES ")
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(values=parts) if not _is_constant(node):
                texts = [one.value for one in parts if isinstance(one, ast.Constant)]
            case ast.BinOp(left=ast.Constant(value=str() as text), op=ast.Mod() | ast.Add()):
                texts = [text]
            case ast.Call(
                func=ast.Attribute(value=ast.Constant(value=str() as text), attr="format")
            ):
                texts = [text]
            case _:
                continue
        if any(word in str(text) for text in texts for word in words):
            yield node.lineno


def test_no_query_is_put_together_from_parts() -> None:
    found = [
        f"{path.relative_to(SOURCE)}:{line}"
        for path in sorted(SOURCE.rglob("*.py"))
        for tree in [ast.parse(path.read_bytes())]
        for line in (*patched(tree), *spelt(tree))
    ]
    assert found == []


def test_rule_sees_queries_that_are_put_together() -> None:
    bad = """
db.execute(f"SELECT 1 FROM keys WHERE id = '{key}'")
db.fetch("SELECT " + name)
db.fetchrow("SELECT {}".format(name))
query = "DELETE FROM turns WHERE id = '%s'" % name
"""
    good = """
db.execute(QUERIES["find"], owner, id)
db.fetch("SELECT 1")
db.execute(setting)
db.execute(f"PRAGMA busy_timeout = {BUSY_MS}")
log.info(f"we UPDATED {n} rows")
"""
    tree = ast.parse(bad)
    assert {*patched(tree), *spelt(tree)} == {2, 3, 4, 5}
    tree = ast.parse(good)
    assert [*patched(tree), *spelt(tree)] == []
