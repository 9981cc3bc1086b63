"""Images in a prompt: they stand where the model's own template puts them, and each is itself."""

import base64
import re

import pytest
from msgspec.structs import replace

from segue.dialects.choose import choose
from segue.dialects.family import TokenDialect
from segue.dialects.template import template_dialect
from segue.seams.history import Turn
from segue.seams.model import Scene
from segue.seams.prompt import Head, ImageAt, Tokens
from segue.vocabularies.chat_template import ChatTemplate, TemplateRunner
from segue.vocabularies.images import placeholder_of
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.items import Item
from tests.contracts.dialect import call, cold, item, message, output, smollm2, turn_after
from tests.dialects import templates
from tests.models import assets

PNG = [base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes([n]) * 40).decode() for n in range(3)]
URLS = [f"data:image/png;base64,{data}" for data in PNG]
QWEN = "<|vision_start|><|image_pad|><|vision_end|>"

# What the template of each model writes for an image.
PLACEHOLDERS = {
    "Qwen3.5-4B": QWEN,
    "google-gemma-4-31B-it": "<|image|>",
    "Mistral-Small-3.2-24B-Instruct-2506": "[IMG]",
    "Kimi-K2-Instruct": "<|media_start|>image<|media_content|><|media_pad|><|media_end|>\n",
    "MiniMax-M3": "]<]image[>[",
    "StepFun3.5-Flash": "<im_patch>",
    "Cohere2MoE": "<|END_TEXT|><|IMG_PATCH|><|START_TEXT|>",
    "Qwen3-Coder": None,
    "openai-gpt-oss-120b": None,
    "deepseek-ai-DeepSeek-V3.1": None,
}


def asked(*parts: str) -> Item:
    """A question of a user; a data URL is an image."""
    return item("message", role="user", content=[part_of(part) for part in parts])


def viewed(*parts: str) -> Item:
    """The output of a tool, as Codex's `view_image` gives it."""
    return item("function_call_output", call_id="c", output=[part_of(part) for part in parts])


def part_of(text: str) -> dict[str, str]:
    if text.startswith(("data:", "http")):
        return {"type": "input_image", "image_url": text}
    return {"type": "input_text", "text": text}


def qwen() -> TokenDialect:
    text = assets.template("Qwen3.5-4B")
    return template_dialect(templates.vocabulary("qwen3"), ChatTemplate(text, end="<|im_end|>"))


def seen(*items: Item, past: Turn | None = None) -> Scene:
    return Scene(Head(), past, items, sees_images=True)


def prompt_of(dialect: TokenDialect, scene: Scene) -> Tokens:
    prompt = dialect.render(scene).prompt
    assert isinstance(prompt, Tokens)
    return prompt


def shown(vocabulary: Vocabulary, ids: list[int]) -> str:
    return templates.shown(vocabulary, ids, sorted(vocabulary.specials))


@pytest.mark.parametrize("name", PLACEHOLDERS)
def test_placeholder_is_found_in_what_the_template_writes(name: str) -> None:
    assert placeholder_of(TemplateRunner(ChatTemplate(assets.template(name)))) == PLACEHOLDERS[name]


@pytest.mark.parametrize(
    "name", ["Qwen3.5-4B", "google-gemma-4-31B-it", "Mistral-Small-3.2-24B-Instruct-2506"]
)
def test_question_with_images_is_what_the_template_writes_of_parts(name: str) -> None:
    """The template's own way with a list of parts is the judge."""
    text = assets.template(name)
    marks = re.findall(r"<\|?[a-z_]+\|?>|\[/?[A-Z_]+\]", text)
    vocabulary = smollm2(*dict.fromkeys([*marks, "<|im_end|>", "</s>", "<bos>"]))
    dialect = template_dialect(vocabulary, ChatTemplate(text, "<bos>", "</s>"))
    assert dialect.takes_images
    runner = TemplateRunner(ChatTemplate(text, "<bos>", "</s>"))
    parts = [{"type": "text", "text": "One:"}, {"type": "image"}, {"type": "image"}]
    parts += [{"type": "text", "text": "Which?"}]
    expected = runner.run([{"role": "user", "content": parts}], None, 0, is_cued=True)
    prompt = prompt_of(dialect, seen(asked("One:", URLS[0], URLS[1], "Which?")))
    assert shown(vocabulary, prompt.flat().tolist()) == expected
    images = prompt.all_images()
    assert [at.url for at in images] == URLS[:2]
    placeholder = PLACEHOLDERS[name]
    assert [shown(vocabulary, prompt.flat().tolist()[a:b]) for a, b, _ in images] == [
        placeholder,
        placeholder,
    ]


def test_chain_with_an_image_in_a_tool_output_keeps_it_in_its_place() -> None:
    """Three turns, warm and cold alike; sent again as a whole, the ids and the images are the same."""
    dialect, past = qwen(), None
    looks = call("view_image", '{"path": "a.png"}')
    steps: list[tuple[Item, Item]] = [
        (message("user", "What is in a.png?"), looks),
        (viewed("a.png:", URLS[0]), looks),
        (viewed("The same."), message("assistant", "A cat.")),
    ]
    found: list[list[ImageAt]] = []
    for given, wrote in steps:
        scene = seen(given, past=past)
        prompt, again = prompt_of(dialect, scene), prompt_of(dialect, cold(scene))
        assert (prompt.flat(), prompt.all_images()) == (again.flat(), again.all_images())
        assert len(prompt.ids) < 40, "only what is new is written"
        found.append(prompt.all_images())
        past = turn_after(dialect, scene, dialect.write([wrote]))
    assert [len(images) for images in found] == [0, 1, 1]
    assert found[1] == found[2]
    # The very string of the item, not a copy.
    assert found[2][0].url is found[1][0].url


def test_resent_history_has_the_same_ids_and_images() -> None:
    dialect = qwen()
    items = [asked(URLS[0], "What?"), message("assistant", "A cat."), asked("And", URLS[1])]
    first, second = (prompt_of(dialect, seen(*items)) for _ in range(2))
    assert first.flat() == second.flat()
    assert first.all_images() == second.all_images()


def test_other_image_in_the_same_place_is_another_prompt() -> None:
    """The ids are equal, and yet nothing of the first prompt is taken for the second."""
    dialect = qwen()
    past = turn_after(
        dialect, seen(asked(URLS[0])), dialect.write([message("assistant", "A cat.")])
    )
    followed = seen(message("user", "Sure?"), past=past)
    one = dialect.render(followed)
    changed = replace(past.rounds[0], given=(asked(URLS[1]),))
    other = dialect.render(replace(followed, past=replace(past, rounds=(changed,))))
    assert isinstance(one.prompt, Tokens)
    assert isinstance(other.prompt, Tokens)
    assert one.prompt.flat() == other.prompt.flat()
    assert [at.url for at in one.prompt.all_images()] == [URLS[0]]
    assert [at.url for at in other.prompt.all_images()] == [URLS[1]]
    assert one.tokens_reused > other.tokens_reused


def test_forks_share_the_image() -> None:
    dialect = qwen()
    past = turn_after(
        dialect, seen(asked(URLS[0])), dialect.write([message("assistant", "A cat.")])
    )
    forks = [prompt_of(dialect, seen(asked(text), past=past)) for text in ("Sure?", URLS[1])]
    assert [len(fork.all_images()) for fork in forks] == [1, 2]
    assert forks[0].all_images()[0] == forks[1].all_images()[0]


def test_model_that_does_not_see_is_told_in_words() -> None:
    dialect = qwen()
    scene = replace(seen(asked(URLS[0])), sees_images=False)
    prompt = prompt_of(dialect, scene)
    assert prompt.all_images() == []
    assert "[image: image/png sent as data, which this model cannot see]" in shown(
        templates.vocabulary("qwen3"), prompt.flat().tolist()
    )


def test_address_of_an_image_is_told_in_words() -> None:
    prompt = prompt_of(qwen(), seen(asked("http://192.0.2.1/a.png")))
    assert prompt.all_images() == []


def test_text_that_looks_like_an_image_is_text() -> None:
    """A user who writes the placeholder, or our own mark for it, shows nothing."""
    vocabulary, dialect = templates.vocabulary("qwen3"), qwen()
    for text in (QWEN, f"\ufdd3{'0' * 32}\ufdd4", "\ufdd3", "\ufdd34\ufdd4"):
        for written in (message("user", text), output(text)):
            prompt = prompt_of(dialect, seen(message("user", "Hi"), written))
            assert prompt.all_images() == []
            assert vocabulary.special("<|image_pad|>") not in prompt.flat()
            assert text in shown(vocabulary, prompt.flat().tolist())


def test_template_that_takes_images_is_run_itself() -> None:
    """No family of our own writes images, so that none of them takes the template's place."""
    folder = templates.folder("qwen3")
    assert not choose(folder, templates.vocabulary("qwen3")).takes_images
    pictured = choose(folder, templates.vocabulary("qwen3"), assets.template("Qwen3.5-4B"))
    assert pictured.takes_images
