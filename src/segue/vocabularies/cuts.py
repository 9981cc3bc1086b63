"""How is text cut into words before the merges, in each kind of GGUF?

A table: the name in `tokenizer.ggml.pre`, and the patterns that cut one after the other. A name that is missing is a
kind that cannot be read. The names are llama.cpp's, whose results are the reference for these files; the patterns are
those of the models' own tokenizers, where llama.cpp has to write them differently.
"""

from __future__ import annotations

import re

from tokenizers import Regex, pre_tokenizers

DIGIT = r"\p{N}"
# Digits by threes, counted from the right.
THREES = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SUFFIX = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LINES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2 = SUFFIX + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*" + LINES
LLAMA3 = QWEN2.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
QWEN35 = QWEN2.replace(r"\p{L}+|", r"[\p{L}\p{M}]+|").replace(
    r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]"
)
GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]*[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]+{SUFFIX}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}]+[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}]*{SUFFIX}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{LINES}"
)
# Mistral's own: the same without contractions, and digits stand alone.
TEKKEN = GPT4O.replace(SUFFIX + "?", "").replace(r"|\p{N}{1,3}|", r"|\p{N}|")
# Chinese stands for itself.
KIMI = r"\p{Han}+|" + GPT4O.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace(
    r"[\r\n/]*", r"[\r\n]*"
)
CHINESE = "[一-龥\u3040-ゟ゠-ヿ]+"
DEEPSEEK3_WORDS = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*" + LINES
)
DEEPSEEK3 = (r"\p{N}{1,3}", CHINESE, DEEPSEEK3_WORDS)
# Letters with an upper and a lower case.
CASED = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ"
    "\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ"
    "𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
ASIAN = "[一-龥\u0800-一가-\ud7ff]+"
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"

# What the patterns are, and which kinds of files they are for.
_CUTS: tuple[tuple[tuple[str, ...], str], ...] = (
    ((GPT2,), "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling"),
    ((DIGIT, GPT2), "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2"),
    ((QWEN2,), "qwen2 deepseek-r1-qwen kormo megrez stablelm2 hunyuan solar-open grok-2"),
    ((QWEN35,), "qwen35"),
    (("[^\\n]+|\\n+", QWEN2), "laguna"),
    ((QWEN2.removeprefix(SUFFIX + "|"),), "ufakzeka"),
    ((QWEN2.replace(r"[\r\n]*", ""),), "seed-coder"),
    ((QWEN2.replace(r"|\s*[\r\n]+", r"|\s*[\r\n]"),), "bailingmoe bailingmoe2 llada-moe"),
    (
        (LLAMA3,),
        "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 dbrx smaug-bpe chatglm-bpe glm4 glm5",
    ),
    ((r"\p{N}{1,3}", LLAMA3.replace("{1,3}", "+")), "minicpm5"),
    ((GPT4O,), "gpt-4o llama4 kanana2 talkie minimax-m2"),
    ((TEKKEN,), "tekken"),
    ((KIMI,), "kimi-k2"),
    ((r"\d{1,3}(?=(?:\d{3})*\b)", GPT4O), "tiny_aya cohere2moe"),
    ((THREES,), "superbpe"),
    (DEEPSEEK3, "deepseek-v3 hunyuan-dense hy_v4 joyai-llm"),
    ((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", ASIAN, DIGIT), "deepseek-coder"),
    (
        (
            r"[\r\n]",
            rf"\s?[{CASED}]+",
            r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
            r"\s+$",
            ASIAN,
            r"\p{N}+",
        ),
        "deepseek-llm",
    ),
    ((r"[\p{P}$+<=>^~|`]+", GPT2, "[0-9][0-9][0-9]"), "falcon"),
    ((r"[\p{P}$+<=>^~|]+", GPT2, r"\p{N}+", "[0-9][0-9][0-9]"), "default"),
    ((BLOOM,), "bloom poro-chat gpt3-finnish"),
    ((BLOOM, DIGIT), "viking"),
)
CUTS = {name: patterns for patterns, names in _CUTS for name in names.split()}
# Where a word that is a token stays a token, whatever the merges would make of it.
WHOLE_WORDS = frozenset(
    [
        "tekken",
        "minicpm5",
        "llama-bpe",
        "llama3",
        "llama-v3",
        "falcon3",
        "falcon-h1",
        "pixtral",
        "midm-2.0",
        "lfm2",
        "glm4",
        "glm5",
    ]
)
# The same cuts for ASCII text, where the classes of Unicode are plain ranges. White space before a digit that stands
# alone is a piece of its own.
SPACE = r" \t\n\r\f\v"
ASCII_CUTS = {
    "smollm": re.compile(
        rf"[0-9]|'(?:[sdmt]|ll|ve|re)| ?[A-Za-z]+| ?[^{SPACE}A-Za-z0-9]+"
        rf"|[{SPACE}]+(?=[0-9])|[{SPACE}]+(?![^{SPACE}])|[{SPACE}]+"
    ),
}


def cutter(*patterns: str) -> pre_tokenizers.PreTokenizer:
    """Cuts text by these patterns and spells the words in GPT-2's alphabet."""
    steps: list[pre_tokenizers.PreTokenizer] = []
    has_gpt2 = patterns[-1] == GPT2
    for pattern in patterns[:-1] if has_gpt2 else patterns:
        if pattern == DIGIT:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        else:
            steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    # It knows GPT-2's pattern itself.
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=has_gpt2))
    return pre_tokenizers.Sequence(steps)
