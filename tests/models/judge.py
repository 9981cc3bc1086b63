"""What does a model's own chat template write? The usual libraries' way, and none of the project's code.

The judge runs the template (Jinja) over a whole conversation, cold, and tokenizes what it writes with the model's own
tokenizer. What a model would say is cut out of that too: the template is run over an answer, and what stands between
its cue and its end is what was sampled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
from tokenizers import Tokenizer

Chat = list[dict[str, Any]]
THOUGHT_FIELDS = ("reasoning_content", "reasoning", "thinking")
# An answer without words: some templates want an empty text, some none, some no field at all.
NO_WORDS: tuple[dict[str, Any], ...] = ({"content": ""}, {"content": None}, {})


THINK = "<think>"
MARK = {"type": "string", "description": "Any."}
PARAMETERS = {"type": "object", "properties": {"mark": MARK}, "required": ["mark"]}
PROBE = {
    "type": "function",
    "function": {"name": "probe", "description": "Probes.", "parameters": PARAMETERS},
}


class Refused(Exception):
    """The template does not take this conversation."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`: marks what the model says in training, and writes it as it is."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class Judge:
    """A model's own template and tokenizer."""

    def __init__(self, folder: Path, date: datetime, values: Mapping[str, Any] = {}) -> None:
        config = json.loads((folder / "tokenizer_config.json").read_text())
        self.text: str = config["chat_template"]
        self._values = {
            "bos_token": config["bos_token"] or "",
            "eos_token": config["eos_token"],
            **values,
        }
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        stops = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
        self.ends = [self.tokenizer.id_to_token(id) for id in stops]
        environment = jinja2.sandbox.SandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = date.strftime
        self._template = environment.from_string(self.text)

    def write(self, chat: Chat, tools: object = None, *, is_cued: bool = True) -> str:
        """The whole conversation as text."""
        try:
            return self._template.render(
                messages=chat, tools=tools, add_generation_prompt=is_cued, **self._values
            )
        except Exception as wrong:
            raise Refused(str(wrong)) from wrong

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def shown(self, ids: Sequence[int]) -> str:
        """These ids as text, special tokens by name."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=False)
        return text

    # --- what a model says ---

    @cached_property
    def thought_field(self) -> str | None:
        """Under which name the template takes a thought; None: it stands in the text, or there is none."""
        return next((field for field in THOUGHT_FIELDS if _reads(self.text, field)), None)

    @cached_property
    def is_thinking(self) -> bool:
        """Whether the model thinks: its cue begins a thought, or the template writes one after it."""
        if self.thought_field is None and "</think>" not in self.text:
            return False
        chat: Chat = [{"role": "user", "content": "Hi"}]
        cued = self.write(chat, [PROBE])
        calls = [{"id": "abcdefghi", "name": "probe", "arguments": {"mark": "value"}}]
        spoken = [self.write([*chat, self._answer("Yes.", "Hm.")], [PROBE], is_cued=False)]
        if self.writes_calls:
            called = self._answer("", "Hm.", calls)
            spoken.append(self.write([*chat, called], [PROBE], is_cued=False))
        return self.begins_thought or any(one.startswith(cued) and "Hm." in one for one in spoken)

    @cached_property
    def begins_thought(self) -> bool:
        """Whether the cue begins one."""
        return self.write([{"role": "user", "content": "Hi"}], [PROBE]).rstrip().endswith(THINK)

    def begins_thought_after(self, chat: Chat, tools: object) -> bool:
        """Whether the cue of this conversation begins one: some templates have none after a tool's output."""
        return self.begins_thought and self.write(chat, tools).rstrip().endswith(THINK)

    def answer(
        self,
        words: str = "",
        thought: str = "",
        calls: Sequence[dict[str, Any]] = (),
        *,
        begins_thought: bool | None = None,
    ) -> dict[str, Any]:
        """An answer as the template expects it. A model whose cue begins a thought has one in each answer."""
        begins = self.begins_thought if begins_thought is None else begins_thought
        if not self.is_thinking or (self.begins_thought and not begins):
            thought = ""
        elif not thought and begins:
            thought = "Hm."
        return self._answer(words, thought, calls)

    def _answer(
        self, words: str, thought: str, calls: Sequence[dict[str, Any]] = ()
    ) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant"}
        if thought and "[THINK]" in self.text:
            thoughts = [{"type": "thinking", "thinking": thought}]
            message["content"] = [*thoughts, {"type": "text", "text": words}] if words else thoughts
        elif thought and self.thought_field is not None:
            message[self.thought_field] = thought
        elif thought and not calls:
            words = f"<think>\n{thought}\n</think>\n\n{words}"
        if "content" not in message:
            message |= {"content": words} if words else self._no_words
        if calls:
            message["tool_calls"] = [self.call(one) for one in calls]
        return message

    def call(self, one: dict[str, Any]) -> dict[str, Any]:
        arguments = (
            json.dumps(one["arguments"], ensure_ascii=False)
            if self._wants_text
            else one["arguments"]
        )
        function = {"name": one["name"], "arguments": arguments}
        return {"type": "function", "id": one["id"], "function": function}

    @cached_property
    def writes_calls(self) -> bool:
        """Whether the template has words for a call at all."""
        return bool(self._ways(as_text=False) or self._ways(as_text=True))

    @cached_property
    def _wants_text(self) -> bool:
        """Whether the template joins the arguments as text, rather than writing an object."""
        return not self._ways(as_text=False)

    @cached_property
    def _no_words(self) -> dict[str, Any]:
        return next(iter(self._ways(as_text=self._wants_text)), NO_WORDS[0])

    def _ways(self, *, as_text: bool) -> list[dict[str, Any]]:
        """How an answer without words may be given, that which writes least first."""
        arguments: Any = {"mark": "value"}
        function = {"name": "probe", "arguments": json.dumps(arguments) if as_text else arguments}
        called = {
            "role": "assistant",
            "tool_calls": [{"type": "function", "id": "abcdefghi", "function": function}],
        }
        found: list[tuple[int, dict[str, Any]]] = []
        for words in NO_WORDS:
            try:
                said = self.write(
                    [{"role": "user", "content": "Hi"}, {**called, **words}], [PROBE], is_cued=False
                )
            except Refused:
                continue
            said = said.partition("Hi")[2]
            if "value" in said and not any(sign in said for sign in ("{'mark'", '\\"mark', "None")):
                found.append((len(said), words))
        return [words for _, words in sorted(found, key=lambda one: one[0])]

    def sampled(self, chat: Chat, answer: dict[str, Any], following: Chat, tools: object) -> str:
        """What the model says after the cue of this conversation to give this answer, with the token that ends it."""
        cued = self.write(chat, tools)
        spoken = self.write([*chat, answer], tools, is_cued=False)
        if spoken.startswith(cued):
            said = spoken[len(cued) :]
        else:
            asked = str(chat[-1]["content"])
            said = self._after_cue(cued, self.write(chat, tools, is_cued=False), spoken, asked)
        if cued.rstrip().endswith(THINK) and "</think>" not in said:
            said = f"Hm.\n</think>\n\n{said.lstrip()}"
        if said.startswith(THINK) and cued.rstrip().endswith(THINK):
            said = said.removeprefix(THINK).lstrip("\n")
        if chat[-1]["role"] == "user" and chat[-1]["content"] in said:
            raise Refused("the template writes this answer without its cue")
        if cued == self.write(chat, tools, is_cued=False):
            # It always writes its cue, after an answer too.
            stops = [said.index(end) + len(end) for end in self.ends if end in said]
            said = said[: min(stops, default=None)]
        ended = self._ended(said)
        return ended if ended is not None else said + self._end_before(chat, following, tools)

    def _ended(self, said: str) -> str | None:
        """The answer up to and with the token that ends it; None: the template leaves it open."""
        for end in sorted(self.ends, key=len, reverse=True):
            before, found, after = said.rpartition(end)
            if found and not after.strip():
                # Some templates put one more after the last answer.
                return self._ended(before) or before + end
        return None

    def _end_before(self, chat: Chat, following: Chat, tools: object) -> str:
        """With which token the model ends an answer that is left open: the one by which what follows it begins."""
        plain = [*chat, {"role": "assistant", "content": "plain"}]
        _, found, rest = self.write([*plain, *following], tools, is_cued=False).rpartition("plain")
        assert found
        return next((end for end in self.ends if rest.lstrip().startswith(end)), self.ends[0])

    @staticmethod
    def _after_cue(cued: str, bare: str, spoken: str, asked: str) -> str:
        """The template writes the conversation before an answer otherwise than before its cue: look for the cue."""
        if bare == cued and "<" in cued:
            # It always writes its cue: an answer begins where both texts part, at a mark.
            letters = zip(cued, spoken, strict=False)
            parted = next(n for n, (one, other) in enumerate(letters) if one != other)
            at = spoken.rindex("<", 0, parted)
            if spoken.endswith(cued[at:]):
                return spoken[at:]
        cue = cued.removeprefix(bare) if cued.startswith(bare) else ""
        if cue.rstrip().endswith(THINK):
            # What the cue begins is dropped at once.
            said = spoken.rpartition(cue[: cue.rindex(THINK)])[2].lstrip()
            return f"Hm.\n{said}" if said.startswith("</think>") else f"Hm.\n</think>\n\n{said}"
        said = spoken.removeprefix(bare).lstrip()
        if cue.strip() and spoken.startswith(bare) and said.startswith(cue.strip()):
            # In history it has other white space.
            return said.removeprefix(cue.strip()).lstrip()
        if spoken.startswith(bare) and cue not in spoken.removeprefix(bare):
            # In history an answer stands without its cue.
            return spoken.removeprefix(bare)
        for mark in (cue, cue[cue.rfind("<") :] if "<" in cue else ""):
            if mark and mark in spoken:
                return spoken.rpartition(mark)[2]
        _, found, after = cued.rpartition(asked or "\0")
        if found and f"{asked}{after}" in spoken:
            # The question is written otherwise, once it is answered.
            return spoken.rpartition(f"{asked}{after}")[2]
        raise Refused(f"the template's cue {cue!r} is not how an answer begins in its history")


def _reads(template: str, field: str) -> bool:
    return any(
        mark in template
        for mark in (
            f".{field}",
            f"['{field}']",
            f'["{field}"]',
            f"'{field}' in",
            f'"{field}" in',
            f".get('{field}",
        )
    )


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _refuse(why: str) -> str:
    raise jinja2.TemplateError(why)


def date_of(at: int) -> datetime:
    return datetime.fromtimestamp(at, UTC)
