"""Does the player fail when a page is wrong? Each made-up page is wrong in one way."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.documents.pages import BadPage, steps_of
from tests.documents.player import Surprise, playing

GOOD = """# A page

<!-- play: file greeting.txt -->
```text
hello
```

```sh
mkdir inner && cd inner
export WHO=reader
echo made
```

```sh
cat ../greeting.txt   # the folder is still the inner one
echo "$WHO at http://127.0.0.1:8080"
```

<!-- play: expect -->
```text
hello
reader at http://…
```

```json
{"shown": "and not run"}
```

<!-- play: until ready -->
```sh
echo ready; exec sleep 60
```

<!-- play: exit 3 -->
<!-- play: replace 4 with 3 -->
```sh
echo bye; exit 4
```

<!-- play: input yes -->
```sh
read -r answer; echo "got $answer"
```

<!-- play: expect -->
```text
got yes
```

<!-- play: skip only for people -->
```sh
false
```

<!-- play: quiet -->
```sh
true
```
"""


def write(folder: Path, text: str) -> Path:
    page = folder / "page.md"
    page.write_text(text)
    return page


def test_reader_follows_a_page_to_its_end(tmp_path: Path) -> None:
    with playing(tmp_path) as player:
        assert player.play(steps_of(write(tmp_path, GOOD))) == 6
        assert ":8080" not in player.printed


def block(text: str, *marks: str, language: str = "sh") -> str:
    lines = [f"<!-- play: {mark} -->" for mark in marks]
    return "\n".join([*lines, f"```{language}", text, "```", ""])


@pytest.mark.parametrize(
    "page, complaint",
    [
        (block("echo one; false; echo two"), "exit status 1, not 0"),
        (block("nosuchcommand"), "exit status 127"),
        (block("true"), "nothing was printed"),
        (block("echo fine", "exit 1"), "exit status 0, not 1"),
        (block("echo apple") + block("pear", "expect", language="text"), "not printed: pear"),
        (
            block("echo a; echo b") + block("b\na", "expect", language="text"),
            "not printed: a",
        ),
        (block("echo no", "until ready"), "ended with 0 before 'ready'"),
        # It must not be stopped before it has ended by itself.
        (block("trap '' TERM; echo ready; exit 7", "until ready"), "ended with 7"),
        (block("echo a", "replace b with c"), "'b', which is to be replaced, is not there"),
        (
            block("echo 'Traceback (most recent call last)'; echo"),
            "a traceback",
        ),
        (block("raise SystemExit(2)", language="python"), "exit status 2"),
    ],
)
def test_reader_is_surprised(page: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(Surprise, match=complaint), playing(tmp_path) as player:
        player.play(steps_of(write(tmp_path, page)))


@pytest.mark.parametrize(
    "page, complaint",
    [
        (block("x", "skip"), "page.md:1: the mark 'skip' needs a value"),
        (block("x", "quiet please"), "the mark 'quiet' takes no value"),
        (block("x", "jump"), "no mark 'jump'"),
        ("<!-- play: quiet -->\n\n" + block("x"), "belongs to no block"),
        ("<!-- play quiet -->\n<!-- play:quiet -->\n" + block("x"), "cannot be read"),
        ("```sh\nx\n", "not finished"),
    ],
)
def test_a_page_that_cannot_be_read_is_refused(page: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(BadPage, match=complaint):
        steps_of(write(tmp_path, page))


def test_a_section_ends_at_the_next_heading(tmp_path: Path) -> None:
    text = "# A\n\n## One\n\n```sh\n# no heading\n```\n\n### In it\n\n```sh\nb\n```\n\n## Two\n\n```sh\nc\n```\n"
    page = write(tmp_path, text)
    assert [step.text for step in steps_of(page, "One")] == ["# no heading\n", "b\n"]
    with pytest.raises(BadPage, match="no section 'Three'"):
        steps_of(page, "Three")
