"""DeepSeek V3.2 and V4 come without a chat template. Ours writes what llama.cpp's writes, but for what `made` says."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import pytest

from segue.dialects.choose import choose, dialect_for
from segue.dialects.deepseek import TEMPLATES
from segue.errors import Misconfigured, ServerFault
from segue.seams.history import Turn
from segue.seams.model import Grammar, Scene
from segue.seams.prompt import Head
from segue.vocabularies.chat_template import Chat, ChatTemplate, TemplateRunner
from segue.vocabularies.load import vocabulary_from_file
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.requests import Effort, ToolChoiceName
from tests.contracts.dialect import (
    TOOLS,
    call,
    cold,
    flat,
    heard,
    message,
    output,
    read,
    reasoning,
    smollm2,
    turn_after,
)
from tests.dialects.templates import CHAT_TOOLS, shown
from tests.models import assets
from tests.models.families import model_folder

THINKING = {"thinking": True}
BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
JUDGES = {
    "deepseek-v3.2": "deepseek-ai-DeepSeek-V3.2",
    "deepseek-v4": "deepseek-ai-DeepSeek-V4",
}
MODEL_TYPES = {"deepseek-v3.2": "deepseek_v32", "deepseek-v4": "deepseek_v4"}
names = pytest.mark.parametrize("name", TEMPLATES)
efforts = pytest.mark.parametrize("effort", [None, "none", "high", "max"])


@cache
def vocabulary() -> Vocabulary:
    return vocabulary_from_file(model_folder("DeepSeek V3.2"))


@cache
def judge(name: str) -> TemplateRunner:
    return TemplateRunner(ChatTemplate(assets.template(JUDGES[name]), BEGIN, END))


@cache
def ours(name: str) -> TemplateRunner:
    return TemplateRunner(ChatTemplate(TEMPLATES[name]))


def made(text: str) -> str:
    """What the makers' programs write where llama.cpp's templates differ: an answer without a thought begins with the
    end of one, tools have a blank line before them, and a call without arguments has one in it."""
    text = text.replace("<think></think>", "</think>") if text.endswith("</think>") else text
    text = re.sub(rf"({BEGIN}|unchecked\.\n\n)## Tools", r"\1\n\n## Tools", text)
    return text.replace('name="now">\n</｜DSML｜', 'name="now">\n\n</｜DSML｜')


def folder(path: Path, model_type: str | None) -> Path:
    """As the repositories have it: a tokenizer, a configuration, and no template."""
    (path / "tokenizer.json").symlink_to(model_folder("DeepSeek V3.2") / "tokenizer.json")
    told = {"bos_token": BEGIN, "eos_token": END}
    (path / "tokenizer_config.json").write_text(json.dumps(told))
    if model_type is not None:
        (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return path


def called(*arguments: tuple[str, object], thought: str = "", text: str = "") -> dict[str, object]:
    calls = [
        {"type": "function", "id": f"c{n}", "function": {"name": name, "arguments": given}}
        for n, (name, given) in enumerate(arguments)
    ]
    said: dict[str, object] = {"role": "assistant", "content": text, "reasoning_content": thought}
    return {**said, "tool_calls": calls} if calls else said


def said(role: str, content: str) -> dict[str, object]:
    return {"role": role, "content": content}


NESTED = {"q": 'Zürich "x"\n東京 <b>', "n": -2.5, "tags": [1, "é", [], {"a": None}], "is": True}
SYSTEM, HI, MORE = said("system", "Be brief."), said("user", "Hi, 東京"), said("user", "And?")
ANSWERED = called(thought="Easy.", text="Hello.")
ONE = [HI, called(("look", NESTED), thought="I look.", text="Wait."), said("tool", "18 C")]
SEVERAL = [
    HI,
    called(("look", {"q": "a"}), ("now", {}), ("look", {"where": {"b": [True]}}), thought="Three."),
    *(said("tool", text) for text in ("1", "2\n", "<3>")),
]
CHATS: dict[str, Chat] = {
    "plain": [HI],
    "system": [SYSTEM, HI],
    "second turn": [SYSTEM, HI, ANSWERED, MORE],
    "one call": [SYSTEM, *ONE],
    "several calls": SEVERAL,
    "loop": [SYSTEM, *ONE, *SEVERAL[1:]],
    "after calls": [SYSTEM, *ONE, called(thought="Got it.", text="18 C."), MORE],
    "fifth turn": [SYSTEM, *ONE, ANSWERED, *SEVERAL, ANSWERED, MORE, ANSWERED, *ONE],
}


@names
@efforts
@pytest.mark.parametrize("tools", [None, CHAT_TOOLS])
def test_text_is_that_of_the_known_template(
    name: str, effort: Effort | None, tools: object
) -> None:
    for chat in CHATS.values():
        expected = made(judge(name).run(chat, tools, 0, is_cued=True, effort=effort))
        assert ours(name).run(chat, tools, 0, is_cued=True, effort=effort) == expected


SAID = [
    ("user", "Weather in Paris?", "I must look.", "", '{"q": "Paris <｜User｜>", "n": [1, {"é": null}]}'),
    ("tool", "18 C", "I have it.", "It is 18 C.", None),
    ("user", "And in Rome?", "Again.", "Let me see.", '{"q": "Rome"}'),
    ("tool", "20 C", "Done.", "20 C there.", None),
    ("user", "Thanks.", "", "", None),
]  # fmt: skip


@names
def test_every_turn_of_a_chain_is_the_known_template_run_cold(name: str, tmp_path: Path) -> None:
    """Inside a loop of calls a prompt goes on from what was sampled, and what is sampled is read back."""
    path = folder(tmp_path, MODEL_TYPES[name])
    dialect = choose(path, vocabulary(), values=THINKING)
    head = Head(instructions="Be brief.", tools=TOOLS)
    chat: Chat = [SYSTEM]
    past: Turn | None = None
    before: list[int] = []
    for role, text, thought, words, arguments in SAID:
        chat.append(said(role, text))
        scene = Scene(head, past, (message("user", text) if role == "user" else output(text),))
        prompt = flat(dialect.render(scene).prompt).tolist()
        assert text_of(prompt) == judge(name).run(chat, CHAT_TOOLS, 0, is_cued=True, effort="high")
        assert flat(dialect.render(cold(scene)).prompt).tolist() == prompt
        if role == "tool" or name == "deepseek-v4":
            assert prompt[: len(before)] == before
        if not thought:
            break

        wrote = [
            reasoning(thought),
            *([message("assistant", words)] if words else []),
            *([call("look", arguments)] if arguments else []),
        ]
        calls = [("look", json.loads(arguments))] if arguments else []
        chat.append(called(*calls, thought=thought, text=words))
        sampled = dialect.write(wrote).tolist()
        found = heard(read(dialect, scene, [[id] for id in sampled]))
        assert [one.text for one in found if one.kind == "reasoning"] == [thought]
        assert [one.text.strip() for one in found if one.kind == "message"] == [words] * bool(words)
        assert [(one.name, json.loads(one.text)) for one in found if one.name] == calls
        past = turn_after(dialect, scene, sampled)
        before = prompt + sampled[:-1]


def text_of(ids: list[int]) -> str:
    protected = vocabulary().protecting("".join(TEMPLATES.values()))
    return shown(protected, ids, sorted(protected.specials))


def test_developer_who_speaks_later_is_told_apart_from_the_user(tmp_path: Path) -> None:
    dialect = choose(folder(tmp_path, "deepseek_v32"), vocabulary())
    items = (message("developer", "One."), message("user", "Hi"), message("developer", "Two."))

    prompt = text_of(flat(dialect.render(Scene(Head(), None, items)).prompt).tolist())

    assert prompt.startswith(f"{BEGIN}One.<｜User｜>Hi<｜User｜>[Instructions of the developer")
    assert prompt.endswith("<｜Assistant｜></think>")


@names
def test_model_is_known_by_its_files_or_by_name(name: str, tmp_path: Path) -> None:
    by_name = dialect_for(name, folder(tmp_path, None), vocabulary())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": MODEL_TYPES[name]}))

    assert by_name.name == choose(tmp_path, vocabulary()).name == name
    assert choose(tmp_path, vocabulary()).fingerprint == by_name.fingerprint
    assert choose(tmp_path / "tokenizer.json", vocabulary()).fingerprint == by_name.fingerprint
    with pytest.raises(Misconfigured, match="runs no template"):
        dialect_for(name, tmp_path, vocabulary(), "{{ messages }}")


@pytest.mark.parametrize("model_type", [None, "deepseek_v41"])
def test_model_that_cannot_be_told_is_refused(model_type: str | None, tmp_path: Path) -> None:
    with pytest.raises(ServerFault, match="deepseek-v4"):
        choose(folder(tmp_path, model_type), vocabulary())


def test_other_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ServerFault, match="User"):
        dialect_for("deepseek-v4", tmp_path, smollm2())


def test_template_of_the_model_wins(tmp_path: Path) -> None:
    path = folder(tmp_path, "deepseek_v32")
    (path / "chat_template.jinja").write_text(TEMPLATES["deepseek-v4"])

    by_name = dialect_for("deepseek-v4", path, vocabulary())

    assert choose(path, vocabulary()).fingerprint == by_name.fingerprint


@names
def test_forced_call_is_written_in_the_models_own_block(name: str, tmp_path: Path) -> None:
    dialect = choose(folder(tmp_path, MODEL_TYPES[name]), vocabulary(), values=THINKING)
    head = Head(tools=TOOLS, tool_choice=ToolChoiceName(type="function", name="look"))
    hi = (message("user", "Hi"),)

    rendered = dialect.render(Scene(head, None, hi, can_constrain=True, can_follow_tags=True))

    block = {"deepseek-v3.2": "function_calls", "deepseek-v4": "tool_calls"}[name]
    begun = f'<｜DSML｜{block}>\n<｜DSML｜invoke name="look">\n'
    assert text_of(rendered.lead.tolist()).endswith(begun)
    assert isinstance(rendered.schema, Grammar)
