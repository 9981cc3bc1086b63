"""What is a skill? A name, what it is for, and files, of which `SKILL.md` says the rest.

In: a zip, and what a request says of it. Out: a `Bundle`, or a refusal. The front matter of `SKILL.md` is YAML; its
values are read as texts and nothing else, from a short beginning of the file.
"""

from __future__ import annotations

import re
from io import BytesIO
from typing import IO

import yaml  # type: ignore[import-untyped]
from msgspec import Struct

from segue.bundles.zips import BadBundle, ZippedFile, is_manifest, list_zip, zip_reader
from segue.errors import InvalidRequest

NAME_CHARS_MAX = 64
DESCRIPTION_CHARS_MAX = 1024
# Between the two lines of hyphens.
FRONT_BYTES_MAX = 16 * 1024
# Brackets, of lists and mappings in a line: the library's time grows with the square of their depth.
NESTED_MAX = 100
# What YAML can write by escapes, and no store, model or terminal should get.
_UNWRITABLE = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_FRONT = re.compile(r"\A\ufeff?---[ \t]*\r?\n(.*?)^---[ \t]*\r?$", re.DOTALL | re.MULTILINE)


class Bundle(Struct, frozen=True):
    """A skill that can be put into a container."""

    name: str
    description: str
    files: tuple[ZippedFile, ...]

    @property
    def bytes(self) -> int:
        """The size of its files."""
        return sum(file.size for file in self.files)

    @property
    def manifest(self) -> str:
        """The path of its instructions."""
        return next(file.path for file in self.files if is_manifest(file.path))


def stored_bundle(file: IO[bytes], param: str) -> Bundle:
    """The skill in a zip, which says itself what it is for."""
    try:
        files = list_zip(file)
        front = _front_matter(file, files)
        if front is None:
            raise BadBundle("SKILL.md does not begin with a front matter, between two lines '---'")
        return Bundle(*check_words(front.get("name"), front.get("description")), tuple(files))
    except BadBundle as bad:
        raise refused(bad, param) from None


def inline_bundle(name: str, description: str, packed: bytes, param: str) -> Bundle:
    """The skill in the zip of a request, which says what it is for."""
    try:
        words = check_words(name, description)
        file = BytesIO(packed)
        files = list_zip(file)
        # It need not be there; what is there must be right.
        _front_matter(file, files)
        return Bundle(*words, tuple(files))
    except BadBundle as bad:
        raise refused(bad, param) from None


def refused(why: object, param: str) -> InvalidRequest:
    """The error of a skill that is not as it must be."""
    return InvalidRequest(f"The skill is refused: {why}.", code="invalid_skill", param=param)


def check_words(name: object, description: object) -> tuple[str, str]:
    """Refuse a name or a description that a skill cannot have."""
    is_name = isinstance(name, str) and _NAME.fullmatch(name) and len(name) <= NAME_CHARS_MAX
    if not isinstance(name, str) or not is_name:
        words = f"its name is 1 to {NAME_CHARS_MAX} of a-z, 0-9 and single hyphens between them"
        raise BadBundle(words)
    if not isinstance(description, str) or not 1 <= len(description) <= DESCRIPTION_CHARS_MAX:
        raise BadBundle(f"its description has 1 to {DESCRIPTION_CHARS_MAX} characters")
    if _UNWRITABLE.search(description):
        raise BadBundle("its description has control characters, or half of one")
    return name, description


def _front_matter(file: IO[bytes], files: list[ZippedFile]) -> dict[str, object] | None:
    """What the front matter of `SKILL.md` says; None where it has none."""
    entry = next(each.entry for each in files if is_manifest(each.path))
    data = b""
    with zip_reader(file) as read:
        for piece in read(entry):
            data += piece
            if len(data) > FRONT_BYTES_MAX:
                break
    text = data[:FRONT_BYTES_MAX].decode("utf-8", "replace")
    if not text.removeprefix("\ufeff").startswith("---"):
        return None
    found = _FRONT.match(text)
    if found is None:
        raise BadBundle(f"the front matter of SKILL.md does not end within {FRONT_BYTES_MAX} bytes")
    if len(re.findall(r"[\[{]", found[1])) > NESTED_MAX:
        raise BadBundle(f"the front matter of SKILL.md has more than {NESTED_MAX} brackets")
    try:
        front = yaml.load(found[1], yaml.BaseLoader)
    except (yaml.YAMLError, ValueError, RecursionError):
        raise BadBundle("the front matter of SKILL.md is not YAML that can be read") from None
    if not isinstance(front, dict):
        raise BadBundle("the front matter of SKILL.md is not a mapping")
    return {
        str(key): value.strip() if isinstance(value, str) else value for key, value in front.items()
    }
