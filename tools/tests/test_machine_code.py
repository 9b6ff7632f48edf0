"""What tools/machine_code.py says of instructions."""

from __future__ import annotations

import machine_code


def test_accesses_in_a_row_are_counted_and_arithmetic_is_left_out() -> None:
    lines = [
        "S2R R0, SR_TID.X ;", "LDG.E.64 R2, [R0] ;", "@!P0 LDG.E.64 R4, [R0] ;", "FADD R2, R2, R4 ;", "BAR.SYNC 0x0 ;", "EXIT ;",
    ]  # fmt: skip
    assert machine_code.accesses(lines) == "1: LDG.E.64 x2  4: BAR.SYNC  5: EXIT"
    assert machine_code.accesses([]) == ""
