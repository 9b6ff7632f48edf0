"""The sweep of types on one device: `LAPILLI_DEVICE=0 python tests/support/types_on_device.py` prints what differs from torch."""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import torch
from agreement import Function
from conversion_cases import TO_HALF, VALUES
from integer_cases import CONVERTED, DTYPES, NUMBERS, OPERATORS, OUTSIDE, ROWS, accepted, used, values
from torch.utils._pytree import tree_leaves

import lapilli


def compare(title: str, cases: dict[str, Any], args: tuple[torch.Tensor, ...]) -> int:
    """Programs of 16 cases each, by the plan that the device takes."""
    wrong, names = 0, list(cases)
    for first in range(0, len(names), 16):
        some = {n: cases[n] for n in names[first : first + 16]}
        model = Function(lambda *a, some=some: [tree_leaves(f(*a)) for f in some.values()])
        try:
            got = lapilli.compile(model, args, fallback="error")(*args)
        except Exception as error:
            print(f"{title}: {list(some)}: {type(error).__name__}: {str(error)[:200]}")
            wrong += 1
            continue
        for name, ours, theirs in zip(some, got, model(*args), strict=True):
            for a, b in zip(ours, theirs, strict=True):
                same = a.dtype is b.dtype and torch.isclose(a.double(), b.double(), 1e-6, 0, equal_nan=True).all()
                if not same:
                    print(f"{title}: {name}: {a.flatten()[:12].tolist()} for {b.flatten()[:12].tolist()}")
                    wrong += 1
    return wrong


def main() -> int:
    wrong = compare("conversion", TO_HALF, (VALUES,))
    for dtype in DTYPES:
        kind = str(dtype).removeprefix("torch.")
        a, b = values(dtype)
        cases = {
            n: f for n, f in OPERATORS.items() if accepted(partial(f, a, b)) and not (kind == "bool" and "shift" in n)
        }
        cases |= {f"to {n}": (lambda a, b, f=f: f(a)) for n, f in CONVERTED.items()}
        both = {n: (lambda a, b, f=f: (f(a, b), used(f(a, b)))) for n, f in cases.items()}
        wrong += compare(kind, both, (a, b))
        if kind in ("bool", "int64"):
            continue
        x = a[::5]
        numbers = {
            f"{name} {n}": (lambda a, f=f, n=n: f(a, n))
            for name, f in NUMBERS.items()
            for n in OUTSIDE
            if (n < 2**31 or name != "maximum") and accepted(partial(f, x, n))
        }
        wrong += compare(f"{kind} and numbers", numbers, (x,))
        m = a.view(12, 12)[:, :9].T.contiguous() + b.view(12, 12)[:9] * 3
        wrong += compare(f"{kind} rows", ROWS, (m,))
    print(f"{wrong} differ on device {os.environ.get('LAPILLI_DEVICE', 'default')}: {lapilli.devices()[0].name}")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
