"""Capture and the graph passes, each on a small graph."""

from __future__ import annotations

import logging
from collections.abc import Callable
from logging.handlers import BufferingHandler
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from agreement import FLOAT_BOUND, Function, relative_error
from torch import nn

import lapilli
from lapilli.capture import capture
from lapilli.errors import CompileError, UnsupportedOperatorError
from lapilli.graph.aliasing import functional_variant
from lapilli.graph.fold import fold_batch_norm, fold_constants, fold_padding
from lapilli.graph.functionalize import functionalize
from lapilli.graph.merge import merge_linear
from lapilli.graph.module import Module
from lapilli.graph.split_large_weights import split_large_weights
from lapilli.ir import interpret
from lapilli.legalize.decompose import decompose
from lapilli.legalize.passes import clean_up, prepare
from lapilli.lower import lower

aten = torch.ops.aten


def captured(model: Any, *args: torch.Tensor) -> Module:
    if not isinstance(model, nn.Module):
        model = Function(model)
    return Module.from_exported(capture(model, args), copy=True)


def targets(module: Module) -> list[Any]:
    return [n.target for n in module.graph.nodes if n.op == "call_function"]


def check(module: Module, model: nn.Module, *args: torch.Tensor, bound: float = 1e-6) -> None:
    """The module means what the model means."""
    with torch.no_grad():
        want = model.eval()(*args)
    graph = lower(module)
    known = [zip(given.shape, value.shape, strict=True) for given, value in zip(args, graph.inputs, strict=True)]
    sizes = {str(e): size for pairs in known for size, e in pairs if str(e) in graph.symbols}
    (got,) = interpret.run(graph, [a.numpy() for a in args], sizes)
    assert relative_error(got, want) <= bound


# -- capture


def test_other_things_are_refused() -> None:
    with pytest.raises(CompileError, match="cannot compile a int: give an nn.Module"):
        lapilli.compile(1)  # type: ignore[arg-type]


def test_example_inputs_must_be_a_tuple() -> None:
    with pytest.raises(CompileError, match="example_inputs is a tensor: give a tuple"):
        lapilli.compile(nn.ReLU(), torch.ones(2))
    with pytest.raises(CompileError, match="example_inputs is a NoneType: give a tuple"):
        lapilli.compile(nn.ReLU())


def test_files_of_another_kind(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        lapilli.compile(tmp_path / "none.pt2")
    wrong = tmp_path / "model.tflite"
    wrong.write_bytes(b"x")
    with pytest.raises(CompileError, match=r"\.pt2"):
        lapilli.compile(wrong)
    broken = tmp_path / "model.pt2"
    broken.write_bytes(b"x")
    with pytest.raises(CompileError, match="cannot be read by torch.export.load"):
        lapilli.compile(broken)


def test_what_torch_export_refuses_is_explained() -> None:
    with pytest.raises(CompileError, match="torch.export cannot capture Function"):
        capture(Function(lambda x: x if x.sum() > 0 else -x), (torch.ones(3),))


def test_what_an_error_says_is_not_logged_beside_it() -> None:
    logger, listener = logging.getLogger("torch._subclasses.fake_tensor"), BufferingHandler(9)
    logger.addHandler(listener)
    try:
        for model in (nn.Linear(4, 3), torch.jit.script(nn.Linear(4, 3))):
            with pytest.raises(CompileError, match="a and b must have same reduction dim"):
                lapilli.compile(model, (torch.ones(2, 5),))
        assert not listener.buffer
        logger.error("torch's own logs are as they were")
        assert len(listener.buffer) == 1
    finally:
        logger.removeHandler(listener)


def test_a_module_in_training_mode_is_captured_for_inference_and_left_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.BatchNorm1d(3))
    model[1].eval()
    exported = capture(model, (torch.ones(2, 3),))
    assert [m.training for m in model] == [True, False, True]
    check(prepare(exported), model, torch.ones(2, 3))


def test_all_sources_give_the_same(tmp_path: Path) -> None:
    model, x = nn.Linear(4, 3), torch.randn(2, 4)
    exported = torch.export.export(model, (x,))
    torch.export.save(exported, tmp_path / "m.pt2")
    for source in (model, exported, tmp_path / "m.pt2", str(tmp_path / "m.pt2")):
        check(prepare(capture(source, (x,))), model, x)


def test_compiling_leaves_the_exported_program_alone() -> None:
    model, x = (
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True)).eval(),
        torch.randn(1, 3, 5, 5),
    )
    exported = torch.export.export(model, (x,))
    before = str(exported.graph)
    prepare(exported)
    assert str(exported.graph) == before


def test_a_tensor_that_is_given_twice_is_two_inputs() -> None:
    class Difference(nn.Module):
        def forward(self, x: torch.Tensor, others: list[torch.Tensor]) -> torch.Tensor:
            return x - 2 * others[0] - 4 * others[1]

    x = torch.ones(3)
    program = capture(Difference(), (x, [x, torch.zeros(3)]))
    assert program.module()(x * 9, [x, x]).tolist() == [3, 3, 3]


def test_buffers_and_inputs_that_change_are_known() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = nn.Buffer(torch.zeros(1))
            self.fixed = nn.Buffer(torch.ones(1))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.count += self.fixed
            y.add_(1)
            return x + self.count

    module = prepare(capture(Counts(), (torch.ones(1), torch.ones(1))))
    (state,) = module.states.values()
    assert state.name == "count" and state.value.item() == 0
    assert module.updates == [1] and len(module.outputs) == 2
    assert not set(module.states) & set(module.constants)


# -- functionalize


def test_inplace_operators_become_functional() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        old = y + 1
        y.relu_()
        y.add_(old)
        return y.clamp_(0, 3) - old

    module = captured(f, torch.randn(5))
    assert functionalize(module)
    assert not any(t._schema.is_mutable for t in targets(module))
    check(module, Function(f), torch.randn(5))


def test_inplace_operators_whose_functional_ones_have_other_names() -> None:
    """`pow_.Scalar` is `pow.Tensor_Scalar`: `pow.Scalar` has the number first."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = x.abs() + 1
        y.pow_(2)
        y.pow_(x.sigmoid())
        y.floor_divide_(x.exp())
        return y.t_().transpose_(0, 1)

    x = torch.linspace(-2, 2, 15).reshape(3, 5)
    module = captured(f, x)
    assert functionalize(module)
    assert not any(t._schema.is_mutable for t in targets(module))
    check(module, Function(f), x)


def test_operators_that_write_more_than_one_argument_are_left_to_torch() -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        y, noise = x * 2, torch.zeros_like(x)
        aten.rrelu_with_noise_.default(y, noise)
        return y + noise

    x = torch.linspace(-2, 2, 7)
    assert not functionalize(captured(f, x))
    assert functional_variant(aten.rrelu_with_noise_.default) is aten.rrelu_with_noise_functional.default
    assert functional_variant(aten.polygamma_.default) is None  # polygamma's arguments are the other way round


def test_views_are_written_where_nobody_looks_underneath() -> None:
    """As GhostNet does: `x = cat(...)[:, :n]; x += shortcut`."""

    def f(x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([x, x * 2], 0)
        old = y.sum()
        part = y[1:4]
        part += x[:3]
        part.view(-1).mul_(2)
        return part + old

    def g(x: torch.Tensor) -> torch.Tensor:
        part = torch.cat([x, x * 2], 0)[1:4]
        part += x[:3]
        part.relu_()
        return part.t() * 3

    x = torch.arange(12.0).reshape(4, 3) - 6
    module = captured(g, x)
    assert functionalize(module)
    assert not any(t._schema.is_mutable for t in targets(module))
    check(module, Function(g), x)
    assert not functionalize(captured(f, x))
    check(prepare(capture(Function(f), (x,))), Function(f), x)


def _of_an_input(x: torch.Tensor) -> torch.Tensor:
    return x.relu_()


def _through_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    y[0].mul_(2)
    return y


def _under_a_view(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    part = y[:2]
    y.mul_(2)
    return part


def _of_a_split(x: torch.Tensor) -> torch.Tensor:
    y = x + 1
    a, _ = y.split([2, y.shape[0] - 2])
    y.mul_(2)
    return a


def _of_an_output(x: torch.Tensor) -> Any:
    y = x + 1
    y.mul_(2)
    z = y.view(-1)
    z.add_(1)
    return y


@pytest.mark.parametrize("f", [_of_an_input, _through_a_view, _under_a_view, _of_a_split, _of_an_output])
def test_inplace_operators_on_shared_memory_are_left_to_torch(f: Callable[..., Any]) -> None:
    """They are not replaced one by one; torch's own decomposition then gets them right."""
    x = torch.arange(6.0) - 3
    assert not functionalize(captured(f, x))
    if f is not _of_an_input:
        check(prepare(capture(Function(f), (x,))), Function(f), x)


# -- decompose


def test_operators_that_are_known_are_not_decomposed() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.SiLU(), nn.Hardswish(), nn.GELU(), nn.Softmax(-1))
    x = torch.randn(3, 4)
    module = prepare(capture(model, (x,)))
    assert targets(module) == [
        aten.linear.default, aten.layer_norm.default, aten.silu.default, aten.hardswish.default, aten.gelu.default,
        aten.softmax.int,
    ]  # fmt: skip
    check(module, model, x)


def test_unknown_operators_are_decomposed_and_kept_ones_stay() -> None:
    """celu is composite; layer norm beside it stays whole."""
    model = nn.Sequential(nn.Linear(4, 6), nn.CELU(), nn.LayerNorm(6), nn.Hardswish())
    x = torch.randn(3, 4)
    program = decompose(capture(model, (x,)))
    kept = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert aten.linear.default in kept and aten.layer_norm.default in kept and aten.hardswish.default in kept
    assert aten.celu.default not in kept
    check(prepare(capture(model, (x,))), model, x)


def test_single_calls_are_decomposed_without_tracing_the_model_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: torch.Tensor, y: torch.Tensor) -> Any:
        rows, columns = torch.meshgrid(x[:, 0], y[0], indexing="ij")
        with torch.autocast("cpu", enabled=False):
            z = nn.functional.celu(x) @ y
        with torch.no_grad():
            return nn.functional.rms_norm(z, z.shape[1:]).expand_as(rows) + (rows - columns) / z.norm(dim=1)[:, None]

    def refuse(_: Any) -> None:
        raise AssertionError("torch traces the model again")

    monkeypatch.setattr("lapilli.legalize.passes.decompose", refuse)
    x, y = torch.randn(3, 4), torch.randn(4, 5)
    check(prepare(capture(Function(f), (x, y))), Function(f), x, y)
    rows = torch.export.Dim("rows", min=2, max=64)
    dynamic = capture(Function(f), (x, y), {"args": ({0: rows}, {})})
    check(prepare(dynamic), Function(f), torch.randn(7, 4), y)


def test_same_padding() -> None:
    model = nn.Conv2d(3, 5, (3, 4), padding="same", dilation=2)
    x = torch.randn(2, 3, 7, 9)
    check(prepare(capture(model, (x,))), model, x)


def test_operators_without_a_lowering_are_named() -> None:
    def f(x: torch.Tensor) -> Any:
        return torch.fft.fft(x.double()).real, torch.linalg.eigvals(x).real

    with pytest.raises(UnsupportedOperatorError) as caught:
        lapilli.compile(Function(f), (torch.randn(4, 4),), fallback="error")
    assert "aten._fft_r2c.default" in str(caught.value) and "aten.linalg_eig.default" in str(caught.value)
    assert "Replace them in the model" in str(caught.value)


def test_what_does_nothing_at_inference_goes() -> None:
    module = captured(nn.Sequential(nn.Dropout(), nn.ReLU(), nn.Dropout2d()).eval(), torch.ones(1, 2, 2, 2))
    clean_up(module)
    assert targets(module) == [aten.relu.default]
    module = captured(lambda x: x.contiguous().detach() + 1, torch.ones(2))
    clean_up(module)
    assert targets(module) == [aten.add.Tensor]


# -- fold


def _with_statistics(norm: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(1)
    for name, buffer in norm.named_buffers():
        if "running" in name:
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
    for p in norm.parameters():
        p.data.copy_(torch.randn(p.shape, generator=generator))
    return norm


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "kind", ["1d", "2d", "3d", "groups", "transposed 1d", "transposed 2d", "transposed groups"]
)  # fmt: skip
def test_batch_norm_folds_into_a_convolution(kind: str, bias: bool, affine: bool) -> None:
    n = int(kind[-2]) if kind[-1] == "d" else 2
    groups = 2 if kind.endswith("groups") else 1
    layer = getattr(nn, f"Conv{'Transpose' if kind.startswith('trans') else ''}{n}d")
    torch.manual_seed(n)  # ReLU may leave next to nothing of a result, and that has the errors of the rest
    conv = layer(4, 6, 3, groups=groups, bias=bias, stride=2)
    norm = _with_statistics(getattr(nn, f"BatchNorm{n}d")(6, affine=affine, eps=1e-2))
    model = nn.Sequential(conv, norm, nn.ReLU()).eval()
    x = torch.randn(2, 4, *[7] * n)
    exported = capture(model, (x,))
    module = prepare(exported)
    assert not any("batch_norm" in str(t) for t in targets(module))
    assert len([t for t in targets(module) if "conv" in str(t)]) == 1
    check(module, model, x, bound=FLOAT_BOUND)


def test_batch_norm_stays_where_it_cannot_fold() -> None:
    """After a convolution that something else reads, and after no convolution."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 1), _with_statistics(nn.BatchNorm2d(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return self.norm(y) + y

    x = torch.randn(1, 3, 4, 4)
    model = Both().eval()
    module = captured(model, x)
    assert fold_batch_norm(module) == 0
    check(module, model, x)
    alone = _with_statistics(nn.BatchNorm2d(3)).eval()
    module = captured(alone, x)
    assert fold_batch_norm(module) == 0
    check(module, alone, x)


def test_a_weight_that_two_convolutions_share_is_folded_for_one() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), _with_statistics(nn.BatchNorm2d(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(self.norm(self.conv(x)))

    x = torch.randn(1, 3, 4, 4)
    model = Shared().eval()
    module = captured(model, x)
    assert fold_batch_norm(module) == 1
    check(module, model, x)


def test_batch_norm_of_a_batch() -> None:
    model = nn.BatchNorm2d(3, track_running_stats=False).eval()
    x = torch.randn(2, 3, 4, 4)
    check(captured(model, x), model, x)


def test_batch_norm_that_updates_its_statistics() -> None:
    """Its schema does not tell that it does: it is decomposed, and the statistics are results."""

    def f(x: torch.Tensor, mean: torch.Tensor, variance: torch.Tensor) -> torch.Tensor:
        return nn.functional.batch_norm(x, mean, variance, None, None, True, 0.1, 1e-5)

    given = (torch.randn(2, 3, 4, 4), torch.randn(3), torch.rand(3) + 1)
    got = interpret.run(lower(prepare(capture(Function(f), given))), [t.numpy().copy() for t in given])
    _, mean, variance = changed = [t.clone() for t in given]
    for ours, theirs in zip(got, (f(*changed), mean, variance), strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), rtol=1e-5, atol=1e-6)


def test_constants_are_folded() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4)), nn.Parameter(torch.randn(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (self.a.exp() + self.b).view(1, 4)

    x = torch.randn(3, 4)
    module = captured(Scaled(), x)
    assert fold_constants(module) == 1
    assert targets(module) == [aten.mul.Tensor]
    assert len(module.constants) == 1


def test_views_that_need_a_copy_are_folded() -> None:
    """A constant may have other strides than the tensor that was traced."""
    module = captured(Function(lambda x: x), torch.ones(1))
    w = module.add_constant(torch.arange(6.0).reshape(2, 3).t(), "w")
    with module.graph.inserting_before(next(iter(reversed(module.graph.nodes)))):
        flat = module.graph.call_function(aten.view.default, (w, [6]))
    flat.meta["val"] = torch.ones(6)
    module.replace(module.outputs[0], flat)
    assert fold_constants(module) == 1
    assert next(iter(module.constants.values())).tolist() == [0, 3, 1, 4, 2, 5]


def test_large_results_are_not_folded() -> None:
    """What grows over the limit is computed on the device, so that the file stays small."""
    module = captured(Function(lambda x: x), torch.ones(1))
    w = module.add_constant(torch.ones(8, 1), "w")
    last = next(iter(reversed(module.graph.nodes)))
    with module.graph.inserting_before(last):
        grown = module.graph.call_function(aten.expand.default, (w, [8, 100]))
    grown.meta["val"] = torch.ones(8, 100)
    module.replace(module.outputs[0], grown)
    assert fold_constants(module, limit=100) == 0
    assert fold_constants(module, limit=10000) == 1


def test_random_numbers_are_not_folded() -> None:
    module = captured(Function(lambda x: x), torch.ones(1))
    w = module.add_constant(torch.ones(4), "w")
    last = next(iter(reversed(module.graph.nodes)))
    with module.graph.inserting_before(last):
        drawn = module.graph.call_function(aten.rand_like.default, (w,))
    drawn.meta["val"] = torch.ones(4)
    module.replace(module.outputs[0], drawn)
    assert fold_constants(module) == 0


@pytest.mark.parametrize("pad", [(1, 2), (0, 1, 0, 1), (2, 0, 1, 3)])
def test_zero_padding_becomes_the_convolutions(pad: tuple[int, ...]) -> None:
    """Also when it differs before and after; with the convolution's own padding, stride and dilation."""
    model = nn.Sequential(nn.ZeroPad2d(pad) if len(pad) == 4 else nn.ConstantPad1d(pad, 0))  # type: ignore[arg-type]
    model.append(nn.Conv2d(3, 4, 3, stride=2, padding=1) if len(pad) == 4 else nn.Conv1d(3, 4, 3, dilation=2))
    x = torch.randn(1, 3, 8, 9) if len(pad) == 4 else torch.randn(2, 3, 9)
    module = captured(model, x)
    assert fold_padding(module) == 1
    check(module, model, x)


def test_zero_padding_without_a_batch() -> None:
    model = nn.Sequential(nn.ZeroPad2d((1, 2, 0, 1)), nn.Conv2d(3, 4, 3, padding=(1, 0)))
    x = torch.randn(3, 6, 7)
    module = captured(model, x)
    fold_padding(module)
    check(module, model, x)


@pytest.mark.parametrize("layer", [nn.ConstantPad2d(1, 0.5), nn.ReflectionPad2d(1), nn.ZeroPad2d((-1, 1, 0, 0))])
def test_other_padding_stays(layer: nn.Module) -> None:
    model = nn.Sequential(layer, nn.Conv2d(3, 4, 3))
    x = torch.randn(1, 3, 6, 6)
    module = captured(model, x)
    assert fold_padding(module) == 0
    check(prepare(capture(model, (x,))), model, x)


@pytest.mark.parametrize("bias", [True, False])
def test_large_layers_are_split(bias: bool) -> None:
    model, x = nn.Linear(16, 50, bias=bias), torch.randn(2, 3, 16)
    module = captured(model, x)
    assert split_large_weights(module, limit=16 * 4 * 20) == 1
    assert targets(module).count(aten.linear.default) == 3  # of 24, 24 and 2 rows
    check(module, model, x)
    assert split_large_weights(module, limit=1 << 20) == 0


@pytest.mark.parametrize("layer", [nn.Conv1d(4, 50, 3), nn.Conv2d(4, 50, (3, 1), padding=1), nn.Conv3d(4, 50, 3)])
@pytest.mark.parametrize("batch", [(2,), ()])
def test_large_convolutions_are_split(layer: nn.Module, batch: tuple[int, ...]) -> None:
    x = torch.randn(*batch, 4, *[5] * (layer.weight.dim() - 2))
    module = captured(layer, x)
    assert split_large_weights(module, limit=layer.weight[:20].numel() * 4) == 1
    assert len(targets(module)) == 4  # convolutions of 24, 24 and 2 channels, joined
    check(module, layer, x)
    grouped = captured(nn.Conv1d(4, 8, 3, groups=2), torch.randn(2, 4, 9))
    assert split_large_weights(grouped, limit=1) == 0


# -- merging


class _Projections(nn.Module):
    """Attention with layers of its own for queries, keys and values."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(12, size, bias=bias) for size in (8, 8, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [layer(x).unflatten(-1, (2, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v)]
        return nn.functional.scaled_dot_product_attention(*heads)


@pytest.mark.parametrize("bias", [True, False])
def test_projections_of_attention_are_merged(bias: bool) -> None:
    model, x = _Projections(bias), torch.randn(2, 5, 12)
    module = captured(model, x)
    assert targets(module).count(aten.linear.default) == 3
    assert merge_linear(module) == 3
    assert targets(module).count(aten.linear.default) == 1
    check(module, model, x)


def test_layers_that_others_read_stay_apart() -> None:
    """An activation is an epilogue of its own layer only."""
    a, b = nn.Linear(6, 8), nn.Linear(6, 8)
    assert merge_linear(captured(lambda x: a(x).relu() @ b(x).transpose(0, 1), torch.randn(3, 6))) == 0
