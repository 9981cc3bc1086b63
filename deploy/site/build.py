"""How do the documents become a site? `make site`.

The pages keep their places in the repository, so that their links hold: README.md is the home page, docs/README.md the
index. What they link to beside them (examples, configuration files) is copied too; a folder that is linked gets a page
that lists it. The order of the pages is that of docs/README.md. MkDocs then builds the site and refuses links and
headings that do not exist.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml  # of MkDocs

ROOT = Path(__file__).parents[2]
HERE = ROOT / "deploy" / "site"
WORK = (ROOT / ".cache" / "site").resolve()
PAGES = WORK / "pages"

LINK = re.compile(r"(\]\()(?!\w+:|#)([^)#\s]+)((?:#[^)\s]+)?\))")
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
# For the tests that run the commands of a page.
MARK = re.compile(r"^ *<!-- play: .* -->\n", re.MULTILINE)
ITEM = re.compile(r"\d+\. |[-*] ")
FENCE = re.compile(r"(```.*?```|`[^`\n]+`)", re.DOTALL)
# What is for those who work on Segue: the search of the site finds it after the pages for users.
INSIDE = (
    "docs/inside/",
    "docs/decisions/",
    "docs/adding/",
    "bench/",
    "CHANGELOG.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
)
LATER = "---\nsearch:\n  boost: 0.2\n---\n\n"


def gather() -> None:
    """Copy the pages and everything that they link to."""
    shutil.rmtree(PAGES, ignore_errors=True)
    left = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    seen = set(left)
    while left:
        page = left.pop()
        text = page.read_text("utf-8")
        for _, target, _ in LINK.findall(FENCE.sub("", text)):
            linked = (page.parent / target).resolve()
            linked = linked / "README.md" if (linked / "README.md").is_file() else linked
            if linked.exists() and linked not in seen and linked.is_relative_to(ROOT):
                seen.add(linked)
                _copy(linked)
                left += [linked] if linked.suffix == ".md" else []
        place = PAGES / page.relative_to(ROOT)
        place.parent.mkdir(parents=True, exist_ok=True)
        lines = _with_pages_for_folders(page, MARK.sub("", text)).splitlines()
        front = LATER if page.relative_to(ROOT).as_posix().startswith(INSIDE) else ""
        place.write_text(front + "\n".join(_indented(lines)) + "\n", "utf-8")
    for name in ("look.css",):
        shutil.copy(HERE / name, PAGES / name)
    shutil.copy(ROOT / "src" / "segue_dashboard" / "mark.svg", PAGES / "mark.svg")


def _copy(path: Path) -> None:
    place = PAGES / path.relative_to(ROOT)
    if path.is_dir():
        files = sorted(one.name for one in path.iterdir() if one.is_file())
        for name in files:
            _copy(path / name)
        rows = "\n".join(f"- [{name}]({name})" for name in files)
        place.mkdir(parents=True, exist_ok=True)
        (place / "README.md").write_text(f"# {path.relative_to(ROOT)}\n\n{rows}\n", "utf-8")
    elif path.suffix != ".md":
        place.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, place)


def _indented(lines: list[str]) -> list[str]:
    """With blocks inside list items indented by four: the only depth that Python-Markdown knows."""
    done: list[str] = []
    is_code, at = False, 0
    while at < len(lines):
        line, at = lines[at], at + 1
        done.append(line)
        is_code ^= line.startswith("```")
        if found := None if is_code else ITEM.match(line):
            depth, start = " " * len(found[0]), at
            while at < len(lines) and (not lines[at] or lines[at].startswith(depth)):
                at += 1
            inner = _indented([one.removeprefix(depth) for one in lines[start:at]])
            done += [f"    {one}" if one else "" for one in inner]
            # An item of several blocks ends with an empty line.
            done += [""] if "" in inner else []
    return done


def _with_pages_for_folders(page: Path, text: str) -> str:
    """A link to a folder leads to its page."""

    def lead(found: re.Match[str]) -> str:
        is_folder = (page.parent / found[2]).is_dir()
        return f"{found[1]}{found[2].rstrip('/')}/README.md{found[3]}" if is_folder else found[0]

    return "".join(
        part if number % 2 else LINK.sub(lead, part)
        for number, part in enumerate(FENCE.split(text))
    )


def navigation() -> list[object]:
    """The pages in the order of docs/README.md, by its headings; then what is left, by folder."""
    index = PAGES / "docs" / "README.md"
    sections: dict[str, list[str]] = {}
    placed = {"README.md", "docs/README.md"}
    for part in re.split(r"^## ", index.read_text("utf-8"), flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        for _, target, _ in LINK.findall("\n".join(re.findall(r"^\| \[.*$", text, re.MULTILINE))):
            page = (index.parent / target).resolve()
            name = page.relative_to(PAGES).as_posix()
            # The index of a folder brings its folder.
            inside = sorted(page.parent.glob("*.md")) if page.name == "README.md" else []
            names = [name, *(one.relative_to(PAGES).as_posix() for one in inside)]
            fresh = [one for one in dict.fromkeys(names) if one not in placed]
            placed.update(fresh)
            if len(fresh) > 1:
                sections.setdefault(title, []).append({_title(page): fresh})  # type: ignore[arg-type]
            elif fresh:
                sections.setdefault(title, []).append(fresh[0])
    rest = sorted(
        path.relative_to(PAGES).as_posix()
        for path in PAGES.rglob("*.md")
        if path.relative_to(PAGES).as_posix() not in placed
    )
    named = [{title.rpartition(": ")[2].capitalize(): pages} for title, pages in sections.items()]
    return [{"Home": ["README.md", {"Documents": "docs/README.md"}]}, *named, {"More": rest}]


def _title(page: Path) -> str:
    found = HEADING.search(page.read_text("utf-8"))
    return found[1] if found else page.parent.name


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("into", nargs="?", default=str(ROOT / "site"), help="default: site/")
    into = Path(parser.parse_args().into).resolve()
    gather()
    settings = WORK / "mkdocs.yml"
    inherited = {"INHERIT": str(HERE / "mkdocs.yml"), "docs_dir": str(PAGES), "nav": navigation()}
    settings.write_text(yaml.safe_dump(inherited, sort_keys=False, allow_unicode=True), "utf-8")
    command = ["-m", "mkdocs", "build", "--strict", "-f", str(settings), "-d", str(into)]
    status = subprocess.run([sys.executable, *command]).returncode
    if status == 0:
        print(f"{into}/index.html")
    return status


if __name__ == "__main__":
    sys.exit(main())
