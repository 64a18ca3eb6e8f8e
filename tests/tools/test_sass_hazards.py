"""sass_hazards.py: on the code that stored to wild addresses, and on variations that are right."""

import pytest
import sass_hazards

# (instruction, cycles until the next one is issued)
FAULT = (
    ("SHF.R.S32.HI R62, RZ, 0x1f, R63", 2),
    ("CS2R R18, SRZ", 2),
    ("@!P1 IMAD.WIDE R18, R54, R57, RZ", 1),
    ("SHF.R.S32.HI R57, RZ, 0x1f, R53", 2),
    ("IADD3 R63, P1, P6, R18, R53, R63", 1),
)


def listing(code) -> str:
    return "".join(
        f"        /*{16 * i:04x}*/                   {text} ;   /* 0x0000000000000000 */\n"
        f"                                         /* 0x{stall << 41:016x} */\n"
        for i, (text, stall) in enumerate(code)
    )


def changed(at: int, text: str, stall: int):
    return (*FAULT[:at], (text, stall), *FAULT[at + 1 :])


def test_the_fault_is_found():
    assert list(sass_hazards.early_reads(listing(FAULT))) == [
        "0040: IADD3 R63, P1, P6, R18, R53, R63 reads after 5 cycles what 0010: CS2R R18, SRZ "
        "writes"
    ]


@pytest.mark.parametrize(
    "code",
    [
        changed(1, "CS2R R18, SRZ", 9),  # late enough
        changed(2, "IMAD.WIDE R18, R54, R57, RZ", 1),  # never read
        changed(2, "@!P1 IMAD.WIDE R20, R54, R57, RZ", 1),  # then ptxas counts the cycles of CS2R
        changed(4, "@!P1 IADD3 R63, P1, P6, R18, R53, R63", 1),  # reads the product only
        changed(4, "IADD3 R63, P1, P6, R20, R53, R63", 1),
        changed(3, "BRA 0x100", 1),
    ],
)
def test_what_is_right_is_not_reported(code):
    assert not list(sass_hazards.early_reads(listing(code)))


def test_the_upper_register_and_stores_count():
    code = (*FAULT[:3], ("STG.E desc[UR4][R2.64], R19", 1))
    assert list(sass_hazards.early_reads(listing(code)))
