"""Tools: every type is understood, echoed as it came, and decoded only when it differs."""

from __future__ import annotations

import json
from typing import Any, get_args

import pytest

from segue.errors import InvalidRequest
from segue.wire.codec import TOOL_TYPES, TOOLS_MAX, decode_item, decode_tools
from segue.wire.requests import ToolChoiceName
from segue.wire.tools import (
    NO_TOOLS,
    FunctionTool,
    NamespaceTool,
    Offer,
    ToolDefinition,
    Tools,
    forced_offers,
    offer_named,
)

# Older names of the same tools.
ALIASES = (
    "web_search_2025_08_26",
    "web_search_preview",
    "web_search_preview_2025_03_11",
    "computer_use",
    "computer_use_preview",
)
# Every definition of docs/protocol.md 4.1.
EXAMPLES = [
    '{"type":"function","name":"f","description":"…","parameters":{"type":"object"},"strict":true,'
    '"async":false,"defer_loading":false,"output_schema":{},"allowed_callers":["direct"]}',
    '{"type":"function","name":"g","description":null,"parameters":null,"strict":null}',
    '{"type":"custom","name":"patch","description":"…","format":{"type":"grammar",'
    '"syntax":"lark","definition":"start: x"},"defer_loading":false,"async":false}',
    '{"type":"namespace","name":"crm","description":"…","tools":[{"type":"function","name":"a",'
    '"defer_loading":true},{"type":"custom","name":"b"}]}',
    '{"type":"tool_search","execution":"client","description":"…","parameters":{}}',
    '{"type":"web_search","search_context_size":"medium","external_web_access":true,'
    '"filters":{"allowed_domains":["a"]},"user_location":{"type":"approximate","country":"US"}}',
    '{"type":"shell","environment":{"type":"local","skills":[{"name":"n"}]}}',
    '{"type":"apply_patch"}',
    '{"type":"local_shell"}',
    '{"type":"computer"}',
    '{"type":"programmatic_tool_calling"}',
    '{"type":"file_search","vector_store_ids":["vs_1"],"max_num_results":20,"filters":{},'
    '"ranking_options":{}}',
    '{"type":"code_interpreter","container":{"type":"auto","file_ids":[]}}',
    '{"type":"image_generation","size":"1x1"}',
    *(f'{{"type":"{alias}"}}' for alias in ALIASES),
]
MCP = (
    '{"type":"mcp","server_label":"x","server_url":"https://example.com","allowed_tools":["a"],'
    '"require_approval":"never","headers":{"X-Key":"hush"},"authorization":"hush",'
    '"defer_loading":true}'
)


def decode(*tools: str, known: Tools | None = None) -> tuple[Tools, bool]:
    return decode_tools(f"[{','.join(tools)}]".encode(), known)


def echo(tools: Tools) -> list[dict[str, Any]]:
    return json.loads(tools.echo)  # type: ignore[no-any-return]


def test_examples_cover_every_type() -> None:
    decoded, _ = decode(*EXAMPLES, MCP)

    assert {type(tool) for tool in decoded.definitions} == set(get_args(ToolDefinition))
    assert len(TOOL_TYPES) == len(get_args(ToolDefinition))


@pytest.mark.parametrize("raw", [*EXAMPLES, '{"type":"tool_search"}'])
def test_response_echoes_a_tool_as_it_came(raw: str) -> None:
    decoded, did_decode = decode(raw)

    assert did_decode
    shown = echo(decoded)[0]
    sent = json.loads(raw)
    assert {key: shown[key] for key in sent} == sent
    assert set(shown) - set(sent) <= {"description", "parameters", "strict"}


def test_response_echoes_a_function_with_all_its_nullable_keys() -> None:
    for spaced in ('{"type":"function","name":"f"}', '{"type":"function","name":"f" \n}  '):
        decoded, _ = decode(spaced)

        assert echo(decoded) == [
            {
                "type": "function",
                "name": "f",
                "description": None,
                "parameters": None,
                "strict": None,
            }
        ]


def test_secrets_of_a_remote_server_are_not_echoed() -> None:
    decoded, _ = decode(MCP)

    assert b"hush" not in decoded.echo
    assert echo(decoded)[0]["server_label"] == "x"
    assert echo(decoded)[0]["allowed_tools"] == ["a"]


def test_unchanged_tools_are_not_decoded_again() -> None:
    first, _ = decode(*EXAMPLES)

    second, did_decode = decode(*EXAMPLES, known=first)

    assert second is first
    assert not did_decode


def test_tools_that_differ_in_a_byte_are_decoded() -> None:
    first, _ = decode('{"type":"function","name":"f"}')

    second, did_decode = decode('{"type":"function","name": "f"}', known=first)

    assert did_decode
    assert second.definitions == first.definitions


@pytest.mark.parametrize("raw", [b"[]", b"null"])
def test_no_tools_cost_nothing(raw: bytes) -> None:
    known, _ = decode(EXAMPLES[0])

    assert decode_tools(raw, None) == (NO_TOOLS, False)
    assert decode_tools(raw, known) == (NO_TOOLS, False)


def test_model_is_offered_what_the_client_can_run_with_namespaces_opened() -> None:
    decoded, _ = decode(*EXAMPLES)
    namespace = next(tool for tool in decoded.definitions if isinstance(tool, NamespaceTool))

    assert [(offer.qualified_name, offer.kind) for offer in decoded.offers] == [
        ("f", "function"),
        ("g", "function"),
        ("patch", "custom"),
        ("crm.b", "custom"),
        ("tool_search", "tool_search"),
        ("shell", "shell"),
        ("apply_patch", "apply_patch"),
        ("local_shell", "local_shell"),
    ]
    assert decoded.deferred == (Offer(namespace.tools[0], "crm", "…"),)
    assert offer_named(decoded.offers, "crm.b") == Offer(namespace.tools[1], "crm", "…")
    assert offer_named(decoded.offers, "b") is None


DEFERRED = (
    '{"type":"function","name":"pay","description":"Pays a bill.","defer_loading":true}',
    '{"type":"namespace","name":"crm","description":"Customers.","tools":['
    '{"type":"function","name":"find","defer_loading":true},{"type":"function","name":"list"}]}',
)


def test_deferred_tool_is_told_by_name_where_a_search_can_find_it() -> None:
    decoded, _ = decode(*DEFERRED, '{"type":"tool_search"}')

    assert [offer.qualified_name for offer in decoded.offers] == ["crm.list", "tool_search"]
    assert [offer.qualified_name for offer in decoded.deferred] == ["pay", "crm.find"]
    search = decoded.offers[-1]
    assert (search.kind, search.execution) == ("tool_search", "server")
    assert str(search.tool.description).splitlines()[1:] == [
        "These can be found:",
        "- pay: Pays a bill.",
        "- crm (find): Customers.",
    ]


def test_deferred_tool_that_no_search_can_find_is_offered_at_once() -> None:
    decoded, _ = decode(*DEFERRED)

    assert [offer.qualified_name for offer in decoded.offers] == ["pay", "crm.find", "crm.list"]
    assert decoded.deferred == ()


def test_search_of_the_client_is_told_in_its_own_words() -> None:
    own = '{"type":"object","properties":{"topic":{"type":"string"}}}'
    decoded, _ = decode(
        f'{{"type":"tool_search","execution":"client","description":"Ask.","parameters":{own}}}'
    )

    (search,) = decoded.offers
    assert (search.execution, search.tool.description) == ("client", "Ask.")
    assert isinstance(search.tool, FunctionTool)
    assert bytes(search.tool.parameters).decode() == own  # type: ignore[arg-type]


def test_shell_in_a_container_is_not_offered() -> None:
    decoded, _ = decode('{"type":"shell","environment":{"type":"container_auto"}}')

    assert decoded.offers == ()


def test_local_shell_tells_its_skills() -> None:
    skill = '{"name":"pdf","description":"Reads PDF.","path":"skills/pdf"}'
    decoded, _ = decode(f'{{"type":"shell","environment":{{"type":"local","skills":[{skill}]}}}}')

    assert "- pdf: Reads PDF. (skills/pdf)" in str(decoded.offers[0].tool.description)


@pytest.mark.parametrize(
    "raw, param",
    [
        ('{"type":"telepathy"}', "tools[1].type"),
        ("{}", "tools[1].type"),
        ('{"type":null}', "tools[1].type"),
        ('{"type":7}', "tools[1].type"),
        ('"function"', "tools[1]"),
        ("null", "tools[1]"),
        ('{"type":"function"}', "tools[1]"),
        ('{"type":"function","name":7}', "tools[1].name"),
        ('{"type":"function","name":null}', "tools[1].name"),
        ('{"type":"function","name":"f","strict":"yes"}', "tools[1].strict"),
        ('{"type":"function","name":"f","description":7}', "tools[1].description"),
        ('{"type":"function","name":"f","async":1}', "tools[1].async"),
        ('{"type":"custom"}', "tools[1]"),
        ('{"type":"namespace","name":"n","tools":{}}', "tools[1].tools"),
        ('{"type":"namespace","name":"n","tools":[{"type":"shell"}]}', "tools[1].tools[0].type"),
        ('{"type":"mcp"}', "tools[1]"),
        ('{"type":"tool_search","execution":"elsewhere"}', "tools[1].execution"),
        ('{"type":"file_search","vector_store_ids":"vs"}', "tools[1].vector_store_ids"),
    ],
)
def test_client_is_told_where_a_tool_is_wrong(raw: str, param: str) -> None:
    with pytest.raises(InvalidRequest) as told:
        decode('{"type":"apply_patch"}', raw)

    assert told.value.param == param


@pytest.mark.parametrize("raw", [b"{}", b"7", b'"f"', b"true"])
def test_tools_that_are_no_list_are_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as told:
        decode_tools(raw, None)

    assert told.value.param == "tools"


def test_more_tools_than_anybody_has_are_refused() -> None:
    tools = [f'{{"type":"custom","name":"t{n}"}}' for n in range(TOOLS_MAX + 1)]
    decode(*tools[1:])
    with pytest.raises(InvalidRequest) as told:
        decode(*tools)

    assert told.value.param == "tools"


# --- names ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", " ", "a b", "x.y", "é", 'a"b', "x" * 129, "a\\u0000"])
@pytest.mark.parametrize(
    "tool, param",
    [
        ('{"type":"function","name":"@"}', "tools[0].name"),
        ('{"type":"custom","name":"@"}', "tools[0].name"),
        ('{"type":"namespace","name":"@","tools":[]}', "tools[0].name"),
        (
            '{"type":"namespace","name":"n","tools":[{"type":"custom","name":"@"}]}',
            "tools[0].tools[0].name",
        ),
    ],
)
def test_name_that_is_not_plain_is_refused(name: str, tool: str, param: str) -> None:
    raw = tool.replace("@", name.replace('"', '\\"'))
    with pytest.raises(InvalidRequest) as told:
        decode(raw)
    assert told.value.param == param

    item = f'{{"type":"additional_tools","tools":[{raw}]}}'
    with pytest.raises(InvalidRequest) as told:
        decode_item(item.encode(), "input[0]")
    assert told.value.param == f"input[0].{param}"
    # What a search has found may have any name: MCP servers have their own rules.
    decode_item(item.replace("additional_tools", "tool_search_output").encode(), "input[0]")


def test_name_of_a_plugin_and_its_server_is_long_and_accepted() -> None:
    name = "mcp__plugin_chrome-devtools-mcp_chrome-devtools__performance_analyze_insight"
    decoded, _ = decode(f'{{"type":"function","name":"{name}"}}')

    assert decoded.offers[0].qualified_name == name


SAME = [
    ('{"type":"function","name":"f"}', '{"type":"custom","name":"f"}'),
    ('{"type":"function","name":"f"}', '{"type":"function","name":"f","defer_loading":true}'),
    ('{"type":"function","name":"shell"}', '{"type":"shell"}'),
    ('{"type":"custom","name":"apply_patch"}', '{"type":"apply_patch"}'),
    (
        '{"type":"namespace","name":"n","tools":[{"type":"function","name":"f"}]}',
        '{"type":"namespace","name":"n","tools":[{"type":"custom","name":"f"}]}',
    ),
]


@pytest.mark.parametrize("pair", SAME)
def test_two_tools_of_one_name_are_refused(pair: tuple[str, str]) -> None:
    with pytest.raises(InvalidRequest, match="Two tools have the same name") as told:
        decode(*pair, '{"type":"tool_search"}')
    assert told.value.param == "tools"

    with pytest.raises(InvalidRequest, match="Two tools have the same name") as told:
        decode_item(
            f'{{"type":"additional_tools","tools":[{",".join(pair)}]}}'.encode(), "input[3]"
        )
    assert told.value.param == "input[3].tools"


def test_tools_of_an_older_response_are_read_whatever_they_are_called() -> None:
    raw = b'[{"type":"function","name":"a.b"},{"type":"function","name":"a.b"}]'
    with pytest.raises(InvalidRequest):
        decode_tools(raw, None)

    assert len(decode_tools(raw, None, is_stored=True)[0].definitions) == 2


def test_choice_by_type_means_what_a_hosted_tool_offers_under_that_name() -> None:
    hosted = Offer(FunctionTool(name="python"), builtin="code_interpreter", execution="server")
    other = Offer(FunctionTool(name="code_interpreter"))
    choice = ToolChoiceName(type="code_interpreter")

    assert forced_offers(choice, (hosted, other)) == (hosted,)
    assert forced_offers(ToolChoiceName(type="function", name="python"), (hosted,)) == ()
