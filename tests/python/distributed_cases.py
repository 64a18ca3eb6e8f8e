"""What two processes check together; started by test_distributed.py.

    distributed_cases.py NAME RANK FILE

FILE is where the processes meet. Every case compares with the same call in one process.
"""

from __future__ import annotations

import copy
import functools
import sys

import pantile
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

WORLD = 2


def mesh():
    return dist.device_mesh.init_device_mesh("cpu", (WORLD,))


def operands(heads_k=2, batch=4, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(batch, 21, 4, 16), *[(batch, 21, heads_k, 16)] * 2]
    return [torch.randn(s, generator=generator, dtype=dtype).requires_grad_() for s in shapes]


def spread(tensors, place):
    return [distribute_tensor(x.detach(), mesh(), [place]).requires_grad_() for x in tensors]


def same(found, expected):
    found = found.full_tensor() if isinstance(found, DTensor) else found
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def compare(place, expected_places, call, tensors, collectives=0):
    """``call(q, k, v)`` gives (o, lse)."""
    o, lse = call(*tensors)
    seed = torch.randn(o.shape, generator=torch.Generator().manual_seed(1))
    expected = torch.autograd.grad((o * seed).sum() + lse.sum(), tensors)
    sharded = spread(tensors, place)
    weight = distribute_tensor(seed, mesh(), expected_places[:1])
    with CommDebugMode() as watched:
        found, found_lse = call(*sharded)
        loss = (found * weight).sum() + found_lse.sum()
        grads = torch.autograd.grad(loss, sharded)
    assert (found.placements[0], found_lse.placements[0]) == expected_places
    assert watched.get_total_counts() == collectives, watched.get_comm_counts()
    same(found, o)
    same(found_lse, lse)
    for mine, other in zip(grads, expected, strict=True):
        same(mine, other)


def attend(q, k, v, **arguments):
    return pantile.attention(q, k, v, causal=True, return_lse=True, **arguments)


def batch_and_heads():
    compare(Shard(0), (Shard(0), Shard(0)), attend, operands())
    compare(Shard(2), (Shard(2), Shard(1)), attend, operands())
    compare(Shard(2), (Shard(2), Shard(1)), attend, operands(heads_k=4))
    compare(Replicate(), (Replicate(), Replicate()), attend, operands())
    halves = operands(dtype=torch.bfloat16)  # which keep o_low
    o = attend(*halves)[0]
    expected = torch.autograd.grad(o.float().square().sum(), halves)
    for axis in (0, 2):
        sharded = spread(halves, Shard(axis))
        found = attend(*sharded)[0]
        assert torch.equal(found.full_tensor(), o)
        loss = found.float().square().sum()
        for mine, other in zip(torch.autograd.grad(loss, sharded), expected, strict=True):
            assert torch.equal(mine.full_tensor(), other)


def heads_that_do_not_divide_are_gathered():
    tensors = operands(heads_k=1)
    q, k, v = (x.detach() for x in tensors)
    sharded = distribute_tensor(q, mesh(), [Shard(2)])
    whole = [distribute_tensor(x, mesh(), [Replicate()]) for x in (k, v)]
    same(attend(sharded, *whole)[0], attend(q, k, v)[0])
    rows = spread([q, k, v], Shard(1))
    same(attend(*rows)[0], attend(q, k, v)[0])


def short_way():
    """Of batch and heads alone: local tensors, without torch's rules, with the same answers."""
    from pantile import _sharded

    plain = [x.detach() for x in operands()]
    wide = {"return_lse": True, "return_max_logit": True}
    f32 = {"options": pantile.Options(output_dtype="float32")}
    for place, served in (
        *((Shard(0), True), (Shard(2), True), (Replicate(), True)),
        *((Shard(1), False), (Shard(3), False), (Partial(), False)),
    ):
        sharded = [DTensor.from_local(x, mesh(), [place], run_check=False) for x in plain]
        assert (_sharded.locals_of(*sharded) is not None) == served, place
    for place in (Shard(0), Shard(2), Replicate()):
        sharded = [distribute_tensor(x, mesh(), [place]) for x in plain]
        for arguments in ({}, {"causal": True}, {"causal": True, "return_lse": True}, wide, f32):
            expected = pantile.attention(*plain, **arguments)
            found = pantile.attention(*sharded, **arguments)
            if isinstance(expected, torch.Tensor):
                expected, found = (expected,), (found,)
            for mine, other in zip(found, expected, strict=True):
                assert isinstance(mine, DTensor)
                assert mine.dtype is other.dtype
                assert mine.shape == other.shape
                assert mine.stride() == other.stride()
                assert torch.equal(mine.full_tensor(), other)
        # A gradient that is placed otherwise is spread as the output is.
        leaves = [x.detach().requires_grad_() for x in sharded]
        o = pantile.attention(*leaves, causal=True).redistribute(placements=[Replicate()])
        o.sum().backward()
        alone = [x.clone().requires_grad_() for x in plain]
        pantile.attention(*alone, causal=True).sum().backward()
        for mine, other in zip(leaves, alone, strict=True):
            same(mine.grad, other.grad)
    uneven = [x[:3] for x in plain]
    sharded = [distribute_tensor(x, mesh(), [Shard(0)]) for x in uneven]
    found = pantile.attention(*sharded)
    assert found.shape == uneven[0].shape
    same(found, pantile.attention(*uneven))
    square = dist.device_mesh.init_device_mesh("cpu", (WORLD, 1))
    sharded = [distribute_tensor(x, square, [Shard(0), Shard(2)]) for x in plain]
    assert _sharded.locals_of(*sharded) is not None
    same(pantile.attention(*sharded), pantile.attention(*plain))


def packed():
    bounds = torch.tensor([0, 9, 9, 21], dtype=torch.int32)
    tensors = [x.detach()[0].requires_grad_() for x in operands()]

    def call(q, k, v):
        at = bounds
        if isinstance(q, DTensor):
            at = DTensor.from_local(bounds, q.device_mesh, [Replicate()], run_check=False)
        return pantile.varlen_attention(q, k, v, at, at, 12, 12, causal=True, return_lse=True)

    compare(Shard(1), (Shard(1), Shard(0)), call, tensors)
    sharded = spread([x.detach() for x in tensors], Shard(0))  # tokens: gathered
    same(call(*sharded)[0], call(*tensors)[0])


def learned_tensors():
    """Gradients of what all parts of the batch share are sums."""
    q, k, v = operands()
    generator = torch.Generator().manual_seed(5)
    alibi = (0.1 * torch.randn(4, generator=generator)).requires_grad_()
    sinks = torch.randn(4, generator=generator).requires_grad_()
    bias = torch.randn(1, 4, 21, 21, generator=generator).requires_grad_()
    mine = (q, k, v, alibi, sinks, bias)

    def call(q, k, v, alibi, sinks, bias):
        return pantile.attention(q, k, v, alibi=alibi, sinks=sinks, bias=bias).square().sum()

    expected = torch.autograd.grad(call(*mine), mine)
    for place, others in (
        (Shard(0), (Replicate(), Replicate(), Replicate())),
        (Shard(2), (Shard(0), Shard(0), Shard(1))),
    ):
        places = (place,) * 3 + others
        sharded = [
            distribute_tensor(x.detach(), mesh(), [p]).requires_grad_()
            for x, p in zip(mine, places, strict=True)
        ]
        grads = torch.autograd.grad(call(*sharded), sharded)
        for x, y in zip(grads, expected, strict=True):
            same(x, y)
    assert Partial() != Replicate()


def dropout_is_that_of_one_process():
    q, k, v = (x.detach() for x in operands())
    drop = pantile.Dropout(0.3, seed=7)
    expected = pantile.attention(q, k, v, dropout=drop)
    seed = torch.tensor([7, 0])
    sharded = spread([q, k, v], Shard(0))
    given = pantile.Dropout(0.3, seed=distribute_tensor(seed, mesh(), [Replicate()]))
    same(pantile.attention(*sharded, dropout=given), expected)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).unbind(-3)
        return x + self.out(pantile.attention(q, k, v, causal=True).flatten(-2))


class Model(nn.Module):
    def __init__(self, saved):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.saved = saved

    def forward(self, x):
        for block in self.blocks:
            if self.saved is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=False, context_fn=self.saved)
        return x


def keep(saved, context, op, *_, **__):
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


def compiled_sharded_tensors():
    """Where the first call is traced, the rules are registered by hand."""
    from pantile.integrations import dtensor

    def call(q, k, v):
        return pantile.attention(q, k, v, causal=True)

    dtensor.register()
    tensors = operands()
    o = call(*tensors)
    expected = torch.autograd.grad(o.sum(), tensors)
    sharded = spread(tensors, Shard(2))
    found = torch.compile(call, fullgraph=True, backend="aot_eager")(*sharded)
    assert found.placements == (Shard(2),)
    same(found, o)
    for mine, other in zip(torch.autograd.grad(found.sum(), sharded), expected, strict=True):
        same(mine, other)


def data_parallel():
    """DistributedDataParallel, whose hooks see each gradient once."""
    torch.manual_seed(0)
    plain = Model(None)
    inputs = torch.randn(WORLD, 3, 11, 32)
    plain(inputs.flatten(0, 1)).square().sum().backward()
    model = copy.deepcopy(plain)
    model.zero_grad()
    parallel = nn.parallel.DistributedDataParallel(model)
    parallel(inputs[dist.get_rank()]).square().sum().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        same(mine.grad, other.grad / WORLD)


def compiled_sharded_parameters():
    sharded_parameters(compiled=True)


def sharded_parameters(compiled=False):
    torch.manual_seed(0)
    plain = Model(None)
    inputs = torch.randn(WORLD, 3, 11, 32)
    plain(inputs.flatten(0, 1)).square().sum().backward()
    policy = functools.partial(keep, pantile.checkpoint_save_ops())
    saved = functools.partial(create_selective_checkpoint_contexts, policy)
    model = copy.deepcopy(plain)
    model.zero_grad()
    model.saved = saved
    for block in model.blocks:
        fully_shard(block, mesh=mesh())
    fully_shard(model, mesh=mesh())
    run = torch.compile(model, backend="aot_eager") if compiled else model
    run(inputs[dist.get_rank()]).square().sum().backward()
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        same(mine.grad, other.grad / WORLD)  # FSDP takes the mean


def main() -> None:
    name, rank, meeting = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{meeting}", rank=int(rank), world_size=WORLD
    )
    for case in name.split(","):
        globals()[case]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
