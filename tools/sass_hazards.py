"""A fault of ptxas 13.0 in a disassembly: a register that is read before it was written.

    CS2R R18, SRZ                        # R18 = 0, after some cycles
    @!P1 IMAD.WIDE R18, R54, R57, RZ     # R18 = a product, if not P1
    IADD3 R63, P1, P6, R18, R53, R63     # five cycles after CS2R

Where P1 holds, the sum needs the 0 of CS2R. ptxas gave it the time that the product takes, which is
less, and the sum took what R18 held before. A kernel stored to wild addresses because of it.
Whatever follows CS2R directly gets at least 16 cycles. Behind a predicated write of another kind
reads after 8 cycles were found, in kernels whose results are right; fewer are reported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

CYCLES = 8
WINDOW = 16  # instructions that are looked at
LINE = re.compile(
    r"/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>[^;]+);\s+/\* 0x[0-9a-f]{16} \*/\s*\n"
    r"\s*/\* 0x(?P<control>[0-9a-f]{16}) \*/"
)
STORES = ("ST", "RED", "ATOM", "HGMMA", "QGMMA", "BAR")


def _registers(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\bR(\d+)\b", text)}


def _parts(text: str) -> tuple[str, str, set[int], set[int]]:
    """(predicate, opcode, registers written, registers read); wide ones by their first number."""
    predicate, body = re.fullmatch(r"(@!?U?P\w+)?\s*(.*)", text.strip(), re.DOTALL).groups()
    opcode, _, operands = body.partition(" ")
    target, _, sources = operands.partition(",")
    if opcode.startswith(STORES):
        return predicate or "", opcode, set(), _registers(operands)
    return predicate or "", opcode, _registers(target), _registers(sources)


def early_reads(text: str) -> Iterator[str]:
    """Of a function as ``cuobjdump -sass`` prints it: a line for each suspicious read."""
    lines = [
        (match["address"], " ".join(match["text"].split()), int(match["control"], 16) >> 41 & 15)
        for match in LINE.finditer(text)
    ]
    for at, (address, zero, stall) in enumerate(lines):
        if not (found := re.fullmatch(r"CS2R R(\d+), SRZ", zero)):
            continue
        pending = {int(found[1]), int(found[1]) + 1}
        guards: set[str] = set()  # predicates of the writes in between
        cycles = max(stall, 1)
        for where, line, more in lines[at + 1 : at + WINDOW]:
            predicate, opcode, written, read = _parts(line)
            if cycles >= CYCLES or opcode.startswith(("BRA", "EXIT", "RET")):
                break
            if read & pending and guards and guards != {predicate}:
                yield f"{where}: {line} reads after {cycles} cycles what {address}: {zero} writes"
                break
            if written & pending:
                if not predicate:
                    break
                guards.add(predicate)
            cycles += max(more, 1)
