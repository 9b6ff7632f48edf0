"""Complex numbers as pairs of real ones: kernels have no complex type.

Every complex value of a graph becomes two float32 values, and every operator on complex numbers the equivalent operators on
real and imaginary parts. An operator without such an equivalent here is kept (and runs in torch on the CPU) between
``view_as_complex`` and ``view_as_real``; the same applies to complex inputs and outputs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._guards import detect_fake_mode
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from lapilli.graph import fourier
from lapilli.graph.fourier import Key, Parts
from lapilli.graph.inline import copy_into
from lapilli.graph.module import Module
from lapilli.graph.tracing import open_sizes

aten = torch.ops.aten
_COMPLEX = torch.complex64
COMPLEX_VIEWS = (aten.view_as_complex.default, aten.view_as_real.default)
"""Operators that convert between complex values and their parts, in the same memory."""


class _Pair:
    """A complex value in a call that is being traced. It is not a tensor, so that no operator accepts it by accident."""

    def __init__(self, re: Tensor, im: Tensor) -> None:
        self.re, self.im = re, im


def split_complex(module: Module, decompositions: dict[Any, Any]) -> None:
    """Replaces complex values by pairs. decompositions: of operators into others that have lowerings."""
    if any(_is_complex(n.meta.get("val")) for n in module.graph.nodes):
        _Splitter(module, decompositions).run()


def _is_complex(value: Any) -> bool:
    return any(isinstance(v, Tensor) and v.dtype is _COMPLEX for v in tree_leaves(value))


class _Splitter:
    def __init__(self, module: Module, decompositions: dict[Any, Any]) -> None:
        self.module, self.decompositions = module, decompositions
        self.pairs: dict[fx.Node, Any] = {}  # by complex value: its parts (nodes), or lists of those
        self.tables: dict[Key, fx.Node] = {}
        values = [n.meta.get("val") for n in module.graph.nodes]
        self.mode = detect_fake_mode(tree_leaves(values)) or FakeTensorMode()

    def run(self) -> None:
        for node in list(self.module.graph.nodes):
            if node.op == "placeholder" and _is_complex(node.meta.get("val")):
                self._split_input(node)
            elif node.op == "call_function":
                self._call(node)
        self._join_outputs()
        self.module.clean()

    def _split_input(self, node: fx.Node) -> None:
        if node in self.module.constants:
            value = self.module.constants[node].resolve_conj()
            self.pairs[node] = tuple(
                self.module.add_constant(part.contiguous(), f"{node.name}_{name}")
                for part, name in ((value.real, "real"), (value.imag, "imag"))
            )
        else:
            self._parts_of(node)

    def _call(self, node: fx.Node) -> None:
        takes = any(n in self.pairs for n in node.all_input_nodes)
        if not takes and not _is_complex(node.meta.get("val")):
            return
        if node.target is operator.getitem and node.args[0] in self.pairs:
            parts = self.pairs[node.args[0]][node.args[1]]  # type: ignore[index]
            if _is_complex(node.meta.get("val")):
                self.pairs[node] = parts
            return
        form = FORMS.get(node.target) if callable(node.target) else None
        if form is None or not self._trace(node, form):
            self._keep(node)

    def _trace(self, node: fx.Node, form: Callable[..., Any]) -> bool:
        """Replaces a call by the traced operators of a form; False if that fails."""
        leaves, spec = tree_flatten((node.args, node.kwargs))
        operands: list[fx.Node] = []
        places: list[Any] = []  # by leaf: the nodes of which it is made
        for leaf in leaves:
            if isinstance(leaf, fx.Node):
                mine = self.pairs.get(leaf, (leaf,))
                places.append(range(len(operands), len(operands) + len(mine)))
                operands.extend(mine)
            else:
                places.append(None)
        keys: dict[Key, Tensor] = {}

        def call(given: list[Any], tables: Callable[[Key], Tensor]) -> Any:
            filled = [
                leaf if at is None else given[at[0]] if len(at) == 1 else _Pair(given[at[0]], given[at[1]])
                for leaf, at in zip(leaves, places, strict=True)
            ]
            args, kwargs = tree_unflatten(filled, spec)
            made = form(*args, **kwargs, **({"tables": tables} if form in _TRANSFORMS else {}))
            return tree_map(lambda v: (v.re, v.im) if isinstance(v, _Pair) else v, made)

        def collect(key: Key) -> Tensor:
            with unset_fake_temporarily():
                made = fourier.table(key)
            keys[key] = self.mode.from_tensor(made, static_shapes=True)
            return keys[key]

        values = [n.meta["val"] for n in operands]
        try:
            with torch.no_grad(), self.mode, open_sizes(self.mode):
                call(values, collect)
                names = list(keys)

                def flat(*given: Any) -> Any:
                    return call(
                        list(given[: len(values)]), dict(zip(names, given[len(values) :], strict=True)).__getitem__
                    )

                graph = make_fx(flat, decomposition_table=self.decompositions)(*values, *keys.values()).graph
        except (AssertionError, NotImplementedError, RuntimeError, TypeError):
            return False
        if any(n.op == "get_attr" for n in graph.nodes):
            return False
        for key in names:
            if key not in self.tables:
                self.tables[key] = self.module.add_constant(
                    fourier.table(key), "_".join(str(k).replace(" ", "_") for k in key)
                )
        result = copy_into(self.module, node, graph, [*operands, *(self.tables[k] for k in names)])
        if _is_complex(node.meta.get("val")):
            self.pairs[node] = result
        else:
            self.module.replace(node, result)
        return True

    def _keep(self, node: fx.Node) -> None:
        """Keeps a call on complex values."""
        for operand in dict.fromkeys(n for n in node.all_input_nodes if n in self.pairs):
            node.replace_input_with(operand, self._joined(operand, node))
        if _is_complex(node.meta.get("val")):
            self._parts_of(node)

    def _parts_of(self, node: fx.Node) -> None:
        """Reads the real and imaginary parts of a value that stays complex."""
        value = node.meta["val"]
        if not isinstance(value, Tensor):  # elements of a list are read where they are taken out
            return
        after = node
        while after.next.op == "placeholder":
            after = after.next
        parts = []
        with self.module.graph.inserting_after(after):
            view = self.module.graph.call_function(aten.view_as_real.default, (node,))
        with self.mode:
            view.meta["val"] = torch.view_as_real(self._fake(value).resolve_conj())
        after = view
        for k in range(2):
            with self.module.graph.inserting_after(after):
                after = self.module.graph.call_function(aten.select.int, (view, -1, k))
            with self.mode:
                after.meta["val"] = view.meta["val"].select(-1, k)
            parts.append(after)
        self.pairs[node] = tuple(parts)

    def _joined(self, node: fx.Node, before: fx.Node) -> fx.Node:
        re, im = self.pairs[node]
        view: Any = re.args[0] if re.target is aten.select.int else None
        if isinstance(view, fx.Node) and view.target is aten.view_as_real.default and view.args[0] is node:
            return node  # the complex value itself
        with self.module.graph.inserting_before(before), self.mode, open_sizes(self.mode):
            pairs = self.module.graph.call_function(aten.stack.default, ([re, im], -1))
            pairs.meta["val"] = torch.stack([self._fake(n.meta["val"]) for n in (re, im)], -1)
            joined = self.module.graph.call_function(aten.view_as_complex.default, (pairs,))
            joined.meta["val"] = torch.view_as_complex(pairs.meta["val"])
        return joined

    def _fake(self, value: Tensor) -> Tensor:
        return (
            value
            if isinstance(value, torch._subclasses.FakeTensor)
            else self.mode.from_tensor(value, static_shapes=True)
        )

    def _join_outputs(self) -> None:
        end = next(n for n in self.module.graph.nodes if n.op == "output")
        kept = [*self.module.outputs, *(s.new for s in self.module.states.values())]
        for node in [n for n in dict.fromkeys(kept) if n in self.pairs]:
            joined = self._joined(node, end)
            if joined is not node:
                self.module.replace(node, joined)


# --- operators on parts


def _each(op: Any) -> Callable[..., Any]:
    """An operator that treats both parts alike, such as views and sums."""

    def form(*args: Any, **kwargs: Any) -> Any:
        def part(name: str) -> Any:
            def take(v: Any) -> Any:
                return getattr(v, name) if isinstance(v, _Pair) else v

            return op(*tree_map(take, args), **kwargs)

        re, im = part("re"), part("im")
        if isinstance(re, list | tuple):
            return [_Pair(a, b) for a, b in zip(re, im, strict=True)]
        return _Pair(re, im)

    return form


def _pair(x: Any, like: Tensor | None = None) -> _Pair:
    """The parts of a complex or real value, or of a number."""
    if isinstance(x, _Pair):
        return x
    if isinstance(x, Tensor):
        return _Pair(x.to(torch.float32), torch.zeros_like(x, dtype=torch.float32))
    assert like is not None
    value = complex(x)
    return _Pair(torch.full((), value.real, device=like.device), torch.full((), value.imag, device=like.device))


def _is_real(x: Any) -> bool:
    return not isinstance(x, _Pair | complex)


def _like(*values: Any) -> Tensor:
    return next(v.re if isinstance(v, _Pair) else v for v in values if isinstance(v, _Pair | Tensor))


def _add(x: Any, y: Any, *, alpha: Any = 1) -> _Pair:
    like = _like(x, y)
    a = _pair(x, like)
    if alpha == 1 and _is_real(y):  # an imaginary part of zero is not added: -0.0 stays
        return _Pair(a.re + y, a.im if isinstance(x, _Pair) and not isinstance(y, Tensor) else _broadcast(a.im, y))
    b = _pair(y, like)
    if alpha != 1:
        b = _multiply(b, alpha)
    return _Pair(a.re + b.re, a.im + b.im)


def _broadcast(x: Tensor, other: Any) -> Tensor:
    return x + torch.zeros_like(other) if isinstance(other, Tensor) else x


def _negative(x: _Pair) -> _Pair:
    return _Pair(-x.re, -x.im)


def _subtract(x: Any, y: Any, *, alpha: Any = 1) -> _Pair:
    return _add(x, y, alpha=-alpha)


def _multiply(x: Any, y: Any) -> _Pair:
    if _is_real(y):
        return _Pair(x.re * y, x.im * y)
    if _is_real(x):
        return _multiply(y, x)
    like = _like(x, y)
    a, b = _pair(x, like), _pair(y, like)
    return _Pair(a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re)


def _divide(x: Any, y: Any) -> _Pair:
    """By Smith's method (1962), which neither overflows nor underflows unless the quotient does."""
    if _is_real(y):
        return _Pair(x.re / y, x.im / y)
    like = _like(x, y)
    a, b = _pair(x, like), _pair(y, like)
    wide = b.re.abs() >= b.im.abs()
    large, less = torch.where(wide, b.re, b.im), torch.where(wide, b.im, b.re)
    ratio = less / large
    scale = large + less * ratio
    re = torch.where(wide, a.re + a.im * ratio, a.re * ratio + a.im) / scale
    im = torch.where(wide, a.im - a.re * ratio, a.im * ratio - a.re) / scale
    return _Pair(re, im)


def _magnitude(x: _Pair) -> Tensor:
    return torch.hypot(x.re, x.im)


def _exponential(x: _Pair) -> _Pair:
    size = x.re.exp()
    return _Pair(size * x.im.cos(), size * x.im.sin())


def _logarithm(x: _Pair) -> _Pair:
    return _Pair(_magnitude(x).log(), torch.atan2(x.im, x.re))


def _polar(size: Tensor, angle: Tensor) -> _Pair:
    return _Pair(size * angle.cos(), size * angle.sin())


def _sign(x: _Pair) -> _Pair:
    size = _magnitude(x)
    nonzero = size != 0
    return _Pair(torch.where(nonzero, x.re / size, 0.0), torch.where(nonzero, x.im / size, 0.0))


def _power(x: _Pair, exponent: Any) -> _Pair:
    """Small integer exponents by products, as torch does for 2; others by the logarithm."""
    if isinstance(exponent, int | float) and exponent == int(exponent) and 0 < exponent <= 8:
        made = x
        for _ in range(int(exponent) - 1):
            made = _multiply(made, x)
        return made
    return _exponential(_multiply(_logarithm(x), exponent))


def _matrix(op: Any) -> Callable[..., _Pair]:
    """A product that is linear in both operands."""

    def form(x: Any, y: Any) -> _Pair:
        if not isinstance(x, _Pair):
            return _Pair(op(x, y.re), op(x, y.im))
        if not isinstance(y, _Pair):
            return _Pair(op(x.re, y), op(x.im, y))
        return _Pair(op(x.re, y.re) - op(x.im, y.im), op(x.re, y.im) + op(x.im, y.re))

    return form


def _to_copy(x: Any, *, dtype: torch.dtype | None = None, **options: Any) -> Any:
    options.pop("memory_format", None)
    if dtype is not None and dtype is not _COMPLEX:
        if dtype.is_complex or not isinstance(x, _Pair):
            raise NotImplementedError
        return x.re.to(dtype)  # as torch does, with a warning
    return x if isinstance(x, _Pair) else _pair(x)


def _mean(x: _Pair, *args: Any, dtype: torch.dtype | None = None) -> _Pair:
    if dtype is not None and dtype is not _COMPLEX:
        raise NotImplementedError
    return _Pair(x.re.mean(*args), x.im.mean(*args))


def _sum(x: _Pair, *args: Any, dtype: torch.dtype | None = None) -> _Pair:
    if dtype is not None and dtype is not _COMPLEX:
        raise NotImplementedError
    return _Pair(x.re.sum(*args), x.im.sum(*args))


def _where(condition: Tensor, x: Any, y: Any) -> _Pair:
    like = _like(x, y)
    a, b = _pair(x, like), _pair(y, like)
    return _Pair(torch.where(condition, a.re, b.re), torch.where(condition, a.im, b.im))


def _filled(op: Any) -> Callable[..., Any]:
    def form(x: Any, *args: Any, **kwargs: Any) -> _Pair:
        for name in ("dtype", "layout", "pin_memory", "memory_format"):
            kwargs.pop(name, None)
        shape = _like(x)
        if op is torch.full_like:
            value = complex(args[0])
            return _Pair(torch.full_like(shape, value.real), torch.full_like(shape, value.imag))
        return _Pair(op(shape, dtype=torch.float32), torch.zeros_like(shape, dtype=torch.float32))

    return form


def _constant(op: Any, position: int | None = None) -> Callable[..., _Pair]:
    """A tensor made from numbers. position: that of the value among the arguments; None: zeros or ones."""

    def form(*args: Any, dtype: torch.dtype | None = None, device: Any = None, **_: Any) -> _Pair:
        given = [a.re if isinstance(a, _Pair) else a for a in args]
        value = complex(given[position]) if position is not None else 0j
        parts = []
        for number in (value.real, value.imag):
            if position is not None:
                given[position] = number
            parts.append(op(*given, dtype=torch.float32, device=device))
        return _Pair(*parts)

    return form


def _copy(x: Any, y: Any, non_blocking: bool = False) -> Any:
    if not isinstance(x, _Pair):
        return y.re.expand(x.shape).to(x.dtype)
    source = _pair(y)
    return _Pair(source.re.expand(x.re.shape), source.im.expand(x.re.shape))


def _scatter(op: Any) -> Callable[..., _Pair]:
    def form(x: Any, y: Any, *args: Any, **kwargs: Any) -> _Pair:
        a, b = _pair(x), _pair(y)
        return _Pair(op(a.re, b.re, *args, **kwargs), op(a.im, b.im, *args, **kwargs))

    return form


def _padded(x: _Pair, pad: Any, value: Any = 0) -> _Pair:
    number = complex(value)
    return _Pair(torch.constant_pad_nd(x.re, pad, number.real), torch.constant_pad_nd(x.im, pad, number.imag))


def _complex_input(x: Any) -> Parts:
    if not isinstance(x, _Pair):
        raise NotImplementedError
    return x.re, x.im


def _r2c(x: Any, dims: list[int], normalization: int, onesided: bool, *, tables: fourier.Tables) -> _Pair:
    _check(x, [x.shape[d] for d in dims])
    return _Pair(*fourier.real_to_complex(x, dims, normalization, onesided, tables))


def _c2c(x: Any, dims: list[int], normalization: int, forward: bool, *, tables: fourier.Tables) -> _Pair:
    parts = _complex_input(x)
    _check(parts[0], [parts[0].shape[d] for d in dims])
    return _Pair(*fourier.complex_to_complex(parts, dims, normalization, forward, tables))


def _c2r(x: Any, dims: list[int], normalization: int, last: Any, *, tables: fourier.Tables) -> Tensor:
    parts = _complex_input(x)
    _check(parts[0], [*(parts[0].shape[d] for d in dims[:-1]), last])
    return fourier.complex_to_real(parts, dims, normalization, last, tables)


def _check(x: Tensor, sizes: list[Any]) -> None:
    """Raises NotImplementedError for types other than float32, and for dynamic sizes above a bound."""
    if x.dtype is not torch.float32 or not sizes:
        raise NotImplementedError
    for n in sizes:
        if isinstance(n, torch.SymInt):
            bounds = n.node.shape_env.bound_sympy(n.node.expr)
            if not bounds.upper.is_Integer or int(bounds.upper) > fourier.LONGEST_OPEN:
                raise NotImplementedError
        elif n < 1:
            raise NotImplementedError


_EACH = (
    aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.permute.default, aten.transpose.int,
    aten.t.default, aten.movedim.int, aten.movedim.intlist, aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims,
    aten.unsqueeze.default, aten.expand.default, aten.slice.Tensor, aten.select.int, aten.narrow.default,
    aten.flatten.using_ints, aten.unflatten.int, aten.clone.default, aten.contiguous.default, aten.alias.default,
    aten.detach.default, aten.flip.default, aten.roll.default, aten.index_select.default, aten.index.Tensor,
    aten.gather.default, aten.unfold.default, aten.cat.default, aten.stack.default, aten.split.Tensor,
    aten.split_with_sizes.default, aten.chunk.default, aten.unbind.int, aten.repeat.default, aten.diagonal.default,
    aten.tril.default, aten.triu.default, aten.cumsum.default, aten.lift_fresh_copy.default,
    aten.resolve_conj.default, aten.resolve_neg.default,
)  # fmt: skip

FORMS: dict[Any, Callable[..., Any]] = {
    **{op: _each(op) for op in _EACH},
    aten.add.Tensor: _add,
    aten.add.Scalar: _add,
    aten.sub.Tensor: _subtract,
    aten.sub.Scalar: _subtract,
    aten.rsub.Scalar: lambda x, y: _add(_negative(x), y),
    aten.mul.Tensor: _multiply,
    aten.mul.Scalar: _multiply,
    aten.div.Tensor: _divide,
    aten.div.Scalar: _divide,
    aten.reciprocal.default: lambda x: _divide(1.0 + 0j, x),
    aten.neg.default: _negative,
    aten.conj.default: lambda x: _Pair(x.re, -x.im),
    aten._conj.default: lambda x: _Pair(x.re, -x.im),
    aten._conj_physical.default: lambda x: _Pair(x.re, -x.im),
    aten.conj_physical.default: lambda x: _Pair(x.re, -x.im),
    aten.real.default: lambda x: x.re,
    aten.imag.default: lambda x: x.im,
    aten.view_as_real.default: lambda x: torch.stack([x.re, x.im], -1),
    aten.view_as_complex.default: lambda x: _Pair(x.select(-1, 0), x.select(-1, 1)),
    aten.complex.default: lambda re, im: _Pair(*aten.broadcast_tensors.default([re, im])),
    aten.polar.default: _polar,
    aten.abs.default: _magnitude,
    aten.angle.default: lambda x: torch.atan2(x.im, x.re),
    aten.exp.default: _exponential,
    aten.log.default: _logarithm,
    aten.sgn.default: _sign,
    aten.square.default: lambda x: _multiply(x, x),
    aten.pow.Tensor_Scalar: _power,
    aten.sum.default: _sum,
    aten.sum.dim_IntList: _sum,
    aten.mean.default: _mean,
    aten.mean.dim: _mean,
    aten.mm.default: _matrix(torch.mm),
    aten.bmm.default: _matrix(torch.bmm),
    aten.matmul.default: _matrix(torch.matmul),
    aten.mv.default: _matrix(torch.mv),
    aten.dot.default: _matrix(torch.dot),
    aten.eq.Tensor: lambda x, y: (_pair(x).re == _pair(y).re) & (_pair(x).im == _pair(y).im),
    aten.ne.Tensor: lambda x, y: (_pair(x).re != _pair(y).re) | (_pair(x).im != _pair(y).im),
    aten.isnan.default: lambda x: x.re.isnan() | x.im.isnan(),
    aten.where.self: _where,
    aten.constant_pad_nd.default: _padded,
    aten._to_copy.default: _to_copy,
    aten.to.dtype: lambda x, dtype, *_: _to_copy(x, dtype=dtype),
    aten.zeros_like.default: _filled(torch.zeros_like),
    aten.ones_like.default: _filled(torch.ones_like),
    aten.full_like.default: _filled(torch.full_like),
    aten.scalar_tensor.default: _constant(torch.scalar_tensor, 0),
    aten.full.default: _constant(torch.full, 1),
    aten.zeros.default: _constant(torch.zeros),
    aten.new_zeros.default: _constant(aten.new_zeros.default),
    aten.copy.default: _copy,
    aten.slice_scatter.default: _scatter(torch.slice_scatter),
    aten.select_scatter.default: _scatter(torch.select_scatter),
    aten._fft_r2c.default: _r2c,
    aten._fft_c2c.default: _c2c,
    aten._fft_c2r.default: _c2r,
}  # fmt: skip
_TRANSFORMS = (_r2c, _c2c, _c2r)
