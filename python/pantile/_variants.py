"""What a call changes of plain attention: softcap, ALiBi, bias, scores and masks of the user's own,
sinks and dropout.

cpp/include/pantile/variant.h defines them; the order is fixed: softcap, ALiBi, bias, score, mask,
softmax with the sink, dropout.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pantile._arguments import dtype_name, integer, is_symbolic, length, real, shown
from pantile._expressions import Mask, Score, expression_fields
from pantile._mask_forms import compiled_mask
from pantile._schema import Variant

if TYPE_CHECKING:
    from pantile._types import Array

_BYTE_VALUES = 256
_MOST = 255.5 / _BYTE_VALUES  # p below this leaves one value that keeps a weight
_OFFSETS = ("batch_offset", "head_offset", "query_offset", "key_offset")
_MAX_OFFSET = 2**32 - 1
_MAX_SEED = 2**63 - 1

# Of the arguments of attention().
NAMES = ("softcap", "alibi", "bias", "sinks", "dropout", "mask", "score")


_SEED = "an integer, an int64 tensor of two, or None"


def is_seed_tensor(seed: Any) -> bool:
    """int64 [2], of torch or NumPy. A number may also be a tensor of one element."""
    try:
        shape = tuple(getattr(seed, "shape", ()))
    except Exception:  # a nested tensor has none to show
        shape = None
    if shape in ((), (1,)):
        return False
    if shape != (2,) or dtype_name(getattr(seed, "dtype", None)) != "int64":
        raise TypeError(f"seed is {shown(seed)}; it must be {_SEED}")
    return True


def _probability(name: str, value: object, allowed: str) -> float:
    p = real(name, value, allowed)
    if not 0.0 <= p < _MOST:
        raise ValueError(f"{name} is {shown(p)}; it must be from 0 to below 255.5 / 256")
    return p


@dataclass(frozen=True, eq=False)
class Dropout:
    """Dropout of attention weights, and which of them.

    A weight is removed by a random byte of its own, so that the rate is a multiple of 1/256:
    :attr:`rate`. Kept weights are multiplied by ``1 / (1 - rate)``, and the expectation is exactly
    that without dropout. The byte depends on the seed and on the coordinates (sequence, head,
    query, key), and on nothing else: the mask is the same in the forward and the backward, packed
    or padded, on every backend and with every tiling. :func:`dropout_mask` gives it.

    p: the probability, 0 <= p < 255.5 / 256.
    seed: ``None`` draws one from torch's generator of the device for every call, so that
        ``torch.manual_seed``, activation checkpointing and CUDA graphs do what they do for
        ``torch.nn.functional.dropout``; an integer, or an int64 tensor of two on the device (seed
        and offset), says which mask it is, of every call that gets it.
    batch_offset, head_offset, query_offset, key_offset: coordinates of the first sequence, query
        head, query and key of this call among all that share the work, so that the parts of tensor
        and context parallelism have the masks of the whole.
    """

    p: float
    seed: Any = None
    batch_offset: int = 0
    head_offset: int = 0
    query_offset: int = 0
    key_offset: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "p", _probability("p", self.p, "a number"))
        for name in _OFFSETS:
            value = getattr(self, name)
            if not is_symbolic(value):
                value = integer(name, value)
                object.__setattr__(self, name, value)
                if not 0 <= value <= _MAX_OFFSET:
                    raise ValueError(
                        f"{name} is {shown(value)}; it must be from 0 to {_MAX_OFFSET}"
                    )
        if self.seed is not None and not is_seed_tensor(self.seed):
            seed = integer("seed", self.seed, _SEED)
            if not 0 <= seed <= _MAX_SEED:
                raise ValueError(
                    f"seed is {shown(seed)}; it must be from 0 to {_MAX_SEED}, or another form: "
                    f"{_SEED}"
                )
            object.__setattr__(self, "seed", seed)

    @property
    def dropped(self) -> int:
        """Of 256 equally likely bytes, how many remove a weight."""
        return math.floor(_BYTE_VALUES * self.p + 0.5)

    @property
    def rate(self) -> float:
        """The true probability: p rounded to a multiple of 1/256."""
        return self.dropped / _BYTE_VALUES


def _dropout_of(dropout: object) -> Dropout:
    if isinstance(dropout, Dropout):
        return dropout
    return Dropout(_probability("dropout", dropout, "a number, a pantile.Dropout or None"))


def _softcap_of(softcap: object) -> float:
    if softcap is None:
        return 0.0
    value = real("softcap", softcap, "a number or None")
    if not 0.0 <= value < math.inf:
        raise ValueError(
            f"softcap is {shown(softcap)}; it must be finite, and positive, or None for none"
        )
    return value


def resolve_variant(
    softcap: object = None,
    alibi: Any = None,
    bias: Any = None,
    sinks: Any = None,
    dropout: object = None,
    mask: Any = None,
    score: Score | None = None,
) -> tuple[Variant, Dropout | None] | None:
    """The variant, without its seed, and the dropout that asks for one; None: plain attention."""
    if softcap is alibi is bias is sinks is dropout is mask is score is None:
        return None
    chosen = None if dropout is None else _dropout_of(dropout)
    cap = _softcap_of(softcap)
    offsets = (0, 0, 0, 0)
    dropped = 0
    if chosen is not None and chosen.dropped > 0:
        dropped = chosen.dropped
        offsets = tuple(getattr(chosen, name) for name in _OFFSETS)
    if score is not None and not isinstance(score, Score):
        raise TypeError(f"score is {shown(score)}; it must be a pantile.Score or None")
    if cap == 0.0 and alibi is bias is sinks is mask is score is None and dropped == 0:
        return None
    condition = mask if isinstance(mask, Mask) else None
    masks, numbers = compiled_mask(None if condition is not None else mask)
    captured, texts = expression_fields(score, condition)
    tensors = (alibi, sinks, bias, None, *masks, *captured)
    variant = Variant(*tensors, cap, dropped, *offsets, *numbers, *texts)
    return variant, chosen if dropped > 0 else None


def refuse_in_fp8(given: tuple) -> None:
    """``given``: the values of NAMES."""
    for name, value in zip(NAMES, given, strict=True):
        if value is not None:
            raise ValueError(f"{name} is {shown(value)}; FP8 attention does not serve it")


# ---- the mask of dropout (cpp/core/dropout.h), in the integers of torch or NumPy

_LOW = 0xFFFFFFFF


def _product(x: Any, factor: int) -> tuple[Any, Any]:
    """High and low half of a product of 32-bit numbers, which wraps around in an int64."""
    wide = x * factor
    return (wide >> 32) & _LOW, wide & _LOW


def philox4x32_10(counter: tuple, key: tuple) -> tuple:
    """Four arrays of 32-bit numbers in int64; ``key``: two such numbers or arrays."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high_a, low_a = _product(c0, 0xD2511F53)
        high_b, low_b = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & _LOW, (k1 + 0xBB67AE85) & _LOW
    return c0, c1, c2, c3


def _key(seed: int, offset: int) -> tuple[int, int]:
    """core::philox_key."""
    wrap = 2**64 - 1
    mixed = offset & wrap
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 & wrap
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & wrap
    mixed = (seed & wrap) ^ mixed ^ (mixed >> 31)
    return mixed & _LOW, mixed >> 32


def _random_bytes(key: tuple, batch, head, row, attended) -> Any:
    """One for each element: the arguments are arrays that broadcast."""
    counter = (
        attended // 16 * 4 + attended % 8 // 2 + 0 * (row + head + batch),
        row // 16 * 4 + row % 8 // 2 + 0 * (attended + head + batch),
        head + 0 * (attended + row + batch),
        batch + 0 * (attended + row + head),
    )
    words = philox4x32_10(counter, key)
    odd_row, odd_key = row % 2 == 1, attended % 2 == 1
    word = sum(
        words[2 * r + k] * ((odd_row == bool(r)) & (odd_key == bool(k)))
        for r in (0, 1)
        for k in (0, 1)
    )
    return (word >> (8 * (2 * (row // 8 % 2) + attended // 8 % 2))) & 0xFF


def dropout_mask(
    dropout: Dropout | tuple[Any, float],
    batch: int,
    heads: int,
    seqlen_q: int,
    seqlen_k: int,
    *,
    device: Any = None,
) -> Array:
    """Which weights dropout keeps: bool ``[batch, heads, seqlen_q, seqlen_k]``.

    For tests and for reproducing a call elsewhere; attention itself stores no mask.

    Args:
        dropout: a :class:`pantile.Dropout` with a seed, or the pair (seed tensor, p).
        batch, heads, seqlen_q, seqlen_k: of the call; heads are those of q.
        device: of the answer, a torch tensor; default: that of the seed, or the CPU. Without torch
            the answer is a NumPy array.

    Raises:
        TypeError, ValueError: an argument is wrong, or the dropout draws its seed call by call.
    """
    if isinstance(dropout, tuple) and len(dropout) == 2:
        p = _probability("dropout[1]", dropout[1], "a number")
        try:
            dropout = Dropout(p, seed=dropout[0])
        except (TypeError, ValueError) as error:
            raise type(error)(f"dropout[0]: {error}") from None
    if not isinstance(dropout, Dropout):
        raise TypeError(
            f"dropout is {shown(dropout)}; it must be a pantile.Dropout or a pair (seed, p)"
        )
    if dropout.seed is None:
        raise ValueError("dropout has no seed, it draws one for each call; give Dropout(p, seed=)")
    seed, offset = seed_numbers(dropout.seed)
    names = ("batch", "heads", "seqlen_q", "seqlen_k")
    values = (batch, heads, seqlen_q, seqlen_k)
    lengths = [length(name, value) for name, value in zip(names, values, strict=True)]
    torch = sys.modules.get("torch")
    if torch is not None and not _is_array(dropout.seed):
        device = _device_of(torch, device, dropout.seed)
        axes = [torch.arange(n, dtype=torch.int64, device=device) for n in lengths]
    else:
        import numpy as np

        axes = [np.arange(n, dtype=np.int64) for n in lengths]
    starts = (getattr(dropout, name) for name in _OFFSETS)
    coordinates = [
        (axis + start).reshape([-1 if i == place else 1 for i in range(4)])
        for place, (axis, start) in enumerate(zip(axes, starts, strict=True))
    ]
    return _random_bytes(_key(seed, offset), *coordinates) >= dropout.dropped


def _device_of(torch: Any, device: Any, seed: Any) -> Any:
    if device is None:
        return getattr(seed, "device", "cpu")
    if isinstance(device, str | torch.device):
        try:
            return torch.device(device)
        except RuntimeError:
            pass
    raise TypeError(f"device is {shown(device)}; it must be a torch.device, its name or None")


def _is_array(x: object) -> bool:
    return type(x).__module__.split(".")[0] == "numpy"


def seed_numbers(seed: Any) -> tuple[int, int]:
    """(seed, offset) of an integer, or of a tensor or array of two."""
    if isinstance(seed, int):
        return seed, 0
    first, second = seed.tolist()
    return first, second
