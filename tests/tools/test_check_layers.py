"""check_layers.py: each rule finds its breach and passes what is allowed."""

import check_layers
import pytest

INCLUDES = [
    ("cpp/core/geometry.h", "core/integer.h", None),
    ("cpp/core/geometry.h", "host/validate.h", "may not include cpp/host/validate.h"),
    ("cpp/host/device.cc", "cpu/backend.h", None),
    ("cpp/host/device.cc", "cpu/kernels.h", "may not include cpp/cpu/kernels.h"),
    ("cpp/host/kernel_table.cc", "kernel_rows.inc", None),
    ("cpp/cpu/backend.cc", "kernel_rows.inc", "is no file of the project"),
    ("cpp/cpu/backend.cc", "host/validate.h", "may not include cpp/host/validate.h"),
    ("cuda/prim/wgmma.cuh", "tile/fragment.cuh", "may not include cuda/tile/fragment.cuh"),
    ("cuda/tile/fragment.cuh", "attn/mask.cuh", "may not include cuda/attn/mask.cuh"),
    ("cuda/hopper/forward/config.h", "ampere/plan.h", "may not include cuda/ampere/plan.h"),
    ("cuda/hopper/forward/config.h", "prim/wgmma.cuh", None),
    ("python/bindings/module.cc", "host/validate.h", "may not include cpp/host/validate.h"),
    ("python/bindings/module.cc", "pantile/pantile.h", None),
]


@pytest.mark.parametrize(("file", "included", "problem"), INCLUDES)
def test_includes(file, included, problem):
    errors = check_layers.check_includes(file, f'#include <cstdint>\n#include "{included}"\n')
    if problem is None:
        assert errors == []
    else:
        assert len(errors) == 1
        assert problem in errors[0]
        assert errors[0].startswith(f"{file}:2: ")


def test_public_headers_by_angle_brackets_count():
    assert check_layers.check_includes("cpp/core/x.h", "#include <pantile/plan.h>\n") == [
        "cpp/core/x.h:1: cpp/core/ may not include cpp/include/pantile/plan.h"
    ]


def test_an_unknown_folder_needs_a_layer():
    assert "no layer" in check_layers.check_includes("cuda/elsewhere/x.cuh", "")[0]


def function(lines: int, head: str = "int f(int a,\n      int b) {") -> list[str]:
    return [*head.split("\n"), *["  a += b;"] * (lines - 2), "}"]


def test_long_functions():
    limit = check_layers.FUNCTION_LINES
    assert check_layers.check_functions("cpp/a.cc", function(limit)) == []
    assert check_layers.check_functions("cpp/a.cc", function(limit + 1)) == [
        f"cpp/a.cc:2: a function of {limit + 1} lines, at most {limit}"
    ]
    assert check_layers.check_functions("cuda/a.cuh", function(limit + 1)) == []


def test_types_and_namespaces_are_not_functions_but_their_methods_are():
    method = ["  " + line for line in function(check_layers.FUNCTION_LINES + 1)]
    inside = ["namespace a {", "template <class T>", "struct S : B<(1)> {", *method, "};", "}"]
    assert check_layers.check_functions("cpp/a.h", inside) == [
        f"cpp/a.h:5: a function of {check_layers.FUNCTION_LINES + 1} lines, "
        f"at most {check_layers.FUNCTION_LINES}"
    ]


def test_text_rules():
    note = "TO" + "DO"
    text = f"{'x' * 101}\n// {note}: later\n  printf(s);\n  snprintf(s);\n"
    assert check_layers.check_text("cuda/a.cuh", text) == [
        "cuda/a.cuh:1: 101 columns, at most 100",
        "cuda/a.cuh:2: a work note",
        "cuda/a.cuh:3: printf in a kernel file",
    ]
    assert check_layers.check_text("cuda/a.cuh", "x\n" * 451) == [
        "cuda/a.cuh: 451 lines, at most 450"
    ]


WIDE = "word " * 20 + "x"


def test_prose_is_wrapped():
    assert check_layers.check_page("README.md", WIDE) == ["README.md:1: 101 columns, at most 100"]
    assert check_layers.check_page("README.md", WIDE[1:]) == []
    assert len(check_layers.check_page("README.md", f"```\n{WIDE}\n```\n- {WIDE}")) == 2


def test_what_cannot_be_wrapped_may_be_wide():
    block = f"<!-- results x: begin -->\n{WIDE}\n<!-- results x: end -->\n"
    assert check_layers.check_page("README.md", f"{block}| {WIDE} |\n{'x' * 200}\n") == []
    assert check_layers.check_page("README.md", block + WIDE) == [
        "README.md:4: 101 columns, at most 100"
    ]


def test_design_pages_are_short():
    limit = check_layers.DESIGN_LINES
    assert check_layers.check_page("docs/design/a.md", "a\n" * limit) == []
    assert check_layers.check_page("docs/design/a.md", "a\n" * (limit + 1)) == [
        f"docs/design/a.md: {limit + 1} lines, a design page has at most {limit}"
    ]
    assert check_layers.check_page("docs/experiments/a.md", "a\n" * (limit + 1)) == []


def test_the_pages_of_the_project_hold():
    pages = set(check_layers.project_files((".md",))) - check_layers.GENERATED_PAGES
    assert {"README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/numerics.md"} <= pages
    for page in pages:
        assert check_layers.check_page(page, (check_layers.ROOT / page).read_text()) == [], page
