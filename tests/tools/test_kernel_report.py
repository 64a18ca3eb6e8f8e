"""kernel_report.py: reading ptxas and holding kernels to the budget."""

import kernel_budget
import kernel_report

LOG = """\
ptxas info    : 0 bytes gmem
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
ptxas info    : Compiling entry function '_ZN7pantile6hopper7forwardILi64EEEvi' for 'sm_90a'
ptxas info    : Function properties for _ZN7pantile6hopper7forwardILi64EEEvi
    16 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 168 registers, used 16 barriers, 1024 bytes smem
ptxas info    : Compiling entry function '_ZN7pantile6hopper7forwardILi128EEEvi' for 'sm_90a'
ptxas info    : Function properties for _ZN7pantile6hopper7forwardILi128EEEvi
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 200 registers, used 16 barriers
"""
FIGURES = {
    "registers": 200,
    "stack_bytes": 16,
    "spill_bytes": 20,
    "smem_bytes": 1024,
    "advisories": ["C7510"],
}


def test_joins_the_instances_of_a_template_by_their_worst():
    assert kernel_report.parse(LOG) == {("sm_90a", "forward"): FIGURES}


def test_each_figure_is_held_to_its_budget():
    assert kernel_report.worse(FIGURES, FIGURES) == []
    for name in kernel_report.LIMITS:
        smaller = {**FIGURES, name: FIGURES[name] - 1}
        assert kernel_report.worse(FIGURES, smaller) == [
            f"{name} {FIGURES[name]}, budget {smaller[name]}"
        ]
        assert kernel_report.worse(smaller, FIGURES) == []


def test_an_advisory_that_the_budget_does_not_list_fails():
    quiet = {**FIGURES, "advisories": []}
    assert kernel_report.worse(FIGURES, quiet) == ["ptxas advisory C7510"]
    assert kernel_report.worse(quiet, FIGURES) == []


def test_compare_finds_unlisted_and_vanished_kernels(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_budget, "BUDGET", tmp_path / "budget.json")
    kernel_budget.save("ptxas", "13.0", {"a": FIGURES, "b": FIGURES})
    errors = kernel_budget.compare(
        "ptxas", "13.0", {"a": FIGURES, "c": FIGURES}, kernel_report.worse
    )
    assert errors == ["c: not in the budget", "b: in the budget, but not in this build"]


def test_another_nvcc_is_held_to_the_rules_that_need_no_figures(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_budget, "BUDGET", tmp_path / "budget.json")
    kernel_budget.save("ptxas", "13.0", {"a": FIGURES})
    more = {**FIGURES, "registers": 255}
    assert kernel_budget.compare("ptxas", "12.8", {"a": more}, kernel_report.worse) == []
    assert kernel_budget.compare("ptxas", "13.0", {"a": more}, kernel_report.worse) == [
        "a: registers 255, budget 200"
    ]


def test_saving_one_section_keeps_the_other(tmp_path, monkeypatch):
    monkeypatch.setattr(kernel_budget, "BUDGET", tmp_path / "budget.json")
    kernel_budget.save("sass", "13.0", {"k": {"loops": []}})
    kernel_budget.save("ptxas", "13.0", {"b": FIGURES, "a": FIGURES})
    assert kernel_budget.load() == {
        "nvcc": "13.0",
        "ptxas": {"a": FIGURES, "b": FIGURES},
        "sass": {"k": {"loops": []}},
    }


def test_kernel_names():
    assert kernel_budget.kernel_name("_ZN7pantile6hopper7forwardILi64EEEvi") == "forward"
    assert kernel_budget.kernel_name("_Z8attn_fwdILi64EEvv") == "attn_fwd"
    assert kernel_budget.kernel_name("plain") == "plain"
