"""support_matrix.py: one row a feature, one column a backend, from the kernel table."""

from __future__ import annotations

import json

import pytest
import support_matrix

KERNELS = """
PANTILE_KERNEL(hopper, forward, bf16, 64, 64, full)
PANTILE_KERNEL(hopper, forward, bf16, 192, 128, causal)
PANTILE_KERNEL(hopper, forward, e4m3, 96, 96, full)
PANTILE_KERNEL(hopper, backward, f16, 128, 128, full)
PANTILE_KERNEL(ampere, forward, f32, 32, 32, any)
PANTILE_KERNEL(hopper, decode, bf16, 80, 80, any)
PANTILE_KERNEL(ampere, append, f16, 576, 512, any)
"""


@pytest.fixture
def project(tmp_path, monkeypatch):
    files = {
        "cuda/kernels.def": KERNELS,
        "cpp/host/kernel_table.cc": 'cpu_forward("cpu_forward_f32", DType::f32)\n'
        'cpu_forward_fp8("cpu_forward_e4m3", DType::e4m3)\n'
        'cpu_backward_fp8("cpu_backward_e4m3", DType::e4m3)\n'
        'cpu_decode("cpu_decode_f16", DType::f16)\n'
        'cpu_append("cpu_append_f32", Backend::cpu, DType::f32)\n',
        "cpp/include/pantile/kv.h": "inline constexpr int kMaxKvHeadDim = 700;",
        "cpp/host/features.h": """
inline constexpr FeatureSet plain{Feature::packed};
constexpr FeatureSet more(FeatureSet set) {
  return set.with(Feature::softcap).with(Feature::documents);
}
inline constexpr FeatureSet forward_16bit = more(plain);
""",
        "cpp/include/pantile/problem.h": "inline constexpr int kMaxHeadDim = 500;",
        "cpp/core/scaling.h": "inline constexpr int kMaxFp8Dim = 200;",
        "docs/gpu-verification.json": json.dumps(
            {
                "facts": {"gpu": "NVIDIA H100"},
                "kernels": {"hopper_forward_bf16_d64_full": [1, 0, 0], "ampere_x": [0, 3, 0]},
            }
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(support_matrix, "ROOT", tmp_path)
    return tmp_path


def rows() -> dict[str, list[str]]:
    lines = support_matrix.make_table().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert {len(row) for row in cells} == {1 + len(support_matrix.BACKENDS)}
    return {row[0]: row[1:] for row in cells}


def test_features_come_from_the_kernel_table(project):
    found = rows()
    assert found["feature"] == ["`hopper`", "`ampere`", "`cpu`"]
    assert found["forward"] == ["bf16", "f32", "f32"]
    assert found["backward"] == ["f16", "no", "no"]
    assert found["kernels for head dims, forward"] == ["64, 192x128", "32", "1 to 500"]
    assert found["FP8 (e4m3) kernels for head dims, forward"] == ["96", "no", "1 to 200"]
    assert found["FP8 (e4m3) kernels for head dims, backward"] == ["no", "no", "1 to 200"]
    assert found["[decode over a KV cache](docs/inference.md)"] == ["bf16", "no", "f16"]
    assert found["decode, kernels for head dims"] == ["80", "no", "1 to 700"]
    assert found["append to a KV cache, with rotary"] == ["no", "f16", "f32"]
    assert found["masks"] == ["full, causal", "full, causal, window", "full, causal, window"]


def test_variants_come_from_the_feature_sets(project):
    assert rows()["[variants](docs/variants.md)"] == ["no", "no", "no"]
    kernels = project / "cuda/kernels.def"
    kernels.write_text("PANTILE_KERNEL(hopper, forward, bf16, 64, 64, full, forward_16bit)\n")
    table = project / "cpp/host/kernel_table.cc"
    table.write_text("cpu_info() {\n  return more(plain).with(Feature::alibi);\n}\n")
    assert rows()["[variants](docs/variants.md)"] == [
        "softcap, documents",
        "no",
        "softcap, ALiBi, documents",
    ]


def test_caches_come_from_the_sets_of_decode(project):
    with (project / "cpp/host/features.h").open("a") as header:
        header.write("inline constexpr FeatureSet cached{Feature::paged, Feature::v_in_k};\n")
        header.write("inline constexpr FeatureSet hooks{Feature::cache_int8};\n")
    (project / "cuda/kernels.def").write_text(
        "PANTILE_KERNEL(hopper, decode, bf16, 64, 64, any, cached)\n"
        "PANTILE_KERNEL(hopper, append, bf16, 64, 64, any, hooks)\n"
    )
    table = project / "cpp/host/kernel_table.cc"
    table.write_text("cpu_info() {\n  return hooks;\n}\nkv_info() {\n  return cached;\n}\n")
    caches = "pages, latent (MLA)"
    assert rows()["caches of decode"] == [caches, "no", caches]


def test_context_parallelism_between_gpus_is_tested_where_it_was_measured(project):
    name = "[context parallelism](docs/distributed.md)"
    assert rows()[name] == ["yes; not yet run on GPUs", "yes; not yet run on GPUs", "yes"]
    path = project / "benchmarks/results/h200_distributed.jsonl"
    path.parent.mkdir(parents=True)
    path.touch()
    assert rows()[name] == ["yes", "yes", "yes"]


def test_a_backend_is_tested_where_a_test_passed(project):
    assert rows()["tests run on"] == ["H100", "no GPU yet", "every CI machine"]
    (project / "docs/gpu-verification.json").unlink()
    assert rows()["tests run on"][0] == "no GPU yet"


def test_a_stale_page_is_noticed(project, monkeypatch, capsys):
    page = project / "README.md"
    page.write_text(f"a\n{support_matrix.BEGIN}\n{support_matrix.END}\nb\n")
    monkeypatch.setattr("sys.argv", ["support_matrix.py", "--check"])
    assert support_matrix.main() == 1
    assert "README.md is out of date: run make docs" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["support_matrix.py"])
    assert support_matrix.main() == 0
    assert page.read_text().startswith("a\n")
    assert page.read_text().endswith("\nb\n")
    monkeypatch.setattr("sys.argv", ["support_matrix.py", "--check"])
    assert support_matrix.main() == 0
