"""Which cells of the matrix hold? `python -m tests.models.matrix` tries every family and writes docs/inside/families.md
and, in a word for each, docs/models.md.

With names of families only their rows are made anew. What is wrong with a family is printed.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from segue.errors import ApiError
from tests.models import assets
from tests.models.cells import CELLS
from tests.models.families import BY_NAME, NOT_TRIED, NOTES, WITHOUT_TOOLS, ModelFamily
from tests.models.injection import break_out
from tests.models.judge import Refused
from tests.models.talk import Absent, Model

PAGE = assets.ROOT / "docs" / "inside" / "families.md"
# What to make of each family, for users.
USE = assets.ROOT / "docs" / "models.md"
BETWEEN = re.compile(r"(<!-- matrix -->\n).*?(<!-- end -->)", re.DOTALL)
VERDICTS = re.compile(r"(<!-- use -->\n).*?(<!-- end of use -->)", re.DOTALL)
# Texts at each place; tests/dialects/test_injection.py tries a thousand for some families.
TEXTS = 25


def injection(model: Model) -> None:
    """Texts made of the family's marks, wherever a user or a tool can write, change no mark of the prompt."""
    assert break_out(model.dialect, TEXTS), "nothing was compared"


COLUMNS = {**CELLS, "injection": injection}
HEADER = ("family", "tokenizer", "dialect", *COLUMNS)
HOLDS, FAILS, ABSENT, UNJUDGED = "yes", "**no**", "–", "?"
RELATIVES = {
    "qwen3": "Qwen3", "qwen2_5": "Qwen2.5", "llama3_1": "Llama 3.1", "mistral_nemo": "Mistral Nemo",
    "deepseek_v3": "DeepSeek V3", "gemma3": "Gemma 3", "command_r_plus": "Command R+",
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """What came of one cell, and why where it does not hold."""

    mark: str
    why: str = ""


TRIMMED = "yes, but white space"
Row = Mapping[str, Result]


def tried(model: Model, column: str) -> Result:
    try:
        COLUMNS[column](model)
    except Absent as absent:
        return Result(ABSENT, str(absent))
    except Refused as refused:
        return Result(UNJUDGED, f"the template itself refuses: {refused}")
    except ApiError as error:
        return Result(FAILS, f"refused: {error.message}")
    except Exception as wrong:
        return Result(FAILS, f"{type(wrong).__name__}: {wrong}")
    return Result(HOLDS)


def row_of(name: str) -> tuple[str, Row]:
    """The dialect that the server chooses for this family, and every cell."""
    model = Model(BY_NAME[name])
    row = {column: tried(model, column) for column in COLUMNS}
    if model.trimmed:
        trimmed = Result(TRIMMED, model.trimmed)
        row = {column: trimmed if is_turn(column, one) else one for column, one in row.items()}
    try:
        return model.dialect.name, row
    except Exception:
        return "–", row


def is_turn(column: str, result: Result) -> bool:
    return column in ("turn 2", "turn 5", "turn 10", "thoughts") and result.mark == HOLDS


def tokenizer_words(family: ModelFamily) -> str:
    return "own" if family.is_own else f"{RELATIVES[family.tokenizer]}'s"


def table(rows: Mapping[str, Mapping[str, str]]) -> str:
    lines = [
        "| " + " | ".join(HEADER) + " |",
        "|" + "---|" * len(HEADER),
        *(
            "| " + " | ".join(rows.get(name, {}).get(column, UNJUDGED) for column in HEADER) + " |"
            for name in BY_NAME
        ),
    ]
    lines += ["", "Not tried:", ""]
    lines += [f"- {name}: {why}." for name, why in NOT_TRIED.items()]
    return "\n".join([*lines, ""])


def verdict(name: str, row: Mapping[str, str]) -> str:
    """What to make of a family, in a word."""
    if name in WITHOUT_TOOLS or FAILS in row.values():
        return "do not use" if name not in WITHOUT_TOOLS else "do not use with tools"
    return "use with a note" if name in NOTES else "use"


def verdicts(rows: Mapping[str, Mapping[str, str]]) -> str:
    lines = ["| family | | |", "|---|---|---|"]
    for name in BY_NAME:
        found = verdict(name, rows.get(name, {}))
        failed = [column for column, mark in rows.get(name, {}).items() if mark == FAILS]
        why = NOTES.get(name, f"wrong: {', '.join(failed)}" if failed else "")
        lines.append(f"| {name} | {found} | {why} |")
    return "\n".join([*lines, ""])


def written(page: str, rows: Mapping[str, Mapping[str, str]]) -> str:
    """A page with its tables made anew."""
    page = VERDICTS.sub(lambda found: found[1] + verdicts(rows) + found[2], page)
    return BETWEEN.sub(lambda found: found[1] + table(rows) + found[2], page)


def on_page() -> dict[str, dict[str, str]]:
    """The cells of the page, by family and column."""
    found = BETWEEN.search(PAGE.read_text())
    assert found, f"{PAGE.name} has no place for the matrix"
    header, _, *rows = [line for line in found[0].splitlines() if line.startswith("|")]
    columns = [cell.strip() for cell in header.strip("|").split("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    return {row[0]: dict(zip(columns, row, strict=True)) for row in cells}


def show(name: str, row: Row) -> None:
    print(f"{name:22}", *(f"{one.mark:7}" for one in row.values()), flush=True)
    for column, result in row.items():
        if result.mark in (FAILS, UNJUDGED, TRIMMED):
            print(f"      {column}: {result.why[:600]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these families")
    names = parser.parse_args().names or list(BY_NAME)
    rows = on_page()
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for name, (dialect, row) in zip(names, pool.map(row_of, names), strict=True):
            first = (name, tokenizer_words(BY_NAME[name]), dialect)
            marks = (row[column].mark for column in COLUMNS)
            rows[name] = dict(zip(HEADER, (*first, *marks), strict=True))
            show(name, row)
            for page in (PAGE, USE):
                page.write_text(written(page.read_text(), rows))


if __name__ == "__main__":
    main()
