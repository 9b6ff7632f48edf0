"""What a loaded program does on this device."""

from __future__ import annotations

import lapilli
from lapilli.runtime.description import Plan


def taken_plan(program: lapilli.Program) -> Plan:
    """The plan of its first method that the device took."""
    return next(p for p in program.description.methods[0].plans if p.name == program.plan)
