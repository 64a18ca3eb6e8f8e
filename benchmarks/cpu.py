"""The CPU backend against torch's scaled_dot_product_attention, in one process and interleaved.

    python benchmarks/cpu.py
    python benchmarks/cpu.py --isa avx2 --same-isa --dtypes bfloat16 --passes forward
    python benchmarks/cpu.py --lengths 512,4096 --heads 16 --json build/cpu.jsonl

Ratios are torch's time over ours, of medians. Every line with a bar says whether it is met; the
exit status is 1 when one is not. torch gets its tensors as it likes them, [batch, heads, seq, dim]
and contiguous, ours are [batch, seq, heads, dim]."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import pathlib
import statistics
import sys
from dataclasses import asdict, dataclass

# (pass, dtype) -> (ratio that the project promises at B1 H8 S2048, on AVX2)
BARS = {
    ("forward", "float32"): (1.15, None),
    ("forward", "bfloat16"): (1.8, 1.2),
    ("forward+backward", "float32"): (1.2, None),
    ("forward+backward", "bfloat16"): (1.3, None),
}
PROMISED = {"batch": 1, "heads": 8, "heads_k": 8, "length": 2048}
# What holds torch to an instruction set: its own kernels, oneDNN and MKL.
TORCH_ISA = {
    "baseline": ("default", "SSE41", "SSE4_2"),
    "avx2": ("avx2", "AVX2", "AVX2"),
    "avx512": ("avx512", "AVX512_CORE", "AVX512"),
    "avx512_bf16": ("avx512", "AVX512_CORE_BF16", "AVX512"),
}


@dataclass(frozen=True)
class Shape:
    batch: int
    heads: int
    heads_k: int
    length: int
    head_dim: int
    causal: bool

    def flops(self, what: str) -> float:
        products = 2 if what == "forward" else 7
        masked = 0.5 if self.causal else 1.0
        return masked * products * 2.0 * self.batch * self.heads * self.length**2 * self.head_dim


def parse() -> argparse.Namespace:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )

    def words(text: str) -> list[str]:
        return [word for word in text.split(",") if word]

    def numbers(text: str) -> list[int]:
        return [int(word) for word in words(text)]

    p.add_argument("--isa", choices=list(TORCH_ISA), help="at most this instruction set for ours")
    p.add_argument("--same-isa", action="store_true", help="hold torch to --isa too")
    p.add_argument("--passes", type=words, default=["forward", "forward+backward"])
    p.add_argument("--dtypes", type=words, default=["float32", "bfloat16"])
    p.add_argument("--head-dims", type=numbers, default=[64, 128])
    p.add_argument("--masks", type=words, default=["full", "causal"])
    p.add_argument("--batch", type=int, default=1)
    p.add_argument("--heads", type=int, default=8)
    p.add_argument("--heads-k", type=int, help="key/value heads; default: as --heads")
    p.add_argument("--lengths", type=numbers, default=[2048])
    p.add_argument("--threads", type=int, default=2)
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--json", type=pathlib.Path, help="write one JSON object a line here")
    arguments = p.parse_args()
    if arguments.same_isa and arguments.isa is None:
        p.error("--same-isa needs --isa")
    return arguments


def hold_to(isa: str, torch_too: bool) -> None:
    """Both libraries read these when they are loaded."""
    os.environ["PANTILE_CPU_ISA"] = isa
    if torch_too:
        names = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA", "MKL_ENABLE_INSTRUCTIONS")
        os.environ.update(zip(names, TORCH_ISA[isa], strict=True))


def contenders(shape: Shape, what: str, dtype):
    """Calls of ours and of torch on the same values."""
    import pantile
    import torch
    from pantile.bench import measure
    from torch.nn.functional import scaled_dot_product_attention

    def operand(heads: int):
        return torch.randn(shape.batch, shape.length, heads, shape.head_dim).to(dtype)

    heads = [shape.heads, shape.heads_k, shape.heads_k, shape.heads]
    *qkv, grad_o = (operand(h) for h in heads)
    theirs = [x.transpose(1, 2).contiguous().requires_grad_() for x in qkv]
    their_grad = grad_o.transpose(1, 2).contiguous()
    ours = [x.requires_grad_() for x in qkv]
    grouped = shape.heads != shape.heads_k

    def our_forward():
        return pantile.attention(*ours, causal=shape.causal)

    def their_forward():
        return scaled_dot_product_attention(*theirs, is_causal=shape.causal, enable_gqa=grouped)

    def timed(forward, inputs, grad):
        if what == "forward":
            return torch.no_grad()(forward)
        return lambda: torch.autograd.grad(forward(), inputs, grad)

    return [
        measure.on_cpu("pantile", timed(our_forward, ours, grad_o)),
        measure.on_cpu("torch", timed(their_forward, theirs, their_grad)),
    ]


def bar_of(shape: Shape, what: str, dtype: str, isa: str) -> float | None:
    if any(getattr(shape, name) != value for name, value in PROMISED.items()):
        return None
    if (what, dtype) not in BARS or shape.head_dim not in (64, 128):
        return None
    full, on_avx2 = BARS[what, dtype]
    return {"baseline": None, "avx2": on_avx2}.get(isa, full)


def main() -> None:
    arguments = parse()
    if arguments.isa is not None:
        hold_to(arguments.isa, arguments.same_isa)
    import pantile
    import torch
    from pantile.bench import measure

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    cpu = next(device for device in pantile.devices() if device["type"] == "cpu")
    header = {
        "kind": "run",
        "commit": measure.commit(),
        "cpu": cpu["name"],
        "isa": cpu["isa"],
        "torch": torch.__version__,
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
        "threads": arguments.threads,
    }
    print(
        f"{cpu['name']}, {cpu['isa']}, {arguments.threads} threads, torch {torch.__version__} "
        f"({header['torch_isa']}), commit {header['commit']}"
    )
    print(f"{'pass':<18}{'dtype':<10}{'shape':<34}{'pantile':>16}{'torch':>16}{'ratio':>7}  bar")
    rows = []
    cases = itertools.product(
        arguments.passes, arguments.dtypes, arguments.lengths, arguments.head_dims, arguments.masks
    )
    for what, dtype, length, head_dim, mask in cases:
        heads_k = arguments.heads_k or arguments.heads
        shape = Shape(arguments.batch, arguments.heads, heads_k, length, head_dim, mask == "causal")
        pair = contenders(shape, what, getattr(torch, dtype))
        measure.interleave(pair, rounds=arguments.rounds)
        ours, theirs = (statistics.median(c.milliseconds) for c in pair)
        bar = bar_of(shape, what, dtype, cpu["isa"])
        row = {"kind": "row", "pass": what, "dtype": dtype, **asdict(shape)}
        row |= {"pantile_ms": ours, "torch_ms": theirs, "ratio": theirs / ours, "bar": bar}
        row["met"] = None if bar is None else row["ratio"] >= bar
        rows.append(row)
        text = f"B{shape.batch} H{shape.heads}/{heads_k} S{length} d{head_dim} {mask}"
        speeds = "".join(
            f"{ms:8.2f} ms {shape.flops(what) / ms / 1e6:4.0f}" for ms in (ours, theirs)
        )
        verdict = "" if bar is None else f"{bar:.2f} {'met' if row['met'] else 'MISSED'}"
        print(f"{what:<18}{dtype:<10}{text:<34}{speeds}{row['ratio']:7.2f}  {verdict}", flush=True)
    print("columns: median time and GFLOP/s; backward 2.5 times the forward's work, causal half")
    if arguments.json is not None:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text("".join(json.dumps(line) + "\n" for line in [header, *rows]))
        print(f"wrote {arguments.json}")
    missed = sum(row["met"] is False for row in rows)
    if missed:
        sys.exit(f"{missed} of {len(rows)} lines miss their bar")


if __name__ == "__main__":
    main()
