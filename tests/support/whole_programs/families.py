"""Families of calls: each function adds a random call of its family to a program that is being made."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from whole_programs.generate import Generator

FAMILIES: dict[str, tuple[int, Callable[[Generator], None]]] = {}
"""By name: weight and function."""


def family(weight: int) -> Callable[[Callable[[Generator], None]], Callable[[Generator], None]]:
    def keep(function: Callable[[Generator], None]) -> Callable[[Generator], None]:
        FAMILIES[function.__name__] = weight, function
        return function

    return keep


UNARY = """\
torch.relu({0})|torch.sigmoid({0})|torch.tanh({0})|torch.exp({0}.clamp(max=5))|torch.expm1({0}.clamp(max=5))
torch.log({0}.abs() + 0.1)|torch.log1p({0}.abs())|torch.log2({0}.abs() + 0.1)|torch.log10({0}.abs() + 0.1)
torch.sqrt({0}.abs())|torch.rsqrt({0}.abs() + 0.1)|torch.sin({0})|torch.cos({0})|torch.tan({0}.clamp(-1.2, 1.2))
torch.asin({0}.clamp(-0.9, 0.9))|torch.acos({0}.clamp(-0.9, 0.9))|torch.atan({0})|torch.sinh({0}.clamp(-5, 5))
torch.cosh({0}.clamp(-5, 5))|torch.asinh({0})|torch.acosh({0}.abs() + 1.1)|torch.atanh({0}.clamp(-0.9, 0.9))
torch.erf({0})|torch.erfc({0})|torch.erfinv({0}.clamp(-0.9, 0.9))|torch.floor({0})|torch.ceil({0})
torch.round({0})|torch.trunc({0})|torch.frac({0})|-{0}|torch.abs({0})|torch.sign({0})|torch.square({0})
torch.reciprocal({0}.abs() + 0.1)|F.gelu({0})|F.gelu({0}, approximate="tanh")|F.silu({0})|F.mish({0})
F.softplus({0})|F.softplus({0}, beta=2, threshold=5)|F.elu({0}, alpha=0.7)|F.selu({0})|F.celu({0}, alpha=1.5)
F.leaky_relu({0}, 0.2)|F.hardswish({0})|F.hardsigmoid({0})|F.hardtanh({0}, -0.7, 1.3)|F.relu6({0})
F.logsigmoid({0})|F.softsign({0})|F.tanhshrink({0})|F.hardshrink({0}, 0.3)|F.softshrink({0}, 0.3)
F.threshold({0}, 0.2, -1.0)|torch.lgamma({0}.abs() + 0.5)|torch.digamma({0}.abs() + 0.5)|torch.special.entr({0})
torch.special.expit({0})|torch.logit({0}, eps=0.1)|torch.special.ndtr({0})|torch.sinc({0})
torch.special.log_ndtr({0})|torch.special.i0e({0})|torch.special.i1e({0})|torch.i0({0}.clamp(-4, 4))
torch.exp2({0}.clamp(max=6))|torch.nan_to_num({0})|torch.nan_to_num({0}, nan=1.0, posinf=2.0, neginf=-2.0)
{0}.clamp(-0.5, 0.5)|{0}.clamp(min=0.1)|{0}.clamp(max=0.3)|torch.deg2rad({0})|{0} ** 2|{0} ** 3|{0}.abs() ** 0.5
({0}.abs() + 0.2) ** -1.5|2 ** {0}.clamp(-4, 4)|1 - {0}|1 / ({0}.abs() + 0.3)|{0} * 2|{0} + 1|{0} / 3|{0} - 0.5
{0} % 1.5|torch.fmod({0}, 0.7)|{0} // 0.6|torch.rsub({0}, 2, alpha=0.5)|{0}.neg().relu()
torch.special.xlog1py({0}, {0}.abs())|torch.special.bessel_j0({0})|F.dropout({0}, 0.5, training=False)
torch.log_softmax({0}.flatten(), 0).exp()|torch.clamp({0}, 0.2, -0.2)|torch.positive({0})
F.prelu({0}, torch.full((), 0.3, dtype={0}.dtype, device={0}.device))|torch.where({0} > 0, {0}, {0} * 0.1)
torch.where({0} > 0, {0}, 0.0)|torch.heaviside({0}, {0}.abs())|torch.polygamma(1, {0}.abs() + 1)
{0} + -{0}|-{0} / {0}|{0} / {0}.abs()|{0}.masked_scatter({0} > 0, {0} * 2)
{0}.index_put(torch.nonzero({0} > 0.5, as_tuple=True), {0}.detach().amax())"""
BINARY = """\
{0} + {1}|{0} - {1}|{0} * {1}|{0} / ({1}.abs() + 0.5)|torch.add({0}, {1}, alpha=0.3)
torch.sub({0}, {1}, alpha=2)|torch.maximum({0}, {1})|torch.minimum({0}, {1})|torch.fmax({0}, {1})
torch.fmin({0}, {1})|torch.atan2({0}, {1}.abs() + 0.1)|torch.hypot({0}, {1}.abs() + 0.1)
torch.pow({0}.abs() + 0.1, {1}.clamp(-2, 2))|torch.fmod({0}, {1}.abs() + 0.5)|{0} % ({1}.abs() + 0.5)
torch.copysign({0}, {1})|torch.xlogy({0}, {1}.abs() + 0.1)|torch.logaddexp({0}, {1})|torch.logaddexp2({0}, {1})
torch.div({0}, {1}.abs() + 0.5, rounding_mode="floor")|torch.div({0}, {1}.abs() + 0.5, rounding_mode="trunc")
{0} // ({1}.abs() + 0.5)|torch.lerp({0}, {1}, 0.3)|torch.clamp({0}, min={1})|torch.clamp({0}, max={1})|{1} - {0}
{0} * {0} + {1}|torch.where({0} > {1}, {0}, {1})|torch.where({1} > 0.1, {0}, -1.0)|{0} * ({1} > 0)
torch.dist({0}, {1}) + {0}|torch.true_divide({0}, {1}.abs() + 1)|torch.heaviside({0}, {1})
{0}.addcmul({0}, {1}, value=0.5)|{0}.addcdiv({1}, {0}.abs() + 0.5, value=0.5)|({0} - {1}).abs()
torch.ldexp({0}, ({1} * 2).int().clamp(-3, 3))|torch.where({0} == {0}, {1}, {0})
torch.special.xlog1py({0}, {1}.abs())|{0} * {1} + -{0} * {1}|{0} + {1} - {1}|{0} - ({0} - {1})|{0} * {1} / {1}"""
COMPARE = """\
{0} > {1}|{0} < {1}|{0} >= {1}|{0} <= {1}|{0} == {1}|{0} != {1}|{0} > 0.1|{0} < -0.2|torch.isnan({0})
torch.isfinite({0})|torch.isinf({0})|torch.signbit({0})|{0}.bool()|torch.logical_and({0}, {1})
torch.logical_or({0} > 0, {1} > 0)|torch.logical_xor({0} > 0, {1} < 0)|torch.logical_not({0})
({0} > 0) & ({1} > 0)|({0} > 0) | ({1} < 0)|~({0} > {1})|torch.isclose({0}, {1}, rtol=0.5)"""
INTEGER = """\
{0} + {1}|{0} - {1}|{0} * {1}|{0} // ({1}.abs() + 1)|{0} % ({1}.abs() + 1)|{0} & {1}|{0} \\| {1}|{0} ^ {1}|~{0}
{0} << ({1} & 3)|{0} >> ({1} & 3)|{0} >> 1|{0} << 2|{0}.clamp(-5, 9)|{0}.abs()|-{0}|torch.maximum({0}, {1})
torch.minimum({0}, {1})|{0} + 3|{0} * 2|{0} - 1|{0} % 5|{0} // 3|torch.div({0}, 3, rounding_mode="trunc")
torch.fmod({0}, 4)|torch.sign({0})|{0} > {1}|{0} == {1}|{0} / 4|{0} * 0.5|torch.where({0} > {1}, {0}, {1})
{0}.float()|{0}.float() / 7|{0} & 7|torch.gcd({0} // 2, {1} // 2)|{0} ** 2|{0}.bool()|{0} <= 3|torch.bitwise_not({0})
torch.square({0} % 11)|torch.sqrt({0}.abs())|torch.exp({0}.clamp(max=3))|{0}.clamp(min=2)|7 - {0}
torch.add({0}, {1}, alpha=2)"""
REDUCE = """\
{0}.sum({d})|{0}.sum({d}, keepdim=True)|{0}.mean({d})|{0}.mean({d}, keepdim=True)|{0}.amax({d})
{0}.amin({d}, keepdim=True)|{0}.var({d})|{0}.var({d}, unbiased=False, keepdim=True)|{0}.std({d})
torch.std({0}, {d}, correction=0)|{0}.norm(2, {d})|{0}.norm(1, {d}, keepdim=True)
torch.linalg.vector_norm({0}, inf, {d})|torch.linalg.vector_norm({0}, 3, {d})|torch.logsumexp({0}, {d})
({0} > 0).all({d})|({0} > 1).any({d})|torch.count_nonzero({0} > 0, {d})|torch.nansum({0}, {d})
torch.nanmean({0}, {d})|{0}.clamp(-1.5, 1.5).prod({d})|{0}.argmax({d})|{0}.argmin({d}, keepdim=True)
{0}.softmax({d})|{0}.log_softmax({d})|F.softmin({0}, {d})|F.normalize({0}, dim={d})
{0} - {0}.mean({d}, keepdim=True)|{0} / ({0}.norm(dim={d}, keepdim=True) + 1)|{0}.cumsum({d})
{0}.clamp(-1.2, 1.2).cumprod({d})|torch.logcumsumexp({0}, {d})|{0}.median({d}).values
{0}.kthvalue(1, {d}).values|torch.quantile({0}, 0.3, {d})|{0}.max({d}).values|{0}.min({d}).indices
{0}.cummax({d}).values|{0}.cummin({d}).values|{0}.sort({d}).values|{0}.argsort({d}, descending=True)|{0}.msort()
{0}.nanmedian({d}).values|torch.renorm({0}, 2, {d}, 1.5)|F.glu({0}, {d})|torch.trapezoid({0}, dim={d})
{0}.diff(dim={d})|{0}.softmax({d}).log()|{0}.aminmax(dim={d})[1]|{0}.topk(1, {d}).values
{0}.topk(2, {d}).indices|{0}.nan_to_num().mode({d}).values|{0}.cumsum({d}).flip({d})|torch.cumulative_trapezoid({0}, dim={d})
{0}.unique_consecutive().sum()"""
REDUCE_ALL = """\
{0}.sum()|{0}.mean()|{0}.max()|{0}.min()|{0}.std()|{0}.var()|{0}.norm()|{0}.amax()|{0}.argmax()|({0} > 0).any()
({0} > 0).sum()|torch.median({0})|torch.logsumexp({0}.flatten(), 0)|{0}.clamp(-1.1, 1.1).flatten()[:99].prod()
torch.aminmax({0})[0]|torch.count_nonzero({0})|{0}.square().sum().sqrt()|{0}[{0} > 0.3].sum()
torch.masked_select({0}, {0} < 0.2).square().sum()|torch.nonzero({0} > 0.4).float().sum()"""
INTEGER_REDUCE = """\
{0}.sum({d})|{0}.amax({d})|{0}.amin({d}, keepdim=True)|{0}.argmax({d})|{0}.cumsum({d})|{0}.sort({d}).values
({0} % 3).prod({d})|{0}.float().mean({d})|{0}.any({d})|{0}.flip({d})|{0}.max({d}).values|{0}.sum()
torch.sort({0}, dim={d}, stable=True).indices|{0}.cummax({d}).values|{0}.argsort(dim={d}, stable=True)|{0}.max()|{0}.min()
{0}.count_nonzero({d})|{0}.all({d})|F.one_hot({0}.long() % 5, 5)|{0}.bool().sum({d})
torch.bucketize({0}, torch.arange(-3, 6, 3, device={0}.device))|{0}.topk(1, {d}).values|{0}.median({d}).values
{0}.clamp(0, 9).bincount(minlength=10)"""


def _split(table: str) -> list[str]:
    marked = table.replace("\\|", "\0").replace("\n", "|")
    return [entry.replace("\0", "|") for entry in marked.split("|") if entry]


_UNARY, _BINARY, _COMPARE, _INTEGER = (
    _split(UNARY),
    _split(BINARY),
    _split(COMPARE.replace(") | (", ") \\| (")),
    _split(INTEGER),
)
_REDUCE, _REDUCE_ALL, _INTEGER_REDUCE = _split(REDUCE), _split(REDUCE_ALL), _split(INTEGER_REDUCE)


def _operands(g: Generator, text: str, first: str, second: Callable[[], str]) -> tuple[str, ...]:
    return (first, second()) if "{1}" in text else (first,)


@family(5)
def unary(g: Generator) -> None:
    g.emit(g.random.choice(_UNARY), g.floating())


@family(6)
def binary(g: Generator) -> None:
    a = g.floating()
    b = g.same_shape(a)
    g.emit(g.random.choice(_BINARY), *((b, a) if g.random.random() < 0.2 else (a, b)))


@family(2)
def comparison(g: Generator) -> None:
    text, a = g.random.choice(_COMPARE), g.floating()
    g.emit(text, *_operands(g, text, a, lambda: g.same_shape(a)))


@family(2)
def selection(g: Generator) -> None:
    a = g.floating()
    mask = g.boolean(a)
    text = g.random.choice(
        [
            "torch.where({2}, {0}, {1})",
            "{0}.masked_fill({2}, -2.5)",
            "torch.where({2}, {0}, 1.5)",
            "{0} * {2}",
            "{0}.masked_fill({2}, {1}.sum())",
            "torch.where({2}, {0}, {1} * 0)",
            "{0}.masked_fill(~{2}, -inf).amax()",
        ]
    )
    g.emit(text, a, g.same_shape(a), mask)


@family(3)
def integers(g: Generator) -> None:
    text, a = g.random.choice(_INTEGER), g.integral()
    shape, dtype = g.shape(a), g.value(a).dtype

    def other() -> str:
        found = g.pick(lambda t: tuple(t.shape) == shape and not t.is_floating_point() and t.dtype != torch.bool)
        if found is None or g.random.random() < 0.3:
            return g.leaf(g.broadcast(a), str(dtype).removeprefix("torch."), "integer")
        return found

    g.emit(text, *_operands(g, text, a, other))


@family(1)
def integer_reduction(g: Generator) -> None:
    a = g.integral(1)
    d = g.random.randrange(g.rank(a))
    text = g.random.choice(_INTEGER_REDUCE)
    g.emit(text.replace("{d}", str(d)), a)


@family(1)
def conversion(g: Generator) -> None:
    if g.random.random() < 0.5:
        a = g.pick(lambda t: not t.is_floating_point()) or g.integral()
        kinds = ["float32", "int64", "int32", "bool"]
        if g.narrow:
            kinds += ["float16", "bfloat16", "int16", "int8", "uint8"]
        g.emit(f"{{0}}.to(torch.{g.random.choice(kinds)})", a)
        return
    a = g.floating()
    texts = [
        "{0}.to(torch.float32)",
        "({0} * 3).clamp(-100, 100).to(torch.int64)",
        "{0}.clamp(-99, 99).to(torch.int32)",
        "{0}.bool()",
    ]
    if g.narrow:
        texts += ["{0}.to(torch.float16)", "{0}.to(torch.bfloat16)", "({0} * 9).clamp(-99, 99).to(torch.int8)"]
        texts += ["({0} * 9).clamp(0, 200).to(torch.uint8)", "({0} * 9).clamp(-999, 999).to(torch.int16)"]
    g.emit(g.random.choice(texts), a)


@family(3)
def reduction(g: Generator) -> None:
    if g.random.random() < 0.12:
        g.emit(g.random.choice(_REDUCE_ALL), g.floating())
        return
    a = g.floating(1)
    d = g.random.randrange(-g.rank(a), g.rank(a))
    text = g.random.choice(_REDUCE)
    several = ("sum(", "mean(", "amax(", "amin(", "var(", "std(", "norm(", "logsumexp(", "vector_norm(")
    if g.rank(a) > 1 and g.random.random() < 0.3 and any(s in text for s in several) and "cum" not in text:
        dims = g.random.sample(range(g.rank(a)), 2)
        g.emit(text.replace("{d}", str(tuple(dims))), a)
        return
    g.emit(text.replace("{d}", str(d)), a)


@family(2)
def several_results(g: Generator) -> None:
    a = g.floating(1)
    d = g.random.randrange(g.rank(a))
    texts = [
        "torch.max({0}, {d})",
        "torch.min({0}, {d})",
        "torch.sort({0}, {d})",
        "torch.std_mean({0}, {d})",
        "torch.var_mean({0}, {d})",
    ]
    texts += [
        "torch.aminmax({0}, dim={d})",
        "torch.topk({0}, 1, {d})",
        "torch.cummax({0}, {d})",
        "torch.median({0}, {d})",
        "torch.frexp({0})",
    ]
    texts += [
        "torch.sort({0}, dim={d}, descending=True, stable=True)",
        "torch.kthvalue({0}, 1, {d})",
        "torch.std_mean({0}, {d}, keepdim=True)",
    ]
    size = g.static(a, d)
    many = 2
    if size is not None and size > 1:
        cut = g.random.randint(1, size - 1)
        texts += [f"torch.split({{0}}, [{cut}, {size - cut}], {{d}})", f"torch.tensor_split({{0}}, [{cut}], {{d}})"] * 2
    texts += ["torch.chunk({0}, 2, {d})", "torch.tensor_split({0}, 2, {d})"] * 2
    text = g.random.choice(texts)
    if size in (2, 3, 4) and g.random.random() < 0.4:
        text, many = "torch.unbind({0}, {d})", size
    g.emit(text.replace("{d}", str(d)), a, results=many)


@family(5)
def view(g: Generator) -> None:
    a = g.pick(lambda t: t.ndim > 0) or g.floating(1)
    rank, r = g.rank(a), g.random
    d = r.randrange(rank)
    e = r.randrange(rank)
    size = g.static(a, d)
    order = r.sample(range(rank), rank)
    texts = [
        f"{{0}}.transpose({d}, {e})",
        f"{{0}}.permute({tuple(order)})",
        f"{{0}}.flip({d})",
        f"{{0}}.roll({r.choice([1, -1, 2])}, {d})",
    ]
    texts += [
        f"{{0}}.flatten({min(d, e)}, {max(d, e)})",
        f"{{0}}.unsqueeze({d})",
        f"{{0}}.unsqueeze(-1).expand({'-1, ' * rank}3)",
        "{0}.reshape(-1)",
    ]
    texts += [
        f"{{0}}.squeeze({d})",
        f"{{0}}.repeat_interleave(2, {d})",
        f"{{0}}.movedim({d}, {e})",
        "{0}.contiguous()",
        "{0}.clone()",
        "{0}.detach()",
    ]
    texts += [
        f"{{0}}.repeat({', '.join(str(r.choice([1, 1, 2])) for _ in range(rank))})",
        "{0}.view_as({0})",
        f"{{0}}.select({d}, 0)",
        f"{{0}}.select({d}, -1)",
    ]
    texts += [
        f"{{0}}.narrow({d}, 0, 1)",
        f"{{0}}.unsqueeze({d}).expand_as({{0}}.unsqueeze({d}))",
        f"{{0}}.index_select({d}, torch.zeros(3, dtype=torch.int64, device={{0}}.device))",
    ]
    colon = ":, " * d
    texts += [
        f"{{0}}[{colon}1:]",
        f"{{0}}[{colon}::2]",
        f"{{0}}[{colon}:-1]",
        "{0}[..., 1:]",
        "{0}[..., None]",
        "{0}[None]",
        "{0}[..., ::3]",
        "{0}[..., -1]",
    ]
    texts += [
        f"{{0}}[{colon}{{0}}.shape[{d}] // 2:]",
        f"{{0}}.narrow({d}, {{0}}.shape[{d}] // 2, 1)",
        f"{{0}}.chunk(2, {d})[-1]",
    ]
    if rank > 1:
        texts += [
            "{0}.mT",
            f"{{0}}.diagonal({r.choice([0, 1, -1])}, -2, -1)",
            "{0}.tril()",
            f"{{0}}.triu({r.choice([0, 1, -1])})",
            "{0}.swapaxes(0, -1)",
        ]
        texts += [
            "{0}.rot90(1, (-2, -1))",
            "{0}.flip(0, 1)",
            "{0}.flatten(1)",
            "{0}.flatten(0, 1)",
            "torch.fliplr({0})",
            "{0}.roll((1, 1), (0, 1))",
        ]
        texts += [
            "{0}.reshape({0}.shape[0], -1)",
            "{0}.reshape(-1, {0}.shape[-1])",
            "{0}.transpose(0, 1).reshape(-1)",
            "{0}.mT.contiguous()",
        ]
    if size is not None and size > 1:
        width = r.randint(1, size)
        texts += [f"{{0}}.unfold({d}, {width}, {r.choice([1, 2])})"] * 2
        start = r.randrange(size)
        texts += [
            f"{{0}}.narrow({d}, {start}, {r.randint(1, size - start)})",
            f"{{0}}[{colon}{start}]",
            f"{{0}}[{colon}{start}::{r.choice([1, 2, 3])}]",
        ]
        for factor in (2, 3, 4):
            if size % factor == 0:
                texts += [
                    f"{{0}}.unflatten({d}, ({size // factor}, {factor}))",
                    f"{{0}}.unflatten({d}, (-1, {factor}))",
                ]
    if rank < 4:
        texts += ["torch.diag_embed({0})", "{0}.expand(2, *{0}.shape)", "{0}.tile((2, 1))", "torch.atleast_3d({0})"]
    if size == 1:
        texts += [f"{{0}}.expand({', '.join('4' if k == d else '-1' for k in range(rank))})"] * 4
    g.emit(r.choice(texts), a)


@family(2)
def joined(g: Generator) -> None:
    a = g.floating()
    shape = g.shape(a)
    d = g.random.randrange(max(g.rank(a), 1))
    text = g.random.choice(
        [f"torch.cat([{{0}}, {{1}}], {d})"] * 3
        + [
            f"torch.stack([{{0}}, {{1}}], {d})",
            "torch.hstack([{0}, {1}])",
            "torch.vstack([{0}, {1}])",
            f"torch.cat([{{0}}, {{1}}, {{0}}], {d})",
            f"torch.cat([{{1}}, {{0}} * 2, {{1}}.neg()], {d})",
            "torch.dstack([{0}, {1}])",
            "torch.stack([{0}, {1}, {0}], -1)",
            "torch.cartesian_prod({0}.flatten()[:3], {1}.flatten()[:4])",
            "torch.block_diag({0}, {1})",
        ]
    )

    def fits(t: torch.Tensor) -> bool:
        same = t.ndim == len(shape) and all(
            k == d or p == q for k, (p, q) in enumerate(zip(t.shape, shape, strict=True))
        )
        return same and t.is_floating_point()

    b = g.pick(fits) or g.leaf(g.open_shape(a))
    g.emit(text, a, b)


@family(3)
def indexed(g: Generator) -> None:
    r = g.random
    a = g.floating(1) if r.random() < 0.8 else g.integral(1)
    d = r.randrange(g.rank(a))
    sizes = [env[a].shape[d] for env in g.envs]
    high = min(sizes)
    if not high:
        return
    shape = g.open_shape(a)
    count = r.choice([1, 2, 5])
    like: list[int | str | None] = [count if k == d else s for k, s in enumerate(shape)]
    full = g.leaf(like, "int64", "index", high=high) if r.random() < 0.6 else ""
    line = g.leaf([count], "int64", "index", high=high) if not full else ""
    dtype = str(g.value(a).dtype).removeprefix("torch.")
    colon = ":, " * d
    if full:
        source = g.leaf(like, dtype, None if g.value(a).is_floating_point() else "integer")
        line_of = f"torch.arange({count}, device={{0}}.device).view({'1, ' * d}-1{', 1' * (g.rank(a) - d - 1)})"
        text = r.choice(
            [
                f"torch.gather({{0}}, {d}, {{1}})",
                f"torch.take_along_dim({{0}}, {{1}}, {d})",
                f"{{0}}.scatter_add({d}, {{1}}, {{2}})",
                f"{{0}}.scatter({d}, {{1}}, 1)",
                f'{{0}}.scatter_reduce({d}, {{1}}, {{2}}, "amax")',
                f'{{0}}.scatter_reduce({d}, {{1}}, {{2}}, "sum")',
                f'{{0}}.scatter_reduce({d}, {{1}}, {{2}}, "mean", include_self=False)',
                f"{{0}}.scatter({d}, {{1}}, 2, reduce='add')",
                "{0}.take({1})",
                f'{{0}}.scatter_reduce({d}, {{1}}, {{2}}, "amin")',
                f"torch.gather({{0}}, {d}, {{1}} * 0)",
                f"{{0}}.scatter({d}, {{1}} * 0 + {line_of}, {{2}})",
            ]
        )
        g.emit(text, a, full, source)
        return
    source = g.leaf(like, dtype, None if g.value(a).is_floating_point() else "integer")
    text = r.choice(
        [
            f"{{0}}.index_select({d}, {{1}})",
            f"{{0}}[{colon}{{1}}]",
            f"{{0}}.index_add({d}, {{1}}, {{2}})",
            f"{{0}}.index_fill({d}, {{1}}, 3)",
            f"{{0}}.index_add({d}, {{1}}, {{2}}, alpha=2)",
            f"torch.index_put({{0}}, ({'None, ' * 0}{{1}} % {{0}}.shape[0],), {{0}}[0], accumulate=True)",
            f"{{0}}[{colon}{{1}}, None]",
            f"{{0}}[{colon}-{{1}} - 1]",
            f"{{0}}.index_copy({d}, torch.arange({count}, device={{0}}.device), {{2}})",
            "{0}[{1} % {0}.shape[0], ..., -1]",
            f'{{0}}.index_reduce({d}, {{1}}, {{2}}, "amax")',
            f"{{0}}[{colon}{{1}}[None]]",
            "F.embedding({1} % {0}.shape[0], {0})",
            "torch.index_put({0}, ({1} % {0}.shape[0],), {0}[0] * 2)",
        ]
    )
    g.emit(text, a, line, source)


@family(1)
def embedding(g: Generator) -> None:
    r = g.random
    rows, width = r.choice([5, 7, 12]), r.choice([4, 8, 6])
    table = g.leaf([rows, width], g.float_type(), "normal", parameter=r.random() < 0.7)
    index = g.leaf(g.any_shape(1, 2), r.choice(["int64", "int32"]), "index", high=rows)
    g.emit(
        r.choice(
            [
                "F.embedding({1}, {0})",
                "{0}[{1}]",
                "F.embedding({1}, {0}, padding_idx=1)",
                "F.one_hot({1}.long(), 12).float() @ {0}[:1].expand(12, -1)",
            ]
        ),
        table,
        index,
    )


@family(1)
def search(g: Generator) -> None:
    a = g.floating()
    line = g.leaf([g.random.choice([3, 8])], "float32", "normal", parameter=False)
    text = g.random.choice(
        [
            "torch.bucketize({0}, {1}.sort().values)",
            "torch.searchsorted({1}.sort().values, {0}, right=True)",
            "torch.histc({0}, 5, -2.0, 2.0)",
            "torch.bincount(({0} > 0).flatten().long(), minlength=3)",
            "torch.isin(({0} * 2).round(), ({1} * 2).round())",
            "torch.cdist({0}.reshape(1, -1, 1), {1}[:, None])[0]",
        ]
    )
    g.emit(text, a, line)


def _repeated(t: torch.Tensor) -> bool:
    """Whether one place in memory is several elements. AOTAutograd (aot_eager too) adds up the changes of all of them:
    x.expand(4)[2:].zero_() of 1 leaves -1."""
    return any(size > 1 and step == 0 for size, step in zip(t.shape, t.stride(), strict=True))


def _windows(g: Generator) -> set[int]:
    """What is seen through `unfold`: AOTAutograd (aot_eager too) writes zeros between the windows when one of them changes."""
    seen: dict[str, torch.Tensor] = {}
    for step in g.steps:
        if ".unfold(" in step.text or any(a in seen for a in step.args):
            given = {g.value(a).untyped_storage().data_ptr() for a in step.args}
            seen |= {o: g.value(o) for o in step.out if g.value(o).untyped_storage().data_ptr() in given}
    return {id(t) for t in seen.values()}


@family(2)
def changed(g: Generator) -> None:
    """A change in place, through a view or not."""
    r = g.random
    # Parameters stay as they are, and what is repeated in memory, which torch.compile writes back as a whole.
    fixed = [leaf.name for leaf in g.leaves if leaf.parameter or leaf.layout == "expanded"]
    own = {g.env[name].untyped_storage().data_ptr() for name in fixed}
    windows = _windows(g)
    a = g.pick(
        lambda t: (
            t.ndim > 0
            and t.untyped_storage().data_ptr() not in own
            and not _repeated(t)
            and id(t) not in windows
            and (t.is_floating_point() or r.random() < 0.3)
        )
    )
    if a is None:
        return
    rank = g.rank(a)
    d = r.randrange(rank)
    colon = ":, " * d
    places = [
        "",
        "",
        f"[{colon}1:]",
        f"[{colon}::2]",
        "[..., 0]",
        "[..., -1:]",
        f".select({d}, 0)",
        f".narrow({d}, 0, 1)",
        "[0]",
        f"[{colon}:-1]",
    ]
    places += [
        f".unflatten({d}, (-1, 1))",
        ".unsqueeze(0)",
        f"[{colon}{{0}}.shape[{d}] // 2:]",
        f".chunk(2, {d})[-1]",
        ".detach()",
    ]
    if rank > 1:
        places += [
            ".mT",
            ".transpose(0, 1)",
            ".diagonal(0, -2, -1)",
            ".view(-1)",
            ".flatten(0, 1)",
            "[1:, :1]",
            ".swapaxes(0, -1)[..., 1:]",
            ".movedim(0, -1)",
        ]
    place = r.choice(places)
    if not g.value(a).is_floating_point():
        text = r.choice(
            [
                "{0}P.add_(1)",
                "{0}P.mul_(2)",
                "{0}P.zero_()",
                "{0}P.fill_(1)",
                "{0}P.copy_({0}P.flip(0))",
                "{0}P.bitwise_not_()",
                "{0}P.clamp_(max=3)",
            ]
        )
        g.emit(text.replace("P", place), a, results=0)
        return
    text = r.choice(
        [
            "{0}P.add_(1)",
            "{0}P.mul_(0.5)",
            "{0}P.zero_()",
            "{0}P.fill_(0.25)",
            "{0}P.relu_()",
            "{0}P.clamp_(-0.5, 0.5)",
            "{0}P.neg_()",
            "{0}P.tanh_()",
            "{0}P.sub_(0.5)",
            "{0}P.copy_({0}P.flip(0))",
            "{0}P.sigmoid_()",
            "{0}P.div_(2)",
            "{0}P.masked_fill_({0}P > 0.4, 0.4)",
            "{0}P.copy_({0}P.sort(0).values)",
            "{0}P.add_({0}P.mean())",
            "{0}P.mul_({0}P)",
            "{0}P.square_()",
            "{0}P.exp_().clamp_(max=3)",
            "F.relu({0}P, inplace=True)",
            "{0}P.floor_()",
            "{0}P.abs_()",
            "{0}P.cumsum_(0)",
            "{0}P.addcmul_({0}P, {0}P, value=0.1)",
            "{0}P.lerp_({0}P.neg(), 0.3)",
            "{0}P.fill_({0}P.sum())",
            "{0}P.index_fill_(0, torch.zeros(1, dtype=torch.int64, device={0}.device), 1.5)",
            "{0}P.scatter_(0, torch.zeros_like({0}P, dtype=torch.int64), 0.75)",
            "{0}P.index_add_(0, torch.zeros(2, dtype=torch.int64, device={0}.device), {0}P[:1].repeat_interleave(2, 0))",
        ]
    )
    if r.random() < 0.5:
        region = g.envs
        shapes = []
        try:
            for env in region:
                shapes.append(tuple(eval(f"a{place.replace('{0}', 'a')}", {"a": env[a]}).shape))
        except (RuntimeError, IndexError, ValueError):
            return
        sizes = [s[0] if len(set(s)) == 1 else ("n" if s == g.sizes else 1) for s in zip(*shapes, strict=True)]
        b = g.pick(lambda t: tuple(t.shape) == shapes[0] and t.is_floating_point()) or g.leaf(sizes)
        if place.startswith("[") and r.random() < 0.4:
            text = r.choice(["{0}P = {1}", "{0}P += {1}", "{0}P *= {1}"])
        else:
            text = r.choice(
                [
                    "{0}P.add_({1})",
                    "{0}P.mul_({1})",
                    "{0}P.copy_({1})",
                    "{0}P.sub_({1}, alpha=0.5)",
                    "{0}P.addcmul_({1}, {1})",
                    "{0}P.copy_({1}).mul_(0.5)",
                ]
            )
        g.emit(text.replace("P", place), a, b, results=0)
        return
    g.emit(text.replace("P", place), a, results=0)
