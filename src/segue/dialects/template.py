"""How does a model write that brings nothing but its chat template? As the template says.

The template (Jinja, from a tokenizer folder or a GGUF) is run in a sandbox over the whole conversation, once each time.
Its text is the text of the prompt. It is cut at the special tokens that it contains, and the pieces are encoded one by
one. A prompt that was kept knows the digest of its text: if the new text begins with that text, its tokens are taken,
and only what is after them is cut and tokenized. So everything is rendered, and only what is new is tokenized.

What the model sampled is looked for in the text, answer by answer, where the template begins an answer. Where the
template has it as it was sampled, white space aside, the kept ids stand for it: then the prompt goes on from what the
engine has seen. They also stand where the template only spells the same items otherwise. Where the template leaves
something out, as most do with thoughts once the user speaks again, its text is encoded, from there on.
"""

from __future__ import annotations

import dataclasses
import re
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from itertools import accumulate, takewhile
from zlib import crc32

from msgspec.structs import replace

from segue.derivation.family import DerivedFamily
from segue.derivation.prove import derived
from segue.dialects.chatml import PLAIN, THINK, content_of
from segue.dialects.family import Family, TokenDialect
from segue.dialects.parts import parts_of
from segue.dialects.template_messages import Said, TemplateMessages
from segue.dialects.warm import sampled_ids
from segue.errors import InvalidRequest, ServerFault
from segue.readers.bound import BoundFamily
from segue.readers.call_tags import PROBE, form_of
from segue.readers.formats import HERMES, declared_format, format_of, own_ids, unread_marks
from segue.readers.text_reader import TextReader
from segue.seams.history import Round, Warm
from segue.seams.model import Rendered, Scene
from segue.seams.prompt import NO_IDS, IdArray, ImageAt, Tokens
from segue.vocabularies.chat_template import Chat, ChatTemplate, TemplateRunner
from segue.vocabularies.images import IMAGE, IMAGE_BEFORE, Images, placeholder_of
from segue.vocabularies.shield import PLACE, SHIELD, Shield, mended
from segue.vocabularies.vocabulary import Mark, Own, Vocabulary
from segue.wire.items import Item
from segue.wire.kinds import call_of, is_output
from segue.wire.requests import Effort

# A change of this file that changes what kept ids mean needs a new number.
VERSION = "template2"
# Ends of a turn in the families that we know of; those that a vocabulary has are its stops.
ENDS = (
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>", "</s>",
    "<|return|>", "<|call|>", "<|endoftext|>", "<|end_of_text|>", "<|END_OF_TURN_TOKEN|>",
    "<｜end▁of▁sentence｜>",
)  # fmt: skip
# GLM has no end: what the next speaker begins with ends a turn.
NEXT_SPEAKERS = ("<|user|>", "<|observation|>")

# The efforts with which an answer may have begun otherwise than it would now.
EFFORTS: tuple[Effort | None, ...] = (None, "none", "high")
# No special token is longer.
SPECIAL_CHARS_MAX = 256
IGNORED = re.compile(f"[\\s{SHIELD}]+")
SOLID = re.compile(f"[^\\s{SHIELD}]+")


@dataclass(frozen=True, slots=True)
class _Walk:
    """How far the answers of a conversation were looked for."""

    # How many steps (`_Step`) were taken, and what tells them from others.
    steps: int = 0
    trail: int = 0
    # Up to where answers were found in the text, how many are after that which were not found, and how many outputs of
    # tools are before the next.
    at: int = 0
    missed: int = 0
    outputs: int = 0


@dataclass(frozen=True, slots=True)
class TemplatePrompt(Tokens):
    """A prompt that knows of which text it was made, by its length and digest: what begins with the same text begins
    with these tokens."""

    chars: int
    digest: bytes
    walk: _Walk


NO_PROMPT = TemplatePrompt(None, NO_IDS, 0, 0, blake2b(digest_size=16).digest(), _Walk())


@dataclass(frozen=True, slots=True)
class _Step:
    """Messages that follow each other: what was given, or what the model said in one round."""

    # How many of them are the model's, and how many are outputs of tools.
    answers: int
    outputs: int = 0
    # What was sampled for them, where it was kept; the messages as the template gets them.
    kept: Round | None = None
    said: Sequence[dict[str, object]] = ()


@dataclass(frozen=True, slots=True)
class _Cue:
    """How an answer begins, after a user or after a tool."""

    # The whole small conversation, up to where the model speaks.
    whole: str
    # What the template adds to make the model speak; None if that cannot be separated.
    text: str | None
    # What stands right before an answer, from a special token on.
    anchor: str
    # The beginning of that, which is the same before every answer.
    begin: str


def template_dialect(
    vocabulary: Vocabulary,
    template: ChatTemplate,
    name: str = "template",
    *,
    written: DerivedFamily | None = None,
    is_derived: bool = False,
) -> TokenDialect:
    """The dialect of a model that has nothing but this template. `written`: how it writes, by a file; `is_derived`: the
    table of formats is left aside, and that is worked out from the template."""
    # What the template has no place for is written with these marks.
    text = template.text + template.plain + "".join(PLAIN.marks)
    vocabulary = vocabulary.protecting(text)
    prompts = _TemplatePrompts(vocabulary, template, written, is_derived=is_derived)
    ends = prompts.ends
    if not ends:
        raise ServerFault("Nothing in this vocabulary ends a turn: model and dialect do not fit.")
    digest = blake2b(template.text.encode(), digest_size=6).hexdigest()
    family = Family(
        name=name,
        version=f"{VERSION}-{digest}",
        specials=(),
        stops=ends,
        seal=(Mark(ends[0]),),
        # The template writes its own.
        cue=(),
        render=prompts.render,
        write=prompts.write,
        reader=prompts.reader,
        call=prompts.call,
        unread=prompts.unread,
        differs=prompts.differs,
        without_thought=prompts.without_thought,
        is_thinking=prompts.is_thinking_in,
        takes_images=prompts.takes_images,
    )
    dialect = TokenDialect(family, vocabulary)
    dialect.derived = prompts.derived
    prompts.fingerprint = dialect.fingerprint
    return dialect


class _TemplatePrompts:
    """Writes prompts by running a template."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        template: ChatTemplate,
        written: DerivedFamily | None,
        *,
        is_derived: bool,
    ) -> None:
        self._vocabulary = vocabulary
        self._runner = TemplateRunner(template)
        # Names the ids that can be decoded here.
        self.fingerprint = ""
        names = sorted(vocabulary.specials, key=len, reverse=True)
        either = "|".join(map(re.escape, names))
        self._special = re.compile(f"({either})")
        self._special_end = re.compile(f"(?:{either})\\Z")
        self._special_or_image = re.compile(f"({either}|{IMAGE})")
        self._placeholder = placeholder_of(self._runner) or ""
        # Only what is special cannot be written by a user.
        self.takes_images = self._special.search(self._placeholder) is not None
        self._name_of = {vocabulary.special(name): name.encode() for name in names}
        self._messages = TemplateMessages(
            self._runner, template.text, Shield(names), self._placeholder.strip()
        )
        self._after_answer = self._after()
        self._known_cues: dict[Effort | None, tuple[_Cue, ...]] = {}
        if not self._cues(None):
            # In its own words: why the smallest conversation is refused.
            self._runner.run(QUESTION, None, 0, is_cued=True)
        begins = {cue.begin for effort in EFFORTS for cue in self._cues(effort)} - {""}
        longest_first = sorted(begins, key=len, reverse=True)
        self._begin = re.compile("|".join(map(re.escape, longest_first)) or "(?!)")
        self.ends = self._ends(template)
        # How it writes, where that was worked out or came from a file.
        self.derived: DerivedFamily | None = None
        # A mark of calls that no reader knows.
        self.unread: str | None = None
        declared = declared_format(template.answers)
        listed = None if written or is_derived else declared or format_of(template.text)
        if listed is not None or not self.ends:
            self.format = listed or HERMES
            self.call = form_of(self.format, template.text, self._messages.written_call(*PROBE))
        else:
            self._derive(template, written)
        # What stands between marks and words of an answer, and is neither.
        before, after = self._before_answer(), self._special.split(self._after_answer)[0]
        gap, tail = (text if not text.strip() else "" for text in (before, after))
        self.format = dataclasses.replace(self.format, gap=gap, tail=tail)

    def _derive(self, template: ChatTemplate, written: DerivedFamily | None) -> None:
        """The format of this template, worked out from what it writes and proven on it."""
        found = derived(template, self._vocabulary, self.ends, written)
        self.derived = found.family
        self.format = found.format
        self.call = found.call
        if found.has_calls and found.family.calls is None:
            self.unread = unread_marks(template.text) or "marks that could not be worked out"

    def _ends(self, template: ChatTemplate) -> tuple[str, ...]:
        """What ends a turn: what the template writes after an answer, what the model's files say, what we know."""
        named = [self._name_of[id].decode() for id in template.ends if id in self._name_of]
        glm = NEXT_SPEAKERS if all(end in template.text for end in NEXT_SPEAKERS) else ()
        known = (*self._special.findall(self._after_answer)[-1:], template.end, *named, *glm, *ENDS)
        inner = self._inner_ends()
        return tuple(
            end
            for end in dict.fromkeys(known)
            if self._vocabulary.has_special(end) and end not in inner
        )

    def _inner_ends(self) -> set[str]:
        """What ends a thought in the template, after which the same turn goes on."""
        field = self._messages.taken.thoughts
        if field is None or field == "content":
            return set()
        chat: Chat = [*QUESTION, {"role": "assistant", field: "thought-47", "content": PLACE}]
        try:
            said = self._runner.run(chat, None, 0, is_cued=False)
        except InvalidRequest:
            return set()
        after_thought = said.partition("thought-47")[2].partition(PLACE)[0]
        return set(self._special.findall(after_thought))

    def _after(self) -> str:
        """What the template writes after an answer."""
        chat: Chat = [*QUESTION, {"role": "assistant", "content": PLACE}]
        try:
            return self._runner.run(chat, None, 0, is_cued=False).partition(PLACE)[2]
        except InvalidRequest:
            return ""

    def is_thinking(self, effort: Effort | None, *, is_after_output: bool = False) -> bool:
        """Whether the cue begins a thought: after a question, or after a tool's output."""
        think = self.format.think
        cues = self._cues(effort) if think else ()
        cues = cues[-1:] if is_after_output else cues[:1]
        return any(cue.whole.rstrip().endswith(think) for cue in cues)

    def is_thinking_in(self, scene: Scene) -> bool:
        """Whether the cue of this scene begins a thought."""
        is_after_output = bool(scene.given) and is_output(scene.given[-1].value)
        return self.is_thinking(scene.effort, is_after_output=is_after_output)

    @property
    def without_thought(self) -> tuple[Own, ...]:
        """What ends a thought that the cue has begun."""
        mark = self.format.thought
        if not mark:
            return ()
        head, ended, rest = self._before_answer().partition(mark)
        if ended:
            return (Own(head + mark + rest[: len(rest) - len(rest.lstrip())]),)
        if self.derived is not None and self.derived.thoughts is not None:
            return (Own(self.derived.thoughts.end),)
        return (Own(f"\n{mark}\n\n"),)

    def _before_answer(self) -> str:
        """What the template writes between its cue and an answer without a thought."""
        answer: Chat = [{"role": "assistant", "content": PLACE}]
        before, found, _ = (self._written_answer(None, answer) or "").partition(PLACE)
        return before if found else ""

    def reader(self, bound: BoundFamily, scene: Scene) -> TextReader:
        is_thinking = self.is_thinking_in(scene)
        return TextReader(bound, scene, format=self.format, is_thinking=is_thinking)

    def write(self, vocabulary: Vocabulary, items: Sequence[Item]) -> IdArray[int]:
        written = self._written_answer(None, self._messages.wrote(items, {}))
        if written is not None:
            return self._encode(written) + vocabulary.ids(Mark(self.ends[0]))
        chunks = content_of(parts_of(items))
        if self.is_thinking(None):
            has_begun = chunks[:1] == [Own(f"{THINK}\n")]
            chunks = chunks[1:] if has_begun else [Own(f"{self.format.thought}\n\n"), *chunks]
        return vocabulary.ids(*chunks, Mark(self.ends[0]))

    def render(self, bound: BoundFamily, scene: Scene) -> Rendered:
        images = Images(self._placeholder)
        show = images.show if scene.sees_images and self.takes_images else None
        rounds = self._messages.rounds(scene, show, self._own_ids)
        chat, tools = self._messages.chat(scene, rounds)
        context, cue = self._texts(scene, chat, tools)
        if IMAGE_BEFORE in cue:
            # Images belong to the context, and this template writes one into its cue: then they are described in words.
            return self.render(bound, replace(scene, sees_images=False))
        steps = _steps(bound, scene, rounds)
        trails = _trails(steps)
        base, digest = self._base(bound, scene, context, trails)
        new, tokenized, walk = self._continued(bound, context, base, steps, trails, images)
        prompt = base
        if base.chars < len(context) or base.walk != walk:
            digest.update(_bytes(context[base.chars :]))
            length = base.length + len(new)
            placed = tuple(images.placed)
            known = (len(context), digest.digest(), walk)
            prompt = TemplatePrompt(base, new, length, *known, images=placed)
        return Rendered(prompt, self._encode(cue), tokenized, prompt.length - tokenized)

    def differs(self, scene: Scene, rendered: Rendered) -> bool:
        """Whether the prompt says anything else than the template run over all items, white space aside. Prompts with
        images are not compared."""
        assert isinstance(rendered.context, Tokens)
        if rendered.context.all_images():
            return False
        rounds = self._messages.rounds(scene, None, self._own_ids)
        chat, tools = self._messages.chat(scene, rounds)
        context, cue = self._texts(scene, chat, tools)
        decoded = self._decode(rendered.context.flat() + rendered.cue)
        return "".join(decoded.split()) != "".join(mended(context + cue).split())

    # --- text ---

    def _texts(self, scene: Scene, chat: Chat, tools: object) -> tuple[str, str]:
        """The conversation without its cue, and the cue.

        Mostly the cue is a known one. Where it is not, the template is run without it; where the two then grow
        together, that piece is the cue's.
        """
        run = partial(self._runner.run, tools=tools, root_at=scene.root_at, effort=scene.effort)
        try:
            cued = run(chat, is_cued=True)
        except InvalidRequest as refused:
            try:
                return self._texts_without_user(run, chat)
            except InvalidRequest:
                raise refused from None
        if not chat:
            return "", cued
        for cue in self._cues(scene.effort):
            if cue.text is not None and cued.endswith(cue.text):
                context = cued[: len(cued) - len(cue.text)]
                if not cue.text or self._is_cut_at(context, cue.text):
                    return context, cue.text
        bare = run(chat, is_cued=False)
        same = len(self._common(bare, cued))
        return cued[:same], cued[same:]

    def _texts_without_user(self, run: _Run, chat: Chat) -> tuple[str, str]:
        """A template may refuse to begin without a question. Then the context is all that it writes before one, as a
        warm-up needs it, and the cue has an empty question."""
        before = run([*chat, {"role": "user", "content": PLACE}], is_cued=True).partition(PLACE)[0]
        marks = [mark.start() for mark in self._special.finditer(before)]
        context = before[: marks[-1]] if marks else ""
        cued = run([*chat, {"role": "user", "content": ""}], is_cued=True)
        same = len(self._common(context, cued))
        return cued[:same], cued[same:]

    def _common(self, text: str, other: str) -> str:
        """The pieces with which both texts begin."""
        pairs = zip(self._split(text), self._split(other), strict=False)
        return "".join(piece for piece, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))

    def _without_half_mark(self, same: str, whole: str) -> str:
        for mark in self._special.finditer(whole, max(0, len(same) - SPECIAL_CHARS_MAX)):
            if mark.start() < len(same) < mark.end():
                return whole[: mark.start()]
        return same

    def _is_cut_at(self, before: str, after: str) -> bool:
        """Whether a piece ends between these two texts."""
        tail = max(0, len(before) - SPECIAL_CHARS_MAX)
        return bool(self._special_end.search(before, tail) or self._special.match(after))

    def _split(self, text: str) -> list[str]:
        """Special tokens, and the text between them."""
        return [part for part in self._special.split(text) if part]

    def _encode(self, text: str, images: Images | None = None, begin: int = 0) -> IdArray[int]:
        """The ids of this text; the images among them are placed, as if `begin` ids stood before the text."""
        ids = array("I")
        for n, part in enumerate(self._special_or_image.split(text)):
            if not part.startswith(IMAGE_BEFORE):
                ids.extend(self._vocabulary.ids(Mark(part) if n % 2 else mended(part)))
                continue
            # Letters that only look like the mark of an image are text.
            url = images.found.get(part) if images else None
            new = self._vocabulary.ids(part) if url is None else self._placeholder_ids()
            if images is not None and url is not None:
                at = begin + len(ids)
                images.placed.append(ImageAt(at, at + len(new), url))
            ids.extend(new)
        return ids

    def _placeholder_ids(self) -> IdArray[int]:
        return self._encode(self._placeholder.strip())

    def _decode(self, ids: IdArray[int]) -> str:
        spell = self._vocabulary.bytes_of
        spelt = b"".join(self._name_of.get(id) or spell(id) for id in ids)
        return spelt.decode(errors="replace")

    # --- how answers begin ---

    def _cues(self, effort: Effort | None) -> tuple[_Cue, ...]:
        """How an answer begins after a user and after a tool, with this effort."""
        cues = self._known_cues.get(effort)
        if cues is None:
            made = (self._cue(chat, effort) for chat in (QUESTION, self._messages.looked()))
            cues = self._known_cues[effort] = tuple(cue for cue in made if cue is not None)
        return cues

    def _cue(self, chat: Chat, effort: Effort | None) -> _Cue | None:
        run = partial(self._runner.run, tools=None, root_at=0, effort=effort)
        answer = {"role": "assistant", "content": "Hello"}
        try:
            whole = run(chat, is_cued=True)
            bare = run(chat, is_cued=False)
        except InvalidRequest:
            return None
        text = whole.removeprefix(bare) if whole.startswith(bare) else None
        same = whole
        for later in ([answer], [answer, *QUESTION], self._messages.looked()[1:]):
            try:
                same = _same(same, run([*chat, *later], is_cued=False))
            except InvalidRequest:
                continue
        same = self._without_half_mark(same, whole)
        at = len(whole) - len(text or "")
        if not self._special.search(same, at):
            marks = [mark.start() for mark in self._special.finditer(same)]
            at = marks[-1] if marks else len(same)
        return _Cue(whole, text, whole[at:], same[at:])

    def _written_answer(
        self, effort: Effort | None, said: Sequence[dict[str, object]]
    ) -> str | None:
        """What the template writes for these messages of the model after a question, up to the end of the turn; None if
        it does not begin with the cue of this effort."""
        cue, *_ = self._cues(effort) or (None,)
        if cue is None:
            return None
        try:
            written = self._runner.run([*QUESTION, *said], None, 0, is_cued=False, effort=effort)
        except InvalidRequest:
            return None
        if not written.startswith(cue.whole):
            return None
        text = written[len(cue.whole) :]
        while text.rstrip().endswith(self.ends):
            end = next(end for end in self.ends if text.rstrip().endswith(end))
            text = text.rstrip().removesuffix(end)
        return text

    # --- what was sampled ---

    def _own_ids(self, round: Round) -> dict[str, str]:
        """The ids that the model gave its calls in this round, by those that clients know."""
        calls = [call for item in round.wrote if (call := call_of(item.value)) is not None]
        if not calls or round.fingerprint != self.fingerprint:
            return {}
        found = own_ids(self._decode(sampled_ids(round)))
        if len(found) != len(calls):
            return {}
        return {call.call_id: id for call, id in zip(calls, found, strict=True)}

    def _continued(
        self,
        bound: BoundFamily,
        context: str,
        base: TemplatePrompt,
        steps: Sequence[_Step],
        trails: Sequence[int],
        images: Images,
    ) -> tuple[IdArray[int], int, _Walk]:
        """The ids of what is after the base, how many of them had to be made, and how far it went."""
        ids = array("I")
        made = 0
        done = base.chars
        at = base.walk.at
        missed = base.walk.missed
        outputs = base.walk.outputs
        begins = [mark.start() for mark in self._begin.finditer(context, at)]
        for step in steps[base.walk.steps :]:
            first = bisect_left(begins, at) + missed
            sampled = NO_IDS
            place = None
            if step.kept is not None:
                sampled = _sampled(bound, step.kept)
                window = begins[first : first + 1 + outputs]
                place = self._place_of(context, window, sampled, step.said)
            if place is None or place[0] < done:
                missed += step.answers
            else:
                text = self._encode(context[done : place[0]], images, len(ids))
                made += len(text)
                ids += text + sampled
                done = at = place[1]
                missed = 0
            outputs = step.outputs
        text = self._encode(context[done:], images, len(ids))
        walk = _Walk(len(steps), trails[-1], at, missed, outputs)
        return ids + text, made + len(text), walk

    def _place_of(
        self,
        context: str,
        begins: Sequence[int],
        sampled: IdArray[int],
        said: Sequence[dict[str, object]],
    ) -> tuple[int, int] | None:
        """Where in the text this answer stands: as it was sampled, or else spelt otherwise."""
        if not begins:
            return None
        text = self._decode(sampled)
        cues = [(effort, cue) for effort in EFFORTS for cue in self._cues(effort)]
        anchors = sorted({cue.anchor for _, cue in cues}, key=len, reverse=True)
        for begin in begins:
            for anchor in anchors:
                start = begin + len(anchor)
                if context.startswith(anchor, begin):
                    end = _end_of(text, context, start)
                    if end is not None:
                        return start, end
        if self._messages.has_short_ids:
            # The model has called by an id of its own, and the output would come with another.
            return None
        thinking = tuple(filter(None, (self.format.think, self.format.thought)))
        is_thinking = any(mark in anchor for mark in thinking for anchor in anchors)
        for effort in EFFORTS:
            written = self._written_answer(effort, said)
            if written is None or (is_thinking and not _has_alike(thinking, written, text)):
                continue
            for begin in begins:
                for cue in self._cues(effort):
                    start = begin + len(cue.anchor)
                    if context.startswith(cue.anchor + written, begin):
                        return start, start + len(written)
        return None

    def _base(
        self, bound: BoundFamily, scene: Scene, context: str, trails: Sequence[int]
    ) -> tuple[TemplatePrompt, blake2b]:
        """The longest kept prompt with whose text this prompt begins, and the digest to go on with."""
        digest = blake2b(digest_size=16)
        base = NO_PROMPT
        base_digest = digest.copy()
        done = 0
        for node in reversed([*_kept_prompts(bound, scene)]):
            if node.chars > len(context):
                break
            digest.update(_bytes(context[done : node.chars]))
            done = node.chars
            if digest.digest() != node.digest:
                break
            walk = node.walk
            is_same = walk.steps < len(trails) and trails[walk.steps] == walk.trail
            tail = context[max(0, done - SPECIAL_CHARS_MAX) : done]
            is_end = done == len(context)
            if is_same and (
                is_end or self._is_cut_at(tail, context[done : done + SPECIAL_CHARS_MAX])
            ):
                base = node
                base_digest = digest.copy()
        return base, base_digest


QUESTION: Chat = [{"role": "user", "content": "Hi"}]
_Run = Callable[..., str]


def _same(text: str, other: str) -> str:
    """The letters with which both begin."""
    pairs = zip(text, other, strict=False)
    return "".join(char for char, _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _end_of(text: str, context: str, start: int) -> int | None:
    """Where this text ends in the context, if it stands there, white space aside."""
    if context.startswith(text, start):
        return start + len(text)
    solid = IGNORED.sub("", text)
    part = context[start : start + 2 * len(text) + SPECIAL_CHARS_MAX]
    if not IGNORED.sub("", part).startswith(solid):
        return None
    left = len(solid)
    end = 0
    for found in SOLID.finditer(part):
        if left <= 0:
            break
        end = min(found.end(), found.start() + left)
        left -= len(found[0])
    if text[-1:].isspace():
        # Not twice.
        end += len(part[end:]) - len(part[end:].lstrip())
    return start + end


def _has_alike(marks: Sequence[str], text: str, other: str) -> bool:
    return all(mended(text).count(mark) == other.count(mark) for mark in marks)


def _steps(bound: BoundFamily, scene: Scene, rounds: Sequence[Said]) -> list[_Step]:
    """The messages of these rounds, and which of them were sampled."""
    steps = []
    for said, round in zip(rounds, (*scene.history(), Round(scene.given)), strict=True):
        roles = [message["role"] for message in said.given]
        steps.append(_Step(roles.count("assistant"), roles.count("tool")))
        is_kept = round.did_sample and round.fingerprint == bound.fingerprint
        steps.append(_Step(len(said.wrote), 0, round if is_kept else None, said.wrote))
    return steps[:-1]


def _trails(steps: Sequence[_Step]) -> list[int]:
    """What tells the steps up to each from others, so that equal texts with equal trails are equal tokens."""

    def plus(trail: int, step: _Step) -> int:
        trail = crc32(bytes((step.answers & 255, step.outputs & 255)), trail)
        for ids in (*step.kept.ids, step.kept.tail) if step.kept is not None else ():
            trail = crc32(ids, trail)
        return trail

    return [*accumulate(steps, plus, initial=0)]


def _sampled(bound: BoundFamily, round: Round) -> IdArray[int]:
    """What the model said; the template closes the turn itself."""
    ids = sampled_ids(round)
    return ids[:-1] if ids and ids[-1] in bound.stops else ids


def _kept_prompts(bound: BoundFamily, scene: Scene) -> Iterator[TemplatePrompt]:
    """The prompts that were kept, the longest first: of the last turn that has one."""
    turn = scene.past
    while turn is not None and _kept_prompt(bound, turn.warm) is None:
        turn = turn.parent
    node: Tokens | None = _kept_prompt(bound, turn.warm) if turn is not None else None
    while isinstance(node, TemplatePrompt):
        yield node
        node = node.before


def _kept_prompt(bound: BoundFamily, warm: Warm | None) -> TemplatePrompt | None:
    if warm is None or warm.fingerprint != bound.fingerprint:
        return None
    prompt = warm.prompt
    nodes = (prompt, prompt.before) if isinstance(prompt, Tokens) else ()
    return next((node for node in nodes if isinstance(node, TemplatePrompt)), None)


def _bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")
