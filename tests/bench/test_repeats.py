"""What is counted of sessions, by values."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import repeats
from bench.repeats import Context, Count, action_of, copied, count_text


def test_guesses_are_what_followed_before() -> None:
    context = Context()
    context.add([1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1, 2, 3, 4])
    assert context.ngram() == [5, 6, 7, 8, 9, 0, 1, 2]
    assert context.suffix() == [5, 6, 7, 8]
    context.add([11])
    assert context.ngram() == context.suffix() == []


def test_text_that_repeats_takes_fewer_steps_and_is_counted_as_copied() -> None:
    context, count = Context(), Count()
    context.add(range(100))
    count_text(context, [*range(20, 60)], count)
    assert (count.tokens, count.copied) == (40, 40)
    # Two tokens until there is an n-gram, then nine a step.
    assert count.steps["ngram"] == 2 + -(-38 // 9)
    assert count.right["ngram"] == 34
    count_text(context, [*range(200, 210)], new := Count())
    assert (new.copied, new.steps["ngram"], new.steps["suffix"]) == (0, 10, 10)


def test_copies_that_overlap_count_once() -> None:
    assert copied([*range(30), *range(5, 25), 99], 30) == 20


@pytest.mark.parametrize(
    "command, action",
    [
        ("sed -i s/a/b/ x.py", "edit"),
        ("cat > x.py <<'E'", "edit"),
        ("cat x.py | head", "read"),
        ("python -m pytest -q", "test"),
        ("git diff > patch.txt", "edit"),
        ("git stash", "patch"),
        ("pwd", "other"),
    ],
)
def test_commands_are_known_by_what_they_do(command: str, action: str) -> None:
    assert action_of(command) == action


def test_sessions_are_read_as_agents_write_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = {"function": {"name": "bash", "arguments": json.dumps({"command": "cat a.py"})}}
    messages = [
        {"role": "user", "content": "Mend it."},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "def a(): pass"},
        {"role": "assistant", "content": "Done."},
    ]
    (tmp_path / "one.json").write_text(json.dumps({"messages": messages}))
    (tmp_path / "none.json").write_text("[]")
    repeats.main([str(tmp_path)])
    printed = capsys.readouterr().out
    assert printed.startswith("1 sessions, 2 answers")
    assert "read" in printed
    assert "words" in printed
