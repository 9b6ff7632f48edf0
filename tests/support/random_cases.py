"""The command of a generator of cases: it checks one seed after the other for a while, and says which were wrong."""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import as_gpu

from lapilli.target import TARGETS


def main(text: str, what: str, plans: Sequence[str], check: Callable[[int, str], Sequence[str]]) -> None:
    """text: of the help. plans: taken in turn. check: of a seed and a plan; gives the names of kernels, which are counted."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plan", help="for all cases; otherwise " + ", ".join(plans))
    parser.add_argument("--gpu-plans", action="store_true", help="what a GPU would run, whatever the device is")
    options = parser.parse_args()
    taken = [options.plan] if options.plan else plans
    if options.gpu_plans:
        as_gpu.on_any_device()
        for plan in taken:
            TARGETS[plan] = replace(TARGETS[plan], shared_memory=as_gpu.SHARED)
    end, seed, kernels, wrong = time.monotonic() + options.seconds, options.seed, Counter[str](), 0
    while time.monotonic() < end:
        plan = taken[seed % len(taken)]
        try:
            kernels.update(check(seed, plan))
        except Exception as error:
            wrong += 1
            print(f"seed {seed}, {plan}: {type(error).__name__}: {error}", flush=True)
        seed += 1
    print(f"{seed - options.seed} {what} from seed {options.seed} on, {wrong} wrong; kernels: {dict(kernels)}")
