#!/usr/bin/env python3
"""Measures the results files anew: the steps of benchmarks/results/measurements.toml, in its order.

    python tools/measure.py --list                      # steps, seconds, what each makes
    python tools/measure.py --out build/measured --wheel dist/*.whl --budget 570
    python tools/measure.py --out build/measured --budget 570      # goes on with what is left
    python tools/measure.py --accept build/measured     # into benchmarks/results, docs and tests

Results go to the folder --out first, with a log of each step and a line of `steps.jsonl`: status,
exit statuses, seconds. A step runs in process groups of its own under its own timeout, and one that
fails stops no other. A step that is done in the folder is skipped, so that a run that ended early
goes on with the same command. All steps of a folder are of one commit and one library. --pack keeps
an archive of the folder up to date, for a machine that hands back few files; --accept takes it too.

Steps run one after the other. Those of correctness that allow it run --jobs at a time, and nothing
runs beside a timing. The exit status is 1 when a chosen step has no result.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import hashlib
import importlib
import importlib.util
import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from dataclasses import dataclass, field

import results_docs
import verification
from results_docs import tomllib

ROOT = verification.ROOT
LIST = results_docs.RESULTS / "measurements.toml"
MACHINES = ("h200", "h200-more", "h200-x2", "cpu")
PROGRAMS = {
    "python": [sys.executable],
    "pytest": [sys.executable, "-m", "pytest"],
    "torchrun": [sys.executable, "-m", "torch.distributed.run"],
}
GRACE = 15.0  # seconds from SIGINT, which lets a program keep what it has, to SIGKILL
DONE = "done"


@dataclass(frozen=True)
class Step:
    """See the head of measurements.toml."""

    name: str
    file: str
    commands: list[str]
    seconds: float
    about: bool = False
    timeout: float = 0.0
    machine: str = MACHINES[0]
    needs: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    statuses: list[int] = field(default_factory=lambda: [0])
    parts: int = 1
    shares: bool = False
    adds: bool = False
    begins: bool = False
    made: str = "{out}"
    then: list[str] = field(default_factory=lambda: ["make docs"])

    def limit(self) -> float:
        return self.timeout or max(60.0, 2 * self.seconds)

    def log(self) -> str:
        return re.sub(r"\W+", "-", self.name) + ".log"

    def filled(self, text: str, folder: pathlib.Path, part: int = 1) -> str:
        out = folder / pathlib.PurePath(self.file).name
        named = {"out": out, "dir": folder, "part": f"{part}/{self.parts}"}
        return re.sub(r"\{(out|dir|part)\}", lambda found: str(named[found[1]]), text)

    def words(self, command: str, folder: pathlib.Path, part: int = 1) -> list[str]:
        program, *rest = shlex.split(command.removeprefix("-"))
        rest = [self.filled(word, folder, part) for word in rest]
        return [*PROGRAMS.get(program, [program]), *rest]

    def result(self, folder: pathlib.Path) -> pathlib.Path:
        return pathlib.Path(self.filled(self.made, folder))


def read_list(path: pathlib.Path = LIST) -> tuple[list[Step], dict[str, str], dict[str, str]]:
    """Steps, libraries of peers by their variable, and historical files with their reason."""
    found = tomllib.loads(path.read_text())
    steps = [Step(**step) for step in found["step"]]
    for step in steps:
        if step.machine not in MACHINES:
            raise ValueError(f"{step.name}: machine {step.machine!r} is none of {MACHINES}")
        for need in step.needs:
            if need not in NEEDS:
                raise ValueError(f"{step.name}: need {need!r} is none of {', '.join(NEEDS)}")
    names = [step.name for step in steps]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"steps of the same name: {', '.join(sorted(twice))}")
    return steps, found.get("peers", {}), found.get("historical", {})


# ---- what a step needs


def _gpus(count: int) -> str:
    import torch

    there = torch.cuda.device_count()
    return "" if there >= count else f"{count} CUDA GPUs are needed, torch sees {there}"


def _built(option: str) -> str:
    import pantile

    there = pantile.build_info()[option]
    return "" if there else f"the library is built without PANTILE_{option.upper()}=ON"


def _program(name: str) -> str:
    return "" if shutil.which(name) else f"{name} is not on the PATH"


def _module(name: str) -> str:
    return "" if importlib.util.find_spec(name) else f"Python has no module {name}"


def _library(variable: str) -> str:
    path = os.environ.get(variable, "")
    if not path:
        return f"{variable} is not set"
    return "" if os.path.exists(path) else f"{variable} names {path}, which is not there"


NEEDS = {
    **{f"{n} GPU{'s' * (n > 1)}": lambda n=n: _gpus(n) for n in (1, 2)},
    **{name: lambda name=name: _built(name) for name in ("experiments", "ampere_on_hopper")},
    **{name: lambda name=name: _program(name) for name in ("ncu", "nvcc", "compute-sanitizer")},
    **{name: lambda name=name: _library(name) for name in ("FA3_SO", "DEW3_SO")},
    "xdist": lambda: _module("xdist"),
    "tqdm": lambda: _module("tqdm"),
    "cudnn-frontend": lambda: _module("cudnn"),
}


def lacks(step: Step) -> str:
    return "; ".join(filter(None, (NEEDS[need]() for need in step.needs)))


# ---- processes


class Processes:
    """Commands that run at once, each in a process group of its own, which ends whole."""

    def __init__(self) -> None:
        self.living: set[subprocess.Popen] = set()

    def interrupt(self) -> None:
        for process in list(self.living):
            process.send_signal(signal.SIGINT)

    def run(self, commands: list[list[str]], env, log, until: float) -> list[int | None]:
        """Exit statuses; None where the time was over."""
        mine: list[subprocess.Popen] = []
        try:
            for words in commands:
                process = subprocess.Popen(
                    words, cwd=ROOT, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                    start_new_session=True,
                )  # fmt: skip
                mine.append(process)
                self.living.add(process)
            found = [self._status(process, until) for process in mine]
            for process, status in zip(mine, found, strict=True):
                if status is None:
                    process.send_signal(signal.SIGINT)
            ends = time.monotonic() + GRACE
            for process in mine:
                self._status(process, ends)
            return found
        finally:
            for process in mine:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                self.living.discard(process)

    @staticmethod
    def _status(process: subprocess.Popen, until: float) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(max(0.0, until - time.monotonic()))
        return None


def heed_interrupts() -> None:
    """A shell starts what runs in its background deaf to SIGINT, and programs that are started here
    would inherit that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def run_commands(
    step: Step, folder: pathlib.Path, left: float, processes: Processes
) -> tuple[str, list]:
    """(status, exit statuses): of each command, None where its time was over."""
    env = os.environ | {name: step.filled(text, folder) for name, text in step.env.items()}
    env["PYTHONUNBUFFERED"] = "1"
    statuses: list[int | None] = []
    ends = time.monotonic() + left
    with (folder / step.log()).open("w") as log:
        for command in step.commands:
            copies = range(1, step.parts + 1) if "{part}" in command else (1,)
            all_words = [step.words(command, folder, part) for part in copies]
            log.writelines(f"$ {shlex.join(words)}\n" for words in all_words)
            log.flush()
            until = min(ends, time.monotonic() + step.limit())
            found = processes.run(all_words, env, log, until)
            statuses += found
            if command.startswith("-"):
                continue
            if None in found:
                return "timed out", statuses
            if not set(found) <= set(step.statuses):
                return "failed", statuses
    return DONE, statuses


# ---- a run


def digest(path: pathlib.Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""


class Run:
    """The steps of one folder."""

    def __init__(self, folder: pathlib.Path, facts: dict[str, str], budget: float, pack) -> None:
        self.folder, self.facts, self.pack = folder, facts, pack
        self.ends = time.monotonic() + budget
        self.lock = threading.Lock()
        self.processes = Processes()
        folder.mkdir(parents=True, exist_ok=True)
        self.done = {r["step"] for r in records_of(folder).values() if r["status"] == DONE}

    def note(self, step: Step, status: str, **more) -> dict:
        record = {"step": step.name, "status": status, **more, **self.facts}
        with self.lock:
            with (self.folder / "steps.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
            if self.pack:
                write_archive(self.folder, self.pack)
            reason = f": {record['reason']}" if "reason" in record else ""
            print(
                f"{status:<10} {record.get('seconds', 0):7.1f} s  {step.name}{reason}", flush=True
            )
        return record

    def run(self, step: Step) -> bool:
        """Whether the step has a result, now or from before."""
        if step.name in self.done:
            return True
        left = self.ends - time.monotonic()
        if step.seconds > left:
            print(f"{'no time':<10} {'':9}  {step.name}: {step.seconds:g} s, {left:.0f} s are left")
            return False
        if reason := lacks(step):
            self.note(step, "missing", reason=reason)
            return False
        result, more = step.result(self.folder), {}
        if not step.adds:
            result.unlink(missing_ok=True)
        if step.begins:
            more["began_as"] = digest(ROOT / step.file)
            if not result.exists():
                shutil.copyfile(ROOT / step.file, result)
        started = time.monotonic()
        status, statuses = run_commands(step, self.folder, left, self.processes)
        if status == DONE and not result.exists():
            status, more["reason"] = "failed", f"it made no {result.name}"
        more |= {"statuses": statuses, "seconds": round(time.monotonic() - started, 1)}
        if status != DONE:
            more.setdefault("reason", f"exit {statuses[-1]}, see {step.log()}")
        self.note(step, status, **more)
        return status == DONE

    def run_all(self, steps: list[Step], jobs: int) -> list[str]:
        """Names of the steps without a result."""
        heed_interrupts()
        found: dict[str, bool] = {}
        at = 0
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            while at < len(steps):
                end = at + 1
                while steps[at].shares and end < len(steps) and steps[end].shares:
                    end += 1
                some = steps[at:end]
                try:
                    found |= zip([s.name for s in some], pool.map(self.run, some), strict=True)
                except KeyboardInterrupt:
                    self.ends = 0.0  # what waits in the pool does not start
                    self.processes.interrupt()
                    raise
                at = end
        return [name for name, ok in found.items() if not ok]


def records_of(folder: pathlib.Path) -> dict[str, dict]:
    """The last record of each step."""
    path = folder / "steps.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["step"]: record for record in map(json.loads, lines)}


def write_archive(folder: pathlib.Path, path: pathlib.Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(path.name + ".new")
    with tarfile.open(new, "w:gz") as archive:
        for item in sorted(folder.iterdir()):
            archive.add(item, item.name)
    new.replace(path)


def facts_here() -> dict[str, str]:
    """What all steps of a folder have in common."""
    found = {"commit": verification.commit(), "library": verification.library_hash()}
    if found["commit"] == "unknown":
        raise ValueError("the commit is unknown here: set the environment variable PANTILE_COMMIT")
    return found


def refuse_other_build(folder: pathlib.Path, facts: dict[str, str]) -> None:
    for record in records_of(folder).values():
        for name, value in facts.items():
            if record[name] != value:
                raise ValueError(
                    f"--out {folder}: {record['step']!r} there is of {name} {record[name]}, this "
                    f"run of {value}; name another folder"
                )


def install(wheel: pathlib.Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    command += ["--force-reinstall", "--disable-pip-version-check", str(wheel)]
    subprocess.run(command, check=True, env=os.environ | {"PIP_BREAK_SYSTEM_PACKAGES": "1"})
    importlib.invalidate_caches()


# ---- accepting


def counted(path: pathlib.Path) -> int:
    """Records of a results file but its headers; 1 of a JSON file. ValueError: it is damaged."""
    text = path.read_text()
    if path.suffix != ".jsonl":
        json.loads(text)
        return 1
    lines = [json.loads(line) for line in text.splitlines()]
    if any(line.get("interrupted") or "stopped" in line for line in lines):
        raise ValueError("its run was interrupted")
    return sum(line.get("kind") != "run" for line in lines)


def why_not(step: Step, record: dict, made: pathlib.Path, target: pathlib.Path, fewer: bool) -> str:
    """Why a result cannot take the place of the committed file."""
    try:
        new = counted(made)
    except (OSError, ValueError) as error:
        return f"{made.name}: {error}"
    if "began_as" in record and record["began_as"] != digest(target) != digest(made):
        return f"it began as another version of {step.file}; measure it again"
    old = counted(target) if target.suffix == ".jsonl" and target.exists() else new
    if new < old and not fewer:
        return f"{new} records, the committed file has {old}: --fewer takes it all the same"
    return "" if new else "it has no records"


def accept(folder: pathlib.Path, steps: list[Step], fewer: bool, root: pathlib.Path = ROOT) -> int:
    """Copies what is done into the tree, and says what was not and what to run next. Of the steps
    that add to a file, those that were not run are named."""
    records, follow, refused = records_of(folder), {}, 0
    for step in steps:
        record = records.get(step.name)
        if record is None or record["status"] != DONE:
            what = "not run" if record is None else f"{record['status']}: {record['reason']}"
            print(f"{'left out':<10} {step.name}: {what}")
            continue
        made, target = step.result(folder), root / step.file
        if reason := why_not(step, record, made, target, fewer):
            refused += 1
            print(f"{'refused':<10} {step.name}: {reason}")
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(made, target)
        follow |= dict.fromkeys(step.then)
        notes = [] if set(record["statuses"]) <= {0} else [f"exit {record['statuses']}"]
        if not 0.75 < record["seconds"] / step.seconds < 1.25:
            notes.append(f"took {record['seconds']:.0f} s, {step.seconds:g} are listed")
        print(f"{'accepted':<10} {step.name}: {', '.join([step.file, *notes])}")
    if follow:
        print("next: " + "; ".join(follow))
    return int(bool(refused) or not follow)


@contextlib.contextmanager
def opened(path: pathlib.Path):
    """The folder of a run, or its archive as one."""
    if path.is_dir():
        yield path
        return
    if not path.exists():
        raise ValueError(f"--accept {path}: it is not there")
    with tempfile.TemporaryDirectory() as name, tarfile.open(path) as archive:
        archive.extractall(name, filter="data")
        yield pathlib.Path(name)


# ---- the command


def print_list(steps: list[Step]) -> None:
    for step in steps:
        texts = (step.machine, "+".join(step.needs) or "-", step.file)
        about = "~" if step.about else " "
        print(
            f"{about}{step.seconds:5g} s  {step.name:<34} {texts[0]:<10} {texts[2]}  [{texts[1]}]"
        )
    for machine in MACHINES:
        some = [step.seconds for step in steps if step.machine == machine]
        if some:
            print(f"{sum(some):6g} s  {len(some)} steps of {machine}")


def print_commands(steps: list[Step], folder: pathlib.Path) -> None:
    for step in steps:
        reason = lacks(step)
        print(f"# {step.name}: {step.seconds:g} s" + (f"; missing: {reason}" if reason else ""))
        env = [f"{name}={shlex.quote(text)}" for name, text in step.env.items()]
        for command in step.commands:
            print(" ".join([*env, shlex.join(step.words(command, folder))]))


def main(words: list[str] | None = None) -> int:
    form = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=form)
    add = parser.add_argument
    add("--out", type=pathlib.Path, metavar="DIR", help="measure, into this folder")
    add("--accept", type=pathlib.Path, metavar="DIR", help="copy the results of a run into place")
    add("--list", action="store_true", help="the steps with their seconds, and nothing else")
    add("--dry-run", action="store_true", help="the commands, and nothing else")
    add("--machine", choices=MACHINES, help="whose steps (default: h200; of --list, --accept all)")
    add("--only", metavar="REGEX", default="", help="steps whose name or file matches")
    add("--budget", type=float, metavar="SECONDS", default=1500.0, help="default: %(default)s")
    add("--wheel", type=pathlib.Path, nargs="+", default=[], help="installed first, as it is")
    add("--pack", type=pathlib.Path, metavar="FILE", help=".tar.gz of --out, after each step")
    add("--jobs", type=int, default=2, help="steps at a time that allow it (default: %(default)s)")
    add("--fewer", action="store_true", help="accept a file with fewer records than before")
    given = parser.parse_args(words)
    if given.jobs < 1:
        parser.error(f"--jobs is {given.jobs}; it must be at least 1")
    steps, peers, _ = read_list()
    machine = given.machine or ("" if given.list or given.accept else MACHINES[0])
    steps = [s for s in steps if machine in ("", s.machine)]
    steps = [s for s in steps if re.search(given.only, s.name) or re.search(given.only, s.file)]
    if not steps:
        parser.error(f"--only {given.only!r}: no step of {machine or 'any machine'} matches")
    for name, path in peers.items():
        if (ROOT / path).exists():
            os.environ.setdefault(name, str(ROOT / path))
    if given.list:
        print_list(steps)
        return 0
    if given.dry_run:
        print_commands(steps, given.out or pathlib.Path("DIR"))
        return 0
    try:
        if given.accept:
            with opened(given.accept) as folder:
                return accept(folder, steps, given.fewer)
        if not given.out:
            parser.error("--out, --accept, --list or --dry-run is needed")
        for wheel in given.wheel:
            install(wheel)
        facts = facts_here()
        refuse_other_build(given.out, facts)
        # A shell that starts a job in the background has it ignore SIGINT, and so its children.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        run = Run(given.out.resolve(), facts, given.budget, given.pack)
        without = run.run_all(steps, given.jobs)
    except ValueError as error:
        parser.error(str(error))
    if without:
        print(f"without a result: {', '.join(without)}")
    return int(bool(without))


if __name__ == "__main__":
    sys.exit(main())
