"""Fused operators of optimizers and gradient scalers, composed of others; nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from lapilli.eager.dispatch import composite

aten = torch.ops.aten
Number = float | Tensor


def _store(target: Tensor, value: Tensor, found: Tensor | None) -> None:
    """Stores a value unless an infinite or NaN gradient was found; then everything stays as it was."""
    target.copy_(value if found is None else torch.where(found == 1, target, value))


def _gradient(grad: Tensor, scale: Tensor | None, maximize: bool) -> Tensor:
    """The gradient divided by the scale of the loss, which also updates the caller's tensor; negated if `maximize`."""
    if scale is not None:
        grad.div_(scale)
    return -grad if maximize else grad


def _adam(is_decoupled: bool) -> Callable[..., None]:
    def adam(
        params: Sequence[Tensor], grads: Sequence[Tensor], means: Sequence[Tensor], squares: Sequence[Tensor],
        largest: Sequence[Tensor], steps: Sequence[Tensor], *, lr: Number, beta1: float, beta2: float, weight_decay: float,
        eps: float, amsgrad: bool, maximize: bool, grad_scale: Tensor | None = None, found_inf: Tensor | None = None,
    ) -> None:  # fmt: skip
        for k, (param, grad, mean, square, step) in enumerate(zip(params, grads, means, squares, steps, strict=True)):
            g, old = _gradient(grad, grad_scale, maximize), param
            if weight_decay and is_decoupled:
                old = old * (1 - lr * weight_decay)
            elif weight_decay:
                g = g + param * weight_decay
            new_mean = torch.lerp(mean, g, 1 - beta1)
            new_square = square * beta2 + g * g * (1 - beta2)
            top = torch.maximum(largest[k], new_square) if amsgrad else new_square
            root = top.sqrt() / (1 - beta2**step).sqrt() + eps
            _store(param, old - new_mean / root * (lr / (1 - beta1**step)), found_inf)
            _store(mean, new_mean, found_inf)
            _store(square, new_square, found_inf)
            if amsgrad:
                _store(largest[k], top, found_inf)

    return adam


composite(aten._fused_adam_.default, aten._fused_adam_.tensor_lr)(_adam(False))
composite(aten._fused_adamw_.default, aten._fused_adamw_.tensor_lr)(_adam(True))


@composite(aten._fused_sgd_.default, aten._fused_sgd_.tensor_lr)
def _sgd(
    params: Sequence[Tensor], grads: Sequence[Tensor], buffers: Sequence[Tensor], *, weight_decay: float, momentum: float,
    lr: Number, dampening: float, nesterov: bool, maximize: bool, is_first_step: bool, grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    for k, (param, grad) in enumerate(zip(params, grads, strict=True)):
        g = _gradient(grad, grad_scale, maximize)
        if weight_decay:
            g = g + param * weight_decay
        if momentum:
            moved = g if is_first_step else buffers[k] * momentum + g * (1 - dampening)
            _store(buffers[k], moved, found_inf)
            g = g + moved * momentum if nesterov else moved
        _store(param, param - g * lr, found_inf)


@composite(aten._fused_adagrad_.default)
def _adagrad(
    params: Sequence[Tensor], grads: Sequence[Tensor], sums: Sequence[Tensor], steps: Sequence[Tensor], *, lr: Number,
    lr_decay: float, weight_decay: float, eps: float, maximize: bool, grad_scale: Tensor | None = None,
    found_inf: Tensor | None = None,
) -> None:  # fmt: skip
    for param, grad, total, step in zip(params, grads, sums, steps, strict=True):
        g = _gradient(grad, grad_scale, maximize)
        if weight_decay:
            g = g + param * weight_decay
        new = total + g * g
        _store(param, param - g / (new.sqrt() + eps) * (lr / (1 + (step - 1) * lr_decay)), found_inf)
        _store(total, new, found_inf)


@composite(aten._amp_foreach_non_finite_check_and_unscale_.default)
def _unscale(grads: Sequence[Tensor], found: Tensor, inverse: Tensor) -> None:
    """Multiplies gradients in place; `found` [1] becomes 1 if one of them is infinite or NaN."""
    flags = [torch.isfinite(grad).all() for grad in grads if grad.numel()]
    for grad in grads:
        grad.mul_(inverse)
    if flags:
        found.copy_(torch.where(torch.stack(flags).all(), found, torch.ones_like(found)))


@composite(aten._amp_update_scale_.default)
def _update_scale(
    scale: Tensor, tracker: Tensor, found: Tensor, growth: float, backoff: float, interval: int
) -> Tensor:
    """Updates a scale [], which grows after `interval` good steps in a row (counted in `tracker` [], int32), and shrinks
    after a bad one.
    """
    is_bad, good = found != 0, tracker + 1
    is_due = good == interval
    grown = scale * growth
    larger = torch.where(is_due & torch.isfinite(grown), grown, scale)
    scale.copy_(torch.where(is_bad, scale * backoff, larger).reshape(scale.shape))
    tracker.copy_(torch.where(is_bad | is_due, torch.zeros_like(good), good).reshape(tracker.shape))
    return scale
