"""What does a chat template write for an image, and which image stands where?

A template is run once with an image between two words: what it writes between them is the placeholder of the family. In
a conversation an image is then a mark in the text, with its digest: so a text with another image is another text, and
what was kept of the first is not taken for it. Templates copy the mark like any other letters, also where they know
images only in messages of a user. In the end the mark becomes the ids of the placeholder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import blake2b

from segue.errors import InvalidRequest
from segue.seams.prompt import ImageAt
from segue.vocabularies.chat_template import Chat, TemplateRunner
from segue.wire.items import InputImage

# Noncharacters, as in `shield.py`.
IMAGE_BEFORE = "\ufdd3"
IMAGE_AFTER = "\ufdd4"
IMAGE = f"{IMAGE_BEFORE}[0-9a-f]{{32}}{IMAGE_AFTER}"
ENDING_IMAGE = re.compile(f"(?P<text>[^{IMAGE_BEFORE}]+)(?P<image>{IMAGE})", re.DOTALL)
# Two words that no template has.
WORDS = ("Before9b1", "After9b1")


def placeholder_of(runner: TemplateRunner) -> str | None:
    """What the template writes for an image of the user, with the white space around it; None: it takes no images."""
    before, after = ({"type": "text", "text": word} for word in WORDS)
    image = {"type": "image"}
    written = [_between(runner, [before, *images, after]) for images in ([], [image])]
    # A template that takes no parts prints them as they are.
    is_known = written[1] and written[0] is not None and "type" not in written[1]
    return written[1] if is_known and written[0] != written[1] else None


def stands_first(runner: TemplateRunner, placeholder: str) -> bool:
    """Whether an image that follows the only text of a message is written before that text."""
    content: list[dict[str, str]] = [{"type": "text", "text": WORDS[0]}, {"type": "image"}]
    try:
        text = runner.run([{"role": "user", "content": content}], None, 0, is_cued=True)
    except InvalidRequest:
        return False
    before, found, after = text.partition(WORDS[0])
    return bool(found) and placeholder in before and placeholder not in after


def _between(runner: TemplateRunner, content: list[dict[str, str]]) -> str | None:
    chat: Chat = [{"role": "user", "content": content}]
    try:
        text = runner.run(chat, None, 0, is_cued=True)
    except InvalidRequest:
        return None
    _, found, rest = text.partition(WORDS[0])
    written, ended, _ = rest.partition(WORDS[1])
    return written if found and ended else None


def moved_first(text: str) -> str:
    """A text with one image at its end, with that image before it."""
    found = ENDING_IMAGE.fullmatch(text)
    return f"{found['image']}{found['text']}" if found else text


@dataclass(slots=True)
class Images:
    """The images of one conversation: marked while it is written, placed when it is encoded."""

    placeholder: str
    found: dict[str, str] = field(default_factory=dict)
    placed: list[ImageAt] = field(default_factory=list)

    def show(self, image: InputImage) -> str | None:
        """The mark of this image."""
        url = image.data_url
        if url is None:
            return None
        digest = blake2b(url.encode(errors="surrogatepass"), digest_size=16).hexdigest()
        mark = f"{IMAGE_BEFORE}{digest}{IMAGE_AFTER}"
        self.found[mark] = url
        before, _, after = self.placeholder.partition(self.placeholder.strip())
        return f"{before}{mark}{after}"
