"""Sparse tensors on the device: what torch does with them on the CPU, it does with those of the device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = pytest.mark.filterwarnings("ignore:.*runs on the CPU")

DENSE = torch.tensor([[0.0, 2.0, 0.0], [3.0, 0.0, 4.0]])
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "coo": Tensor.to_sparse, "csr": Tensor.to_sparse_csr, "csc": Tensor.to_sparse_csc,
}  # fmt: skip


def matrix(device: str) -> Tensor:
    return torch.arange(6.0).reshape(3, 2).to(device)


def changed(change: Callable[[Tensor], Any]) -> Callable[[Tensor, str], Tensor]:
    def run(x: Tensor, device: str) -> Tensor:
        assert change(x) is x
        return x

    return run


def gradient(x: Tensor, device: str) -> Tensor:
    weight = matrix(device).requires_grad_()
    (x @ weight).pow(2).sum().backward()
    assert weight.grad is not None
    return weight.grad


CALLS: dict[str, Callable[[Tensor, str], Any]] = {
    "@": lambda x, d: x @ matrix(d),
    "@ a vector": lambda x, d: x @ matrix(d)[:, 0],
    "addmm": lambda x, d: torch.addmm(torch.ones(2, 2, device=d), x, matrix(d)),
    "sparse.mm": lambda x, d: torch.sparse.mm(x, matrix(d)),
    "* 2": lambda x, d: x * 2,
    "* dense": lambda x, d: x * matrix(d).t().contiguous(),
    "+": lambda x, d: x + x,
    "neg": lambda x, d: -x,
    "relu": lambda x, d: torch.relu(x),
    "t": lambda x, d: x.t(),
    "sum": lambda x, d: x.sum(),
    "clone": lambda x, d: x.clone(),
    "half": lambda x, d: x.half(),
    "zeros_like": lambda x, d: torch.zeros_like(x),
    "mul_": changed(lambda x: x.mul_(2)),
    "zero_": changed(lambda x: x.zero_()),
    "copy_": changed(lambda x: x.copy_(x * 3)),
    "gradient of a product": gradient,
}


def dense(x: Tensor) -> Tensor:
    return x.cpu().to_dense() if x.layout is not torch.strided else x.cpu()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_as_on_the_cpu(name: str, layout: str) -> None:
    made = LAYOUTS[layout](DENSE)
    try:
        wanted = CALLS[name](made.clone(), "cpu")
    except (RuntimeError, NotImplementedError) as error:
        with pytest.raises(type(error)) as refused:
            CALLS[name](made.to("vulkan"), "vulkan")
        assert str(refused.value) == str(error)
        return
    found = CALLS[name](made.to("vulkan"), "vulkan")
    assert found.device.type == "vulkan" and found.layout is wanted.layout
    torch.testing.assert_close(dense(found), dense(wanted))


def test_values_in_blocks() -> None:
    blocks = torch.arange(16.0).reshape(4, 4).to_sparse_bsr((2, 2))
    torch.testing.assert_close((blocks.to("vulkan") @ torch.eye(4, device="vulkan")).cpu(), blocks.to_dense())


def test_values_that_are_shared_change_with_the_tensor() -> None:
    for x, values in ((DENSE.to_sparse(), Tensor._values), (DENSE.to_sparse_csr(), Tensor.values)):
        on_device = x.to("vulkan")
        shared = values(on_device)
        on_device.mul_(2)
        assert shared.tolist() == [4.0, 6.0, 8.0]


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1),
    "SGD with momentum": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "SparseAdam": lambda p: torch.optim.SparseAdam(list(p), 0.1),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.1),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("kept", [False, True], ids=["gradients anew", "gradients kept"])
def test_embeddings_are_trained(name: str, kept: bool) -> None:
    torch.manual_seed(0)
    first = nn.Embedding(5, 3, sparse=True)
    trained = []
    for device in ("cpu", "vulkan"):
        model = copy.deepcopy(first).to(device)
        optimizer = OPTIMIZERS[name](model.parameters())
        for step in range(3):
            optimizer.zero_grad(set_to_none=not kept)
            model(torch.tensor([1, 2, 1, step], device=device)).pow(2).sum().backward()
            assert model.weight.grad is not None and model.weight.grad.layout is torch.sparse_coo
            optimizer.step()
        trained.append(model.weight.detach().cpu())
    torch.testing.assert_close(trained[1], trained[0])


def test_strict_mode_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    x = DENSE.to_sparse_csr().to("vulkan")
    monkeypatch.setenv("LAPILLI_STRICT", "1")
    assert torch.equal(x.clone().cpu().to_dense(), DENSE)
    with pytest.raises(NotImplementedError, match="operators on sparse tensors are not supported on the GPU"):
        x @ matrix("vulkan")
