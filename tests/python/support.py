"""Inputs, the float64 reference and the contract's bound, for every test file."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pantile
import pytest
import torch
from pantile import reference
from pantile._direct import split_output
from pantile._masks import window_bounds
from pantile._schema import Call

HERE = __file__.rpartition("/")[0]

GPU_DTYPE = torch.bfloat16  # where one will do
DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Target:
    """A backend, the device its tensors live on, and the dtype that tests of no dtype use."""

    backend: str
    device: str
    gpu_dtype: torch.dtype = torch.bfloat16

    @property
    def default_dtype(self) -> torch.dtype:
        return torch.float32 if self.device == "cpu" else self.gpu_dtype

    @property
    def options(self) -> pantile.Options:
        return pantile.Options(backend=self.backend)

    def exact_options(self, **arguments) -> pantile.Options:
        """For calls without LSE whose output is compared, bit by bit, with that of one with LSE.

        Where nobody gets the LSE, the Ampere backend sums the rounded weights on tensor cores.
        """
        return pantile.Options(backend=self.backend, softmax="vector", **arguments)


def fp8_exps(target: Target) -> tuple[str, ...]:
    """The ways of the exponential of an FP8 forward that a backend has in this build; the
    reference computes in double and has none, the Ampere family two."""
    if target.backend == "reference":
        return ()
    trial = target.backend == "hopper" and pantile.build_info()["experiments"]
    built = target.device == "cpu" or trial
    return ("code", "mixed", "exp2") if built else ("code", "exp2")


@dataclass
class Case:
    """Tensors and arguments of one call; ``lengths``: (cu_seqlens_q, cu_seqlens_k) if packed."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    arguments: dict = field(default_factory=dict)
    lengths: tuple = ()
    longest: tuple = ()
    largest_share: float = 0.0  # of the bound, by the errors of the last comparison

    @property
    def operands(self):
        return self.q, self.k, self.v

    def ours(self, q, k, v, **extra):
        """(o, lse)."""
        arguments = {**self.arguments, "return_lse": True, **extra}
        if self.lengths:
            return pantile.varlen_attention(q, k, v, *self.lengths, *self.longest, **arguments)
        return pantile.attention(q, k, v, **arguments)

    def expected(self, q, k, v, dtype):
        """(o, lse) of the textbook in ``dtype``; None: the dtype of q."""
        call = reference.varlen_attention if self.lengths else reference.attention
        return call(q, k, v, *self.lengths, **self.arguments, dtype=dtype)

    def explain(self, **extra) -> pantile.Explanation:
        arguments = {**self.arguments, **extra}
        return pantile.explain(*self.operands, *self.lengths, *self.longest, **arguments)


def dense(
    target: Target,
    dtype: torch.dtype = torch.float32,
    batch: int = 2,
    rows: int = 37,
    keys: int = 45,
    heads: int = 4,
    heads_k: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    seed: int = 0,
    **arguments,
) -> Case:
    generator = torch.Generator().manual_seed(seed)
    shapes = [
        (batch, rows, heads, head_dim),
        (batch, keys, heads_k, head_dim),
        (batch, keys, heads_k, head_dim if head_dim_v is None else head_dim_v),
    ]
    tensors = [torch.randn(s, generator=generator).to(target.device, dtype) for s in shapes]
    return Case(*tensors, arguments)


def packed(
    target: Target,
    lengths_q: list[int],
    lengths_k: list[int],
    dtype: torch.dtype = torch.float32,
    heads: int = 4,
    heads_k: int = 2,
    head_dim: int = 64,
    head_dim_v: int | None = None,
    seed: int = 0,
    **arguments,
) -> Case:
    case = dense(
        target,
        dtype,
        1,
        sum(lengths_q),
        sum(lengths_k),
        heads,
        heads_k,
        head_dim,
        head_dim_v,
        seed,
        **arguments,
    )
    bounds = tuple(
        torch.tensor([0, *torch.tensor(x).cumsum(0).tolist()], dtype=torch.int32).to(target.device)
        if x
        else torch.zeros(1, dtype=torch.int32, device=target.device)
        for x in (lengths_q, lengths_k)
    )
    longest = (max(lengths_q, default=0), max(lengths_k, default=0))
    return Case(case.q[0], case.k[0], case.v[0], arguments, bounds, longest)


def require_kernel(case: Case, target: Target, backward: bool = False) -> None:
    """Skips, with the reason, what a GPU backend does not serve. The CPU serves everything."""
    plan = case.explain(options=target.options)
    passes = [plan.forward, plan.backward] if backward else [plan.forward]
    for one in passes:
        if one.kernel is None:
            assert target.device != "cpu", one.reason
            pytest.skip(f"{target.backend}: {one.reason}")


def gradients(function, operands, grad_o=None, grad_lse=None):
    """[o, lse, dq, dk, dv ...] of ``function`` on fresh leaves with the strides of the operands."""
    leaves = [x.detach().requires_grad_() for x in operands]
    o, lse = function(*leaves)
    outputs, grads = [], []
    for output, grad in ((o, grad_o), (lse, grad_lse)):
        if grad is not None and output.requires_grad:  # not where the reference has no terms
            outputs.append(output)
            grads.append(grad.to(output.dtype))
    found = [None] * len(leaves)
    if outputs:
        found = torch.autograd.grad(outputs, leaves, grads, allow_unused=True)
    found = [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]
    return [o.detach(), lse.detach(), *found]


NAMES = ("o", "lse", "dq", "dk", "dv")


def assert_within_bound(results, textbooks, exacts, case: Case, grad_o) -> None:
    """The contract: error at most twice the textbook's in the same dtype, plus the floor."""
    scales = reference.rounding_scales(
        lambda *x: case.expected(*x, torch.float64),
        *case.operands,
        grad_o,
        case.arguments.get("scale"),
    )
    case.largest_share = 0.0
    for name, result, textbook, exact, scale in zip(
        NAMES, results, textbooks, exacts, scales, strict=False
    ):
        assert result.shape == exact.shape, f"{name}: {result.shape}, expected {exact.shape}"
        error = reference.error(result, exact)
        dtype = torch.float32 if name == "lse" else case.q.dtype
        bound = reference.bound(textbook, exact, dtype, scale)
        assert error <= bound, f"{name}: error {error:.3e} above bound {bound:.3e}"
        case.largest_share = max(case.largest_share, error / bound if bound else 0.0)


# ---- large cases: the textbook of a few heads at a time, compared as a whole and in small blocks

# Of a part of the textbook: 0.5 GiB in float64, of which about ten are alive, so that several test
# processes have room on a GPU.
MOST_SCORES = 2**26
BLOCK_ROWS = 64
# Root mean square error of a block of rows, over that of the textbook: a tile of keys that is left
# out of twenty costs a factor of 50, what differs from one block to the next by chance 1.2.
BLOCK_FACTOR = 3.0


@dataclass(frozen=True)
class Part:
    """Sequences and heads of a case: where they lie in q (and o), k (and v), and lse."""

    q: tuple
    k: tuple
    lse: tuple
    packed: bool
    sequence: int  # the first of them

    def of(self, x: torch.Tensor, index: tuple) -> torch.Tensor:
        return x[index][None] if self.packed else x[index]


def _head_slices(case: Case, scores_of_a_key_head: int, most: int) -> Iterator[tuple[slice, slice]]:
    heads, heads_k = case.q.shape[-2], case.k.shape[-2]
    group = heads // heads_k
    step = min(heads_k, max(most // max(scores_of_a_key_head, 1), 1))
    for first in range(0, heads_k, step):
        last = min(first + step, heads_k)
        yield slice(first * group, last * group), slice(first, last)


def parts(case: Case, most: int = MOST_SCORES) -> Iterator[Part]:
    """Covers every sequence and head once, with at most ``most`` scores where heads allow it."""
    group = case.q.shape[-2] // case.k.shape[-2]
    if not case.lengths:
        batch, rows, keys = case.q.shape[0], case.q.shape[1], case.k.shape[1]
        scores = group * rows * keys
        step = min(batch, max(most // max(scores * case.k.shape[2], 1), 1))
        for first in range(0, batch, max(step, 1)):
            some = slice(first, min(first + step, batch))
            for heads, heads_k in _head_slices(case, scores * (some.stop - some.start), most):
                yield Part(
                    (some, slice(None), heads),
                    (some, slice(None), heads_k),
                    (some, heads),
                    False,
                    first,
                )
        return
    bounds_q, bounds_k = (x.tolist() for x in case.lengths)
    used_q, used_k = (case.arguments.get(name) for name in ("seqused_q", "seqused_k"))
    for b in range(len(bounds_q) - 1):
        rows = bounds_q[b + 1] - bounds_q[b] if used_q is None else int(used_q[b])
        keys = bounds_k[b + 1] - bounds_k[b] if used_k is None else int(used_k[b])
        at_q = slice(bounds_q[b], bounds_q[b] + rows)
        at_k = slice(bounds_k[b], bounds_k[b] + keys)
        for heads, heads_k in _head_slices(case, group * rows * keys, most):
            yield Part((at_q, heads), (at_k, heads_k), (heads, at_q), True, b)


@dataclass
class Textbooks:
    """What :func:`assert_right` compares with: lists of o, lse, dq, dk, dv (or o and lse)."""

    exact: list[torch.Tensor]
    textbook: list[torch.Tensor]
    scales: list[float]  # reference.rounding_scales


def textbooks(case: Case, grad_o=None, grad_lse=None) -> Textbooks:
    """The textbook in float64 and in the dtype of the case; gradients where grad_o is given."""
    arguments = {k: v for k, v in case.arguments.items() if not k.startswith("seqused")}
    q, k, v = case.operands
    o_shape, lse_shape = (*q.shape[:-1], v.shape[-1]), (*q.shape[:-3], q.shape[-2], q.shape[-3])
    found = []
    for dtype in (torch.float64, q.dtype):
        lse_dtype = torch.float32 if dtype.itemsize < 4 else dtype
        one = [
            q.new_zeros(o_shape, dtype=dtype),
            q.new_full(lse_shape, -torch.inf, dtype=lse_dtype),
        ]
        found.append([*one, *(torch.zeros_like(x, dtype=dtype) for x in (q, k, v))])
    scales = [0.0] * 5
    chosen = list(parts(case))
    for number, part in enumerate(chosen):
        operands = [part.of(x, at) for x, at in ((q, part.q), (k, part.k), (v, part.k))]
        if operands[0].numel() == 0:
            continue
        gradient = None if grad_o is None else part.of(grad_o, part.q)
        lse_gradient = None if grad_lse is None else part.of(grad_lse, part.lse)
        for results in found:
            results_of_part = gradients(
                lambda *x: reference.attention(*x, **arguments, dtype=None),
                [x.to(results[0].dtype) for x in operands],
                gradient,
                lse_gradient,
            )
            places = (part.q, part.lse, part.q, part.k, part.k)
            for whole, index, piece in zip(results, places, results_of_part, strict=True):
                whole[index] = piece[0] if part.packed else piece
        if q.dtype is torch.float32 or number % max(len(chosen) // 4, 1) == 0:
            sizes = reference.rounding_scales(
                lambda *x: reference.attention(*x, **arguments),
                *operands,
                torch.zeros_like(part.of(found[1][0], part.q)) if gradient is None else gradient,
                arguments.get("scale"),
            )
            scales = [max(pair) for pair in zip(scales, sizes, strict=True)]
    count = 2 if grad_o is None else 5
    return Textbooks(found[0][:count], found[1][:count], scales[:count])


def block_rms(x: torch.Tensor) -> torch.Tensor:
    """Of [.., rows, heads, dim]: root mean squares [.., heads, blocks of 64 rows]."""
    x = x.transpose(-3, -2)
    missing = -x.shape[-2] % BLOCK_ROWS
    x = torch.nn.functional.pad(x, (0, 0, 0, missing))
    return x.unflatten(-2, (-1, BLOCK_ROWS)).flatten(-2).square().mean(-1).sqrt()


def assert_right(results, truth: Textbooks, dtype: torch.dtype, names=NAMES, **info) -> None:
    """The contract for the whole, and for each block of 64 rows of each head three times the
    textbook's root mean square error, so that a small part cannot hide behind large numbers."""
    for name, result, textbook, exact, scale in zip(
        names[: len(results)], results, truth.textbook, truth.exact, truth.scales, strict=True
    ):
        where = f"{name} {info or ''}"
        assert result.shape == exact.shape, f"{where}: {result.shape}, expected {exact.shape}"
        assert not result.isnan().any(), f"{where}: {int(result.isnan().sum())} are NaN"
        error = reference.error(result, exact)
        kind = torch.float32 if name == "lse" else dtype
        bound = reference.bound(textbook, exact, kind, scale)
        assert error <= bound, f"{where}: error {error:.3e} above bound {bound:.3e}"
        if name == "lse" or result.numel() == 0:
            continue
        found, allowed = (block_rms(x.double() - exact) for x in (result, textbook))
        floor = torch.finfo(dtype).eps * block_rms(exact) + torch.finfo(torch.float32).eps * scale
        worst = (found / (BLOCK_FACTOR * allowed + floor).clamp_min(1e-300)).nan_to_num(0.0)
        at = torch.unravel_index(worst.argmax(), worst.shape)
        assert worst.max() <= 1.0, (
            f"{where}: block {[int(i) for i in at]} of {list(worst.shape)} is off by "
            f"{float(found[at]):.3e}, the textbook by {float(allowed[at]):.3e}; "
            f"{int((worst > 1).sum())} such blocks"
        )


def assert_nothing_where_nothing_is_seen(o, lse, exact_lse, dq=None) -> None:
    """Rows without keys: exactly 0, -inf and 0."""
    dead = torch.isneginf(exact_lse)
    assert torch.equal(torch.isneginf(lse), dead)
    rows = dead.transpose(-1, -2)
    assert not o[rows].any()
    assert dq is None or not dq[rows].any()


# ---- memory that held something else

FILLS = {"nan": float("nan"), "large": 1e30, "inf": float("inf")}
GUARD_BYTES = 16384  # on either side of a buffer
ALLOCATOR_BLOCKS = (512, 4096, 65536, 2**20, 2**23, 2**26)  # bytes


def fill(x: torch.Tensor, name: str) -> None:
    """Fills a new buffer, whatever its dtype, with the bits of a number."""
    if x.numel() == 0:
        return
    value = FILLS[name]
    if x.dtype.is_floating_point and x.dtype.itemsize >= 2:
        x.fill_(min(value, torch.finfo(x.dtype).max) if name == "large" else value)
        return
    pattern = {"nan": 0x7FFFFFFF, "large": 0x7149F2CA, "inf": 0x7F800000}[name]  # of float32
    raw = x.detach().view(-1).view(torch.uint8)  # in this order: x may be a scalar
    raw[raw.numel() // 4 * 4 :].fill_(0x7F)
    if raw.data_ptr() % 4 == 0:
        raw[: raw.numel() // 4 * 4].view(torch.int32).fill_(pattern)
    else:
        raw.fill_(0x7F)


class Dirt:
    """Fills every buffer that the package makes with torch, before a kernel sees it, and what the
    caching allocator will hand out; lets the package check the zero part of each workspace, and
    fills the rest. ``name`` is a key of FILLS; None takes the next one at each buffer."""

    def __init__(self, launches: bool = True) -> None:
        self.launches = launches  # between launches; False: only what the allocator hands out
        self.name: str | None = None
        self.guards: list[tuple[torch.Tensor, torch.Tensor]] | None = None
        self.filled = 0
        self._next = itertools.cycle(FILLS)

    def fill(self, x: torch.Tensor) -> None:
        self.filled += 1
        with torch._C.DisableTorchFunctionSubclass(), torch._C._DisableTorchDispatch():
            fill(x, self.name or next(self._next))

    def soil_allocator(self) -> None:
        blocks = [
            torch.empty(size, dtype=torch.uint8, device="cuda")
            for size in ALLOCATOR_BLOCKS
            for _ in range(3)
        ]
        for block in blocks:
            fill(block, self.name or next(self._next))

    def _made(self, x):
        """What replaces a new buffer: itself, filled, or the middle of a larger one."""
        if type(x) is not torch.Tensor or x.device.type not in ("cpu", "cuda"):
            return x
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return x
        if self.guards is not None and x.numel() and x.is_contiguous():
            x = self._guarded(x)
        self.fill(x)
        return x

    def _guarded(self, x: torch.Tensor) -> torch.Tensor:
        size = x.numel() * x.element_size()
        base = torch.empty(size + 2 * GUARD_BYTES, dtype=torch.uint8, device=x.device)
        self.fill(base)
        zones = [base[:GUARD_BYTES], base[GUARD_BYTES + size :]]
        self.guards += [(zone, zone.clone()) for zone in zones]
        offset = GUARD_BYTES // x.element_size()
        middle = torch.empty(0, dtype=x.dtype, device=x.device)  # no view, as autograd sees it
        return middle.set_(base.untyped_storage(), offset, x.shape, x.stride())

    def assert_guards_are_whole(self) -> None:
        for zone, before in self.guards:
            assert torch.equal(zone, before), "a kernel wrote beside a buffer"

    @contextlib.contextmanager
    def spread(self):
        """While it lasts, pantile's calls of torch's allocating functions answer filled buffers."""
        from pantile import _fast_path, _runtime

        if not self.launches:
            yield self
            return
        places = ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty"))
        originals = {place: getattr(*place) for place in places}
        own = "new_empty" in torch.Tensor.__dict__  # else inherited from torch's C base class

        def wrapped(original):
            def allocate(*args, **kwargs):
                x = original(*args, **kwargs)
                caller = sys._getframe(1).f_globals.get("__name__", "")
                return self._made(x) if caller.startswith("pantile.") else x

            return allocate

        dirty = {key: wrapped(original) for key, original in originals.items()}
        try:
            for (owner, name), function in dirty.items():
                setattr(owner, name, function)
            _fast_path.make_outputs_by(dirty[torch, "empty_like"])
            with _runtime.checked_workspaces(self.fill):
                yield self
        finally:
            for (owner, name), original in originals.items():
                setattr(owner, name, original)
            if not own:
                del torch.Tensor.new_empty
            _fast_path.make_outputs_by(torch.empty_like)


def _tensors(found) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else [x for x in found if x is not None]


def dirty_runs(call: Callable, device: str = "cuda", guarded: bool = True) -> list[list]:
    """What ``call()`` answers on memory that holds NaN, 1e30 and Inf."""
    dirt, results = Dirt(), []
    with dirt.spread():
        for name in FILLS:
            dirt.name, dirt.guards = name, [] if guarded else None
            if device == "cuda":
                dirt.soil_allocator()
            results.append(_tensors(call()))
            if guarded:
                dirt.assert_guards_are_whole()
    assert dirt.filled, "the call allocated nothing"
    return results


def on_dirty_memory(call: Callable, device: str = "cuda", guarded: bool = True) -> list:
    """The tensors that ``call()`` answers, equal in every bit whatever memory held before."""
    first, *others = dirty_runs(call, device, guarded)
    for name, other in zip(list(FILLS)[1:], others, strict=True):
        for index, (a, b) in enumerate(zip(first, other, strict=True)):
            assert torch.equal(bits(a), bits(b)), f"result {index} differs on memory full of {name}"
    return first


def check_forward(case: Case, target: Target) -> list[torch.Tensor]:
    require_kernel(case, target)
    results = list(case.ours(*case.operands, options=target.options))
    exact = case.expected(*case.operands, torch.float64)
    textbook = case.expected(*case.operands, None)
    assert_within_bound(results, textbook, exact, case, torch.zeros_like(exact[0]))
    return results


def check_both(case: Case, target: Target, with_lse: bool = False, **extra) -> list[torch.Tensor]:
    """Forward and backward against the bound. Where only a forward kernel exists, only that."""
    plan = case.explain(options=target.options)
    if plan.backward.kernel is None and plan.forward.kernel is not None:
        assert target.device != "cpu", plan.backward.reason
        return check_forward(case, target)
    require_kernel(case, target)
    generator = torch.Generator().manual_seed(1)
    o, lse = case.expected(*case.operands, torch.float64)
    grad_o = torch.randn(o.shape, generator=generator).to(o.device, case.q.dtype)
    grad_lse = None
    if with_lse:
        grad_lse = torch.randn(lse.shape, generator=generator).to(o.device)
    results = gradients(
        lambda *x: case.ours(*x, options=target.options, **extra), case.operands, grad_o, grad_lse
    )
    exact = gradients(
        lambda *x: case.expected(*x, None),
        [x.double() for x in case.operands],
        grad_o,
        grad_lse,
    )
    textbook = gradients(lambda *x: case.expected(*x, None), case.operands, grad_o, grad_lse)
    assert_within_bound(results, textbook, exact, case, grad_o)
    return results


def backward_inputs(case: Case, with_lse: bool):
    """(o, o_low, lse, grad_o, grad_lse): exact o and LSE, rounded as a forward kernel would, and
    random gradients of both."""
    o, lse = case.expected(*case.operands, torch.float64)
    generator = torch.Generator().manual_seed(1)
    grad_o = torch.randn(o.shape, generator=generator).to(o.device, case.q.dtype)
    grad_lse = torch.randn(lse.shape, generator=generator).to(o.device) if with_lse else None
    return *rounded_output(o, case.q.dtype), lse.float().contiguous(), grad_o, grad_lse


def rounded_output(o: torch.Tensor, dtype: torch.dtype):
    """o as a kernel would write it, with its low bits where the type has them."""
    if dtype is torch.float32:
        return o.float().contiguous(), None
    return tuple(x.contiguous() for x in split_output(o.float(), dtype))


def operator_call(case: Case, backend: str) -> Call:
    """The call's fields, for the operators."""
    given = case.arguments
    left, right = window_bounds(given.get("causal", False), given.get("window"))
    fields = {"scale": given.get("scale"), "window_left": left, "window_right": right}
    if case.lengths:
        fields |= dict(zip(("cu_seqlens_q", "cu_seqlens_k"), case.lengths, strict=True))
        fields |= dict(zip(("max_seqlen_q", "max_seqlen_k"), case.longest, strict=True))
    fields |= {name: given.get(name) for name in ("seqused_q", "seqused_k")}
    return Call(**fields, backend=backend)


def run_backward(case: Case, target: Target, inputs, deterministic: bool = False):
    """(dq, dk, dv) of the backward operator alone, whatever kernel would do the forward."""
    o, o_low, lse, grad_o, grad_lse = inputs
    settings = operator_call(case, target.backend)
    return torch.ops.pantile.backward(
        grad_o, grad_lse, *case.operands, o, o_low, lse, *settings, deterministic
    )


def check_backward(case: Case, target: Target, with_lse: bool = False) -> None:
    """The backward operator alone against the bound."""
    inputs = backward_inputs(case, with_lse)
    grads = inputs[3:]
    doubles = [x.double() for x in case.operands]
    exact = gradients(lambda *x: case.expected(*x, None), doubles, *grads)
    textbook = gradients(lambda *x: case.expected(*x, None), case.operands, *grads)
    results = [*exact[:2], *run_backward(case, target, inputs)]  # o and lse are given
    assert_within_bound(results, textbook, exact, case, inputs[3])


def bits(x: torch.Tensor) -> torch.Tensor:
    """The raw bits, so that NaN compares and -0 differs from 0."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x.detach().contiguous().view(kinds[x.dtype.itemsize])


def assert_same_bits(first, second, names=NAMES) -> None:
    for name, a, b in zip(names, first, second, strict=True):
        assert torch.equal(bits(a), bits(b)), f"{name} differs"


def run_python(source: str, *arguments: str, timeout: float = 120, **environment: str) -> str:
    """Runs ``source`` in a fresh interpreter and returns what it printed."""
    import os

    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source), *arguments],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


# Reads [source, environments]; prints [exit status, output] of each, of a child that has torch.
_CHILDREN = """
    import json, os, sys, traceback
    import torch

    source, environments = json.load(sys.stdin)
    answers = []
    for environment in environments:
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            os.environ.update(environment)
            for descriptor in (1, 2):
                os.dup2(writing, descriptor)
            status = 0
            try:
                exec(compile(source, "source", "exec"), {"__name__": "__main__"})
            except BaseException:
                traceback.print_exc()
                status = 1
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
        os.close(writing)
        with open(reading) as output:
            text = output.read()
        answers.append((os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text))
    print(json.dumps(answers))
"""


def run_python_in_each(
    source: str, environments: list[dict[str, str]], timeout: float = 300
) -> list[str]:
    """What ``source`` prints with each of the environment variables: pantile is imported anew every
    time, torch, which takes seconds and reads none of them, once."""
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(_CHILDREN)],
        input=json.dumps([textwrap.dedent(source), environments]),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    answers = json.loads(result.stdout)
    for environment, (status, text) in zip(environments, answers, strict=True):
        assert status == 0, f"{environment}: {text}"
    return [text for _, text in answers]
