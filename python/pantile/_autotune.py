"""pantile.autotune: which softmax is faster for a shape on this GPU, measured once and kept.

The choice itself is made in C++ when a call is planned (cuda/ampere/forward/plan.cc): what is
measured here takes the place of the table of GPU generations. A file holds one choice, so that
processes that write at the same time do not meet.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import statistics
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pantile import _C, _info
from pantile._arguments import integer, shown
from pantile._options import DEFAULT_OPTIONS, Options, log, resolve_options

_FORMAT = 1  # of the files; part of their names
_SUFFIX = ".softmax"
_UNITS = ("vector", "tensor")
_NO_CHOICE = "no other serves the call"  # of explain: cuda/ampere/forward/softmax_choice.h
_TIE = 1.01  # a gain below this is noise: the table's choice stays
_WARMUPS = 3
_LARGEST_FILE = 65536

_Timer = Callable[[Callable[[], object]], float]


@dataclass(frozen=True)
class Autotuned:
    """What :func:`autotune` found for the calls of one class: those that the kernel serves on such
    a device, with as many keys and queries up to the next power of two."""

    kernel: str
    device: str
    log2_keys: int  # of the longest sequence
    log2_queries: int  # of batch * heads_q * queries of the longest sequence
    softmax: str
    seconds: dict[str, float]  # median of one call, by softmax
    file: str = ""  # where it is kept; empty: nowhere, it ends with the process

    @property
    def source(self) -> str:
        """As explain shows it."""
        others = [name for name in self.seconds if name != self.softmax]
        gains = [
            f"{self.seconds[name] / self.seconds[self.softmax]:.2f}x of {name}" for name in others
        ]
        place = f"file {self.file}" if self.file else "this process"
        return f"autotuned: {place}, {', '.join(gains)}"

    @property
    def _class(self) -> tuple[str, str, int, int]:
        return self.kernel, self.device, self.log2_keys, self.log2_queries


_known: dict[tuple, Autotuned] = {}
_lock = threading.Lock()  # of _known and of what C++ has of it


def _register() -> None:
    rows = [(*x._class, x.softmax, x.source) for x in _known.values()]
    _C.set_tuned_softmax(rows)


# ---- files: in the folders of cpp/jit, by its rules (cache.cc)


def cache_folders() -> list[str]:
    return [folder for folder in _C.cache_folders().split(":") if folder]


_library = ""


def _library_hash() -> str:
    """SHA-256 of the compiled module: another build may have other kernels."""
    global _library
    if not _library:
        digest = hashlib.sha256()
        with open(_C.__file__, "rb") as file:
            while part := file.read(1 << 20):
                digest.update(part)
        _library = digest.hexdigest()
    return _library


def _file_name(class_: tuple) -> str:
    text = json.dumps([_FORMAT, _library_hash(), *class_])
    return hashlib.sha256(text.encode()).hexdigest() + _SUFFIX


def _distrust(path: str) -> str:
    """Empty, or why what lies there is not believed."""
    there = os.stat(path)
    if there.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to user {there.st_uid}; it must belong to this user or to root"
    if there.st_mode & 0o002:
        return f"{path} can be written to by everybody (chmod o-w)"
    return ""


def _make_folders(path: str) -> None:
    """As mkdir -p; folders that it makes are for their owner alone."""
    parent = os.path.dirname(path)
    if parent and not os.path.isdir(parent):
        _make_folders(parent)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700)


def _write(folder: str, name: str, text: str) -> str:
    """By a private name and a rename: a reader sees the whole file or none."""
    _make_folders(folder)
    if why := _distrust(folder):
        raise OSError(why)
    path = os.path.join(folder, name)
    descriptor, private = tempfile.mkstemp(prefix=".", suffix=_SUFFIX + ".new", dir=folder)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
        os.replace(private, path)
    except BaseException:
        os.unlink(private)
        raise
    return path


def _keep(found: Autotuned) -> Autotuned:
    """In the first folder that takes it."""
    reasons = []
    for folder in cache_folders():
        try:
            kept = {**dataclasses.asdict(found), "library": _library_hash(), "format": _FORMAT}
            del kept["file"]
            path = _write(folder, _file_name(found._class), json.dumps(kept, indent=1) + "\n")
            return dataclasses.replace(found, file=path)
        except OSError as error:
            reasons.append(f"{folder}: {error}")
    if reasons:  # an empty PANTILE_CACHE asks for this
        log.warning("what autotune measured ends with this process: %s", "; ".join(reasons))
    return found


def _read(path: str) -> Autotuned | None:
    """None: of another library, or not to be used, which is said."""
    try:
        if why := _distrust(path):
            log.warning("%s: no choice is read from it", why)
            return None
        with open(path) as file:
            kept = json.loads(file.read(_LARGEST_FILE))
        if kept.pop("format") != _FORMAT or kept.pop("library") != _library_hash():
            return None
        found = Autotuned(**kept, file=path)
        seconds = {name: float(found.seconds[name]) for name in found.seconds}
        good = found.softmax in seconds and set(seconds) <= set(_UNITS)
        if (
            good
            and min(seconds.values()) > 0
            and os.path.basename(path) == _file_name(found._class)
        ):
            return found
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        pass
    log.info("%s is damaged: it is ignored", path)
    return None


def _files() -> list[str]:
    """Those of the folders, the first folder's last: what is read later stands."""
    found = []
    for folder in reversed(cache_folders()):
        try:
            names = sorted(os.listdir(folder))
            whole = [name for name in names if name.endswith(_SUFFIX)]
            if whole and (why := _distrust(folder)):
                log.warning("%s: no choice is read from it", why)
                continue
        except OSError:
            continue  # no such folder yet
        found += [os.path.join(folder, name) for name in whole]
    return found


def load() -> None:
    """What earlier processes measured with this library; when pantile is imported."""
    found = [x for x in map(_read, _files()) if x is not None]
    if found:
        with _lock:
            _known.update((x._class, x) for x in found)
            _register()


# ---- measuring


def _rounded_up_log2(n: int) -> int:
    return max(0, n - 1).bit_length()


def _gpu_seconds(run: Callable[[], object]) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1000


def _medians(
    runs: dict[str, Callable[[], object]], timer: _Timer, repeats: int
) -> dict[str, float]:
    """In rotating order, so that a clock that falls slows all of them."""
    for run in runs.values():
        for _ in range(_WARMUPS):
            run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    names = list(runs)
    for turn in range(repeats):
        at = turn % len(names)
        for name in (*names[at:], *names[:at]):
            times[name].append(timer(runs[name]))
    return {name: statistics.median(values) for name, values in times.items()}


def _faster(seconds: dict[str, float], usual: str) -> str:
    best = min(seconds, key=seconds.__getitem__)
    return usual if seconds[usual] <= _TIE * seconds[best] else best


def _refuse(why: str) -> None:
    raise _C.UnsupportedError(f"autotune has nothing to choose: {why}")


def _candidates(q, k, v, lengths: tuple, options: Options, arguments: dict) -> tuple:
    """(kernel, the unit that auto takes, {unit: options}) of what one kernel offers."""
    from pantile._explain_calls import explain

    def explained(chosen: Options):
        return explain(q, k, v, *lengths, **arguments, options=chosen).forward

    plain = dataclasses.replace(options, softmax="auto")
    usual = explained(plain)
    if usual.kernel is None:
        raise _C.UnsupportedError(usual.reason)
    asked = {unit: dataclasses.replace(options, softmax=unit) for unit in _UNITS}
    if options.fp8 or options.backend == "torch":
        _refuse(f"{usual.kernel} has one softmax")
    units = {unit: x for unit, x in asked.items() if explained(x).kernel == usual.kernel}
    if len(units) < 2 or _NO_CHOICE in usual.softmax:
        _refuse(f"{usual.kernel} serves this call with one softmax: {usual.softmax}")
    return usual.kernel, usual.softmax.split(",")[0], units


def _device_name(q: Any) -> str:
    index = q.device.index
    return next(x["name"] for x in _info.devices() if x["type"] == "cuda" and x["index"] == index)


def _class_of(kernel: str, q, k, lengths: tuple) -> tuple[str, str, int, int]:
    if lengths and lengths[0] is not None:
        batch, queries, keys = lengths[0].shape[0] - 1, lengths[2], lengths[3]
    else:
        batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    queries = batch * q.shape[-2] * queries
    return kernel, _device_name(q), _rounded_up_log2(keys), _rounded_up_log2(queries)


def autotune(
    q: Any,
    k: Any,
    v: Any,
    *lengths: Any,
    repeats: int = 20,
    timer: _Timer | None = None,
    **arguments: Any,
) -> Autotuned:
    """Measures which softmax is faster for calls like this one, and lets later ones have it.

    Takes the arguments of :func:`attention` (or, with ``cu_seqlens_q``, ``cu_seqlens_k``,
    ``max_seqlen_q`` and ``max_seqlen_k``, of :func:`varlen_attention`), and runs the call, without
    gradients, about ``2 * repeats`` times: with the softmax on vector units and partly on tensor
    cores (FlashAttention-T), in rotating order. The faster one is what ``softmax="auto"`` stands
    for in all later calls of the same class: served by the same kernel on a GPU of the same name,
    with as many keys and queries up to the next power of two. A gain below 1 % changes nothing.
    :func:`explain` shows the choice with its file. Calls that name a softmax are not touched.

    The choice is kept in the first folder of ``PANTILE_CACHE``, or the user's cache folder, that
    takes it (files of one build of the library serve no other), and read when pantile is imported.
    :func:`clear_autotuned` removes it. The two differ in the last bits of o: where ranks must
    agree, measure on one of them before the others start.

    Args:
        repeats: how often each is timed, at least 1.
        timer: called with a function of no arguments that makes one call; returns its seconds.
            Default: CUDA events.

    Returns:
        :class:`Autotuned`.

    Raises:
        TypeError, ValueError: as the call itself would; or ``options`` name a softmax.
        pantile.UnsupportedError: there is nothing to choose, as on the CPU and on Hopper kernels;
            or no kernel serves the call.
        RuntimeError: a CUDA graph is being captured.
    """
    repeats = integer("repeats", repeats)
    if repeats < 1:
        raise ValueError(f"repeats is {shown(repeats)}; it must be at least 1")
    options = arguments.pop("options", None)
    options = DEFAULT_OPTIONS if options is None else resolve_options(options)
    if options is not DEFAULT_OPTIONS and options.softmax != "auto":
        text = shown(options.softmax)
        raise ValueError(f"options.softmax is {text}; it must be auto, which is what is tuned")
    if getattr(q, "is_cuda", False):
        from pantile._runtime import is_capturing

        if is_capturing():
            raise RuntimeError("autotune measures; call it before a CUDA graph is captured")
    kernel, usual, units = _candidates(q, k, v, lengths, options, arguments)
    runs = _calls(q, k, v, lengths, units, arguments)
    seconds = _medians(runs, timer or _gpu_seconds, repeats)
    found = Autotuned(*_class_of(kernel, q, k, lengths), _faster(seconds, usual), seconds)
    found = _keep(found)
    with _lock:
        _known[found._class] = found
        _register()
    log.info("softmax of %s: %s; %s", kernel, found.softmax, found.source)
    return found


def _calls(q, k, v, lengths: tuple, units: dict, arguments: dict) -> dict[str, Callable]:
    import torch

    from pantile._attention import attention
    from pantile._varlen import varlen_attention

    call: Any = varlen_attention if lengths else attention

    def of(options: Options) -> Callable[[], object]:
        def run() -> object:
            with torch.no_grad():
                return call(q, k, v, *lengths, **arguments, options=options)

        return run

    return {unit: of(options) for unit, options in units.items()}


def clear_autotuned() -> int:
    """Forgets what :func:`autotune` measured: in this process, and the files of this library in the
    folders of ``PANTILE_CACHE``. Returns how many choices that were."""
    found = [x for x in map(_read, _files()) if x is not None]
    with _lock:
        classes = {*_known, *(x._class for x in found)}
        _known.clear()
        _register()
    for x in found:
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            os.unlink(x.file)
    return len(classes)
