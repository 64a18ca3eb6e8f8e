"""Train a byte-level GPT twice from one seed, with pantile and with PyTorch's attention.

The text is real and already on the machine: the topics that ``help()`` prints, which every Python
ships as ``pydoc_data.topics`` (about half a megabyte). All runs see the same weights and the same
batches, so the loss curves lie on each other as far as rounding lets them: float32 runs differ in
the last digits, bf16 runs drift apart, those of torch's own backends too. The script prints their
largest difference, tokens per second and peak memory, and writes ``losses.json`` and
``losses.png``.

    python examples/train_gpt.py                              # a few minutes on a laptop
    python examples/train_gpt.py --preset large --attention pantile,flash,cudnn   # H100 or H200
    python examples/train_gpt.py --attention pantile,pantile-fp8                  # bf16 against FP8
    python examples/train_gpt.py --preset large --contexts 2048,8192 \
        --attention pantile-ampere-vector,pantile-ampere-tensor,flash,cudnn,math --longest math=2048

With ``--contexts`` all attentions run at each length, with as many tokens a step as the preset, and
each length has a folder of its own; ``steps.json`` and ``steps.png`` hold the time of a step and
the peak memory of them all. An attention that does not serve the model is named and left out, and
with ``--longest`` one whose context would be longer: ``math`` takes most of the time at 8192.
Gradient norms are in ``losses.json``. A step whose loss or gradient norm is NaN or infinite ends
the program with a message that names the step and the first such gradient.

``pantile-fp8``, ``-full`` and ``-recompute`` differ in their backward (docs/fp8.md). With
``--compare-gradients N`` every N steps the gradients of each run are compared with those of
pantile in bfloat16 at the same weights and batch: cosine and norm by layer go to ``losses.json``.
``--qk-norm`` normalises q and k, ``--outliers X`` multiplies a channel of each head's K by X.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import math
import pathlib
import re
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

import pantile
import torch
import torch.nn.functional as F
from pantile.bench import measure
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from tqdm import tqdm

VOCABULARY = 256  # bytes
GIB = 1024**3


@dataclass(frozen=True)
class Preset:
    layers: int
    width: int
    heads: int
    context: int  # tokens
    batch: int  # sequences per step
    steps: int
    learning_rate: float
    qk_norm: bool = False
    outliers: float = 1.0  # what one channel of each head's K is multiplied by


PRESETS = {
    # About 3.3 M parameters, head dim 64, float32: a few minutes on two CPU cores.
    "small": Preset(
        layers=4, width=256, heads=4, context=512, batch=4, steps=150, learning_rate=1e-3
    ),
    # About 103 M parameters, head dim 128, bfloat16: one H100 or H200.
    "large": Preset(
        layers=8, width=1024, heads=8, context=8192, batch=4, steps=100, learning_rate=6e-4
    ),
}


# ---------------------------------------------------------------------------------------------
# Attention: [batch, seq, heads, dim] in and out, causal


def attend_pantile(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return pantile.attention(q, k, v, causal=True)


def attend_pantile_fp8(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return pantile.attention(q, k, v, causal=True, options=FP8)


def attend_pantile_fp8_full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return pantile.attention(q, k, v, causal=True, options=FP8_FULL)


def attend_pantile_fp8_recompute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return pantile.attention(q, k, v, causal=True, options=FP8_RECOMPUTE)


def attend_pantile_ampere(q: Tensor, k: Tensor, v: Tensor, *, softmax: str) -> Tensor:
    return pantile.attention(q, k, v, causal=True, options=AMPERE[softmax])


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


# Forward in FP8. Backward in bf16, of what the codes stand for or of q, k and v as they came; or in
# FP8.
FP8 = pantile.Options(fp8=True, fp8_backward="bf16")
FP8_FULL = pantile.Options(fp8=True, fp8_backward="full")
FP8_RECOMPUTE = pantile.Options(fp8=True, fp8_backward="recompute")
# The Ampere kernels, on any GPU from compute capability 8.0 on; on 9.0 they need a build with
# PANTILE_AMPERE_ON_HOPPER. FlashAttention-T off and on: docs/design/flashattention-t.md.
AMPERE = {
    "vector": pantile.Options(backend="ampere", softmax="vector"),
    "tensor": pantile.Options(backend="ampere", softmax="tensor"),
}

# name -> (function, SDPA backend to force, or None to leave torch its choice)
ATTENTION: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], SDPBackend | None]] = {
    "pantile": (attend_pantile, None),
    "pantile-fp8": (attend_pantile_fp8, None),
    "pantile-fp8-full": (attend_pantile_fp8_full, None),
    "pantile-fp8-recompute": (attend_pantile_fp8_recompute, None),
    **{
        f"pantile-ampere-{softmax}": (
            functools.partial(attend_pantile_ampere, softmax=softmax),
            None,
        )
        for softmax in AMPERE
    },
    "sdpa": (attend_sdpa, None),
    "flash": (attend_sdpa, SDPBackend.FLASH_ATTENTION),
    "cudnn": (attend_sdpa, SDPBackend.CUDNN_ATTENTION),
    "math": (attend_sdpa, SDPBackend.MATH),
}


# ---------------------------------------------------------------------------------------------
# Model: pre-norm decoder with learned positions


class Block(nn.Module):
    def __init__(self, preset: Preset, attend):
        super().__init__()
        self.heads = preset.heads
        self.attend = attend
        self.norm_qk = nn.LayerNorm(preset.width // preset.heads) if preset.qk_norm else None
        channels = torch.ones(preset.width // preset.heads)
        channels[0] = preset.outliers
        self.register_buffer("channels", channels, persistent=False)
        self.has_outliers = preset.outliers != 1.0
        self.norm_1 = nn.LayerNorm(preset.width)
        self.qkv = nn.Linear(preset.width, 3 * preset.width, bias=False)
        self.out = nn.Linear(preset.width, preset.width, bias=False)
        self.norm_2 = nn.LayerNorm(preset.width)
        self.up = nn.Linear(preset.width, 4 * preset.width)
        self.down = nn.Linear(4 * preset.width, preset.width)

    def forward(self, x):
        batch, seq, width = x.shape
        qkv = self.qkv(self.norm_1(x)).view(batch, seq, 3, self.heads, width // self.heads)
        q, k, v = qkv.unbind(2)  # views into one tensor: no copy is made for either attention
        if self.norm_qk is not None:
            q, k = self.norm_qk(q), self.norm_qk(k)
        if self.has_outliers:  # q the other way: the scores stay as they are
            q, k = q / self.channels, k * self.channels
        x = x + self.out(self.attend(q, k, v).reshape(batch, seq, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class ByteGPT(nn.Module):
    def __init__(self, preset: Preset, attend):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, preset.width)
        self.position = nn.Embedding(preset.context, preset.width)
        self.blocks = nn.ModuleList(Block(preset, attend) for _ in range(preset.layers))
        self.norm = nn.LayerNorm(preset.width)
        self.head = nn.Linear(preset.width, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / (math.sqrt(2 * preset.layers) ** residual))

    def forward(self, tokens):
        x = self.embed(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


# ---------------------------------------------------------------------------------------------
# Measurement


class PeakMemory:
    """Largest memory in use between construction and ``bytes()``: allocator peak on the GPU,
    resident-set peak of this process on the CPU."""

    def __init__(self, device: torch.device):
        self.device = device
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
        else:
            with contextlib.suppress(OSError):
                pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM

    def bytes(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        with contextlib.suppress(OSError):
            status = pathlib.Path("/proc/self/status").read_text()
            if match := re.search(r"VmHWM:\s+(\d+) kB", status):
                return int(match[1]) * 1024
        unit = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@dataclass
class Run:
    attention: str
    losses: list[float]
    tokens_per_second: float  # median over the steps after warm-up
    step_seconds: float  # median
    peak_bytes: int
    gradient_norms: list[float]  # of all parameters, before clipping
    gradients: list[
        dict[str, Any]
    ]  # compared with those of pantile in bfloat16, see compare_gradients


def load_text() -> torch.Tensor:
    from pydoc_data.topics import topics

    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


def loss_of(model: nn.Module, window: Tensor, precision) -> Tensor:
    with precision or contextlib.nullcontext():
        logits = model(window[:, :-1])
        return F.cross_entropy(logits.float().reshape(-1, VOCABULARY), window[:, 1:].reshape(-1))


def projections(model: ByteGPT) -> list[Tensor]:
    """Gradients of the weights that make q, k and v, layer by layer."""
    blocks: Any = model.blocks
    return [block.qkv.weight.grad.detach().clone() for block in blocks]


def compare_gradients(model: ByteGPT, window: Tensor, precision, step: int) -> dict[str, Any]:
    """Cosine to the gradients of bf16 attention at the same weights and batch, and the ratio of
    their norms, for the weights of q, k and v of each layer. Leaves the gradients as they were."""
    found = projections(model)
    kept = [p.grad for p in model.parameters()]
    blocks: Any = model.blocks
    attend = [block.attend for block in blocks]
    for block in blocks:
        block.attend = attend_pantile
    model.zero_grad(set_to_none=True)
    loss_of(model, window, precision).backward()
    exact = projections(model)
    for block, function in zip(blocks, attend, strict=True):
        block.attend = function
    for parameter, gradient in zip(model.parameters(), kept, strict=True):
        parameter.grad = gradient
    pairs = list(zip(found, exact, strict=True))
    return {
        "step": step,
        "cosine": [F.cosine_similarity(a.flatten(), b.flatten(), dim=0).item() for a, b in pairs],
        "norm_ratio": [(a.norm() / b.norm()).item() for a, b in pairs],
    }


class NonFiniteStepError(RuntimeError):
    """A loss or gradient that is NaN or infinite: nothing after it says anything."""


def require_finite(name: str, step: int, loss: float, norm: float, model: nn.Module) -> None:
    if math.isfinite(loss) and math.isfinite(norm):
        return
    wrong = [
        key
        for key, parameter in model.named_parameters()
        if parameter.grad is not None and not bool(parameter.grad.isfinite().all())
    ]
    gradients = f"; first of {len(wrong)} such gradients: {wrong[0]}" if wrong else ""
    raise NonFiniteStepError(
        f"{name}: step {step} has loss {loss:g} and gradient norm {norm:g}, which must be finite"
        f"{gradients}. The run ends here; pantile.shadow() around it tells whether the attention "
        "is at fault"
    )


def train(
    name: str, preset: Preset, text: torch.Tensor, device: torch.device, seed: int, every: int
) -> Run:
    """``every``: steps between comparisons of gradients, or 0."""
    attend, backend = ATTENTION[name]
    torch.manual_seed(seed)
    model = ByteGPT(preset, attend).to(device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=preset.learning_rate, betas=(0.9, 0.95), fused=device.type == "cuda"
    )
    warmup = max(1, preset.steps // 10)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1.0, (i + 1) / warmup))
    batches = torch.Generator().manual_seed(seed)
    offsets = torch.arange(preset.context + 1)
    text = text.to(device)
    precision = torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else None
    forced = sdpa_kernel(backend) if backend is not None else contextlib.nullcontext()

    peak = PeakMemory(device)
    losses, seconds, norms, gradients = [], [], [], []
    progress = tqdm(range(preset.steps), desc=f"{name:>8}", unit="step", file=sys.stdout)
    with forced:
        for step in progress:
            started = time.perf_counter()
            starts = torch.randint(len(text) - preset.context, (preset.batch, 1), generator=batches)
            window = text[(starts + offsets).to(device)]
            loss = loss_of(model, window, precision)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            compared = every > 0 and step % every == every - 1
            if compared:
                gradients.append(compare_gradients(model, window, precision, step))
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            losses.append(loss.item())  # waits for the device, so the clock below is honest
            norms.append(norm.item())
            require_finite(name, step, losses[-1], norms[-1], model)
            if not compared:
                seconds.append(time.perf_counter() - started)
            progress.set_postfix(loss=f"{losses[-1]:.4f}", norm=f"{norms[-1]:.2f}")
    steady = sorted(seconds[min(5, len(seconds) - 1) :])
    median = steady[len(steady) // 2]
    rate = preset.batch * preset.context / median
    return Run(name, losses, rate, median, peak.bytes(), norms, gradients)


def plot(runs: list[Run], preset_name: str, device_name: str, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (top, bottom) = plt.subplots(
        2, 1, sharex=True, figsize=(7, 5.5), height_ratios=(3, 1), layout="constrained"
    )
    for i, run in enumerate(runs):
        label = f"{run.attention}: {run.tokens_per_second:,.0f} tokens/s"
        top.plot(run.losses, label=label, linewidth=3.5 - 1.2 * i, alpha=0.9)
    top.set_ylabel("loss (nats per byte)")
    top.set_title(f"byte-level GPT, preset '{preset_name}', {device_name}", fontsize=10)
    top.legend()
    for run in runs[1:]:
        difference = [abs(a - b) for a, b in zip(runs[0].losses, run.losses, strict=True)]
        bottom.semilogy(
            [max(d, 1e-9) for d in difference], label=f"|{runs[0].attention} - {run.attention}|"
        )
    bottom.set_xlabel("step")
    bottom.set_ylabel("difference")
    if len(runs) > 1:
        bottom.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", choices=PRESETS, default="small")
    parser.add_argument(
        "--attention",
        default="pantile,sdpa",
        metavar="A,B",
        help=f"comma-separated, of {', '.join(ATTENTION)} (default %(default)s)",
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, help="training steps (default: the preset's)")
    parser.add_argument("--batch", type=int, help="sequences per step (default: the preset's)")
    parser.add_argument("--context", type=int, help="tokens per sequence (default: the preset's)")
    text = "tokens per sequence of several rounds, each with the preset's tokens per step"
    parser.add_argument("--contexts", metavar="A,B", help=text)
    text = "leave out attention A at contexts of more than N tokens"
    parser.add_argument("--longest", default="", metavar="A=N,B=N", help=text)
    parser.add_argument("--qk-norm", action="store_true", help="normalise q and k")
    text = "factor of a channel of K (default 1)"
    parser.add_argument("--outliers", type=float, default=1.0, help=text)
    text = "every N steps, with those of bfloat16 attention (default: never)"
    parser.add_argument("--compare-gradients", type=int, default=0, metavar="N", help=text)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("demo"),
        help="folder for losses.json and losses.png (default %(default)s)",
    )
    arguments = parser.parse_args()
    unknown = [name for name in arguments.attention.split(",") if name not in ATTENTION]
    if unknown:
        parser.error(f"--attention {unknown[0]!r} is not one of {', '.join(ATTENTION)}")
    for name in ("steps", "batch", "context"):
        value = getattr(arguments, name)
        if value is not None and value < 1:
            parser.error(f"--{name} is {value}; it must be a positive integer")
    if torch.device(arguments.device).type == "cuda" and not torch.cuda.is_available():
        parser.error(f"--device {arguments.device}: torch sees no CUDA device")
    lengths = [] if arguments.contexts is None else arguments.contexts.split(",")
    if not all(length.isdecimal() and int(length) > 0 for length in lengths):
        parser.error(f"--contexts is {arguments.contexts!r}; it must be numbers above 0: 2048,8192")
    if lengths and (arguments.context is not None or arguments.batch is not None):
        parser.error("--contexts is given; it takes the place of --context and --batch")
    arguments.contexts = [int(length) for length in lengths]
    longest = [item.split("=") for item in arguments.longest.split(",") if item]
    if not all(len(x) == 2 and x[0] in ATTENTION and x[1].isdecimal() for x in longest):
        parser.error(f"--longest is {arguments.longest!r}; it must be like math=2048")
    arguments.longest = {name: int(length) for name, length in longest}
    return arguments


def train_all(
    arguments: argparse.Namespace,
    preset: Preset,
    text: torch.Tensor,
    device: torch.device,
    skip: bool,
) -> list[Run]:
    """``skip``: names what does not serve the model, or not in this memory, and goes on."""
    runs = []
    for name in arguments.attention.split(","):
        if preset.context > arguments.longest.get(name, preset.context):
            print(f"{name} left out at context {preset.context}: --longest")
            continue
        try:
            run = train(name, preset, text, device, arguments.seed, arguments.compare_gradients)
        except (pantile.UnsupportedError, torch.OutOfMemoryError) as error:
            if not skip:
                raise
            print(f"{name} left out at context {preset.context}: {str(error).splitlines()[0]}")
            continue
        runs.append(run)
    return runs


def print_runs(runs: list[Run], steps: int) -> None:
    print(
        f"\n{'attention':>21} {'first loss':>11} {'last loss':>10} {'tokens/s':>10} "
        f"{'ms/step':>8} {'peak GiB':>9} {'norm':>6}"
    )
    for run in runs:
        print(
            f"{run.attention:>21} {run.losses[0]:>11.4f} {run.losses[-1]:>10.4f} "
            f"{run.tokens_per_second:>10,.0f} {run.step_seconds * 1e3:>8.1f} "
            f"{run.peak_bytes / GIB:>9.2f} {run.gradient_norms[-1]:>6.2f}"
        )
    for run in runs[1:]:
        largest = max(abs(a - b) for a, b in zip(runs[0].losses, run.losses, strict=True))
        print(
            f"largest loss difference, {runs[0].attention} against {run.attention}: "
            f"{largest:.2e} over {steps} steps"
        )
        last = max(1, steps // 10)
        first_mean, mean = (sum(r.losses[-last:]) / last for r in (runs[0], run))
        print(
            f"mean loss of the last {last} steps: {first_mean:.4f} and {mean:.4f}, "
            f"{mean / first_mean - 1:+.2%}"
        )
    for run in runs:
        if run.gradients:
            cosines = [min(found["cosine"]) for found in run.gradients]
            print(f"{run.attention}: least cosine of a layer's gradients {min(cosines):.4f}")


def plot_steps(rounds: dict[int, list[Run]], device_name: str, path: pathlib.Path) -> None:
    """Bars of step time and peak memory, by context and attention."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(run.attention for runs in rounds.values() for run in runs))
    figure, axes = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for axis, title in zip(axes, ("ms a step", "peak memory, GiB"), strict=True):
        for place, name in enumerate(names):
            found = {c: r for c, runs in rounds.items() for r in runs if r.attention == name}
            at = [list(rounds).index(c) + 0.8 * place / len(names) for c in found]
            heights = [
                run.step_seconds * 1e3 if axis is axes[0] else run.peak_bytes / GIB
                for run in found.values()
            ]
            bars = axis.bar(at, heights, 0.8 / len(names), align="edge", label=name)
            axis.bar_label(bars, fmt="%.3g", fontsize=7)
        axis.set_xticks([i + 0.4 for i in range(len(rounds))], [f"{c} tokens" for c in rounds])
        axis.set_title(title, fontsize=10)
    axes[0].legend(fontsize=7)
    figure.suptitle(f"training step of a byte-level GPT, {device_name}", fontsize=10)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    arguments = parse_arguments()
    overrides = {
        key: getattr(arguments, key)
        for key in ("steps", "batch", "context")
        if getattr(arguments, key) is not None
    }
    changes = {"qk_norm": arguments.qk_norm, "outliers": arguments.outliers}
    preset = Preset(**{**asdict(PRESETS[arguments.preset]), **overrides, **changes})
    device = torch.device(arguments.device)
    device_name = (
        torch.cuda.get_device_name(device)
        if device.type == "cuda"
        else (f"CPU, {torch.get_num_threads()} threads")
    )
    text = load_text()
    tokens = preset.batch * preset.context
    rounds: dict[int, list[Run]] = {}
    for context in arguments.contexts or [preset.context]:
        batch = max(1, tokens // context) if arguments.contexts else preset.batch
        changed = replace(preset, context=context, batch=batch)
        out = arguments.out / str(context) if arguments.contexts else arguments.out
        rounds[context] = run_round(arguments, changed, text, device, device_name, out)
    if arguments.contexts:
        write_steps(arguments, rounds, device_name)


def run_round(
    arguments: argparse.Namespace,
    preset: Preset,
    text: torch.Tensor,
    device: torch.device,
    device_name: str,
    out: pathlib.Path,
) -> list[Run]:
    if preset.context >= len(text):
        sys.exit(
            f"--context is {preset.context}; the text has {len(text)} bytes, one more is needed"
        )
    parameters = sum(p.numel() for p in ByteGPT(preset, None).parameters())
    print(
        f"byte-level GPT: {parameters / 1e6:.1f} M parameters, {preset.layers} layers, "
        f"{preset.heads} heads of {preset.width // preset.heads}, context {preset.context}"
    )
    print(
        f"text: {len(text):,} bytes of pydoc_data.topics; {preset.steps} steps of "
        f"{preset.batch} x {preset.context} tokens; {device_name}"
    )
    runs = train_all(arguments, preset, text, device, skip=bool(arguments.contexts))
    print_runs(runs, preset.steps)
    out.mkdir(parents=True, exist_ok=True)
    report = {
        "preset": arguments.preset,
        "device": device_name,
        "torch": torch.__version__,
        "pantile": pantile.__version__,
        "commit": measure.commit(),
        "parameters": parameters,
        **asdict(preset),
        "runs": [asdict(run) for run in runs],
    }
    (out / "losses.json").write_text(json.dumps(report) + "\n")
    plot(runs, arguments.preset, device_name, out / "losses.png")
    print(f"wrote {out / 'losses.json'} and {out / 'losses.png'}")
    return runs


def write_steps(
    arguments: argparse.Namespace, rounds: dict[int, list[Run]], device_name: str
) -> None:
    records = [
        {
            "context": context,
            "attention": run.attention,
            "step_seconds": run.step_seconds,
            "peak_bytes": run.peak_bytes,
            "last_loss": run.losses[-1],
            "largest_gradient_norm": max(run.gradient_norms),
        }
        for context, runs in rounds.items()
        for run in runs
    ]
    report = {"device": device_name, "commit": measure.commit(), "steps": records}
    (arguments.out / "steps.json").write_text(json.dumps(report) + "\n")
    plot_steps(rounds, device_name, arguments.out / "steps.png")
    print(f"wrote {arguments.out / 'steps.json'} and {arguments.out / 'steps.png'}")


if __name__ == "__main__":
    main()
