"""Training on the device as people write it: optimizers in all their forms, gradient scaling and clipping, moving averages,
schedulers. As on the CPU, and nothing of it runs there."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import lr_scheduler, swa_utils

from lapilli import autoload
from lapilli.eager.fallback import fallbacks, reset_fallbacks

autoload.register()
Make = Callable[[Iterable[Tensor]], optim.Optimizer]
SGD = functools.partial(optim.SGD, lr=0.1, momentum=0.9)


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LAPILLI_STRICT", "1")


def trained(
    device: str,
    make: Make,
    clip: Any = None,
    schedule: Any = None,
    average: Any = None,
    scaled: bool = False,
    bad: int = -1,
) -> list[Tensor]:
    """What three steps make of a model; the gradients of step `bad` are infinite."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(device)
    optimizer = make(model.parameters())
    scheduler = None if schedule is None else schedule(optimizer)
    averaged = None if average is None else average(model)
    scaler = torch.amp.GradScaler(device, init_scale=100.0, growth_interval=1) if scaled else None
    for step in range(3):
        x, y = torch.rand(5, 6), torch.randint(0, 3, (5,))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.to(device)), y.to(device)) * (math.inf if step == bad else 1.0)
        if scaler is None:
            loss.backward()
        else:
            scaler.scale(loss).backward()
        if clip is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            clip(model.parameters())
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if scheduler is not None:
            args = (loss.detach(),) if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else ()
            scheduler.step(*args)
        if averaged is not None:
            averaged.update_parameters(model)
    found = [p.detach().cpu() for m in (model, averaged) if m is not None for p in m.parameters()]
    return found + ([torch.tensor(scaler.get_scale())] if scaler is not None else [])


def agree(make: Make, **how: Any) -> None:
    want = trained("cpu", make, **how)
    reset_fallbacks()
    got = trained("vulkan", make, **how)
    assert not fallbacks()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


FUSED: list[Make] = [
    functools.partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    functools.partial(optim.SGD, lr=0.1, maximize=True),
    functools.partial(optim.SGD, lr=torch.tensor(0.1), momentum=0.9, dampening=0.5),
    functools.partial(optim.Adam, weight_decay=0.1, amsgrad=True),
    functools.partial(optim.Adam, lr=torch.tensor(0.01), maximize=True),
    functools.partial(optim.AdamW, weight_decay=0.1),
    functools.partial(optim.Adagrad, lr=0.1, lr_decay=0.1, weight_decay=0.1),
]


@pytest.mark.parametrize("make", FUSED)
def test_fused_optimizers(make: Make) -> None:
    """Alone, and with a scaler whose factor they apply themselves, which leaves out steps with infinite gradients."""
    fused: Any = functools.partial(make, fused=True)  # type: ignore[call-arg]
    agree(fused)
    if not isinstance(fused.keywords.get("lr"), Tensor) and fused.func is not optim.Adagrad:
        agree(fused, scaled=True, bad=1)


@pytest.mark.parametrize("foreach", [False, True])
def test_optimizers(foreach: bool) -> None:
    every = (
        optim.Adam, optim.AdamW, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam, optim.RAdam, optim.RMSprop,
        optim.Rprop, optim.ASGD,
    )  # fmt: skip
    for make in every if foreach else every[:2]:
        agree(functools.partial(make, foreach=foreach))


def test_gradient_scaling() -> None:
    for bad in (-1, 1):
        agree(SGD, scaled=True, bad=bad)
        agree(optim.Adam, scaled=True, bad=bad, clip=lambda p: clip_grad_norm_(p, 0.05))


def test_gradient_clipping() -> None:
    for norm in (2.0, 1.0, math.inf):
        agree(SGD, clip=functools.partial(clip_grad_norm_, max_norm=0.05, norm_type=norm, foreach=norm != 1))
    agree(SGD, clip=functools.partial(clip_grad_norm_, max_norm=0.05, error_if_nonfinite=True))
    for foreach in (False, True):
        agree(SGD, clip=functools.partial(clip_grad_value_, clip_value=0.01, foreach=foreach))


def test_moving_averages() -> None:
    agree(SGD, average=swa_utils.AveragedModel)
    average = swa_utils.get_ema_multi_avg_fn(0.9)
    agree(SGD, average=lambda m: swa_utils.AveragedModel(m, multi_avg_fn=average, use_buffers=True))
    agree(SGD, average=lambda m: swa_utils.AveragedModel(m, avg_fn=swa_utils.get_ema_avg_fn(0.9)))


def test_schedulers() -> None:
    """They change numbers of the optimizer, on the host; a learning rate in a tensor of the device is one too."""
    s = lr_scheduler
    every: list[Callable[[Any], Any]] = [
        lambda o: s.StepLR(o, 1), lambda o: s.MultiStepLR(o, [1, 2]), lambda o: s.LambdaLR(o, lambda k: 0.5**k),
        lambda o: s.MultiplicativeLR(o, lambda k: 0.5), s.ConstantLR, s.LinearLR, lambda o: s.ExponentialLR(o, 0.9),
        s.PolynomialLR, lambda o: s.CosineAnnealingLR(o, 4), lambda o: s.CosineAnnealingWarmRestarts(o, 2),
        lambda o: s.CyclicLR(o, 0.01, 0.1), lambda o: s.OneCycleLR(o, 0.1, total_steps=5), s.ReduceLROnPlateau,
        lambda o: s.SequentialLR(o, [s.ConstantLR(o), s.ExponentialLR(o, 0.9)], [1]), lambda o: swa_utils.SWALR(o, 0.01),
    ]  # fmt: skip
    for schedule in every:
        agree(SGD, schedule=schedule)
