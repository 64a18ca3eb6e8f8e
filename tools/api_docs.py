#!/usr/bin/env python3
"""Writes docs/api.md from the docstrings of the names that pantile exports.

Reads the sources with ast: nothing is imported or built. `--check` changes nothing and fails when
the page is out of date.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import sys

import results_docs

ROOT = results_docs.ROOT
PACKAGE = "python/pantile"
PAGE = "docs/api.md"
HEAD = """# API reference

Written by `tools/api_docs.py` from the docstrings in `python/pantile`. Recipes are in
[usage.md](usage.md).
"""
# Modules that are imported by name, in the order of the page.
DOORS = (
    *("compat", "compat.flash_attn", "compat.flash_attn_3", "compat.vllm", "compat.bert_padding"),
    *("sdpa", "integrations.transformers", "integrations.dtensor", "distributed"),
)
SECTION = re.compile(r"^(Args|Returns|Raises):$")
# "name: text" or "a, b: text" opens the description of an argument or option, or of an error.
TERMS = {"Raises": re.compile(r"^([\w.]+(?:, [\w.]+)*): +"), "Returns": re.compile(r"(?!)")}
TERM = re.compile(r"^([a-z_0-9]+(?:, [a-z_0-9]+)*): +")


def markdown(doc: str) -> list[str]:
    """A docstring: roles and literals as code, sections as bold words, their terms as a list."""
    doc = re.sub(r":\w+:`~?([^`]+)`", r"``\1``", inspect.cleandoc(doc)).replace("``", "`")
    lines: list[str] = []
    inside = ""  # the section being read
    in_term = False  # indented lines go on with the description of a term, or are code
    for raw in doc.split("\n"):
        in_term = in_term and bool(raw.strip())
        if section := SECTION.match(raw):
            inside, in_term = section[1], False
            lines += [f"**{inside}**", ""]
            continue
        line = raw.removeprefix("    ") if inside else raw
        if term := TERMS.get(inside, TERM).match(line):
            line = f"- `{term[1]}`: {line[term.end() :]}"
            in_term = True
        elif line.startswith("    ") and in_term:
            line = f"  {line.strip()}"
        lines.append(line)
    return lines


def signature(node: ast.FunctionDef) -> list[str]:
    """The head of a function; one argument a line where it does not fit.

    Arguments of any number are there to be refused with an answer, so the head leaves them out, and
    it leaves out what says nothing: a result of type Any, which overloads tell apart.
    """
    body = [ast.Expr(ast.Constant(...))]
    arguments = copy.copy(node.args)
    arguments.vararg = arguments.kwarg = None
    untold = node.returns is None or ast.unparse(node.returns) == "Any"
    returns = None if untold else node.returns
    head = ast.FunctionDef(node.name, arguments, body, [], returns, lineno=0)
    text = ast.unparse(head).removesuffix("\n    ...").removesuffix(":")
    if len(text) <= 100:
        return [text]
    opening, inner, closing = re.fullmatch(r"(def \w+\()(.*)(\).*)", text).groups()
    arguments = re.split(r", (?![^\[(]*[\])])", inner)
    spaced = [re.sub(r"^(\w+: [^=]+)=", r"\1 = ", argument) for argument in arguments]
    return [opening, *(f"    {argument}," for argument in spaced), closing]


def fields(node: ast.ClassDef, lines: list[str]) -> list[str]:
    """The fields of a dataclass as they stand in the source, comments included."""
    found = [item for item in node.body if isinstance(item, ast.AnnAssign)]
    if not found:
        return []
    return [f"class {node.name}:", *lines[found[0].lineno - 1 : found[-1].end_lineno]]


def exported(tree: ast.Module) -> list[str]:
    """The names of ``__all__``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [name for name in ast.literal_eval(node.value) if not name.startswith("__")]
    return []


def entry(name: str, home: str) -> list[str]:
    """The section of one name; of a module its docstring, then what it defines and exports."""
    own = home == "pantile"
    module = name if own else home.removeprefix("pantile.")
    path = ROOT / PACKAGE / f"{module.replace('.', '/')}.py"
    text = path.read_text()
    tree = ast.parse(text)
    defined = {n.name: n for n in tree.body if hasattr(n, "name")}
    node = tree if own else defined[name]
    doc = ast.get_docstring(node, clean=False)
    if doc is None:
        raise ValueError(f"{path.name}: {name} is exported and has no docstring")
    if own:
        lines = [f"## {name}", "", *markdown(doc), ""]
        for member in exported(tree):
            lines += entry(member, f"pantile.{name}") if member in defined else []
        return lines
    code = fields(node, text.split("\n")) if isinstance(node, ast.ClassDef) else signature(node)
    block = ["```python", *code, "```", ""] if code else []
    public = ".".join(part for part in module.split(".") if not part.startswith("_"))
    title = f"{public}.{name}" if public else name
    return [f"## {title}", "", *block, *markdown(doc), ""]


def door(module: str) -> list[str]:
    """The sections of a module that is imported by its own name; what a package exports may be
    defined in a module beside it."""
    path = ROOT / PACKAGE / module.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    text = path.read_text()
    tree = ast.parse(text)
    lines = [f"## pantile.{module}", "", *markdown(ast.get_docstring(tree, clean=False)), ""]
    homes = {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    for name in exported(tree):
        source = text
        if name in homes:
            source = (ROOT / "python" / f"{homes[name].replace('.', '/')}.py").read_text()
        named = [n for n in ast.parse(source).body if getattr(n, "name", "") == name]
        node = named[-1]  # behind its overloads
        code = [] if isinstance(node, ast.ClassDef) else signature(node)
        block = ["```python", *code, "```", ""] if code else []
        doc = markdown(ast.get_docstring(node, clean=False))
        lines += [f"## pantile.{module}.{name}", "", *block, *doc, ""]
    return lines


def page() -> str:
    tree = ast.parse((ROOT / PACKAGE / "__init__.py").read_text())
    homes, docs = {}, {}  # name -> module; docstrings set in __init__
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            homes |= {alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith(".__doc__"):
            docs[node.targets[0].value.id] = ast.literal_eval(node.value)
    lines = [HEAD]
    for name in sorted(
        exported(tree), key=lambda n: (n[0].isupper(), n)
    ):  # functions first, then types
        lines += [f"## {name}", "", docs[name], ""] if name in docs else entry(name, homes[name])
    for module in DOORS:
        lines += door(module)
    return "\n".join(lines).rstrip() + "\n"


def main() -> int:
    check = results_docs.only_check()
    stale = results_docs.rewrite(ROOT / PAGE, page(), check)
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
