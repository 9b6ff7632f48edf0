"""Smaller programs, to find the smallest that still fails."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import torch

from whole_programs import reference
from whole_programs.program import Leaf, Program, Step, Values, dump


def candidates(program: Program) -> Iterator[Program]:
    """Programs a step smaller that torch runs, the boldest first."""
    seen = {program}
    for candidate in _all(program):
        smaller = candidate.used()
        if smaller in seen or not smaller.arguments or not smaller.outputs:
            continue
        seen.add(smaller)
        if _runs(smaller):
            yield smaller


def _all(program: Program) -> Iterator[Program]:
    if len(program.sizes) > 1:
        for n in program.sizes:
            yield closed(program, n)
        return_sizes = replace(program, sizes=program.sizes[:1])
        yield return_sizes
    if len(program.sizes) == 1:
        yield from _windows(program)
    if len(program.outputs) > 1:
        for name in dict.fromkeys(program.outputs):
            yield replace(program, outputs=(name,))
        for k in range(len(program.outputs)):
            yield replace(program, outputs=program.outputs[:k] + program.outputs[k + 1 :])
    if program.twice:
        yield replace(program, twice=())
    if len(program.sizes) == 1:
        yield from _cuts(program)
    for k, step in enumerate(program.steps):
        if not step.out:
            yield replace(program, steps=program.steps[:k] + program.steps[k + 1 :])
    for k, step in enumerate(program.steps):
        for name in step.args:
            if len(step.out) == 1:
                yield _replaced(replace(program, steps=program.steps[:k] + program.steps[k + 1 :]), step.out[0], name)
        if len(step.out) == 1:  # an output of what it reads
            yield replace(program, steps=program.steps[:k] + program.steps[k + 1 :], outputs=tuple(
                n for o in program.outputs for n in ((step.args) if o == step.out[0] else (o,))
            ))  # fmt: skip
    for k, leaf in enumerate(program.leaves):
        changes = []
        if leaf.layout != "plain":
            changes.append(replace(leaf, layout="plain"))
        if leaf.parameter:
            changes.append(replace(leaf, parameter=False))
        if leaf.dtype in ("float16", "bfloat16"):
            data = dump(leaf.make(1).float()) if leaf.kind == "literal" else ""
            changes.append(replace(leaf, dtype="float32", data=data))
        if leaf.kind in ("special", "wide"):
            changes.append(replace(leaf, kind="integer" if leaf.kind == "wide" else "normal"))
        for changed in changes:
            yield replace(program, leaves=(*program.leaves[:k], changed, *program.leaves[k + 1 :]))
    yield from _smaller_sizes(program)
    yield from _shorter(program)


def closed(program: Program, n: int) -> Program:
    """For one size only."""
    leaves = tuple(replace(leaf, shape=leaf.sizes(n)) for leaf in program.leaves)
    return replace(program, leaves=leaves, sizes=(n,))


def _history(program: Program) -> list[dict[str, torch.Tensor]]:
    """Every value before each step and after the last."""
    env = program.make(program.sizes[0])
    at = [{name: t.clone() for name, t in env.items()}]
    for step in program.steps:
        env.update(zip(step.out, reference.run_step(step, env), strict=False))  # type: ignore[attr-defined]
        at.append({name: t.clone() for name, t in env.items()})
    return at


def _literal(name: str, t: torch.Tensor) -> Leaf:
    return Leaf(name, tuple(t.shape), str(t.dtype).removeprefix("torch."), "literal", 0, data=dump(t))


def _windows(program: Program) -> Iterator[Program]:
    """A run of steps by itself: everything it makes is a result, everything before is given as numbers."""
    program = program if len(program.sizes) == 1 else closed(program, program.sizes[0])
    try:
        at = _history(program)
    except Exception:
        return
    many = len(program.steps)
    given = {leaf.name: leaf for leaf in program.leaves}
    width = many // 2
    while width:
        for start in sorted({*range(0, many - width + 1, max(width // 2, 1)), many - width}, reverse=True):
            steps = program.steps[start : start + width]
            made = [name for s in steps for name in s.out]
            asked = {a for s in steps for a in s.args} - set(made)
            leaves = tuple(given[a] if a in given and start == 0 else _literal(a, at[start][a]) for a in sorted(asked))
            wanted = [o for o in program.outputs if o in made]
            for outputs in dict.fromkeys([tuple(wanted), tuple(made)]):
                if outputs:
                    yield replace(program, leaves=leaves, steps=steps, outputs=outputs, twice=())
        width //= 2


def _cuts(program: Program) -> Iterator[Program]:
    """What leads to one value is replaced by its numbers."""
    try:
        at = _history(program)
    except Exception:
        return
    many = len(program.steps)
    for k in sorted(range(many - 1), key=lambda k: abs(k - many // 2)):
        step = program.steps[k]
        if not step.out or any(at[k + 1][name].numel() > 4000 for name in step.out):
            continue
        made = tuple(_literal(name, at[k + 1][name]) for name in step.out)
        yield replace(program, leaves=program.leaves + made, steps=program.steps[:k] + program.steps[k + 1 :])


def _replaced(program: Program, old: str, new: str) -> Program:
    steps = tuple(replace(s, args=tuple(new if a == old else a for a in s.args)) for s in program.steps)
    return replace(program, steps=steps, outputs=tuple(new if o == old else o for o in program.outputs))


def _smaller_sizes(program: Program) -> Iterator[Program]:
    """Every place of a size becomes a smaller one, in all shapes at once."""
    sizes = sorted({s for leaf in program.leaves for s in leaf.shape if isinstance(s, int) and s > 1}, reverse=True)
    for size in sizes:
        for smaller in {1, 2, size // 2, size - 1} - {0, size}:

            def with_size(leaf: Leaf, size: int = size, smaller: int = smaller) -> Leaf:
                shape = tuple(smaller if s == size else s for s in leaf.shape)
                if shape == leaf.shape:
                    return leaf
                if leaf.kind == "literal":
                    data = leaf.make(1)[tuple(slice(0, s) for s in shape if isinstance(s, int))]
                    return replace(leaf, shape=shape, data=dump(data))
                return replace(leaf, shape=shape)

            yield replace(program, leaves=tuple(with_size(leaf) for leaf in program.leaves))
    for k, leaf in enumerate(program.leaves):
        for d, length in enumerate(leaf.shape):
            if isinstance(length, int) and length > 1:
                shape = (*leaf.shape[:d], 1, *leaf.shape[d + 1 :])
                data = dump(leaf.make(1).narrow(d, 0, 1)) if leaf.kind == "literal" else ""
                changed = replace(leaf, shape=shape, data=data)
                yield replace(program, leaves=(*program.leaves[:k], changed, *program.leaves[k + 1 :]))


_PARTS = re.compile(r"\.(?:clamp|abs)\([^()]*\)| [+*] [0-9.]+")


def _shorter(program: Program) -> Iterator[Program]:
    """Parts of a call's text left out."""
    for k, step in enumerate(program.steps):
        for found in _PARTS.finditer(step.text):
            text = step.text[: found.start()] + step.text[found.end() :]
            yield replace(program, steps=(*program.steps[:k], Step(step.out, text, step.args), *program.steps[k + 1 :]))


def _runs(program: Program) -> bool:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            for n in program.sizes:
                values: Values = program.make(n)
                reference.native(program, values)
        except Exception:
            return False
    return True


def smallest(
    program: Program, fails: Callable[[Program], bool], ask: Callable[[Program], Iterable[Program]]
) -> Program:
    """The smallest program found. fails: whether one fails like the first, raises TimeoutError when it is time to stop; ask: the
    candidates of a program."""
    try:
        while True:
            for candidate in ask(program):
                if fails(candidate):
                    program = candidate
                    break
            else:
                return program
    except TimeoutError:
        return program
