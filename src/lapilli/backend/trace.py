"""AOTAutograd, without decomposing composite operators that Lapilli implements directly."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch._C import DispatchKey
from torch._decomp.decompositions import upsample_compute_output_size
from torch._dynamo.backends.common import aot_autograd
from torch._export.utils import _collect_all_valid_cia_ops_for_aten_namespace
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.export import exported_program
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.checkpoint import CheckpointPolicy

from lapilli.attention_operators import are_weights_small, attend, is_trained
from lapilli.graph.aliasing import root_of
from lapilli.legalize.decompose import tables
from lapilli.lower import registry

aten = torch.ops.aten

Compiler = Callable[[fx.GraphModule, Sequence[Any]], Any]

_FRESH = {torch.ops.aten.lift.default, torch.ops.aten.lift_fresh.default}
"""The operator that torch.tensor(...) ends with: the tracer makes it a constant, unless it is decomposed first."""


def compile_graph(
    gm: fx.GraphModule, inputs: Sequence[Any], forward: Compiler, backward: Compiler, inference: Compiler
) -> Callable[..., Any]:
    """The function that torch.compile expects from a backend. Which of the compilers gets a graph depends on whether it
    records gradients.

    Without gradients, composite operators (linear, attention, norms) are kept. With them, torch's derivatives are those of
    the operators that composite ones consist of; attention has its own.
    """
    backend: Callable[..., Callable[..., Any]] = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        decompositions=dict(_decompositions()),
        partition_fn=_partitioned,
    )
    transforms = _transforms(gm)
    if _records_gradients(inputs):
        if not transforms:
            _keep_attention(gm)
        with sdpa_kernel(SDPBackend.MATH), _errors_in_backward(), _whole_interpolation():
            return backend(gm, inputs)
    with sdpa_kernel(SDPBackend.MATH) if transforms else _whole_operators():
        return backend(gm, inputs)


@functools.lru_cache(maxsize=1)
def _decompositions() -> dict[Any, Callable[..., Any]]:
    return {o: _apart(o, f) for o, f in tables()[0].items() if o not in _FRESH}


def _apart(overload: torch._ops.OpOverload, f: Callable[..., Any]) -> Callable[..., Any]:
    """An operator's decomposition whose results share no memory with its arguments, if the operator's own do not.

    A decomposition may come down to a view, as channel_shuffle's does where there is one channel a group. The caller of a
    compiled function would then change an argument by changing a result.
    """
    if any(returned.alias_info is not None for returned in overload._schema.returns):
        return f

    @functools.wraps(f)
    def decomposition(*args: Any, **kwargs: Any) -> Any:
        given = {_storage(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)} - {None}

        def own(value: Any) -> Any:
            shared = isinstance(value, torch.Tensor) and _storage(value) in given
            return value.clone() if shared else value

        return tree_map(own, f(*args, **kwargs))

    return decomposition


def _storage(tensor: torch.Tensor) -> int | None:
    return int(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None


_COMPARISONS = {o.Tensor for o in (aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge)}


def _partitioned(joint: fx.GraphModule, *args: Any, **kwargs: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The forward and the backward graph. What is compared is saved, not computed again: another kernel, or the CPU, may round it
    otherwise, and then a maximum equals none of the numbers that it was found among.
    """
    for node in joint.graph.nodes:
        if node.target in _COMPARISONS:
            for compared in map(root_of, node.all_input_nodes):
                compared.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    return min_cut_rematerialization_partition(joint, *args, **kwargs)


def _records_gradients(inputs: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)


def _keep_attention(gm: fx.GraphModule) -> None:
    """Makes attention one operator whose gradients are one, too, where that is possible."""
    for module in gm.modules():
        if not isinstance(module, fx.GraphModule):
            continue
        found = [node for node in module.graph.nodes if node.target is F.scaled_dot_product_attention]
        for node in found:
            node.target = _attention
        if found:
            module.recompile()


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, attn_mask: torch.Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> torch.Tensor:  # fmt: skip
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    q, k, v, attn_mask = _autocast(q, k, v, attn_mask)
    if not is_trained(q, k, v, attn_mask, dropout_p, is_causal, enable_gqa):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, **options)
    if are_weights_small(q, k, v):
        if attn_mask is not None and attn_mask.dtype is torch.bool:  # this composition would add ones and zeros
            attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(~attn_mask, float("-inf"))
        whole: torch.Tensor = aten._scaled_dot_product_attention_math.default(
            q, k, v, attn_mask, 0.0, is_causal, **options
        )[0]
        return whole
    return attend(q, k, v, attn_mask, is_causal, scale, enable_gqa)


def _autocast(*tensors: Any) -> list[Any]:
    """Operands of attention as autocast gives them to PyTorch's."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return list(tensors)
    dtype = torch.get_autocast_dtype(kind)
    kept = [x is None or x.dtype is torch.float64 or not x.is_floating_point() for x in tensors]
    return [x if is_kept else x.to(dtype) for x, is_kept in zip(tensors, kept, strict=True)]


def _transforms(gm: fx.GraphModule) -> bool:
    """Whether a graph itself differentiates or vectorizes, by torch.func or autograd: for that, composite operators need to
    be decomposed.
    """
    modules = [m for m in gm.modules() if isinstance(m, fx.GraphModule)]
    return any(
        getattr(n.target, "__module__", None) in _TRANSFORMS or n.target in _TRANSFORMS
        for m in modules
        for n in m.graph.nodes
        if n.op in ("call_function", "call_method")
    )


_TRANSFORMS = {"torch._functorch.predispatch", "torch._C._functorch", torch.autograd.grad, "requires_grad_", "backward"}
"""Modules of functions that differentiate or vectorize, such functions, and such methods."""


class _Catching(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Stores an exception raised by an operator that the autograd engine calls, and returns an object that is no tensor
    instead.

    The engine handles C++ exceptions, but not a pending Python exception: while it unwinds, it leaves the guard of a
    device's stream, which asks Python for the device's type. That fails, and std::terminate ends the process.
    """

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.error: BaseException | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **(kwargs or {}))
        except BaseException as error:
            if torch._C._current_graph_task_id() == -1:
                raise
            self.error = error
            return object()


@contextmanager
def _errors_in_backward() -> Iterator[None]:
    """A context in which exceptions raised by operators in a traced backward pass arrive unchanged."""
    catching = _Catching()
    try:
        with catching:
            yield
    except Exception:
        if catching.error is None:
            raise
        raise catching.error from None


@contextmanager
def _whole_operators() -> Iterator[None]:
    kept: Any = exported_program._special_op_to_preserve_cia  # type: ignore[attr-defined]
    with exported_program._override_composite_implicit_decomp(dict.fromkeys(_composite_operators(), kept)):
        yield


@contextmanager
def _whole_interpolation() -> Iterator[None]:
    """A context in which gradients of interpolation are single operators, as in PyTorch's C++. Its Python decompositions
    consist of small operators, which compute coordinates in float32 and scatter gradients.
    """
    taken = [(o, dict(o.py_kernels)) for o in _interpolation()]
    try:
        for o, kernels in taken:
            for key in kernels.keys() & {DispatchKey.Autograd, DispatchKey.CompositeImplicitAutograd}:
                if o._overloadname == "vec":  # PyTorch's C++ takes no dynamic sizes here
                    o.py_kernels[key] = _with_sizes(o, kernels[key])
                else:
                    del o.py_kernels[key]
            o._dispatch_cache.clear()
        yield
    finally:
        for o, kernels in taken:
            o.py_kernels.update(kernels)
            o._dispatch_cache.clear()


def _with_sizes(vec: Any, formula: Callable[..., Any]) -> Callable[..., Any]:
    """upsample_*.vec as the overload that takes the sizes of the result. formula: PyTorch's own, for images without
    elements, whose shape that overload cannot compute.
    """

    def call(x: torch.Tensor, output_size: Any, *options: Any, scale_factors: Any = None) -> Any:
        if any(isinstance(n, int) and n == 0 for n in x.shape):
            return formula(x, output_size, *options, *([scale_factors] if scale_factors is not None else []))
        *flags, scales = (*options, scale_factors) if len(options) < len(vec._schema.arguments) - 2 else options
        sizes = upsample_compute_output_size(x.shape, output_size, scales)  # type: ignore[no-untyped-call]
        return vec.overloadpacket.default(x, sizes, *flags, *(scales or [None] * len(sizes)))

    return call


@functools.lru_cache(maxsize=1)
def _interpolation() -> tuple[Any, ...]:
    """Overloads that PyTorch differentiates by a Python formula, but Lapilli by an operator of its own."""
    packets = [getattr(torch.ops.aten, name) for name in dir(torch.ops.aten) if "upsample_" in name]
    overloads = [getattr(p, name) for p in packets if hasattr(p, "overloads") for name in p.overloads()]
    return tuple(o for o in overloads if DispatchKey.Autograd in o.py_kernels and registry.is_supported(o))


@functools.lru_cache(maxsize=1)
def _composite_operators() -> tuple[Any, ...]:
    return tuple(o for o in _collect_all_valid_cia_ops_for_aten_namespace() if registry.is_supported(o))
