"""What is read of each family without the table? `python -m tests.models.derived` writes it to docs/inside/families.md.

Every family is tried by its template alone (dialect `derived`), beside what the page says of it by the table. With
`--further FOLDER` also families that no row was made for, whose templates lie in this folder under the names of
`FURTHER`; where they come from is said there.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from hashlib import blake2b
from pathlib import Path

from segue.dialects.choose import derived_dialect
from segue.dialects.family import TokenDialect
from segue.vocabularies.load import vocabulary_from_file
from tests.models import assets
from tests.models.cells import ROOT_AT, Model
from tests.models.families import (
    ARGS,
    BY_NAME,
    DEEPSEEK,
    LLAMA3_1,
    NEMO,
    QWEN3,
    THINK,
    THINKING,
    ModelFamily,
    _write_folder,
    model_folder,
)
from tests.models.judge import Judge, date_of
from tests.models.matrix import COLUMNS, FAILS, HOLDS, Result, on_page, tried

PAGE = assets.ROOT / "docs" / "inside" / "families.md"
BETWEEN = re.compile(r"(<!-- derived -->\n).*?(<!-- end of derived -->)", re.DOTALL)
FURTHER_BETWEEN = re.compile(r"(<!-- further -->\n).*?(<!-- end of further -->)", re.DOTALL)
VLLM = "vllm-project+vllm-examples_tool_chat_template_"
LLAMA_CPP = "ggml-org+llama.cpp-models_templates_"
TRL = "huggingface+trl-trl_chat_templates_"
HUB_JS = "huggingface+huggingface.js-packages_ollama-utils_"
XINFERENCE = "xorbitsai+inference-llm_family_"
MODEL_SERVER = "openvinotoolkit+model_server-"
GEMMA3 = "gemma3"
GLM = ("[gMASK]", "<sop>")
GLM_ENDS = ("<|user|>", "<|observation|>")
# Templates of public repositories: `vllm-project/vllm` (examples) at a014e35f, `ggml-org/llama.cpp` (models/templates)
# at b21e4de7, `ikawrakow/ik_llama.cpp` at 8337e4cd, `huggingface/trl` at f2cd5771, `openvinotoolkit/model_server` at
# 7e4df0c7, `RkFeeder/LG-AI-Research` at 022e5336. Of the third set, too: `lightseekorg/smg` at 73da68ca,
# `axolotl-ai-cloud/axolotl` at 067b021c, `huggingface/huggingface.js` (chat-template-automap.ts) at fe42e680,
# `xorbitsai/inference` (llm_family.json) at 7ecec16b; `vllm-project/vllm` also at c40063ef, 85fce11e and 0676dfcb,
# `ggml-org/llama.cpp` at 5ff3a7fc and 969368ae.
FURTHER = (
    ModelFamily("FunctionGemma", f"{VLLM}functiongemma", GEMMA3, end="<end_of_turn>",
                texts=("<start_function_call>", "<end_function_call>", "<escape>")),
    ModelFamily("Granite 20B FC", f"{VLLM}granite_20b_fc", QWEN3, end="<|endoftext|>", texts=("<function_call>",)),
    ModelFamily("Granite 3.0", f"{VLLM}granite", QWEN3, end="<|end_of_text|>"),
    ModelFamily("Hunyuan A13B", f"{VLLM}hunyuan_a13b", QWEN3, begin="<|startoftext|>", end="<|eos|>"),
    ModelFamily("InternLM2", f"{VLLM}internlm2_tool", QWEN3, begin="<s>", end="<|im_end|>"),
    ModelFamily("Llama 3.2, pythonic", f"{VLLM}llama3.2_pythonic", LLAMA3_1, end="<|eot_id|>"),
    ModelFamily("Llama 4, JSON", f"{VLLM}llama4_json", LLAMA3_1, end="<|eot|>", ends=("<|eom|>",)),
    ModelFamily("Llama 4, pythonic", f"{VLLM}llama4_pythonic", LLAMA3_1, end="<|eot|>"),
    ModelFamily("ToolACE", f"{VLLM}toolace", LLAMA3_1, end="<|eot_id|>"),
    ModelFamily("xLAM Llama", f"{VLLM}xlam_llama", LLAMA3_1, end="<|eot_id|>"),
    ModelFamily("xLAM Qwen", f"{VLLM}xlam_qwen", QWEN3, end="<|im_end|>"),
    ModelFamily("Phi-4 mini", f"{VLLM}phi4_mini", QWEN3, end="<|end|>"),
    ModelFamily("Muse Glimmer", f"{VLLM}muse_glimmer", QWEN3, begin="<|begin_of_text|>", end="<|eot|>",
                ends=("<|eom|>",)),
    ModelFamily("Gemma 3, pythonic", f"{VLLM}gemma3_pythonic", GEMMA3, end="<end_of_turn>"),
    ModelFamily("Firefunction 2", f"{LLAMA_CPP}fireworks-ai-llama-3-firefunction-v2", LLAMA3_1, end="<|eot_id|>"),
    ModelFamily("Functionary 3.1", f"{LLAMA_CPP}meetkai-functionary-medium-v3.1", LLAMA3_1, end="<|eot_id|>",
                ends=("<|eom_id|>",)),
    ModelFamily("Functionary 3.2", f"{LLAMA_CPP}meetkai-functionary-medium-v3.2", LLAMA3_1, end="<|eot_id|>"),
    ModelFamily("Cohere 2 MoE", f"{LLAMA_CPP}Cohere2MoE", QWEN3, begin="<BOS_TOKEN>", end="<|END_OF_TURN_TOKEN|>"),
    ModelFamily("Apriel 1.5", f"{LLAMA_CPP}unsloth-Apriel-1.5", QWEN3, end="<|end|>"),
    ModelFamily("MiniCPM-V 4.5", "vllm-project+vllm-vllm_transformers_utils_chat_templates_template_minicpmv45",
                QWEN3, end="<|im_end|>", texts=("<think>", "</think>")),
    # Taken later than those above, when what these had shown was mended.
    ModelFamily("GLM-5.2", "ikawrakow+ik_llama.cpp-models_templates_GLM-5.2", QWEN3, end="<|endoftext|>",
                ends=GLM_ENDS, specials=GLM, texts=ARGS),
    ModelFamily("EXAONE 4", "RkFeeder+LG-AI-Research-exaone_baseline_chat_template", QWEN3, end="[|endofturn|]",
                specials=("[|user|]", "[|assistant|]", "[|system|]", "[|tool|]"), texts=THINK),
    ModelFamily("Qwen3.6", f"{MODEL_SERVER}extras_chat_template_examples_chat_template_qwen36", QWEN3,
                end="<|im_end|>"),
    ModelFamily("Qwen3-VL", f"{MODEL_SERVER}src_test_llm_chat_templates_chat_template_qwen3vl", QWEN3,
                end="<|im_end|>"),
    ModelFamily("Qwen3 2507", f"{TRL}qwen3_instruct_2507", QWEN3, end="<|im_end|>"),
    ModelFamily("Mistral 7B v0.3", f"{MODEL_SERVER}src_test_llm_chat_templates_chat_template_mistral7b_v03", NEMO),
    ModelFamily("Mistral 3", f"{VLLM}mistral3", NEMO),
    ModelFamily("GigaChat 3", f"{LLAMA_CPP}GigaChat3-10B-A1.8B", QWEN3, begin="<s>", end="</s>"),
    ModelFamily("DeepSeek V3", f"{TRL}deepseekv3", DEEPSEEK, texts=THINK),
    ModelFamily("DeepSeek R1", f"{VLLM}deepseekr1", DEEPSEEK, texts=THINK),
    ModelFamily("DeepSeek V4 Flash", f"{LLAMA_CPP}deepseek-ai-DeepSeek-V4-Flash-0731", DEEPSEEK,
                texts=(*THINK, "｜DSML｜"), values=THINKING),
    ModelFamily("GLM-4.5", f"{TRL}glm4moe", QWEN3, end="<|endoftext|>", ends=GLM_ENDS, specials=GLM, texts=ARGS),
    ModelFamily("Nemotron 3 Super", f"{TRL}nemotron_3_super", QWEN3, end="<|im_end|>"),
    ModelFamily("Nemotron 3 Ultra", f"{TRL}nemotron_3_ultra", QWEN3, end="<|im_end|>"),
    ModelFamily("Tiny Aya", "huggingface+trl-examples_scripts_tiny_aya_chat_template", NEMO,
                end="<|END_OF_TURN_TOKEN|>"),
    ModelFamily("Laguna XS 2.1", f"{LLAMA_CPP}poolside-Laguna-XS-2.1", QWEN3, begin="〈|EOS|〉", end="</assistant>",
                specials=("<system>", "</system>", "<user>", "</user>", "<assistant>"), texts=ARGS),
    ModelFamily("Diffusion Gemma", f"{TRL}diffusion_gemma", GEMMA3, end="<turn|>", ends=("<|tool_response>",)),
    ModelFamily("Onyx", f"{MODEL_SERVER}extras_chat_template_examples_chat_template_onyx", QWEN3,
                begin="<|begin_of_text|>", end="<|eot|>", ends=("<|eom|>",)),
    ModelFamily("Hermes", f"{VLLM}hermes", LLAMA3_1, end="<|im_end|>", texts=("<tool_call>", "</tool_call>")),
    ModelFamily("Llama 3.2, JSON", f"{VLLM}llama3.2_json", LLAMA3_1, end="<|eot_id|>"),
    ModelFamily("Apriel 1.6", f"{LLAMA_CPP}Apriel-1.6-15b-Thinker-fixed", QWEN3, end="<|end|>"),
    # Taken later than those, when what both had shown was mended.
    ModelFamily("Kimi K2.5", "lightseekorg+smg-crates_tokenizer_tests_fixtures_kimi_k25_chat_template", QWEN3,
                end="<|im_end|>", texts=THINK),
    ModelFamily("MiroThinker", "ikawrakow+ik_llama.cpp-models_templates_MiroThinker", QWEN3, end="<|im_end|>"),
    ModelFamily("GigaChat 3.5", f"{LLAMA_CPP}GigaChat3.5", QWEN3, begin="<s>", end="</s>", texts=(*THINK, "｜GCML｜")),
    ModelFamily("Llama 3.3 Nemotron Super", f"{LLAMA_CPP}nvidia-Llama-3_3-Nemotron-Super-49B-v1_5", LLAMA3_1,
                end="<|eot_id|>"),
    ModelFamily("Mistral, parallel", f"{VLLM}mistral_parallel", NEMO),
    ModelFamily("Olmo 3", f"{VLLM}olmo3", QWEN3, end="<|im_end|>"),
    ModelFamily("MiniCPM3", f"{VLLM}minicpm3", QWEN3, end="<|im_end|>"),
    ModelFamily("HyperCLOVA X Think", f"{VLLM}hyperclovax_seed_think_14b", QWEN3, end="<|endofturn|>",
                ends=("<|stop|>",)),
    ModelFamily("Jamba", "axolotl-ai-cloud+axolotl-jamba", QWEN3, begin="<|startoftext|>", end="<|eom|>",
                specials=("<|bom|>", "<|user|>", "<|assistant|>", "<|system|>", "<|tool|>")),
    ModelFamily("Cogito", f"{HUB_JS}cogito_14b", QWEN3, end="<|im_end|>"),
    ModelFamily("Rnj-1", f"{HUB_JS}rnj-1_latest", LLAMA3_1, end="<|eot_id|>"),
    ModelFamily("DeepSeek V2.5", f"{HUB_JS}deepseek-v2.5_236b", DEEPSEEK),
    ModelFamily("Llama 4", f"{HUB_JS}llama4_latest", LLAMA3_1, end="<|eot|>", ends=("<|eom|>",)),
    ModelFamily("Qwen3.8", f"{XINFERENCE}qwen3.8", QWEN3, end="<|im_end|>"),
    ModelFamily("Qwen3.8 Max", f"{XINFERENCE}qwen3.8-max", QWEN3, end="<|im_end|>"),
    ModelFamily("GLM-5.1", f"{XINFERENCE}glm-5.1", QWEN3, end="<|endoftext|>", ends=GLM_ENDS, specials=GLM, texts=ARGS),
    ModelFamily("KAT-V1", f"{XINFERENCE}KAT-V1", QWEN3, end="<|im_end|>"),
    ModelFamily("Qwen2", f"{XINFERENCE}qwen2-instruct", QWEN3, end="<|im_end|>"),
    ModelFamily("DeepSeek R1 0528", f"{XINFERENCE}deepseek-r1-0528", DEEPSEEK, texts=THINK),
    ModelFamily("DeepSeek V3.2 Exp", f"{XINFERENCE}DeepSeek-V3.2-Exp", DEEPSEEK, texts=THINK, values=THINKING),
    ModelFamily("Qwen3 Omni", f"{XINFERENCE}Qwen3-Omni-Thinking", QWEN3, end="<|im_end|>"),
)  # fmt: skip


@dataclass
class DerivedModel(Model):
    """A family by its template alone; `folder` is where the templates of further families lie."""

    folder: Path | None = None

    @cached_property
    def files(self) -> Path:
        if self.folder is None:
            return model_folder(self.family.name)
        text = (self.folder / f"{self.family.template}.jinja").read_text()
        digest = blake2b(f"{self.family}{text}".encode(), digest_size=6).hexdigest()
        folder = assets.CACHE / "folders" / f"further-{digest}"
        if not (folder / "generation_config.json").exists():
            folder.mkdir(parents=True, exist_ok=True)
            source = assets.tokenizer_folder(self.family.tokenizer)
            _write_folder(folder, self.family, source, text)
        return folder

    @cached_property
    def judge(self) -> Judge:
        return Judge(self.files, date_of(ROOT_AT), self.family.values)

    @cached_property
    def dialect(self) -> TokenDialect:
        vocabulary = vocabulary_from_file(self.files)
        return derived_dialect(self.files, vocabulary, "", dict(self.family.values))


@dataclass(frozen=True)
class Row:
    """What came of a family by derivation."""

    name: str
    has_tools: bool
    results: Mapping[str, Result]
    refused: Mapping[str, str]

    @property
    def counted(self) -> tuple[int, int]:
        marks = [result.mark for result in self.results.values()]
        return marks.count(HOLDS), marks.count(HOLDS) + marks.count(FAILS)


def row_of(family: ModelFamily, folder: Path | None = None) -> Row:
    model = DerivedModel(family, folder=folder)
    results = {column: tried(model, column) for column in COLUMNS}
    try:
        derived = model.dialect.derived
        has_tools = model.takes_tools
    except Exception as wrong:
        return Row(family.name, False, results, {"start": str(wrong)})
    return Row(family.name, has_tools, results, derived.refused if derived else {})


def show(row: Row) -> None:
    held, all_of = row.counted
    print(f"{row.name:22} {held}/{all_of}", "" if row.has_tools else "(no calls)", flush=True)
    for column, result in row.results.items():
        if result.mark == FAILS:
            print(f"      {column}: {result.why[:400]}")
    for part, why in row.refused.items():
        print(f"      not used: {part}: {why[:400]}")


def by_table(cells: Mapping[str, str]) -> tuple[int, int]:
    marks = [cells.get(column, "") for column in COLUMNS]
    held = sum(mark.startswith("yes") for mark in marks)
    return held, held + marks.count(FAILS)


def table(rows: list[Row]) -> str:
    """Both side by side."""
    page = on_page()
    lines = ["| family | by the table | derived | not so by derivation |", "|---|---|---|---|"]
    sums = [0, 0, 0, 0]
    whole = [0, 0]
    calling = [row for row in rows if row.has_tools]
    for row in calling:
        listed, derived = by_table(page[row.name]), row.counted
        wrong = [column for column, result in row.results.items() if result.mark == FAILS]
        lines.append(
            f"| {row.name} | {listed[0]}/{listed[1]} | {derived[0]}/{derived[1]} | {', '.join(wrong)} |"
        )
        sums = [total + part for total, part in zip(sums, (*listed, *derived), strict=True)]
        whole[0] += listed[0] == listed[1]
        whole[1] += derived[0] == derived[1]
    lines += [
        f"| **{len(calling)} families** | {sums[0]}/{sums[1]}, {whole[0]} whole"
        f" | {sums[2]}/{sums[3]} ({sums[2] / sums[3]:.1%}), {whole[1]} whole ({whole[1] / len(calling):.0%}) | |",
        "",
    ]
    return "\n".join(lines)


def further_table(rows: list[Row]) -> str:
    lines = ["| family | cells | not so | not used, and why |", "|---|---|---|---|"]
    for row in rows:
        held, all_of = row.counted
        wrong = [column for column, result in row.results.items() if result.mark == FAILS]
        why = "; ".join(f"{part}: {text}" for part, text in row.refused.items()).replace("|", "\\|")
        why = re.sub(r"\s+", " ", why.replace("<", "&lt;"))[:220]
        lines.append(f"| {row.name} | {held}/{all_of} | {', '.join(wrong)} | {why} |")
    held = sum(row.counted[0] for row in rows)
    all_of = sum(row.counted[1] for row in rows)
    whole = sum(row.counted[0] == row.counted[1] for row in rows)
    lines += [
        f"| **{len(rows)} families** | {held}/{all_of} ({held / all_of:.1%}) | {whole} whole | |",
        "",
    ]
    return "\n".join(lines)


def write(between: re.Pattern[str], text: str) -> None:
    page = PAGE.read_text()
    PAGE.write_text(between.sub(lambda found: found[1] + text + found[2], page))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these families, and nothing is written")
    parser.add_argument("--further", type=Path, help="a folder with the templates of FURTHER")
    options = parser.parse_args()
    known = FURTHER if options.further else tuple(BY_NAME.values())
    families = [family for family in known if not options.names or family.name in options.names]
    rows = []
    with ProcessPoolExecutor(2) as pool:
        for row in pool.map(partial(row_of, folder=options.further), families):
            show(row)
            rows.append(row)
    text = further_table(rows) if options.further else table(rows)
    print(text)
    if not options.names:
        write(FURTHER_BETWEEN if options.further else BETWEEN, text)


if __name__ == "__main__":
    main()
