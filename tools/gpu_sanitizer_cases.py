"""Cases of tools/gpu_sanitizer.py beyond plain attention: what is compiled at run time (variants,
masks, expressions, ranges and pages of keys), the FP8 backward, and decode and append over caches.

A case is small, and takes every way of its kernel: several tiles of queries and keys, ragged ends,
a sequence without keys, shared key heads. Every tensor comes from the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pantile
import torch

Case = tuple[str, Callable[[], None]]

BATCH, ROWS, KEYS, HEADS, HEADS_K = 2, 150, 210, 4, 2
LENGTHS = ((65, 64), (0, 5), (1, 0), (130, 200))  # of packed sequences: rows, keys

# By backend: head dims of the rows with hooks, of which the Hopper backward of 64 is that of 96.
VARIANT_DIMS = {"hopper": ((64, 64), (128, 128), (192, 128)), "ampere": ((64, 64), (128, 128))}
FP8_BACKWARD_DIMS = (64, 96, 128, 192, 256)
PAGE_DIMS = {"hopper": (64, 80, 96, 128, 192, 256), "ampere": (64, 128)}
DECODE_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
CODED_DIMS = (64, 128, 256, 576)  # of caches of 8 bits, which Hopper decodes
LATENT = (576, 512)


def ints(values, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32).to(device)


def normal(*shape: int, device: str, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype).to(device)


def bounds(side: int, device: str) -> torch.Tensor:
    lengths = torch.tensor([0, *(pair[side] for pair in LENGTHS)])
    return lengths.cumsum(0).to(torch.int32).to(device)


def longest(side: int) -> int:
    return max(pair[side] for pair in LENGTHS)


def operands(device: str, dims: tuple[int, int], packed: bool = False, dtype=torch.bfloat16):
    """q, k, v."""
    leading = [(BATCH, ROWS), (BATCH, KEYS)]
    if packed:
        leading = [(sum(pair[side] for pair in LENGTHS),) for side in (0, 1)]
    shapes = [(*leading[0], HEADS, dims[0]), *((*leading[1], HEADS_K, d) for d in dims)]
    return [normal(*s, device=device, dtype=dtype) for s in shapes]


def packing(device: str) -> tuple:
    return bounds(0, device), bounds(1, device), longest(0), longest(1)


# ---- variants, masks and expressions


def _coin(*shape: int, device: str) -> torch.Tensor:
    return (torch.rand(shape) < 0.5).to(device)


def _documents(device: str) -> pantile.Documents:
    return pantile.Documents(*(ints([i // 40 for i in range(n)], device) for n in (ROWS, KEYS)))


# By name: arguments of attention(), on a device. What requires a gradient is learned.
CHANGES: dict[str, Callable[[str], dict[str, Any]]] = {
    "softcap": lambda device: {"softcap": 2.5},
    "alibi": lambda device: {"alibi": normal(HEADS, device=device).requires_grad_()},
    "bias": lambda device: {
        "bias": normal(BATCH, HEADS, ROWS, KEYS, device=device).requires_grad_()
    },
    "shared-bias": lambda device: {
        "bias": normal(1, 1, ROWS, KEYS, device=device).requires_grad_()
    },
    "sinks": lambda device: {"sinks": normal(HEADS, device=device).requires_grad_()},
    "dropout": lambda device: {"dropout": pantile.Dropout(0.3, seed=7)},
    "elements": lambda device: {"mask": _coin(BATCH, 1, ROWS, KEYS, device=device)},
    "blocks": lambda device: {
        "mask": pantile.BlockMask(
            _coin(BATCH, 1, -(-ROWS // 64), -(-KEYS // 64), device=device), 64
        )
    },
    "documents": lambda device: {"mask": _documents(device)},
    "prefix": lambda device: {"mask": pantile.Prefix(ints([0, 77], device))},
    "mask-expression": lambda device: {"mask": pantile.Mask("(i + j) % 3 != h % 3")},
    "score-expression": lambda device: {
        "score": pantile.Score(
            "s + slope[h] * abs(i - j)", slope=normal(HEADS, device=device).requires_grad_()
        )
    },
}
# A softcap leaves no gradient of ALiBi's slopes and of a bias on a GPU.
CHANGES["all"] = lambda device: {
    name: value.detach() if name in ("alibi", "bias") else value
    for part in ("softcap", "alibi", "bias", "sinks", "dropout", "elements")
    for name, value in CHANGES[part](device).items()
}
SERVED = {"hopper": tuple(CHANGES), "ampere": ("softcap", "alibi", "sinks", "dropout")}
# Sums without a fixed order on GPUs (docs/variants.md): deterministic=True is refused.
ANY_ORDER = ("shared-bias", "score-expression", "all")
CAPTURED = {"score-expression": lambda change: [change["score"].tensors["slope"]]}


def _learned(name: str, change: dict) -> list[torch.Tensor]:
    if name in CAPTURED:
        return CAPTURED[name](change)
    return [x for x in change.values() if isinstance(x, torch.Tensor) and x.requires_grad]


def changed(backend: str, device: str, name: str, dims: tuple[int, int]) -> Callable[[], None]:
    """Both passes, causal, in any order and, where there is that, deterministic."""

    def run() -> None:
        options = pantile.Options(backend=backend)
        for deterministic in (False, True):
            change = CHANGES[name](device)
            if deterministic and (name in ANY_ORDER or "mask" in change):
                break
            leaves = [x.requires_grad_() for x in operands(device, dims)]
            o, lse = pantile.attention(
                *leaves,
                causal=True,
                return_lse=True,
                deterministic=deterministic,
                options=options,
                **change,
            )
            grads = [torch.randn(x.shape).to(x.dtype).to(device) for x in (o, lse)]
            grads[1].masked_fill_(lse.detach() == -torch.inf, 0.0)
            torch.autograd.grad((o, lse), leaves + _learned(name, change), grads)

    return run


# ---- places of keys, further outputs


def ranged(backend: str, device: str, dims: tuple[int, int]) -> Callable[[], None]:
    """Ranges that overlap and leave rows out, a shift of the mask."""

    def run() -> None:
        q, k, v = operands(device, dims, packed=True)
        for window in ({"causal": True}, {"window": (30, 5)}):
            pantile.varlen_attention(
                *(q, k, v, bounds(0, device), None, longest(0), 200),
                k_begin=ints([3, 0, 9, 60], device),
                seqused_k=ints([70, 0, 5, 200], device),
                mask_shift=ints([4, 0, 9, 70], device),
                return_lse=True,
                options=pantile.Options(backend=backend),
                **window,
            )

    return run


def paged(backend: str, device: str, dim: int, page: int) -> Callable[[], None]:
    def run() -> None:
        used = [pair[1] for pair in LENGTHS]
        columns = -(-max(used) // page)
        pages = len(used) * columns
        table = torch.randperm(pages).reshape(len(used), columns).to(torch.int32).to(device)
        q = operands(device, (dim, dim), packed=True)[0]
        k, v = (
            normal(pages, page, HEADS_K, dim, device=device, dtype=torch.bfloat16) for _ in range(2)
        )
        pantile.varlen_attention(
            *(q, k, v, bounds(0, device), None, longest(0), max(used)),
            seqused_k=ints(used, device),
            block_table=table,
            causal=True,
            return_lse=True,
            options=pantile.Options(backend=backend),
        )

    return run


def outputs(backend: str, device: str, dims: tuple[int, int]) -> Callable[[], None]:
    """max_logit, and o in float32, the backward of which splits it again."""

    def run() -> None:
        options = pantile.Options(backend=backend, output_dtype="float32")
        leaves = [x.requires_grad_() for x in operands(device, dims, packed=True)]
        o, lse, _ = pantile.varlen_attention(
            *(*leaves, *packing(device)),
            causal=True,
            return_lse=True,
            return_max_logit=True,
            options=options,
        )
        grads = [torch.randn(x.shape).to(device) for x in (o, lse)]
        grads[1].masked_fill_(lse.detach() == -torch.inf, 0.0)
        torch.autograd.grad((o, lse), leaves, grads)

    return run


def fp8_backward(backend: str, device: str, dim: int, is_packed: bool) -> Callable[[], None]:
    """De-quantised rows, rotated gradients: fp8_backward="bf16"."""

    def run() -> None:
        options = pantile.Options(backend=backend, fp8_backward="bf16")
        leaves = [x.requires_grad_() for x in operands(device, (dim, dim), is_packed)]
        made = pantile.quantize(*leaves, *(packing(device) if is_packed else ()), options=options)
        pantile.fp8.dequantize(made, options=options)
        o, lse = pantile.fp8.attention(made, causal=True, return_lse=True, options=options)
        grads = [torch.randn(x.shape).to(x.dtype).to(device) for x in (o, lse)]
        grads[1].masked_fill_(lse.detach() == -torch.inf, 0.0)
        torch.autograd.grad((o, lse), leaves, grads)

    return run


# ---- caches

CACHES = {
    "dense": {"page": None},
    "pages": {"page": 16},
    "pages-hnd": {"page": 64, "layout": "HND"},
    "e4m3": {"page": 16, "dtype": torch.float8_e4m3fn, "scales": "token"},
    "int8": {"page": 16, "dtype": torch.int8, "scales": "token"},
}


def _cache(device: str, dims, page=None, layout="NHD", dtype=torch.bfloat16, scales=None):
    """Of three sequences with room for 512 keys each, every slot holds numbers."""
    form = {"head_dim_v": dims[1], "dtype": dtype, "device": device, "layout": layout}
    form |= {"scales": scales, "latent": dims == LATENT}
    heads_k = 1 if dims == LATENT else HEADS_K
    if page is None:
        cache = pantile.KVCache.dense(3, 512, heads_k, dims[0], **form)
    else:
        columns = 512 // page
        table = torch.randperm(3 * columns).reshape(3, columns).to(torch.int32).to(device)
        cache = pantile.KVCache.paged(
            3 * columns, page, heads_k, dims[0], block_table=table, **form
        )
    for x in (cache.k, cache.v, cache.scale_k, cache.scale_v):
        if x is not None:
            x.copy_(torch.randn(x.shape).mul(20 if x.dtype is torch.int8 else 1).to(x.dtype))
    return cache


def cached(backend: str, device: str, dims: tuple[int, int], kind: str) -> Callable[[], None]:
    """append, then decode of one query, of several in a tree and of packed ones, over keys that
    one part and several parts serve."""

    def run() -> None:
        options = pantile.Options(backend=backend, checked=True)
        cache = _cache(device, dims, **CACHES[kind])
        heads_k, more = cache.heads_k, {"options": options}
        lengths = ints([0, 65, 500], device)

        def rows(*leading: int, heads: int, dim: int) -> torch.Tensor:
            return normal(*leading, heads, dim, device=device, dtype=torch.bfloat16)

        new = [rows(3, 4, heads=heads_k, dim=d) for d in dims]
        angles = [torch.randn(600, 32).to(device) for _ in range(2)]
        q = rows(3, 4, heads=HEADS, dim=dims[0])
        pantile.decode(
            *(q, cache, lengths),
            k_new=new[0],
            v_new=None if dims == LATENT else new[1],
            rotary=angles,
            return_lse=True,
            **more,
        )
        lengths = lengths + 4
        tree = torch.tensor([[1, 3, 5, 11]] * 3, dtype=torch.int64).to(device)
        pantile.decode(
            q, cache, lengths, tree_mask=tree, sinks=normal(HEADS, device=device), **more
        )
        pantile.decode(q[:, :1], cache, lengths, split="invariant", softcap=3.0, **more)
        schedule = pantile.decode_schedule(q, cache, lengths, options=options)
        pantile.decode(q, cache, lengths, schedule=schedule, **more)
        pads = ints([1, 0, 70], device)
        pantile.decode(q, cache, lengths, leftpad=pads, window=(33, 0), **more)
        if dims != LATENT:
            pantile.decode(q, cache, lengths, split=64, **more)
        packed = rows(7, heads=HEADS, dim=dims[0])
        starts = ints([0, 1, 1, 7], device)
        pantile.decode(packed, cache, lengths, cu_seqlens_q=starts, max_seqlen_q=6, **more)

    return run


# ---- all of them


def attention_cases(backend: str, device: str) -> Iterator[Case]:
    for dims in VARIANT_DIMS[backend]:
        text = f"d{dims[0]}x{dims[1]}"
        for name in SERVED[backend]:
            yield f"variant {text} {name}", changed(backend, device, name, dims)
        yield f"ranges {text}", ranged(backend, device, dims)
        yield f"outputs {text}", outputs(backend, device, dims)
    for dim in PAGE_DIMS[backend]:
        for page in (16, 64):
            yield f"pages d{dim} {page}", paged(backend, device, dim, page)
    for dim in FP8_BACKWARD_DIMS if backend == "hopper" else ():
        for is_packed in (False, True):
            label = f"fp8-backward d{dim} {'packed' if is_packed else 'dense'}"
            yield label, fp8_backward(backend, device, dim, is_packed)


def cache_cases(backend: str, device: str) -> Iterator[Case]:
    for dims in (*DECODE_DIMS, LATENT):
        for kind in CACHES:
            coded = "dtype" in CACHES[kind]
            if coded and (backend != "hopper" or dims[0] not in CODED_DIMS):
                continue
            yield f"cache d{dims[0]}x{dims[1]} {kind}", cached(backend, device, dims, kind)


def cases(backend: str, device: str) -> Iterator[Case]:
    yield from attention_cases(backend, device)
    yield from cache_cases(backend, device)
