r"""The CPU backend against torch's scaled_dot_product_attention: `pantile bench --suite cpu`, and
whether each cell reaches what the project promises; the exit status is 1 when one does not.

    python benchmarks/cpu.py --threads 2 --out build/cpu.jsonl

torch gets its tensors as it likes them, [batch, heads, seq, dim] and contiguous, ours are
[batch, seq, heads, dim]. Both libraries read their instruction set when they are loaded:

    PANTILE_CPU_ISA=avx2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 \
        MKL_ENABLE_INSTRUCTIONS=AVX2 python benchmarks/cpu.py --dtype bfloat16 --passes forward"""

from pantile.bench import command, figures

# (pass, dtype) -> ratio that is promised, from AVX-512 on and on AVX2, of the cells of PROMISED
BARS = {
    ("forward", "float32"): (1.15, None),
    ("forward", "bfloat16"): (1.8, 1.2),
    ("forward+backward", "float32"): (1.2, None),
    ("forward+backward", "bfloat16"): (1.3, None),
}
PROMISED = {"batch": 1, "heads_q": 8, "heads_k": 8, "seqlen": 2048}
HEAD_DIMS = (64, 128)


def bar_of(row: dict, isa: str) -> float | None:
    if any(row[name] != value for name, value in PROMISED.items()):
        return None
    if (row["pass"], row["dtype"]) not in BARS or row["head_dim"] not in HEAD_DIMS:
        return None
    full, on_avx2 = BARS[row["pass"], row["dtype"]]
    return {"baseline": None, "avx2": on_avx2}.get(isa, full)


def judge(row: dict, run: dict) -> None:
    """Adds the ratio to torch, the bar, and whether it is met."""
    ratio, bar = figures.ratio(row["results"]["back_to_back"])[0], bar_of(row, run["isa"])
    row |= {"ratio": round(ratio, 4), "bar": bar, "met": None if bar is None else ratio >= bar}


if __name__ == "__main__":
    command.script("cpu", judge)
