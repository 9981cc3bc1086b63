"""Which model families are tried, with which template and tokenizer?

A family has its own chat template. Where its own tokenizer can be had, that is used; else the tokenizer of a relative,
with the tokens that stand in the template added at its end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from tests.models import assets

# Tokens as templates name them. What looks like XML may be a token or text: those are listed by family.
TOKENS = re.compile(
    r"<\|[^|<>\s'\"{}]{1,40}\|>|<｜[^｜\s{}]{1,40}｜>|<\|[a-z_\"]+>|<[a-z_\"]+\|>|<\|\"\|>|\[/?[A-Z_]{3,}\]"
    r"|<SPECIAL_\d+>|\]~!?b[\]\[]|\[e~\["
)
QWEN3, QWEN2_5, LLAMA3_1, NEMO = "qwen3", "qwen2_5", "llama3_1", "mistral_nemo"
DEEPSEEK, GEMMA3, COMMAND_R = "deepseek_v3", "gemma3", "command_r_plus"
DEEPSEEK_BEGIN, DEEPSEEK_END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
THINKING = {"enable_thinking": True, "thinking": True}
THINK = ("<think>", "</think>")
ARGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
HUNYUAN = tuple(
    f"<{slash}{name}:opensource>"
    for name in (
        "think",
        "tool_calls",
        "tool_call",
        "arg_key",
        "arg_value",
        "tool_responses",
        "tool_response",
        "tool_sep",
    )
    for slash in ("", "/")
)
# Harmony's tokens, beside those that o200k has.
HARMONY = {
    "<|startoftext|>": 199998, "<|return|>": 200002, "<|constrain|>": 200003, "<|channel|>": 200005,
    "<|start|>": 200006, "<|end|>": 200007, "<|message|>": 200008, "<|call|>": 200012,
}  # fmt: skip


@dataclass(frozen=True)
class ModelFamily:
    """One row of the matrix."""

    name: str
    # The file of its template; "" is the template that comes with its tokenizer.
    template: str
    tokenizer: str = QWEN3
    # Whether that is the family's own tokenizer, to the id.
    is_own: bool = False
    begin: str | None = None
    end: str = ""
    # Tokens beside `end` by which an answer ends.
    ends: tuple[str, ...] = ()
    # Special tokens that do not stand in the template as such, or that no pattern finds.
    specials: tuple[str, ...] = ()
    # Added tokens that are not special.
    texts: tuple[str, ...] = ()
    # What the template is told, where its own default is not to think.
    values: Mapping[str, Any] = field(default_factory=dict)
    # Whether tools and their outputs are written as the makers' own package does, not as the template does.
    declares_otherwise: bool = False
    # Whether `make test` tries it.
    is_quick: bool = False


FAMILIES = (
    ModelFamily("Qwen2.5", "Qwen-Qwen2.5-7B-Instruct", QWEN2_5, is_own=True),
    ModelFamily("Qwen3", "Qwen-Qwen3-0.6B", is_own=True),
    ModelFamily("Qwen3.5", "Qwen3.5-4B", is_quick=True),
    ModelFamily("Qwen3-Coder", "Qwen3-Coder", is_own=True),
    ModelFamily("QwQ", "Qwen-QwQ-32B", QWEN2_5, texts=THINK, values=THINKING),
    ModelFamily(
        "gpt-oss", "openai-gpt-oss-120b", "gpt4o", is_own=True, end="<|return|>", ends=("<|call|>",),
        declares_otherwise=True,
    ),
    ModelFamily(
        "GLM-4.6", "GLM-4.6", end="<|endoftext|>", ends=("<|user|>", "<|observation|>"),
        specials=("[gMASK]", "<sop>"), texts=ARGS, is_quick=True,
    ),
    ModelFamily(
        "GLM-4.7", "GLM-4.7-Flash", end="<|endoftext|>", ends=("<|user|>", "<|observation|>"),
        specials=("[gMASK]", "<sop>"), texts=ARGS,
    ),
    ModelFamily(
        "DeepSeek R1 Distill", "deepseek-ai-DeepSeek-R1-Distill-Qwen-32B", QWEN2_5,
        begin=DEEPSEEK_BEGIN, end=DEEPSEEK_END, texts=THINK, values=THINKING,
    ),
    ModelFamily("DeepSeek V3.1", "deepseek-ai-DeepSeek-V3.1", DEEPSEEK, texts=THINK, is_quick=True),
    ModelFamily(
        "DeepSeek V3.2", "deepseek-ai-DeepSeek-V3.2", DEEPSEEK, texts=(*THINK, "｜DSML｜"), values=THINKING
    ),
    ModelFamily("DeepSeek V4", "deepseek-ai-DeepSeek-V4", DEEPSEEK, texts=(*THINK, "｜DSML｜"), values=THINKING),
    ModelFamily("Kimi K2", "Kimi-K2-Instruct", begin="[BOS]", end="<|im_end|>"),
    ModelFamily("Kimi K2 Thinking", "Kimi-K2-Thinking", begin="[BOS]", end="<|im_end|>", is_quick=True),
    ModelFamily("Kimi K3", "Kimi-K3", begin="[BOS]", end="<|end_of_msg|>"),
    ModelFamily(
        "MiniMax M1", "MiniMax-M1", begin="<begin_of_document>", end="<end_of_sentence>",
        specials=("<beginning_of_sentence>",),
    ),
    ModelFamily(
        "MiniMax M2", "MiniMax-M2", begin="]~!b[", end="[e~[",
        texts=("<minimax:tool_call>", "</minimax:tool_call>"), is_quick=True,
    ),
    ModelFamily(
        "MiniMax M3", "MiniMax-M3", begin="]~!b[", end="[e~[",
        specials=("]<]minimax[>[", "]<]image[>["), texts=("<mm:think>", "</mm:think>"),
    ),
    ModelFamily("Gemma 3", "", GEMMA3, is_own=True),
    ModelFamily(
        "Gemma 4", "google-gemma-4-31B-it", GEMMA3, end="<turn|>", ends=("<|tool_response>",), values=THINKING,
    ),
    ModelFamily("Mistral Nemo", "mistralai-Mistral-Nemo-Instruct-2407", NEMO, is_own=True),
    ModelFamily("Mistral Small 3.2", "Mistral-Small-3.2-24B-Instruct-2506", NEMO),
    ModelFamily("Devstral Small", "unsloth-mistral-Devstral-Small-2507", NEMO),
    ModelFamily("Ministral 3", "mistralai-Ministral-3-14B-Reasoning-2512", NEMO),
    ModelFamily("Llama 3.1", "meta-llama-Llama-3.1-8B-Instruct", LLAMA3_1, is_own=True, ends=("<|eom_id|>",)),
    ModelFamily("Llama 3.2", "meta-llama-Llama-3.2-3B-Instruct", "llama3_2", is_own=True, ends=("<|eom_id|>",)),
    ModelFamily(
        "Llama 3.3", "meta-llama-Llama-3.3-70B-Instruct", LLAMA3_1, is_own=True, ends=("<|eom_id|>",), is_quick=True
    ),
    ModelFamily("Nemotron Nano v2", "NVIDIA-Nemotron-Nano-v2", end="<SPECIAL_12>"),
    ModelFamily("Nemotron 3 Nano", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", end="<|im_end|>"),
    ModelFamily("Granite 3.3", "ibm-granite-granite-3.3-2B-Instruct", end="<|end_of_text|>"),
    ModelFamily("Granite 4.0", "ibm-granite-granite-4.0", end="<|end_of_text|>"),
    ModelFamily("Granite 4.1", "ibm-granite-granite-4.1", end="<|end_of_text|>"),
    ModelFamily("SmolLM3", "HuggingFaceTB-SmolLM3-3B", LLAMA3_1, end="<|im_end|>", texts=THINK),
    ModelFamily(
        "Seed-OSS", "ByteDance-Seed-OSS", begin="<seed:bos>", end="<seed:eos>",
        texts=("<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"),
    ),
    ModelFamily(
        "Hermes 2 Pro", "NousResearch-Hermes-2-Pro-Llama-3-8B-tool_use", LLAMA3_1, end="<|im_end|>",
        texts=("<tool_call>", "</tool_call>"),
    ),
    ModelFamily(
        "Hermes 3", "NousResearch-Hermes-3-Llama-3.1-8B-tool_use", LLAMA3_1, end="<|im_end|>",
        texts=("<tool_call>", "</tool_call>"),
    ),
    ModelFamily("LFM2", "LFM2-8B-A1B", begin="<|startoftext|>", end="<|im_end|>"),
    ModelFamily("LFM2.5", "LFM2.5-8B-A1B", begin="<|startoftext|>", end="<|im_end|>", specials=("<image>",)),
    ModelFamily(
        "Laguna XS.2", "poolside-Laguna-XS.2", begin="〈|EOS|〉", end="</assistant>",
        specials=("<system>", "</system>", "<user>", "</user>", "<assistant>"), texts=ARGS, values=THINKING,
    ),
    ModelFamily(
        "Laguna S 2.1", "poolside-Laguna-S-2.1", begin="〈|EOS|〉", end="</assistant>",
        specials=("<system>", "</system>", "<user>", "</user>", "<assistant>"), texts=ARGS,
    ),
    ModelFamily(
        "Step 3.5", "StepFun3.5-Flash", begin=DEEPSEEK_BEGIN, end="<|im_end|>", specials=("<im_patch>",)
    ),
    ModelFamily("Apertus", "Apertus-8B-Instruct", NEMO, end="<|assistant_end|>"),
    ModelFamily(
        "Hunyuan (Hy3)", "tencent-Hy3", begin="<｜hy_begin_of_sentence:opensource｜>", end="<｜hy_eos:opensource｜>",
        specials=("<｜hy_User:opensource｜>", "<｜hy_Assistant:opensource｜>", "<｜reasoning_mode:opensource｜>"),
        texts=HUNYUAN,
        values={"reasoning_effort": "high"},
    ),
    ModelFamily("Command R7B", "CohereForAI-c4ai-command-r7b-12-2024-tool_use", COMMAND_R),
    ModelFamily("Phi-3.5", "microsoft-Phi-3.5-mini-instruct", end="<|end|>"),
    ModelFamily("MiMo VL", "MiMo-VL", QWEN2_5),
    ModelFamily(
        "Ling 3.0", "inclusionai-ling-3.0-flash", end="<|role_end|>", specials=("<role>", "</role>"), texts=ARGS
    ),
    ModelFamily("Solar Open", "upstage-Solar-Open-100B", end="<|flush|>", ends=("<|calls|>",)),
    ModelFamily("GigaChat 3.1", "GigaChat3.1-10B-A1.8B", begin="<s>", end="</s>", ends=("<|message_sep|>",)),
    ModelFamily("Bielik 11B v3", "Bielik-11B-v3.0-Instruct", begin="<s>", end="<|im_end|>"),
    ModelFamily("MiniCPM5", "openbmb-MiniCPM5-1B", begin="<s>", end="<|im_end|>"),
    ModelFamily("Reka Edge", "Reka-Edge", end="<sep>", specials=("<image>", "</image>", "<REKA_IMG_TOKEN>")),
    ModelFamily("Spark 2.5", "Spark2.5", begin="<｜start▁of▁sentence｜>", end=DEEPSEEK_END, texts=ARGS),
)  # fmt: skip
BY_NAME = {family.name: family for family in FAMILIES}

OWN_WORDS = (
    "its template has no words for tools, so they are described in Segue's own: expect weak calls"
)
ONE_CALL = "its template has words for one call at a time"
IN_JSON = "in a forced call objects and lists are JSON, where its template has Python's notation"
# What a person should know before choosing a family; most are properties of its template.
NOTES = {
    "QwQ": "the template in the packages forgets thoughts at once, also between calls",
    "gpt-oss": "tools and their results are written as its makers' own package does, and not as its template",
    "DeepSeek R1 Distill": (
        "without tools: after the first call its template loses the marks of the others and of answers. In history it "
        "keeps the newlines that follow a thought; Segue leaves them out"
    ),
    "DeepSeek V3.2": "its makers publish no template: judged by that of llama.cpp",
    "DeepSeek V4": "its makers publish no template: judged by that of llama.cpp",
    "Gemma 3": OWN_WORDS,
    "Phi-3.5": OWN_WORDS,
    "SmolLM3": "the template in the packages leaves tools out, so they are described in Segue's own words",
    "Granite 3.3": "its template shows tools and has no words for a call: a call is kept as it was sampled",
    "LFM2": "its template shows tools and has no words for a call: a call is kept as it was sampled",
    "Gemma 4": "its template moves words that stand before a call behind it",
    "Mistral Nemo": (
        "its template forgets instructions once the model has spoken, so they are said as a user's; it drops words "
        "before a call"
    ),
    "Llama 3.1": ONE_CALL,
    "Llama 3.2": ONE_CALL,
    "Llama 3.3": ONE_CALL,
    "GigaChat 3.1": ONE_CALL,
    "Nemotron Nano v2": "its template writes words before a call as an answer of their own",
    "Command R7B": "its template drops words before a call",
    "Solar Open": "its template drops words before a call",
    "Seed-OSS": IN_JSON,
    "LFM2.5": IN_JSON,
    "MiniCPM5": IN_JSON,
}
# Families with which an agent would fail.
WITHOUT_TOOLS = frozenset({"DeepSeek R1 Distill"})

# What people ask for and is not tried, with the reason.
NOT_TRIED = {
    "Llama 4": "there is no template of it in the packages; LFM2.5 has the same pythonic calls",
    "GLM-5, Qwen3.6 and later, Phi-4": "there are no templates of them in the packages",
    "SmolLM2, Qwen2.5-Coder": "they run inside and have tests of their own (tests/engines/test_embedded.py)",
    "Command R+": "its template refuses a tool with a nested object",
    "Apriel 1.6": "its template writes an answer otherwise than its own cue begins it",
}


def template_text(family: ModelFamily) -> str:
    if family.template:
        return assets.template(family.template)
    text = _config(assets.tokenizer_folder(family.tokenizer))["chat_template"]
    assert isinstance(text, str)
    return text


def model_folder(name: str) -> Path:
    """A tokenizer folder of this family, with its template, as a model's repository has it."""
    family = BY_NAME[name]
    source, text = assets.tokenizer_folder(family.tokenizer), template_text(family)
    digest = blake2b(f"{family}{text}".encode(), digest_size=6)
    digest.update(Path(__file__).read_bytes())
    folder = (
        assets.CACHE
        / "folders"
        / f"{re.sub('[^a-z0-9.]+', '-', name.lower())}-{digest.hexdigest()}"
    )
    if not (folder / "generation_config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        _write_folder(folder, family, source, text)
    return folder


def _write_folder(folder: Path, family: ModelFamily, source: Path, text: str) -> None:
    tokenizer = json.loads((source / "tokenizer.json").read_text())
    config = _config(source)
    begin = family.begin if family.begin is not None else _token(config.get("bos_token"))
    end = family.end or _token(config.get("eos_token"))
    found = [*family.specials, *TOKENS.findall(text), begin, end, *family.ends]
    specials = HARMONY if family.name == "gpt-oss" else dict.fromkeys(found)
    _add(tokenizer, specials, is_special=True)
    _add(tokenizer, dict.fromkeys(family.texts), is_special=False)
    ids = {one["content"]: one["id"] for one in tokenizer["added_tokens"]}
    stops = [ids[one] for one in (end, *family.ends)]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False))
    told = {"bos_token": begin or None, "eos_token": end, "chat_template": text}
    (folder / "tokenizer_config.json").write_text(json.dumps(told))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))


def _add(tokenizer: dict[str, Any], texts: Mapping[str, int | None], *, is_special: bool) -> None:
    """Add these tokens, but for those that are there; one without an id comes last."""
    added, vocabulary = tokenizer["added_tokens"], tokenizer["model"]["vocab"]
    known = {one["content"] for one in added}
    last = max(max(vocabulary.values()), *(one["id"] for one in added))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    for text, id in texts.items():
        if text and text not in known:
            if id is not None:
                vocabulary[text] = id
            id = vocabulary.get(text)
            if id is None:
                last = id = last + 1
            added.append({"id": id, "content": text, "special": is_special, **flags})


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "tokenizer_config.json").read_text())
    return found


def _token(value: object) -> str:
    return str(value["content"]) if isinstance(value, dict) else str(value or "")
