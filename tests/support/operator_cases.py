"""Operator calls of our own: overloads that torch's samples do not reach, and the corners of convolution, pooling and
resizing. All inputs come from one seed."""

from __future__ import annotations

from typing import Any

import pointwise_cases
import torch
from agreement import Case
from indexing_cases import factorisations, gathers, scatters, searches

from lapilli import sampling
from lapilli.attention_operators import ATTENTION, ATTENTION_BACKWARD
from lapilli.code_operators import DEQUANTIZE, LOOK_UP, POWER_OF_TWO, QUANTIZE, UNPACK
from lapilli.gradient_operators import DEPTHWISE_GRADIENT

aten = torch.ops.aten
_generator = torch.Generator().manual_seed(7)
Cases = dict[Any, list[Case]]


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator)


def ints(*shape: int, dtype: torch.dtype = torch.int64, low: int = -9, high: int = 10) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=_generator, dtype=dtype)


def _scalar_overloads() -> Cases:
    """One tensor and a number: of the tensor's kind, and of a higher one."""
    found: Cases = {}
    for name in ("eq", "ne", "lt", "le", "gt", "ge", "add", "sub", "mul", "div", "remainder", "fmod", "rsub"):
        overload = getattr(aten, name).Scalar
        found[overload] = [Case(overload, (f(3, 5), 2)), Case(overload, (ints(7), 3)), Case(overload, (ints(4), 1.5))]
        tensor = getattr(aten, name).Tensor
        found[tensor] = [Case(tensor, (f(3, 5), f(5))), Case(tensor, (ints(6), f(6)))]
    for name in ("bitwise_and", "bitwise_or", "bitwise_xor"):
        overload = getattr(aten, name).Scalar
        found[overload] = [Case(overload, (ints(9), 6)), Case(overload, (ints(5) > 0, True))]
    for name in ("add", "sub", "mul", "div"):  # torch.export writes x + 2 so
        found[getattr(aten, name).Tensor] += [Case(getattr(aten, name).Tensor, (x, 2)) for x in (f(3, 5), ints(6))]
    found[aten.add.Tensor].append(Case(aten.add.Tensor, (f(4), f(4)), {"alpha": 2.5}))
    found[aten.div.Scalar_mode] = [
        Case(aten.div.Scalar_mode, (x, 3), {"rounding_mode": mode})
        for x in (f(9), ints(9))
        for mode in ("floor", "trunc", None)
    ]
    found[aten.pow.Scalar] = [Case(aten.pow.Scalar, (2.0, f(6))), Case(aten.pow.Scalar, (3, ints(5, low=0, high=6)))]
    exponents = (0, 1, 2, 3, -1, 0.5, -0.5, 2.5)
    found[aten.pow.Tensor_Scalar] = [Case(aten.pow.Tensor_Scalar, (f(7).abs() + 0.1, e)) for e in exponents]
    found[aten.clamp.default] = [
        Case(aten.clamp.default, (f(9), -0.5, 0.5)), Case(aten.clamp.default, (ints(9), None, 3)),
        Case(aten.clamp.default, (ints(9), -1.5, 2)),
    ]  # fmt: skip
    found[aten.gelu_backward.default] = [
        Case(aten.gelu_backward.default, (f(9), 3 * f(9)), {"approximate": way}) for way in ("none", "tanh")
    ]
    found[aten.clamp_min.default] = [Case(aten.clamp_min.default, (f(9), 0))]
    found[aten.clamp_max.default] = [Case(aten.clamp_max.default, (ints(9), 2))]
    yes = f(3, 4) > 0
    found[aten.where.Scalar] = [Case(aten.where.Scalar, (yes, 1.5, 2.5))]
    found[aten.where.ScalarOther] = [Case(aten.where.ScalarOther, (yes, f(4), 0))]
    found[aten.where.ScalarSelf] = [Case(aten.where.ScalarSelf, (yes, 1, f(3, 4)))]
    return found


def _conversions() -> Cases:
    values = torch.tensor([0.0, 1.9, -1.9, 3.0, -128.0, 127.0])
    kinds = (torch.float16, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool, torch.float32)
    sources = [values, values.to(torch.int32), values.to(torch.int64), values > 0, values.half()]
    return {
        aten._to_copy.default: [Case(aten._to_copy.default, (x,), {"dtype": k}) for x in sources for k in kinds],
        aten.to.dtype: [Case(aten.to.dtype, (x, k)) for x in sources for k in kinds if x.dtype != k],
        aten.to.other: [Case(aten.to.other, (f(3), ints(2)))],
        aten.alias.default: [Case(aten.alias.default, (f(3, 2),))],
        aten.detach.default: [Case(aten.detach.default, (f(3, 2),))],
        aten.lift_fresh_copy.default: [Case(aten.lift_fresh_copy.default, (ints(4),))],
    }


def _norms() -> Cases:
    def arguments(c: int, affine: bool) -> tuple[Any, ...]:
        return (f(c) if affine else None, f(c) if affine else None, f(c), f(c).abs() + 0.5)

    legit, composite = aten._native_batch_norm_legit_no_training.default, aten.batch_norm.default
    shapes = ((2, 5, 3, 3), (3, 4), (1, 3, 7))
    functional, instance = aten._native_batch_norm_legit_functional.default, aten.instance_norm.default
    return {
        functional: [
            Case(functional, (f(*s), *arguments(s[1], a), training, 0.1, 1e-3))
            for s in shapes
            for a in (True, False)
            for training in (True, False)
        ],
        legit: [Case(legit, (f(*s), *arguments(s[1], a), 0.1, 1e-3)) for s in shapes for a in (True, False)],
        composite: [
            Case(composite, (f(*s), *arguments(s[1], a), False, 0.1, 1e-5, False))
            for s in shapes
            for a in (True, False)
        ],
        instance: [
            Case(instance, (f(*s), *arguments(s[1], a)[:2], *(given or arguments(s[1], a)[2:]), own, 0.1, 1e-5, False))
            for s in ((2, 5, 3, 3), (1, 3, 7), (2, 4, 2, 3, 5))
            for a in (True, False)
            for own, given in ((True, (None, None)), (False, ()))
        ],
    }


def convolutions() -> list[Case]:
    """(x, weight, bias, stride, padding, dilation, transposed, output padding, groups) in one to three dimensions."""
    rows: list[tuple[Any, ...]] = [
        # x, weight, bias, stride, padding, dilation, transposed, output_padding, groups
        ((1, 3, 9), (5, 3, 3), True, [1], [0], [1], False, [0], 1),
        ((2, 4, 16), (8, 2, 5), False, [2], [2], [2], False, [0], 2),
        ((7, 8, 7), (4, 8, 1), True, [1], [0], [1], False, [0], 1),
        ((1, 3, 11, 13), (8, 3, 3, 3), True, [2, 2], [1, 1], [1, 1], False, [0, 0], 1),
        ((2, 8, 9, 7), (12, 8, 1, 1), True, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        ((1, 8, 9, 7), (12, 8, 1, 1), False, [2, 2], [0, 0], [1, 1], False, [0, 0], 1),
        ((1, 6, 8, 8), (9, 2, 3, 2), True, [1, 2], [2, 1], [2, 1], False, [0, 0], 3),  # 2 and 3 channels a group
        ((2, 12, 6, 5), (8, 6, 3, 3), False, [1, 1], [1, 1], [1, 1], False, [0, 0], 2),
        ((1, 16, 5, 5), (16, 4, 3, 3), True, [1, 1], [1, 1], [1, 1], False, [0, 0], 4),
        ((1, 8, 10, 9), (8, 1, 3, 3), True, [1, 1], [1, 1], [1, 1], False, [0, 0], 8),  # depthwise
        ((2, 8, 11, 12), (8, 1, 5, 5), False, [2, 2], [2, 2], [1, 1], False, [0, 0], 8),
        ((1, 6, 9, 9), (6, 1, 3, 3), True, [1, 1], [1, 1], [1, 1], False, [0, 0], 6),
        ((1, 4, 9, 9), (4, 1, 3, 3), True, [1, 1], [2, 2], [2, 2], False, [0, 0], 4),
        ((1, 4, 7, 7), (8, 1, 3, 3), True, [1, 1], [1, 1], [1, 1], False, [0, 0], 4),  # two outputs a channel
        ((1, 32, 12, 12), (32, 32, 3, 3), True, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),  # Winograd
        ((2, 32, 9, 7), (36, 32, 3, 3), False, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
        ((7, 5, 6, 6), (4, 5, 3, 3), True, [1, 1], [1, 1], [1, 1], False, [0, 0], 1),  # batch 7
        ((1, 4, 6, 6), (4, 4, 6, 6), True, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),  # one position
        ((1, 2, 5, 6, 4), (3, 2, 2, 3, 2), True, [1, 2, 1], [1, 0, 1], [1, 1, 2], False, [0, 0, 0], 1),
        ((1, 4, 4, 4, 4), (4, 1, 3, 3, 3), False, [1, 1, 1], [1, 1, 1], [1, 1, 1], False, [0, 0, 0], 4),
        ((2, 3, 6), (3, 4, 3), True, [2], [1], [1], True, [1], 1),
        ((1, 4, 5, 6), (4, 3, 3, 3), True, [2, 2], [1, 1], [1, 1], True, [1, 1], 1),
        ((2, 6, 4, 4), (6, 2, 3, 2), False, [3, 1], [1, 0], [2, 1], True, [2, 0], 3),
        ((1, 8, 4, 4), (8, 1, 4, 4), True, [2, 2], [1, 1], [1, 1], True, [0, 0], 8),
        ((1, 2, 3, 3, 3), (2, 3, 2, 2, 2), True, [2, 2, 2], [0, 0, 0], [1, 1, 1], True, [1, 0, 1], 1),
    ]  # fmt: skip
    found = []
    for x, w, bias, stride, padding, dilation, transposed, extra, groups in rows:
        outs = w[1] * groups if transposed else w[0]
        b = f(outs) if bias else None
        found.append(
            Case(aten.convolution.default, (f(*x), f(*w), b, stride, padding, dilation, transposed, extra, groups))
        )
    return found


def _depthwise_gradients() -> list[Case]:
    """(wide, narrow, stride, padding, dilation, kernel)."""
    return [
        Case(DEPTHWISE_GRADIENT, (f(2, 3, 8), f(2, 3, 4), [2], [1], [1], [3])),
        Case(DEPTHWISE_GRADIENT, (f(2, 5, 6, 7), f(2, 5, 6, 5), [1, 1], [1, 0], [1, 1], [3, 3])),
        Case(DEPTHWISE_GRADIENT, (f(1, 4, 5, 4, 6), f(1, 4, 4, 2, 6), [1, 2, 1], [0, 1, 2], [1, 2, 2], [2, 2, 3])),
    ]


def _pools() -> Cases:
    found: Cases = {}
    for n, shape in ((1, (2, 3, 11)), (2, (1, 5, 9, 10)), (3, (1, 2, 6, 5, 7))):
        k, s, p = [3] * n, [2] * n, [1] * n
        avg, best = getattr(aten, f"avg_pool{n}d").default, getattr(aten, f"max_pool{n}d").default
        found[avg] = [
            Case(avg, (f(*shape), k, s, p, ceil, include)) for ceil in (False, True) for include in (False, True)
        ] + [Case(avg, (f(*shape), k))]
        found[best] = [
            Case(best, (f(*shape), k, s, p, [1] * n, ceil)) for ceil in (False, True)
        ] + [Case(best, (f(*shape), k, [1] * n, [0] * n, [2] * n))]  # fmt: skip
        adaptive = getattr(aten, f"adaptive_avg_pool{n}d").default
        found[adaptive] = [Case(adaptive, (f(*shape), [size] * n)) for size in (1, 3, 4, 8)]
    indices = aten.max_pool2d_with_indices.default
    found[indices] = [
        Case(indices, (f(2, 3, 8, 9), [3, 2], [2, 2], [1, 1], [1, 1], True)),
        Case(indices, (torch.tensor([[[[1.0, float("nan")], [2.0, 1.0]]]]), [2, 2])),
    ]
    found[aten.avg_pool2d.default].append(
        Case(aten.avg_pool2d.default, (f(1, 4, 6, 6), [2, 2], [2, 2], [0, 0], False, True, 3))
    )
    return found


def _resizes() -> Cases:
    found: Cases = {}
    shapes = {1: (2, 3, 5), 2: (1, 4, 5, 7), 3: (1, 2, 3, 4, 2)}
    for n, x in shapes.items():
        for name in (f"upsample_nearest{n}d", f"_upsample_nearest_exact{n}d"):
            vec, plain = getattr(aten, name).vec, getattr(aten, name).default
            found[vec] = [Case(vec, (f(*x), None, [s] * n)) for s in (2.0, 1.5, 0.6)] + [
                Case(vec, (f(*x), [9] * n, None))
            ]
            found[plain] = [Case(plain, (f(*x), [2 * size for size in x[2:]]))]
    for n, name in ((1, "linear1d"), (2, "bilinear2d"), (3, "trilinear3d")):
        vec = getattr(aten, f"upsample_{name}").vec
        x = shapes[n]
        found[vec] = [Case(vec, (f(*x), None, corners, [s] * n)) for corners in (True, False) for s in (2.0, 1.7, 0.6)]
        found[vec] += [Case(vec, (f(*x), [1] * n, True, None)), Case(vec, (f(*x), [9] * n, False, None))]
    return found


def _views() -> Cases:
    many = [f(2, n % 3 + 1, 3) for n in range(18)]
    with_empty = [f(0), f(2, 3), f(2, 3)]
    return {
        aten.cat.default: [
            Case(aten.cat.default, (many, 1)), Case(aten.cat.default, (many[:9], -2)),
            Case(aten.cat.default, ([ints(3), f(2)],)), Case(aten.cat.default, (with_empty, 1)),
            Case(aten.cat.default, ([f(1, 4, 2), f(1, 8, 2), f(1, 4, 2)], 1)),
        ],
        aten.stack.default: [Case(aten.stack.default, ([f(2, 3) for _ in range(9)], 1))],
        aten.slice.Tensor: [
            Case(aten.slice.Tensor, (f(9, 4), 0, 1, 9, 3)), Case(aten.slice.Tensor, (f(4, 9), 1, -5, 100)),
            Case(aten.slice.Tensor, (f(4, 9), 1, 3, 3)),
        ],
        aten.constant_pad_nd.default: [
            Case(aten.constant_pad_nd.default, (f(2, 3, 4), [1, 2, 0, 3], 1.5)),
            Case(aten.constant_pad_nd.default, (f(4, 5), [-1, 2])),
        ],
        aten.permute.default: [Case(aten.permute.default, (f(2, 3, 4, 5), [3, 1, 0, 2]))],
        aten.view.default: [
            Case(aten.view.default, (f(2, 12, 5), [3, 8, 5])), Case(aten.view.default, (f(6, 4), [4, 6])),
            Case(aten.view.default, (f(2, 0, 3), [0])), Case(aten.view.default, (f(1, 1), [])),
        ],
        aten.chunk.default: [Case(aten.chunk.default, (f(7, 4), 3))],
        aten.split.Tensor: [Case(aten.split.Tensor, (f(3, 7), 3, 1))],
    }  # fmt: skip


def _windows() -> Cases:
    """(gradient of the windows, sizes of the input, dimension, window, step): windows that overlap, touch and leave gaps."""
    unfold = aten.unfold_backward.default
    return {
        unfold: [
            Case(unfold, (f(4, 3), [6], 0, 3, 1)), Case(unfold, (f(3, 2, 4), [3, 9], 1, 4, 4)),
            Case(unfold, (f(5, 3, 3), [11, 3], -2, 3, 2)), Case(unfold, (f(2, 3, 2), [2, 12], 1, 2, 5)),
            Case(unfold, (f(1, 7, 1), [1, 7], 1, 1, 1)),
        ]
    }  # fmt: skip


def _matmuls() -> Cases:
    m = aten.matmul.default
    shapes = [((5,), (5,)), ((4, 5), (5,)), ((5,), (5, 3)), ((2, 3, 5), (5, 4)), ((2, 1, 3, 4), (1, 3, 4, 8)),
              ((3, 4, 8), (2, 1, 8, 4)), ((1, 17, 9), (9, 6)), ((2, 3, 5), (5,)), ((5,), (2, 5, 3))]  # fmt: skip
    linear = aten.linear.default
    return {
        m: [Case(m, (f(*a), f(*b))) for a, b in shapes],
        linear: [
            Case(linear, (f(1, 12), f(8, 12), f(8))), Case(linear, (f(7, 10), f(5, 10))),
            Case(linear, (f(2, 3, 16), f(20, 16), f(20))), Case(linear, (f(33, 8), f(4, 8), f(4))),
            Case(linear, (f(1, 300), f(3, 300), f(3))),
        ],
        aten.mm.default: [Case(aten.mm.default, (f(6, 8), f(8, 9))), Case(aten.mm.default, (ints(3, 4), ints(4, 5)))],
        aten.softmax.int: [Case(aten.softmax.int, (f(3, 700), -1)), Case(aten.softmax.int, (f(2, 5, 3) * 50, 1))],
    }  # fmt: skip


def _grouped() -> Cases:
    """Groups of rows, of columns, of what is summed, and a batch; one group is empty. (torch wants rows of whole 16 bytes.)"""
    grouped = aten._grouped_mm.default
    ends = torch.tensor([3, 3, 7, 24], dtype=torch.int32)
    return {
        grouped: [
            Case(grouped, (f(24, 8), f(4, 8, 16), ends)), Case(grouped, (f(4, 5, 8), f(8, 24), ends)),
            Case(grouped, (f(5, 24), f(24, 8), ends)), Case(grouped, (f(4, 5, 8), f(4, 8, 16))),
        ]
    }  # fmt: skip


def _attention() -> Cases:
    """Masks, grouped heads, sizes that are no multiples of 4, rows without any key, more keys than a tile."""
    whole, cpu = aten.scaled_dot_product_attention.default, aten._scaled_dot_product_flash_attention_for_cpu.default

    def heads(q: tuple[int, ...], k: tuple[int, ...], v: int | None = None) -> tuple[torch.Tensor, ...]:
        return f(*q), f(*k), f(*k[:-1], v or k[-1])

    some = torch.rand(2, 1, 7, 9, generator=_generator) > 0.5
    some[0, 0, 2] = False
    bias = f(7, 9)
    bias[3] = float("-inf")
    plain = ((2, 3, 7, 8), (2, 3, 9, 8))
    trained = (
        (heads(*plain), None, False, None, False), (heads(*plain, 5), some, False, 0.3, False),
        (heads((2, 6, 7, 8), (2, 2, 9, 8)), bias, False, None, True), (heads((3, 33, 5), (3, 33, 5)), None, True, None, False),
    )  # fmt: skip
    return {
        whole: [
            Case(whole, heads(*plain)), Case(whole, heads((2, 3, 7, 5), (2, 3, 9, 5), 6)),
            Case(whole, (*heads(*plain), some)), Case(whole, (*heads(*plain), bias)),
            Case(whole, (*heads((2, 70, 16), (2, 70, 16)), None, 0.0, True)),
            Case(whole, (*heads((1, 2, 20, 12), (1, 2, 45, 12)), None, 0.0, True)),
            Case(whole, heads((2, 6, 7, 8), (2, 2, 9, 8)), {"enable_gqa": True}),
            Case(whole, heads((2, 3, 7, 8), (1, 3, 9, 8)), {"scale": 0.3}),
            Case(whole, heads((7, 8), (9, 8))), Case(whole, heads((1, 2, 3, 7, 8), (1, 2, 3, 40, 8))),
            Case(whole, heads((1, 2, 33, 64), (1, 2, 65, 64))), Case(whole, heads((1, 1, 1, 80), (1, 1, 67, 80))),
        ],
        cpu: [
            Case(cpu, heads(*plain)), Case(cpu, (*heads((1, 2, 9, 8), (1, 2, 9, 8)), 0.0, True)),
            Case(cpu, heads(*plain), {"attn_mask": bias.clamp(min=-2), "scale": 0.2}),
        ],
        ATTENTION: [Case(ATTENTION, (*given, *options)) for given, *options in trained],
        ATTENTION_BACKWARD: [
            Case(ATTENTION_BACKWARD, (f(*(made := ATTENTION(*given, *options)).shape), *given, made, *options))
            for given, *options in trained
        ],
    }  # fmt: skip


def _rows() -> Cases:
    """Rows of all lengths, some with NaN and infinity."""
    strange = f(6, 40)
    strange[0], strange[1, 3], strange[2, 5], strange[3, 0] = float("-inf"), float("nan"), float("inf"), float("-inf")
    layer, group = aten.layer_norm.default, aten.group_norm.default
    lengths = (1, 2, 3, 5, 127, 1000)
    return {
        aten._softmax.default: [Case(aten._softmax.default, (f(3, n), -1, False)) for n in lengths]
        + [Case(aten._softmax.default, (strange, -1, False)), Case(aten._softmax.default, (f(40, 6, 5), 1, False))],
        aten._log_softmax.default: [Case(aten._log_softmax.default, (f(40, n), 1, False)) for n in lengths],
        layer: [Case(layer, (f(3, n), [n], f(n), f(n))) for n in (2, 3, 5, 127, 1000)]
        + [Case(layer, (strange, [40])), Case(layer, (f(2, 5000), [5000]))],
        group: [Case(group, (f(2, 6, 5, 7), 3, f(6), f(6))), Case(group, (f(2, 8, 4), 2))],
    }


def _recurrent() -> Cases:
    """(input, initial states, weights, biases?, layers, dropout, train, bidirectional, batch first)"""
    found: Cases = {}
    shapes = ((True, 1, False, False), (False, 2, True, True), (True, 2, True, False))
    for name, gates in (("lstm", 4), ("gru", 3), ("rnn_tanh", 1), ("rnn_relu", 1)):
        overload = getattr(aten, name).input
        found[overload] = []
        for biases, layers, both, batch_first in shapes:
            ways = 1 + both
            sizes = [5, *[6 * ways] * (layers - 1)]
            params = [
                w for size in sizes for _ in range(ways)
                for w in (f(6 * gates, size), f(6 * gates, 6), *[f(6 * gates) for _ in range(2 * biases)])
            ]  # fmt: skip
            x, h = f(9, 3, 5), f(layers * ways, 3, 6)
            first = [h, h * 0.5] if name == "lstm" else h
            x = x.transpose(0, 1).contiguous() if batch_first else x
            found[overload].append(Case(overload, (x, first, params, biases, layers, 0.0, False, both, batch_first)))
            if not batch_first:  # what comes after the end of a sequence may be anything: test_packed_sequences.py
                padded = getattr(torch.ops.lapilli, f"{name}_padded").default
                whole = torch.full((3,), 9)
                found.setdefault(padded, []).append(
                    Case(padded, (x, whole, first, params, biases, layers, 0.0, False, both))
                )
    weights = [f(24, 5), f(24, 4), f(24), f(24), f(4, 6)]  # an LSTM with a projection
    found[aten.lstm.input].append(
        Case(aten.lstm.input, (f(3, 2, 5), [f(1, 2, 4), f(1, 2, 6)], weights, True, 1, 0.0, False, False, False))
    )
    return found


def _codes() -> Cases:
    """Quantized tensors: one scale, channels, rows, groups that do not divide a row; parameters of any rank."""
    q, zero = ints(6, 10, dtype=torch.int8, low=-128, high=128), ints(6, 3, dtype=torch.int8)
    scale, x = f(6, 3).abs() + 0.1, f(6, 10) * 20
    d, c, u = DEQUANTIZE, QUANTIZE, UNPACK
    packed = ints(3, 4, 5, dtype=torch.uint8, low=0, high=256)
    images, of_channels = ints(2, 4, 3, 3, dtype=torch.uint8, low=0, high=256), f(4).abs() + 0.1
    return {
        d: [
            Case(d, (q, scale, zero, [1, 4], torch.float32)), Case(d, (q, scale[:, 0], None, [1, -1], torch.float32)),
            Case(d, (q, scale[:, :1], zero[:, :1], [1, -1], torch.float32)), Case(d, (q, f(), None, [-1, -1], torch.float32)),
            Case(d, (q, f(1), ints(1, dtype=torch.int32), [-1, -1], torch.float32)),
            Case(d, (images, of_channels, ints(4), [-1, 1, -1, -1], torch.float32)),
        ],
        c: [
            Case(c, (x, scale, zero, [1, 4], -128, 127, torch.int8)), Case(c, (x, f(1), None, [-1, -1], -8, 7, torch.int8)),
            Case(c, (x, scale[:, 0], ints(6, dtype=torch.int32), [1, -1], 0, 255, torch.uint8)),
            Case(c, (x, f(), None, [-1, -1], -100, 155, torch.float32)),
        ],
        u: [Case(u, (packed, -8, 10)), Case(u, (packed, 0, 9)), Case(u, (packed[0], -3, 9))],
        LOOK_UP: [Case(LOOK_UP, (packed % 16, table)) for table in ([*range(-128, 0, 8)], [0, 5, 15, 1, 2, 3, 4, 9, *[0] * 8])]
        + [Case(LOOK_UP, (packed[0] % 16, [7, 0, 15, 1, 2, 3, 4, 9, -7, 0, -15, -1, -2, -3, -4, -9]))],
        POWER_OF_TWO: [Case(POWER_OF_TWO, (packed // 2 + 32, bias)) for bias in (127, 128, 149)],
        aten._int_mm.default: [
            Case(aten._int_mm.default, (ints(17, 16, dtype=torch.int8), ints(16, 8, dtype=torch.int8, low=-128, high=128)))
        ],
    }  # fmt: skip


def _definite_draws() -> Cases:
    """Greedy, and from one element alone: test_sampling.py has the others."""
    draw = sampling.OPERATOR
    one, half = torch.tensor(1), torch.tensor(0.5)
    sets = [(None, None, None), (half, one, None), (half, None, half * 0), (f(3) * 0, one, half)]
    return {draw: [Case(draw, (x, *given)) for x in (f(3, 7), f(2, 3, 4500)) for given in sets]}


CASES: Cases = {aten.convolution.default: convolutions(), DEPTHWISE_GRADIENT: _depthwise_gradients()}
for _group in (
    _scalar_overloads(),
    _conversions(),
    _norms(),
    _pools(),
    _resizes(),
    _views(),
    _windows(),
    _matmuls(),
    pointwise_cases.CASES,
    gathers(),
    scatters(),
    searches(),
    factorisations(),
    _grouped(),
    _attention(),
    _rows(),
    _recurrent(),
    _definite_draws(),
    _codes(),
):
    for _overload, _cases in _group.items():
        CASES.setdefault(_overload, []).extend(_cases)
