"""kernel_report.py: reading ptxas and holding kernels to the budget."""

import kernel_budget
import kernel_report
import pytest

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
    assert kernel_report.parse(LOG) == {("", "sm_90a", "forward"): FIGURES}


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


@pytest.fixture
def budget_file(tmp_path, monkeypatch):
    path = tmp_path / "budget.json"
    monkeypatch.setattr(kernel_budget, "BUDGET", path)
    return path


def compare(nvcc: str, found: dict) -> list[str]:
    return kernel_budget.compare(
        "ptxas", nvcc, found, kernel_report.worse, kernel_report.worse_elsewhere
    )


def test_no_budget_is_an_error(budget_file):
    assert compare("13.0", {"a": FIGURES}) == ["there is no budget.json: make it with --update"]


def test_finds_unlisted_and_vanished_kernels(budget_file):
    kernel_budget.save("ptxas", "13.0", {"a": FIGURES, "b": FIGURES})
    assert compare("13.0", {"a": FIGURES, "c": FIGURES}) == [
        "c: not in the budget",
        "b: in the budget, but not in this build",
    ]


def test_another_nvcc_is_held_to_what_must_always_hold(budget_file):
    kernel_budget.save("ptxas", "13.0", {"a": FIGURES})
    more = {**FIGURES, "registers": 255}
    assert compare("13.0", {"a": more}) == ["a: registers 255, budget 200"]
    assert compare("12.8", {"a": more}) == []
    spilling = {**FIGURES, "spill_bytes": 21, "advisories": ["C7508", "C7510"]}
    assert compare("12.8", {"a": spilling}) == [
        "a: spill_bytes 21, budget 20",
        "a: ptxas advisory C7508",
    ]


def test_saving_one_section_keeps_the_other(budget_file):
    kernel_budget.save("sass", "13.0", {"k": {"loops": []}})
    kernel_budget.save("ptxas", "13.0", {"b": FIGURES, "a": FIGURES})
    assert kernel_budget.load() == {
        "nvcc": "13.0",
        "ptxas": {"a": FIGURES, "b": FIGURES},
        "sass": {"k": {"loops": []}},
    }


def test_kernels_that_a_build_leaves_out_are_not_missed(budget_file):
    trial, on_hopper = "a/sm_80/trial_forward_kernel", "ampere_forward_bf16_d64_full/sm_90/kernel"
    both = dict.fromkeys((trial, on_hopper, "b/sm_90a/kernel"), FIGURES)
    kernel_budget.save("ptxas", "13.0", both)

    def missed(options: tuple[str, ...]) -> list[str]:
        return kernel_budget.compare(
            "ptxas",
            "13.0",
            {"b/sm_90a/kernel": FIGURES},
            kernel_report.worse,
            kernel_report.worse_elsewhere,
            options,
        )

    missing = "in the budget, but not in this build"
    assert missed(("experiments", "ampere_on_hopper")) == []
    assert missed(("experiments",)) == [f"{on_hopper}: {missing}"]
    assert missed(("ampere_on_hopper",)) == [f"{trial}: {missing}"]
    fewer = {"b/sm_90a/kernel": FIGURES}
    kernel_budget.save("ptxas", "13.0", fewer, ("experiments", "ampere_on_hopper"))
    assert kernel_budget.load()["ptxas"] == both
    kernel_budget.save("ptxas", "13.0", fewer, ("experiments",))
    assert set(kernel_budget.load()["ptxas"]) == {trial, "b/sm_90a/kernel"}


def test_what_an_entry_needs():
    needed = kernel_budget.needed_option
    assert needed("hopper_forward_e4m3_d64_full/sm_90a/trial_forward_fp8_kernel") == "experiments"
    assert needed("ampere_forward_bf16_d64_full/trial_forward_kernel+") == "experiments"
    assert needed("ampere_forward_bf16_d64_full/sm_90/forward_kernel") == "ampere_on_hopper"
    assert needed("ampere_backward_f32_d64_any/sm_90/backward_kernel_f32") == ""
    assert needed("ampere_quantize_f32_d128_any/sm_90/quantize_kernel") == "ampere_on_hopper"
    assert needed("ampere_forward_e4m3_d64_any/sm_89/forward_fp8_kernel") == ""
    assert needed("ampere_forward_bf16_d64_full/sm_80/forward_kernel") == ""
    assert needed("hopper_forward_bf16_d64_full/sm_90a/forward_kernel") == ""


def test_what_a_build_leaves_out(tmp_path):
    (tmp_path / "generated").mkdir()
    header = tmp_path / "generated" / "build_info.h"
    header.write_text('{"experiments": false, "ampere_on_hopper": true}')
    assert kernel_budget.left_out(tmp_path) == ("experiments",)
    header.write_text('{"experiments": true, "ampere_on_hopper": false}')
    assert kernel_budget.left_out(tmp_path) == ("ampere_on_hopper",)


def test_a_report_fails_until_its_figures_are_the_budget(
    budget_file, tmp_path, monkeypatch, capsys
):
    build = tmp_path / "generated"
    build.mkdir()
    (build / "build_info.h").write_text('"nvcc": "13.0.88"')

    def run(*words: str, errors: tuple[str, ...] = ()) -> int:
        monkeypatch.setattr("sys.argv", ["report.py", str(tmp_path), *words])
        limits = kernel_report.worse, kernel_report.worse_elsewhere
        return kernel_budget.report("ptxas", "doc", lambda _: ({"a": FIGURES}, [*errors]), *limits)

    assert run() == 1
    assert run("--update", errors=("a row without a log",)) == 1
    assert not budget_file.exists()
    assert run("--update") == 0
    assert run() == 0
    assert capsys.readouterr().out.endswith("ptxas: within budget\n")


def test_kernel_names():
    assert kernel_budget.kernel_name("_ZN7pantile6hopper7forwardILi64EEEvi") == "forward"
    assert kernel_budget.kernel_name("_Z8attn_fwdILi64EEvv") == "attn_fwd"
    assert kernel_budget.kernel_name("plain") == "plain"


def masked(kind: int) -> str:
    return LOG.replace("EEEvi", f"ELNS_8MaskKindE{kind}EEEvi")


def test_a_file_holds_rows_that_differ_in_the_mask(tmp_path):
    """Kernels that rows share are in cuda/<family>/row_kernels.cu, one file a family."""
    rows = ("a_full", "a_causal", "a_window", "b_any")
    (tmp_path / "generated").mkdir()
    (tmp_path / "generated" / "kernel_rows.inc").write_text(
        "".join(f"PANTILE_KERNEL_ROW({row}, x)\n" for row in rows)
    )
    logs = {
        "instances/a": masked(0) + masked(2),
        "instances/b": LOG,
        "instances/a_full": LOG,  # of an older tree
        "cuda/hopper/row_kernels": LOG,
    }
    for path, text in logs.items():
        log = tmp_path / f"{path}.cu.o.ptxas"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(text)
    found, missing = kernel_report.read_build(tmp_path)
    owners = ("a_full", "a_window", "b_any", "hopper_row_kernels")
    assert set(found) == {f"{owner}/sm_90a/forward" for owner in owners}
    assert missing == ["a_causal"]


def test_rows_of_kernels():
    for dtype in ("bf16", "f16"):
        row = f"hopper_forward_{dtype}_d192x128_full"
        assert kernel_budget.file_of(row) == "hopper_forward_16bit_d192x128"
    assert kernel_budget.file_of("ampere_forward_f32_d64_any") == "ampere_forward_f32_d64"
    symbol = "_ZN7pantile6hopper14forward_kernelINS0_14ForwardVariantILi64ELNS_8MaskKindE1EEEEvv"
    assert kernel_budget.row_of("hopper_forward_e4m3_d64", symbol) == (
        "hopper_forward_e4m3_d64_causal"
    )
    assert kernel_budget.row_of("ampere_backward_f32_d64", "_Z4kernv") == (
        "ampere_backward_f32_d64_any"
    )
    for number, dtype in ((1, "f16"), (2, "bf16")):
        both = symbol.replace("EEEEvv", f"EEELNS_5DTypeE{number}EEEvv")
        assert kernel_budget.row_of("hopper_forward_16bit_d64", both) == (
            f"hopper_forward_{dtype}_d64_causal"
        )
    with pytest.raises(SystemExit, match="hopper_forward_16bit_d64: no DType"):
        kernel_budget.row_of("hopper_forward_16bit_d64", symbol)
