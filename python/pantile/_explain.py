"""Answers of :func:`pantile.explain`: plain data that prints as a short report."""

from __future__ import annotations

from dataclasses import dataclass

from pantile import _C
from pantile._schema import CAPTURED

# Behind the bits of copies: copies of another shape, or of other values (bindings/changes.h).
PAD_HEAD_DIMS, FOLD_SCALE = 128, 256
_COPY_NAMES = ("q", "k", "v", "grad_o", "o", "lse", "grad_lse")  # by bit, as the bindings answer


@dataclass(frozen=True)
class Verdict:
    """One row of the kernel table."""

    kernel: str
    backend: str
    chosen: bool
    reason: str  # why the row was refused; empty when it would serve
    closest: bool = False  # of its backend's rows the one that is most like the call


@dataclass(frozen=True)
class RunTimeKernel:
    """A kernel that is compiled at run time, as things stand: explain compiles nothing."""

    name: str  # with its variant: "hopper_forward_bf16_d128_causal softcap+dropout"
    origin: str  # "compiled", "disk: <file>", "shipped: <file>" or "not compiled yet"
    in_memory: bool
    registers: int  # of a thread; this and the next are 0 before it is compiled
    spill_bytes: int
    advisories: str  # the compiler's remarks on slow code

    def line(self) -> str:
        text = f"  compiled at run time: {self.name}: {self.origin}"
        if self.registers == 0:
            return f"{text}; the first call does that, or pantile.compile"
        text += f", {self.registers} registers, {self.spill_bytes} bytes of spills"
        return text + (f", advisory {self.advisories}" if self.advisories else "")


def _verdict(row: Verdict) -> str:
    return "chosen" if row.chosen else row.reason or "would serve, comes later"


@dataclass(frozen=True)
class PassExplanation:
    """One pass: the kernel that runs, or why none does."""

    kernel: str | None
    tile_q: int  # query rows per tile
    tile_k: int  # keys per tile
    blocks: int  # thread blocks; on the CPU work items
    workspace_bytes: int
    softmax: str  # where the softmax runs and how; empty for a backward
    copies: tuple[str, ...]  # inputs copied first, because no kernel takes their layout
    reason: str  # why no kernel serves, when kernel is None
    rows: tuple[Verdict, ...]
    pads_head_dims: bool = False  # inputs are copied with zeros, to multiples of 8 columns
    folds_scale: bool = False  # q is copied times -1 or 0, and scale made positive
    backend_gave_way: bool = False  # PANTILE_BACKEND names one that does not serve the call
    o_low: bool = False  # the pass writes or reads 8 more bits of a 16-bit output
    compiled: tuple[RunTimeKernel, ...] = ()  # of variants, on a GPU
    splits: str = ""  # parts that the keys are cut into; empty where they are whole

    def lines(self, title: str, verbose: bool = False) -> list[str]:
        if self.kernel is None:
            head = f"{title}: no kernel. {self.reason}"
        elif self.tile_q == 0 and not self.rows:
            head = f"{title}: {self.kernel}"
        else:
            head = (
                f"{title}: {self.kernel}, tile {self.tile_q} x {self.tile_k}, "
                f"{self.blocks} blocks, workspace {self.workspace_bytes} bytes"
            )
        lines = [head]
        if self.backend_gave_way:
            lines.append("  PANTILE_BACKEND names a backend that does not serve this call")
        lines += [kernel.line() for kernel in self.compiled]
        if self.softmax:
            lines.append(f"  softmax: {self.softmax}")
        if self.splits:
            lines.append(f"  splits of the keys: {self.splits}")
        if self.o_low:
            lines.append("  output: 8 more bits of it from the forward to the backward")
        if self.copies:
            lines.append(f"  copies first: {', '.join(self.copies)}")
        if self.pads_head_dims:
            lines.append("  copies inputs first, with head dims padded to multiples of 8")
        if self.folds_scale:
            lines.append("  copies q first, times the sign of scale, for a positive scale")
        verdicts = self._rows() if verbose else self._backends()
        width = max((len(name) for name, _ in verdicts), default=0)
        lines += [f"  {name:<{width}}  {verdict}" for name, verdict in verdicts]
        return lines

    def _rows(self) -> list[tuple[str, str]]:
        """Each row of the kernel table and what became of it."""
        return [(row.kernel, _verdict(row)) for row in self.rows]

    def _backends(self) -> list[tuple[str, str]]:
        """The same, a line for each backend: the row that serves, or that is most like the call."""
        lines = []
        for backend in dict.fromkeys(row.backend for row in self.rows):
            rows = [row for row in self.rows if row.backend == backend]
            serving = [row for row in rows if not row.reason]
            if serving:
                row = next((row for row in serving if row.chosen), serving[0])
                lines.append((backend, f"{_verdict(row)}: {row.kernel}"))
            else:
                row = next((row for row in rows if row.closest), rows[0])
                lines.append((backend, f"none of {len(rows)} kernels: {row.reason}"))
        return lines


@dataclass(frozen=True)
class Explanation:
    """Both passes of one call."""

    forward: PassExplanation
    backward: PassExplanation
    quantize: PassExplanation | None = None  # with Options(fp8=True)
    dequantize: PassExplanation | None = None  # before the backward, with fp8_backward="bf16"
    saved_bytes: int | None = None  # with Options(fp8=True): kept from the forward to the backward
    verbose: bool = False  # prints every row of the kernel table, not one line for each backend
    call: str = ""  # how the shapes were read

    def __str__(self) -> str:
        lines = self.forward.lines("forward", self.verbose)
        if self.dequantize is not None:
            lines += self.dequantize.lines("dequantize", self.verbose)
        lines += self.backward.lines("backward", self.verbose)
        if self.saved_bytes is not None:
            lines.append(f"saved for the backward: {self.saved_bytes} bytes")
        if self.quantize is not None:
            lines = self.quantize.lines("quantize", self.verbose) + lines
        return "\n".join([f"call: {self.call}", *lines] if self.call else lines)


def _read_as(operands) -> str:
    """Which axis of the operands counts what: a wrong layout shows here."""
    q, k, v = (x.shape for x in operands[:3])
    rows = f"batch {q[0]}, {q[1]} queries" if len(q) == 4 else f"packed, {q[0]} queries"
    paged = len(k) != len(q)
    keys = f"{k[0]} pages of {k[1]} keys" if paged else f"{k[-3]} keys"
    return f"{rows} x {keys}, heads {q[-2]} / {k[-2]}, head dim {q[-1]} / {v[-1]}"


def _pass(answer: dict) -> PassExplanation:
    bits = answer["copies"]
    copies = tuple(name for bit, name in enumerate(_COPY_NAMES) if bits >> bit & 1)
    rows = tuple(Verdict(**row) for row in answer["rows"])
    compiled = tuple(RunTimeKernel(**kernel) for kernel in answer["compiled"])
    changes = {"pads_head_dims": bool(bits & PAD_HEAD_DIMS), "folds_scale": bool(bits & FOLD_SCALE)}
    return PassExplanation(
        **{**answer, "copies": copies, "rows": rows, "compiled": compiled, **changes}
    )


def wanted_gradients(variant) -> tuple[bool, bool, bool, int]:
    """Of alibi, sinks and bias, and a bit for each captured tensor."""

    def wanted(name: str) -> bool:
        return getattr(getattr(variant, name, None), "requires_grad", False)

    bits = sum(1 << i for i, name in enumerate(CAPTURED) if wanted(name))
    return wanted("alibi"), wanted("sinks"), wanted("bias"), bits


def explain_call(
    operands, call: _C.Call, deterministic: bool, extras, verbose: bool, variant=None
) -> Explanation:
    """``extras``: (max_logit, output_f32), or None when neither is wanted. The backward is that
    with the gradients of those of the variant's tensors that require them."""
    wants = wanted_gradients(variant)
    answers = _C.explain(
        *operands, call, deterministic, *(extras or (False, False)), False, variant, wants
    )
    return Explanation(*map(_pass, answers), verbose=verbose, call=_read_as(operands))


def explain_fp8_call(
    operands, rounded, call: _C.Call, fp8: tuple, how: tuple[str, bool, bool], saved: int
) -> Explanation:
    """``rounded``: the operands as a 16-bit backward takes them; ``fp8``: the format and fp8_exp;
    ``how``: fp8_backward, deterministic and verbose; ``saved``: bytes."""
    mode, deterministic, verbose = how
    quantize, forward, dequantize = map(_pass, _C.explain_fp8(*operands, call, *fp8))
    if mode == "full":
        backward = _pass(_C.explain_backward_fp8(*operands, call, *fp8[:2], fp8[3], deterministic))
    else:
        backward = _pass(_C.explain(*rounded, call, deterministic)[1])
    numbers = dequantize if mode == "bf16" else None
    read = _read_as(operands)
    return Explanation(forward, backward, quantize, numbers, saved, verbose, read)
