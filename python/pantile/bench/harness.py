"""What the scripts of ``benchmarks/`` share: arguments, the header of a results file, contenders
that may be absent, and lines that are printed and written as they come."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Callable, Iterable

import torch

from pantile.bench import figures, measure
from pantile.bench.measure import Contender
from pantile.bench.peers import first_line

RESULTS = pathlib.Path("benchmarks/results")
OURS_REFUSES = (ValueError, NotImplementedError, RuntimeError)


def parser(doc: str | None, out: str = "") -> argparse.ArgumentParser:
    """With ``--out``, whose default is a file ``out`` in benchmarks/results, if one is named."""
    form = argparse.RawDescriptionHelpFormatter
    found = argparse.ArgumentParser(description=doc, formatter_class=form)
    path = RESULTS / out if out else None
    text = "write the results here, as JSON lines" + (" (default: %(default)s)" if out else "")
    found.add_argument("--out", type=pathlib.Path, default=path, help=text)
    return found


def words(text: str) -> list[str]:
    return [word for word in text.split(",") if word]


def numbers(text: str) -> list[int]:
    return [int(word) for word in words(text)]


def require_gpu() -> None:
    if not torch.cuda.is_available():
        sys.exit(f"{pathlib.Path(sys.argv[0]).name} needs a CUDA GPU, and torch sees none")


def header(on: str = "cuda", **more) -> dict:
    """The first line of a results file: what was measured, where and how."""
    line: dict = {"kind": "run", "commit": measure.commit()}
    line["commands"] = [measure.command()]
    line |= {"torch": torch.__version__, "device": "cpu"}
    if on == "cuda":
        line |= {"device": torch.cuda.get_device_name(), "state_before": measure.gpu_state()}
        line |= {"cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    return line | more


Maker = Callable[[], "Contender | list[Contender] | str"]


def running(
    makers: dict[str, Maker], absent: dict[str, str], refuses: tuple = (Exception,)
) -> list[Contender]:
    """The contenders that can be made. Why the others cannot goes into ``absent``; ``refuses``:
    errors that are such a reason. Peers raise types of their own."""
    found: list[Contender] = []
    for name, make in makers.items():
        try:
            made = make()
        except refuses as error:
            made = first_line(error)
        if isinstance(made, str):
            absent[name] = made
        else:
            found += made if isinstance(made, list) else [made]
    return found


def medians(contenders: list[Contender], rounds: int = 5, round_ms: float = 8.0) -> dict:
    """Milliseconds of each, interleaved."""
    measure.interleave(contenders, rounds=rounds, round_ms=round_ms)
    return {c.name: round(c.median(), 5) for c in contenders}


def quotient(a: float | None, b: float | None, digits: int = 3) -> float | None:
    """None where a time is missing."""
    return round(a / b, digits) if a and b else None


def emit(
    out: pathlib.Path | None, lines: Iterable[dict], show: Callable[[dict], str] = json.dumps
) -> list[dict]:
    """Prints and writes each line as it comes; a run that ends early leaves what it measured."""
    kept: list[dict] = []

    def shown():
        for line in lines:
            kept.append(line)
            if text := show(line):
                print(text, flush=True)
            yield line

    if out is None:
        return list(shown())
    figures.write(out, shown())
    print(f"wrote {out}")
    return kept
