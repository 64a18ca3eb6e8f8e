"""pantile.shadow: sampled calls compared with the textbook while a program runs.

The counting is here, without torch; the textbook is in _shadow_reference.py.
"""

from __future__ import annotations

import itertools
import math
import random
import sys
import threading
from dataclasses import dataclass, field
from typing import Any

from pantile import _watch
from pantile._arguments import flag, integer, real, shown
from pantile._options import log

_MOST_ROWS = 1024
_open = threading.Lock()  # held while shadows open or close


@dataclass(frozen=True)
class ShadowError:
    """The largest error of one output, as a share of its bound: the element where that is most."""

    error: float
    bound: float

    @property
    def ratio(self) -> float:
        if self.error == 0.0:
            return 0.0
        return self.error / self.bound if self.bound > 0.0 else math.inf


@dataclass
class ShadowReport:
    """What a shadow has seen so far. GPU results count once the GPU has them, at the latest at the
    end of the context."""

    forward_calls: int = 0
    backward_calls: int = 0
    compared: int = 0  # calls, of both kinds
    worst: dict[str, ShadowError] = field(default_factory=dict)  # of o, lse, dq, dk and dv
    outside: int = 0  # compared calls with an error above its bound
    non_finite: int = 0  # elements of outputs of compared calls that are NaN or infinite
    skipped: dict[str, int] = field(default_factory=dict)  # calls that were not looked at, by name

    @property
    def good(self) -> bool:
        """Whether no error was above its bound and no output was NaN or infinite."""
        return self.outside == 0 and self.non_finite == 0

    def __str__(self) -> str:
        parts = [
            f"{self.compared} of {self.forward_calls} forward and {self.backward_calls} backward "
            f"calls compared"
        ]
        for name, worst in self.worst.items():
            parts.append(f"{name} {worst.error:.3g}, {worst.ratio:.2g} of its bound")
        parts.append(f"{self.outside} calls above the bound, {self.non_finite} non-finite values")
        parts += [f"not compared: {what} ({count})" for what, count in self.skipped.items()]
        return "; ".join(parts)


class _Sampler:
    """Which calls of a sequence are looked at: each with the same probability, by a seed."""

    def __init__(self, rate: float, seed: str) -> None:
        self.random = random.Random(f"{seed} rows")  # of what is looked at
        self.count = 0  # calls so far
        self._gaps = random.Random(seed)
        self._rate = rate
        self._calls = itertools.count(1)
        self._lock = threading.Lock()
        self._next = self._gap()

    def _gap(self) -> float:
        if self._rate >= 1.0:
            return 1
        if self._rate <= 0.0:
            return math.inf
        return 1 + int(math.log(1.0 - self._gaps.random()) / math.log1p(-self._rate))

    def due(self) -> bool:
        """Of the next call."""
        # One step of the interpreter: threads get different numbers.
        self.count = call = next(self._calls)
        if call < self._next:
            return False
        with self._lock:
            if call < self._next:
                return False
            self._next = call + self._gap()
        return True


class shadow:  # noqa: N801 (read as pantile.shadow)
    """Compares sampled calls with the textbook in float64 while the context is open::

        with pantile.shadow(rate=1e-3) as watch:
            train()
        assert watch.report.good, watch.report

    It looks at the calls of :func:`attention` and :func:`varlen_attention` on torch tensors, and of
    the doors that stand on them, from all threads of the process: with every mask, variant and
    layout, eager, under autocast, recorded by autograd, and inside programs that ``torch.compile``
    made, whose operators are met when they run. Of a sampled call it computes ``rows`` queries of
    one head again, and of a sampled backward as many rows of dq, dk and dv, from the o and lse that
    the backward was given; and it counts the NaN and infinities of the whole output. Errors above
    the bound (docs/usage.md, "Shadow mode") and non-finite values are warnings of the logger
    ``pantile``, a summary at the end is information.

    Not looked at, but counted by name in ``report.skipped`` with one warning each: calls captured
    into a CUDA graph, FP8, decode, NumPy arrays, and backend ``torch``. A replayed CUDA graph meets
    no Python, and is not counted.

    On a GPU nothing waits: results are read when the GPU has them, or at the end. Exceptions are
    lengths of packed calls and seeds of dropout, which a sampled call reads. Contexts may be
    nested; each counts and samples for itself.

    Args:
        rate: the share of calls that are compared, 0 to 1.
        seed: of the sampling. The same calls in the same order, from one thread, are sampled alike.
        rows: queries, and keys, of a sampled call, 1 to 1024. At most 2**21 scores are kept.
        gradients: also compare backwards.

    Attributes:
        report: a :class:`ShadowReport`.

    Raises:
        TypeError, ValueError: an argument is wrong.
        RuntimeError: the context is opened twice.
    """

    def __init__(
        self, rate: float = 1e-3, *, seed: int = 0, rows: int = 16, gradients: bool = True
    ) -> None:
        self.rate = real("rate", rate)
        if not 0.0 <= self.rate <= 1.0:
            raise ValueError(f"rate is {shown(rate)}; it must be from 0 to 1")
        self.rows = integer("rows", rows)
        if not 1 <= self.rows <= _MOST_ROWS:
            raise ValueError(f"rows is {shown(rows)}; it must be from 1 to {_MOST_ROWS}")
        self.seed = integer("seed", seed)
        self.gradients = flag("gradients", gradients)
        self._report = ShadowReport()
        self.forwards = _Sampler(self.rate, f"{self.seed:x} forward")
        rate = self.rate if self.gradients else 0.0
        self.backwards = _Sampler(rate, f"{self.seed:x} backward")
        self._lock = threading.Lock()  # of the report and of what the GPU has not answered yet
        self._pending: list[Any] = []
        self._is_open = False

    @property
    def report(self) -> ShadowReport:
        self._report.forward_calls = self.forwards.count
        self._report.backward_calls = self.backwards.count
        return self._report

    # ---- the context

    def __enter__(self) -> shadow:
        from pantile import _attention

        _attention.load_torch()
        with _open:
            if self._is_open:
                raise RuntimeError("this shadow is open already; open another one")
            self._is_open = True
            _watch.watchers = (*_watch.watchers, self)
            _watch_plain_calls()
        return self

    def __exit__(self, *_: object) -> None:
        with _open:
            _watch.watchers = tuple(x for x in _watch.watchers if x is not self)
            _watch_plain_calls()
            self._is_open = False
        self._read(at_the_end=True)
        log.info("shadow: %s", self.report)

    # ---- sampled calls

    def forward(self, q, k, v, call, variant, o, lse) -> None:
        self._compare("compare_forward", self.forwards, q, k, v, call, variant, o, lse)

    def backward(self, q, k, v, call, variant, saved, grads) -> None:
        self._compare("compare_backward", self.backwards, q, k, v, call, variant, saved, grads)

    def _compare(self, compare, sampler, q, k, v, call, *rest) -> None:
        if self._captured(q):
            return
        from pantile import _shadow_reference

        try:
            place = _shadow_reference.Place.drawn(sampler.random, self.rows, q, k, call)
            self._take(q, getattr(_shadow_reference, compare)(place, q, k, v, *rest))
        except sys.modules["torch"].OutOfMemoryError:
            self.skip("calls that left no memory for the textbook")

    def skip(self, what: str) -> None:
        with self._lock:
            skipped = self._report.skipped
            skipped[what] = skipped.get(what, 0) + 1
            if skipped[what] > 1:
                return
        log.warning("shadow: not compared: %s", what)

    def _captured(self, q) -> bool:
        from pantile._runtime import is_capturing

        if q.is_cuda and is_capturing():
            self.skip("calls captured into a CUDA graph")
            return True
        return False

    # ---- results

    def _take(self, q, answer) -> None:
        """``answer``: (names, float64 [names, 4] on the device of q), or None of an empty call."""
        if answer is None:
            return
        names, numbers = answer
        event = None
        if q.is_cuda:
            torch = sys.modules["torch"]
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(q.device))
        text = f"q {list(q.shape)} {str(q.dtype).removeprefix('torch.')}"
        with self._lock:
            self._pending.append((names, numbers, event, text))
        self._read()

    def _read(self, at_the_end: bool = False) -> None:
        """What the GPU has answered; at the end all of it, which waits."""
        with self._lock:
            pending, self._pending = self._pending, []
        for item in pending:
            names, numbers, event, text = item
            if event is not None and not (at_the_end or event.query()):
                with self._lock:
                    self._pending.append(item)
            elif event is not None and self._captured(numbers):  # closed inside of a capture
                continue
            else:
                self._count(names, numbers.tolist(), text)

    def _count(self, names, numbers, text: str) -> None:
        outside = False
        for name, (error, bound, wrong, expected) in zip(names, numbers, strict=True):
            found = ShadowError(error, bound)
            if found.ratio > 1.0:
                outside = True
                log.warning(
                    "shadow: %s of %s: error %.3g, %.3g times its bound of %.3g",
                    *(name, text, error, found.ratio, bound),
                )
            if wrong:
                log.warning(
                    "shadow: %s of %s: %d values are NaN or infinite; of the textbook's rows %d",
                    *(name, text, int(wrong), int(expected)),
                )
            with self._lock:
                worst = self._report.worst.get(name)
                if worst is None or found.ratio > worst.ratio:
                    self._report.worst[name] = found
                self._report.non_finite += int(wrong)
        with self._lock:
            self._report.compared += 1
            self._report.outside += outside


def _watch_plain_calls() -> None:
    """The shortest way of plain calls reports too while somebody watches; it is untouched else."""
    ops = sys.modules.get("pantile._ops")
    if ops is not None:
        ops.watch_plain_calls(bool(_watch.watchers))
