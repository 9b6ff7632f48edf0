"""What the operator and model tables measure: one model through torch.export, the compiler and a device, compared with torch.

A result is a dict for JSON: its verdict, the reason, and what the program is made of."""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.utils._pytree import tree_leaves

import lapilli
from lapilli.errors import CompileError, InvalidInputError, LapilliError, OutOfMemoryError
from lapilli.ir import interpret
from lapilli.legalize.passes import prepare
from lapilli.lower import lower

Tensors = Sequence[torch.Tensor]

VERDICTS = {
    "right": "agrees with torch",
    "unexportable": "torch.export refuses it",
    "refused": "Lapilli refuses it, with a reason",
    "wrong": "does not agree with torch",
    "crash": "an exception that is no sentence for people, a killed process, or no answer in time",
}

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-12}
"""Relative error (norm) that results may have: some tens of roundings of fp32, one of the half types, none of float64, in
which only the CPU computes."""

SLACK = 8
"""How many times torch's own error ours may be: another order of summation, other approximations of functions."""

USELESS = 1e-3
"""Where torch's own fp32 result is farther from float64, the sample took another branch there: no reference."""


class Stop(Exception):
    """The end of a measurement, with its verdict."""

    def __init__(self, verdict: str, reason: str) -> None:
        super().__init__(reason)
        self.verdict, self.reason = verdict, reason


@dataclass
class Measurement:
    """verdict: a key of VERDICTS; operators: of the exported graph; kernels: dispatches of a run; segments: the parts of the
    program ("gpu", "cpu", …); cpu: operators that run on the CPU with their reasons; arena, arena_bound: bytes, and the most
    that are alive at once; error, torch_error: relative errors of ours and of torch's fp32 against float64."""

    verdict: str = "right"
    reason: str = ""
    operators: int = 0
    kernels: int = 0
    segments: list[str] = field(default_factory=list)
    cpu: list[tuple[str, str]] = field(default_factory=list)
    arena: int = 0
    arena_bound: int = 0
    error: float = 0.0
    torch_error: float = 0.0
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def first_line(error: BaseException) -> str:
    """An exception in a line."""
    text = " ".join(str(error).split("\n\n")[0].split())
    return text[:400] if isinstance(error, LapilliError) else f"{type(error).__name__}: {text[:300]}"


def export(model: torch.nn.Module, inputs: Tensors, dynamic_shapes: Any = None) -> ExportedProgram:
    """The exported program. Raises Stop("unexportable")."""
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return torch.export.export(model, tuple(inputs), dynamic_shapes=dynamic_shapes, strict=False)
    except Exception as error:
        raise Stop("unexportable", first_line(error)) from error


Run = Callable[[Tensors], list[Any]]
"""Leaves of the outputs for inputs."""


def compile_for_device(exported: ExportedProgram, found: Measurement, precision: Any = "fp32") -> Run:
    """Compile for the plan that the default device runs, and note what the program is made of. Raises Stop."""
    found.operators = sum(n.op == "call_function" for n in exported.graph.nodes)
    start = time.perf_counter()
    try:
        device = lapilli.devices()[0]
        texels = device.limits["texel_elements"] >= 1 << 24
        kind = "gpu" if device.type != "cpu" else "cpu" if texels else "any"
        target = f"{kind}-{precision}" if precision == "fp32" or kind == "cpu" else None
        program = lapilli.compile(exported, precision=precision, target=target)
        found.seconds = time.perf_counter() - start
        _describe(program, found)
    except Exception as error:
        raise _stop(error) from error

    return run_of(program)


def run_of(program: lapilli.Program) -> Run:
    """Raises Stop where the program does."""

    def run(inputs: Tensors) -> list[Any]:
        try:
            leaves = tree_leaves(program(*inputs))
        except Exception as error:
            raise _stop(error) from error
        # Without inputs nothing says that torch is meant, and a program gives arrays.
        return [torch.as_tensor(leaf) if isinstance(leaf, np.ndarray) and not inputs else leaf for leaf in leaves]

    return run


def interpreted(exported: ExportedProgram, found: Measurement) -> Run:
    """The kernel IR run by NumPy: quick, needs no device, and has no CPU segments. Raises Stop."""
    found.operators = sum(n.op == "call_function" for n in exported.graph.nodes)
    try:
        module = prepare(exported)
        graph = lower(module)
    except Exception as error:
        raise _stop(error) from error

    def run(inputs: Tensors) -> list[Any]:
        sizes: dict[str, int] = {}
        for given, known in zip(inputs, graph.inputs, strict=True):
            for size, expr in zip(given.shape, known.shape, strict=True):
                if str(expr) in graph.symbols:
                    sizes.setdefault(str(expr), size)
        try:
            results = interpret.run(graph, [t.contiguous().numpy() for t in inputs], sizes)
        except Exception as error:
            raise _stop(error) from error
        return [torch.as_tensor(np.array(r)) for r in results]

    return run


def _stop(error: Exception) -> Stop:
    """A refusal says what cannot be done, or what a device has no memory for; that our own kernels do not compile, or our own
    files do not load, is a crash."""
    refusal = isinstance(
        error, CompileError | InvalidInputError | OutOfMemoryError | TypeError
    ) and "please report this" not in str(error)
    return Stop("refused" if refusal else "crash", first_line(error))


def _describe(program: lapilli.Program, found: Measurement) -> None:
    """Where the operators run, and what the plan holds."""
    told = program.report()
    found.segments = list(told.segments)
    found.cpu = sorted({(o.operator, o.reason) for o in told.on_cpu})
    for k, method in enumerate(program.description.methods):
        plan = next((p for p in method.plans if p.name == program.plan), None)
        if plan is None:
            continue
        found.kernels += len(plan.run)
        if not method.symbols:
            memory = program.description.memory(plan, (), k)
            found.arena += memory.arena
            found.arena_bound += memory.lower_bound


# -- comparing with torch


def results(run: Run, inputs: Tensors) -> list[Any]:
    """Leaves of the outputs for copies of the inputs, and the copies as the run leaves them."""
    copies = [t.clone() for t in inputs]
    return [*run(copies), *copies]


def torch_results(model: torch.nn.Module, inputs: Tensors) -> list[Any]:
    """What torch computes on the CPU, as `results`."""
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return results(lambda given: tree_leaves(model(*given)), inputs)
        except RuntimeError as error:  # views beyond the memory of a copy
            raise Stop("unexportable", f"torch itself: {first_line(error)}") from error


def cast(leaf: Any, dtype: torch.dtype = torch.float64) -> Any:
    """A leaf of a call with another dtype for float32: tensors and dtypes."""
    if leaf is torch.float32:
        return dtype
    return leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype is torch.float32 else leaf


def widened(model: torch.nn.Module) -> torch.nn.Module:
    return copy.deepcopy(model).double()


def reference(
    model: torch.nn.Module,
    inputs: Tensors,
    want: Sequence[Any],
    convert: Callable[[Any], torch.nn.Module] = widened,
    dtype: torch.dtype = torch.float64,
) -> list[Any] | None:
    """What torch computes in float64, or another dtype; None when the model cannot, or gives something else then."""
    try:
        exact = torch_results(convert(model), [cast(t, dtype) for t in inputs])
    except Exception:
        return None
    alike = len(exact) == len(want) and all(
        not isinstance(w, torch.Tensor) or (isinstance(e, torch.Tensor) and e.shape == w.shape)
        for e, w in zip(exact, want, strict=True)
    )
    return exact if alike else None


def compare(got: Sequence[Any], want: Sequence[Any], exact: Sequence[Any] | None, found: Measurement) -> None:
    """Raises Stop("wrong") where outputs do not agree with torch's, and notes the largest errors.

    dtype, shape, integers, bools, numbers, and the places of NaN and infinity are equal. Floats are within their bound of
    torch's; or they are as near to float64's as torch's are, SLACK times, beside the bound."""
    if len(got) != len(want):
        raise Stop("wrong", f"{len(got)} outputs instead of {len(want)}")
    for k, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        place = f"output {k}: " if len(want) > 1 else ""
        if not isinstance(theirs, torch.Tensor):
            if not isinstance(ours, torch.Tensor) and (ours == theirs or (ours != ours and theirs != theirs)):
                continue
            raise Stop("wrong", f"{place}{ours!r} instead of {theirs!r}")
        same_kind(ours, theirs, place)
        if theirs.layout is not torch.strided:
            ours, theirs = ours.to_dense(), theirs.to_dense()
        if not (theirs.is_floating_point() or theirs.is_complex()):
            if not torch.equal(ours, theirs):
                raise Stop("wrong", f"{place}{int((ours != theirs).sum())} of {theirs.numel()} elements differ")
            continue
        a, b = reals(ours), reals(theirs)
        if not same_specials(a, b):
            raise Stop("wrong", f"{place}NaN or infinity in other places")
        bound = BOUNDS[b.dtype]
        near = relative_error(a, b)
        error, torch_error = near, 0.0
        if exact is not None:
            c = reals(exact[k].to_dense())
            error, torch_error = relative_error(a, c), relative_error(b, c)
            if torch_error > USELESS:
                error, torch_error = near, 0.0
        found.error, found.torch_error = max(found.error, error), max(found.torch_error, torch_error)
        if near > bound and not error <= bound + SLACK * torch_error:
            raise Stop("wrong", f"{place}relative error {error:.2g}, torch's own is {torch_error:.2g}")


def same_kind(ours: Any, theirs: torch.Tensor, place: str = "") -> None:
    """Raises Stop("wrong") unless it is a tensor of torch's dtype and shape."""
    if not isinstance(ours, torch.Tensor):
        raise Stop("wrong", f"{place}a {type(ours).__name__} instead of a tensor")
    if ours.dtype != theirs.dtype:
        raise Stop("wrong", f"{place}dtype {ours.dtype} instead of {theirs.dtype}")
    if ours.layout != theirs.layout:
        raise Stop("wrong", f"{place}{ours.layout} instead of {theirs.layout}")
    if ours.shape != theirs.shape:
        raise Stop("wrong", f"{place}shape {list(ours.shape)} instead of {list(theirs.shape)}")


def relative_error(a: torch.Tensor, b: torch.Tensor) -> float:
    """Norm of the difference over the norm of b, over places where both are finite (float64; absolute where b is zero)."""
    x, y = a.double(), b.double()
    both = torch.isfinite(x) & torch.isfinite(y)
    size, difference = float(y[both].norm()), float((x[both] - y[both]).norm())
    return difference / size if size else difference


def reals(t: torch.Tensor) -> torch.Tensor:
    t = t.detach().resolve_conj().resolve_neg()
    return torch.view_as_real(t) if t.is_complex() else t


def same_specials(a: torch.Tensor, b: torch.Tensor) -> bool:
    finite = torch.isfinite(b)
    if not torch.equal(torch.isfinite(a), finite):
        return False
    x, y = a[~finite], b[~finite]
    return bool(((x == y) | (x.isnan() & y.isnan())).all())


# -- random results

DRAWS = 24
"""Times that a random operator is run."""
SIGMAS = 6.0
"""Standard errors between two means that chance does not explain (2e-9 for one comparison)."""


def statistics(draws: Sequence[torch.Tensor], scale: float) -> torch.Tensor:
    """Of every draw: the share of zeros, and mean and mean square of x / (scale + |x|), which exist for any distribution.

    [DRAWS, 3] float64."""
    rows = []
    for draw in draws:
        x = reals(draw).double().flatten()
        y = x / (scale + x.abs())
        rows.append(torch.stack([(x == 0).double().mean(), y.mean(), (y * y).mean()]))
    return torch.stack(rows)


def compare_distributions(got: Sequence[Sequence[Any]], want: Sequence[Sequence[Any]]) -> None:
    """Raises Stop("wrong") where draws (each a list of outputs) have another dtype, shape or distribution than torch's.

    A draw is one observation, whatever depends on what inside of it; the means of its statistics are compared."""
    if len(got[0]) != len(want[0]):
        raise Stop("wrong", f"{len(got[0])} outputs instead of {len(want[0])}")
    for k, theirs in enumerate(want[0]):
        if isinstance(theirs, torch.Tensor):
            for draw in got:
                same_kind(draw[k], theirs, f"output {k}: ")
    random = [k for k, t in enumerate(want[0]) if isinstance(t, torch.Tensor) and _varies([d[k] for d in want])]
    if random and not any(_varies([d[k] for d in got]) for k in random):
        raise Stop("wrong", "the same random numbers at every run")
    for k in random:
        typical = float(torch.stack([reals(d[k]).double().abs().median() for d in want]).median()) or 1.0
        ours, expected = (statistics([d[k] for d in draws], typical) for draws in (got, want))
        if torch.isnan(ours).any() != torch.isnan(expected).any():
            raise Stop("wrong", f"output {k}: NaN in random numbers")
        spread = (ours.var(0) / len(got) + expected.var(0) / len(want)).sqrt()
        off = (ours.mean(0) - expected.mean(0)).abs() > SIGMAS * spread + BOUNDS[torch.float32]
        if off.any():
            what = ["share of zeros", "mean", "spread"][int(off.int().argmax())]
            raise Stop("wrong", f"output {k}: another distribution (its {what})")


def _varies(draws: Sequence[torch.Tensor]) -> bool:
    return any(not torch.equal(d, draws[0]) for d in draws[1:])


# -- a whole measurement


def measure(
    model: torch.nn.Module, inputs: Tensors, compile: Callable[[ExportedProgram, Measurement], Run]
) -> Measurement:
    """Export, compile, run and compare."""
    found = Measurement()
    try:
        want = torch_results(model, inputs)
        run = compile(export(model, inputs), found)
        compare(results(run, inputs), want, reference(model, inputs, want), found)
    except Stop as stop:
        found.verdict, found.reason = stop.verdict, stop.reason
    return found


HALF_SLACK = 2
"""How many times the error of torch's own half precision ours may have."""


def measure_half(model: torch.nn.Module, inputs: Tensors) -> Measurement:
    """A model compiled with precision="fp16", and torch's half on the CPU, each against float64: `error` and `torch_error` are
    those of the output where ours compares worst."""
    found = Measurement()
    try:
        want = torch_results(model, inputs)
        exact = reference(model, inputs, want)
        half = reference(model, inputs, want, lambda m: copy.deepcopy(m).half(), torch.float16)
        if exact is None or half is None:
            raise Stop(
                "unexportable", f"torch does not run it in {'half precision' if exact else 'float64'} on the CPU"
            )
        run = compile_for_device(export(model, inputs), found, "fp16")
        worst = -1.0
        for ours, theirs, e, h in zip(results(run, inputs), want, exact, half, strict=True):
            if not isinstance(theirs, torch.Tensor) or not theirs.is_floating_point():
                continue
            same_kind(ours, theirs)
            if not same_specials(ours, theirs):
                raise Stop("wrong", "NaN or infinity in other places")
            error = relative_error(ours, e)
            torch_error = relative_error(h, e) if same_specials(h, theirs) else math.inf
            ratio = error / torch_error if torch_error else math.inf if error else 0.0
            if ratio > worst:
                worst, found.error, found.torch_error = ratio, error, torch_error
        if worst > HALF_SLACK:
            raise Stop("wrong", f"relative error {found.error:.2g}, that of torch's half is {found.torch_error:.2g}")
    except Stop as stop:
        found.verdict, found.reason = stop.verdict, stop.reason
    return found
