"""Records how Mistral's own library, `mistral-common` 1.13.0, writes random conversations.

Run it with that package installed: `python tests/golden/mistral/record.py`. Nothing else needs it. `tekken.json` beside
it is the beginning of the vocabulary that comes with the library (the first 1,200 ranks of `tekken_240911.json`: any
beginning of such a file is a vocabulary) with the special tokens of format v13 before it.
"""

import json
import random
from pathlib import Path

from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.protocol.instruct.tool_calls import Tool
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer

HERE = Path(__file__).parent
COUNT = 210
WORDS = [
    "Hello", " world", "\n", "\n\n", " ", "  ", "漢", "😀", "é", "12", "345", ".", "<", "\t", "\\n", "[INST]", "</s>",
    '{"a": 1}', "'s", "def f():\n    pass", "<b>", "&", '"', "```json\n", "[/THINK]", "[ARGS]",
]  # fmt: skip
TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
LOOK = {"type": "object", "properties": {"q": {"type": "string"}}}
TOOLS = [
    {"name": "look", "description": "Looks things up.", "parameters": LOOK},
    {"name": "patch", "description": "Applies a patch.", "parameters": TEXT},
    {"name": "read", "description": "", "parameters": {}},
]


def words(rng: random.Random) -> str:
    return "".join(rng.choices(WORDS, k=rng.randint(0, 3)))


def turn(rng: random.Random, ids: list[str]) -> dict[str, object]:
    text = words(rng) or ("" if ids else "So.")
    said: dict[str, object] = {"role": "assistant", "content": text}
    if rng.random() < 0.4:
        chunks = [{"type": "thinking", "thinking": words(rng) + "Hm."}]
        said["content"] = [*chunks, *([{"type": "text", "text": text}] if text else [])]
    if ids:
        said["tool_calls"] = [{"id": id, "function": called(rng)} for id in ids]
    return said


def called(rng: random.Random) -> dict[str, str]:
    name = rng.choice(["look", "patch", "read"])
    told: dict[str, object] = {"input": words(rng)} if name == "patch" else {"q": words(rng)}
    return {"name": name, "arguments": json.dumps(told, ensure_ascii=False)}


def conversation(rng: random.Random) -> list[dict[str, object]]:
    talk: list[dict[str, object]] = [
        {"role": "system", "content": words(rng) + "Be."} for _ in range(rng.choice([0, 0, 1, 2]))
    ]
    for _ in range(rng.choice([1, 1, 2])):
        for _ in range(rng.choice([1, 1, 1, 2])):
            talk.append({"role": "user", "content": words(rng)})
        for _ in range(rng.choice([0, 0, 1, 1, 2])):
            ids = ["a", "b", "c"][: rng.randint(1, 3)]
            talk.append(turn(rng, ids))
            talk += [{"role": "tool", "tool_call_id": id, "content": words(rng)} for id in ids]
        talk.append(turn(rng, []))
    talk.pop()
    return talk


def main() -> None:
    library = MistralTokenizer.from_file(str(HERE / "tekken.json"))
    rng = random.Random(13)
    recorded = []
    for _ in range(COUNT):
        talk = conversation(rng)
        offered = rng.sample(TOOLS, rng.choice([0, 1, 1, 2]))
        tools = [Tool.model_validate({"function": one}) for one in offered] or None
        request = ChatCompletionRequest.model_validate({"messages": talk, "tools": tools})
        ids = library.encode_chat_completion(request).tokens
        recorded.append({"talk": talk, "tools": [one["name"] for one in offered], "ids": ids})
    lines = [json.dumps(one, ensure_ascii=False, separators=(",", ":")) for one in recorded]
    (HERE / "conversations.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
