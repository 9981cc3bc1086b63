"""Lines that change on every turn are moved or pinned by an operator's rules; every repaired response says so."""

from __future__ import annotations

import json
from typing import Any

import pytest

from segue.errors import Misconfigured
from segue.reuse.repairs import KNOWN, Repairs, rules_of
from segue.settings import RepairSettings, load_settings
from segue.wire.cache import REPAIRS
from segue.wire.codec import decode_create
from segue.wire.requests import Create
from tests.support import MODEL, Answer, Served, fetch, serving, wire

RULES = "Follow the rules of the house. " * 60
CLOCK = RepairSettings(name="clock", pattern=r"^It is \d\d:\d\d\.$", how="move")


def create(**fields: Any) -> Create:
    return decode_create(json.dumps({"model": "m", **fields}).encode())


def repaired(rules: Repairs, turn: str = "resp_1", client: str = "bot", **fields: Any) -> Create:
    return rules.repair(create(**fields), "ada", client, turn)


def items(one: Create) -> list[Any]:
    assert isinstance(one.input, list)
    return [json.loads(bytes(raw)) for raw in one.input]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_line_is_moved_to_the_end() -> None:
    rules = Repairs(rules_of([CLOCK]))
    one = repaired(rules, instructions="It is 12:04.\nBe brief.", input="Where?")
    assert one.instructions == "\nBe brief."
    said, last = items(one)
    assert (said["role"], said["content"]) == ("user", "Where?")
    assert (last["role"], last["content"][0]["text"]) == ("developer", "It is 12:04.")
    assert one.metadata == {REPAIRS: "clock"}
    # In a system message of the input; after the output of a tool.
    system = {"role": "system", "content": [{"type": "input_text", "text": "A\nIt is 12:05.\nB"}]}
    output = {"type": "function_call_output", "call_id": "c", "output": "1"}
    two = repaired(rules, input=[system, user("x"), output], metadata={"mine": "1"})
    first, *_, last = items(two)
    assert first["content"][0]["text"] == "A\n\nB"
    assert (last["role"], last["content"][0]["text"]) == ("developer", "It is 12:05.")
    assert two.metadata == {"mine": "1", REPAIRS: "clock"}
    # A user may write what he likes.
    same = create(input=[user("It is 12:04.")], instructions="Be brief.")
    assert rules.repair(same, "ada", "bot", "resp_2") is same


def test_line_is_pinned_along_a_chain_and_a_full_history() -> None:
    rules = Repairs(rules_of([RepairSettings(name="id", pattern=r"^Run \w+$", how="pin")]))
    first = repaired(rules, "resp_1", instructions="Run a1\nx", input=[user("Go.")])
    second = repaired(
        rules, "resp_2", instructions="Run b2\nx", input="More.", previous_response_id="resp_1"
    )
    third = repaired(
        rules, "resp_3", instructions="Run c3\nx", input="More.", previous_response_id="resp_2"
    )
    history = [user("Go."), {"role": "assistant", "content": "Yes."}, user("More.")]
    whole = repaired(rules, "resp_4", instructions="Run d4\nx", input=history)
    assert [one.instructions for one in (first, second, third, whole)] == ["Run a1\nx"] * 4
    # The same words begin another conversation.
    again = repaired(rules, "resp_5", instructions="Run e5\nx", input=[user("Go.")])
    assert again.instructions == "Run e5\nx"


@pytest.mark.parametrize(
    ("settings", "client", "owner", "model", "is_meant"),
    [
        ({}, "x", "ada", "m", True),
        ({"client": "Codex*"}, "codex_cli_rs", "ada", "m", True),
        ({"client": "codex*"}, "opencode", "ada", "m", False),
        ({"owner": "eve"}, "x", "ada", "m", False),
        ({"model": "qwen*"}, "x", "ada", "qwen3", True),
        ({"model": "qwen*"}, "x", "ada", "llama", False),
    ],
)
def test_rule_is_for_a_client_an_owner_or_a_model(
    settings: dict[str, Any], client: str, owner: str, model: str, is_meant: bool
) -> None:
    (rule,) = rules_of([RepairSettings(pattern="x", **settings)])
    assert rule.applies(owner, client, model) is is_meant


# What each client writes, twice; the rest of its prompt is the same.
WRITTEN = {
    "claude-code": (
        "x-anthropic-billing-header: cc_version=2.1; cch=1f09a;\nYou are Claude Code.",
        "x-anthropic-billing-header: cc_version=2.1; cch=77e01;\nYou are Claude Code.",
    ),
    "opencode": (
        "You are opencode.\n<env>\n  Platform: linux\n  Today's date: Mon Nov 16 2026\n</env>",
        "You are opencode.\n<env>\n  Platform: linux\n  Today's date: Tue Nov 17 2026\n</env>",
    ),
    "timestamp": (
        "Current time: 2026-11-16 08:52:11\nYou are an agent.",
        "Current time: 2026-11-16 08:53:40\nYou are an agent.",
    ),
}


def test_every_known_client_has_a_test() -> None:
    assert WRITTEN.keys() == KNOWN.keys()


@pytest.mark.parametrize("name", WRITTEN)
def test_known_client_keeps_its_beginning(name: str) -> None:
    rules = Repairs(rules_of([RepairSettings(known=name)]))  # type: ignore[arg-type]
    one, other = WRITTEN[name]
    first = repaired(rules, "resp_1", instructions=one, input=[user("Go.")])
    second = repaired(
        rules, "resp_2", instructions=other, input="More.", previous_response_id="resp_1"
    )
    assert first.instructions == second.instructions
    assert (first.metadata or {})[REPAIRS] == (second.metadata or {})[REPAIRS] == name


@pytest.mark.parametrize("given", [[1], ["x"], [{"role": "user", "content": 5}], [None], []])
def test_what_is_no_item_is_left_to_be_refused(given: list[Any]) -> None:
    repaired(Repairs(rules_of([CLOCK])), instructions="It is 12:04.", input=given)


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ("pattern = '('\n", "regular expression"),
        ("name = 'x'\n", "pattern or known"),
        ("known = 'claude-code'\npattern = 'x'\n", "pattern or known"),
        ("known = 'netscape'\n", "known"),
        ("pattern = 'x'\nhow = 'drop'\n", "how"),
    ],
)
def test_wrong_rule_is_refused_by_name(table: str, words: str, tmp_path: Any) -> None:
    file = tmp_path / "segue.toml"
    file.write_text("[[repairs]]\n" + table)
    with pytest.raises(Misconfigured, match=words):
        load_settings({"config": str(file)}, environment={})


async def _tell(served: Served, clock: str, given: list[Any], **fields: Any) -> Answer:
    body = {"model": MODEL, "instructions": f"It is {clock}.\n{RULES}", "input": given}
    answer = await fetch(served, "POST", "/v1/responses", {**body, "store": False, **fields})
    assert answer.status == 200, answer.body
    assert answer.headers["x-segue-repairs"] == "clock"
    return answer


async def test_repaired_prompts_are_reused_and_say_so(tmp_path: Any) -> None:
    file = tmp_path / "segue.toml"
    file.write_text(f"[[repairs]]\nname = 'clock'\npattern = '{CLOCK.pattern}'\n")
    async with serving(config=str(file)) as served:
        first = (await _tell(served, "12:04", [user("One.")])).json
        given = [user("One."), *first["output"], user("Two.")]
        second = (await _tell(served, "12:05", given)).json
        streamed = await _tell(served, "12:06", given, stream=True)
        assert streamed.events[-1]["response"]["metadata"] == {REPAIRS: "clock"}
        async with wire(served) as socket:
            last = await socket.turn(input=given, instructions="It is 12:07.\n" + RULES)
            assert last["response"]["metadata"] == {REPAIRS: "clock"}
        plain = await fetch(served, "POST", "/v1/responses", {"model": MODEL, "input": "Hi."})
        assert "x-segue-repairs" not in plain.headers
        assert second["metadata"] == {REPAIRS: "clock"}
        report = (await fetch(served, "GET", f"/v1/responses/{second['id']}/cache")).json
        assert (report["lost_tokens"], report["repairs"]) == (0, ["clock"])
        assert report["reusable_tokens"] > 300
