"""Are messages put into an order that a model accepts, with every word?"""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from segue.derivation.roles import JsonObject, RoleRule, place

ROLES = ["system", "user", "assistant", "tool"]
conversations = st.lists(st.sampled_from(ROLES), max_size=8).map(
    lambda roles: [{"role": role, "content": f"<{n}>"} for n, role in enumerate(roles)]
)
flags = st.booleans()
rules = st.builds(RoleRule, st.sampled_from(["anywhere", "first", "never"]), flags, flags, flags)


def roles_of(messages: list[JsonObject]) -> list[object]:
    return [one["role"] for one in messages]


@given(conversations, rules)
def test_every_word_stays_and_in_its_order(messages: list[JsonObject], rule: RoleRule) -> None:
    text = "".join(str(one["content"]) for one in place(messages, rule))
    places = [text.index(f"<{n}>") for n in range(len(messages))]
    assert places == sorted(places)


@given(conversations, rules)
def test_rule_is_kept(messages: list[JsonObject], rule: RoleRule) -> None:
    roles = roles_of(place(messages, rule))
    if rule.system != "anywhere":
        assert "system" not in roles[1:]
    if rule.system == "never":
        assert "system" not in roles
    if rule.alternates:
        speakers = [(one, other) for one, other in pairwise(roles) if one != "tool"]
        assert all(one != other for one, other in speakers)
        assert ("tool", "user") not in pairwise(roles)
    if rule.needs_user and roles and set(roles) <= {"system"}:
        raise AssertionError("nobody but the developer speaks")


@given(conversations, conversations, rules)
def test_rest_of_a_conversation_can_be_placed_alone(
    first: list[JsonObject], rest: list[JsonObject], rule: RoleRule
) -> None:
    """As long as somebody but a developer has spoken: this is what lets a chain write only what is new."""
    if rule.is_local and any(one["role"] != "system" for one in first):
        whole = place([*first, *rest], rule)
        assert whole == place(first, rule) + place(rest, rule, is_beginning=False)


def test_pictures_are_kept_where_neighbours_are_joined() -> None:
    picture: JsonObject = {"type": "image_url", "image_url": {"url": "data:,x"}}
    messages: list[JsonObject] = [
        {"role": "user", "content": "Look:"},
        {"role": "user", "content": [picture]},
    ]
    assert place(messages, RoleRule(alternates=True)) == [
        {"role": "user", "content": [{"type": "text", "text": "Look:"}, picture]}
    ]


def test_instructions_after_an_output_are_no_question_where_that_would_forget() -> None:
    messages: list[JsonObject] = [
        {"role": "user", "content": "Look!"},
        {"role": "tool", "content": "bees", "tool_call_id": "c"},
        {"role": "system", "content": "Hurry."},
        {"role": "system", "content": "Really."},
    ]
    assert roles_of(place(messages, RoleRule("first"))) == ["user", "tool", "user", "user"]
    placed = place(messages, RoleRule("first", is_forgetful=True))
    assert roles_of(placed) == ["user", "tool"]
    assert placed[1]["tool_call_id"] == "c"
    text = str(placed[1]["content"])
    assert text.startswith("bees\n\n[Instructions of the developer")
    assert text.index("Hurry.") < text.index("Really.")
