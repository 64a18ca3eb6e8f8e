"""DTensor, FSDP2 and selective checkpointing, in two processes on the CPU."""

from __future__ import annotations

import subprocess
import sys

import pantile
import pytest
import torch
from support import HERE
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

pytestmark = pytest.mark.skipif(
    not torch.distributed.is_available() or not torch.distributed.is_gloo_available(),
    reason="torch without gloo",
)


def run_together(tmp_path, *cases: str) -> None:
    """Both processes run the cases; what one of them prints is in the message."""
    workers = [
        subprocess.Popen(
            [
                *(sys.executable, f"{HERE}/distributed_cases.py", ",".join(cases)),
                *(str(rank), str(tmp_path / "meeting")),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=240)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    for worker, output in zip(workers, outputs, strict=True):
        assert worker.returncode == 0, output[-3000:]


def test_sharded_tensors(tmp_path):
    run_together(
        tmp_path,
        "batch_and_heads",
        "short_way",
        "heads_that_do_not_divide_are_gathered",
        "packed",
        "learned_tensors",
        "dropout_is_that_of_one_process",
        "compiled_sharded_tensors",
    )


def test_sharded_parameters(tmp_path):
    run_together(tmp_path, "data_parallel", "sharded_parameters", "compiled_sharded_parameters")


def test_saved_operators_are_not_run_again():
    saved = pantile.checkpoint_save_ops()
    assert torch.ops.pantile.forward.default in saved
    counts = {"forward": 0}

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            counts["forward"] += func in saved
            return func(*args, **(kwargs or {}))

    def run(policy):
        x = torch.randn(1, 9, 2, 8, requires_grad=True)
        counts["forward"] = 0

        def function(x):
            return pantile.attention(x, x, x, causal=True).square()

        def contexts():
            return create_selective_checkpoint_contexts(policy)

        with Counting():
            o = checkpoint(function, x, use_reentrant=False, context_fn=contexts)
            o.sum().backward()
        return counts["forward"]

    def keep(context, op, *_, **__):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    assert run(keep) == 1
    assert run(lambda *_, **__: CheckpointPolicy.PREFER_RECOMPUTE) == 2
