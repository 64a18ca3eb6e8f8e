"""The Hopper backend against its peers: `python -m pantile bench --suite hopper`.

    FA3_SO=... DEW3_SO=... python benchmarks/hopper.py --out benchmarks/results/h200.jsonl
    python benchmarks/hopper.py --dtype float8 --peers "FA3,cuDNN FP8" --passes forward
    python benchmarks/hopper.py --peers all --head-dims 128 --lengths 4096 --no-special

FA3_SO names FlashAttention-3's torch operator library (forward), DEW3_SO its JAX build (backward);
a peer that is missing is named in the table."""

from pantile.bench import command

if __name__ == "__main__":
    command.script("hopper")
