"""Makes random programs by running them: a call that torch refuses on the CPU, or whose numbers get out of hand, is dropped."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from whole_programs import families
from whole_programs.program import FLOATS, INTEGERS, NAMES, Leaf, Program, Size, Step, Values

LARGEST = 6000
"""Elements of a value."""
BOUND = {"float16": 1000.0, "bfloat16": 1e4, "float32": 1e5}
"""Of absolute values: nothing overflows, in whatever order it is computed."""
SIZES = [2, 3, 4, 5, 7, 8, 11, 13, 16, 17, 31]
STRANGE = 10**10
"""Seeds from here on are short programs of small tensors and unusual numbers, to find faults of NaN, infinity and size 1."""
WIDE = 2 * 10**10
"""Seeds from here on are programs whose calls hardly read each other: each has arguments of its own, some with infinities, NaN and
zeros of both signs, of the usual sizes. In other programs what is not finite soon spoils everything after it."""


class Generator:
    """A program while it is being made, with its values for each of the sizes that it is made for."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        r = self.random
        self.seed = seed
        self.zero = r.random() < 0.05
        self.strange = STRANGE <= seed < WIDE
        self.wide = seed >= WIDE
        self.special = r.random() < 0.08 or self.strange
        self.narrow = r.random() < 0.6  # types other than float32, int64 and bool
        self.open = r.random() < 0.4
        first = r.choice([2, 3, 4, 5, 6, 8, 9])
        self.sizes = (first, r.choice([n for n in (2, 3, 5, 7, 10, 13, 16) if n != first])) if self.open else (first,)
        self.leaves: list[Leaf] = []
        self.steps: list[Step] = []
        self.envs: list[Values] = [{} for _ in self.sizes]
        self.count = 0

    # What there is

    @property
    def env(self) -> Values:
        return self.envs[0]

    def value(self, name: str) -> torch.Tensor:
        return self.env[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.env[name].shape)

    def rank(self, name: str) -> int:
        return len(self.shape(name))

    def open_shape(self, name: str) -> tuple[Size | None, ...]:
        """Sizes; "n" where it is the open size, None where it depends on that otherwise."""
        shapes = [tuple(env[name].shape) for env in self.envs]
        result: list[Size | None] = []
        for sizes in zip(*shapes, strict=True):
            if len(set(sizes)) == 1:
                result.append(sizes[0])
            else:
                result.append("n" if sizes == self.sizes else None)
        return tuple(result)

    def static(self, name: str, dim: int) -> int | None:
        size = self.open_shape(name)[dim]
        return size if isinstance(size, int) else None

    def pick(self, condition: Callable[[torch.Tensor], bool] = lambda t: True) -> str | None:
        """A value, rather a recent one."""
        if self.wide and self.random.random() < 0.85:
            return None
        names = [name for name, t in self.env.items() if condition(t)]
        if not names:
            return None
        made = [name for name in names if name.startswith("v")]
        if made and self.random.random() < 0.8:
            names = made
        if self.random.random() < 0.6:
            names = names[-4:]
        return self.random.choice(names)

    def floating(self, least: int = 0, most: int = 6, kind: Callable[[torch.Tensor], bool] = lambda t: True) -> str:
        """A floating-point value with so many dimensions, made if there is none."""
        found = self.pick(lambda t: t.is_floating_point() and least <= t.ndim <= most and kind(t))
        if found is not None and self.random.random() < 0.95:
            return found
        return self.leaf(self.any_shape(least, min(most, max(4, least))))

    def integral(self, least: int = 0) -> str:
        found = self.pick(lambda t: not t.is_floating_point() and t.dtype != torch.bool and t.ndim >= least)
        if found is not None and self.random.random() < 0.9:
            return found
        kind = self.random.choice(["integer", "integer", "wide"])
        return self.leaf(self.any_shape(least, max(3, least)), self.integer_type(), kind)

    def boolean(self, like: str) -> str:
        """A mask for a value."""
        shape = self.shape(like)
        found = self.pick(lambda t: t.dtype == torch.bool and tuple(t.shape) == shape)
        if found is not None and self.random.random() < 0.7:
            return found
        return self.leaf(self.broadcast(like), "bool", "bool")

    def integer_type(self) -> str:
        return self.random.choice(INTEGERS) if self.narrow else "int64"

    def float_type(self) -> str:
        return self.random.choice(["float32", "float32", *FLOATS]) if self.narrow else "float32"

    # What is made

    def name(self, prefix: str) -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def any_shape(self, least: int, most: int) -> tuple[Size, ...]:
        r = self.random
        rank = min(max(least, r.choice([0, 1, 2, 2, 2, 3, 3, 3, 4, 4, 5, 6])), max(most, least))
        shape: list[Size] = []
        room = LARGEST // 2
        for _ in range(rank):
            if self.open and r.random() < 0.4:
                shape.append("n")
                room //= max(self.sizes)
                continue
            size = r.choice([1, 1, 2, 3, 4, 5] if self.strange else SIZES)
            if r.random() < 0.12:
                size = 1
            if self.zero and r.random() < 0.1:
                size = 0
            size = min(size, max(room, 1))
            room //= max(size, 1)
            shape.append(size)
        return tuple(shape)

    def broadcast(self, like: str) -> tuple[Size, ...]:
        """A shape that broadcasts to that of a value: with sizes of 1, without leading dimensions."""
        shape: list[Size] = []
        for size in self.open_shape(like):
            shape.append(1 if size is None or self.random.random() < 0.2 else size)
        while shape and self.random.random() < 0.2:
            shape.pop(0)
        return tuple(shape)

    def leaf(
        self,
        shape: Sequence[Size | None],
        dtype: str | None = None,
        kind: str | None = None,
        parameter: bool | None = None,
        high: int = 0,
    ) -> str:
        """A new tensor that the program is given."""
        r = self.random
        dtype = dtype or self.float_type()
        if kind is None:
            kind = r.choice(["normal", "normal", "normal", "unit", "ties"])
            if self.special and r.random() < 0.5:
                kind = "special"
            if self.wide:
                kind = r.choice(["rare", "rare", "special", "normal"])
        sizes = tuple(1 if s is None else s for s in shape)
        if parameter is None:
            parameter = r.random() < 0.15
        parameter = parameter and all(isinstance(s, int) for s in sizes)
        layout = r.choice(["plain"] * 6 + ["transposed", "expanded", "strided", "offset"])
        made = Leaf(
            self.name("w" if parameter else "x"), sizes, dtype, kind, r.randrange(2**31), layout, parameter, high
        )
        self.leaves.append(made)
        for env, n in zip(self.envs, self.sizes, strict=True):
            env[made.name] = made.make(n)
        return made.name

    def same_shape(self, name: str, dtype: str | None = None) -> str:
        """Another floating-point value that broadcasts to this one; rarely this one."""
        r = self.random
        shape = self.shape(name)

        def fits(t: torch.Tensor) -> bool:
            try:
                return t.is_floating_point() and torch.broadcast_shapes(t.shape, shape) == shape
            except RuntimeError:
                return False

        found = self.pick(lambda t: fits(t) and tuple(t.shape) == shape) if r.random() < 0.5 else self.pick(fits)
        if found is not None and (found != name or r.random() < 0.2):
            return found
        return self.leaf(self.broadcast(name), dtype)

    def emit(self, text: str, *args: str, results: int = 1) -> tuple[str, ...] | None:
        """Adds a call if it can be done and its results are tame. results: how many tensors it gives, 0: changes {0}."""
        step = Step(tuple(self.name("v") for _ in range(results)), text, args)
        envs = copy.deepcopy(self.envs) if results == 0 else self.envs
        made = []
        try:
            for env in envs:
                given = run_step(step, env)
                if any(not isinstance(g, torch.Tensor) for g in given):
                    return None
                touched = list(given) if results else list(env.values())
                if not all(_tame(t, self.wide) for t in touched):
                    return None
                made.append(given)
        except (
            RuntimeError,
            ValueError,
            TypeError,
            IndexError,
            NotImplementedError,
            AssertionError,
            ZeroDivisionError,
        ):
            return None
        if len({tuple((t.dtype, t.ndim) for t in given) for given in made}) != 1:
            return None
        if results == 0:
            self.envs = envs
        else:
            for env, given in zip(self.envs, made, strict=True):
                env.update(zip(step.out, given, strict=True))
        self.steps.append(step)
        return step.out

    def finish(self) -> Program:
        r = self.random
        made = [name for step in self.steps for name in step.out]
        # The last values, those that nobody reads, and a few others.
        read = {a for s in self.steps for a in s.args}
        ends = [name for name in made if name not in read]
        outputs = r.sample(ends, min(len(ends), r.choice([2, 6, 12, 20]))) if ends else made[-1:]
        outputs += r.sample(made, min(len(made), r.choice([0, 0, 1, 2])))
        if r.random() < 0.1:
            outputs.append(r.choice(outputs))
        arguments = [leaf for leaf in self.leaves if not leaf.parameter]
        if r.random() < 0.06 and arguments:
            outputs.append(r.choice(arguments).name)
        return Program(self.seed, tuple(self.leaves), tuple(self.steps), tuple(outputs), self.sizes)


def run_step(step: Step, env: Values, space: dict[str, Any] | None = None, text: str | None = None) -> tuple[Any, ...]:
    """Does a call on the values of an environment; its results (none where it changes a value)."""
    scope = {**NAMES, **(space or {}), **{a: env[a] for a in step.args}}
    source = (text or step.text).format(*step.args)
    if not step.out:
        exec(source, scope)
        return ()
    result = eval(source, scope)
    if len(step.out) == 1 and isinstance(result, torch.Tensor):
        return (result,)
    if not isinstance(result, (tuple, list)) or len(result) != len(step.out):
        raise TypeError(f"{len(step.out)} results are not what {source} gives")
    return tuple(result)


def _tame(t: torch.Tensor, infinite: bool) -> bool:
    if t.is_complex() or t.dtype == torch.float64 or t.numel() > LARGEST or t.ndim > 6 or t.layout != torch.strided:
        return False
    if t.dtype in (torch.int64, torch.int32) and t.numel():
        return bool(t.abs().max() < 2**30)
    if not t.is_floating_point() or not t.numel():
        return True
    finite = t[t.isfinite()]
    if infinite and not finite.numel():
        return True
    return (infinite or finite.numel() * 2 > t.numel()) and bool(
        finite.abs().max() < BOUND[str(t.dtype).removeprefix("torch.")]
    )


def program(seed: int) -> Program:
    """The program of a seed; the same on every machine with the same torch."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        g = Generator(seed)
        wanted = g.random.choice([2, 3, 5, 8] if g.strange else [10, 12, 15, 20, 30, 60])
        for _ in range(g.random.randint(1, 3)):
            g.leaf(g.any_shape(1, 4), parameter=False)
        chosen = list(_families(g))
        tries = 0
        while len(g.steps) < wanted and tries < 6 * wanted:
            tries += 1
            leaves, envs = len(g.leaves), [set(env) for env in g.envs]
            before = len(g.steps)
            g.random.choice(chosen)(g)
            if len(g.steps) == before:  # dropped: its new arguments too
                del g.leaves[leaves:]
                for env, names in zip(g.envs, envs, strict=True):
                    for name in env.keys() - names:
                        del env[name]
        result = g.finish().used()
        if not result.arguments:
            extra = replace(result.leaves[0], parameter=False) if result.leaves else None
            result = replace(result, leaves=(extra, *result.leaves[1:])) if extra else program(seed + 10**9)
        return result


def _families(g: Generator) -> Iterator[Callable[[Any], None]]:
    """Kinds of calls, each as often as its weight says; a program leans to a few of them."""
    favourites = g.random.sample(list(families.FAMILIES), 3)
    for name, (weight, make) in families.FAMILIES.items():
        for _ in range(weight * (3 if name in favourites else 1)):
            yield make
