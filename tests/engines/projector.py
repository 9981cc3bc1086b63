"""Eyes for SmolLM2 that see nothing: a projector (mmproj) of meaningless numbers, in the shape that llama.cpp loads.

With it a REAL llama.cpp server takes images, cuts them into 16 patches, and caches them. What the model says of one is
noise.
"""

from __future__ import annotations

import random
import struct
from array import array
from math import prod
from pathlib import Path

WIDTH, HIDDEN, PATCH, SIZE, LAYERS, MODEL_WIDTH = 64, 128, 14, 56, 2, 576
# How many tokens an image is.
IMAGE_TOKENS = (SIZE // PATCH) ** 2


def write_projector(path: Path) -> Path:
    """A GGUF file, version 3: metadata, then tensors of 32-bit floats at multiples of 32 bytes."""
    settings = _settings()
    tensors = _tensors()
    head, offset = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(settings)), 0
    head += b"".join(_text(name) + value for name, value in settings.items())
    for name, shape in tensors.items():
        # The fastest dimension first; 0: 32-bit floats.
        head += _text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], 0, offset)
        offset += -(-4 * prod(shape) // 32) * 32
    numbers = random.Random(7)
    pattern = array("f", (numbers.uniform(-0.1, 0.1) for _ in range(1_009)))
    body = (pattern * (offset // 4 // len(pattern) + 1)).tobytes()[:offset]
    path.write_bytes(head + bytes(-len(head) % 32) + body)
    return path


def _settings() -> dict[str, bytes]:
    numbers = {
        "image_size": SIZE,
        "patch_size": PATCH,
        "embedding_length": WIDTH,
        "feed_forward_length": HIDDEN,
        "projection_dim": MODEL_WIDTH,
        "block_count": LAYERS,
        "attention.head_count": 4,
    }
    halves = struct.pack("<IIQ3f", 9, 6, 3, 0.5, 0.5, 0.5)
    return {
        "general.architecture": struct.pack("<I", 8) + _text("clip"),
        "clip.has_vision_encoder": struct.pack("<I?", 7, True),
        "clip.projector_type": struct.pack("<I", 8) + _text("mlp"),
        "clip.use_gelu": struct.pack("<I?", 7, True),
        "clip.vision.attention.layer_norm_epsilon": struct.pack("<If", 6, 1e-5),
        "clip.vision.image_mean": halves,
        "clip.vision.image_std": halves,
        **{f"clip.vision.{name}": struct.pack("<II", 4, value) for name, value in numbers.items()},
    }


def _tensors() -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {
        "v.patch_embd.weight": (WIDTH, 3, PATCH, PATCH),
        "v.class_embd": (WIDTH,),
        "v.position_embd.weight": (IMAGE_TOKENS + 1, WIDTH),
        "v.pre_ln.weight": (WIDTH,),
        "v.pre_ln.bias": (WIDTH,),
        "mm.0.weight": (MODEL_WIDTH, WIDTH),
        "mm.0.bias": (MODEL_WIDTH,),
        "mm.2.weight": (MODEL_WIDTH, MODEL_WIDTH),
        "mm.2.bias": (MODEL_WIDTH,),
    }
    for layer in range(LAYERS):
        for name, shape in {
            **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_out"), (WIDTH, WIDTH)),
            **dict.fromkeys(("ln1", "ln2"), (WIDTH,)),
            "ffn_up": (HIDDEN, WIDTH),
            "ffn_down": (WIDTH, HIDDEN),
        }.items():
            tensors[f"v.blk.{layer}.{name}.weight"] = shape
            tensors[f"v.blk.{layer}.{name}.bias"] = shape[:1]
    return tensors


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
