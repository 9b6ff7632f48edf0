"""The table of scalar operations. A new one is a row here and, if Slang lacks it, a function in
kernels/lapilli_math.slang.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lapilli.ir import interval
from lapilli.ir.dtype import DType
from lapilli.ir.interval import Rule, within
from lapilli.ir.narrow import OPERATIONS as NARROW
from lapilli.ir.narrow import narrowed
from lapilli.ir.special_functions import FUNCTIONS as SPECIAL

_HEAVY = 8
"""The cost of a transcendental function, in additions."""


@dataclass(frozen=True)
class VectorFunction:
    """A Slang function of vectors of any length, and the module of kernels/ that defines it."""

    name: str
    module: str = "lapilli_math"


@dataclass(frozen=True)
class ScalarOp:
    """One scalar operation.

    numpy: its meaning, on arrays of the compute type; the result is converted to the compute type of the result. slang: its
    text, with {0}, {1} … for the operands, or a function; "" if the text depends on more than the operands' texts, and
    `codegen/emit.py` has a function of the operation's name. result: the result's type, if it differs from the operands'.
    cost: in additions, approximately. on_integers, on_floats: the range of the result, given those of the operands; without
    a rule, any value of the type.
    """

    name: str
    arity: int
    numpy: Callable[..., Any]
    slang: str | VectorFunction
    result: DType | None = None
    cost: int = 1
    on_integers: Rule | None = None
    on_floats: Rule | None = None


def _both(rule: Rule) -> dict[str, Any]:
    return {"on_integers": rule, "on_floats": rule}


def _unary(name: str, numpy: Callable[..., Any], slang: str | VectorFunction, **known: Any) -> ScalarOp:
    return ScalarOp(name, 1, numpy, slang, **known)


def _binary(name: str, numpy: Callable[..., Any], slang: str | VectorFunction, **known: Any) -> ScalarOp:
    return ScalarOp(name, 2, numpy, slang, **known)


def _function(name: str, numpy: Callable[..., Any], arity: int = 1, **known: Any) -> ScalarOp:
    """An operation implemented by a function of lapilli_math.slang."""
    return ScalarOp(name, arity, numpy, VectorFunction(f"{name}_any"), **known)


def _comparison(name: str, numpy: Callable[..., Any], sign: str) -> ScalarOp:
    """The text is that for integers; comparisons of floats must also handle NaN (`codegen/emit.py`)."""
    return ScalarOp(name, 2, numpy, f"({{0}} {sign} {{1}})", DType.bool)


def _narrowing(dtype: DType, slang: str | VectorFunction = "") -> ScalarOp:
    name = NARROW[dtype]
    rule: dict[str, Any] = (
        {"on_floats": partial(interval.rounded, dtype)} if dtype.is_float
        else {"on_integers": partial(interval.wrapped, interval.STORED[dtype])}
    )  # fmt: skip
    return ScalarOp(name, 1, partial(narrowed, dtype=dtype), slang or VectorFunction(f"{name}_any"), **rule)


def _upper_product(x: Any, y: Any) -> Any:
    """The upper 32 bits of the product of unsigned numbers."""
    return (x.view(np.uint32).astype(np.uint64) * y.view(np.uint32) >> np.uint64(32)).astype(np.uint32)


def _unsigned_shift(x: Any, y: Any) -> Any:
    return np.right_shift(x.view(np.uint32), y.view(np.uint32)).view(np.int32)


_OF_UNIT = within(-1, 1)


def _normal_cdf(x: float) -> float:
    return 0.5 * math.erfc(-x * math.sqrt(0.5))


_ROWS = [
    # arithmetic
    _unary("neg", np.negative, "-({0})", **_both(interval.negated)),
    _unary("abs", np.abs, "abs({0})", **_both(interval.absolute)),
    _unary("sign", np.sign, "", **_both(_OF_UNIT)),
    _unary("reciprocal", lambda x: 1 / x, ""),
    _binary("add", np.add, "({0} + {1})", **_both(interval.sum_of)),
    _binary("sub", np.subtract, "({0} - {1})", **_both(interval.difference)),
    _binary("mul", np.multiply, "({0} * {1})", **_both(interval.product)),
    _binary("div", np.true_divide, "", cost=_HEAVY, on_integers=interval.quotient, on_floats=interval.ratio),
    _function("floordiv", np.floor_divide, 2, on_integers=interval.quotient),
    _function("mod", np.mod, 2, on_integers=interval.remainder),
    _function("fmod", np.fmod, 2, on_integers=interval.remainder_of),
    _binary("min", np.minimum, "", **_both(interval.least)),
    _binary("max", np.maximum, "", **_both(interval.greatest)),
    _function("at_least", lambda x, y: np.where(x > y, x, y), 2, **_both(interval.greatest)),  # of NaN it makes y
    _function("at_most", lambda x, y: np.where(x < y, x, y), 2, **_both(interval.least)),
    _function("gcd", np.gcd, 2, on_integers=interval.divisor),
    _function("umulhi", _upper_product, 2),
    # rounding
    _unary("floor", np.floor, "floor({0})", on_floats=interval.stepwise(math.floor)),
    _unary("ceil", np.ceil, "ceil({0})", on_floats=interval.stepwise(math.ceil)),
    _unary("round", np.rint, "round({0})", on_floats=interval.stepwise(round)),
    _unary("trunc", np.trunc, "trunc({0})", on_floats=interval.stepwise(math.trunc)),
    # powers, exponentials, logarithms
    _function("pow", np.power, 2, cost=_HEAVY, on_integers=interval.power),
    _unary("sqrt", np.sqrt, "sqrt({0})", cost=_HEAVY, on_floats=interval.root),
    _unary("rsqrt", lambda x: 1 / np.sqrt(x), "rsqrt({0})", cost=_HEAVY),
    _function("exp", np.exp, cost=_HEAVY),
    _function("exp2", np.exp2),
    _function("expm1", np.expm1, cost=_HEAVY),
    _function("log", np.log, cost=_HEAVY, on_floats=interval.logarithm),
    _function("log2", np.log2, on_floats=interval.logarithm),
    _function("log10", np.log10, on_floats=interval.logarithm),
    _function("log1p", np.log1p, cost=_HEAVY),
    # trigonometric and hyperbolic functions
    _function("sin", np.sin, cost=_HEAVY, on_floats=_OF_UNIT),
    _function("cos", np.cos, cost=_HEAVY, on_floats=_OF_UNIT),
    _function("tan", np.tan),
    _function("asin", np.arcsin),
    _function("acos", np.arccos),
    _function("atan", np.arctan),
    _function("atan2", np.arctan2, 2),
    _function("sinh", np.sinh, cost=_HEAVY),
    _function("cosh", np.cosh, cost=_HEAVY),
    _function("tanh", np.tanh, cost=_HEAVY, on_floats=_OF_UNIT),
    _function("asinh", np.arcsinh),
    _function("acosh", np.arccosh),
    _function("atanh", np.arctanh),
    _function("erf", np.vectorize(math.erf, otypes=[float]), cost=_HEAVY, on_floats=_OF_UNIT),
    _function("normal_cdf", np.vectorize(_normal_cdf, otypes=[float]), cost=_HEAVY, on_floats=within(0, 1)),
    # special functions
    *(
        ScalarOp(
            name,
            2,
            function,
            VectorFunction(f"{name}_any", "lapilli_special"),
            cost=_HEAVY if name in ("igamma", "igammac", "zeta") else 1,
        )
        for name, function in SPECIAL.items()
    ),
    # comparisons and logic
    _comparison("eq", np.equal, "=="),
    _comparison("ne", np.not_equal, "!="),
    _comparison("lt", np.less, "<"),
    _comparison("le", np.less_equal, "<="),
    _comparison("gt", np.greater, ">"),
    _comparison("ge", np.greater_equal, ">="),
    _unary("isnan", np.isnan, "", result=DType.bool),
    _unary("isinf", np.isinf, "is_inf({0})", result=DType.bool),
    _unary("not", np.logical_not, "!{0}", result=DType.bool),
    _binary("and", np.logical_and, "and({0}, {1})", result=DType.bool),
    _binary("or", np.logical_or, "or({0}, {1})", result=DType.bool),
    _binary("xor", np.logical_xor, "({0} != {1})", result=DType.bool),
    ScalarOp("where", 3, np.where, "select({0}, {1}, {2})", **_both(lambda _, a, b: interval.union(a, b))),
    # bits
    _unary("bitnot", np.invert, "~{0}", on_integers=interval.complement),
    _binary("bitand", np.bitwise_and, "({0} & {1})", on_integers=interval.masked),
    _binary("bitor", np.bitwise_or, "({0} | {1})", on_integers=interval.bits),
    _binary("bitxor", np.bitwise_xor, "({0} ^ {1})", on_integers=interval.bits),
    _binary("shl", np.left_shift, "({0} << {1})", on_integers=interval.shifted_left),
    _binary("shr", np.right_shift, "({0} >> {1})", on_integers=interval.shifted_right),
    _function("ushr", _unsigned_shift, 2),
    # the bits of a float as an integer, and vice versa
    _unary("as_int", lambda x: x.view(np.int32), "asint({0})", result=DType.int32),
    _unary("as_float", lambda x: x.view(np.float32), "asfloat({0})", result=DType.float32),
    # conversion to narrower types
    _narrowing(DType.uint8, "({0} & 0xff)"),
    _narrowing(DType.int8, "(({0} << 24) >> 24)"),
    _narrowing(DType.int16, "(({0} << 16) >> 16)"),
    _narrowing(DType.float16),
    _narrowing(DType.bfloat16),
]
OPS: dict[str, ScalarOp] = {op.name: op for op in _ROWS}
"""By name. Conversions between compute types ("cast") are not among them, because they depend on the result's type."""
