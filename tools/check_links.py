#!/usr/bin/env python3
"""Holds the Markdown pages together.

* Every relative link leads to a file of the project and, with `#`, to a heading of it.
* Every page of docs/ can be reached from README.md.
* Every path in `code` that begins with a folder of the project exists.
* Every page of docs/ that a comment or docstring names exists.

Reads the files git knows or would add. Needs nothing but Python and git.
"""

from __future__ import annotations

import pathlib
import re
import sys

import check_layers

ROOT = check_layers.ROOT
LINK = re.compile(r"\]\(([^()\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.DOTALL | re.MULTILINE)
HEADING = re.compile(r"^#{1,6} +(.+?) *$", re.MULTILINE)
# `docs/fp8.md`, `tests/core`: a folder of the project, then more.
CODE_PATH = re.compile(r"`((?:benchmarks|cpp|cuda|docs|examples|python|tests|tools)/[\w./-]+)`")

# docs/fp8.md, in a comment.
NAMED_PAGE = re.compile(r"\bdocs/[\w/-]+\.md\b")
SOURCES = (".h", ".cc", ".cuh", ".cu", ".py", ".pyi", ".def", ".cmake")


def anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them; a heading met again gets a number."""
    found: dict[str, int] = {}
    for heading in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found[words] = found.get(words, 0) + 1
    return {f"{w}-{i}" if i else w for w, count in found.items() for i in range(count)}


def folders(files: set[str]) -> set[str]:
    return {str(parent) for name in files for parent in pathlib.PurePath(name).parents}


def target_of(page: str, link: str) -> tuple[str, str]:
    """(path from the root, anchor); the path of a link within the page is the page."""
    path, _, anchor = link.partition("#")
    if not path:
        return page, anchor
    parts: list[str] = []
    for part in [*pathlib.PurePath(page).parent.parts, *path.split("/")]:
        if part == "..":
            parts = parts[:-1]
        elif part not in ("", "."):
            parts.append(part)
    return "/".join(parts), anchor


def check_page(page: str, text: str, files: set[str], texts: dict[str, str]) -> list[str]:
    """What is wrong with the links and paths of one page."""
    problems = []
    known = files | folders(files)
    for link in LINK.findall(FENCE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, anchor = target_of(page, link)
        if path not in known:
            problems.append(f"{page}: link to {link}: no such file")
        elif anchor and anchor not in anchors(texts.get(path, "")):
            problems.append(f"{page}: link to {link}: no such heading")
    for path in CODE_PATH.findall(text):
        if path.rstrip("/.") not in known:
            problems.append(f"{page}: `{path}`: no such file")
    return problems


def unreachable(texts: dict[str, str]) -> list[str]:
    """Pages of docs/ that no chain of links from README.md leads to."""
    seen, waiting = set(), ["README.md"]
    while waiting:
        page = waiting.pop()
        if page in seen or page not in texts:
            continue
        seen.add(page)
        waiting += [target_of(page, link)[0] for link in LINK.findall(texts[page])]
    return [f"{page}: no link leads here" for page in sorted(texts) if page not in seen]


def check_source(name: str, text: str, files: set[str]) -> list[str]:
    """Pages that a source file names and that are not there."""
    return [
        f"{name}: {page}: no such page"
        for page in sorted(set(NAMED_PAGE.findall(text)))
        if page not in files
    ]


def main() -> int:
    files = set(check_layers.project_files())
    texts = {name: (ROOT / name).read_text() for name in files if name.endswith(".md")}
    problems = [p for page in sorted(texts) for p in check_page(page, texts[page], files, texts)]
    for name in sorted(files):
        if name.endswith(SOURCES) and not name.startswith("tests/tools/"):  # they invent pages
            problems += check_source(name, (ROOT / name).read_text(), files)
    problems += unreachable({p: t for p, t in texts.items() if p.startswith(("docs/", "README"))})
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
