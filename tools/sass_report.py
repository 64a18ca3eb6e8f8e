#!/usr/bin/env python3
"""What the machine code of every kernel looks like: matrix instructions and hot-loop schedules.

For each row of cuda/kernels.def it disassembles the object (cuobjdump and nvdisasm, PyPI packages
nvidia-cuda-cuobjdump and nvidia-cuda-nvdisasm) and checks

* that nothing is read before it was written (sass_hazards.py);
* rules of the family: a hopper kernel uses wgmma (HGMMA, QGMMA) and TMA (UTMALDG) and no HMMA; an
  ampere kernel uses HMMA (of e4m3: QMMA), LDSM and LDGSTS; decode kernels of both use HMMA;
* the hot loops, which are the innermost loops that hold a matrix instruction: local memory
  accesses, R2UR (descriptors that ptxas could not keep uniform), and the schedule, that is the
  order of MMA batches, waits and exponentials. ptxas likes to hoist a wait above the exponentials,
  and then the softmax no longer overlaps its own P V product;

and compares the figures with tools/kernel_budget.json.
"""

from __future__ import annotations

import bisect
import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import repeat

import kernel_budget as budget
import sass_hazards

MATRIX = ("HGMMA", "QGMMA", "HMMA", "QMMA")
RULES = {  # family -> (opcodes of which one must be there, per group; opcodes that must not)
    "hopper": ((("HGMMA", "QGMMA"), ("UTMALDG", "UBLKCP")), ("HMMA",)),
    "ampere": ((("HMMA",), ("LDSM",), ("LDGSTS",)), ("HGMMA", "QGMMA")),
    "ampere_fp8": ((("QMMA",), ("LDSM",), ("LDGSTS",)), ("HGMMA", "QGMMA", "HMMA")),
    "decode": ((("HMMA",),), ("HGMMA", "QGMMA")),  # of both: one source
}
ARCH = {"hopper": "sm_90a", "ampere": "sm_80", "ampere_fp8": "sm_89"}


@dataclass
class Instruction:
    address: int
    predicate: str
    opcode: str
    operands: str

    @property
    def target(self) -> int | None:
        """Where a branch goes."""
        if self.opcode.split(".")[0] in ("BRA", "BRX", "JMP"):
            found = re.search(r"0x([0-9a-f]+)", self.operands)
            return int(found[1], 16) if found else None
        return None

    @property
    def ends_flow(self) -> bool:
        """Whether the next instruction is reached only by a branch."""
        always = self.predicate in ("", "@PT", "@UPT")
        return always and self.opcode.split(".")[0] in ("BRA", "BRX", "JMP", "EXIT", "RET")

    def uses_local_memory(self) -> bool:
        return self.opcode.startswith(("LDL", "STL"))

    def is_matrix(self) -> bool:
        return self.opcode.startswith(MATRIX)


@dataclass
class Function:
    name: str
    code: list[Instruction]
    symbol: str = ""  # mangled
    loops: list[list[Instruction]] = field(default_factory=list)
    early_reads: list[str] = field(default_factory=list)  # a fault of ptxas: sass_hazards.py

    def count(self, *opcodes: str) -> int:
        return sum(i.opcode.startswith(opcodes) for i in self.code)

    def highest_register(self) -> int:
        numbers = (int(r) for i in self.code for r in re.findall(r"\bR(\d+)\b", i.operands))
        return max(numbers, default=0)


def disassemble(path: pathlib.Path, arch: str) -> list[Function]:
    wheel = pathlib.Path(sysconfig.get_path("purelib"), "nvidia", "cu13", "bin")
    environment = dict(os.environ, PATH=f"{wheel}{os.pathsep}{os.environ['PATH']}")
    for program in ("cuobjdump", "nvdisasm"):
        if not shutil.which(program, path=environment["PATH"]):
            raise SystemExit(f"{program} not found: pip install nvidia-cuda-{program}")
    text = subprocess.run(
        ["cuobjdump", "--dump-sass", "-arch", arch, str(path)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    functions = []
    for part in text.split("Function : ")[1:]:
        name, body = part.split("\n", 1)
        code = [
            Instruction(int(address, 16), predicate or "", opcode, operands)
            for address, predicate, opcode, operands in re.findall(
                r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+)?\s*([A-Z][\w.]*)([^;]*);", body
            )
        ]
        function = Function(budget.kernel_name(name.strip()), code, name.strip())
        function.early_reads = list(sass_hazards.early_reads(body))
        functions.append(function)
    for function in functions:
        function.loops = hot_loops(function.code)
    if not functions:
        raise SystemExit(f"{path}: no code for {arch}")
    return functions


def basic_blocks(code: list[Instruction]) -> tuple[list[list[Instruction]], list[set[int]]]:
    """Straight pieces of code and, for each, the pieces that may follow it."""
    starts = {code[0].address}
    for index, instruction in enumerate(code):
        if instruction.target is not None:
            starts.add(instruction.target)
        if (instruction.target is not None or instruction.ends_flow) and index + 1 < len(code):
            starts.add(code[index + 1].address)
    ordered = sorted(starts)
    blocks: list[list[Instruction]] = [[] for _ in ordered]
    for instruction in code:
        blocks[bisect.bisect_right(ordered, instruction.address) - 1].append(instruction)
    index_of = {start: index for index, start in enumerate(ordered)}
    follows: list[set[int]] = []
    for index, block in enumerate(blocks):
        last = block[-1]
        after = set() if last.ends_flow or index + 1 == len(blocks) else {index + 1}
        if last.target is not None:
            after.add(index_of[last.target])
        follows.append(after)
    return blocks, follows


def dominators(follows: list[set[int]]) -> list[set[int]]:
    """For each reachable block, the blocks that every way to it passes; empty if unreachable."""
    before: list[set[int]] = [set() for _ in follows]
    for block, after in enumerate(follows):
        for next_block in after:
            before[next_block].add(block)
    result: list[set[int]] = [set() for _ in follows]
    result[0] = {0}
    changed = True
    while changed:
        changed = False
        for block in range(1, len(follows)):
            ways = [result[b] for b in before[block] if result[b]]
            if ways:
                now = set.intersection(*ways) | {block}
                changed |= now != result[block]
                result[block] = now
    return result


def hot_loops(code: list[Instruction]) -> list[list[Instruction]]:
    """The innermost natural loops that hold a matrix instruction, in order of address. Retry loops
    of barrier waits, which ptxas puts behind the function's end, belong to the loop they serve."""
    if not code:
        return []
    blocks, follows = basic_blocks(code)
    dominated_by = dominators(follows)
    bodies: dict[int, set[int]] = {}  # loop head -> blocks
    for tail, after in enumerate(follows):
        for head in after & dominated_by[tail]:
            body = bodies.setdefault(head, {head})
            work = [tail]
            while work:
                block = work.pop()
                if block not in body:
                    body.add(block)
                    work += [b for b, next_blocks in enumerate(follows) if block in next_blocks]
    holding = [b for b in bodies.values() if any(i.is_matrix() for x in b for i in blocks[x])]
    inner = [b for b in holding if not any(other < b for other in holding)]
    return [
        sorted((i for x in body for i in blocks[x]), key=lambda i: i.address)
        for body in sorted(inner, key=min)
    ]


def schedule(loop: list[Instruction]) -> str:
    """The loop in words: "mma 8, wait 1, ex2 33, wait 0, ex2 31"."""
    words: list[list] = []
    for instruction in loop:
        if instruction.is_matrix():
            word = "mma"
        elif instruction.opcode.startswith("MUFU.EX2"):
            word = "ex2"
        elif instruction.opcode.startswith("WARPGROUP.DEPBAR"):
            words.append([f"wait {int(instruction.operands.split(',')[-1].strip(), 16)}", 0])
            continue
        else:
            continue
        if words and words[-1][0] == word:
            words[-1][1] += 1
        else:
            words.append([word, 1])
    return ", ".join(word if count == 0 else f"{word} {count}" for word, count in words)


def figures(function: Function) -> budget.Figures:
    return {
        "highest_register": function.highest_register(),
        "local_memory": sum(i.uses_local_memory() for i in function.code),
        "loops": [
            {
                "schedule": schedule(loop),
                "local_memory": sum(i.uses_local_memory() for i in loop),
                "r2ur": sum(i.opcode.startswith("R2UR") for i in loop),
                "instructions": len(loop),
            }
            for loop in function.loops
        ],
    }


def group_of(row: str) -> str:
    """The family of a row or file; FP8 kernels of the Ampere family are for other targets."""
    family, pass_, dtype = row.split("_")[:3]
    is_fp8 = dtype == "e4m3" or pass_ == "quantize"
    return "ampere_fp8" if family == "ampere" and is_fp8 else family


def family_errors(row: str, functions: list[Function]) -> list[str]:
    pass_ = row.split("_")[1]
    if pass_ in ("quantize", "append"):
        return []  # copies, without a matrix instruction
    required, forbidden = RULES["decode" if pass_ == "decode" else group_of(row)]
    errors = [
        f"{row}: no {' or '.join(group)}"
        for group in required
        if not any(f.count(*group) for f in functions)
    ]
    errors += [f"{row}: {op} in it" for op in forbidden if any(f.count(op) for f in functions)]
    if pass_ != "decode" and not any(f.loops for f in functions):
        errors.append(f"{row}: no loop with a matrix instruction")
    return errors


def worse(found: budget.Figures, allowed: budget.Figures) -> list[str]:
    problems = []
    if found["local_memory"] > allowed["local_memory"]:
        problems.append(f"LDL/STL {found['local_memory']}, budget {allowed['local_memory']}")
    if len(found["loops"]) != len(allowed["loops"]):
        return [*problems, f"{len(found['loops'])} hot loops, budget {len(allowed['loops'])}"]
    for number, (have, may) in enumerate(zip(found["loops"], allowed["loops"], strict=True)):
        for name in ("local_memory", "r2ur"):
            if have[name] > may[name]:
                problems.append(f"loop {number}: {name} {have[name]}, budget {may[name]}")
        if have["schedule"] != may["schedule"]:
            problems.append(f"loop {number}: {have['schedule']}; budget: {may['schedule']}")
    return problems


def worse_elsewhere(_found: budget.Figures, _allowed: budget.Figures) -> list[str]:
    """Schedules of another nvcc are only printed; the family's rules hold for all."""
    return []


def print_kernel(key: str, f: budget.Figures) -> None:
    print(f"{key}: highest register {f['highest_register']}, LDL/STL {f['local_memory']}")
    for loop in f["loops"]:
        print(
            f"    loop of {loop['instructions']}, R2UR {loop['r2ur']}, LDL/STL "
            f"{loop['local_memory']}: {loop['schedule']}"
        )


def read_file(build: pathlib.Path, file: str) -> tuple[dict[str, budget.Figures], list[str]]:
    """The figures of the rows that share a generated file, and what is wrong with them."""
    objects = list(build.rglob(f"{file}.cu.o"))
    if len(objects) != 1:
        raise SystemExit(f"{file}: {len(objects)} objects under {build}, expected one")
    functions = disassemble(objects[0], ARCH[group_of(file)])
    found: dict[str, budget.Figures] = {}
    errors = [f"{file}: {f.name}: {line}" for f in functions for line in f.early_reads]
    for row in (row for row in budget.row_names(build) if budget.file_of(row) == file):
        mine = [f for f in functions if budget.row_of(file, f.symbol) == row]
        errors += family_errors(row, mine)
        for function in mine:
            if not function.loops:
                continue  # row kernels around the main one; kernel_report.py sees their spills
            key = f"{row}/{function.name}"
            while key in found:  # instances of one template within a row
                key += "+"
            found[key] = figures(function)
    return found, errors


def read_and_print(build: pathlib.Path) -> tuple[dict[str, budget.Figures], list[str]]:
    found: dict[str, budget.Figures] = {}
    errors: list[str] = []
    files = dict.fromkeys(map(budget.file_of, budget.row_names(build)))
    # Processes, not threads: reading the text takes longer than cuobjdump.
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for of_file, wrong in pool.map(read_file, repeat(build), files):
            for key, of_kernel in of_file.items():
                print_kernel(key, of_kernel)
            found |= of_file
            errors += wrong
    return found, errors


if __name__ == "__main__":
    sys.exit(budget.report("sass", __doc__, read_and_print, worse, worse_elsewhere))
