#!/usr/bin/env python3
"""What FP8 costs in accuracy, part by part, on the CPU: benchmarks/results/cpu_fp8_error.jsonl.

The CPU quantises with the GPU's bits and rounds scores and weights like the GPU, but adds in
float32, so this is the error of the format and of the weights. Everything is compared with float64
on the unquantised bfloat16 inputs. `python tools/fp8_error.py` takes some minutes on two cores.

law        RMSE of O on the FlashAttention-3 paper's outlier law, N(0, 1) + N(0, 100) of one element
           in a thousand, 4096 tokens, full mask: which part of the format brings what
length     relative error of O against the number of keys, with V of mean 0 and 1
offset     RMSE when the channels of K have means of +-10
gradient   relative error of the gradients on the outlier law, 1024 tokens
"""

from __future__ import annotations

import argparse
import pathlib
import statistics
from collections.abc import Iterator

import pantile
import torch
from accuracy_cases import OPERANDS, Case, Tensors, draw, errors, exact
from accuracy_fp8 import hadamard
from pantile._schema import Call
from pantile.bench import figures

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks/results/cpu_fp8_error.jsonl"
DIMS = (64, 128, 256)
EXPS = ("code", "mixed", "exp2")


def operands(inputs: Tensors) -> list[torch.Tensor]:
    return [inputs[name].bfloat16() for name in OPERANDS[:3]]


def error_of(o: torch.Tensor, truth: Tensors) -> dict[str, float]:
    return errors({"o": o}, truth)["o"]


def attend(made: pantile.Quantized, exp: str = "code", **call):
    return pantile.attention(made, **call, options=pantile.Options(fp8_exp=exp))


def with_head_scales(q, k, v, rotate: bool) -> pantile.Quantized:
    """e4m3 with one scale a batch and head."""
    q, k, v = (x.float() for x in (q, k, v))
    if rotate:
        turn = hadamard(q.shape[-1], "cpu").float()
        q, k = q @ turn, k @ turn
    scales = [x.abs().amax((1, 3)) / 448 for x in (q, k, v)]
    scaled = zip((q, k, v), scales, strict=True)
    codes = ((x / s[:, None, :, None]).to(torch.float8_e4m3fn) for x, s in scaled)
    names = ("descale_q", "descale_k", "descale_v")
    return pantile.quantize(*codes, **dict(zip(names, scales, strict=True)))


VARIANTS = {
    "bf16": lambda q, k, v: pantile.attention(q, k, v),
    "scales per head (FA3's format)": lambda *x: attend(with_head_scales(*x, False), "exp2"),
    "scales per head, Hadamard": lambda *x: attend(with_head_scales(*x, True), "exp2"),
    "block scales": lambda *x: attend(pantile.quantize(*x, hadamard=False, smooth_k=False), "exp2"),
    "block scales, Hadamard": lambda *x: attend(pantile.quantize(*x, smooth_k=False), "exp2"),
    "block scales, Hadamard, K smoothing": lambda *x: attend(pantile.quantize(*x), "exp2"),
    "the same, Q scaled by token": lambda *x: attend(pantile.quantize(*x, block_q=1), "exp2"),
    "the same, blocks of 64": lambda *x: attend(pantile.quantize(*x, block=64), "exp2"),
    'the same, `fp8_exp="mixed"`': lambda *x: attend(pantile.quantize(*x), "mixed"),
    'the same, `fp8_exp="code"` (default)': lambda *x: attend(pantile.quantize(*x), "code"),
}


def law_rows(draws: int) -> Iterator[dict]:
    for head_dim in DIMS:
        found: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for seed in range(draws):
            case = Case("bf16", head_dim, "full", 4096, "outlier", 4, 2, seed)
            inputs = draw(case, "cpu")
            truth = exact(case, inputs, False)
            for name, function in VARIANTS.items():
                found[name].append(error_of(function(*operands(inputs)), truth)["rmse"])
        for name, values in found.items():
            row = {"kind": "fp8_law", "variant": name, "head_dim": head_dim, "draws": draws}
            extremes = {"least": min(values), "most": max(values)}
            yield row | {"rmse": statistics.mean(values)} | extremes


def length_rows() -> Iterator[dict]:
    for keys in (4096, 16384, 65536, 131072):
        for mean, law in ((0.0, "normal"), (1.0, "shifted")):
            case = Case("bf16", 128, "full", keys, law, heads=1)
            inputs = draw(case, "cpu")
            inputs |= {name: inputs[name][:, :128] for name in ("q", "grad_o")}
            truth = exact(case, inputs, False)
            made = pantile.quantize(*operands(inputs))
            for exp in EXPS:
                error = error_of(attend(made, exp), truth)["relative"]
                row = {"kind": "fp8_length", "keys": keys, "mean": mean, "exp": exp}
                yield row | {"error": error}


def offset_rows() -> Iterator[dict]:
    for head_dim in DIMS:
        case = Case("f32", head_dim, "full", 4096, "normal", heads=4)
        inputs = draw(case, "cpu")
        generator = torch.Generator().manual_seed(9)
        shift = 10.0 * torch.randn(4, head_dim, generator=generator).sign()
        found = {}
        for name, offset, smooth in (
            ("no offset", 0.0, True),
            ("offset, smoothed", shift, True),
            ("offset, not smoothed", shift, False),
        ):
            moved = inputs | {"k": inputs["k"] + offset}
            made = pantile.quantize(*(moved[n] for n in OPERANDS[:3]), smooth_k=smooth)
            found[name] = error_of(attend(made), exact(case, moved, False))["rmse"]
        yield {"kind": "fp8_offset", "head_dim": head_dim, "rmse": found}


def gradient_rows() -> Iterator[dict]:
    for head_dim in (64, 128):
        case = Case("bf16", head_dim, "causal", 1024, "outlier", heads=4)
        inputs = draw(case, "cpu")
        truth = exact(case, inputs, True)
        grad_o = inputs["grad_o"].bfloat16()

        def row(name: str, o, lse, grads, truth=truth, head_dim=head_dim) -> dict:
            found = {"o": o, "lse": lse} | dict(zip(("dq", "dk", "dv"), grads, strict=True))
            figures_of = errors({n: x.detach() for n, x in found.items()}, truth)
            line = {"kind": "fp8_gradient", "forward": name, "head_dim": head_dim}
            line |= {n: f["rmse" if n == "lse" else "relative"] for n, f in figures_of.items()}
            return line

        for name, options in (("bf16", pantile.Options()), ("fp8", pantile.Options(fp8=True))):
            leaves = [x.requires_grad_() for x in operands(inputs)]
            o, lse = pantile.attention(*leaves, causal=True, return_lse=True, options=options)
            yield row(name, o, lse, torch.autograd.grad(o, leaves, grad_o))
        settings = Call(window_right=0, backend="cpu")
        for name, used in (("FP8's LSE and O", lse), ("FP8's O alone", truth["lse"].float())):
            used = used.detach()
            grads = torch.ops.pantile.backward(
                grad_o, None, *operands(inputs), o.detach(), None, used, *settings, False
            )
            yield row(f"fp8, backward at {name}", o, used, grads)


PARTS = {
    "law": law_rows,
    "length": lambda _: length_rows(),
    "offset": lambda _: offset_rows(),
    "gradient": lambda _: gradient_rows(),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--draws", type=int, default=4, help="of the outlier law (default 4)")
    parser.add_argument("--part", choices=PARTS, help="make only this part anew")
    parser.add_argument("--out", type=pathlib.Path, default=RESULT)
    chosen = parser.parse_args()
    run = {"kind": "fp8_error_run", "pantile": pantile.__version__, "torch": torch.__version__}
    lines = [run]
    if chosen.part:
        kept = figures.read(chosen.out)[1:]
        lines += [line for line in kept if line["kind"] != f"fp8_{chosen.part}"]
    for part in [chosen.part] if chosen.part else PARTS:
        for row in PARTS[part](chosen.draws):
            print(row, flush=True)
            lines.append(row)
    figures.write(chosen.out, lines)


if __name__ == "__main__":
    main()
