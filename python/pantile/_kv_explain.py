"""pantile.explain_decode: what a decode would do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pantile import _C
from pantile._arguments import flag, length
from pantile._explain import PassExplanation, Verdict
from pantile._kv import _arrays, _cache, _check_query, _longest, _numbers, _options

if TYPE_CHECKING:
    from pantile._kv import Split
    from pantile._kv_cache import KVCache
    from pantile._options import Options
    from pantile._types import Tensor, Window

_SPLITS = {
    "automatic": "where the device is used best, by all sequences of the call",
    "invariant": "parts of a power of two of keys, about a sixteenth of the sequence, 256 to 4096: "
    "by its own length alone",
}


@dataclass(frozen=True)
class DecodeExplanation:
    """The kernel of a decode, or why there is none; prints as a short report."""

    decode: PassExplanation
    split: str  # where keys are cut, and by what
    schedule_ints: int  # entries of pantile.decode_schedule
    verbose: bool = False

    def __str__(self) -> str:
        lines = self.decode.lines("decode", self.verbose)
        lines.insert(1, f"  split: {self.split}; a schedule has {self.schedule_ints} entries")
        return "\n".join(lines)


def _check_operands(q: Tensor, arrays: tuple) -> None:
    from pantile import _fake, _kv_ops

    for name, x in zip(("q", *_kv_ops.CACHE), (q, *arrays), strict=True):
        if x is not None:
            _fake.check_operand(name, x, arrays[0])
            if x.device.type == "meta":
                raise ValueError(f"{name} is on meta; it must be on the CPU or a CUDA device")


def explain_decode(
    q: Tensor,
    cache: KVCache,
    lengths: Tensor,
    *,
    seqlen_new: int = 0,
    cu_seqlens_q: Tensor | None = None,
    max_seqlen_q: int | None = None,
    cu_seqlens_new: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_index: Tensor | None = None,
    leftpad: Tensor | None = None,
    causal: bool = True,
    window: Window | None = None,
    tree_mask: bool = False,
    sinks: bool = False,
    softcap: float | None = None,
    return_lse: bool = False,
    split: Split = "auto",
    options: Options | None = None,
    verbose: bool = False,
) -> DecodeExplanation:
    """What :func:`pantile.decode` would do with such arguments; nothing is run.

    Args:
        q, cache, lengths, ...: as :func:`pantile.decode_schedule` takes them.
        verbose: print every row of the kernel table, not one line for each backend.

    Returns:
        The kernel, its tile, grid and workspace, how keys are split, and why other kernels refuse.

    Raises:
        TypeError, ValueError: as :func:`pantile.decode`.
    """
    cache = _cache(cache)
    _check_query(q, cu_seqlens_q)
    resolved = _options(options)
    for name, value in (
        ("tree_mask", tree_mask),
        ("sinks", sinks),
        ("return_lse", return_lse),
        ("verbose", verbose),
    ):
        flag(name, value)
    longest = _longest("max_seqlen_q", max_seqlen_q, cu_seqlens_q is not None)
    arrays = _arrays(
        cache, lengths, block_table, cache_index, leftpad, cu_seqlens_q, cu_seqlens_new
    )
    _check_operands(q, arrays)
    new = length("seqlen_new", seqlen_new)
    numbers = _numbers(cache, longest, new, None, causal, window, softcap, split, resolved)
    answer = _C.explain_decode(
        q, arrays, numbers, tree_mask, sinks, resolved.output_f32, return_lse
    )
    schedule_ints = answer.pop("schedule_ints")
    rows = tuple(Verdict(**row) for row in answer.pop("rows"))
    plan = PassExplanation(**answer, rows=rows, softmax="", copies=())
    kind, keys = numbers[-3:-1]
    text = _SPLITS.get(kind, f"after every {keys} keys, counted from slot 0")
    return DecodeExplanation(plan, f"{kind}: {text}", schedule_ints, verbose)
