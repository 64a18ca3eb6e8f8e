"""What pantile.shadow compares with: some queries and keys of one head, in float64.

The textbook, of the definitions in cpp/include/pantile/variant.h and of nothing that the kernels
share. Beside each value stands a bound of what a kernel may be off by: the roundings that it makes,
each at the size of what is rounded (docs/usage.md#shadow-mode).

Nothing here reads a value of a GPU, except lengths of packed calls, block tables and dropout seeds.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from pantile._direct import _LOW_SHIFT
from pantile._mask_forms import _FORM_BITS, _FORMS
from pantile._masks import UNBOUNDED
from pantile._schema import CAPTURED
from pantile._shadow_expression import Expression
from pantile._variants import _key, _random_bytes

Tensor = torch.Tensor

_CHUNK = 8192  # keys or queries that are in float64 at a time
_MOST_SCORES = 2**21  # of a matrix in float64: 16 MB
_ULP = 2.0**-24  # unit roundoff of float32
_UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: _ULP}
_TF32 = 2.0**-10  # of an operand that is cut to 11 bits
_CUT = 2.0**-27  # of a sum, for each term: tensor cores cut bits off, towards zero
_MOST_TERMS = 131072  # longer sums are made of parts (cuda/ampere/config.h)


@dataclass
class Place:
    """Queries and a key head of one sequence of a call."""

    batch: int
    head: int
    rows: Tensor  # int64 [rows], from the start of the sequence
    keys: Tensor  # int64 [..], whose gradients are compared
    row_begin: int  # the sequence in q, of packed tensors; else 0
    row_count: int
    key_begin: int
    key_count: int
    shift: int  # query i faces key i + shift
    pages: Tensor | None  # int64, of a call with a block table
    call: Any

    @classmethod
    def drawn(cls, random, most: int, q: Tensor, k: Tensor, call: Any) -> Place | None:
        """None: the call has no queries or no keys to look at."""
        batches = q.shape[0] if not call.packed else call.cu_seqlens_q.shape[0] - 1
        if batches <= 0 or q.numel() == 0:
            return None
        batch, head = random.randrange(batches), random.randrange(q.shape[-2])
        lengths = cls._packed(batch, k, call) if call.packed else (0, q.shape[1], 0, k.shape[1])
        row_begin, row_count, key_begin, key_count = lengths
        if row_count <= 0:
            return None
        shift = key_count - row_count
        if call.mask_shift is not None:
            shift = int(call.mask_shift[batch])
        pages = None
        if call.block_table is not None:
            count = -(-key_count // k.shape[1])
            pages = call.block_table[batch, :count].to(torch.int64)
        rows = cls._some(random, most, row_count, max(1, key_count), q.device)
        keys = cls._some(random, most, key_count, row_count, q.device)
        return cls(
            *(batch, head, rows, keys, row_begin, row_count, key_begin, key_count, shift, pages),
            call,
        )

    @staticmethod
    def _some(random, most: int, count: int, length: int, device) -> Tensor:
        number = min(most, count, max(1, _MOST_SCORES // length))
        chosen = sorted(random.sample(range(count), number))
        return torch.tensor(chosen, dtype=torch.int64).to(device, non_blocking=True)

    @staticmethod
    def _packed(b: int, k: Tensor, call: Any) -> tuple[int, int, int, int]:
        begin, end = call.cu_seqlens_q[b : b + 2].tolist()
        rows = end - begin if call.seqused_q is None else int(call.seqused_q[b])
        if call.k_begin is not None:
            return begin, rows, int(call.k_begin[b]), int(call.seqused_k[b])
        if call.block_table is not None:
            return begin, rows, 0, int(call.seqused_k[b])
        first, last = call.cu_seqlens_k[b : b + 2].tolist()
        keys = last - first if call.seqused_k is None else int(call.seqused_k[b])
        return begin, rows, first, keys

    def of_rows(self, x: Tensor, head: int) -> Tensor:
        """[row_count, dim] of q, o and their gradients."""
        if self.call.packed:
            return x[self.row_begin : self.row_begin + self.row_count, head]
        return x[self.batch, :, head]

    def of_lse(self, x: Tensor, head: int) -> Tensor:
        """[row_count] of lse and its gradient."""
        if self.call.packed:
            return x[head, self.row_begin : self.row_begin + self.row_count]
        return x[self.batch, head]

    def of_keys(self, x: Tensor, head: int) -> Tensor:
        """[key_count, dim] of k, v and their gradients."""
        if self.pages is not None:
            return x[self.pages, :, head].flatten(0, 1)[: self.key_count]
        if self.call.packed:
            return x[self.key_begin : self.key_begin + self.key_count, head]
        return x[self.batch, :, head]


def _quietly(compare):
    """Without autograd, autocast and what else torch does to calls on the way."""

    @functools.wraps(compare)
    def run(place, q, *rest):
        if place is None:
            return None
        with torch.no_grad(), torch.autocast(q.device.type, enabled=False):
            return compare(place, q, *rest)

    return run


# ---- scores, masks and weights of some queries and some keys


def _cell(x: Tensor, place: Place, head: int, i: Tensor, j: Tensor) -> Tensor:
    """Of what broadcasts to [batch, heads, rows, keys]; i [rows, 1], j [1, keys]."""
    x = x[(None,) * (4 - x.ndim)]
    x = x[place.batch if x.shape[0] > 1 else 0, head if x.shape[1] > 1 else 0]
    return x[i if x.shape[0] > 1 else 0 * i, j if x.shape[1] > 1 else 0 * j]


class _Pairs:
    """Queries ``i`` times keys ``j`` of one head, int64 [rows] and [keys]."""

    def __init__(self, place: Place, head: int, variant: Any, i: Tensor, j: Tensor) -> None:
        self.place, self.head, self.variant = place, head, variant
        self.i, self.j = i[:, None], j[None, :]

    def _captured(self, of_score: bool) -> dict[str, Tensor]:
        """By name: those of the score come first."""
        tensors = [x for x in (getattr(self.variant, name) for name in CAPTURED) if x is not None]
        score, _, mask = self.variant.captured_names.partition("|")
        names = ([n for n in score.split(",") if n], [n for n in mask.split(",") if n])
        first = 0 if of_score else len(names[0])
        wanted = names[0] if of_score else names[1]
        return dict(zip(wanted, tensors[first:], strict=False))

    def _value(self, text: str, of_score: bool, **names: Tensor) -> Tensor:
        device = self.i.device
        number = {
            "b": torch.tensor(self.place.batch, device=device),
            "h": torch.tensor(self.head, device=device),
        }
        captured = self._captured(of_score)
        names = {**number, "i": self.i, "j": self.j, **names}
        return Expression(names, captured, device).value(text)

    def score(self, s: Tensor) -> Tensor:
        """What the softmax is taken of, of scale * q . k."""
        x = self.variant
        if x is None:
            return s
        if x.softcap:
            s = x.softcap * torch.tanh(s / x.softcap)
        if x.alibi is not None:
            slope = x.alibi[..., self.head].double()
            slope = slope[self.place.batch] if slope.ndim else slope
            s = s - slope * (self.i + self.place.shift - self.j).abs()
        if x.bias is not None:
            s = s + _cell(x.bias, self.place, self.head, self.i, self.j).double()
        if x.score:
            s = self._value(x.score, True, s=s).double().expand(s.shape)
        return s

    def terms(self) -> Tensor | float:
        """The sizes of what is added to scores in float32."""
        x, size = self.variant, 0.0
        if x is not None and x.alibi is not None:
            slope = x.alibi[..., self.head].double().abs()
            slope = slope[self.place.batch] if slope.ndim else slope
            size = size + slope * (self.i.abs() + abs(self.place.shift) + self.j)
        if x is not None and x.bias is not None:
            size = size + _cell(x.bias, self.place, self.head, self.i, self.j).double().abs()
        return size

    @property
    def changes_scores(self) -> bool:
        """Other than by adding to them."""
        return self.variant is not None and bool(self.variant.softcap or self.variant.score)

    def visible(self) -> Tensor:
        call, position = self.place.call, self.i + self.place.shift
        seen = torch.ones(self.i.shape[0], self.j.shape[1], dtype=torch.bool, device=self.i.device)
        if call.window_left != UNBOUNDED:
            seen = seen & (self.j >= position - call.window_left)
        if call.window_right != UNBOUNDED:
            seen = seen & (self.j <= position + call.window_right)
        x = self.variant
        if x is None:
            return seen
        if x.mask_expression:
            seen = seen & self._value(x.mask_expression, False)
        forms = self._forms(position)
        clauses = [x.mask_clauses >> at & 15 for at in range(0, 32, _FORM_BITS)]
        clauses = [bits for bits in clauses if bits] or ([15] if forms else [])
        shown = None
        for bits in clauses:
            wanted = [form for name, form in forms.items() if bits >> _FORMS.index(name) & 1]
            clause = functools.reduce(torch.logical_and, wanted)
            shown = clause if shown is None else shown | clause
        return seen if shown is None else seen & shown

    def _forms(self, position: Tensor) -> dict[str, Tensor]:
        x, place, forms = self.variant, self.place, {}
        if x.block_mask is not None:
            at = self.i // x.mask_block, self.j // x.mask_block
            forms["blocks"] = _cell(x.block_mask, place, self.head, *at).bool()
        if x.mask is not None:
            forms["elements"] = _cell(x.mask, place, self.head, self.i, self.j).bool()
        if x.query_ids is not None:
            ids, key_ids = (y.reshape(-1, y.shape[-1]) for y in (x.query_ids, x.key_ids))
            ids, key_ids = (y[place.batch if y.shape[0] > 1 else 0] for y in (ids, key_ids))
            forms["documents"] = ids[self.i] == key_ids[self.j]
        if x.prefixes is not None:
            length = x.prefixes[place.batch if x.prefixes.shape[0] > 1 else 0]
            forms["prefix"] = (self.j < length) | (self.j <= position)
        return forms

    def kept(self) -> Tensor | None:
        """What dropout multiplies weights with."""
        x = self.variant
        if x is None or x.dropout == 0:
            return None
        seed, offset = x.dropout_seed.tolist()
        at = (
            torch.tensor(x.batch_offset + self.place.batch, device=self.i.device),
            torch.tensor(x.head_offset + self.head, device=self.i.device),
            self.i + x.query_offset,
            self.j + x.key_offset,
        )
        kept = _random_bytes(_key(seed, offset), *at) >= x.dropout
        return kept.double() * (256 / (256 - x.dropout))


@dataclass
class _Scores:
    """[rows, keys] in float64."""

    pairs: _Pairs
    scale: float
    unit: float  # of the products' operands, relative: 0 unless they are rounded
    s: Tensor
    slope: Tensor | float  # d s / d (scale q . k)
    error: Tensor  # how far a kernel's s may be off
    seen: Tensor

    @classmethod
    def of(cls, q: Tensor, k: Tensor, scale: float, unit: float, pairs: _Pairs) -> _Scores:
        """q [rows, dim] and k [keys, dim]."""
        raw, size = (_products(a, b) for a, b in ((q, k), (q.abs(), k.abs())))
        raw, size = raw * scale, size * abs(scale)
        error = size * (unit + _ULP * (q.shape[1] / 4 + 8))
        s, slope = pairs.score(raw), 1.0
        if pairs.changes_scores:
            step = 1e-6 * (1 + raw.abs())
            above, below = pairs.score(raw + step) - s, s - pairs.score(raw - step)
            slope = (above + below) / (2 * step)
            kink = (above - below).abs() / step  # a derivative that is not one
            # How far s moves when the raw score does.
            beside = [pairs.score(raw + sign * error) - s for sign in (1, -1)]
            error = torch.maximum(*(x.abs() for x in beside)) + 8 * _ULP * (s.abs() + raw.abs())
            slope = torch.where(kink > 1e-3, torch.nan, slope)  # known by nobody
        error = error + 4 * _ULP * (s.abs() + pairs.terms())
        return cls(pairs, scale, unit, s, slope, error, pairs.visible())


def _products(a: Tensor, b: Tensor) -> Tensor:
    """a b^T in float64, with few of b's rows in float64 at a time."""
    a = a.double()
    parts = [a @ part.double().T for part in b.split(_CHUNK)] or [a.new_zeros(a.shape[0], 0)]
    return torch.cat(parts, 1)


def _sums(a: Tensor, b: Tensor, absolute: bool = False) -> Tensor:
    """a b in float64, the same. What is not finite in b counts as 0: a weight of 0 hides it."""
    total = a.new_zeros(a.shape[0], b.shape[1])
    for part, rows in zip(a.split(_CHUNK, 1), b.split(_CHUNK), strict=True):
        rows = rows.double().nan_to_num(0.0, 0.0, 0.0)
        total += part @ (rows.abs() if absolute else rows)
    return total


def _operand_unit(q: Tensor, call: Any) -> float:
    """Of what is rounded before Q K^T."""
    if q.dtype is torch.float32 and q.is_cuda and call.float32_precision == "tf32":
        return 2 * _TF32
    if call.softmax_mode == "fast_scale":
        return _UNIT[q.dtype]
    return 0.0


def _weight_unit(q: Tensor, call: Any) -> float:
    """Of P before P V, of dS before its products; surrogate cuts the sum of P to 11 bits, too."""
    if q.dtype is torch.float32:
        return 2 * _TF32 if q.is_cuda and call.float32_precision == "tf32" else 8 * _ULP
    return (4 if call.softmax_mode == "surrogate" else 1) * _UNIT[q.dtype]


def _scale(q: Tensor, call: Any) -> float:
    return q.shape[-1] ** -0.5 if call.scale is None else call.scale


def _dot(terms: Tensor, x: Tensor) -> Tensor:
    return _sums(terms, x, absolute=True)


def _summary(ours: Tensor, exact: Tensor, bound: Tensor, whole: Tensor) -> Tensor:
    """Error and bound where their ratio is largest, non-finite values of the whole output, and
    those of the textbook's part. Where it has none to compare with, nothing is compared."""
    ours = ours.double()
    comparable = exact.isfinite() & bound.isfinite() & ours.isfinite()
    error = torch.where(comparable, (ours - exact).abs(), 0.0).flatten()
    bound = torch.where(comparable, bound, 1.0).flatten()
    at = (error / bound.clamp_min(1e-300)).argmax()
    wrong = (~whole.isfinite()).sum().double()
    expected = (~exact.isfinite()).sum().double()
    return torch.stack([error[at], bound[at], wrong, expected])


# ---- the forward


@_quietly
def compare_forward(place: Place, q, k, v, variant, o, lse):
    """(names, numbers) for shadow._take, of the rows of ``place``."""
    call, head = place.call, place.head
    key_head = head // (q.shape[-2] // k.shape[-2])
    rows = place.of_rows(q, head)[place.rows]
    keys, values = place.of_keys(k, key_head), place.of_keys(v, key_head)
    j = torch.arange(place.key_count, device=q.device)
    pairs = _Pairs(place, head, variant, place.rows, j)
    t = _Scores.of(rows, keys, _scale(q, call), _operand_unit(q, call), pairs)
    s = t.s.masked_fill(~t.seen, -torch.inf)
    sinks = None
    if variant is not None and variant.sinks is not None:
        sinks = variant.sinks[head].double().expand(len(s), 1)
    exact_lse = torch.logsumexp(s if sinks is None else torch.cat([s, sinks], 1), 1)
    alive = exact_lse > -torch.inf
    p = torch.exp(s - torch.where(alive, exact_lse, 0.0)[:, None]).masked_fill(~t.seen, 0.0)
    # Relative, of a weight: the score, exp2, and the distance to the reference that it is taken of.
    error = (t.error + 4 * _ULP * (1 + (s - exact_lse[:, None]).abs())).masked_fill(~t.seen, 0.0)
    mean_error = (p * error).sum(1)
    weighted = p if (kept := pairs.kept()) is None else p * kept
    unit = _weight_unit(q, call)
    terms = min(place.key_count, _MOST_TERMS) * _CUT + 16 * _ULP
    size = _dot(weighted * (unit * 2 + terms + error + mean_error[:, None]), values)
    if q.dtype is torch.float16:  # weights below 2^-25 of the largest are 0
        largest = (
            values.abs().nan_to_num(0.0, 0.0, 0.0).amax(0).double() if place.key_count else 0.0
        )
        size = size + t.seen.sum(1, keepdim=True) * 2.0**-25 * largest
    exact_o = _sums(weighted, values)
    meets = _sums(t.seen.double(), (~values.isfinite()).double()) > 0
    exact_o = exact_o.masked_fill(meets, torch.nan)
    out_unit = _UNIT[o.dtype]
    floor = torch.finfo(o.dtype).tiny
    bound = size + out_unit * exact_o.abs() + floor
    ours = place.of_rows(o, head)[place.rows]
    answers = [_summary(ours, exact_o, bound, o)]
    names = ["o"]
    if lse is not None:
        rounded = 0.0 if call.exact_lse or call.softmax == "vector" else unit
        bound = 8 * _ULP * (1 + exact_lse.abs()) + mean_error + terms + rounded
        ours = place.of_lse(lse, head)[place.rows].double()
        # Rows without keys have -inf, and must: a finite one would be off by as much as it likes.
        same = (~alive & (ours == -torch.inf)) | alive
        ours = torch.where(same & ~alive, 0.0, torch.where(same, ours, torch.nan))
        exact_lse = torch.where(alive, exact_lse, 0.0)
        answers.append(_summary(ours, exact_lse, bound, ours))
        names.append("lse")
    return names, torch.stack(answers)


# ---- the backward, given o and lse


def _exact_o(o: Tensor, low: Tensor | None) -> Tensor:
    """With the 8 more bits that the forward kept (_direct.split_output)."""
    if low is None:
        return o.double()
    bits = o.float().contiguous().view(torch.int32)
    return (bits + (low.to(torch.int32) << _LOW_SHIFT[o.dtype])).view(torch.float32).double()


class _Backward:
    """dS and P of some queries and keys, of a backward's inputs."""

    def __init__(self, place: Place, q, k, v, variant, saved) -> None:
        self.place, self.q, self.k, self.v, self.variant = place, q, k, v, variant
        self.grad_o, self.grad_lse, self.o, low, self.lse = saved
        self.o_low = None if low is None or low.shape != self.o.shape else low
        self.key_head = place.head // (q.shape[-2] // k.shape[-2])
        self.scale = _scale(q, place.call)
        self.unit = _weight_unit(q, place.call)

    def at(self, head: int, i: Tensor, j: Tensor, keys: Tensor, values: Tensor):
        """Rows i of a query head and keys j: (P with dropout, its error, dS by the raw score, its
        error, rows of q, rows of dO)."""
        place = self.place
        rows, grad, o = (place.of_rows(x, head)[i] for x in (self.q, self.grad_o, self.o))
        low = None if self.o_low is None else place.of_rows(self.o_low, head)[i]
        lse = place.of_lse(self.lse, head)[i].double()[:, None]
        pairs = _Pairs(place, head, self.variant, i, j)
        unit = _operand_unit(self.q, place.call)
        t = _Scores.of(rows, keys, self.scale, unit, pairs)
        alive = lse > -torch.inf
        p = torch.exp(t.s - torch.where(alive, lse, 0.0)).masked_fill(~(t.seen & alive), 0.0)
        p_error = p * (t.error + 4 * _ULP * (1 + (t.s - lse).abs())).masked_fill(~t.seen, 0.0)
        p_error = torch.where(p > 0, p_error, 0.0)
        kept = pairs.kept()
        grad = grad.double()
        dp, dp_size = _products(grad, values), _products(grad.abs(), values.abs())
        dp, dp_size = (x.masked_fill(~t.seen, 0.0) for x in (dp, dp_size))
        width = _ULP * (self.v.shape[-1] / 4 + 8) + (2 * _TF32 if self.unit == 2 * _TF32 else 0.0)
        exact_o = _exact_o(o, low)
        delta = (grad * exact_o).sum(1, keepdim=True)
        lows = 2.0**-16 if self.q.dtype is torch.float32 else _UNIT[self.q.dtype] * 2.0**-6
        delta_error = (grad * exact_o).abs().sum(1, keepdim=True)
        delta_error = delta_error * (32 * _ULP if low is None else lows)
        if kept is not None:
            dp, dp_size = dp * kept, dp_size * kept
        if self.grad_lse is not None:
            delta = delta - place.of_lse(self.grad_lse, head)[i].double()[:, None]
            delta_error = delta_error + 4 * _ULP * delta.abs()
        ds = p * (dp - delta)
        ds_error = (
            p_error * (dp - delta).abs()
            + p * (dp_size * width + delta_error + 4 * _ULP * (dp.abs() + delta.abs()))
            + self.unit * ds.abs()
        )
        weights = p if kept is None else p * kept
        weights_error = (p_error if kept is None else p_error * kept) + self.unit * weights
        return weights, weights_error, ds * t.slope, ds_error * _size(t.slope), rows, grad


def _size(slope: Tensor | float) -> Tensor | float:
    """Of a derivative, which a kernel computes in float32 beside its score."""
    return slope.abs() * (1 + 64 * _ULP) if isinstance(slope, Tensor) else slope


@_quietly
def compare_backward(place: Place, q, k, v, variant, saved, grads):
    """(names, numbers) for shadow._take: rows of dq, and of dk and dv of the same key head."""
    b = _Backward(place, q, k, v, variant, saved)
    grad_q, grad_k, grad_v = grads
    keys, values = place.of_keys(k, b.key_head), place.of_keys(v, b.key_head)
    j = torch.arange(place.key_count, device=q.device)
    _, _, ds, ds_error, _, _ = b.at(place.head, place.rows, j, keys, values)
    terms = min(place.key_count, _MOST_TERMS) * _CUT + 16 * _ULP
    exact = b.scale * _sums(ds, keys)
    bound = abs(b.scale) * _dot(ds_error + ds.abs() * (terms + b.unit), keys)
    bound = bound + _UNIT[grad_q.dtype] * exact.abs() + torch.finfo(grad_q.dtype).tiny
    ours = place.of_rows(grad_q, place.head)[place.rows]
    names, answers = ["dq"], [_summary(ours, exact, bound, grad_q)]
    if place.key_count:
        names += ["dk", "dv"]
        answers += _compare_keys(b, keys[place.keys], values[place.keys], grad_k, grad_v)
    return names, torch.stack(answers)


def _compare_keys(b: _Backward, keys, values, grad_k, grad_v) -> list[Tensor]:
    """Sums over all rows of the heads that share the key head."""
    place, group = b.place, b.q.shape[-2] // b.k.shape[-2]
    number = len(place.keys)
    exact_k, bound_k = (keys.new_zeros(keys.shape, dtype=torch.float64) for _ in range(2))
    exact_v, bound_v = (values.new_zeros(values.shape, dtype=torch.float64) for _ in range(2))
    terms = min(place.row_count * group, _MOST_TERMS) * _CUT + 16 * _ULP
    chunk = max(1, min(_CHUNK, _MOST_SCORES // number))
    for head in range(b.key_head * group, (b.key_head + 1) * group):
        for i in torch.arange(place.row_count, device=b.q.device).split(chunk):
            p, p_error, ds, ds_error, rows, grad = b.at(head, i, place.keys, keys, values)
            rows = rows.double()
            exact_v += p.T @ grad
            bound_v += (p_error + p * terms).T @ grad.abs()
            exact_k += b.scale * (ds.T @ rows)
            size = ds_error + ds.abs() * (terms + b.unit)
            bound_k += abs(b.scale) * (size.T @ rows.abs())
    answers = []
    for whole, exact, bound in ((grad_k, exact_k, bound_k), (grad_v, exact_v, bound_v)):
        bound = bound + _UNIT[whole.dtype] * exact.abs() + torch.finfo(whole.dtype).tiny
        ours = place.of_keys(whole, b.key_head)[place.keys]
        answers.append(_summary(ours, exact, bound, whole))
    return answers
