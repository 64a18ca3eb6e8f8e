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
import json
import pathlib
import statistics
from collections.abc import Iterator

import pantile
import pantile.reference
import torch
from accuracy_fp8 import hadamard
from pantile._schema import Call

ROOT = pathlib.Path(__file__).resolve().parent.parent
RESULT = ROOT / "benchmarks/results/cpu_fp8_error.jsonl"
DIMS = (64, 128, 256)
EXPS = ("code", "mixed", "exp2")
E4M3 = torch.float8_e4m3fn


def normal(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def outliers(*shape: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    hit = torch.rand(shape, generator=generator) < 1e-3
    return (x + hit * 10 * torch.randn(shape, generator=generator)).bfloat16()


def rms(x: torch.Tensor) -> float:
    return x.double().pow(2).mean().sqrt().item()


def exact(q, k, v, rows) -> torch.Tensor:
    """O in float64 of some query rows."""
    q, k, v = (x.double() for x in (q[:, rows], k, v))
    weights = torch.softmax(torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5, -1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def attend(made: pantile.Quantized, exp: str = "code", **call):
    return pantile.attention(made, **call, options=pantile.Options(fp8_exp=exp))


def per_head(x: torch.Tensor):
    """e4m3 with one scale a batch and head: (codes, descales)."""
    descale = x.float().abs().amax((1, 3)) / 448
    return (x.float() / descale[:, None, :, None]).to(E4M3), descale


def with_head_scales(q, k, v, rotate: bool) -> pantile.Quantized:
    if rotate:
        turn = hadamard(q.shape[-1], "cpu").float()
        q, k = q.float() @ turn, k.float() @ turn
    (q, dq), (k, dk), (v, dv) = map(per_head, (q, k, v))
    return pantile.quantize(q, k, v, descale_q=dq, descale_k=dk, descale_v=dv)


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
    rows = torch.arange(0, 4096, 16)
    for head_dim in DIMS:
        errors: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for draw in range(draws):
            tensors = [outliers(2, 4096, 4, head_dim, seed=100 * draw + i) for i in range(3)]
            truth = exact(*tensors, rows)
            for name, function in VARIANTS.items():
                errors[name].append(rms(function(*tensors)[:, rows].double() - truth))
        for name, found in errors.items():
            yield {
                "kind": "fp8_law",
                "variant": name,
                "head_dim": head_dim,
                "rmse": statistics.mean(found),
                "least": min(found),
                "most": max(found),
                "draws": draws,
            }


def length_rows() -> Iterator[dict]:
    for keys in (4096, 16384, 65536, 131072):
        for mean in (0.0, 1.0):
            q, k, v = (normal(1, n, 1, 128, seed=i) for i, n in enumerate((128, keys, keys)))
            tensors = [x.bfloat16() for x in (q, k, v + mean)]
            truth = exact(*tensors, torch.arange(128))
            made = pantile.quantize(*tensors)
            for exp in EXPS:
                error = rms(attend(made, exp).double() - truth) / rms(truth)
                yield {
                    "kind": "fp8_length", "keys": keys, "mean": mean, "exp": exp, "error": error,
                }  # fmt: skip


def offset_rows() -> Iterator[dict]:
    rows = torch.arange(0, 4096, 16)
    for head_dim in DIMS:
        q, k, v = (normal(1, 4096, 4, head_dim, seed=i) for i in range(3))
        offset = 10.0 * normal(4, head_dim, seed=9).sign()
        found = {}
        for name, keys, smooth in (
            ("no offset", k, True),
            ("offset, smoothed", k + offset, True),
            ("offset, not smoothed", k + offset, False),
        ):
            truth = exact(q, keys, v, rows)
            made = pantile.quantize(q, keys, v, smooth_k=smooth)
            found[name] = rms(attend(made)[:, rows].double() - truth)
        yield {"kind": "fp8_offset", "head_dim": head_dim, "rmse": found}


def relative(x: torch.Tensor, truth: torch.Tensor) -> float:
    return rms(x.double() - truth) / rms(truth)


def gradient_errors(grads, truths) -> dict[str, float]:
    errors = (relative(g, t) for g, t in zip(grads, truths, strict=True))
    return dict(zip(("dq", "dk", "dv"), errors, strict=True))


def gradient_rows() -> Iterator[dict]:
    for head_dim in (64, 128):
        tensors = [outliers(1, 1024, 4, head_dim, seed=30 + i) for i in range(3)]
        grad_o = normal(1, 1024, 4, head_dim, seed=40).bfloat16()
        doubles = [x.double().requires_grad_() for x in tensors]
        o, lse = pantile.reference.attention(*doubles, causal=True, dtype=torch.float64)
        truths = torch.autograd.grad(o, doubles, grad_o.double())
        for name, options in (("bf16", pantile.Options()), ("fp8", pantile.Options(fp8=True))):
            leaves = [x.clone().requires_grad_() for x in tensors]
            mine, mine_lse = pantile.attention(
                *leaves, causal=True, return_lse=True, options=options
            )
            grads = torch.autograd.grad(mine, leaves, grad_o)
            yield {
                "kind": "fp8_gradient",
                "forward": name,
                "head_dim": head_dim,
                "o": relative(mine.detach(), o.detach()),
                "lse": rms(mine_lse.detach() - lse.detach()),
                **gradient_errors(grads, truths),
            }
        settings = Call(window_right=0, backend="cpu")
        o_fp8, lse_fp8 = mine.detach(), mine_lse.detach()
        exact_lse = lse.detach().float()
        for name, used in (("FP8's LSE and O", lse_fp8), ("FP8's O alone", exact_lse)):
            grads = torch.ops.pantile.backward(
                grad_o, None, *tensors, o_fp8, None, used, *settings, False
            )
            yield {
                "kind": "fp8_gradient",
                "forward": f"fp8, backward at {name}",
                "head_dim": head_dim,
                "o": relative(o_fp8, o.detach()),
                "lse": rms(used - lse.detach()),
                **gradient_errors(grads, truths),
            }


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
    arguments = parser.parse_args()
    run = {"kind": "fp8_error_run", "pantile": pantile.__version__, "torch": torch.__version__}
    lines = [json.dumps(run)]
    if arguments.part:
        old = arguments.out.read_text().splitlines()[1:]
        lines += [x for x in old if json.loads(x)["kind"] != f"fp8_{arguments.part}"]
    for part in [arguments.part] if arguments.part else PARTS:
        for row in PARTS[part](arguments.draws):
            print(row, flush=True)
            lines.append(json.dumps(row))
    arguments.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
