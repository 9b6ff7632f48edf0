"""Families of calls that neural networks are made of: products, convolutions, pooling, norms, losses, attention, pads, resizing."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from whole_programs.families import family

if TYPE_CHECKING:
    from whole_programs.generate import Generator


def _dtype(g: Generator, name: str) -> str:
    return str(g.value(name).dtype).removeprefix("torch.")


@family(4)
def product(g: Generator) -> None:
    r = g.random
    a = g.floating(1)
    dtype = _dtype(g, a)
    shape = g.open_shape(a)
    inner = shape[-1]
    out = r.choice([1, 2, 5, 8, 16, 7])
    kind = r.choice(
        ["linear"] * 4
        + [
            "matmul",
            "matmul",
            "bmm",
            "einsum",
            "outer",
            "self",
            "mv",
            "addmm",
            "tensordot",
            "cdist",
            "bilinear",
            "chain",
        ]
    )
    if kind == "linear" and isinstance(inner, int):
        w = g.leaf([out, inner], dtype, "weight", parameter=r.random() < 0.7)
        if r.random() < 0.6:
            g.emit("F.linear({0}, {1}, {2})", a, w, g.leaf([out], dtype, "normal", parameter=r.random() < 0.7))
        else:
            g.emit("F.linear({0}, {1})", a, w)
    elif kind in ("matmul", "einsum") and inner is not None:
        b = g.leaf(
            [*(shape[:-2] if r.random() < 0.3 else []), inner, out], dtype, "weight" if isinstance(inner, int) else None
        )
        text = "{0} @ {1}" if kind == "matmul" else 'torch.einsum("...i,ij->...j", {0}, {1})'
        g.emit(r.choice([text, "torch.matmul({0}, {1})"]), a, b)
    elif kind == "bmm" and len(shape) == 3 and None not in shape:
        b = g.leaf([shape[0], inner, out], dtype)
        g.emit(
            r.choice(
                [
                    "torch.bmm({0}, {1})",
                    'torch.einsum("bij,bjk->bki", {0}, {1})',
                    "torch.baddbmm({0} @ {1}, {0}, {1}, beta=0.5)",
                ]
            ),
            a,
            b,
        )
    elif kind == "self":
        g.emit(
            r.choice(
                [
                    "{0} @ {0}.mT",
                    "{0}.mT @ {0}",
                    "{0}.T @ {0}",
                    "torch.matmul({0}.unsqueeze(-2), {0}.unsqueeze(-1))",
                    "torch.cov({0})",
                    "({0} @ {0}.mT).softmax(-1) @ {0}",
                ]
            ),
            a,
        )
    elif kind == "mv" and inner is not None:
        b = g.leaf([inner], dtype)
        g.emit(
            r.choice(
                [
                    "{0} @ {1}",
                    "torch.mv({0}, {1})",
                    "torch.dot({0}, {1})",
                    "torch.linalg.vecdot({0}, {1})",
                    "torch.inner({0}, {1})",
                ]
            ),
            a,
            b,
        )
    elif kind == "outer":
        b = g.floating(1)
        g.emit(
            r.choice(
                [
                    "torch.outer({0}.flatten()[:9], {1}.flatten()[:8])",
                    "torch.kron({0}[..., :2].clone(), {1}[..., :3].clone())",
                    "torch.cross({0}[..., :3], {1}[..., :3], -1)",
                ]
            ),
            a,
            b,
        )
    elif kind == "addmm" and len(shape) == 2 and isinstance(inner, int):
        b, c = g.leaf([inner, out], dtype, "weight"), g.leaf([out], dtype)
        g.emit(r.choice(["torch.addmm({2}, {0}, {1})", "torch.addmm({2}, {0}, {1}, beta=0.5, alpha=2)"]), a, b, c)
    elif kind == "tensordot" and inner is not None:
        b = g.leaf([out, inner], dtype)
        g.emit("torch.tensordot({0}, {1}, dims=([-1], [1]))", a, b)
    elif kind == "cdist" and len(shape) in (2, 3) and isinstance(inner, int):
        b = g.leaf([*shape[:-2], out, inner], dtype)
        g.emit(
            r.choice(
                [
                    "torch.cdist({0}, {1})",
                    "torch.cdist({0}, {1}, p=1.0)",
                    "torch.pdist({0})",
                ]
            ),
            a,
            b,
        )
    elif kind == "bilinear" and isinstance(inner, int):
        w = g.leaf([3, inner, inner], dtype, "weight", parameter=True)
        g.emit("F.bilinear({0}, {0}, {1})", a, w)
    elif kind == "chain" and len(shape) == 2 and None not in shape:
        g.emit(
            r.choice(
                [
                    "torch.linalg.multi_dot([{0}, {0}.T, {0}])",
                    "torch.chain_matmul({0}, {0}.T)",
                    "torch.linalg.matrix_power({0} @ {0}.T / 9, 2)",
                ]
            ),
            a,
        )


def _image(g: Generator, dims: int) -> str | None:
    """A value [batch, channels, ...] with fixed channels, made if there is none."""

    def fits(t: torch.Tensor) -> bool:
        return t.is_floating_point() and t.ndim == dims + 2 and t.numel() > 0

    found = g.pick(fits)
    if found is not None and g.static(found, 1) is not None and g.random.random() < 0.85:
        return found
    r = g.random
    space = {1: [5, 8, 13, 17], 2: [4, 6, 7, 9], 3: [3, 4, 5]}[dims]
    sizes = [r.choice(space) if not (g.open and r.random() < 0.25) else "n" for _ in range(dims)]
    return g.leaf([r.choice([1, 2, "n" if g.open else 2]), r.choice([1, 2, 3, 4, 6, 8]), *sizes], None, "normal")


@family(4)
def convolution(g: Generator) -> None:
    r = g.random
    dims = r.choice([1, 1, 2, 2, 2, 3])
    a = _image(g, dims)
    if a is None:
        return
    channels = g.static(a, 1)
    assert channels is not None
    dtype = _dtype(g, a)
    groups = r.choice([k for k in (1, 1, 1, 2, 3, 4, channels) if channels % k == 0])
    wide = r.choice([1, 2, 4, 5]) * groups
    kernel = [r.choice([1, 2, 3, 3, 5]) for _ in range(dims)]
    while torch.tensor(kernel).prod() > 27:
        kernel = [min(k, 3) for k in kernel]
    padding = [r.choice([0, 1, k // 2]) for k in kernel]
    stride, dilation = r.choice([1, 1, 2, 3]), r.choice([1, 1, 1, 2])
    own = r.random() < 0.7
    if r.random() < 0.35:
        stride = r.choice([1, 2, 3])
        more = r.choice([0, 0, 1]) if stride > 1 else 0
        w = g.leaf([channels, wide // groups, *kernel], dtype, "weight", parameter=own)
        text = f"F.conv_transpose{dims}d({{0}}, {{1}}, B, stride={stride}, padding={tuple(padding)}, "
        text += f"output_padding={more}, groups={groups}, dilation={dilation})"
    else:
        w = g.leaf([wide, channels // groups, *kernel], dtype, "weight", parameter=own)
        pad = r.choice([f"{tuple(padding)}", '"valid"', '"same"' if stride == 1 else "0"])
        text = f"F.conv{dims}d({{0}}, {{1}}, B, stride={stride}, padding={pad}, groups={groups}, dilation={dilation})"
    if r.random() < 0.6:
        g.emit(text.replace("B", "{2}"), a, w, g.leaf([wide], dtype, "normal", parameter=own))
    else:
        g.emit(text.replace("B", "None"), a, w)


@family(2)
def pooling(g: Generator) -> None:
    r = g.random
    dims = r.choice([1, 2, 2, 3])
    a = _image(g, dims)
    if a is None:
        return
    k, s = r.choice([2, 3]), r.choice([1, 2, 3])
    p = r.choice([0, 0, 1])
    texts = [
        f"F.max_pool{dims}d({{0}}, {k}, {s}, {p})",
        f"F.avg_pool{dims}d({{0}}, {k}, {s}, {p})",
        f"F.max_pool{dims}d({{0}}, {k}, {s}, {p}, ceil_mode=True)",
        f"F.avg_pool{dims}d({{0}}, {k}, {s}, {p}, ceil_mode=True, count_include_pad=False)",
        f"F.adaptive_avg_pool{dims}d({{0}}, {r.choice([1, 2, 3])})",
        f"F.adaptive_max_pool{dims}d({{0}}, {r.choice([1, 2, 3])})",
        f"F.max_pool{dims}d({{0}}, {k}, 1, {p}, dilation=2)",
        f"F.max_pool{dims}d({{0}}, {k}, {s}, {p}, return_indices=True)[1]",
        f"F.max_unpool{dims}d(*F.max_pool{dims}d({{0}}, 2, 2, return_indices=True), 2, 2)",
        f"F.adaptive_max_pool{dims}d({{0}}, 2, return_indices=True)[1]",
    ]
    if dims < 3:
        texts.append(f"F.lp_pool{dims}d({{0}}, 2.0, {k}, {s})")
    g.emit(r.choice(texts), a)


@family(2)
def resizing(g: Generator) -> None:
    r = g.random
    dims = r.choice([1, 2, 2, 2, 3])
    a = _image(g, dims)
    if a is None:
        return
    linear = {1: "linear", 2: "bilinear", 3: "trilinear"}[dims]
    size = tuple(r.choice([1, 3, 5, 8]) for _ in range(dims))
    texts = [
        'F.interpolate({0}, scale_factor=2, mode="nearest")',
        f'F.interpolate({{0}}, size={size}, mode="nearest")',
        f'F.interpolate({{0}}, size={size}, mode="nearest-exact")',
        f'F.interpolate({{0}}, size={size}, mode="{linear}", align_corners=True)',
        f'F.interpolate({{0}}, scale_factor=1.5, mode="{linear}")',
        f'F.interpolate({{0}}, size={size}, mode="area")',
    ]
    if dims == 2:
        texts += [
            f'F.interpolate({{0}}, size={size}, mode="bicubic")',
            'F.interpolate({0}, scale_factor=0.7, mode="bicubic", align_corners=True)',
            "F.pixel_shuffle({0}, 2)",
            "F.pixel_unshuffle({0}, 2)",
        ]
        if g.shape(a)[-1] > 1 and g.shape(a)[-1] == g.static(
            a, -1
        ):  # torch is wrong for images one pixel wide, before or after
            texts.append(f'F.interpolate({{0}}, size={size[0], max(size[1], 3)}, mode="bilinear", antialias=True)')
        texts += [
            "F.unfold({0}, 2)",
            "F.unfold({0}, (3, 2), padding=1, stride=2)",
            "F.fold(F.unfold({0}, 2), {0}.shape[-2:], 2)",
        ]
        texts += [
            "F.grid_sample({0}, F.affine_grid(torch.linspace(-0.1, 0.9, 6, dtype={0}.dtype, device={0}.device).flip(0)"
            ".reshape(1, 2, 3).expand({0}.shape[0], 2, 3), (*{0}.shape[:2], 4, 5), align_corners=False), align_corners=False)"
        ]
        texts += ["F.channel_shuffle({0}, 2)"]
    g.emit(r.choice(texts), a)


@family(2)
def padding(g: Generator) -> None:
    r = g.random
    a = g.floating(1)
    some = [r.choice([0, 1, 2, -1]) for _ in range(2 * r.randint(1, min(g.rank(a), 3)))]
    more = [abs(s) for s in some]
    g.emit(
        r.choice(
            [
                f"F.pad({{0}}, {tuple(some)})",
                f"F.pad({{0}}, {tuple(more)}, value=1.5)",
                f'F.pad({{0}}, {tuple(more)}, mode="reflect")',
                f'F.pad({{0}}, {tuple(more)}, mode="replicate")',
                f'F.pad({{0}}, {tuple(more)}, mode="circular")',
                f"torch.constant_pad_nd({{0}}, {tuple(some)}, -0.5)",
            ]
        ),
        a,
    )


@family(3)
def normalization(g: Generator) -> None:
    r = g.random
    a = g.floating(2)
    last, channels = g.static(a, -1), g.static(a, 1)
    dtype = _dtype(g, a)
    kind = r.choice(["layer", "layer", "rms", "group", "batch", "training", "instance", "local"])
    if kind in ("layer", "rms") and last is not None:
        w, b = (
            g.leaf([last], dtype, "unit", parameter=r.random() < 0.7),
            g.leaf([last], dtype, "normal", parameter=r.random() < 0.7),
        )
        text = {
            "layer": [
                "F.layer_norm({0}, {0}.shape[-1:], {1}, {2})",
                "F.layer_norm({0}, {0}.shape[-1:])",
                "F.layer_norm({0}, {0}.shape[-2:])",
            ],
            # Without eps it is a number of the type: another one in float64.
            "rms": ["F.rms_norm({0}, {0}.shape[-1:], {1}, eps=1e-6)"],
        }
        normed = r.choice(text[kind])
        parts = {"": last, f"[..., : {last // 2}]": last // 2, "[..., ::2]": -(-last // 2), ".flip(-1)": last}
        part, count = r.choice([p for p in parts.items() if p[1]] or [("", 0)])
        if count and r.random() < 0.4:  # kernels of products may take a norm in, but only of whole rows
            weights = g.leaf([r.choice([3, 8, 16]), count], dtype, "weight", parameter=r.random() < 0.7)
            g.emit(f"F.linear({normed}{part}, {{3}})", a, w, b, weights)
        else:
            g.emit(normed, a, w, b)
    elif channels:
        w, b = (
            g.leaf([channels], dtype, "unit", parameter=r.random() < 0.7),
            g.leaf([channels], dtype, "normal", parameter=r.random() < 0.7),
        )
        groups = r.choice([k for k in (1, 2, 3, channels) if channels % k == 0])
        if g.rank(a) == 2 and groups == channels:
            groups = 1  # of one number each, a norm is the rounding of 0
        norm = {
            "group": f"F.group_norm({{0}}, {groups}, {{1}}, {{2}})",
            "batch": "F.batch_norm({0}, {2}, {1}, {1}, {2})",
            "instance": "F.instance_norm({0})",
            "training": "F.batch_norm({0}, None, None, {1}, {2}, training=True)",
            "local": "F.local_response_norm({0}, 2)",
        }.get(kind)
        if norm:
            g.emit(norm, a, w, b)


@family(2)
def loss(g: Generator) -> None:
    r = g.random
    a = g.floating(1)
    how = r.choice(["mean", "sum", "none"])
    if r.random() < 0.4:
        classes = g.static(a, 1) if g.rank(a) > 1 else g.static(a, 0)
        if not classes:
            return
        shape = g.open_shape(a)
        target = g.leaf(
            [s for k, s in enumerate(shape) if k != 1] if len(shape) > 1 else [], "int64", "index", high=classes
        )
        weight = g.leaf([classes], _dtype(g, a), "unit")
        g.emit(
            r.choice(
                [
                    f'F.cross_entropy({{0}}, {{1}}, reduction="{how}")',
                    f'F.cross_entropy({{0}}, {{1}}, label_smoothing=0.1, reduction="{how}")',
                    f'F.cross_entropy({{0}}, {{1}}, {{2}}, reduction="{how}")',
                    f'F.nll_loss({{0}}, {{1}}, reduction="{how}")',
                    f'F.cross_entropy({{0}}, {{1}}, ignore_index=0, reduction="{how}")',
                    "F.multi_margin_loss({0}, {1})",
                ]
            ),
            a,
            target,
            weight,
        )
        return
    b = g.same_shape(a)
    same = g.value(a).dtype == g.value(b).dtype  # of huber_loss torch has two opinions what type the result is
    text = r.choice(
        [
            "F.mse_loss({0}, {1}, R)",
            "F.l1_loss({0}, {1}, R)",
            "F.smooth_l1_loss({0}, {1}, R, beta=0.7)",
            "F.huber_loss({0}, {1}, R, delta=0.6)" if same else "F.l1_loss({0}, {1}, R)",
            "F.binary_cross_entropy({0}.sigmoid() * 0.9 + 0.05, {1}.sigmoid(), R)",
            "F.binary_cross_entropy_with_logits({0}, {1}.sigmoid(), R)",
            "F.kl_div({0}.log_softmax(-1), {1}.softmax(-1), R)",
            "F.soft_margin_loss({0}, {1}.sign().to({0}.dtype), R)",  # of two types, torch's eager and traced types differ
            "F.hinge_embedding_loss({0}, {1}.sign(), R)",
            "F.poisson_nll_loss({0}.clamp(max=4), {1}.abs(), R)",
            "F.gaussian_nll_loss({0}, {1}, {1}.abs() + 0.1, R)",
            "F.margin_ranking_loss({0}, {1}, {1}.sign(), R)",
            "F.cosine_similarity({0}, {1}, -1)",
            "F.triplet_margin_loss({0}, {1}, {0} * {1}, R)",
            "F.kl_div({0}.log_softmax(-1), {1}.log_softmax(-1), R, log_target=True)",
            "F.pairwise_distance({0}, {1})",
            "F.multilabel_soft_margin_loss({0}, ({1} > 0) * 1.0, R)",
            "F.cross_entropy({0}, {1}.softmax(-1), R)",
            "F.cosine_embedding_loss({0}, {1}, {1}.sum(-1).sign(), R)",
        ]
    )
    g.emit(text.replace("R", f'reduction="{how}"'), a, b)


@family(2)
def attention(g: Generator) -> None:
    r = g.random
    a = g.floating(2, 4)
    width = g.static(a, -1)
    if not width or None in g.open_shape(a):
        return
    dtype, shape = _dtype(g, a), g.open_shape(a)
    wide = r.choice([4, 8, width])
    names = [g.leaf([wide, width], dtype, "weight", parameter=r.random() < 0.7) for _ in range(3)]
    kind = r.choice(["", "", ", is_causal=True", ", attn_mask={4}", ", scale=0.4"])
    mask = (
        g.leaf([shape[-2], shape[-2]], *r.choice([("bool", "bool"), (dtype, "normal")])) if "{4}" in kind else names[0]
    )
    text = "F.scaled_dot_product_attention(F.linear({0}, {1}), F.linear({0}, {2}), F.linear({0}, {3})" + kind + ")"
    if wide % 2 == 0 and len(shape) == 3 and r.random() < 0.4:
        heads = ".unflatten(-1, (2, -1)).transpose(1, 2)"
        text = (
            text.replace("{1})", "{1})" + heads).replace("{2})", "{2})" + heads).replace("{3})", "{3})" + heads)
            + ".transpose(1, 2).flatten(2)"
        )
    g.emit(text, a, *names, mask)
