r"""The Ampere backend against torch's flash backend (FlashAttention-2) and cuDNN, on any GPU from
compute capability 8.0 on: `python -m pantile bench --suite ampere`. On Hopper it is forced.

    python benchmarks/ampere.py --out benchmarks/results/ampere.jsonl

float32 against torch's memory-efficient backend, by TF32 or at the error of float32:

    python benchmarks/ampere.py --dtype float32 --float32-precision high \
        --peers "memory-efficient (torch)" --out benchmarks/results/ampere_tf32.jsonl"""

from pantile.bench import command

if __name__ == "__main__":
    command.script("ampere")
