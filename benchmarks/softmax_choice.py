"""What pantile.autotune chooses on this GPU for calls of the Ampere forward: three times a shape,
with the speed of the tensor softmax over the vector softmax each time.

    PANTILE_CACHE=build/choices python benchmarks/softmax_choice.py --out build/choices.jsonl

autotune keeps its choices in the cache folder: PANTILE_CACHE names one that no program uses."""

from __future__ import annotations

from collections.abc import Iterator

import pantile
import torch
from pantile.bench import cases, harness, sweep

TIMES = 3
OPTIONS = pantile.Options(backend="ampere")


def lines_of(dtype: str, repeats: int, device: str) -> Iterator[dict]:
    gpu = torch.cuda.get_device_name() if device == "cuda" else device
    yield harness.header(device, gpu=gpu)
    setup = sweep.Setup(device, "ampere", dtype, ())
    for case in cases.grid([64, 128], [1024, 4096, 16384]):
        problem = sweep.make_problem(case, "forward", setup)
        operands = (problem.q, problem.k, problem.v)
        named = {"causal": case.causal, "options": OPTIONS, "repeats": repeats}
        found = [pantile.autotune(*operands, **named) for _ in range(TIMES)]
        ratios = [round(x.seconds["vector"] / x.seconds["tensor"], 4) for x in found]
        line = {"kind": "softmax_autotune", "case": case.name, "dtype": dtype, "ratios": ratios}
        yield line | {"chosen": [x.softmax for x in found]}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--repeats", type=int, default=10)
    given = parser.parse_args()
    harness.require_gpu()
    torch.manual_seed(0)
    harness.emit(given.out, lines_of(given.dtype, given.repeats, "cuda"))


if __name__ == "__main__":
    main()
