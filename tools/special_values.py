"""NaN, infinity, signed zeros, denormals and numbers at the ends of the range through every kind of operator, against torch's CPU.

    python tools/special_values.py [--modes compiled,half,bfloat16,...] [--families pointwise,binary,...] [--only TEXT]
                                   [--force TARGET] [--strict-denormals] [--verbose]

Modes: compiled; half and bfloat16 (compiled, inputs of that type); gradients; eager; eager-bfloat16; torch-compile-bfloat16.
The device is that of LAPILLI_DEVICE and VK_DRIVER_FILES. Many operators go into one program. A result is right where it is NaN,
infinite or zero with torch's sign, or lies within a bound around float64's; where torch in float32 and in float64 disagree
(an overflow on the way), either is right. Denormals may be flushed to zero, as inputs or wherever they come up: a result is right
that torch has with its own flushing, in all of its operators or in all but comparisons (docs/programs.md). Gradients are torch's
formulas, some of which cancel: one is right as well that is at most twice as far from float64's as torch's own in float32 is, at
the same number or at one of the eight nearest. Failures are printed as a table, one line a case; the exit code is 1 if there are
any.

--force compiles the plan of one target and lets any device run it (GPU kernels on a software driver)."""

from __future__ import annotations

import argparse
import logging
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

import lapilli

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(1, str(Path(__file__).parents[1] / "tests" / "support"))
import as_gpu
import special_cases
from special_cases import Given
from special_pointwise import binary, in_place, pointwise
from special_reductions import losses, reductions, undone
from special_windows import convolutions, named, pooling

SMALLEST = {torch.float32: 2.0**-126, torch.float16: 2.0**-14, torch.bfloat16: 2.0**-126}
LARGEST = {torch.float32: 3.4028234663852886e38, torch.float16: 65504.0, torch.bfloat16: 3.3895313892515355e38}
RELATIVE = {torch.float32: 1e-5, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
BEYOND = {torch.float32: 2.0**-25, torch.float16: 2.0**-12, torch.bfloat16: 2.0**-9}
"""What is larger than the largest number by this is rounded to infinity."""
DTYPES = {"half": torch.float16, "bfloat16": torch.bfloat16}
"""The types of modes; others compute in float32."""
_PROGRAM = 24  # cases in one program


@dataclass(frozen=True)
class Failure:
    mode: str
    family: str
    name: str
    what: str


class Program(torch.nn.Module):
    """Many functions of the same inputs."""

    def __init__(
        self, names: Sequence[str], functions: Sequence[Callable[[Any], Any]], constants: dict[str, torch.Tensor]
    ) -> None:
        super().__init__()
        self.names, self.functions, self.constants = list(names), list(functions), list(constants)
        for name, tensor in constants.items():
            self.register_buffer(f"constant_{name}", tensor)

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        constants = {name: getattr(self, f"constant_{name}") for name in self.constants}
        given = Given(**constants, **dict(zip(self.names, tensors, strict=True)))
        return tuple(t for f in self.functions for t in flat(f(given)))


def flat(result: Any) -> list[torch.Tensor]:
    return [t for t in tree_flatten(result)[0] if isinstance(t, torch.Tensor)]


def convert(inputs: dict[str, torch.Tensor], dtype: torch.dtype, flush: bool = False) -> dict[str, torch.Tensor]:
    def one(t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point():
            return t
        if flush:
            t = torch.where(t.abs() < SMALLEST[torch.float32], torch.copysign(torch.zeros(()), t), t)
        return t.to(dtype)

    return {name: one(t) for name, t in inputs.items()}


class Flushing(TorchDispatchMode):
    """Denormals are flushed to zero by every operator, or by all but those that compare."""

    def __init__(self, comparisons: bool) -> None:
        super().__init__()
        self.comparisons = comparisons

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        torch.set_flush_denormal(self.comparisons or func.overloadpacket.__name__ not in COMPARISONS)
        try:
            return func(*args, **(kwargs or {}))
        finally:
            torch.set_flush_denormal(False)


COMPARISONS = frozenset(["eq", "ne", "lt", "le", "gt", "ge", "where", "masked_fill", "masked_fill_", "sign", "relu"])


def on_cpu(f: Callable[[Any], Any], inputs: dict[str, torch.Tensor]) -> list[torch.Tensor] | None:
    """torch's results, None where it has none for these types."""
    try:
        with torch.no_grad():
            return flat(f(Given(**{k: t.clone() for k, t in inputs.items()})))
    except (RuntimeError, NotImplementedError):
        return None


def flushed(f: Callable[[Any], Any], inputs: dict[str, torch.Tensor], comparisons: bool) -> list[torch.Tensor] | None:
    with Flushing(comparisons):
        return on_cpu(f, inputs)


def error_nearby(case: special_cases.Case, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """For every result and element the largest error that torch makes in float32, at these numbers and at the eight nearest."""
    most: list[torch.Tensor] = []
    for step in range(-4, 5):
        moved = {k: neighbour(t, step) if t.is_floating_point() else t for k, t in inputs.items()}
        plain = on_cpu(case.function, moved) or []
        exact = on_cpu(case.reference or case.function, convert(moved, torch.float64)) or []
        errors = [(p.double() - e.double()).abs().nan_to_num(0, 0, 0) for p, e in zip(plain, exact, strict=True)]
        most = [torch.maximum(a, b) for a, b in zip(most, errors, strict=True)] if most else errors
    return most


def neighbour(t: torch.Tensor, step: int) -> torch.Tensor:
    """The number that many steps away from zero, or towards it; those that are not finite, or would not be, and zeros are kept."""
    moved = (t.view(torch.int32) + step).view(torch.float32)
    return torch.where(t.isfinite() & moved.isfinite() & (t.abs() > 1e-30), moved, t)


def judge(
    ours: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor, atol: float, signed: bool, strict: bool, rtol: float
) -> torch.Tensor:
    """Which elements are wrong. plain: of torch in ours' dtype; exact: from float64."""
    if not plain.is_floating_point():
        return ours != plain
    dtype = ours.dtype if ours.dtype in LARGEST else torch.float32
    x, p, e = (t.double() for t in (ours, plain, exact))
    top, tiny = LARGEST[dtype], SMALLEST[dtype]
    rounded = torch.where(e.abs() > top * (1 + BEYOND[dtype]), e * float("inf"), e)
    right = torch.zeros(x.shape, dtype=torch.bool)
    slack = 8 * (p - rounded).abs().nan_to_num(0, 0, 0) if dtype is torch.float32 else torch.zeros_like(x)
    for want in (p, rounded):
        right |= x.isnan() & want.isnan()
        right |= (x == want) & want.isinf()
        near = (x - want).abs() <= rtol * want.abs() + slack.clamp(max=1e-3 * want.abs()) + atol + (
            0 if strict else tiny
        )
        right |= near & want.isfinite() & x.isfinite()
        edge = want.abs() >= top * (1 - rtol)
        right |= edge & (x.abs() >= top * (1 - rtol)) & (x.sign() == want.sign())
    if signed:
        right &= ~((x == 0) & (p == 0) & (e == 0) & (torch.signbit(x) != torch.signbit(p)))
    return ~right


def compare(
    case: special_cases.Case,
    inputs: dict[str, torch.Tensor],
    ours: Sequence[torch.Tensor],
    dtype: torch.dtype,
    strict: bool,
    gradient: bool = False,
) -> str | None:
    """What is wrong with a case's results, in a line."""
    variants = []
    for flush in (False,) if strict else (False, True):
        given = convert(inputs, torch.float32, flush)
        plain = on_cpu(case.function, convert(given, dtype))
        exact = on_cpu(case.reference or case.function, convert(convert(given, dtype), torch.float64))
        if plain is None:
            plain = on_cpu(case.function, convert(convert(given, dtype), torch.float32))
            plain = plain and [p.to(dtype) if p.is_floating_point() else p for p in plain]
        if plain is None:
            return "torch has no result for this case"
        if exact is None or not case.exact:
            exact = plain
        variants.append((plain, exact))
    if not strict:
        for comparisons in (True, False):
            plain = flushed(case.function, convert(inputs, dtype), comparisons)
            variants += [(plain, plain)] if plain is not None else []
    nearby = error_nearby(case, inputs) if gradient else []
    rtol = max(RELATIVE[dtype], case.rtol) if dtype is torch.float32 else RELATIVE[dtype] + case.rtol
    atol = case.atol + (2.0**-24 if dtype is torch.float16 else 0)
    for k, result in enumerate(ours):
        wrong = torch.ones(result.shape, dtype=torch.bool)
        for plain, exact in variants:
            if result.shape != plain[k].shape:
                return f"output {k} has shape {list(result.shape)}, torch's has {list(plain[k].shape)}"
            wrong &= judge(result, plain[k], exact[k], atol, case.signed, strict, rtol)
        if gradient:
            wrong &= ~((result.double() - variants[0][1][k].double()).abs() <= 2 * nearby[k])
            for i in wrong.reshape(-1).nonzero().reshape(-1).tolist()[:_ALONE]:
                wrong.view(-1)[i] = not same_alone(case, inputs, result, k, i)
        if wrong.any():
            plain, exact = variants[0]
            places = wrong.reshape(-1).nonzero().reshape(-1)
            shown = []
            for i in places[:3].tolist():
                at = ""
                if all(t.numel() == result.numel() for t in inputs.values() if t.is_floating_point()):
                    at = " of " + ", ".join(
                        f"{t.reshape(-1)[i].item():.9g}" for t in inputs.values() if t.is_floating_point()
                    )
                got, p, e = (t.reshape(-1)[i].item() for t in (result, plain[k], exact[k]))
                shown.append(f"[{i}]{at}: {got!r:.24} not {p!r:.24}" + (f" ({e:.9g})" if isinstance(e, float) else ""))
            return f"{len(places)} of {result.numel()} in output {k}: " + "; ".join(shown)
    return None


_ALONE = 16


def same_alone(
    case: special_cases.Case, inputs: dict[str, torch.Tensor], ours: torch.Tensor, output: int, place: int
) -> bool:
    """Whether torch has our element when it computes that one only: its vectorised kernels and its loops for what is left over
    differ at NaN (gradients of hardshrink)."""
    if any(t.shape != ours.shape or t.dim() != 1 for t in inputs.values()):
        return False
    plain = on_cpu(case.function, {k: t[place : place + 1] for k, t in inputs.items()})
    return plain is not None and bool(torch.equal(plain[output], ours[place : place + 1]))


def sizes(case: special_cases.Case, inputs: dict[str, torch.Tensor]) -> int:
    found = on_cpu(case.function, inputs)
    return len(found) if found is not None else 0


def compiled(
    cases: Sequence[special_cases.Case],
    inputs: dict[str, torch.Tensor],
    constants: frozenset[str],
    dtype: torch.dtype,
    force: str | None,
) -> Iterator[tuple[special_cases.Case, list[torch.Tensor] | str]]:
    """Results by `lapilli.compile`, programs of many cases; a program that fails is tried case by case."""
    given = convert(inputs, dtype)
    fixed = {name: given.pop(name) for name in constants}
    try:
        module = Program(list(given), [c.function for c in cases], fixed)
        precision: Any = "fp16" if dtype is torch.float16 else "fp32"
        with lapilli.compile(module, tuple(given.values()), precision=precision, target=force) as program:
            results = program(*given.values())
    except Exception as error:
        if len(cases) == 1:
            yield cases[0], first_line(error)
            return
        for c in cases:
            yield from compiled([c], inputs, constants, dtype, force)
        return
    listed = [torch.as_tensor(r) for r in (results if isinstance(results, (tuple, list)) else (results,))]
    for c in cases:
        n = sizes(c, inputs)
        yield c, listed[:n]
        listed = listed[n:]


def eager(
    cases: Sequence[special_cases.Case], inputs: dict[str, torch.Tensor]
) -> Iterator[tuple[special_cases.Case, list[torch.Tensor] | str]]:
    for c in cases:
        try:
            given = Given(**{k: t.to("vulkan") for k, t in inputs.items()})
            with torch.no_grad():
                yield c, [t.cpu() for t in flat(c.function(given))]
        except Exception as error:
            yield c, first_line(error)


def torch_compiled(
    cases: Sequence[special_cases.Case], inputs: dict[str, torch.Tensor]
) -> Iterator[tuple[special_cases.Case, list[torch.Tensor] | str]]:
    """Results by torch.compile, all cases in one function; if that fails, each in its own."""
    names = list(inputs)

    def run(*tensors: torch.Tensor) -> tuple[list[torch.Tensor], ...]:
        given = Given(**dict(zip(names, tensors, strict=True)))
        return tuple(flat(c.function(given)) for c in cases)

    try:
        torch._dynamo.reset()
        with torch.no_grad():
            results = torch.compile(run, backend="vulkan", dynamic=False, fullgraph=True)(*inputs.values())
    except Exception as error:
        if len(cases) == 1:
            yield cases[0], first_line(error)
            return
        for c in cases:
            yield from torch_compiled([c], inputs)
        return
    yield from ((c, [torch.as_tensor(t) for t in r]) for c, r in zip(cases, results, strict=True))


def odd(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """With one element less where all inputs are lists of an even number: two elements of 16 bits lie in a word, and four are read
    at once.
    """
    if any(t.dim() != 1 or t.numel() % 2 for t in inputs.values()):
        return inputs
    return {name: t[:-1] for name, t in inputs.items()}


def has_gradient(case: special_cases.Case, inputs: dict[str, torch.Tensor]) -> bool:
    """Whether torch has one."""
    leaf = {k: t.clone().requires_grad_() if t.is_floating_point() else t for k, t in inputs.items()}
    return flat(case.function(Given(**leaf)))[0].requires_grad


def gradients(
    cases: Sequence[special_cases.Case], inputs: dict[str, torch.Tensor], how: str
) -> Iterator[tuple[special_cases.Case, list[torch.Tensor] | str]]:
    """Gradients of the sum of every case's first float output, each case with inputs of its own. how: "compiled" or "eager"."""
    names = [k for k, t in inputs.items() if t.is_floating_point()]

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = []
        for k, c in enumerate(cases):
            own = dict(zip(names, tensors[k * len(names) : (k + 1) * len(names)], strict=True))
            results.append(flat(c.function(Given(**{**inputs, **own})))[0])
        return tuple(results)

    device = "vulkan" if how == "eager" else "cpu"
    try:
        leaves = [inputs[n].detach().clone().to(device).requires_grad_() for _ in cases for n in names]
        if how == "eager":
            inputs = {k: t.to(device) for k, t in inputs.items()}
            results = run(*leaves)
        else:
            torch._dynamo.reset()
            results = torch.compile(run, backend="vulkan", dynamic=False, fullgraph=True)(*leaves)
        found = torch.autograd.grad(results, leaves, [torch.ones_like(r) for r in results], allow_unused=True)
        for k, c in enumerate(cases):
            part = found[k * len(names) : (k + 1) * len(names)]
            shapes = [inputs[n].shape for n in names]
            yield c, [torch.zeros(s) if g is None else g.detach().cpu() for g, s in zip(part, shapes, strict=True)]
    except Exception as error:
        if len(cases) == 1:
            yield cases[0], first_line(error)
            return
        for c in cases:
            yield from gradients([c], {k: t.cpu() for k, t in inputs.items()}, how)


def gradient_case(case: special_cases.Case) -> special_cases.Case:
    """The case whose function is the gradient, for the reference."""

    def function(given: Any) -> list[torch.Tensor]:
        own = {k: t.detach().clone() for k, t in vars(given).items()}
        leaves = [t.requires_grad_() for t in own.values() if t.is_floating_point()]
        with torch.enable_grad():
            result = flat(case.function(Given(**own)))[0]
            found = torch.autograd.grad(result, leaves, torch.ones_like(result), allow_unused=True)
        return [torch.zeros_like(x) if g is None else g for g, x in zip(found, leaves, strict=True)]

    reference = case.slope
    if reference is None and case.reference is not None:
        reference = gradient_case(replace(case, function=case.reference, reference=None)).function
    return special_cases.Case(case.name, function, case.atol, case.rtol, False, case.exact, reference=reference)


def first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines() or [""]
    where = traceback.extract_tb(error.__traceback__)
    place = f" ({where[-1].filename.rsplit('/', 1)[-1]}:{where[-1].lineno})" if where else ""
    return f"raises {type(error).__name__}: {text[0][:160]}{place}"


def families() -> list[special_cases.Family]:
    rows = [*(reductions(width) for width in (8, 300, 1100)), *(undone(width) for width in (1, 2, 3, 7))]
    return [pointwise(), binary(), *rows, pooling(), convolutions(False), convolutions(True), losses(), named()]


def sweep(options: argparse.Namespace) -> list[Failure]:
    failures: list[Failure] = []
    count = 0
    for family in families():
        if options.families and family.name not in options.families.split(","):
            continue
        cases = [c for c in family.cases if options.only in c.name]
        for mode in options.modes.split(","):
            start = time.perf_counter()
            dtype = DTYPES.get(mode.rsplit("-", 1)[-1], torch.float32)
            inputs = family.inputs if dtype is not torch.bfloat16 else odd(family.inputs)
            tried = [c for c in cases if dtype is torch.float32 or (c.half and sizes(c, inputs))]
            if mode == "gradients":
                tried = [c for c in cases if family.differentiable and c.differentiable and has_gradient(c, inputs)]
            chunks = [tried[k : k + _PROGRAM] for k in range(0, len(tried), _PROGRAM)]
            before = len(failures)
            for chunk in chunks:
                ways: list[tuple[str, Any]] = []
                if mode in ("compiled", "half", "bfloat16"):
                    ways = [(mode, compiled(chunk, inputs, family.constants, dtype, options.force))]
                elif mode.startswith("eager"):
                    in_places = [c for i in chunk for c in in_place(i)] if mode == "eager" else []
                    ways = [(mode, eager(chunk + in_places, convert(inputs, dtype)))]
                elif mode.startswith("torch-compile"):
                    ways = [(mode, torch_compiled(chunk, convert(inputs, dtype)))]
                elif mode == "gradients":
                    ways = [("gradient", gradients(chunk, inputs, "compiled"))]
                    if options.eager_gradients:
                        ways.append(("eager gradient", gradients(chunk, inputs, "eager")))
                for way, results in ways:
                    for case, ours in results:
                        count += 1
                        if isinstance(ours, str):
                            what: str | None = ours
                        else:
                            reference = gradient_case(case) if "gradient" in way else case
                            what = compare(reference, inputs, ours, dtype, options.strict_denormals, "gradient" in way)
                        if what is not None:
                            failures.append(Failure(way, family.name, case.name, what))
                            if options.verbose:
                                print("   ", case.name, what, flush=True)
            seconds = time.perf_counter() - start
            print(
                f"{family.name:12} {mode:10} {len(tried):4} cases  {len(failures) - before:4} wrong  {seconds:6.1f} s",
                flush=True,
            )
    print(f"{count} cases compared, {len(failures)} wrong")
    return failures


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--modes", default="compiled,half,gradients,eager")
    parser.add_argument("--families", default="")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument(
        "--force", default=None, help="a target whose plan any device runs: gpu-fp32, gpu-fp16, gpu-fp16-matrix"
    )
    parser.add_argument("--strict-denormals", action="store_true", help="denormals may not be flushed")
    parser.add_argument("--verbose", action="store_true")
    options = parser.parse_args()
    known = [family.name for family in families()]
    if unknown := {name for name in options.families.split(",") if name} - set(known):
        parser.error(f"there is no family {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.manual_seed(0)
    np.seterr(all="ignore")
    if options.force:
        as_gpu.on_any_device()
    options.eager_gradients = "eager" in options.modes
    if "eager" in options.modes or "gradients" in options.modes:
        try:
            torch.ones(1).to("vulkan")
        except Exception as error:
            print(f"without eager tensors: {first_line(error)}")
            options.modes = ",".join(m for m in options.modes.split(",") if m != "eager")
            options.eager_gradients = False
    print(f"torch {torch.__version__}, lapilli {lapilli.__version__}, {device()}")
    failures = sweep(options)
    for f in failures:
        print(f"{f.mode:15} {f.family:10} {f.name:28} {f.what}")
    return 1 if failures else 0


def device() -> str:
    try:
        return str(lapilli.devices()[0])[:200]
    except Exception as error:
        return first_line(error)


if __name__ == "__main__":
    sys.exit(main())
