"""check_links.py: dead links, missing headings, wrong paths and lost pages are found."""

from __future__ import annotations

import check_links

PAGE = "# Title of `it`, 2nd\n\n## Twice\n\n## Twice\n\n```\n# no heading\n[x](nowhere.md)\n```\n"
TEXTS = {"README.md": "[a](docs/a.md)", "docs/a.md": PAGE}
FILES = {*TEXTS, "cpp/core/geometry.h", "docs/plot.png"}


def problems(text: str, page: str = "docs/b.md") -> list[str]:
    return check_links.check_page(page, text, FILES | {page}, TEXTS | {page: text})


def test_headings_become_anchors():
    assert check_links.anchors(PAGE) == {"title-of-it-2nd", "twice", "twice-1"}


def test_good_links_pass():
    assert problems(PAGE) == []
    assert problems("[a](a.md) [b](../README.md) [c](a.md#twice-1) ![d](plot.png)") == []
    assert problems("# Here\n[a](#here) [b](https://x.org/y#z) [c](../cpp/core)") == []
    assert problems("`cpp/core/geometry.h` `cpp/core` `cpp/core/`") == []


def test_dead_ones_are_named():
    assert problems("[a](c.md)") == ["docs/b.md: link to c.md: no such file"]
    assert problems("[a](docs/a.md)") == ["docs/b.md: link to docs/a.md: no such file"]
    assert problems("[a](a.md#thrice)") == ["docs/b.md: link to a.md#thrice: no such heading"]
    assert problems("[a](#no-heading)") == ["docs/b.md: link to #no-heading: no such heading"]
    assert problems("`cpp/core/gone.h`") == ["docs/b.md: `cpp/core/gone.h`: no such file"]


def test_lost_pages_are_named():
    chain = {
        "README.md": "[a](docs/a.md)",
        "docs/a.md": "[b](b.md)",
        "docs/b.md": "",
        "docs/c.md": "",
    }
    assert check_links.unreachable(chain) == ["docs/c.md: no link leads here"]


def test_the_pages_of_this_project_hold_together(capsys):
    assert check_links.main() == 0, capsys.readouterr().out


def test_pages_named_by_sources():
    text = "// More in docs/a.md, and docs/design/gone.md.\n# docs/gone.md\n"
    assert check_links.check_source("cpp/a.h", text, FILES) == [
        "cpp/a.h: docs/design/gone.md: no such page",
        "cpp/a.h: docs/gone.md: no such page",
    ]
    assert check_links.check_source("cpp/a.h", "// docs/a.md", FILES) == []
