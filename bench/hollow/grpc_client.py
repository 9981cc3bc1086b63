"""How is a vLLM asked over gRPC? A conversation in a process of its own, with vLLM's packages and nothing of Segue.

    python grpc_client.py python|rust PORT MODEL OUTPUT_TOKENS

In: a line of JSON for each turn, the ids that are new. Out: a line of JSON, bytes sent and received, and the seconds
to the first message with a token and to the end. vLLM has two services: that of `--grpc` (`VllmEngine` of the package
smg-grpc-servicer), and that of its Rust front end (`--grpc-port`, `vllm.Inference`). Of their messages only what is
asked for here is written, by hand: a field is its number, its kind and its value. A message is made before the clock
starts.
"""

from __future__ import annotations

import json
import struct
import sys
import time
from collections.abc import Iterable

import grpc

TEMPERATURE = 1.0
# A message of the Rust front end that begins so has outputs; the one before it counts the prompt.
OUTPUTS = b"\x12"


def varint(number: int) -> bytes:
    """A whole number, seven bits a byte."""
    data = bytearray()
    while number > 0x7F:
        data.append(number & 0x7F | 0x80)
        number >>= 7
    data.append(number)
    return bytes(data)


def number(field: int, value: int) -> bytes:
    """A field with a whole number."""
    return varint(field << 3) + varint(value)


def fraction(field: int, value: float) -> bytes:
    """A field with a float."""
    return varint(field << 3 | 5) + struct.pack("<f", value)


def block(field: int, data: bytes) -> bytes:
    """A field with text or a message."""
    return varint(field << 3 | 2) + varint(len(data)) + data


def packed(field: int, ids: Iterable[int]) -> bytes:
    """A field with many whole numbers."""
    return block(field, b"".join(map(varint, ids)))


def python_request(name: str, model: str, ids: Iterable[int], tokens: int) -> bytes:
    """`vllm.grpc.engine.GenerateRequest`: request_id, tokenized, sampling_params, stream."""
    sampling = fraction(1, TEMPERATURE) + fraction(2, 1.0) + number(8, tokens) + number(15, 1)
    return block(1, name.encode()) + block(2, packed(2, ids)) + block(4, sampling) + number(5, 1)


def rust_request(name: str, model: str, ids: Iterable[int], tokens: int) -> bytes:
    """`vllm.GenerateRequest`: request_id, model, token_ids, temperature, stopping, response (ids and no text)."""
    return b"".join(
        (
            *(block(1, name.encode()), block(2, model.encode()), block(4, packed(1, ids))),
            *(fraction(5, TEMPERATURE), block(8, number(1, tokens))),
            block(9, number(4, 0) + number(5, 1)),
        )
    )


KINDS = {
    "python": ("/vllm.grpc.engine.VllmEngine/Generate", python_request),
    "rust": ("/vllm.Inference/GenerateStream", rust_request),
}


def main(kind: str, port: str, model: str, tokens: str) -> None:
    """A turn for each line."""
    path, request = KINDS[kind]
    channel = grpc.insecure_channel(
        f"127.0.0.1:{port}",
        options=[("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)],
    )
    generate = channel.unary_stream(path)
    ids: list[int] = []
    for turn, line in enumerate(sys.stdin):
        ids += json.loads(line)
        message = request(f"{port}-{id(ids)}-{turn}", model, ids, int(tokens))
        began = time.perf_counter()
        first, received = 0.0, 0
        for answer in generate(message):
            received += len(answer)
            if not first and (kind == "python" or answer.startswith(OUTPUTS)):
                first = time.perf_counter() - began
        turn_s = time.perf_counter() - began
        print(json.dumps([len(message), received, first, turn_s]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
