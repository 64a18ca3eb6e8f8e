r"""The Ampere backend against torch's flash backend (FlashAttention-2) and cuDNN, on any GPU from
compute capability 8.0 on; on Hopper the backend is forced.

    python benchmarks/ampere.py --out benchmarks/results/ampere.jsonl

float32 against torch's memory-efficient backend, by TF32 or at the error of float32:

    python benchmarks/ampere.py --dtype float32 --float32-precision high \
        --peers "memory-efficient (torch)" --out benchmarks/results/ampere_tf32.jsonl"""

from pantile.bench import cases, sweep

if __name__ == "__main__":
    spec = cases.CATALOGUE["grid"]["ampere"]
    parser = sweep.parser(__doc__, ["FA2 (torch)", "cuDNN (torch)"], "ampere.jsonl")
    parser.set_defaults(
        head_dims=",".join(map(str, spec["head_dims"])),
        lengths=",".join(map(str, spec["lengths"])),
    )
    sweep.main(parser.parse_args(), "ampere", cases.special)
