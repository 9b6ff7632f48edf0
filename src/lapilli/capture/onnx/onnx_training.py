"""Steps of optimizers, and losses, in the domains that the standard has for training."""

from __future__ import annotations

import torch

from lapilli.capture.onnx.onnx_registry import OnnxCall, operator

Tensor = torch.Tensor
_DOMAIN = "ai.onnx.preview.training"


def _groups(values: tuple[Tensor, ...], count: int) -> list[tuple[Tensor, ...]]:
    """The tensors of each parameter: all parameters come first, then all gradients, and so on."""
    each = len(values) // count
    return [values[k::each] for k in range(each)]


@operator("Adagrad", domain=_DOMAIN)
def adagrad(call: OnnxCall, rate: Tensor, step: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    decayed = rate / (1 + step.to(rate.dtype) * call.get("decay_factor", 0.0))
    weights, sums = [], []
    for x, gradient, total in _groups(values, 3):
        g = call.get("norm_coefficient", 0.0) * x + gradient
        total = total + g * g
        sums.append(total)
        weights.append(x - decayed * g / (torch.sqrt(total) + call.get("epsilon", 0.0)))
    return (*weights, *sums)


@operator("Momentum", domain=_DOMAIN)
def momentum(call: OnnxCall, rate: Tensor, step: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    alpha, norm = call.get("alpha"), call.get("norm_coefficient")
    beta = torch.where(step > 0, call.get("beta"), 1.0).to(rate.dtype)
    weights, velocities = [], []
    for x, gradient, v in _groups(values, 3):
        g = norm * x + gradient
        v = alpha * v + beta * g
        velocities.append(v)
        weights.append(x - rate * (g + alpha * v if call.get("mode") == "nesterov" else v))
    return (*weights, *velocities)


@operator("Adam", domain=_DOMAIN)
def adam(call: OnnxCall, rate: Tensor, step: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
    alpha, beta = call.get("alpha", 0.9), call.get("beta", 0.999)
    turns = step.to(rate.dtype)
    corrected = torch.where(step > 0, rate * torch.sqrt(1 - beta**turns) / (1 - alpha**turns), rate)
    weights, means, squares = [], [], []
    for x, gradient, mean, square in _groups(values, 4):
        g = call.get("norm_coefficient", 0.0) * x + gradient
        mean = alpha * mean + (1 - alpha) * g
        square = beta * square + (1 - beta) * g * g
        means.append(mean)
        squares.append(square)
        moved = x - corrected * mean / (torch.sqrt(square) + call.get("epsilon", 0.0))
        weights.append((1 - call.get("norm_coefficient_post", 0.0)) * moved)
    return (*weights, *means, *squares)
