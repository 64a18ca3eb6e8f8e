# ruff: noqa: N999 (the underscore says that it is internal)
"""The compiled module (python/bindings). Internal: pantile's public functions stand in front of it.

Tensors are torch tensors or NumPy arrays. ``forward`` and ``backward`` write into tensors that are
already allocated, and answer 0 when they ran, or the bits of the inputs that must be copied first.
"""

from collections.abc import Callable, Iterator
from typing import Any

__version__: str

class UnsupportedError(NotImplementedError): ...

class Call:
    """One call of the bindings; the fields are those of pantile._schema.Call."""

    _fields: tuple[str, ...]
    def __init__(
        self,
        cu_seqlens_q: Any | None,
        cu_seqlens_k: Any | None,
        seqused_q: Any | None,
        seqused_k: Any | None,
        k_begin: Any | None,
        mask_shift: Any | None,
        block_table: Any | None,
        max_seqlen_q: int,
        max_seqlen_k: int,
        scale: float | None,
        window_left: int,
        window_right: int,
        backend: str,
        backend_preferred: bool,
        float32_precision: str,
        num_splits: int,
        softmax: str,
        softmax_preferred: bool,
        softmax_mode: str,
        tensor_share: float | None,
        tensor_split: str,
        rescale_threshold: float,
        p_max_offset: float,
        min_exponent_log2: float,
        exact_lse: bool,
        /,
    ) -> None: ...
    def __iter__(self) -> Iterator[Any]: ...
    def _replace(self, **fields: Any) -> Call: ...
    @property
    def packed(self) -> bool: ...
    @property
    def cu_seqlens_q(self) -> Any | None: ...
    @property
    def cu_seqlens_k(self) -> Any | None: ...
    @property
    def seqused_q(self) -> Any | None: ...
    @property
    def seqused_k(self) -> Any | None: ...
    @property
    def k_begin(self) -> Any | None: ...
    @property
    def mask_shift(self) -> Any | None: ...
    @property
    def block_table(self) -> Any | None: ...
    @property
    def max_seqlen_q(self) -> int: ...
    @property
    def max_seqlen_k(self) -> int: ...
    @property
    def scale(self) -> float | None: ...
    @property
    def window_left(self) -> int: ...
    @property
    def window_right(self) -> int: ...
    @property
    def backend(self) -> str: ...
    @property
    def backend_preferred(self) -> bool: ...
    @property
    def float32_precision(self) -> str: ...
    @property
    def num_splits(self) -> int: ...
    @property
    def softmax(self) -> str: ...
    @property
    def softmax_preferred(self) -> bool: ...
    @property
    def softmax_mode(self) -> str: ...
    @property
    def tensor_share(self) -> float | None: ...
    @property
    def tensor_split(self) -> str: ...
    @property
    def rescale_threshold(self) -> float: ...
    @property
    def p_max_offset(self) -> float: ...
    @property
    def min_exponent_log2(self) -> float: ...
    @property
    def exact_lse(self) -> bool: ...

VARIANT_FIELDS: tuple[str, ...]

def check_expression(kind: str, text: str, captured: list[tuple[str, str, int]]) -> None:
    """Raises what is wrong with an expression of captured tensors (name, dtype, axes)."""

def forward(
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    lse: Any | None,
    o_low: Any | None,
    max_logit: Any | None,
    call: Call,
    variant: tuple[Any, ...] | None = None,
) -> int:
    """Bits: copy q 1, k 2, v 4; pad head dims 128, fold scale 256. ``o``: dtype of q or float32.

    ``variant``: values of the fields VARIANT_FIELDS.

    ``o_low``: int8, of the shape of a 16-bit ``o``, contiguous: 8 more bits of it for ``backward``.
    """

def attend(q: Any, k: Any, v: Any, call: Call) -> Any | None:
    """The output of a plain call; True when autograd must record it, or None when it is not plain
    (plain.h)."""

def attend_recorded(q: Any, k: Any, v: Any, call: Call) -> tuple[Any, Any | None, Any] | None:
    """(o, o_low, LSE) of a plain call that autograd records; None: by the longer way."""

def gradients(
    grad_o: Any,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    o_low: Any | None,
    lse: Any,
    call: Call,
    deterministic: bool,
) -> tuple[Any, Any, Any, None] | None:
    """(dq, dk, dv, None) of such a call; None: by the longer way."""

def sdpa(query: Any, key: Any, value: Any, call: Call) -> Any | None:
    """The same of scaled_dot_product_attention, whose tensors are [batch, heads, seqlen, dim]."""

def sdpa_forward(query: Any, key: Any, value: Any, call: Call) -> tuple[Any, Any] | None:
    """(output, LSE) of torch's operator, or None when it needs more than the kernel."""

def sdpa_backward(
    grad_out: Any,
    query: Any,
    key: Any,
    value: Any,
    out: Any,
    lse: Any,
    call: Call,
    deterministic: bool,
) -> tuple[Any, Any, Any] | None:
    """The gradients of torch's operator, or None."""

def backward(
    grad_o: Any,
    grad_lse: Any | None,
    q: Any,
    k: Any,
    v: Any,
    o: Any,
    o_low: Any | None,
    lse: Any,
    grad_q: Any,
    grad_k: Any,
    grad_v: Any,
    call: Call,
    deterministic: bool,
    variant: tuple[Any, ...] | None = None,
    grad_alibi: Any | None = None,
    grad_sinks: Any | None = None,
    grad_bias: Any | None = None,
    grad_captured: tuple[Any | None, ...] | None = None,
    key_statistics: Any | None = None,
) -> int:
    """Copy bits: q 1, k 2, v 4, grad_o 8, o 16, lse 32, grad_lse 64; 128, 256 as in forward.

    Gradients of the variant's tensors are float32, in their shapes; that of the bias is 1 along an
    axis of stride 0.

    ``o_low``: as the forward wrote it; contiguous, it is never asked to be copied.
    ``key_statistics``: of :func:`key_statistics`, in place of those of k and v; int32
    ``[sequences, heads_k, 8 + head_dim]``, contiguous. Only with ``deterministic``.
    """

def key_statistics(k: Any, v: Any, statistics: Any, call: Call) -> int:
    """Writes what a deterministic backward would find out about k and v before its main pass. The
    call has the lengths of the keys as those of the queries, too, and no window.

    Copy bits: k 2, v 4; 128, 256 as in forward. The bounds of disjoint keys unite: larger maxima
    (0, 1), sums of the others (2 to 5). 7 says whether the mean behind it is large.
    """

def explain(
    q: Any,
    k: Any,
    v: Any,
    call: Call,
    deterministic: bool,
    max_logit: bool = False,
    output_f32: bool = False,
    o_low: bool = False,
    variant: tuple[Any, ...] | None = None,
    gradients: tuple[bool, bool, bool, int] = (False, False, False, 0),
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Forward and backward, in the fields of pantile.PassExplanation.

    ``gradients``: whether those of alibi, sinks and bias are wanted, and a bit for each tensor that
    the score captures.
    """

def compile_call(
    q: Any,
    k: Any,
    v: Any,
    call: Call,
    deterministic: bool,
    max_logit: bool,
    output_f32: bool,
    variant: tuple[Any, ...] | None,
    gradients: tuple[bool, bool, bool, int],
    backward: bool,
) -> None:
    """What explain() describes, but compiled; nothing is launched."""

def quantize(
    q: Any,
    k: Any,
    v: Any,
    descale_q: Any | None,
    descale_k: Any | None,
    descale_v: Any | None,
    operands: tuple[Any, ...],
    call: Call,
    block_q: int,
    block_k: int,
    hadamard: bool,
    smooth_k: bool,
) -> int:
    """Writes into the operands, in the order of pantile.Quantized. Copy bits: q 1, k 2, v 4.

    Of the call only the packing and the backend.
    """

def dequantize(
    q: Any,
    k: Any,
    v: Any,
    operands: tuple[Any, ...],
    call: Call,
    block_q: int,
    block_k: int,
    hadamard: bool,
    keep_rotation: bool,
) -> int:
    """Writes what the first five operands stand for into q, k (less its mean) and v.

    Copy bits as of quantize(): no kernel writes a tensor of that layout.
    """

def forward_fp8(
    operands: tuple[Any, ...],
    o: Any,
    lse: Any | None,
    head_dim: int,
    keys: int,
    call: Call,
    block_q: int,
    block_k: int,
    smooth_k: bool,
    exp: str,
) -> None: ...
def explain_fp8(
    q: Any,
    k: Any,
    v: Any,
    call: Call,
    block_q: int,
    block_k: int,
    hadamard: bool,
    smooth_k: bool,
    exp: str,
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Quantising, the forward and dequantising, in the fields of pantile.PassExplanation."""

def backward_fp8(
    operands: tuple[Any, ...],
    grad_o: Any,
    grad_lse: Any | None,
    o: Any,
    lse: Any,
    grads: tuple[Any, Any, Any] | None,
    head_dim: int,
    keys: int,
    call: Call,
    block_q: int,
    block_k: int,
    smooth_k: bool,
    deterministic: bool,
) -> None:
    """Of the operands nonfinite_v and mean_k may be None. Without grads it only raises where no
    kernel serves."""

def explain_backward_fp8(
    q: Any,
    k: Any,
    v: Any,
    call: Call,
    block_q: int,
    block_k: int,
    smooth_k: bool,
    deterministic: bool,
) -> dict[str, Any]: ...
def check_sequences(call: Call, total_q: int, total_k: int, page_size: int = 0) -> None:
    """Checks the contents of the call's arrays, which must be in host memory."""

def kernels() -> list[dict[str, Any]]: ...
def devices() -> tuple[list[dict[str, Any]], str]: ...
def build_info() -> str: ...
def set_plain(
    parameter_type: type,
    grad_enabled: Callable[..., Any],
    is_excluded: Callable[..., Any],
    autograd_keys: tuple[Any, Any],
    watchers: tuple[Callable[..., Any], ...],
    empty_like: Callable[..., Any],
    float32: Any,
    int8: Any,
    contiguous_format: Any,
) -> None: ...
def set_torch(
    tensor_type: type,
    exchange: Any | None,
    describe: Callable[..., Any],
    current_stream: Callable[..., Any],
    lend_workspace: Callable[..., Any],
    is_capturing: Callable[..., Any],
    thread_count: int,
) -> None: ...
def set_cpu_threads(threads: int) -> None: ...
def set_parallel_for(address: int) -> None: ...
def checks_workspaces() -> bool: ...
def check_workspaces(on: bool) -> None: ...
def set_tuned_softmax(rows: list[tuple[str, str, int, int, str, str]]) -> None: ...
def set_plan_log(log: Callable[[str], object] | None) -> None: ...
def set_jit(
    nvrtc_folders: str, shipped_folders: str, log: Callable[[int, str], object]
) -> None: ...
def cache_folders() -> str:
    """Where kernels compiled at run time are kept, first folder first, divided by colons."""

def find_nvrtc() -> tuple[bool, str]:
    """Version and path of the compiler for kernels that the library has not; or why not."""

def compile_kernel(name: str, source: str, entry: str, arch: int, folder: str) -> dict[str, Any]:
    """Compiles a CUDA kernel against pantile's headers into a folder; its registers and so on."""

def compile_attention(
    pass_: str,
    backend: str,
    dtype: str,
    mask: str,
    sizes: tuple[int, int, int, int, int, int, int],
    softcap: bool,
    alibi: bool,
    bias: str,
    dropout: bool,
    deterministic: bool,
    grad_alibi: bool,
    grad_bias: bool,
    folder: str,
) -> list[dict[str, Any]]:
    """As compile_kernel, for each kernel of a variant that the library has not.

    ``sizes``: batch, heads_q, heads_k, seqlen_q, seqlen_k, head_dim, head_dim_v.
    """

def decode(
    q: Any,
    o: Any,
    lse: Any | None,
    cache: tuple[Any, ...],
    numbers: tuple[Any, ...],
    tree_mask: Any | None,
    sinks: Any | None,
    schedule: Any | None,
) -> None:
    """``cache``: the tensors of pantile._kv_ops.CACHE; ``numbers``: DecodeNumbers of kv.h."""

def decode_schedule(
    q: Any,
    cache: tuple[Any, ...],
    numbers: tuple[Any, ...],
    tree: bool,
    sinks: bool,
    output_f32: bool,
    lse: bool,
    schedule: Any | None,
) -> int:
    """The entries of a schedule; with a tensor, they are written."""

def explain_decode(
    q: Any,
    cache: tuple[Any, ...],
    numbers: tuple[Any, ...],
    tree: bool,
    sinks: bool,
    output_f32: bool,
    lse: bool,
) -> dict[str, Any]:
    """The plan of a decode, and a verdict for each row of the table."""

def append(
    cache: tuple[Any, ...],
    k_new: Any,
    v_new: Any | None,
    q: Any | None,
    q_rotated: Any | None,
    cos: Any | None,
    sin: Any | None,
    interleaved: bool,
    max_seqlen_q: int,
    max_seqlen_new: int,
    slots_before_heads: bool,
    head_dim_v: int,
    backend: str,
) -> None:
    """Writes into the cache, and with ``q_rotated`` q rotated."""

def check_cache(
    arrays: tuple[Any, ...],
    blocks: int,
    slots: int,
    total_q: int,
    max_seqlen_q: int,
    total_new: int,
    seqlen_new: int,
) -> None:
    """Contents of host arrays; ``arrays`` in the order of pantile._kv_ops.CACHE."""
