"""The torch operators ``pantile::decode``, ``pantile::append`` and ``pantile::decode_schedule``.

``append`` writes into the cache: its schema says so. None has a derivative. The arguments of all
three begin with the tensors of the cache, in the order of :data:`CACHE`.
"""

from __future__ import annotations

import torch

from pantile import _C, _direct, _fake, _ops, _watch
from pantile._fast_path import present, takes_short_cut
from pantile._torch_private import below_autograd, in_forward_mode

Tensor = torch.Tensor

CACHE = (
    "k",
    "v",
    "scale_k",
    "scale_v",
    "lengths",
    "block_table",
    "cache_index",
    "leftpad",
    "cu_seqlens_q",
    "cu_seqlens_new",
)
_COUNT = len(CACHE)
_LENGTHS = 4  # from here on the arrays that say where keys are

_REST = ", ".join(f"Tensor? {name}" for name in CACHE[5:])
_READ = f"Tensor k, Tensor? v, Tensor? scale_k, Tensor? scale_v, Tensor lengths, {_REST}"
_WRITTEN = (
    "Tensor(a!) k, Tensor(b!)? v, Tensor(c!)? scale_k, Tensor(d!)? scale_v, Tensor lengths, "
    f"{_REST}"
)
# What decode and its schedule are asked beside tensors: DecodeNumbers of bindings/kv.h.
_NUMBERS = (
    "SymInt max_seqlen_q, SymInt seqlen_new, bool slots_before_heads, SymInt head_dim_v, "
    "float? scale, SymInt window_left, SymInt window_right, float softcap, str split, "
    "SymInt split_keys, str backend"
)
_NUMBER_COUNT = _NUMBERS.count(",") + 1

_library = torch.library.Library("pantile", "FRAGMENT")
for _schema in (
    f"decode({_READ}, Tensor q, Tensor? tree_mask, Tensor? sinks, Tensor? schedule, {_NUMBERS}, "
    "bool wants_lse, bool output_f32, bool checked) -> (Tensor o, Tensor lse)",
    f"decode_schedule({_READ}, Tensor q, {_NUMBERS}, bool tree, bool sinks, bool wants_lse, "
    "bool output_f32, bool checked) -> Tensor",
    f"append({_WRITTEN}, Tensor k_new, Tensor? v_new, Tensor? q, Tensor? cos, Tensor? sin, "
    "bool interleaved, SymInt max_seqlen_q, SymInt max_seqlen_new, bool slots_before_heads, "
    "SymInt head_dim_v, str backend, bool checked) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
decode_op = torch.ops.pantile.decode.default
append_op = torch.ops.pantile.append.default
schedule_op = torch.ops.pantile.decode_schedule.default


def _rows(x: Tensor) -> Tensor:
    """x with a last axis that the bindings take."""
    return x if x.ndim == 0 or x.stride(-1) == 1 or x.numel() == 0 else x.contiguous()


def _follow_threads() -> None:
    if not _direct.THREADS_FOLLOW:
        _C.set_cpu_threads(torch.get_num_threads())


def _check_contents(cache, slots: int, total_q, longest_q, total_new, longest_new) -> None:
    """Of the arrays that say where keys are; waits for the GPU if they are there."""
    arrays = tuple(
        None if i < _LENGTHS or x is None else x.cpu() for i, x in enumerate(cache[:_COUNT])
    )
    _C.check_cache(arrays, cache[0].shape[0], slots, total_q, longest_q, total_new, longest_new)


def _slots(k: Tensor, slots_before_heads: bool) -> int:
    return k.shape[1 if slots_before_heads else 2]


# ---- decode


def _run_decode(*arguments):
    """(o, lse), lse None when it is not wanted."""
    cache, (q, tree_mask, sinks, schedule) = arguments[:_COUNT], arguments[_COUNT : _COUNT + 4]
    numbers = arguments[_COUNT + 4 : _COUNT + 4 + _NUMBER_COUNT]
    wants_lse, output_f32, checked = arguments[_COUNT + 4 + _NUMBER_COUNT :]
    _follow_threads()
    q = _rows(q)
    if checked:
        rows = q.shape[0] if q.ndim == 3 else 0
        longest = numbers[0] if q.ndim == 3 else q.shape[1]
        slots = _slots(cache[0], numbers[2])
        _check_contents(cache, slots, rows, longest, 0, numbers[1])
    o, lse = _new_outputs(q, numbers[3], wants_lse, output_f32)
    if _watch.watchers:
        _watch.skip("decode")
    _C.decode(q, o, lse, cache, numbers, tree_mask, sinks, schedule)
    return o, lse


def _decode_kernel(*arguments):
    o, lse = _run_decode(*arguments)
    return o, _no_lse(o) if lse is None else lse


def _no_lse(o: Tensor) -> Tensor:
    return o.new_empty((0,), dtype=torch.float32)


def _new_outputs(q: Tensor, head_dim_v: int, wants_lse: bool, output_f32: bool):
    if not output_f32 and q.shape[-1] == head_dim_v and q.is_contiguous():
        o = torch.empty_like(q)
    else:
        dtype = torch.float32 if output_f32 else q.dtype
        o = q.new_empty((*q.shape[:-1], head_dim_v), dtype=dtype)
    if not wants_lse:
        return o, None
    return o, q.new_empty(_direct.lse_shape(q.shape), dtype=torch.float32)


def _check_fake(cache, q: Tensor, others: dict[str, Tensor | None]) -> None:
    """What tensors without memory show; the rest is checked when the graph runs."""
    tensors = {**dict(zip(CACHE, cache, strict=True)), **others}
    for name, x in tensors.items():
        if x is not None:
            _fake.check_operand(name, x, q)
    rank = 4 if tensors["cu_seqlens_q"] is None else 3
    if q.ndim != rank:
        raise ValueError(f"q has {q.ndim} dimensions; it must have {rank}")
    if cache[0].ndim != 4:
        raise ValueError(f"cache.k has {cache[0].ndim} dimensions; it must have 4")
    found, expected = _fake.known_shapes(q.shape[-1:], cache[0].shape[-1:])
    if found != expected:
        raise ValueError(
            f"q has head_dim {found[0]}; it must be {expected[0]}, the head_dim of cache.k"
        )


@torch.library.register_fake("pantile::decode", lib=_library)
def _fake_decode(*arguments):
    cache, (q, tree_mask, sinks, schedule) = arguments[:_COUNT], arguments[_COUNT : _COUNT + 4]
    numbers = arguments[_COUNT + 4 : _COUNT + 4 + _NUMBER_COUNT]
    wants_lse, output_f32, _ = arguments[_COUNT + 4 + _NUMBER_COUNT :]
    _check_fake(cache, q, {"tree_mask": tree_mask, "sinks": sinks, "schedule": schedule})
    o, lse = _new_outputs(q, numbers[3], wants_lse, output_f32)
    return o, _no_lse(o) if lse is None else lse


# ---- schedules


def _schedule_kernel(*arguments):
    cache, q = arguments[:_COUNT], arguments[_COUNT]
    numbers = arguments[_COUNT + 1 : _COUNT + 1 + _NUMBER_COUNT]
    tree, sinks, wants_lse, output_f32, checked = arguments[_COUNT + 1 + _NUMBER_COUNT :]
    _follow_threads()
    if checked:
        rows = q.shape[0] if q.ndim == 3 else 0
        longest = numbers[0] if q.ndim == 3 else q.shape[1]
        slots = _slots(cache[0], numbers[2])
        _check_contents(cache, slots, rows, longest, 0, numbers[1])
    flags = tree, sinks, output_f32, wants_lse
    q = _rows(q)
    size = _C.decode_schedule(q, cache, numbers, *flags, None)
    schedule = q.new_empty((size,), dtype=torch.int32)
    _C.decode_schedule(q, cache, numbers, *flags, schedule)
    return schedule


@torch.library.register_fake("pantile::decode_schedule", lib=_library)
def _fake_schedule(*arguments):
    cache, q = arguments[:_COUNT], arguments[_COUNT]
    _check_fake(cache, q, {})
    size = torch.library.get_ctx().new_dynamic_size()
    return q.new_empty((size,), dtype=torch.int32)


# ---- append


def _append_kernel(*arguments):
    cache, (k_new, v_new, q, cos, sin) = arguments[:_COUNT], arguments[_COUNT : _COUNT + 5]
    interleaved, longest_q, longest_new, slots_before_heads, head_dim_v, backend, checked = (
        arguments[_COUNT + 5 :]
    )
    _follow_threads()
    k_new, v_new, q = (None if x is None else _rows(x) for x in (k_new, v_new, q))
    if checked:
        rows = (q.shape[0], longest_q) if q is not None and q.ndim == 3 else (0, longest_q)
        packed = cache[CACHE.index("cu_seqlens_new")] is not None
        new = (k_new.shape[0], longest_new) if packed else (0, k_new.shape[1])
        _check_contents(cache, _slots(cache[0], slots_before_heads), *rows, *new)
    rotated = None if q is None else q.new_empty(q.shape)
    _C.append(
        cache,
        k_new,
        v_new,
        q,
        rotated,
        cos,
        sin,
        interleaved,
        longest_q,
        longest_new,
        slots_before_heads,
        head_dim_v,
        backend,
    )
    for x in cache[:_LENGTHS]:
        if x is not None and not x.is_inference():
            torch.autograd.graph.increment_version(x)
    return k_new.new_empty((0,)) if rotated is None else rotated


@torch.library.register_fake("pantile::append", lib=_library)
def _fake_append(*arguments):
    k_new, _, q = arguments[_COUNT : _COUNT + 3]
    return k_new.new_empty((0,)) if q is None else q.new_empty(q.shape)


# ---- registration

_CACHE_NAMES = tuple(f"cache.{name}" for name in CACHE[:_LENGTHS]) + CACHE[_LENGTHS:]
_NAMES = {
    "decode": (*_CACHE_NAMES, "q", "tree_mask", "sinks", "schedule"),
    "decode_schedule": (*_CACHE_NAMES, "q"),
    "append": (*_CACHE_NAMES, "k_new", "v_new", "q", "rotary[0]", "rotary[1]"),
}


def _require_no_derivative(name: str, tensors) -> None:
    floating = [
        (which, x)
        for which, x in zip(_NAMES[name], tensors, strict=False)
        if x is not None and x.is_floating_point()
    ]
    if torch.is_grad_enabled():
        for which, x in floating:
            if x.requires_grad:
                raise _C.UnsupportedError(
                    f"pantile.{name} has no backward, and {which} requires grad; call it under "
                    "torch.no_grad() or torch.inference_mode()"
                )
    if in_forward_mode():
        for which, x in floating:
            if _ops.has_tangent(x):
                raise _C.UnsupportedError(
                    f"pantile.{name} has no forward-mode derivatives (jvp), and {which} has a "
                    "tangent; detach it"
                )


def _without_derivative(name: str, op):
    def kernel(*arguments):
        _require_no_derivative(name, arguments)
        with below_autograd():
            return op(*arguments)

    return kernel


_KERNELS = {
    "decode": (_decode_kernel, decode_op),
    "decode_schedule": (_schedule_kernel, schedule_op),
    "append": (_append_kernel, append_op),
}
for _name, (_kernel, _op) in _KERNELS.items():
    for _key in ("CPU", "CUDA"):
        _library.impl(_name, _kernel, _key)
    _library.impl(_name, _without_derivative(_name, _op), "Autograd")


# ---- torch.func: a call for each entry


def _vmap_decode(info, in_dims, *args):
    return _ops.mapped_in_a_loop(decode_op, info, in_dims, *args)


def _vmap_schedule(info, in_dims, *args):
    raise _C.UnsupportedError(
        "pantile.decode_schedule has no torch.vmap: schedules have lengths of their own; make one "
        "for each entry, or leave the schedule out of pantile.decode"
    )


def _vmap_append(info, in_dims, *args):
    """Where every tensor that it writes is mapped: each entry has a cache of its own then."""
    for which, x, dim in zip(CACHE, args[:_LENGTHS], in_dims, strict=False):
        if x is not None and dim is None:
            raise _C.UnsupportedError(
                f"pantile.append writes to cache.{which}, which torch.vmap does not map; map the "
                "cache, or append once with a batch"
            )
    rotated, dims = _ops.mapped_in_a_loop(lambda *x: (append_op(*x),), info, in_dims, *args)
    return rotated[0], dims[0]


torch.library.register_vmap("pantile::decode", _vmap_decode, lib=_library)
torch.library.register_vmap("pantile::decode_schedule", _vmap_schedule, lib=_library)
torch.library.register_vmap("pantile::append", _vmap_append, lib=_library)


def _run(name: str, kernel, tensors: tuple, rest: tuple):
    """Plain eager calls without the dispatcher."""
    there = present(tensors)
    if takes_short_cut(there) and not (
        torch.is_grad_enabled() and any(x.requires_grad for x in there)
    ):
        return kernel(*tensors, *rest)
    for which, x in zip(_NAMES[name], tensors, strict=True):
        if x is not None:
            _fake.check_operand(which, x, tensors[0])
    return _KERNELS[name][1](*tensors, *rest)


def decode(cache: tuple, q, tree_mask, sinks, schedule, numbers: tuple, flags: tuple):
    tensors = (*cache, q, tree_mask, sinks, schedule)
    return _run("decode", _run_decode, tensors, (*numbers, *flags))


def append(cache: tuple, tensors: tuple, rest: tuple):
    return _run("append", _append_kernel, (*cache, *tensors), rest)


def decode_schedule(cache: tuple, q, numbers: tuple, flags: tuple):
    return _run("decode_schedule", _schedule_kernel, (*cache, q), (*numbers, *flags))
