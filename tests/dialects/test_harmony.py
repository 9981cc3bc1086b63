"""Harmony against the family's own library, which is also where the vocabulary comes from."""

import json
import random
from array import array
from typing import Any, Literal

import msgspec
import pytest

from segue.dialects.family import TokenDialect
from segue.dialects.harmony import HARMONY, tools_section
from segue.errors import InvalidRequest
from segue.interpreter.tool import OFFER as CODE_OFFER
from segue.seams.history import Turn
from segue.seams.model import Ids, ItemClosed, ItemOpened, ItemText, Scene
from segue.seams.prompt import Head
from segue.vocabularies.vocabulary import Mark, Own, Vocabulary
from segue.wire.codec import as_item, user_message
from segue.wire.items import CodeInterpreterCall, HostedOutput, Item
from segue.wire.requests import ReasoningConfig, TextConfig, TextFormat, ToolChoiceName
from segue.wire.tools import NO_TOOLS, FunctionTool, NamespaceTool, Offer
from tests.contracts.dialect import (
    OFFERING,
    TOOLS,
    Heard,
    call,
    cold,
    custom_call,
    flat,
    heard,
    item,
    message,
    output,
    read,
    reasoning,
    tools_of,
    turn_after,
)
from tests.dialects.templates import ROOT_AT, words
from tests.readers.following import is_accepted
from tests.vocabularies.gpt_oss import (
    harmony_encoding,
    harmony_package,
    vocabulary_from_harmony,
)

harmony = harmony_package()


@pytest.fixture(scope="module")
def oracle() -> Any:
    return harmony_encoding()


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    return vocabulary_from_harmony()


@pytest.fixture(scope="module")
def dialect(vocabulary: Vocabulary) -> TokenDialect:
    return TokenDialect(HARMONY, vocabulary)


# --- the oracle's side ----------------------------------------------------------------------------


def says(text: str, channel: str) -> Any:
    told = harmony.Message.from_role_and_content(harmony.Role.ASSISTANT, text)
    return told.with_channel(channel)


def calls(name: str, arguments: str) -> Any:
    told = says(arguments, "commentary").with_recipient(name)
    return told.with_content_type("<|constrain|>json")


def answers(name: str, text: str) -> Any:
    author = harmony.Author.new(harmony.Role.TOOL, name)
    told = harmony.Message.from_author_and_content(author, text)
    return told.with_channel("commentary").with_recipient("assistant")


def describe(offer: Offer, parameters: Any) -> Any:
    description = offer.tool.description if isinstance(offer.tool.description, str) else ""
    return harmony.ToolDescription.new(offer.tool.name, description, parameters=parameters)


SHAPES = {"look": {"type": "object", "properties": {"q": {"type": "string"}}}, "read": None}
SHAPES["patch"] = {
    "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
}  # fmt: skip


def opening(instructions: str | None, effort: str | None, *, has_tools: bool) -> list[Any]:
    """The system's and the developer's message."""
    level = (effort or "medium").upper()
    system = harmony.SystemContent.new().with_conversation_start_date("2026-11-14")
    system = system.with_reasoning_effort(getattr(harmony.ReasoningEffort, level))
    developer = harmony.DeveloperContent.new()
    if instructions is not None:
        developer = developer.with_instructions(instructions)
    if has_tools:
        spaces: dict[str, list[Any]] = {}
        for offer in TOOLS.offers:
            told = describe(offer, SHAPES[offer.tool.name])
            spaces.setdefault(offer.namespace or "functions", []).append(told)
        for name, tools in spaces.items():
            config = harmony.ToolNamespaceConfig(name=name, description=None, tools=tools)
            developer = developer.with_tools(config)
    first = [harmony.Message.from_role_and_content(harmony.Role.SYSTEM, system)]
    if instructions is None and not has_tools:
        return first
    return [*first, harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, developer)]


def without_old_thoughts(talk: list[Any]) -> list[Any]:
    """What was thought before the last final answer leaves the prompt. The library itself does this only up to the
    first answer, and only if the model's last message is one; vLLM does the rest before it calls the library."""
    finals = [n for n, told in enumerate(talk) if told.channel == "final"]
    last = finals[-1] if finals else 0
    return [told for n, told in enumerate(talk) if n > last or told.channel != "analysis"]


Story = tuple[list[Any], list[tuple[list[Item], list[Item]]]]


def conversation(rng: random.Random) -> Story:
    """Some questions, each with a loop of calls behind it: as the library's messages, and as rounds."""
    talk: list[Any] = []
    rounds: list[tuple[list[Item], list[Item]]] = []
    for _ in range(rng.randint(1, 3)):
        text = words(rng)
        talk.append(harmony.Message.from_role_and_content(harmony.Role.USER, text))
        given = [message("user", text)]
        for _ in range(rng.randint(0, 3)):
            wrote: list[Item] = []
            if thought := words(rng):
                talk.append(says(thought, "analysis"))
                wrote.append(reasoning(thought))
            if rng.random() < 0.3:
                talk.append(says("I look.", "commentary"))
                wrote.append(message("assistant", "I look."))
            name, space = rng.choice([("look", None), ("read", "fs")])
            arguments, out = json.dumps({"q": words(rng)}, ensure_ascii=False), words(rng)
            talk.append(calls(f"{space or 'functions'}.{name}", arguments))
            talk.append(answers(f"{space or 'functions'}.{name}", out))
            wrote.append(call(name, arguments, space))
            rounds.append((given, wrote))
            given = [output(out)]
        thought, parsed = words(rng), words(rng) or "So."
        if thought:
            talk.append(says(thought, "analysis"))
        talk.append(says(parsed, "final"))
        rounds.append(
            (given, [*([reasoning(thought)] if thought else []), message("assistant", parsed)])
        )
    # It ends where the model is to speak.
    given, wrote = rounds.pop()
    return talk[: len(talk) - len(wrote)], [*rounds, (given, [])]


def expected_ids(oracle: Any, first: list[Any], talk: list[Any]) -> list[int]:
    whole = harmony.Conversation.from_messages([*first, *without_old_thoughts(talk)])
    found: list[int] = oracle.render_conversation_for_completion(whole, harmony.Role.ASSISTANT)
    return found


def test_conversation_is_written_as_the_familys_own_library_does(
    oracle: Any, dialect: TokenDialect
) -> None:
    """As items that a client sends, and as a chain of turns, warm and cold: the same ids."""
    rng = random.Random(6)
    for _ in range(250):
        talk, rounds = conversation(rng)
        instructions, effort = rng.choice([None, "Be brief.\n"]), rng.choice([None, "low", "high"])
        # Without tools nothing is a call.
        has_tools = len(rounds) > 1 or rng.random() < 0.6
        head = Head(instructions=instructions, reasoning=ReasoningConfig(effort=effort))  # type: ignore[arg-type]
        if has_tools:
            head = msgspec.structs.replace(head, tools=TOOLS)
        expected = expected_ids(oracle, opening(instructions, effort, has_tools=has_tools), talk)
        items = [one for given, wrote in rounds for one in (*given, *wrote)]

        prompt = dialect.render(Scene(head, None, tuple(items), root_at=ROOT_AT)).prompt

        assert flat(prompt).tolist() == expected
        past: Turn | None = None
        for given, wrote in rounds[:-1]:
            scene = Scene(head, past, tuple(given), root_at=ROOT_AT)
            past = turn_after(dialect, scene, dialect.write(wrote))
        scene = Scene(head, past, tuple(rounds[-1][0]), root_at=ROOT_AT)
        assert flat(dialect.render(scene).prompt).tolist() == expected
        assert flat(dialect.render(cold(scene)).prompt).tolist() == expected


def test_developer_in_the_middle_is_written_as_the_library_does(
    oracle: Any, dialect: TokenDialect
) -> None:
    developer = harmony.DeveloperContent.new().with_instructions("Be kind.")
    talk = [
        harmony.Message.from_role_and_content(harmony.Role.USER, "Hi"),
        harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, developer),
    ]
    items = (message("user", "Hi"), message("developer", "Be kind."))

    prompt = dialect.render(Scene(Head(), None, items, root_at=ROOT_AT)).prompt

    assert flat(prompt).tolist() == expected_ids(oracle, opening(None, None, has_tools=False), talk)


# --- tools ----------------------------------------------------------------------------------------


def schema(rng: random.Random, depth: int = 0) -> dict[str, object]:
    plain = ["string", "enum", "number", "integer", "boolean"]
    kinds = [*plain, "array", "object", "types", "oneOf", "anyOf"]
    kind = rng.choice(kinds if depth < 3 else plain)
    found: dict[str, object] = {}
    for key, values in {
        "description": ["A thing.", "Two\nlines"],
        "title": ["T"],
        "examples": [["x"], [], [1]],
        "default": ["d", 1, 1.5, None, [1, "é"], {"a": True}],
        "nullable": [True],
    }.items():
        if rng.random() < 0.25:
            found[key] = rng.choice(values)
    match kind:
        case "enum":
            return found | {"type": "string", "enum": ["a", "b"]}
        case "array":
            return found | {"type": "array", "items": schema(rng, depth + 1)}
        case "object":
            inner = {key: schema(rng, depth + 1) for key in rng.sample("abcd", rng.randint(0, 3))}
            return found | {"type": "object", "properties": inner, "required": ["a", "c"]}
        case "types":
            return found | {"type": rng.sample(["string", "null", "integer"], 2)}
        case "oneOf" | "anyOf":
            return found | {kind: [schema(rng, depth + 1) for _ in range(rng.randint(1, 3))]}
        case _:
            return found | {"type": kind}


def test_parameters_are_declared_as_the_library_does(oracle: Any) -> None:
    rng = random.Random(7)
    for _ in range(300):
        shape = {"type": "object", "properties": {key: schema(rng) for key in "abc"}}
        raw = msgspec.Raw(msgspec.json.encode(shape))
        description = rng.choice(["", "Looks.", "Looks.\n\nMore.\n"])
        offer = Offer(FunctionTool(name="look", description=description, parameters=raw))
        developer = harmony.DeveloperContent.new().with_function_tools([describe(offer, shape)])
        told = harmony.Message.from_role_and_content(harmony.Role.DEVELOPER, developer)

        ours = f"<|start|>developer<|message|>{tools_section([offer])}<|end|>"

        assert ours == oracle.decode(oracle.render(told))


# --- forced answers -------------------------------------------------------------------------------


def test_forced_call_begins_with_its_header(vocabulary: Vocabulary, dialect: TokenDialect) -> None:
    head = Head(tools=TOOLS, tool_choice=ToolChoiceName(type="function", name="look"))
    scene = Scene(head, None, (message("user", "Hi"),), can_constrain=True)

    rendered = dialect.render(scene)

    assert msgspec.json.decode(rendered.schema or b"") == SHAPES["look"]
    parsed = read(dialect, scene, [rendered.lead, vocabulary.encode('{"q": "x"}')])
    assert heard(parsed) == [Heard("function", '{"q": "x"}', "look")]
    past = turn_after(dialect, scene, rendered.lead + vocabulary.encode('{"q": "x"}'))
    written = turn_after(dialect, scene, dialect.write([call("look", '{"q": "x"}')]))
    following = [dialect.render(Scene(head, one, (output("1"),))) for one in (past, written)]
    assert flat(following[0].prompt) == flat(following[1].prompt)


def test_forcing_one_of_several_tools_is_refused(dialect: TokenDialect) -> None:
    scene = Scene(Head(tools=TOOLS, tool_choice="required"), None, (), can_constrain=True)

    with pytest.raises(InvalidRequest):
        dialect.render(scene)


ANSWER = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
FORMAT = TextFormat(
    type="json_schema",
    name="count",
    description="A number.\nNo more.",
    schema=msgspec.Raw(json.dumps(ANSWER, indent=1).encode()),
)


def formatted(choice: Literal["auto", "none", "required"] = "auto", **engine: bool) -> Scene:
    head = Head(tools=TOOLS, tool_choice=choice, text=TextConfig(format=FORMAT), instructions="Be.")
    return Scene(head, None, (message("user", "Hi"),), can_constrain=True, **engine)


def test_format_is_told_to_the_developer_as_openai_has_it(
    oracle: Any, dialect: TokenDialect
) -> None:
    """See "Structured output" in the guide to the format, which the package has no type for."""
    text = oracle.decode(flat(dialect.render(formatted()).prompt).tolist())

    developer = text.split("<|start|>developer<|message|>")[1].split("<|end|>")[0]
    schema = json.dumps(ANSWER, separators=(",", ":"))
    assert developer.startswith("# Instructions\n\nBe.\n\n# Tools\n\n")
    assert developer.endswith(
        f"\n\n# Response Formats\n\n## count\n\n// A number.\n// No more.\n{schema}"
    )


def test_prompt_with_another_format_is_written_anew(dialect: TokenDialect) -> None:
    first = formatted()
    past = turn_after(dialect, first, dialect.write([message("assistant", '{"n": 1}')]))
    for head in (first.head, msgspec.structs.replace(first.head, text=TextConfig())):
        scene = Scene(head, past, (message("user", "So?"),))
        assert flat(dialect.render(scene).prompt) == flat(dialect.render(cold(scene)).prompt)


def test_format_beside_tools_is_free_where_the_engine_follows_no_tags(
    dialect: TokenDialect,
) -> None:
    assert dialect.render(formatted()).schema is None
    assert isinstance(dialect.render(formatted("none")).schema, bytes)


# What gpt-oss may write after its cue, and whether that keeps to the format.
ANSWERS = [
    (FINAL_JSON := '<|channel|>final<|message|>{"n": 1}', True, True),
    ("<|channel|>analysis<|message|>Hm <b>.<|end|><|start|>assistant" + FINAL_JSON, True, True),
    ("<|channel|>final<|message|>One.", False, False),
    ('<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"q": 1}', True, False),
    (' to=fs.read<|channel|>commentary<|message|>{}', True, False),
    ("<|channel|>commentary<|message|>I look.<|end|><|start|>assistant" + FINAL_JSON, True, False),
    ("Hello", False, False),
]  # fmt: skip


@pytest.mark.parametrize("text, beside_tools, alone", ANSWERS)
def test_only_the_final_channel_is_held_to_the_format(
    oracle: Any,
    vocabulary: Vocabulary,
    dialect: TokenDialect,
    text: str,
    beside_tools: bool,
    alone: bool,
) -> None:
    ids = sampled(oracle, text)
    for choice, is_allowed in (("auto", beside_tools), ("none", alone)):
        rendered = dialect.render(formatted(choice, can_follow_tags=True))  # type: ignore[arg-type]
        assert not rendered.lead
        assert is_accepted(rendered.schema, vocabulary, ids) == is_allowed


def test_any_of_several_tools_is_called_after_its_header(
    oracle: Any, vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    rendered = dialect.render(formatted("required", can_follow_tags=True))

    assert not rendered.lead
    for name, is_allowed in (("functions.look", True), ("fs.read", True), ("functions.x", False)):
        text = f' to={name}<|channel|>commentary <|constrain|>json<|message|>{{"q": "x"}}'
        assert is_accepted(rendered.schema, vocabulary, sampled(oracle, text)) == is_allowed


# --- reading --------------------------------------------------------------------------------------


def sampled(oracle: Any, text: str) -> list[int]:
    found: list[int] = oracle.encode(text, allowed_special="all")
    return found


ANALYSIS = "<|channel|>analysis<|message|>Hm.<|end|>"
AGAIN = "<|start|>assistant"
FINAL = "<|channel|>final<|message|>So."
CALL = '<|channel|>commentary to=functions.look <|constrain|>json<|message|>{"q": 1}'
FOUND = Heard("function", '{"q": 1}', "look")
HM, SO = Heard("reasoning", "Hm."), Heard("message", "So.")

# (what the model writes, what is heard)
STORIES: list[tuple[str, list[Heard]]] = [
    ("", []),
    (FINAL, [SO]),
    (FINAL + "<|return|>", [SO]),
    (FINAL + "<|end|>", [SO]),
    (ANALYSIS + AGAIN + FINAL, [HM, SO]),
    (ANALYSIS + AGAIN + CALL + "<|call|>", [HM, FOUND]),
    ("<|channel|>commentary<|message|>I look.<|end|>" + AGAIN + CALL, [Heard("message", "I look."), FOUND]),
    # Other headers of the same.
    (' to=functions.look<|channel|>commentary json<|message|>{"q": 1}', [FOUND]),
    (CALL.replace("functions.look", "fs.read"), [Heard("function", '{"q": 1}', "read", "fs", True)]),
    (CALL.replace("functions.look", "python"), [Heard("function", '{"q": 1}', "python")]),
    (CALL.replace("look", "patch").replace('"q": 1', '"input": "a\\nb"'), [Heard("custom", "a\nb", "patch")]),
    # Ends that are missing.
    (ANALYSIS.removesuffix("<|end|>") + AGAIN + FINAL, [HM, SO]),
    (ANALYSIS.removesuffix("<|end|>") + FINAL, [HM, SO]),
    ("<|channel|>final<|message|>", []),
    ("<|channel|>ana", []),
    # No message at all.
    ("Hello", [Heard("message", "Hello")]),
]  # fmt: skip


@pytest.mark.parametrize("text, expected", STORIES)
def test_answer_is_heard(
    oracle: Any, dialect: TokenDialect, text: str, expected: list[Heard]
) -> None:
    assert heard(read(dialect, OFFERING, [sampled(oracle, text)])) == expected


def test_what_is_written_is_read_back(dialect: TokenDialect) -> None:
    items = [
        reasoning("Hm."),
        message("assistant", "So."),
        call("look", "{}"),
        custom_call("patch", "x"),
    ]

    parsed = read(dialect, OFFERING, [dialect.write(items)])

    assert heard(parsed) == [HM, SO, Heard("function", "{}", "look"), Heard("custom", "x", "patch")]


def test_answer_that_was_cut_says_so(oracle: Any, dialect: TokenDialect) -> None:
    parsed = read(dialect, OFFERING, [sampled(oracle, FINAL)], is_cut=True)

    assert heard(parsed) == [Heard("message", "So.", is_cut=True)]


def test_each_token_of_text_is_said_at_once(
    oracle: Any, vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    reader = dialect.reader(OFFERING)
    reader.feed(Ids(sampled(oracle, FINAL)))

    for id in vocabulary.encode(" Here I am, again"):
        assert reader.feed(Ids([id])) == [ItemText(vocabulary.bytes_of(id).decode())]


def test_ids_are_parted_at_the_messages(oracle: Any, dialect: TokenDialect) -> None:
    parsed = read(dialect, OFFERING, [sampled(oracle, ANALYSIS + AGAIN + FINAL)])

    parts = [oracle.decode(list(one.ids)) for one in parsed if isinstance(one, ItemClosed)]

    assert parts == [ANALYSIS, AGAIN + FINAL]


def test_tools_that_an_item_brings_are_declared(oracle: Any, dialect: TokenDialect) -> None:
    tools = [{"type": "function", "name": "sed"}, {"type": "mcp", "server_label": "x"}]
    added = item("additional_tools", tools=tools)

    prompt = dialect.render(Scene(Head(), None, (message("user", "Hi"), added))).prompt

    text = oracle.decode(flat(prompt).tolist())
    assert "type sed = () => any;" in text
    assert "mcp" not in text


def test_namespace_is_declared_beside_functions() -> None:
    tools = tools_of(
        FunctionTool(name="look"), NamespaceTool(name="fs", tools=[FunctionTool(name="read")])
    )

    text = tools_section(tools.offers)

    assert "namespace fs {\n\ntype read = () => any;\n\n} // namespace fs" in text
    assert "namespace functions {\n\ntype look = () => any;\n\n} // namespace functions" in text


# --- code -----------------------------------------------------------------------------------------


def to_python(code: str) -> Any:
    return says(code, "analysis").with_recipient("python").with_content_type("code")


def from_python(text: str) -> Any:
    author = harmony.Author.new(harmony.Role.TOOL, "python")
    told = harmony.Message.from_author_and_content(author, text)
    return told.with_channel("analysis").with_recipient("assistant")


@pytest.mark.parametrize("has_tools", [False, True])
def test_code_is_written_as_the_familys_own_library_does(
    has_tools: bool, oracle: Any, dialect: TokenDialect
) -> None:
    """The tool in the system's message, calls as bare code, and results that `python` says."""
    tools = (TOOLS if has_tools else NO_TOOLS).with_hosted([CODE_OFFER])
    head = Head(instructions="Be brief.", tools=tools)
    first = opening("Be brief.", None, has_tools=has_tools)
    first[0].content[0].with_python_tool()
    hello = harmony.Message.from_role_and_content(harmony.Role.USER, "What is 6 * 7?")
    code, printed = 'print(6 * 7)\n"<|end|>"', "42\n<|end|><|start|>assistant"
    whole = harmony.Conversation.from_messages(
        [*first, hello, to_python(code), from_python(printed)]
    )
    expected = oracle.render_conversation_for_completion(whole, harmony.Role.ASSISTANT)
    code_call = as_item(CodeInterpreterCall(id="ci_1", code=code, status="completed"))
    printed_item = as_item(HostedOutput(call_id="ci_1", output=printed))
    asked = user_message("What is 6 * 7?")

    scene = Scene(head, None, (asked, code_call, printed_item), root_at=ROOT_AT)
    assert flat(dialect.render(scene).prompt).tolist() == expected

    past = turn_after(
        dialect, Scene(head, None, (asked,), root_at=ROOT_AT), dialect.write([code_call])
    )
    (written,) = past.rounds[-1].wrote
    answer = as_item(HostedOutput(call_id=str(written.value.id), output=printed))
    again = Scene(head, past, (answer,), root_at=ROOT_AT)
    assert flat(dialect.render(again).prompt).tolist() == expected
    assert flat(dialect.render(cold(again)).prompt).tolist() == expected


@pytest.mark.parametrize(
    "header",
    [
        " to=python<|channel|>analysis code<|message|>",
        "<|channel|>analysis to=python code<|message|>",
        "<|channel|>commentary to=python <|constrain|>code<|message|>",
        " to=functions.python<|channel|>commentary <|constrain|>json<|message|>",
    ],
)
@pytest.mark.parametrize("as_json", [False, True])
def test_code_is_read_however_it_is_addressed(
    header: str, as_json: bool, vocabulary: Vocabulary, dialect: TokenDialect
) -> None:
    code = '{1, 2}\nprint("a\\n")'
    text = json.dumps({"code": code}) if as_json else code
    head = Head(tools=NO_TOOLS.with_hosted([CODE_OFFER]))
    reader = dialect.reader(Scene(head, None, (), root_at=ROOT_AT))
    ids = vocabulary.ids(Own(header), text, Mark("<|call|>"))
    parsed = [one for id in ids for one in reader.feed(Ids(array("I", [id])))]
    parsed += reader.close(is_cut=False)
    opened = next(one for one in parsed if isinstance(one, ItemOpened))
    assert (opened.kind, opened.name, opened.execution) == ("code_interpreter", "python", "server")
    assert "".join(one.text for one in parsed if isinstance(one, ItemText)) == code
