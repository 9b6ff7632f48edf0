"""NaN and infinities, one at a time, in the float inputs of torch's own operator tests (op_db): `make specials`.

    python tools/special_operators.py [--samples N] [--shard I/K] [--target gpu-fp32] [ENTRY...]

What is NaN or infinite in torch's result, in float32 as in float64, is so in ours, and nothing else; integers and bools are equal.
With a target for GPUs, any device takes its kernels. Prints the entries that differ, and how."""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import opdb
import torch
from measure import (
    Measurement,
    Run,
    Stop,
    Tensors,
    compile_for_device,
    export,
    reals,
    reference,
    results,
    run_of,
    same_specials,
    torch_results,
)
from opinfo import entries, parse_shard, shard

NUMBERS = (float("nan"), float("inf"), float("-inf"))

NOT_DEFINED = {
    "stft": "as fft", "istft": "as fft", "fft": "the order in which terms are added decides whether infinities meet",
    "linalg": "the order in which equations are eliminated decides where infinities go",
    "cholesky": "as linalg", "cholesky_inverse": "as linalg", "geqrf": "as linalg", "lu": "as linalg", "lu_solve": "as linalg",
    "logdet": "as linalg", "pinverse": "as linalg", "qr": "as linalg", "svd": "as linalg", "triangular_solve": "as linalg",
    "ormqr": "as linalg", "nn.functional.group_norm": "the order of factors decides whether infinities meet",
    "native_group_norm": "as group_norm", "_batch_norm_with_update": "as group_norm", "long": "no integer is NaN or infinite",
    "_native_batch_norm_legit": "as group_norm", "nn.functional.batch_norm": "as group_norm",
    "new_empty": "nobody has written the result", "empty": "as new_empty", "native_batch_norm": "as group_norm",
    "nn.functional.scaled_dot_product_attention": "the tile decides which keys behind a query are multiplied by 0, and which are "
    "not read; masks: tests/conformance/test_masked_attention.py",
    "searchsorted": "NaN and infinities are not in order", "bucketize": "as searchsorted",
    "mode": "torch sorts without an order for NaN", "nn.functional.instance_norm": "as group_norm",
    "native_layer_norm": "as var_mean", "std_mean": "as var_mean",
    "var_mean": "torch's running mean becomes NaN behind an infinity",
    "_softmax_backward_data": "no result of a softmax is infinite",
    "special.chebyshev_polynomial": "NaN as a degree is converted to an integer",
    "special.hermite_polynomial": "as above", "special.laguerre_polynomial": "as above",
    "special.legendre_polynomial": "as above", "special.shifted_chebyshev_polynomial": "as above",
}  # fmt: skip
"""Beginnings of entries of which nothing says where NaN and infinities go."""


def defined(name: str) -> bool:
    return not any(name == begin or name.startswith((f"{begin}.", f"{begin}_")) for begin in NOT_DEFINED)


def differences(name: str, samples: int, compile: Any = compile_for_device) -> Iterator[str]:
    """One line for every input that gives something else; none for what torch.export or Lapilli refuse."""
    for call in opdb.calls(name, samples):
        dense = [t.layout is torch.strided for t in call.inputs]
        places = [k for k, t in enumerate(call.inputs) if dense[k] and t.dtype is torch.float32 and t.numel()]
        try:
            if not places or _draws(call):
                continue
            run = compile(export(call, call.inputs), Measurement())
        except Exception:  # of torch's own kinds too
            continue
        for k in places:
            size = call.inputs[k].numel()
            for value in NUMBERS:
                for at in sorted({0, size // 2, size - 1}):
                    given = [t.clone() for t in call.inputs]
                    given[k] = given[k].contiguous()
                    given[k].view(-1)[at] = value
                    if found := _difference(call, given, run):
                        yield f"{name}, {value} in input {k} at {at}: {found}"


def _draws(call: opdb.OperatorCall) -> bool:
    """Whether random numbers are drawn. Raises an exception where torch fails."""
    torch.manual_seed(1)
    before = torch.get_rng_state()
    torch_results(call, call.inputs)
    return not torch.equal(before, torch.get_rng_state())


def _difference(call: opdb.OperatorCall, given: Tensors, run: Run) -> str | None:
    try:
        wanted = torch_results(call, given)
        exact = reference(call, given, wanted, opdb.OperatorCall.widened)
    except Exception:  # torch refuses such numbers
        return None
    if exact is None:
        return None
    try:
        found = results(run, given)
    except Stop as stop:
        return None if stop.verdict == "refused" else f"{stop.verdict}: {stop.reason}"
    return next(filter(None, map(_differs, found, wanted, exact)), None)


def _differs(found: Any, wanted: Any, exact: Any) -> str | None:
    if not isinstance(wanted, torch.Tensor) or wanted.layout is not torch.strided:
        return None
    if not (wanted.is_floating_point() or wanted.is_complex()):
        sure = torch.equal(wanted, exact) and not torch.equal(found, wanted)
        return f"{int((found != wanted).sum())} of {wanted.numel()} differ" if sure else None
    a, b, c = reals(found), reals(wanted), reals(exact)
    if not same_specials(b, c.float()) or same_specials(a, b):
        return None
    other = (a.isnan() != b.isnan()) | (a.isinf() != b.isinf()) | (a.isinf() & b.isinf() & (a != b))
    return f"{int(other.sum())} of {a.numel()}, {a[other][0].item()} instead of {b[other][0].item()}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="ENTRY", help="default: all")
    parser.add_argument("--samples", type=int, default=3, metavar="N", help="of an entry, spread over them")
    parser.add_argument(
        "--shard", type=parse_shard, default=(1, 0), metavar="I/K", help="one of K parts of the entries"
    )
    parser.add_argument("--target", help="the plan that is made, instead of the one that the device takes")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable()
    compile = compile_for_device
    if options.target:
        sys.path.append(str(Path(__file__).resolve().parent.parent / "tests" / "support"))
        compile = on_target(options.target)
    names: Sequence[str] = options.names or [n for n in shard(entries(), *options.shard) if defined(n)]
    found = [line for name in names for line in differences(name, options.samples, compile)]
    print("\n".join(found))
    print(f"{len(found)} differences, {len(names)} entries")
    return bool(found)


def on_target(target: str) -> Any:
    """What compiles for a plan, which any device then takes."""
    import as_gpu

    import lapilli

    as_gpu.on_any_device()
    return lambda exported, found: run_of(lapilli.compile(exported, precision="fp32", target=target))


if __name__ == "__main__":
    raise SystemExit(main())
