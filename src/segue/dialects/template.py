"""How does a model write that brings nothing but its chat template? As the template says.

The template (Jinja, from a tokenizer folder or a GGUF) is run in a sandbox over the whole conversation, once each time.
Its text is cut at the special tokens that it contains, and the pieces are encoded one by one. A prompt that was kept
knows the digest of its text: if the new text begins with that text, its tokens are taken, and only what is after them
is cut and tokenized. So everything is rendered, and only what is new is tokenized.

Two tricks keep promises that a template cannot know of. Text of users and tools is shielded before it goes in: a letter
that is in no text breaks every special token in it, and is taken out again when the piece is encoded. And what the
model has sampled goes in as a placeholder, for which its kept ids stand in the end.

What a template has no place for (tools, calls, outputs, reasoning) is written into the text, as Hermes models have it.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any
from zlib import crc32

from segue.dialects.chatml import (
    JOINS,
    ROLES,
    THINK,
    THOUGHT,
    content_of,
    definitions_of,
    tools_content,
)
from segue.dialects.family import Family, TokenDialect
from segue.dialects.parts import Part, blocks_of, dumps, parts_of
from segue.dialects.warm import sampled_ids
from segue.errors import InvalidRequest, ServerFault
from segue.readers.bound import BoundFamily
from segue.readers.call_json import is_object
from segue.readers.forced import CallForm
from segue.readers.formats import HERMES, format_of
from segue.readers.offers import definition_of
from segue.readers.text_reader import TextReader
from segue.turn.values import NO_IDS, Head, IdArray, Rendered, Round, Scene, Tokens, Warm
from segue.vocabularies.chat_template import Chat, ChatTemplate, TemplateRunner
from segue.vocabularies.vocabulary import Chunk, Mark, Own, Vocabulary
from segue.wire.items import Item

# A change of this file that changes what kept ids mean needs a new number.
VERSION = "template1"
# Noncharacters: Unicode promises that no text has them; where a text does, they are escaped.
SHIELD, KEPT_BEFORE, KEPT_AFTER, ESCAPE = "\ufdd0", "\ufdd1", "\ufdd2", "\ufdd3"
OURS = re.compile("[\ufdd0-\ufdd3]")
ESCAPED = re.compile("\ufdd3([0-3])")
# Ends of a turn in the families that we know of; those that a vocabulary has are its stops.
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "</s>",
    "<|return|>", "<|call|>", "<|endoftext|>", "<|end_of_text|>", "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
)  # fmt: skip

NINE_LETTERS = re.compile(r"length\s*!=\s*9\b")

# How many of the last prompts are looked at; a template that forgets rewrites the last ones.
KEPT_PROMPTS_MAX = 4
# No special token is longer.
SPECIAL_CHARS_MAX = 256


@dataclass(frozen=True, slots=True)
class TemplatePrompt(Tokens):
    """A prompt that knows of which text it was made, by its length and digest: what begins with the same text begins
    with these tokens."""

    chars: int
    digest: bytes


NO_PROMPT = TemplatePrompt(None, NO_IDS, 0, 0, blake2b(digest_size=16).digest())


def template_dialect(vocabulary: Vocabulary, template: ChatTemplate) -> TokenDialect:
    """The dialect of a model that has nothing but this template."""
    vocabulary = vocabulary.protecting(template.text)
    ends = [end for end in dict.fromkeys((template.end, *ENDS)) if vocabulary.has_special(end)]
    if not ends:
        raise ServerFault("Nothing in this vocabulary ends a turn: model and dialect do not fit.")
    digest = blake2b(template.text.encode(), digest_size=6).hexdigest()
    prompts = _TemplatePrompts(vocabulary, template)
    is_thinking = prompts.is_thinking
    family = Family(
        version=f"{VERSION}-{digest}",
        specials=(),
        stops=tuple(ends),
        seal=(Mark(ends[0]),),
        # The template writes its own.
        cue=(),
        render=prompts.render,
        write=partial(_write, ends[0], is_thinking),
        reader=partial(
            TextReader, format=format_of(template.text) or HERMES, is_thinking=is_thinking
        ),
        call=CallForm(
            named=lambda name: (f'{{"name": {dumps(name)}, "arguments":',),
            end="}",
            is_always_object=True,
        ),
        without_thought=(Own(f"\n{THOUGHT}\n\n"),) if is_thinking else (),
    )
    return TokenDialect(family, vocabulary)


def _write(
    end: str, is_thinking: bool, vocabulary: Vocabulary, items: Sequence[Item]
) -> IdArray[int]:
    chunks = content_of(parts_of(items))
    if is_thinking:
        has_begun = chunks[:1] == [Own(f"{THINK}\n")]
        chunks = chunks[1:] if has_begun else [Own(f"{THOUGHT}\n\n"), *chunks]
    return vocabulary.ids(*chunks, Mark(end))


class _TemplatePrompts:
    """Writes prompts by running a template."""

    def __init__(self, vocabulary: Vocabulary, template: ChatTemplate) -> None:
        self._vocabulary = vocabulary
        self._template = template.text
        self._runner = TemplateRunner(template)
        names = sorted(vocabulary.specials, key=len, reverse=True)
        either = "|".join(map(re.escape, names))
        self._special = re.compile(either)
        self._cut = re.compile(f"({either}|{KEPT_BEFORE}[0-9]+[.][0-9]+{KEPT_AFTER})")
        self._first_letters = frozenset(name[0] for name in names)
        self._special_end = re.compile(f"(?:{either})\\Z")
        probe: Chat = [{"role": "user", "content": "Hello"}]
        cued = self._runner.run(probe, None, 0, is_cued=True)
        self._cue = self._usual_cue(probe, cued)
        # Whether the cue begins a thought.
        self.is_thinking = cued.rstrip().endswith(THINK)

    def render(self, bound: BoundFamily, scene: Scene) -> Rendered:
        context, cue = self._texts(bound, scene)
        kept = [round for round in scene.history() if _is_kept(bound, round)]
        base, digest = self._base(bound, scene, context)
        rest = context[base.chars :]
        new, tokenized = self._encode(bound, rest, kept)
        prompt = base
        if rest:
            digest.update(_bytes(rest))
            length = base.length + len(new)
            prompt = TemplatePrompt(base, new, length, len(context), digest.digest())
        reused = prompt.length - tokenized
        cue_ids, _ = self._encode(bound, cue, kept)
        return Rendered(prompt, cue_ids, tokenized, reused)

    def _usual_cue(self, probe: Chat, cued: str) -> str | None:
        """What the template puts after a conversation; None if that depends, or if it wants more than a question."""
        try:
            bare = self._runner.run(probe, None, 0, is_cued=False)
        except InvalidRequest:
            return None
        return cued.removeprefix(bare) if cued.startswith(bare) else None

    # --- text ---

    def _texts(self, bound: BoundFamily, scene: Scene) -> tuple[str, str]:
        """The conversation without its cue, and the cue.

        A template that counts on seeing calls may refuse a placeholder; then everything is written again.
        """
        try:
            return self._texts_of(scene, *self._chat(bound, scene, is_keeping=True))
        except InvalidRequest:
            return self._texts_of(scene, *self._chat(bound, scene, is_keeping=False))

    def _texts_of(self, scene: Scene, chat: Chat, tools: object) -> tuple[str, str]:
        """Mostly the cue is what it always is. Where it is not, the template is run without it; where the two then grow
        together, that piece is the cue's."""
        effort = scene.effort
        cued = self._runner.run(chat, tools, scene.root_at, is_cued=True, effort=effort)
        if not chat:
            return "", cued
        cue = self._cue
        if cue is not None and cued.endswith(cue):
            context = cued[: len(cued) - len(cue)]
            if not cue or self._is_cut_at(context, cue):
                return context, cue
        bare = self._runner.run(chat, tools, scene.root_at, is_cued=False, effort=effort)
        same = 0
        for piece, other in zip(self._split(bare), self._split(cued), strict=False):
            if piece != other:
                break
            same += len(piece)
        return cued[:same], cued[same:]

    def _is_cut_at(self, before: str, after: str) -> bool:
        """Whether a piece ends between these two texts."""
        tail = max(0, len(before) - SPECIAL_CHARS_MAX)
        is_ended = before.endswith(KEPT_AFTER) or self._special_end.search(before, tail)
        return bool(is_ended or self._cut.match(after))

    def _split(self, text: str) -> list[str]:
        """Special tokens, placeholders, and the text between them."""
        return [part for part in self._cut.split(text) if part]

    def _encode(
        self, bound: BoundFamily, text: str, kept: Sequence[Round]
    ) -> tuple[IdArray[int], int]:
        """The ids of this text, and how many of them had to be made."""
        ids = array("I")
        made = 0
        for part in self._split(text):
            if part.startswith(KEPT_BEFORE):
                ids.extend(_sampled(bound, kept[int(part[1:].partition(".")[0])]))
                continue
            text = ESCAPED.sub(lambda found: chr(0xFDD0 + int(found[1])), part.replace(SHIELD, ""))
            new = self._vocabulary.ids(Mark(part) if self._special.fullmatch(part) else text)
            ids.extend(new)
            made += len(new)
        return ids, made

    def _base(
        self, bound: BoundFamily, scene: Scene, context: str
    ) -> tuple[TemplatePrompt, blake2b]:
        """The longest kept prompt with whose text this prompt begins, and the digest to go on with."""
        for written in _kept_prompts(bound, scene):
            before, after = context[: written.chars], context[written.chars :]
            is_cut = not after or self._is_cut_at(before, after)
            if len(before) != written.chars or not is_cut:
                continue
            digest = blake2b(_bytes(before), digest_size=16)
            if digest.digest() == written.digest:
                return written, digest
        return NO_PROMPT, blake2b(digest_size=16)

    # --- the conversation as chat messages ---

    def _chat(self, bound: BoundFamily, scene: Scene, *, is_keeping: bool) -> tuple[Chat, object]:
        chat: Chat = []
        count = 0
        for round in (*scene.history(), Round(scene.given)):
            chat.extend(self._messages(round.given))
            if is_keeping and _is_kept(bound, round):
                placeholder = f"{KEPT_BEFORE}{count}.{_check(round)}{KEPT_AFTER}"
                chat.append({"role": "assistant", "content": placeholder})
                count += 1
            elif round.did_sample:
                chat.extend(self._messages(round.wrote) or [{"role": "assistant", "content": ""}])
        return self._with_head(scene.head, chat)

    def _with_head(self, head: Head, chat: Chat) -> tuple[Chat, object]:
        if head.instructions is not None:
            chat.insert(0, self._message("system", head.instructions))
        offers = head.tools.offers
        if not offers:
            return chat, None
        if "tools" in self._template:
            return chat, [
                json.loads(self._shielded(dumps(definition_of(offer)))) for offer in offers
            ]
        text = self._joined(tools_content(offers))
        if chat and chat[0]["role"] == "system":
            text = f"{chat[0]['content']}\n\n{text}"
            chat = chat[1:]
        return [{"role": "system", "content": text}, *chat], None

    def _messages(self, items: Sequence[Item]) -> Chat:
        groups = blocks_of(items, JOINS, definitions_of)
        return [message for group in groups for message in self._group(group)]

    def _group(self, parts: Sequence[Part]) -> Chat:
        match parts[0].kind:
            case "response" if "tool" in self._template:
                return [
                    self._message("tool", part.text) | {"tool_call_id": self._call_id(part)}
                    for part in parts
                ]
            case "think" | "talk" | "call":
                return [self._assistant(parts)]
            case kind:
                content = self._joined(content_of(parts))
                return [{"role": ROLES.get(kind, kind), "content": content}]

    def _message(self, role: str, text: str) -> dict[str, object]:
        return {"role": role, "content": self._shielded(text)}

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
        message["content"] = self._joined(content_of(parts))
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

    def _joined(self, chunks: Sequence[Chunk]) -> str:
        """These chunks as one text, in which only our own words have marks."""
        texts = (
            chunk.text if isinstance(chunk, Own | Mark) else self._shielded(chunk)
            for chunk in chunks
        )
        return "".join(texts)

    def _shielded(self, text: str) -> str:
        """The same text with every special token in it broken, and with letters escaped that mean something here."""
        clean = text
        if not text.isascii():
            clean = OURS.sub(lambda found: f"{ESCAPE}{ord(found[0]) - 0xFDD0}", text)
        if not any(letter in clean for letter in self._first_letters):
            return clean
        return self._special.sub(lambda found: found[0][0] + SHIELD + found[0][1:], clean)


def _is_kept(bound: BoundFamily, round: Round) -> bool:
    return round.did_sample and round.fingerprint == bound.fingerprint


def _sampled(bound: BoundFamily, round: Round) -> IdArray[int]:
    """What the model said; the template closes the turn itself."""
    ids = sampled_ids(round)
    return ids[:-1] if ids and ids[-1] in bound.stops else ids


def _kept_prompts(bound: BoundFamily, scene: Scene) -> list[TemplatePrompt]:
    """The prompts of the last turns, before the model's answers; or the recalled prompt."""
    found: list[TemplatePrompt] = []
    turn = scene.past
    while turn is not None and len(found) < KEPT_PROMPTS_MAX:
        found.extend(_kept_prompt(bound, turn.warm))
        turn = turn.parent
    return found or _kept_prompt(bound, scene.recalled)


def _kept_prompt(bound: BoundFamily, warm: Warm | None) -> list[TemplatePrompt]:
    if warm is None or warm.fingerprint != bound.fingerprint:
        return []
    prompt = warm.prompt
    nodes = (prompt, prompt.before) if isinstance(prompt, Tokens) else ()
    return [node for node in nodes if isinstance(node, TemplatePrompt)][:1]


def _check(round: Round) -> int:
    """What tells the kept ids of a round from those of others, so that equal texts are equal tokens."""
    found = 0
    for ids in (*round.ids, round.tail):
        found = crc32(ids, found)
    return found


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
