"""Which tools can the model call, and which must it?

In: a scene. Out: its tools as JSON for the model, the tool that a name means, and where the answer is forced,
the JSON schema that it must follow. A custom tool is to the model a function with one string, `input`; a shell,
patches and the search for tools are functions too. Tools that items have brought count like those of the request.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, Raw

from segue.schemas.json_schema import OBJECT, moved, refers
from segue.seams.model import ItemOpened, Scene
from segue.wire.items import AdditionalTools, Item, ToolSearchOutput
from segue.wire.tools import (
    FunctionTool,
    Offer,
    allowed_offers,
    forced_offers,
    offer_named,
    offers_of,
)


def function_of(offer: Offer) -> dict[str, object]:
    """A tool as chat templates want it: name, and where it has them, description and parameters."""
    function: dict[str, object] = {"name": offer.qualified_name}
    if isinstance(offer.tool.description, str):
        function["description"] = offer.tool.description
    parameters = parameters_of(offer)
    if parameters is not None:
        function["parameters"] = parameters
    return function


def definition_of(tool: Offer) -> object:
    """The whole definition."""
    return {"type": "function", "function": function_of(tool)}


def parameters_of(offer: Offer) -> object:
    """The schema of the arguments; None for a function that has none."""
    tool = offer.tool
    if isinstance(tool, FunctionTool):
        return msgspec.json.decode(tool.parameters) if isinstance(tool.parameters, Raw) else None
    shape: dict[str, object] = {"type": "string"}
    if isinstance(tool.format, Raw):
        format_json = msgspec.json.encode(msgspec.json.decode(tool.format)).decode()
        shape["description"] = f"Its format: {format_json}"
    return {"type": "object", "properties": {"input": shape}, "required": ["input"]}


def added_by(item: Item) -> tuple[Offer, ...]:
    """Tools that came in an item, without tools that cannot be run here, as in a request."""
    match item.value:
        case AdditionalTools(tools=tools):
            return offers_of(tools)
        case ToolSearchOutput(tools=tools):
            return offers_of(tools, is_loaded=True)
        case _:
            return ()


def callable_offers(scene: Scene) -> tuple[Offer, ...]:
    """The tools of the request, then what items have brought, then deferred tools: of two with the same name the
    first is called."""
    tools = scene.head.tools
    effects = scene.effects
    # What a hosted tool offers and a search has loaded is a copy: the original is called.
    hosted = tuple(offer for offer in tools.deferred if offer.builtin is not None)
    return tools.offers + hosted + effects.offers + tools.deferred + effects.deferred


def offer_in(scene: Scene, name: str) -> Offer | None:
    """The tool of this name."""
    return offer_named(callable_offers(scene), name)


def call_in(scene: Scene, name: str, *, is_known: bool = False) -> ItemOpened | None:
    """The call of the tool of this name as it begins; None: `tool_choice` does not let the model call it."""
    return call_of(scene, offer_in(scene, name), name, is_known=is_known)


def call_of(
    scene: Scene, offer: Offer | None, name: str, *, is_known: bool = False
) -> ItemOpened | None:
    """The call of this tool as it begins; None: `tool_choice` does not let the model call it.

    An unknown tool may be called where the choice names no tool, unless the tool must be known (`is_known`): that is a
    function call by its whole name.
    """
    choice = scene.head.tool_choice
    if offer is None:
        is_allowed = not is_known and choice in ("auto", "required")
        return ItemOpened("function", name) if is_allowed else None
    is_allowed = choice == "auto" or bool(allowed_offers(choice, (offer,)))
    return opened_call(offer) if is_allowed else None


def opened_call(offer: Offer) -> ItemOpened:
    """A call of this tool as it begins."""
    is_async = offer.tool.is_async is True
    return ItemOpened(offer.kind, offer.tool.name, offer.namespace, is_async, offer.execution)


# --- forced answers -------------------------------------------------------------------------------


def forced(scene: Scene) -> tuple[Offer, ...]:
    """The tools of which the model must call any; none if it may do without."""
    choice = scene.head.tool_choice
    offers = scene.offers if choice == "required" else scene.offers + scene.deferred
    return forced_offers(choice, offers)


def arguments_schema(offer: Offer) -> bytes:
    """What the arguments of this tool must be."""
    return msgspec.json.encode(parameters_of(offer) or OBJECT)


def call_schema(offers: Sequence[Offer], arguments_key: str) -> bytes:
    """What a call of any of these tools must be: an object of name and arguments."""
    return _any_of((), offers, arguments_key)


def format_schema(scene: Scene, arguments_key: str | None = None) -> bytes | None:
    """What the text must be, if the request says so.

    Where tools may be called too, a call is the other thing that the model may write, as a bare object; it is left out
    for a family that does not read such a call.
    """
    wanted = scene.format
    if wanted is None:
        return None
    schema = OBJECT if wanted.schema is UNSET else msgspec.json.decode(wanted.schema)
    if wanted.type == "json_object":
        schema = OBJECT
    offers = allowed_offers(scene.head.tool_choice, scene.offers)
    if not offers or arguments_key is None:
        return msgspec.json.encode(schema)
    return _any_of((schema,), offers, arguments_key)


def _any_of(texts: Sequence[object], offers: Sequence[Offer], arguments_key: str) -> bytes:
    """One schema for an answer that is any of these texts, or a call of any of these tools.

    References inside a schema are to its own top, so they are moved with it.
    """
    shared: dict[str, object] = {}

    def placed(schema: object, n: int) -> object:
        if not refers(schema):
            return schema
        shared[f"part{n}"] = moved(schema, f"#/$defs/part{n}")
        return {"$ref": f"#/$defs/part{n}"}

    branches = [placed(schema, n) for n, schema in enumerate(texts)]
    for n, offer in enumerate(offers, len(texts)):
        arguments = placed(parameters_of(offer) or OBJECT, n)
        branches.append(
            {
                "type": "object",
                "properties": {"name": {"const": offer.qualified_name}, arguments_key: arguments},
                "required": ["name", arguments_key],
                "additionalProperties": False,
            }
        )
    whole = branches[0] if len(branches) == 1 else {"anyOf": branches}
    assert isinstance(whole, dict)
    return msgspec.json.encode({**whole, "$defs": shared} if shared else whole)
