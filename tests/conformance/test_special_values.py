"""NaN, infinity, signed zeros, denormals and numbers at the ends of the range, through a part of what tools/special_values.py
tries: many operators in one program, against torch."""

from __future__ import annotations

import as_gpu
import pytest
import special_values
import torch
from special_cases import NAN, Case, Family
from special_pointwise import binary, pointwise
from torch.nn import functional as F

PARTS: dict[str, str] = {
    "pointwise": """sin cos tan asin sinh tanh asinh atanh acosh log log2 log10 log1p lgamma special_entr reciprocal sign relu
relu6 hardswish nan_to_num isfinite bool frexp frac digamma special_ndtr sinc special_erfcx|xlogy 2|x * 1e38 / 1e38|square sqrt
sqrt of gelu tanh|relu6 of hardswish|gelu tanh|clamp 0 1|clamp nan|x != x|x > 0|not x < 0|x == 0|x < inf|x * 0
special_bessel_j1|x - x|0 / x|x + 0|0 - x|pow 0.5|pow inf|-1 pow|fmod 3|remainder 3""",
    "binary": "maximum fmin pow fmod remainder xlogy le ne logical_and hypot|clamp tensors|where not a < b|gather argmax|a / b * b",
    "reduce 8": """std var amax min argmax argmin softmax softmin logsumexp cummax nansum sort median prod cumprod mode
std mean|cosine|amax 0|log softmax
count nonzero|norm inf""",
    "pooling": "max 1d indices k3 s2 p1|max 2d indices k3 s2 p1|max 2d indices k2 s1 d2 p1|max 3d indices k2 s2 p1 cTrue|"
    "adaptive max 2d [7, 4] indices|fractional 2d|max 2d k3 s2 p1|avg 2d [3, 2, 1]",
    "convolution": "transposed|transposed stride|transposed 1d grouped|transposed 1d grouped stride|depthwise|"
    "grid sample|addmm beta 0|attention all masked",
    "weights": "transposed|transposed stride|transposed 1d grouped|conv2d 32",
    "undone 2": "sum of x + sum of -x|sum of xy + sum of -xy|sum of x / sum of -x|average pool|product|x less its row",
    "named": "std of 1e29|sin of large|cos of larger|count nonzero of denormals|layer norm of 20|linear of asin",
}  # fmt: skip
"""Cases by family: words of one line are cases of one word, others stand between bars."""


def part(family: Family) -> list[Case]:
    known = {case.name for case in family.cases}
    pieces = PARTS[family.name].replace("\n", "|").split("|")
    names = {name for piece in pieces for name in ([piece] if piece in known else piece.split())}
    assert names <= known
    return [case for case in family.cases if case.name in names]


@pytest.fixture(scope="module")
def families() -> dict[str, Family]:
    return {family.name: family for family in special_values.families()}


@pytest.mark.parametrize("name", PARTS)
def test_programs(families: dict[str, Family], name: str) -> None:
    family = families[name]
    cases = part(family)
    assert len(cases) >= 4
    assert wrong(cases, family.inputs, family, torch.float32) == []


@pytest.mark.parametrize("name", ["pointwise", "binary", "reduce 8", "pooling", "convolution", "weights"])
def test_programs_in_bfloat16(families: dict[str, Family], name: str) -> None:
    """Of odd sizes, where inputs are lists: two elements lie in a word."""
    family = families[name]
    inputs = special_values.odd(family.inputs)
    cases = [case for case in part(family) if case.half and special_values.sizes(case, inputs)]
    assert len(cases) >= 4
    assert wrong(cases, inputs, family, torch.bfloat16) == []


def wrong(
    cases: list[Case], inputs: dict[str, torch.Tensor], family: Family, dtype: torch.dtype
) -> list[tuple[str, str]]:
    found = [
        (case.name, ours if isinstance(ours, str) else special_values.compare(case, inputs, ours, dtype, False))
        for case, ours in special_values.compiled(cases, inputs, family.constants, dtype, None)
    ]
    return [(name, what) for name, what in found if what is not None]


def test_gradients_of_pooling(families: dict[str, Family]) -> None:
    """Windows that are all -inf, windows with NaN: the gradient goes where torch lets it go."""
    family = families["pooling"]
    cases = [case for case in part(family) if case.differentiable and "fractional" not in case.name]
    for case, ours in special_values.gradients(cases, family.inputs, "compiled"):
        reference = special_values.gradient_case(case)
        assert special_values.compare(reference, family.inputs, ours, torch.float32, False) is None, case.name  # type: ignore[arg-type]


SLOPES = """relu6 hardtanh elu selu celu hardswish hardsigmoid hardshrink softshrink leaky_relu gelu silu softsign sinc digamma
special_erfcx special_i0e log2|gelu tanh|sqrt of gelu tanh|relu6 of hardswish|pow 0"""


def test_gradients_of_activations() -> None:
    """At NaN, at their corners, and where torch's formulas cancel."""
    names = {
        name
        for piece in SLOPES.split("|")
        for name in ([piece] if " of " in piece or piece[-1] in "h0" else piece.split())
    }
    family = pointwise()
    cases = [case for case in family.cases if case.name in names]
    assert {case.name for case in cases} == names
    for case, ours in special_values.gradients(cases, family.inputs, "compiled"):
        reference = special_values.gradient_case(case)
        assert special_values.compare(reference, family.inputs, ours, torch.float32, False, True) is None, case.name  # type: ignore[arg-type]


def test_gradients_at_nan() -> None:
    """Of many numbers, of which torch computes most in vectors."""
    x = torch.full((64,), NAN)
    for f in (F.relu6, F.hardtanh, F.elu, F.selu, F.celu, F.hardswish, F.softshrink, F.relu, F.leaky_relu):
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        torch.compile(f, backend="vulkan")(ours).sum().backward()
        f(theirs).sum().backward()
        torch.testing.assert_close(ours.grad, theirs.grad[:1].expand(64), equal_nan=True, msg=str(f))


@pytest.mark.poor_device
def test_on_a_poor_device() -> None:
    """Which flushes denormals, too."""
    names = {
        "pointwise": "sin|log|tanh|relu|clamp 0 1|x > 0|not x < 0|-1 pow|fmod 3|frac|atanh|digamma|sinc|special_ndtr|square sqrt"
        "|x * 1e38 / 1e38",
        "binary": "hypot|xlogy|a / b * b",
    }
    for family in (pointwise(), binary()):
        cases = [case for case in family.cases if case.name in names[family.name].split("|")]
        for case, ours in special_values.compiled(cases, family.inputs, frozenset(), torch.float32, "any-fp32"):
            assert special_values.compare(case, family.inputs, ours, torch.float32, False) is None, case.name  # type: ignore[arg-type]


@pytest.mark.parametrize("target", ["gpu-fp32", "gpu-fp16-matrix"])
def test_gpu_plans(families: dict[str, Family], monkeypatch: pytest.MonkeyPatch, tmp_path: object, target: str) -> None:
    as_gpu.on_any_device(monkeypatch.setattr)
    monkeypatch.setenv("LAPILLI_CACHE_DIR", str(tmp_path))
    dtype = torch.float32 if target == "gpu-fp32" else torch.float16
    for name in ("reduce 8", "named"):
        family = families[name]
        cases = [case for case in part(family) if case.half or dtype is torch.float32][:8]
        for case, ours in special_values.compiled(cases, family.inputs, family.constants, dtype, target):
            assert special_values.compare(case, family.inputs, ours, dtype, False) is None, case.name  # type: ignore[arg-type]
