"""How does a model write that brings nothing but its chat template? As the template says.

The template (Jinja, from a tokenizer folder or a GGUF) is run in a sandbox over the whole conversation, once each time.
Its text is cut at the special tokens that it contains, and the pieces are encoded one by one. A prompt that was kept
knows the digest of its text: if the new text begins with that text, its tokens are taken, and only what is behind them
is cut and tokenized. So what is rendered is all, and what is tokenized is new.

Two tricks keep promises that a template cannot know of. What somebody wrote is shielded before it goes in: a letter
that is in no text breaks every special token in it, and is taken out again when the piece is encoded. And what the
model has sampled goes in as a placeholder, for which its kept ids stand in the end.

What a template has no place for (tools, calls, outputs, reasoning) is written into the text, as Hermes models have it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from importlib import import_module
from typing import Any
from zlib import crc32

from segue.dialects.chatml import CALL, CALLED, JOINS, content_of, told_tools
from segue.dialects.grammar import UNQUOTE, Held, HeldReader, held_offer, named
from segue.dialects.offers import added_by, call_schema, definition_of, forced, format_schema
from segue.dialects.parts import Part, dumps, is_object, parts_of
from segue.dialects.speech import THINK, THOUGHT, Speech, TextReader
from segue.dialects.vocabulary import Vocabulary
from segue.dialects.warm import kept_ids
from segue.errors import InvalidRequest, ServerFault
from segue.turn.values import (
    NO_IDS,
    Grammar,
    Head,
    IdArray,
    Rendered,
    Round,
    Scene,
    Tokens,
    Warm,
    id_array,
)
from segue.wire.items import AdditionalTools, Item

# A change of this file that changes what kept ids mean needs a new number.
VERSION = "template1"
# Noncharacters: Unicode promises that no text has them; one that does all the same is escaped.
SHIELD, KEPT_BEFORE, KEPT_BEHIND, ESCAPE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
OURS = re.compile("[\ufdd0-\ufdd3]")
ESCAPED = re.compile("\ufdd3([0-3])")
# Ends of a turn in the families that we know of; those that a vocabulary has are its stops.
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "</s>",
    "<|return|>", "<|call|>", "<|endoftext|>", "<|end_of_text|>", "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
)  # fmt: skip

# Special tokens that stand before a call, or before a list of them.
SIGNALS = ("[TOOL_CALLS]", "<|python_tag|>")
NINE_LETTERS = re.compile(r"length\s*!=\s*9\b")

Chat = list[dict[str, object]]
# How many of the last prompts are looked at; a template that forgets rewrites the last ones.
KEPT_PROMPTS_MAX = 4
# No special token is longer.
SPECIAL_CHARS_MAX = 256


@dataclass(frozen=True, slots=True)
class Template:
    """A chat template, and the two tokens that it may ask for by name."""

    text: str
    begin: str = ""
    end: str = ""


@dataclass(frozen=True, slots=True)
class Written(Tokens):
    """A prompt that knows of which text it was made, by its length and digest: what begins with the same text begins
    with these tokens."""

    chars: int
    digest: bytes


NOTHING_WRITTEN = Written(None, NO_IDS, 0, 0, blake2b(digest_size=16).digest())


class TemplateRunner:
    """Runs a chat template as the usual libraries do. Needs the optional package `jinja2`."""

    def __init__(self, template: Template) -> None:
        try:
            sandbox = import_module("jinja2.sandbox")
        except ImportError as missing:
            raise ServerFault(
                "To run this model's chat template, `pip install jinja2`."
            ) from missing
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        self._names = {"bos_token": template.begin, "eos_token": template.end}
        try:
            self._run = environment.from_string(template.text).render
        except Exception as wrong:
            raise ServerFault(f"The model's chat template cannot be read: {wrong}") from wrong

    def run(self, messages: Chat, tools: object, root_at: int, *, is_cued: bool) -> str:
        """The conversation as text. A template may refuse one, for example where roles do not alternate."""
        try:
            found: str = self._run(
                messages=messages,
                tools=tools,
                add_generation_prompt=is_cued,
                strftime_now=datetime.fromtimestamp(root_at, UTC).strftime,
                **self._names,
            )
        except Exception as wrong:
            raise InvalidRequest(
                f"The model's chat template refuses this conversation: {wrong}", param="input"
            ) from wrong
        return found


def _tojson(value: object, indent: int | None = None, **_: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(why: str) -> str:
    raise ValueError(why)


class TemplateDialect:
    """A `Dialect` for token engines and any model with a chat template."""

    def __init__(self, vocabulary: Vocabulary, template: Template) -> None:
        self._vocabulary = vocabulary
        self._template = template.text
        self._runner = TemplateRunner(template)
        names = sorted(vocabulary.specials, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)))
        self._cut = re.compile(
            f"({'|'.join(map(re.escape, names))}|{KEPT_BEFORE}[0-9]+[.][0-9]+{KEPT_BEHIND})"
        )
        ends = [end for end in dict.fromkeys((template.end, *ENDS)) if vocabulary.has_special(end)]
        if not ends:
            raise ServerFault(
                "Nothing in this vocabulary ends a turn: model and dialect do not fit."
            )
        self._stops = frozenset(vocabulary.special(end) for end in ends)
        self._seal = id_array([vocabulary.special(ends[0])])
        signals = [vocabulary.special(one) for one in SIGNALS if vocabulary.has_special(one)]
        self._speech = Speech(
            vocabulary, self._stops, self._seal, CALL, CALLED, signals[0] if signals else None
        )
        self._first_letters = frozenset(name[0] for name in names)
        self._special_end = re.compile(f"(?:{'|'.join(map(re.escape, names))})\\Z")
        probe: Chat = [{"role": "user", "content": "Hello"}]
        cued = self._runner.run(probe, None, 0, is_cued=True)
        self._cue = self._usual_cue(probe, cued)
        self._is_thinking = cued.rstrip().endswith(THINK)
        digest = blake2b(template.text.encode(), digest_size=6).hexdigest()
        self._fingerprint = f"{VERSION}-{digest}-{vocabulary.fingerprint}"

    @property
    def fingerprint(self) -> str:
        """Names the template and the vocabulary."""
        return self._fingerprint

    @property
    def stops(self) -> frozenset[int]:
        """Ids that end the model's turn."""
        return self._stops

    def render(self, scene: Scene) -> Rendered:
        """The prompt as the template writes it."""
        context, cue = self._texts(scene)
        kept = self._kept(scene)
        base, digest = self._base(scene, context)
        rest = context[base.chars :]
        new, tokenized = self._encode(rest, kept)
        prompt = base
        if rest:
            digest.update(_bytes(rest))
            length = base.length + len(new)
            prompt = Written(base, new, length, len(context), digest.digest())
        lead, schema = self._lead(scene)
        reused = prompt.length - tokenized
        cue_ids, _ = self._encode(cue, kept)
        return Rendered(prompt, cue_ids, tokenized, reused, lead=lead, schema=schema)

    def write(self, items: Sequence[Item]) -> IdArray[int]:
        """What the model would sample behind the cue to say these items, its end mark included."""
        text = content_of(parts_of(items))
        if self._is_thinking:
            begun = f"{THINK}\n"
            text = text.removeprefix(begun) if text.startswith(begun) else f"{THOUGHT}\n\n{text}"
        return self._vocabulary.encode(text) + self._seal

    def reader(self, scene: Scene) -> TextReader | HeldReader:
        """A reader for the answer to this scene, which understands calls in the usual forms."""
        if (held := self._held(scene)) is not None:
            return HeldReader(self._vocabulary, self._stops, held)
        return TextReader(self._speech, scene, is_thinking=self._is_thinking)

    def _held(self, scene: Scene) -> Held | None:
        """A call that is held to a grammar, if there is to be one."""
        if (found := held_offer(scene)) is None:
            return None
        offer, grammar = found
        begun = self._vocabulary.encode(named(offer.qualified_name, "arguments"))
        behind = self._vocabulary.encode(UNQUOTE + "}")
        return Held(offer, grammar, self._thoughtless() + begun, behind, self._seal)

    def _usual_cue(self, probe: Chat, cued: str) -> str | None:
        """What the template puts behind a conversation; None if that depends, or if it wants more than a question."""
        try:
            bare = self._runner.run(probe, None, 0, is_cued=False)
        except InvalidRequest:
            return None
        return cued.removeprefix(bare) if cued.startswith(bare) else None

    def _lead(self, scene: Scene) -> tuple[IdArray[int], bytes | Grammar | None]:
        """A forced call is a bare object. A thought that the cue has begun is ended first."""
        if not scene.can_constrain:
            return NO_IDS, None
        if (held := self._held(scene)) is not None:
            return held.lead, held.grammar
        offers = forced(scene)
        schema = call_schema(offers, "arguments") if offers else format_schema(scene, "arguments")
        return NO_IDS if schema is None else self._thoughtless(), schema

    def _thoughtless(self) -> IdArray[int]:
        return self._vocabulary.encode(f"\n{THOUGHT}\n\n") if self._is_thinking else NO_IDS

    # --- text ---

    def _texts(self, scene: Scene) -> tuple[str, str]:
        """The conversation without its cue, and the cue.

        A template that counts on seeing calls may refuse a placeholder; then everything is written anew.
        """
        try:
            return self._texts_of(scene, *self._chat(scene, is_keeping=True))
        except InvalidRequest:
            return self._texts_of(scene, *self._chat(scene, is_keeping=False))

    def _texts_of(self, scene: Scene, chat: Chat, tools: object) -> tuple[str, str]:
        """Mostly the cue is what it always is. Where it is not, the template is run without it; where the two then grow
        together, that piece is the cue's."""
        cued = self._runner.run(chat, tools, scene.root_at, is_cued=True)
        if not chat:
            return "", cued
        cue = self._cue
        if cue is not None and cued.endswith(cue):
            context = cued[: len(cued) - len(cue)]
            if not cue or self._is_cut_at(context, cue):
                return context, cue
        bare = self._runner.run(chat, tools, scene.root_at, is_cued=False)
        same = 0
        for one, other in zip(self._split(bare), self._split(cued), strict=False):
            if one != other:
                break
            same += len(one)
        return cued[:same], cued[same:]

    def _is_cut_at(self, before: str, behind: str) -> bool:
        """Whether a piece ends between these two texts."""
        is_ended = before.endswith(KEPT_BEHIND) or self._special_end.search(before, _tail(before))
        return bool(is_ended or self._cut.match(behind))

    def _split(self, text: str) -> list[str]:
        """Special tokens, placeholders, and the text between them."""
        return [part for part in self._cut.split(text) if part]

    def _encode(self, text: str, kept: Sequence[Round]) -> tuple[IdArray[int], int]:
        """The ids of this text, and how many of them had to be made."""
        ids = id_array()
        made = 0
        for part in self._split(text):
            if part.startswith(KEPT_BEFORE):
                ids.extend(self._parsed(kept[int(part[1:].partition(".")[0])]))
                continue
            new = self._encode_part(part)
            ids.extend(new)
            made += len(new)
        return ids, made

    def _parsed(self, round: Round) -> IdArray[int]:
        """What the model said; the template closes the turn itself."""
        ids = kept_ids(round)
        return ids[:-1] if ids and ids[-1] in self._stops else ids

    def _encode_part(self, part: str) -> IdArray[int]:
        if self._special.fullmatch(part):
            return id_array([self._vocabulary.special(part)])
        text = ESCAPED.sub(lambda found: chr(0xFDD0 + int(found[1])), part.replace(SHIELD, ""))
        return self._vocabulary.encode(text)

    def _base(self, scene: Scene, context: str) -> tuple[Written, blake2b]:
        """The longest kept prompt with whose text this one begins, and the digest to go on with."""
        for written in self._kept_prompts(scene):
            before, behind = context[: written.chars], context[written.chars :]
            is_cut = not behind or self._is_cut_at(before, behind)
            if len(before) != written.chars or not is_cut:
                continue
            digest = blake2b(_bytes(before), digest_size=16)
            if digest.digest() == written.digest:
                return written, digest
        return NOTHING_WRITTEN, blake2b(digest_size=16)

    def _kept_prompts(self, scene: Scene) -> list[Written]:
        """The prompts of the last turns, before what was said to them; or the one that was recalled."""
        found: list[Written] = []
        turn = scene.past
        while turn is not None and len(found) < KEPT_PROMPTS_MAX:
            found.extend(self._written(turn.warm))
            turn = turn.parent
        return found or self._written(scene.recalled)

    def _written(self, warm: Warm | None) -> list[Written]:
        if warm is None or warm.fingerprint != self._fingerprint:
            return []
        prompt = warm.prompt
        nodes = (prompt, prompt.before) if isinstance(prompt, Tokens) else ()
        return [node for node in nodes if isinstance(node, Written)][:1]

    def _kept(self, scene: Scene) -> list[Round]:
        return [round for round in scene.history() if self._is_kept(round)]

    def _is_kept(self, round: Round) -> bool:
        return round.did_sample and round.fingerprint == self._fingerprint

    # --- the conversation as chat messages ---

    def _chat(self, scene: Scene, *, is_keeping: bool) -> tuple[Chat, object]:
        chat: Chat = []
        count = 0
        for round in (*scene.history(), Round(scene.given)):
            chat.extend(self._messages(round.given))
            if is_keeping and self._is_kept(round):
                placeholder = f"{KEPT_BEFORE}{count}.{_check(round)}{KEPT_BEHIND}"
                chat.append({"role": "assistant", "content": placeholder})
                count += 1
            elif round.did_sample:
                chat.extend(self._messages(round.wrote) or [{"role": "assistant", "content": ""}])
        return self._with_head(scene.head, chat)

    def _with_head(self, head: Head, chat: Chat) -> tuple[Chat, object]:
        if head.instructions is not None:
            chat.insert(0, {"role": "system", "content": self._shielded(head.instructions)})
        offers = head.tools.offers
        if not offers:
            return chat, None
        if "tools" in self._template:
            return chat, [json.loads(self._shielded(dumps(definition_of(one)))) for one in offers]
        told = self._shielded(told_tools(offers))
        if chat and chat[0]["role"] == "system":
            told = f"{chat[0]['content']}\n\n{told}"
            chat = chat[1:]
        return [{"role": "system", "content": told}, *chat], None

    def _messages(self, items: Sequence[Item]) -> Chat:
        groups: list[list[Part]] = []
        for item in items:
            for part in _parts(item):
                if groups and (groups[-1][-1].kind, part.kind) in JOINS:
                    groups[-1].append(part)
                else:
                    groups.append([part])
        return [message for group in groups for message in self._group(group)]

    def _group(self, parts: Sequence[Part]) -> Chat:
        match parts[0].kind:
            case "response" if "tool" in self._template:
                return [
                    {
                        "role": "tool",
                        "content": self._shielded(part.text),
                        "tool_call_id": self._call_id(part),
                    }
                    for part in parts
                ]
            case "response":
                return [{"role": "user", "content": self._shielded(content_of(parts))}]
            case "think" | "talk" | "call":
                return [self._assistant(parts)]
            case kind:
                return [{"role": kind, "content": self._shielded(content_of(parts))}]

    def _assistant(self, parts: Sequence[Part]) -> dict[str, object]:
        """One message of the model. What the template has no field for stays in the text."""
        message: dict[str, object] = {"role": "assistant"}
        if "reasoning_content" in self._template:
            thoughts = [part.text for part in parts if part.kind == "think"]
            parts = [part for part in parts if part.kind != "think"]
            message["reasoning_content"] = self._shielded("\n\n".join(thoughts))
        if "tool_calls" in self._template:
            calls = [self._call(part) for part in parts if part.kind == "call"]
            parts = [part for part in parts if part.kind != "call"]
            if calls:
                message["tool_calls"] = calls
        message["content"] = self._shielded(content_of(parts))
        return message

    def _call(self, part: Part) -> dict[str, object]:
        text = self._shielded(part.text)
        arguments: Any = json.loads(text) if is_object(text.strip()) else text
        function = {"name": self._shielded(part.name), "arguments": arguments}
        return {"type": "function", "id": self._call_id(part), "function": function}

    def _call_id(self, part: Part) -> str:
        """The id of a call; Mistral's templates want nine letters."""
        if NINE_LETTERS.search(self._template) is None:
            return self._shielded(part.call_id)
        return blake2b(part.call_id.encode(), digest_size=6).hexdigest()[:9]

    def _shielded(self, text: str) -> str:
        """The same text with every special token in it broken, and with letters escaped that mean something here."""
        clean = text
        if not text.isascii():
            clean = OURS.sub(lambda found: f"{ESCAPE}{ord(found[0]) - 0xFDD0}", text)
        if not any(letter in clean for letter in self._first_letters):
            return clean
        return self._special.sub(lambda found: found[0][0] + SHIELD + found[0][1:], clean)


def _parts(item: Item) -> list[Part]:
    if isinstance(item.value, AdditionalTools):
        added = added_by(item)
        return [Part("system", told_tools(added))] if added else []
    return parts_of((item,))


def _check(round: Round) -> int:
    """What tells the kept ids of a round from those of others, so that equal texts are equal tokens."""
    found = 0
    for ids in (*round.ids, round.tail):
        found = crc32(ids, found)
    return found


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


def _tail(text: str) -> int:
    """From where on a special token may stand at the end."""
    return max(0, len(text) - SPECIAL_CHARS_MAX)
