"""What a request is decoded into has no number without bounds, and no type that holds itself: JSON has neither."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping

import msgspec
import pytest
from msgspec import inspect

# What clients send is decoded in these rooms.
ROOMS = (
    "wire", "messages", "completions", "passthrough", "responses", "files", "containers", "skills", "mcp", "sandbox",
    "bundles", "web", "turn",
)  # fmt: skip
# Decoders of what does not come from a client, and why their numbers need no bounds.
OTHERS = {
    "segue.completions.answer._page": "places in a text that this server has written",
    "segue.passthrough.body._usage": "what an engine has counted: `PassedUsage.counts` has the bounds",
}
Decoder = msgspec.json.Decoder[object]


def decoders() -> Iterator[tuple[str, Decoder]]:
    for room in ROOMS:
        package = importlib.import_module(f"segue.{room}")
        for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            for name, value in vars(importlib.import_module(found.name)).items():
                table = value if isinstance(value, Mapping) else {"": value}
                for key, decoder in table.items():
                    if isinstance(decoder, msgspec.json.Decoder):
                        yield f"{found.name}.{name}{key and f'[{key}]'}", decoder


def problems(kind: inspect.Type, path: str = "", inside: tuple[type, ...] = ()) -> Iterator[str]:
    """Where a number has no bounds, or a type holds itself."""
    match kind:
        case inspect.IntType(ge=ge, gt=gt, le=le, lt=lt):
            if ge is gt is None or le is lt is None:
                yield f"{path} has no bounds"
        case inspect.StructType(cls=cls):
            if cls in inside:
                yield f"{path} holds itself"
                return
            for field in kind.fields:
                yield from problems(field.type, f"{path}.{field.name}", (*inside, cls))
        case inspect.UnionType(types=types) | inspect.TupleType(item_types=types):
            for one in types:
                yield from problems(one, path, inside)
        case inspect.DictType(value_type=inner):
            yield from problems(inner, f"{path}{{}}", inside)
        case inspect.ListType(item_type=inner) | inspect.VarTupleType(item_type=inner):
            yield from problems(inner, f"{path}[]", inside)
        case inspect.Metadata(type=inner):
            yield from problems(inner, path, inside)
        case _:
            pass


DECODERS = dict(decoders())


def test_table_of_other_decoders_is_up_to_date() -> None:
    assert DECODERS.keys() >= OTHERS.keys()
    assert len(DECODERS) > 50


@pytest.mark.parametrize("name", sorted(DECODERS.keys() - OTHERS.keys()))
def test_type_of_a_request_has_bounds(name: str) -> None:
    found = [*problems(inspect.type_info(DECODERS[name].type))]
    assert not found, found
