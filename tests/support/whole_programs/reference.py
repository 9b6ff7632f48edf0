"""What a program means: torch in float64 on the CPU, and how far its results move when every intermediate result is disturbed by
a few units in its last place. Nobody can ask more of a computation in that precision, and a result that jumps (a comparison, a
rounding, an index) has no definite value at all."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from whole_programs.disturbed import HALVES, TINY, UNITS, Disturbed
from whole_programs.generate import run_step
from whole_programs.program import Program, Step, Values

RUNS = 8
FACTOR = 4.0
"""A result may differ by so many times what it moved by."""
MISSED = 1 / 32
"""Where torch itself, in a program's types, is beyond the bounds at so many elements of a result, its others may be as far off:
a second derivative that is 0 is the difference of two rounded products there, and another formula under a dispatch mode."""
ROUNDS = 8
"""As many draws again, so many times over, before a result is called wrong: where an exponential decides, eight draws may all miss
how far a value can go."""
LOUD = 3
"""Further runs, disturbed FACTOR times as much: what jumps there (a comparison, a rounding, a sign) has no definite value."""


def _meant(step: Step) -> str:
    """The text of a call where float64 stands for every floating-point type."""
    found = re.fullmatch(r"\{0\}\.to\(torch\.(float16|bfloat16)\)", step.text)
    if found:
        return f"{{0}}.to(torch.{found[1]}).to(torch.float64)"
    return step.text.replace("torch.float32", "torch.float64").replace(".float()", ".double()")


@dataclass(frozen=True)
class Expected:
    """Results in float64, and by how much others may differ from them, element by element (inf: by anything). logical: the
    dtype that torch gives."""

    value: torch.Tensor
    bound: torch.Tensor
    logical: torch.dtype
    shape: tuple[int, ...]


def native(program: Program, values: Values) -> tuple[list[torch.Tensor], Values]:
    """torch's own results in the program's types; the values are changed. And all values, by name, at the end."""
    env = dict(values)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in program.steps:
            env.update(zip(step.out, run_step(step, env), strict=False))
    return [env[name] for name in program.outputs], env


Run = Callable[[Values, "Disturbed | None"], list[torch.Tensor]]


def forward(program: Program, n: int) -> tuple[Run, Values, list[torch.dtype], list[torch.Tensor]]:
    """How to run a program in float64, on what; the types and values torch itself gives: of the outputs, then of the arguments
    as they are afterwards."""
    values = program.make(n)
    types: list[set[torch.dtype]] = []
    env = dict(values)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        for step in program.steps:
            made = run_step(step, env)
            env.update(zip(step.out, made, strict=False))
            types.append({t.dtype for t in (*made, *(env[a] for a in step.args))})
    names = [*program.outputs, *(leaf.name for leaf in program.arguments)]
    plain = [env[name] for name in names]

    def run(env: Values, mode: Disturbed | None) -> list[torch.Tensor]:
        env = dict(env)
        for step, kinds in zip(program.steps, types, strict=True):
            kept = torch.float32 if mode is None else mode.precision
            if mode is not None and kept is not torch.bfloat16:  # the coarsest that a step may compute in
                mode.precision = next((k for k in (torch.bfloat16, torch.float16) if k in kinds), kept)
            env.update(zip(step.out, run_step(step, env, text=_meant(step)), strict=False))
            if mode is not None:
                mode.precision = kept
        return [env[name] for name in names]

    return run, program.make(n), [t.dtype for t in plain], plain  # steps may have changed the first ones in place


def widened(values: Values) -> Values:
    """Copies in float64, the same tensors where they were the same."""
    made: dict[int, torch.Tensor] = {}
    for t in values.values():
        if id(t) not in made:
            copied = t.clone() if not t.is_floating_point() else t.to(torch.float64)
            made[id(t)] = copied if copied is not t else t.clone()
    return {name: made[id(t)] for name, t in values.items()}


def expected(program: Program, n: int, half: bool = False, turn: int = 0) -> list[Expected]:
    """Of the outputs, then of the arguments after the run. half: everything may be stored in float16. turn: other draws."""
    run, values, types, plain = forward(program, n)
    return _spread(run, values, types, plain, half, program, torch.float32, turn)


def widest(turns: Iterable[list[Expected]]) -> list[Expected]:
    """The same results by several turns: their bounds are the largest of each."""
    return [replace(same[0], bound=torch.stack([e.bound for e in same]).amax(0)) for same in zip(*turns, strict=True)]


def _spread(
    run: Run,
    values: Values,
    types: Sequence[torch.dtype],
    plain: Sequence[torch.Tensor],
    half: bool,
    program: Program,
    least: torch.dtype,
    turn: int = 0,
) -> list[Expected]:
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        # attention as products and a softmax, each of which is disturbed
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.simplefilter("ignore")
            exact = [t.detach() for t in run(widened(values), None)]
            moved: list[Any] = []
            loud: list[Any] = []
            # Numbers with equals among them: where they are disturbed too, jumps do not count.
            whole = {leaf.name for leaf in program.leaves if leaf.kind in ("ties", "literal") and not half}
            few = RUNS * (2 if torch.bfloat16 in types else 1)  # which moves by rare, large steps
            rounding = range(few, few + 6 * half)  # all, then some; equals in their order, in the reverse, and in any
            definite = few + len(rounding)  # runs whose jumps count
            quiet = definite + 4 if whole else definite
            signs: dict[int, torch.Tensor] = {}
            # In bfloat16 numbers are far apart: few draws may all miss a jump.
            for k in range(quiet + LOUD * (4 if torch.bfloat16 in types else 1)):
                place = (0, 1, RUNS - 1)[(k - few) % 3] if k in rounding else k
                mode = Disturbed(1000 * k + 7 + 1_000_003 * turn, min(place, RUNS - 1))
                mode.signs = signs
                mode.rounded = 0.0 if k not in rounding else 1.0 if k < few + 3 else 0.5
                mode.loudness = 1 if k < quiet else FACTOR
                mode.precision = torch.float16 if half and least is torch.float32 else least
                mode.halves = mode.precision is torch.float16
                given = widened(values)
                done: set[int] = set()
                for name, t in given.items():
                    same = k < 2 or (name in whole and not definite <= k < quiet)
                    if t.is_floating_point() and not same and id(t) not in done:
                        mode.disturb(t)
                        done.add(id(t))
                with mode:
                    (moved if k < quiet else loud).append([t.detach() for t in run(given, mode)])
    finally:
        torch.set_default_dtype(default)
    texts = [*(leaf.dtype for leaf in program.leaves), *(step.text for step in program.steps)]
    narrow = half or any(re.search(r"\bfloat16|\.half", text) for text in texts)  # where it may overflow
    results = []
    for k, (value, logical, own) in enumerate(zip(exact, types, plain, strict=True)):
        others = [m[k] for m in moved]
        if not value.is_floating_point():
            bound = torch.zeros(value.shape, dtype=torch.float64)
            for other in [*others[:definite], *(m[k] for m in loud), own]:
                bound[(other != value) if other.shape == value.shape else ...] = float("inf")
        else:
            bound = torch.zeros(value.shape, dtype=torch.float64)
            largest = value[value.isfinite()].abs().max() if value.isfinite().any() else value.new_zeros(())
            for run_number, other in enumerate(others):
                apart = (other - value).abs()
                same = (other == value) | (other.isnan() & value.isnan())
                if run_number >= definite:
                    same |= ~(apart < largest * 1000 * UNITS[least])
                bound = torch.maximum(bound, torch.where(same, 0.0, apart.nan_to_num(nan=float("inf"))))
            stored = torch.float16 if half and logical is torch.float32 else logical
            # A few draws may all be small for one element: its neighbours say what to expect.
            usual = bound[bound.isfinite()].median() if bound.isfinite().any() else bound.new_zeros(())
            bound = (
                torch.maximum(FACTOR * bound, usual)
                + value.abs().nan_to_num(posinf=0.0) * 4 * UNITS[stored]
                + TINY[stored] * 4
            )
            # What is disturbed by as much as it measures does not answer in proportion: one over what is a rounding error.
            measured = value[value.isfinite() & (value != 0)].abs()
            size = measured.median() if measured.numel() else value.new_full((), float("inf"))
            bound = torch.where(bound > size, float("inf") if narrow else FACTOR * bound, bound)
            if logical in HALVES:
                bound += value.abs().nan_to_num(posinf=0.0) * UNITS[logical]
            near_end = value.isfinite() & (value.abs() + bound > torch.finfo(stored).max)
            bound[near_end] = float("inf")  # may have overflown
            for other in (m[k] for m in loud):
                jumps = ~_within(other, value, 16 * bound)
                bound[jumps] = float("inf")
            # Where torch itself is elsewhere in these types, the disturbances have missed something.
            unlike = ~_within(own.detach().double(), value, bound)
            missed = (own.detach().double() - value).abs()[unlike]
            if missed.numel() >= max(2, unlike.numel() * MISSED):  # and at its neighbours, by as much
                bound = torch.maximum(bound, FACTOR * missed.nan_to_num(nan=float("inf")).median())
            bound[unlike] = float("inf")
        results.append(Expected(value, bound, logical, tuple(own.shape)))
    return results


def _within(found: torch.Tensor, value: torch.Tensor, bound: torch.Tensor) -> torch.Tensor:
    same = (found == value) | (found.isnan() & value.isnan())
    return same | ((found - value).abs() <= bound) | (bound == float("inf"))


def complaint(found: Any, wanted: Expected, what: str) -> str | None:
    """What is wrong with a result; None when nothing is."""
    if not isinstance(found, torch.Tensor):
        return f"{what} is {type(found).__name__}"
    if tuple(found.shape) != wanted.shape:
        return f"{what} has shape {tuple(found.shape)}, torch's has {wanted.shape}"
    if found.dtype != wanted.logical:
        return f"{what} is {found.dtype}, torch's is {wanted.logical}"
    if wanted.value.shape != wanted.shape:
        return None
    found = found.detach().cpu()
    if not wanted.value.is_floating_point():
        wrong = (found != wanted.value) & (wanted.bound == 0)
    else:
        wrong = ~_within(found.double(), wanted.value, wanted.bound)
    if not wrong.any():
        return None
    place = tuple(int(k) for k in wrong.nonzero()[0])
    return (
        f"{what}: {int(wrong.sum())} of {wrong.numel()} elements are wrong, the first at {place}: {found[place].item()!r} for "
        f"{wanted.value[place].item()!r} ± {float(wanted.bound[place]):.2g}"
    )


# Gradients


def weights_for(tensors: Sequence[torch.Tensor], level: int) -> list[torch.Tensor]:
    """Eighths in [0.5, 1.5] for each, to be multiplied with it: every type has them."""
    made = []
    for k, t in enumerate(tensors):
        random = torch.Generator().manual_seed(100 * level + k)
        made.append((torch.randint(4, 13, t.shape, generator=random) / 8).to(t.device, t.dtype))
    return made


def differentiable(program: Program) -> list[str]:
    """The leaves that gradients are taken for."""
    given = {name for pair in program.twice for name in pair}
    return [
        x.name
        for x in program.leaves
        if x.dtype in ("float32", "float16", "bfloat16") and x.name not in given and x.layout != "expanded"
    ]


Function = Callable[..., Sequence[torch.Tensor]]


def gradients(f: Function, leaves: Sequence[torch.Tensor], places: Sequence[int], order: int) -> list[torch.Tensor]:
    """Of the weighted sum of a function's floating-point results for some of its arguments; of second order, the gradient of the
    weighted sum of these. Zeros where nothing depends on one."""
    given = [t.detach().clone().requires_grad_(k in places) for k, t in enumerate(leaves)]
    wanted = [given[k] for k in places]
    outs: list[torch.Tensor | None] = [t for t in f(*given) if t.is_floating_point()]
    for level in range(order):
        full: list[Any] = [t if t is not None else x for t, x in zip(outs, wanted, strict=True)] if level else outs
        pairs = [
            (t, w) for t, w in zip(outs, weights_for(full, level), strict=True) if t is not None and t.requires_grad
        ]
        if not pairs:
            break
        seen, weights = zip(*pairs, strict=True)
        more = level + 1 < order
        # The second time too: after a change through a view, torch reads what it saved twice, and whether before it is let go of
        # depends on the thread (CUDA has that as well). Compiled graphs do not allow it.
        outs = list(torch.autograd.grad(seen, wanted, weights, order > 1, create_graph=more, allow_unused=True))
        if level + 1 == order:
            return [torch.zeros_like(x) if t is None else t for t, x in zip(outs, wanted, strict=True)]
    return [torch.zeros_like(x) for x in wanted]


def accumulated(
    f: Function, leaves: Sequence[torch.Tensor], places: Sequence[int], changed: Sequence[int]
) -> list[torch.Tensor]:
    """What `gradients` of first order are, by two calls of `backward` with a quarter of the weights each: some results are
    doubled in place before. All of that is exact."""
    given = [t.detach().clone().requires_grad_(k in places) for k, t in enumerate(leaves)]
    for _ in range(2):
        outs = list(f(*given))
        for k in changed:
            outs[k].mul_(2)
        floats = [(k, t) for k, t in enumerate(outs) if t.is_floating_point()]
        weights = weights_for([t for _, t in floats], 0)
        pairs = [
            (t, w / (4 if k in changed else 2)) for (k, t), w in zip(floats, weights, strict=True) if t.requires_grad
        ]
        if pairs:
            seen, given_weights = zip(*pairs, strict=True)
            torch.autograd.backward(seen, given_weights)
    grads = [given[k].grad for k in places]
    return [torch.zeros_like(given[k]) if g is None else g for k, g in zip(places, grads, strict=True)]


def changeable(program: Program) -> list[int]:
    """Results that torch can double in place before it takes gradients, for no derivative reads them."""
    names = [leaf.name for leaf in program.leaves]
    places = [names.index(name) for name in differentiable(program)]

    def whole(*leaves: torch.Tensor) -> list[torch.Tensor]:
        return native(program, dict(zip(names, (t.clone() for t in leaves), strict=True)))[0]

    def has(some: list[int]) -> bool:
        try:
            for n in program.sizes:
                accumulated(whole, list(program.make(n).values()), places, some)
        except RuntimeError:
            return False
        return True

    outs = whole(*program.make(program.sizes[0]).values())
    memory = Counter(t.untyped_storage().data_ptr() for t in outs)
    alone = [k for k, t in enumerate(outs) if t.is_floating_point() and memory[t.untyped_storage().data_ptr()] == 1]
    found = [k for k in alone if has([k])]
    return found if has(found) else found[:1]


def _overlaps(t: torch.Tensor) -> bool:
    """Whether windows of `unfold` overlap: AOTAutograd (aot_eager too) gives other gradients where such a view is a result."""
    moved = [(size, step) for size, step in zip(t.shape, t.stride(), strict=True) if step]
    return math.prod(size for size, _ in moved) > 1 + sum((size - 1) * step for size, step in moved)


def with_derivatives(program: Program, order: int) -> Program | None:
    """The part of a program whose results torch has gradients of: one operator without a derivative would spoil the rest.
    None where there is none."""

    def has(candidate: Program) -> bool:
        names, wanted = [leaf.name for leaf in candidate.leaves], differentiable(candidate)

        def whole(*leaves: torch.Tensor) -> list[torch.Tensor]:
            return native(candidate, dict(zip(names, (t.clone() for t in leaves), strict=True)))[0]

        try:
            for n in candidate.sizes:
                gradients(whole, list(candidate.make(n).values()), [names.index(name) for name in wanted], order)
        except (RuntimeError, NotImplementedError):
            return False
        return bool(wanted)

    def only(outputs: Sequence[str]) -> Program:
        return replace(program, outputs=tuple(outputs)).used()

    made = dict(zip(program.outputs, native(program, program.make(program.sizes[0]))[0], strict=True))
    dense = [name for name in program.outputs if not _overlaps(made[name])]
    if len(dense) < len(program.outputs):
        program = only(dense)
    if program.outputs and has(program):
        return program
    part = only([name for name in program.outputs if has(only([name]))])
    return part if part.outputs and has(part) else None


def expected_gradients(program: Program, n: int, order: int, turn: int = 0) -> list[Expected] | None:
    """None where torch has none. turn: other draws."""
    names = differentiable(program)
    if not names:
        return None
    values = program.make(n)
    all_names = [leaf.name for leaf in program.leaves]
    places = [all_names.index(name) for name in names]
    run, _, types, _ = forward(program, n)
    seen = set(types) | {t.dtype for t in values.values()}
    env = native(program, program.make(n))[1]
    seen |= {t.dtype for t in env.values() if isinstance(t, torch.Tensor)}
    least = next((k for k in (torch.bfloat16, torch.float16) if k in seen), torch.float32)

    def whole(*leaves: torch.Tensor) -> list[torch.Tensor]:
        fresh = dict(zip(all_names, (t.clone() for t in leaves), strict=True))
        return native(program, fresh)[0]

    try:
        plain = gradients(whole, list(values.values()), places, order)
    except (RuntimeError, NotImplementedError):
        return None

    def differentiated(env: Values, mode: Disturbed | None) -> list[torch.Tensor]:
        def f(*leaves: torch.Tensor) -> list[torch.Tensor]:
            fresh = dict(zip(all_names, (t.clone() for t in leaves), strict=True))
            kept = mode.precision if mode is not None else None
            made = run(fresh, mode)[: len(program.outputs)]
            if mode is not None and kept is not None:
                mode.precision = kept
            return made

        return gradients(f, [env[name] for name in all_names], places, order)

    try:
        return _spread(differentiated, values, [t.dtype for t in plain], plain, False, program, least, turn)
    except (RuntimeError, NotImplementedError):
        return None
