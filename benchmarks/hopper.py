"""The Hopper backend against its peers: FlashAttention-3, cuDNN and torch's flash backend.

    FA3_SO=... DEW3_SO=... python benchmarks/hopper.py --out benchmarks/results/h200.jsonl

FA3_SO names FlashAttention-3's torch operator library (forward), DEW3_SO its JAX build (backward);
a peer that is missing is named in the table."""

import cases
import gpu

if __name__ == "__main__":
    peers = ["FA3", "cuDNN (torch)", "FA2 (torch)"]
    arguments = gpu.parser(__doc__, peers, "hopper.jsonl").parse_args()
    gpu.main(arguments, "hopper", lambda: [*cases.special(), cases.varlen()])
