"""sass_report.py: hot loops and their schedules, on small invented listings."""

import sass_report
from sass_report import Function, Instruction

# A loop from 0x20 to 0x90 inside a tile loop from 0x10 to 0xa0. The barrier wait at 0x30 retries
# behind the end of the function, at 0xc0, and comes back.
LISTING = """\
0000  S2R R0
0010  MOV R1, R0
0020  HGMMA.64x64x16.F32 R24
0030  SYNCS.PHASECHK P1
0040  @!P1 BRA 0xc0
0050  WARPGROUP.DEPBAR.LE gsb0, 0x1
0060  MUFU.EX2 R7, R7
0070  WARPGROUP.DEPBAR.LE gsb0, 0x0
0080  R2UR UR4, R9
0090  @P0 BRA 0x20
00a0  @P2 BRA 0x10
00b0  EXIT
00c0  STL [R1], R5
00d0  @!P1 BRA 0xc0
00e0  BRA 0x50
"""


def parse(listing: str) -> list[Instruction]:
    code = []
    for line in listing.splitlines():
        address, *words = line.split()
        predicate = words.pop(0) if words[0].startswith("@") else ""
        code.append(Instruction(int(address, 16), predicate, words[0], " ".join(words[1:])))
    return code


def kernel(listing: str = LISTING) -> Function:
    function = Function("forward", parse(listing))
    function.loops = sass_report.hot_loops(function.code)
    return function


def test_the_hot_loop_is_the_innermost_with_its_retries():
    (loop,) = kernel().loops
    assert [i.address for i in loop] == [0x20, 0x30, 0x40, 0x50, 0x60, 0x70, 0x80, 0x90, 0xC0, 0xD0,
                                         0xE0]  # fmt: skip


def test_figures():
    assert sass_report.figures(kernel()) == {
        "highest_register": 24,
        "local_memory": 1,
        "loops": [
            {
                "schedule": "mma 1, wait 1, ex2 1, wait 0",
                "local_memory": 1,
                "r2ur": 1,
                "instructions": 11,
            }
        ],
    }


def test_a_wait_hoisted_over_the_exponentials_is_seen():
    lines = LISTING.replace("MUFU.EX2 R7, R7", "X").replace("WARPGROUP.DEPBAR.LE gsb0, 0x0", "Y")
    hoisted = lines.replace("X", "WARPGROUP.DEPBAR.LE gsb0, 0x0").replace("Y", "MUFU.EX2 R7, R7")
    have, may = sass_report.figures(kernel(hoisted)), sass_report.figures(kernel())
    assert sass_report.worse(have, may) == [
        "loop 0: mma 1, wait 1, wait 0, ex2 1; budget: mma 1, wait 1, ex2 1, wait 0"
    ]
    assert sass_report.worse(may, may) == []


def test_more_local_memory_and_r2ur_are_seen():
    may = sass_report.figures(kernel())
    have = sass_report.figures(kernel(LISTING.replace("MOV R1, R0", "LDL R1, [R0]")))
    assert sass_report.worse(have, may) == ["LDL/STL 2, budget 1"]
    have = sass_report.figures(kernel(LISTING.replace("SYNCS.PHASECHK P1", "R2UR UR5, R3")))
    assert sass_report.worse(have, may) == ["loop 0: r2ur 2, budget 1"]


def test_family_rules():
    errors = sass_report.family_errors("hopper_forward_bf16_d64_full", [kernel()])
    assert errors == ["hopper_forward_bf16_d64_full: no UTMALDG or UBLKCP"]
    with_tma = kernel(LISTING.replace("S2R R0", "UTMALDG.4D [UR4]"))
    assert sass_report.family_errors("hopper_forward_bf16_d64_full", [with_tma]) == []
    old = kernel(LISTING.replace("HGMMA.64x64x16.F32 R24", "HMMA.16816.F32 R24"))
    assert sass_report.family_errors("hopper_forward_bf16_d64_full", [old, with_tma]) == [
        "hopper_forward_bf16_d64_full: HMMA in it"
    ]
    straight = kernel(LISTING.replace("@P0 BRA 0x20", "NOP").replace("@P2 BRA 0x10", "NOP"))
    assert (
        "hopper_forward_bf16_d64_full: no loop with a matrix instruction"
        in sass_report.family_errors("hopper_forward_bf16_d64_full", [straight])
    )
