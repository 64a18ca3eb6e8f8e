"""api_docs.py: the page comes from docstrings, and a page that differs is noticed."""

from __future__ import annotations

import api_docs
import pytest

INIT = """
from pantile._a import Thing, act
from pantile._C import Error
from pantile import extra

__all__ = ["Error", "Thing", "__version__", "act", "extra"]
Error.__doc__ = "It failed."
"""
EXTRA = '''
"""More of it.

    first()
    second()

That is all.
"""
from pantile._a import act

__all__ = ["act", "more"]

@overload
def more(a: int) -> int: ...
def more(a, *rest: Any, b: int = 1, **others: Any) -> Any:
    """Does more."""
'''
SOURCE = '''
class Thing:
    """What there is.

    size: how large,
        in rows.
    """

    size: int = 3  # rows


def act(
    first, second: int = 1, *, third_argument: tuple[int, int] = (1, 2), fourth_argument=None,
    x=0,
) -> dict[str, tuple[int, int]]:
    """Does it with :class:`Thing`.

    Algorithm: none.

    Args:
        first: of
            two lines.
        second, x: ``both``.

    Returns:
        o: ``[batch]``.

    Raises:
        TypeError: wrong.
    """
'''

SEVERAL = '''"""A package of its own."""
from pantile.several._b import spread
def begin():
    """Begins."""
__all__ = ["begin", "spread"]
'''


@pytest.fixture
def project(tmp_path, monkeypatch):
    package = tmp_path / api_docs.PACKAGE
    package.mkdir(parents=True)
    (tmp_path / "docs").mkdir()
    (package / "__init__.py").write_text(INIT)
    (package / "_a.py").write_text(SOURCE)
    (package / "extra.py").write_text(EXTRA.lstrip())
    (package / "several").mkdir()
    (package / "several" / "__init__.py").write_text(SEVERAL)
    (package / "several" / "_b.py").write_text('def spread(x):\n    """Over several."""\n')
    monkeypatch.setattr(api_docs, "ROOT", tmp_path)
    monkeypatch.setattr(api_docs, "DOORS", ("several",))
    return tmp_path


def test_functions_types_and_modules(project):
    text = api_docs.page()
    assert [line for line in text.split("\n") if line.startswith("## ")] == [
        "## act",
        "## extra",
        "## extra.more",
        "## Error",
        "## Thing",
        "## pantile.several",
        "## pantile.several.begin",
        "## pantile.several.spread",
    ]
    assert "    third_argument: tuple[int, int] = (1, 2),\n    fourth_argument=None,\n" in text
    assert "    x=0,\n) -> dict[str, tuple[int, int]]\n```\n\nDoes it with `Thing`.\n" in text
    assert "\n\nAlgorithm: none.\n\n" in text
    assert "**Args**\n\n- `first`: of\n  two lines.\n- `second, x`: `both`.\n" in text
    assert "**Returns**\n\no: `[batch]`.\n" in text
    assert "**Raises**\n\n- `TypeError`: wrong.\n" in text
    assert "## Error\n\nIt failed.\n" in text
    assert "## extra\n\nMore of it.\n\n    first()\n    second()\n\nThat is all.\n" in text
    assert "```python\ndef more(a, *, b: int=1)\n```\n\nDoes more.\n" in text
    assert "class Thing:\n    size: int = 3  # rows\n" in text
    assert "## pantile.several\n\nA package of its own.\n" in text
    assert "def begin()\n```\n\nBegins.\n" in text
    assert "def spread(x)\n```\n\nOver several.\n" in text
    assert "- `size`: how large,\n  in rows.\n" in text


def test_an_export_without_docstring_is_refused(project):
    (project / api_docs.PACKAGE / "_a.py").write_text("class Thing: ...\ndef act(): ...\n")
    with pytest.raises(ValueError, match="act is exported and has no docstring"):
        api_docs.page()


def test_a_stale_page_is_noticed(project, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["api_docs.py", "--check"])
    assert api_docs.main() == 1
    assert "docs/api.md is out of date: run make docs" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["api_docs.py"])
    assert api_docs.main() == 0
    monkeypatch.setattr("sys.argv", ["api_docs.py", "--check"])
    assert api_docs.main() == 0
