"""The Python blocks of docs/usage.md run, one after the other in one namespace."""

import pathlib
import re

import pytest

pytest.importorskip("torch")
PAGE = pathlib.Path(__file__).parents[2] / "docs/usage.md"


def test_recipes_run():
    text = PAGE.read_text()
    names = {"__name__": "usage"}
    blocks = list(re.finditer(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE))
    assert len(blocks) >= 7
    for block in blocks:
        first_line = text[: block.start(1)].count("\n")
        exec(compile("\n" * first_line + block[1], str(PAGE), "exec"), names)
