"""Pooling, convolution, products, and cases that went wrong on some device, for tools/special_values.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from special_cases import INF, NAN, Case, Family


def images() -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(3)
    x = torch.randn(2, 3, 9, 10, generator=g)
    x[0, 0, :5, :5] = -INF
    x[0, 1] = -INF
    x[0, 2, 2, 3], x[0, 2, 2, 4], x[0, 2, 7, 7] = NAN, NAN, NAN
    x[1, 0, 4, 4], x[1, 0, 0, 0] = INF, -INF
    x[1, 1, 3:6] = INF
    x[1, 2, ::2] = NAN
    line = torch.randn(3, 4, 20, generator=g)
    line[0, 0, :9] = -INF
    line[0, 1] = -INF
    line[1, 0, 3:6] = NAN
    line[2, 2, 19], line[2, 2, 0] = NAN, -INF
    volume = torch.randn(2, 2, 5, 6, 4, generator=g)
    volume[0, 0] = -INF
    volume[0, 1, :3] = -INF
    volume[1, 0, 2, 2], volume[1, 1, 0, 0, 0] = NAN, INF
    return {"x": x, "line": line, "volume": volume, "cube": volume[..., :3, :].repeat(1, 1, 1, 2, 2)}


def pooling() -> Family:
    family = Family("pooling", images(), differentiable=True)
    key = {1: "line", 2: "x", 3: "volume"}
    for n in (1, 2, 3):
        pool = getattr(F, f"max_pool{n}d")
        settings = [
            {"kernel_size": 3, "stride": 2, "padding": 1},
            {"kernel_size": 2},
            {"kernel_size": 3, "stride": 1, "padding": 1},
            {"kernel_size": 2, "stride": 2, "padding": 1, "ceil_mode": True},
            {"kernel_size": 2, "stride": 1, "dilation": 2, "padding": 1},
        ]
        for s in settings:
            label = " ".join(f"{k[0]}{v}" for k, v in s.items())

            def values(v: Any, pool: Any = pool, n: int = n, s: Any = s) -> Any:
                return pool(getattr(v, key[n]), **s)

            def places(v: Any, pool: Any = pool, n: int = n, s: Any = s) -> Any:
                return pool(getattr(v, key[n]), **s, return_indices=True)

            family.cases += [Case(f"max {n}d {label}", values), Case(f"max {n}d indices {label}", places)]
            if s.get("ceil_mode") or "dilation" in s:
                continue

            def back(v: Any, pool: Any = pool, n: int = n, s: Any = s) -> Any:
                y, at = pool(getattr(v, key[n]), **s, return_indices=True)
                return getattr(F, f"max_unpool{n}d")(
                    y, at, s["kernel_size"], s.get("stride"), s.get("padding", 0), getattr(v, key[n]).shape
                )

            if "padding" not in s:
                family.cases.append(Case(f"unpool {n}d {label}", back, differentiable=False))
        for s in (
            {"kernel_size": 3, "stride": 2, "padding": 1},
            {"kernel_size": 2, "ceil_mode": True, "count_include_pad": False},
        ):
            average = getattr(F, f"avg_pool{n}d")
            family.cases.append(
                Case(f"avg {n}d {list(s.values())}", lambda v, f=average, s=s, n=n: f(getattr(v, key[n]), **s), 1e-6)
            )
        even, odd = [4, 3, 2][:n], [7, 4, 3][:n]
        for size in (even, odd):
            for kind in ("max", "avg"):
                f = getattr(F, f"adaptive_{kind}_pool{n}d")
                family.cases.append(
                    Case(f"adaptive {kind} {n}d {size}", lambda v, f=f, s=size, n=n: f(getattr(v, key[n]), s), 1e-6)
                )
                if kind == "max":
                    family.cases.append(
                        Case(
                            f"adaptive max {n}d {size} indices",
                            lambda v, f=f, s=size, n=n: f(getattr(v, key[n]), s, return_indices=True),
                        )
                    )
        if n > 1:
            sample = torch.full((2, 3 if n == 2 else 2, n), 0.4)
            f = getattr(F, f"fractional_max_pool{n}d")
            family.cases.append(
                Case(
                    f"fractional {n}d",
                    lambda v, f=f, n=n, s=sample: f(
                        v.cube if n == 3 else v.x,
                        2,
                        output_size=[3] * n,
                        return_indices=True,
                        _random_samples=s.to(v.x.device).to(v.x.dtype),
                    ),
                    differentiable=False,
                )
            )
    family.cases += [
        Case("lp pool", lambda v: F.lp_pool2d(v.x, 2, 2), 1e-6),
        Case("nearest", lambda v: F.interpolate(v.x, size=(5, 13))),
        Case("bilinear", lambda v: F.interpolate(v.x, size=(5, 13), mode="bilinear"), 1e-5),
        Case("pad", lambda v: F.pad(v.x, (1, 2, 0, 1), value=-INF)),
        Case("reflect", lambda v: F.pad(v.x, (1, 2, 2, 1), mode="reflect")),
        Case("unfold", lambda v: F.unfold(v.x, 3, padding=1)),
        Case("fold", lambda v: F.fold(F.unfold(v.x, 3, padding=1), (9, 10), 3, padding=1), 1e-5),
    ]
    return family


def convolutions(constant: bool) -> Family:
    """Weights and inputs with NaN and infinity at few places, where padding and inserted zeros meet them."""
    g = torch.Generator().manual_seed(5)

    def weight(*shape: int) -> torch.Tensor:
        w = torch.randn(shape, generator=g)
        w.view(-1)[0], w.view(-1)[-1] = INF, NAN
        w.view(-1)[w.numel() // 2] = -INF
        return w

    inputs = {
        "x": torch.randn(1, 8, 7, 6, generator=g),
        "line": torch.randn(2, 16, 11, generator=g),
        "volume": torch.randn(1, 4, 4, 3, 5, generator=g),
        "many": torch.randn(1, 32, 9, 9, generator=g),
        "dirty": torch.randn(1, 8, 7, 6, generator=g),
        "clean": torch.randn(8, 8, 3, 3, generator=g),
        "w": weight(8, 8, 3, 3),
        "depth": weight(8, 1, 3, 3),
        "group": weight(16, 4, 3, 3),
        "one": weight(12, 8, 1, 1),
        "w1": weight(16, 16, 4),
        "w1g": weight(16, 2, 5),
        "w3": weight(4, 4, 2, 3, 2),
        "w32": weight(32, 32, 3, 3),
        "depth32": weight(32, 1, 5, 5),
        "flat": torch.randn(5, 37, generator=g),
        "wide": weight(19, 37),
        "row": torch.randn(1, 37, generator=g),
    }
    inputs["dirty"][0, 0, 0, 0], inputs["dirty"][0, 3, 4, 5], inputs["dirty"][0, 7, 6, 5] = INF, NAN, -INF
    family = Family("weights" if constant else "convolution", inputs, differentiable=False)
    if constant:
        family.constants = frozenset(k for k in inputs if k[0] in "wdgoc" and k not in ("wide", "dirty"))
    cases: dict[str, Callable[[Any], Any]] = {
        "conv2d": lambda v: F.conv2d(v.x, v.w, padding=1),
        "conv2d stride": lambda v: F.conv2d(v.x, v.w, stride=2, padding=2),
        "conv2d dilation": lambda v: F.conv2d(v.x, v.w, padding=2, dilation=2),
        "conv2d 1x1": lambda v: F.conv2d(v.x, v.one),
        "depthwise": lambda v: F.conv2d(v.x, v.depth, padding=1, groups=8),
        "depthwise stride": lambda v: F.conv2d(v.x, v.depth, stride=2, padding=1, groups=8),
        "grouped": lambda v: F.conv2d(v.x, v.group, padding=1, groups=2),
        "conv2d of inf": lambda v: F.conv2d(v.dirty, v.clean, padding=1),
        "conv2d 32": lambda v: F.conv2d(v.many, v.w32, padding=1),
        "depthwise 32": lambda v: F.conv2d(v.many, v.depth32, padding=2, groups=32),
        "conv2d 32 stride": lambda v: F.conv2d(v.many, v.w32, padding=1, stride=2),
        "conv1d": lambda v: F.conv1d(v.line, v.w1, padding=2),
        "conv1d grouped": lambda v: F.conv1d(v.line, v.w1g[:, :1], padding=2, groups=16),
        "conv3d": lambda v: F.conv3d(v.volume, v.w3, padding=1),
        "transposed": lambda v: F.conv_transpose2d(v.x, v.w, padding=1),
        "transposed stride": lambda v: F.conv_transpose2d(v.x, v.w, stride=2, padding=1, output_padding=1),
        "transposed stride 3": lambda v: F.conv_transpose2d(v.x, v.w, stride=3),
        "transposed dilation": lambda v: F.conv_transpose2d(v.x, v.w, stride=2, dilation=2),
        "transposed depthwise": lambda v: F.conv_transpose2d(v.x, v.depth, stride=2, groups=8),
        "transposed of inf": lambda v: F.conv_transpose2d(v.dirty, v.clean, stride=2),
        "transposed 1d": lambda v: F.conv_transpose1d(v.line, v.w1, stride=2, padding=1),
        "transposed 1d grouped": lambda v: F.conv_transpose1d(v.line, v.w1g, padding=2, groups=16),
        "transposed 1d grouped stride": lambda v: F.conv_transpose1d(v.line, v.w1g, padding=2, stride=2, groups=16),
        "transposed 3d": lambda v: F.conv_transpose3d(v.volume, v.w3, stride=2),
        "transposed 32": lambda v: F.conv_transpose2d(v.many, v.w32, stride=2, padding=1),
        "linear": lambda v: F.linear(v.flat, v.wide),
        "linear row": lambda v: F.linear(v.row, v.wide),
        "matmul": lambda v: v.flat @ v.wide.T,
        "linear of inf": lambda v: F.linear(v.wide, v.flat),
        "bmm": lambda v: torch.bmm(v.wide.reshape(1, 19, 37), v.flat.T.reshape(1, 37, 5)),
        "conv batch norm": lambda v: F.batch_norm(
            F.conv2d(v.dirty, v.clean, padding=1), torch.zeros(8).to(v.x), torch.ones(8).to(v.x)
        ),
        "attention": lambda v: F.scaled_dot_product_attention(v.x, v.x, v.dirty),
        "attention causal": lambda v: F.scaled_dot_product_attention(v.x, v.x, v.dirty, is_causal=True),
        "attention masked": lambda v: F.scaled_dot_product_attention(
            v.x, v.x, v.dirty, attn_mask=torch.tensor([[True] * 3 + [False] * 4]).to(v.x.device).expand(7, 7)
        ),
        "attention all masked": lambda v: F.scaled_dot_product_attention(
            v.x, v.x, v.x, attn_mask=(torch.arange(7)[:, None] > torch.arange(7)[None]).to(v.x.device)
        ),
        "embedding": lambda v: F.embedding(torch.tensor([0, 18, 3], device=v.x.device), v.wide),
        "index select": lambda v: v.wide.index_select(0, torch.tensor([0, 18, 3], device=v.x.device)),
        "one hot": lambda v: F.one_hot(torch.tensor([0, 2, 1], device=v.x.device), 5).to(v.x.dtype) @ v.flat,
        "tril": lambda v: v.wide.tril(),
        "triu": lambda v: v.wide.triu(2),
        "diag": lambda v: torch.diag_embed(v.wide[0]),
        "scatter": lambda v: torch.zeros_like(v.wide).scatter(0, torch.zeros_like(v.wide, dtype=torch.int64), v.wide),
        "index add": lambda v: torch.zeros_like(v.flat).index_add(0, torch.arange(19, device=v.x.device) % 5, v.wide),
        "roll": lambda v: v.wide.roll(3, 1),
        "grid sample": lambda v: F.grid_sample(
            v.dirty, torch.linspace(-1.2, 1.2, 40).reshape(1, 4, 5, 2).to(v.x), align_corners=False
        ),
        "pad conv": lambda v: F.conv2d(F.pad(v.dirty, (1, 1, 1, 1)), v.clean),
        "upsample conv": lambda v: F.conv2d(F.interpolate(v.dirty, scale_factor=2), v.clean),
        "cat linear": lambda v: F.linear(torch.cat([v.flat, v.row]), v.wide),
        "addmm beta 0": lambda v: torch.addmm(v.wide[:5, :5], v.flat, v.flat.T, beta=0),
        "baddbmm": lambda v: torch.baddbmm(
            v.flat[:, :5].reshape(1, 5, 5), v.flat.reshape(1, 5, 37), v.flat.T.reshape(1, 37, 5), beta=0.5
        ),
        "einsum": lambda v: torch.einsum("ij,kj->ik", v.flat, v.wide),
        "outer": lambda v: torch.outer(v.wide[0], v.flat[0]),
        "cross": lambda v: torch.linalg.cross(v.wide[:, :3], v.wide[:, 1:4]),
    }
    for name, f in cases.items():
        family.cases.append(
            Case(name, f, 2e-4 if "32" in name else 3e-5, half="attention" not in name and "grid" not in name)
        )
    return family


def named() -> Family:
    """Cases that went wrong on some device."""
    g = torch.Generator().manual_seed(13)
    inputs = {
        "line": torch.randn(4, 32, 124, generator=g),
        "weight": torch.randn(32, 2, 5, generator=g),
        "v": torch.randn(9, 1, generator=g) * 2,
        "w": torch.randn(7, 1, generator=g),
        "twenty": torch.randn(37, 20, generator=g) * 3,
        "big": torch.full((4, 33), 1e29) * torch.randn(4, 33, generator=g),
        "large": torch.randn(64, generator=g) * 1e8,
        "larger": torch.randn(64, generator=g) * 1e30,
        "bits": torch.tensor([1e-45, -1e-40, 0.0, -0.0, 1e-38, 1.0, NAN, 1e-39]),
    }
    cases: dict[str, Callable[[Any], Any]] = {
        "conv_transpose1d 16 groups": lambda v: F.conv_transpose1d(v.line, v.weight, padding=2, groups=16),
        "conv_transpose1d stride": lambda v: F.conv_transpose1d(v.line, v.weight, padding=2, stride=2, groups=16),
        "linear of asin": lambda v: F.linear(torch.asin(v.v.clamp(-0.9, 0.9)), v.w).select(1, 3),
        "linear of asin half": lambda v: F.linear(torch.asin(v.v.clamp(-0.9, 0.9)), v.w).select(1, 3).half(),
        "linear of asin all": lambda v: F.linear(torch.asin(v.v.clamp(-0.9, 0.9)), v.w),
        "layer norm of 20": lambda v: F.layer_norm(v.twenty, (20,)),
        "layer norm of 19": lambda v: F.layer_norm(v.twenty[:, :19], (19,)),
        "layer norm of half": lambda v: F.layer_norm(torch.tanh(v.twenty), (20,)) * 2,
        "std of 1e29": lambda v: v.big.std(1),
        "var of 1e29": lambda v: v.big.var(1),
        "std of 1e29 all": lambda v: v.big.std(),
        "norm of 1e29": lambda v: v.big.norm(dim=1),
        "count nonzero of denormals": lambda v: v.bits.count_nonzero(),
        "nonzero mask": lambda v: v.bits != 0,
        "sign of denormals": lambda v: torch.sign(v.bits),
        "bool of denormals": lambda v: v.bits.bool(),
        "scatter add then copysign": lambda v: torch.copysign(
            torch.zeros(5).to(v.v).scatter_add(0, (torch.arange(9) % 5).to(v.v.device), v.v[:, 0]), -v.w[:5, 0]
        ),
        "odd half rows": lambda v: (v.twenty[:5, :7] * 2).half(),
        "odd half sum": lambda v: v.twenty[:, :7].sum(1).half(),
        "one by one": lambda v: (v.v * v.w[0]).half().float(),
        "sin of large": lambda v: torch.sin(v.large),
        "cos of larger": lambda v: torch.cos(v.larger),
        "tan of large": lambda v: torch.tan(v.large),
    }
    family = Family("named", inputs)
    for name, f in cases.items():
        half = not any(word in name for word in ("half", "1e29", "denormals", "large", "nonzero"))
        family.cases.append(
            Case(
                name,
                f,
                1e-5 if "conv" in name or "norm" in name or "linear" in name or "tan" in name else 1e-6,
                half=half,
                exact="denormal" not in name,
            )
        )
    return family
