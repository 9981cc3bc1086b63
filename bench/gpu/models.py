"""Which models does the GPU serve? Folders that vLLM loads, made on the spot from what is small enough to carry.

    python -m bench.gpu.models written|small|big FOLDER TOKENIZER_FOLDER
    python -m bench.gpu.models real FOLDER TOKENIZER_FOLDER FILE.gguf

`written` has the dimensions of Qwen3-0.6B and Qwen3's vocabulary. Its weights are random, but for two tables: whatever
was read last, the likeliest next token is the next one of `ANSWER`, round and round. So every way gets the same answer,
the answer is text that encodes back to the same ids, and n-gram speculation guesses right nearly always.
`small` is the same with fewer layers and fewer keys, for speed. `big` has the dimensions of Qwen3-8B: 16 GB, which a
folder in memory takes and gives fastest.
`real` is SmolLM2-135M from its GGUF, with positions stretched to the same context, which it was not trained for. The
rows of the special tokens in its head are zero, so that no turn ends before its limit.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from bench.gpu.servers import CONTEXT_TOKENS

# No token occurs twice.
ANSWER = (
    " Then we read another file, look at each line that uses this name and change what must be changed below it;"
    " after all tests run again they show if the result was right."
)
# Small, so that what the layers add does not hide which token was read.
WEIGHT_DEVIATION = 0.004
SPECIAL_TOKENS = 17
# What differs from Qwen3-0.6B.
SIZES: dict[str, dict[str, int]] = {
    "written": {},
    "small": {"num_hidden_layers": 12, "num_key_value_heads": 2},
    "big": {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
    },
}


def written(folder: Path, tokenizer_folder: Path, size: dict[str, int]) -> None:
    """The model that writes `ANSWER`."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_folder / "tokenizer.json"))
    answer = tokenizer.encode(ANSWER, add_special_tokens=False).ids
    assert len(set(answer)) == len(answer), "a token that occurs twice would have two successors"
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1)

    def table(rows: int, columns: int, deviation: float = WEIGHT_DEVIATION) -> torch.Tensor:
        made = torch.randn(rows, columns, device=device, dtype=torch.bfloat16) * deviation
        # The card may be full of engines meanwhile.
        return made.cpu()

    config = _shape(tokenizer.get_vocab_size()) | size
    hidden = config["hidden_size"]
    # All tokens have something in common, which is what the head takes for "begin"; those of the answer do not.
    common = table(1, hidden, 1.0)
    embedding = table(config["vocab_size"], hidden, 0.3) + common
    embedding[answer] = table(len(answer), hidden, 1.0)
    head = torch.zeros_like(embedding)
    head[answer[1:]] = embedding[answer[:-1]]
    head[answer[0]] = embedding[answer[-1]] + common[0]
    weights = {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    weights["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for layer in range(config["num_hidden_layers"]):
        for name, size in _layer(config).items():
            ones = len(size) == 1
            made = torch.ones(*size, dtype=torch.bfloat16) if ones else table(*size)
            weights[f"model.layers.{layer}.{name}.weight"] = made
    _save(folder, tokenizer_folder, config, weights)


def _shape(vocabulary: int) -> dict[str, Any]:
    """Qwen3-0.6B's."""
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": False,
        "bos_token_id": 151643,
        "eos_token_id": 151645,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "max_position_embeddings": CONTEXT_TOKENS,
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": vocabulary,
    }


def _layer(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and size of each table of a layer."""
    hidden, inner, width = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    return {
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "self_attn.q_norm": (width,),
        "self_attn.k_norm": (width,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }


def real(folder: Path, tokenizer_folder: Path, gguf: Path) -> None:
    """SmolLM2 with a longer context and without end marks; it talks by Qwen3's template, which has tools."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    )
    weights = {name: value.contiguous() for name, value in model.state_dict().items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    weights["lm_head.weight"][:SPECIAL_TOKENS] = 0
    config = model.config.to_dict()
    trained = 8192
    config["rope_parameters"] = {
        "rope_theta": 100_000.0,
        **(config.get("rope_parameters") or {}),
        "rope_type": "yarn",
        "factor": CONTEXT_TOKENS / trained,
        "original_max_position_embeddings": trained,
    }
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "dtype": "bfloat16",
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    config.pop("quantization_config", None)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    named = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    path.write_text(json.dumps(json.loads(path.read_text()) | named))
    template = json.loads((tokenizer_folder / "tokenizer_config.json").read_text())["chat_template"]
    (folder / "chat_template.jinja").write_text(template)


def _save(
    folder: Path, tokenizer_folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer_folder / name, folder / name)
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def main() -> None:
    """Make one."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.models", description=__doc__)
    parser.add_argument("kind", choices=(*SIZES, "real"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("tokenizer_folder", type=Path)
    parser.add_argument("gguf", type=Path, nargs="?")
    options = parser.parse_args()
    if options.kind == "real":
        real(options.folder, options.tokenizer_folder, options.gguf)
    else:
        written(options.folder, options.tokenizer_folder, SIZES[options.kind])


if __name__ == "__main__":
    main()
