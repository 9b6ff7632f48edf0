"""The ways that a program takes through Lapilli, each compared with what it means."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch

import lapilli
from lapilli.backend import repeated_sizes
from whole_programs import reference
from whole_programs.program import Program, Values, defined
from whole_programs.reference import Expected, complaint


@dataclass(frozen=True)
class Outcome:
    """status: "right", "wrong" (a result differs), "fails" (an exception), "refused" (on purpose), "none" (nothing to compare),
    "torch" (wrong or fails, and so it does where torch itself runs the same graph on the CPU); text: what; elements: compared,
    and open: of these left out since they have no definite value."""

    status: str
    text: str = ""
    elements: int = 0
    open: int = 0


class Refused(Exception):
    """This way does not take the program, on purpose."""


class NotTaken(Exception):
    """A size that the program was not compiled for, because torch did not export it with an open size."""


TARGETS: dict[str, str] = {}
"""The plan to make for a precision, where it is not the device's."""


def _target(program: Program, precision: Any) -> str | None:
    """The plan to make: the one that runs here, for others take as long to make. All of them (None) for one program in eight."""
    if precision in TARGETS:
        return TARGETS[precision]
    if program.seed % 8 == 0:
        return None
    from lapilli.backend.placement import device_of, targets

    half = precision == "fp16" or any(leaf.dtype == "float16" for leaf in program.leaves)
    return targets(half, device_of((), None))[0].name


Results = Callable[[int], Sequence[Any]]
"""The results for an open size: the outputs, then the arguments as they are afterwards."""


stage: Any = SimpleNamespace(value=0)
"""1 while Lapilli runs a program, 0 while torch does: a crash or hang there is torch's."""


def check(program: Program, way: str) -> Outcome:
    """Runs a program one way, for all its sizes."""
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        order = ORDERS.get(way, 0)
        wanted = []
        if order:
            part = _with_derivatives(program, order)
            if part is None:
                return Outcome("none")
            program = part
        try:
            for n in program.sizes:
                means = partial(_means, program, n, order, way == "compile16")
                expected = means()
                if expected is None:
                    return Outcome("none")
                wanted.append(Wanted(n, expected, means))
        except (RuntimeError, NotImplementedError) as error:  # torch has no such kernel for float64
            return Outcome("none", str(error)[:300])
        stage.value = 1
        found = _outcome(WAYS[way], program, wanted, order)
        stage.value = 0
        if found.status in ("wrong", "fails") and way in TORCHS:
            torchs = _outcome(TORCHS[way], program, wanted, order)
            if _is_alike(found, torchs):
                return Outcome("torch", found.text)
        return found


def _means(program: Program, n: int, order: int, half: bool, turn: int = 0) -> list[Expected] | None:
    return _expected_gradients(program, n, order, turn) if order else _expected(program, n, half, turn)


@dataclass(frozen=True)
class Wanted:
    """What a program means for a size, by eight draws, and by others (of another turn)."""

    n: int
    expected: list[Expected]
    means: Callable[..., list[Expected] | None]

    def surely(self) -> list[Expected]:
        """By many more draws: for what would be called wrong."""
        others = (self.means(turn=turn) for turn in range(1, reference.ROUNDS))
        return reference.widest([self.expected, *(e for e in others if e is not None)])


def _outcome(way: Callable[[Program], Results], program: Program, wanted: list[Wanted], order: int) -> Outcome:
    try:
        return _compared(way(program), wanted, order)
    except Refused as error:
        return Outcome("refused", str(error)[:300])
    except (lapilli.CompileError, lapilli.IntegerOverflowError) as error:
        if "please report this" in str(error):
            return Outcome("fails", str(error)[:600])
        return Outcome("refused", f"{type(error).__name__}: {str(error)[:300]}")
    except (torch._dynamo.exc.TorchRuntimeError, torch._dynamo.exc.Unsupported) as error:
        return Outcome("refused", f"torch: {type(error).__name__}: {str(error)[:300]}")
    except Exception as error:
        if "has internal overlap" in str(error) and "functionalization" in str(error):
            return Outcome("refused", f"torch: {str(error)[:300]}")
        if "does not fit into 32 bits" in str(error):
            return Outcome("refused", str(error)[:300])
        text = f"{type(error).__name__}: {str(error)[:600]}"
        return Outcome("fails", text + "\n" + "".join(traceback.format_tb(error.__traceback__)[-4:]))


def _is_alike(one: Outcome, other: Outcome) -> bool:
    """Whether both raise the same, but for the tensors and addresses that it names, or have the same result wrong, or torch
    believes that a view is possible that is none (strides of fake tensors that are not those of the real ones)."""
    if one.status == "wrong" and other.text.startswith("RuntimeError: view size is not compatible"):
        return True
    if one.status != other.status:
        return False
    if one.status == "fails":
        first, second = (
            re.sub(r"backend='\w+'|0x[0-9a-f]+|\d{9,}", "", o.text).partition("[")[0] for o in (one, other)
        )
        return first == second
    places = [re.match(r"(result|gradient) \d+ \(n = \d+\)", o.text) for o in (one, other)]
    return None not in places and len({p.group() for p in places if p}) == 1


@cache
def _expected(program: Program, n: int, half: bool, turn: int) -> list[Expected]:
    return reference.expected(program, n, half, turn)


@cache
def _expected_gradients(program: Program, n: int, order: int, turn: int) -> list[Expected] | None:
    return reference.expected_gradients(program, n, order, turn)


@cache
def _with_derivatives(program: Program, order: int) -> Program | None:
    return reference.with_derivatives(program, order)


def forget() -> None:
    """What is kept of earlier programs."""
    _expected.cache_clear()
    _expected_gradients.cache_clear()
    _with_derivatives.cache_clear()
    torch._dynamo.reset()


def _compared(run: Results, wanted: list[Wanted], order: int) -> Outcome:
    elements = left_out = 0
    for one_size in wanted:
        n, expected = one_size.n, one_size.expected
        try:
            found = list(run(n))
        except NotTaken:
            continue
        if len(found) != len(expected):
            return Outcome("wrong", f"{len(found)} results for {len(expected)}")
        for k, (one, other) in enumerate(zip(found, expected, strict=True)):
            what = f"{'gradient' if order else 'result'} {k} (n = {n})"
            wrong = complaint(one, other, what) and complaint(one, one_size.surely()[k], what)
            if wrong:
                return Outcome("wrong", wrong)
            elements += other.value.numel()
            left_out += int(other.bound.isinf().sum())
    return Outcome("right", "", elements, left_out)


def _model(program: Program, values: Values) -> torch.nn.Module:
    made: torch.nn.Module = defined(program.source(), "Model")(*(values[leaf.name] for leaf in program.parameters))
    return made


def _after(program: Program, results: Sequence[Any], values: Values) -> list[Any]:
    return [*results, *(values[leaf.name] for leaf in program.arguments)]


def _compiled(precision: Any) -> Callable[[Program], Results]:
    def prepare(program: Program) -> Results:
        example = program.make(program.sizes[0])
        given = tuple(example[leaf.name] for leaf in program.arguments)
        shapes = None
        if program.is_open:
            dim = torch.export.Dim("n", min=2, max=64)
            shapes = [{k: dim for k, s in enumerate(leaf.shape) if isinstance(s, str)} for leaf in program.arguments]
        try:
            exported = _exported(_model(program, example), given, shapes)
            sizes = program.sizes
        except Refused:
            if shapes is None:
                raise
            exported, sizes = _exported(_model(program, example), given, None), program.sizes[:1]
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            made = lapilli.compile(exported, precision=precision, target=_target(program, precision))
        if any("torch fixes it" in str(w.message) for w in told):
            sizes = program.sizes[:1]

        def run(n: int) -> Sequence[Any]:
            if n not in sizes:
                raise NotTaken
            values = program.make(n)
            try:
                return _after(program, _tuple(made(*(values[leaf.name] for leaf in program.arguments))), values)
            finally:
                if n == sizes[-1]:
                    made.close()

        return run

    return prepare


def _exported(model: torch.nn.Module, given: tuple[torch.Tensor, ...], shapes: Any) -> torch.export.ExportedProgram:
    """As torch exports it; what torch itself refuses is not ours."""
    if not given:
        raise Refused("no arguments")
    try:
        return torch.export.export(model, given, dynamic_shapes=shapes and tuple(shapes))
    except Exception as error:
        raise Refused(f"torch.export: {type(error).__name__}: {str(error)[:200]}") from None


def _tuple(results: Any) -> list[Any]:
    return list(results) if isinstance(results, (tuple, list)) else [results]


def _device_of(program: Program) -> str:
    """Where the tensors of a program are for torch.compile: on the CPU or on the device."""
    return "vulkan" if program.seed % 2 and _eager() else "cpu"


def _eager() -> bool:
    """Whether there is the device "vulkan"; it is asked for where that is needed."""
    enable = getattr(__import__("lapilli.eager", fromlist=["eager"]), "enable", None)
    if enable is not None:
        enable()
    return bool(getattr(torch, "is_vulkan_available", lambda: False)())


def _by_torch(program: Program) -> Results:
    """The graph that a compiled program is made of, as torch runs it."""
    example = program.make(program.sizes[0])
    given = tuple(example[leaf.name] for leaf in program.arguments)
    run_graph = _exported(_model(program, example), given, None).run_decompositions({}).module()

    def run(n: int) -> Sequence[Any]:
        if n != program.sizes[0]:
            raise NotTaken
        values = program.make(n)
        with torch.no_grad():
            return _after(program, _tuple(run_graph(*(values[leaf.name] for leaf in program.arguments))), values)

    return run


def _dynamo(dynamic: bool, backend: str = "vulkan") -> Callable[[Program], Results]:
    def prepare(program: Program) -> Results:
        device = _device_of(program) if backend == "vulkan" else "cpu"
        made: dict[int, Any] = {}

        def run(n: int) -> Sequence[Any]:
            values = program.make(n, device)
            if not made:
                made[0] = torch.compile(_model(program, values), backend=backend, dynamic=dynamic)
            given = [values[leaf.name] for leaf in program.arguments]
            with torch.no_grad():
                return _after(program, _tuple(made[0](*given)), values)

        return run

    return prepare


def _eagerly(program: Program) -> Results:
    if not _eager():
        raise Refused("no eager device")

    def run(n: int) -> Sequence[Any]:
        values = program.make(n, "vulkan")
        names = [leaf.name for leaf in program.leaves]
        with torch.no_grad():
            return _after(program, defined(program.function(), "program")(*(values[k] for k in names)), values)

    return run


def _differentiable(
    program: Program, eager: bool, backend: str, dynamic: bool = False
) -> tuple[Callable[..., Any], list[int], str]:
    """A program as a function of its leaves, which it does not change; which of these have gradients; where they are to be."""
    if eager and not _eager():
        raise Refused("no eager device")
    names = [leaf.name for leaf in program.leaves]
    places = [names.index(name) for name in reference.differentiable(program)]
    device = "vulkan" if eager else _device_of(program) if backend == "vulkan" else "cpu"
    whole = defined(program.function(), "program")

    def fresh(*leaves: torch.Tensor) -> Any:
        return whole(*(t.clone() for t in leaves))

    dynamic = dynamic or program.is_open
    return fresh if eager else torch.compile(fresh, backend=backend, dynamic=dynamic), places, device


def _gradients(order: int, eager: bool, backend: str = "vulkan") -> Callable[[Program], Results]:
    def prepare(program: Program) -> Results:
        function, places, device = _differentiable(program, eager, backend)

        def run(n: int) -> Sequence[Any]:
            return reference.gradients(function, list(program.make(n, device).values()), places, order)

        return run

    return prepare


def _repeated(program: Program, backend: str = "vulkan") -> Results:
    """Gradients of graphs with dynamic sizes that are compiled for the sizes of each call."""
    function, places, device = _differentiable(program, False, backend, dynamic=True)

    def run(n: int) -> Sequence[Any]:
        kept = repeated_sizes.IN_A_ROW, repeated_sizes.need_fixed_sizes
        repeated_sizes.IN_A_ROW, repeated_sizes.need_fixed_sizes = 1, lambda graph: True
        try:
            return reference.gradients(function, list(program.make(n, device).values()), places, 1)
        finally:
            repeated_sizes.IN_A_ROW, repeated_sizes.need_fixed_sizes = kept

    return run


def _trained(eager: bool, backend: str = "vulkan") -> Callable[[Program], Results]:
    """Two steps whose gradients add up, and results that are changed in place before each: what is done with memory that a
    compiled function has given away, and what `reference.gradients` never does."""

    def prepare(program: Program) -> Results:
        function, places, device = _differentiable(program, eager, backend)
        changed = reference.changeable(program)

        def run(n: int) -> Sequence[Any]:
            try:
                return reference.accumulated(function, list(program.make(n, device).values()), places, changed)
            except RuntimeError as error:
                if not eager and "modified by an inplace operation" in str(error):  # a graph saves what it likes
                    raise Refused(f"torch: {str(error)[:200]}") from None
                raise

        return run

    return prepare


def _functional(program: Program, backend: str = "vulkan") -> Results:
    """Gradients of second order inside of what is compiled, by torch.func."""
    names = [leaf.name for leaf in program.leaves]
    places = [names.index(name) for name in reference.differentiable(program)]
    device = _device_of(program) if backend == "vulkan" else "cpu"
    whole = defined(program.function(), "program")

    example = reference.native(program, program.make(program.sizes[0]))[0]
    floating = [k for k, t in enumerate(example) if t.is_floating_point()]

    def total(outs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> torch.Tensor:
        return sum(((o * w).sum().float() for o, w in zip(outs, weights, strict=True)), torch.zeros((), device=device))

    def second(
        wanted: list[torch.Tensor], leaves: list[torch.Tensor], first: list[torch.Tensor], last: list[torch.Tensor]
    ) -> Any:
        def forward(wanted: list[torch.Tensor]) -> torch.Tensor:
            given = [t.clone() for t in leaves]
            for k, t in zip(places, wanted, strict=True):
                given[k] = t.clone()
            made = whole(*given)
            return total([made[k] for k in floating], first)

        return torch.func.grad(lambda w: total(torch.func.grad(forward)(w), last))(wanted)

    compiled = torch.compile(second, backend=backend, dynamic=program.is_open)

    def run(n: int) -> Sequence[Any]:
        shapes = [t for t in reference.native(program, program.make(n))[0] if t.is_floating_point()]
        values = list(program.make(n, device).values())
        wanted = [values[k] for k in places]
        weights = [w.to(device) for w in reference.weights_for(shapes, 0)]
        return list(compiled(wanted, values, weights, reference.weights_for(wanted, 1)))

    return run


WAYS: dict[str, Callable[[Program], Results]] = {
    "compile32": _compiled("fp32"),
    "compile16": _compiled("fp16"),
    "dynamo": _dynamo(False),
    "dynamo-dynamic": _dynamo(True),
    "grad": _gradients(1, eager=False),
    "repeated": _repeated,
    "grad2": _functional,
    "train": _trained(eager=False),
    "eager": _eagerly,
    "eager-grad": _gradients(1, eager=True),
    "eager-grad2": _gradients(2, eager=True),
    "eager-train": _trained(eager=True),
}
ORDERS = {"grad": 1, "repeated": 1, "grad2": 2, "train": 1, "eager-grad": 1, "eager-grad2": 2, "eager-train": 1}
"""Of the derivatives that a way takes."""
TORCHS: dict[str, Callable[[Program], Results]] = {
    "compile32": _by_torch,
    "compile16": _by_torch,
    "dynamo": _dynamo(False, "aot_eager"),
    "dynamo-dynamic": _dynamo(True, "aot_eager"),
    "grad": _gradients(1, eager=False, backend="aot_eager"),
    "repeated": partial(_repeated, backend="aot_eager"),
    "grad2": partial(_functional, backend="aot_eager"),
    "train": _trained(eager=False, backend="aot_eager"),
}
"""The same graphs without Lapilli."""
