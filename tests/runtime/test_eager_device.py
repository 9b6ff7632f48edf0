"""The device "vulkan" of PyTorch: registration, tensors, views, copies, random numbers, memory, several devices."""

from __future__ import annotations

import copy
import gc
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from installed import ROOT, run_installed
from torch.utils.checkpoint import checkpoint

from lapilli import autoload

autoload.register()
pytestmark = pytest.mark.filterwarnings("ignore:.*runs on the CPU:UserWarning")

DRIVER = os.environ.get("VK_DRIVER_FILES", "")
SWIFTSHADER = Path(os.environ.get("LAPILLI_SWIFTSHADER", ROOT / ".cache/swiftshader/icd.json"))  # of tools/setup.sh


def both() -> tuple[torch.Tensor, torch.Tensor]:
    """The same numbers on the device and on the CPU."""
    host = torch.arange(12.0).view(3, 4)
    return host.to("vulkan"), host.clone()


# --- what is there after `import torch`


def test_import_torch_is_enough(tmp_path: Path) -> None:
    printed = run_installed(
        """
        import os, sys, torch

        heavy = [name for name in ("lapilli.player", "lapilli.compiler", "cffi", "slangtorch") if name in sys.modules]
        assert not heavy, heavy
        assert torch.is_vulkan_available() and not torch.vulkan.is_initialized()
        x = torch.rand(2, 3)
        y = x.to("vulkan")
        assert y.is_vulkan and not x.is_vulkan and y.device == torch.device("vulkan:0") and torch.vulkan.is_initialized()
        assert torch.equal(y.cpu(), x) and torch.equal(x.vulkan().cpu(), x)
        for (batch,) in torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), num_workers=1, pin_memory=True):
            assert batch.to("vulkan", non_blocking=True).is_vulkan

        read, write = os.pipe()
        if not os.fork():
            for use in (lambda: torch.ones(2, device="vulkan"), y.cpu, lambda: y + y, lambda: y[0, 0].item()):
                try:
                    use()
                except RuntimeError as error:
                    os.write(write, f"{error}\\n".encode())
            os.write(write, f"{torch.vulkan.is_available()} {torch.vulkan.device_count()}\\n".encode())
            os._exit(0)
        os.wait()
        *refused, there = os.read(read, 10_000).decode().splitlines()
        assert len(refused) == 4 and all("'spawn'" in line for line in refused), refused
        assert there == "False 0", there
        print("good", torch.allclose((y + 1).sum().cpu(), (x + 1).sum()))
        """,
        tmp_path,
    )
    assert printed == "good True\n"


def test_without_a_driver_or_a_compiler(tmp_path: Path) -> None:
    run_installed(
        """
        import importlib.util, torch

        assert not torch.is_vulkan_available() and torch.vulkan.device_count() == 0
        assert (torch.ones(2) + 1).tolist() == [2, 2]
        torch.manual_seed(1)
        torch.vulkan.synchronize()
        uses = [
            lambda: torch.ones(2, device="vulkan"), lambda: torch.ones(2).to("vulkan"), lambda: torch.ones(2).vulkan(),
            lambda: torch.nn.Linear(2, 2).to("vulkan"), torch.vulkan.get_device_name, torch.vulkan.mem_get_info,
        ]
        for use in uses:
            try:
                use()
            except RuntimeError as error:
                assert "There is no Vulkan device" in str(error) and "Install the driver" in str(error), error
            else:
                raise AssertionError("it went through")

        find = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "slangtorch" else find(name, *rest)
        import lapilli.runtime.compiler_packages

        lapilli.runtime.compiler_packages.find_spec = importlib.util.find_spec
        assert not torch.is_vulkan_available()
        try:
            torch.ones(2, device="vulkan")
        except lapilli.CompileError as error:
            assert "pip install 'lapilli[compile]'" in str(error)
        else:
            raise AssertionError("it went through")
        """,
        tmp_path,
        VK_DRIVER_FILES=str(tmp_path / "none.json"),
    )


def test_import_torch_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(name: str) -> None:
        raise RuntimeError("torch.register_privateuse1_backend() has already been set! Current backend: other")

    from lapilli.eager import device_registration

    monkeypatch.setattr(device_registration, "_announced", False)
    monkeypatch.setattr(torch.utils.backend_registration, "rename_privateuse1_backend", taken)
    with pytest.warns(RuntimeWarning, match="cannot offer the device 'vulkan' in this PyTorch: .*backend: other"):
        autoload.register()


@pytest.mark.skipif(not SWIFTSHADER.exists() or not DRIVER or "swiftshader" in DRIVER, reason="needs two drivers")
def test_two_devices(tmp_path: Path) -> None:
    run_installed(
        """
        import copy, threading, torch
        from torch import nn

        torch.manual_seed(0)
        assert torch.vulkan.device_count() == 2
        names = {torch.vulkan.get_device_name(index) for index in range(2)}
        assert len(names) == 2, names
        a = torch.rand(3, 4, device="vulkan:0")
        b = a.to("vulkan:1")
        assert b.device == torch.device("vulkan:1") and torch.equal(b.cpu(), a.cpu()) and torch.equal(b.to("vulkan:0"), a)
        torch.testing.assert_close((b * 2 + 1).cpu(), a.cpu() * 2 + 1)
        assert b.t().contiguous().device == b.device and copy.deepcopy(b).device == b.device
        v = b.clone()
        v[1:, 0].fill_(5)
        assert v[:, 0].tolist() == [v[0, 0].item(), 5, 5]
        v.resize_(20)
        assert torch.equal(v[:4].cpu(), b[0].cpu())
        try:
            a + b
        except RuntimeError as error:
            assert "two devices, vulkan:0 and vulkan:1" in str(error)
        else:
            raise AssertionError("it went through")
        try:
            torch.ones(1).to("vulkan:2")
        except RuntimeError as error:
            assert "There is no device vulkan:2. There are: vulkan:0" in str(error)
        else:
            raise AssertionError("it went through")

        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        there = copy.deepcopy(model).to("vulkan:1")

        def backward():
            there(b).square().mean().backward()

        thread = threading.Thread(target=backward)
        thread.start()
        thread.join()
        model(b.cpu()).square().mean().backward()
        assert there[0].weight.grad.device == b.device
        torch.testing.assert_close(there[0].weight.grad.cpu(), model[0].weight.grad)

        w = torch.rand(3, 4, device="vulkan:0", requires_grad=True)
        ((w * 2).to("vulkan:1") * b).sum().backward()
        torch.testing.assert_close(w.grad.cpu(), b.cpu() * 2)
        with torch.vulkan.device(1):
            assert torch.vulkan.current_device() == 1 and torch.ones(2, device="vulkan").device == b.device
            assert torch.ones(2).vulkan().device == b.device
        torch.vulkan.set_device(1)
        assert torch.empty(2, device="vulkan").device == b.device and torch.accelerator.current_device_index() == 1
        with torch.vulkan.device_of(a):
            assert torch.vulkan.current_device() == 0
        with torch.inference_mode():
            assert (b + 1).is_inference() and not b.t().is_inference()
        """,
        tmp_path,
        VK_DRIVER_FILES=os.pathsep.join([DRIVER, str(SWIFTSHADER)]),
    )


@pytest.mark.skipif(not SWIFTSHADER.exists() or not DRIVER or "swiftshader" in DRIVER, reason="needs two drivers")
def test_second_device_unannounced(tmp_path: Path) -> None:
    """As beside CUDA: compiled for a device other than the first, in a process in which no device is announced; then announced."""
    run_installed(
        """
        import sys, torch, lapilli.eager

        x = torch.rand(3, 4, requires_grad=True)
        f = torch.compile(lambda x: (x * 2).sum(1), backend="vulkan", options={"device": 1})
        y = f(x)
        y.sum().backward()
        torch.testing.assert_close(y, (x * 2).sum(1))
        assert torch.equal(x.grad, torch.full((3, 4), 2.0)) and y.device.type == "cpu"
        given = torch.compile(lambda x: x.view(-1), backend="vulkan", options={"device": 1})(x.detach())
        assert torch.equal(given, x.detach().view(-1))
        assert not hasattr(torch, "vulkan") and "torch.privateuseone" not in sys.modules
        lapilli.eager.enable()
        there = x.detach().to("vulkan:1")
        assert there.device == torch.device("vulkan:1") and torch.equal((there + 1).cpu(), x.detach() + 1)
        """,
        tmp_path,
        VK_DRIVER_FILES=os.pathsep.join([DRIVER, str(SWIFTSHADER)]),
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
    )


def test_properties() -> None:
    properties = torch.vulkan.get_device_properties()
    assert properties.name == torch.vulkan.get_device_name("vulkan:0") and properties.total_memory > 0
    assert properties.limits and properties.features and properties.type in ("cpu", "discrete", "integrated", "virtual")
    with pytest.raises(RuntimeError, match="There is no device vulkan:9"):
        torch.vulkan.get_device_name(9)
    with pytest.raises(ValueError, match="Expected a vulkan device, but got cpu"):
        torch.vulkan.set_device("cpu")
    assert torch.vulkan.get_amp_supported_dtype() == [torch.float16, torch.bfloat16]
    if not torch.cuda.is_available():
        assert torch.accelerator.current_accelerator() == torch.device("vulkan")
        assert torch.accelerator.device_count() == torch.vulkan.device_count()
        assert torch.accelerator.get_memory_info() == torch.vulkan.mem_get_info()
    torch.accelerator.synchronize()
    torch.vulkan.init()


def test_pinned_memory_is_the_other_accelerators() -> None:
    torch.ones(1, device="vulkan")  # the first use; before it nothing of PyTorch is replaced
    host = torch.rand(3)
    pinned = host.pin_memory()
    assert torch.equal(pinned, host) and pinned.is_pinned() == torch.cuda.is_available() and not host.is_pinned()
    assert pinned.to("vulkan", non_blocking=True).is_vulkan


# --- making tensors


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.zeros(2, 3, device=d),
        lambda d: torch.ones(2, 3, device=d, dtype=torch.int64),
        lambda d: torch.full((2,), 3.5, device=d),
        lambda d: torch.full((2,), 3, device=d),
        lambda d: torch.arange(5, device=d),
        lambda d: torch.arange(0, 1, 0.25, device=d),
        lambda d: torch.eye(3, device=d),
        lambda d: torch.linspace(0, 1, 5, device=d),
        lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
        lambda d: torch.tensor(True, device=d),
        lambda d: torch.as_tensor([1.0, 2.0], device=d),
        lambda d: torch.zeros_like(torch.ones(3, device=d), dtype=torch.int32),
        lambda d: torch.ones(2, device=d).new_full((3,), 2.0),
        lambda d: torch.ones(2, device=d).new_tensor([1.5]),
        lambda d: torch.tensor([1 + 2j], device=d),
        lambda d: torch.ones(2, device=d, dtype=torch.float64),
        lambda d: torch.tril_indices(3, 3, device=d),
        lambda d: torch.empty(0, 3, device=d),
        lambda d: torch.scalar_tensor(2, device=d),
    ],
)
def test_factories(make: Callable[[str], torch.Tensor]) -> None:
    made, expected = make("vulkan"), make("cpu")
    assert made.is_vulkan and made.dtype == expected.dtype and made.stride() == expected.stride()
    torch.testing.assert_close(made.cpu(), expected)


@pytest.mark.parametrize(
    "make",
    [
        lambda **k: torch.rand(100, **k),
        lambda **k: torch.randn(100, **k),
        lambda **k: torch.randint(3, 9, (100,), **k),
        lambda **k: torch.randperm(100, **k),
        lambda **k: torch.normal(0.0, 1.0, (100,), **k),
        lambda **k: torch.empty(100, device=k["device"]).uniform_(generator=k.get("generator")),
    ],
)
def test_random_numbers_follow_their_seed(make: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(5)
    first, state, second = make(device="vulkan"), torch.vulkan.get_rng_state(), make(device="vulkan")
    assert first.is_vulkan and not torch.equal(first.cpu(), second.cpu())
    torch.vulkan.manual_seed(5)
    assert torch.vulkan.initial_seed() == 5
    assert torch.equal(make(device="vulkan").cpu(), first.cpu())
    torch.vulkan.set_rng_state(state)
    assert torch.equal(make(device="vulkan").cpu(), second.cpu())
    torch.vulkan.manual_seed_all(5)
    with torch.random.fork_rng(device_type="vulkan"):
        forked = make(device="vulkan")
    assert torch.equal(forked.cpu(), make(device="vulkan").cpu())
    one, other = (torch.Generator(device="vulkan").manual_seed(3) for _ in range(2))
    assert one.device == torch.device("vulkan:0") and isinstance(one, torch.Generator)
    drawn = make(device="vulkan", generator=one)
    assert torch.equal(drawn.cpu(), make(device="vulkan", generator=other).cpu())
    assert torch.equal(
        make(device="vulkan", generator=one.clone_state()).cpu(), make(device="vulkan", generator=one).cpu()
    )


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_draw_the_same_numbers_again(reentrant: bool) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Dropout(0.5), torch.nn.Linear(64, 4)).to("vulkan")
    x = torch.randn(3, 4, device="vulkan", requires_grad=True)

    def gradient(call: Callable[[], torch.Tensor]) -> torch.Tensor:
        torch.manual_seed(3)
        call().sum().backward()
        found, x.grad = x.grad, None
        assert found is not None
        return found.cpu()

    want = gradient(lambda: model(x))
    got = gradient(lambda: checkpoint(model, x, use_reentrant=reentrant))
    assert torch.equal(got, want)


def test_default_device_and_with_device() -> None:
    with torch.device("vulkan"):
        assert torch.ones(2).is_vulkan and torch.nn.Linear(2, 2).weight.is_vulkan
    torch.set_default_device("vulkan")
    try:
        assert torch.zeros(2).is_vulkan
    finally:
        torch.set_default_device("cpu")


def test_memory_formats() -> None:
    for tensor in (
        torch.empty(1, 2, 3, 4, device="vulkan", memory_format=torch.channels_last),
        torch.rand(1, 2, 3, 4).to("vulkan", memory_format=torch.channels_last),
        torch.rand(1, 2, 3, 4).to(memory_format=torch.channels_last).to("vulkan"),
    ):
        assert tensor.stride() == (24, 1, 8, 2)
    assert torch.empty_strided((2, 2), (1, 2), device="vulkan").stride() == (1, 2)
    with pytest.raises(
        NotImplementedError, match="quantized tensors, and nested ones in the layout torch.strided, are not"
    ):
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8).to("vulkan")


# --- views and what is written through them


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.view(2, 6),
        lambda a: a.reshape(4, 3),
        lambda a: a.as_strided((2, 2), (4, 1), 1),
        lambda a: a[1],
        lambda a: a[:, 1:3],
        lambda a: a[::2, ::2],
        lambda a: a[..., None, 0],
        lambda a: a.t(),
        lambda a: a.unfold(1, 2, 2),
        lambda a: a.diagonal(),
        lambda a: a.unsqueeze(1),
        lambda a: a[:1].squeeze(0),
        lambda a: a.permute(1, 0),
        lambda a: a.narrow(1, 1, 2),
        lambda a: a.split(2, 1)[1],
        lambda a: a.unbind(1)[2],
        lambda a: a.unflatten(1, (2, 2)),
        lambda a: a[1:].t()[2:],
        lambda a: a.detach(),
        lambda a: a.view(torch.int32).view(torch.float32),
        lambda a: a.view_as(torch.empty(6, 2)),
    ],
)
def test_views_share_memory(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    ours, theirs = both()
    a, b = view(ours), view(theirs)
    assert (a.shape, a.stride(), a.storage_offset(), a._is_view()) == (
        b.shape,
        b.stride(),
        b.storage_offset(),
        b._is_view(),
    )
    assert a.data_ptr() - ours.data_ptr() == b.data_ptr() - theirs.data_ptr()
    assert torch.equal(a.cpu(), b)
    a.add_(1)
    b.add_(1)
    assert torch.equal(ours.cpu(), theirs)


def test_expanded_tensors() -> None:
    ours, theirs = both()
    a, b = ours[:, :1].expand(3, 4), theirs[:, :1].expand(3, 4)
    assert a.stride() == b.stride() and torch.equal(a.cpu(), b) and torch.equal((a + 1).cpu(), b + 1)
    with pytest.raises(RuntimeError, match="single memory location"):
        a.add_(1)


def test_real_and_complex_views() -> None:
    z = torch.tensor([1 + 2j, 3 - 1j])
    ours = z.to("vulkan")
    assert torch.view_as_real(ours).tolist() == [[1, 2], [3, -1]]
    assert torch.equal(ours.conj().cpu(), z.conj()) and torch.equal(ours.conj().imag.cpu(), z.conj().imag)
    target = torch.zeros(2, dtype=torch.complex64, device="vulkan")
    target.conj().copy_(z)
    assert torch.equal(target.cpu(), z.conj())


def test_a_view_stays_within_its_storage() -> None:
    ours, _ = both()
    with pytest.raises(RuntimeError, match=r"as_strided: sizes \[100\].* need 400 bytes, but the storage has 48"):
        ours.as_strided((100,), (1,))
    with pytest.raises(RuntimeError, match="view size is not compatible"):
        ours.t().view(-1)


def test_empty_views_may_begin_beyond_their_storage() -> None:
    """The second half of nothing begins where it would if the other dimensions were not empty."""
    empty = torch.zeros(15, 1, 1, 0).to("vulkan").chunk(2, 0)[1]
    assert empty.storage_offset() == 8 and empty.shape == (7, 1, 1, 0)
    weight, bias = torch.zeros(1, 0).to("vulkan"), torch.ones(1).to("vulkan")
    assert torch.equal(torch.nn.functional.linear(empty, weight, bias).cpu(), torch.ones(7, 1, 1, 1))
    assert torch.equal(empty.add_(1).sum(-1).cpu(), torch.zeros(7, 1, 1))
    for made in (
        empty + 1,
        empty.clone(),
        empty.fill_(2),
        empty.cpu(),
        empty.half(),
        torch.add(empty, empty, out=empty),
    ):
        assert made.shape == empty.shape
    assert torch.cat([empty, empty]).shape == (14, 1, 1, 0)


def test_indexing() -> None:
    ours, theirs = both()
    index = torch.tensor([0, 2])
    assert ours[ours > 5].tolist() == theirs[theirs > 5].tolist()
    assert ours[index.to("vulkan")].tolist() == theirs[index].tolist()
    assert ours[[0, 2], 1].tolist() == theirs[[0, 2], 1].tolist()
    assert ours[index].tolist() == theirs[index].tolist()  # indices may be the CPU's, but not the other way round
    with pytest.raises(RuntimeError, match="two devices, vulkan:0 and cpu"):
        theirs[index.to("vulkan")] = 1.0
    with pytest.raises(RuntimeError, match="two devices, vulkan:0 and cpu"):
        theirs[index.to("vulkan")]
    for x in (ours, theirs):
        x[x > 5] = 0
        x[:, 3] = torch.tensor([1.0, 2.0, 3.0])
        x[1] = 7
    assert torch.equal(ours.cpu(), theirs)
    assert [row.sum().item() for row in ours] == [row.sum().item() for row in theirs]


def test_resize_and_set() -> None:
    a = torch.arange(3.0, device="vulkan")
    v = a[1:]
    a.resize_(2, 4)
    a[0, 1] = 7
    assert a[0, :3].tolist() == [0, 7, 2] and v.tolist() == [7, 2]
    ours, _ = both()
    b = torch.empty(0, device="vulkan").set_(ours.untyped_storage(), 4, (2, 2), (4, 1))
    assert b.tolist() == [[4, 5], [8, 9]] and b.untyped_storage()._cdata == ours.untyped_storage()._cdata
    c = torch.empty(0, device="vulkan").set_(ours)
    assert c.is_set_to(ours) and not b.is_set_to(ours)
    assert torch.empty(0, device="vulkan").set_(ours.untyped_storage()).shape == (12,)
    assert b.set_().shape == (0,)
    p = torch.nn.Parameter(torch.ones(3, device="vulkan"))
    p.data = ours[0]
    ours[0, 0] = 9
    assert p.tolist() == [9, 1, 2, 3]
    with pytest.raises(RuntimeError, match="they must be the same"):
        torch.empty(0, device="vulkan").set_(torch.ones(2).untyped_storage())


# --- copies and values


RESIZED: dict[str, Callable[[torch.Tensor], Any]] = {
    "add": lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
    "bmm": lambda x: torch.bmm(x, x.transpose(1, 2), out=torch.empty(0, device=x.device)),
    "sum": lambda x: torch.sum(x, 0, out=torch.empty(0, device=x.device)),
    "complex": lambda x: torch.complex(x, x),
    "polar": lambda x: torch.polar(x, x),
    "lstsq": lambda x: torch.linalg.lstsq(x[0, :3], x[0, :3]).solution,
}


@pytest.mark.parametrize("name", RESIZED)
def test_results_that_are_resized_have_the_strides_of_torch(name: str) -> None:
    x = torch.arange(24.0).view(2, 3, 4).transpose(1, 2)
    assert RESIZED[name](x.to("vulkan")).stride() == RESIZED[name](x).stride()


@pytest.mark.poor_device
def test_copies_of_all_kinds() -> None:
    ours, theirs = both()
    assert ours.to("vulkan") is ours and ours.to("cpu", torch.float64).dtype == torch.float64
    assert torch.equal(ours.to(torch.int32).cpu(), theirs.to(torch.int32))
    wide = torch.zeros(3, 8, device="vulkan")
    wide[:, ::2] = theirs  # from the host into every other column
    wide[:, 1::2].copy_(ours, non_blocking=True)
    assert torch.equal(wide[:, ::2].cpu(), theirs) and torch.equal(wide[:, 1::2].cpu(), theirs)
    host = torch.zeros(4, 3)
    host.t().copy_(ours)
    assert torch.equal(host, theirs.t())
    host = torch.zeros(3, 4, dtype=torch.int64)
    assert torch.equal(host.copy_(ours[:1]), theirs[:1].long().expand(3, 4))
    for dtype in (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int64, torch.float16, torch.bfloat16,
                  torch.float64, torch.complex64):  # fmt: skip
        x = torch.tensor([0, 1, 1, 0, 1]).to(dtype)
        assert torch.equal(x.to("vulkan").cpu(), x) and torch.equal(x.to("vulkan")[1:4].cpu(), x[1:4])
        y = torch.tensor([0.0, 7.0, 1.5])
        assert torch.equal(y.to("vulkan").to(dtype).cpu(), y.to(dtype))
        assert torch.equal(x.to("vulkan").float().cpu(), x.to(torch.complex64).real)


@pytest.mark.parametrize("value", [True, 3, 2**40, -1.5, 1 + 2j], ids=["bool", "int", "int64", "float", "complex"])
def test_item(value: Any) -> None:
    x = torch.tensor([value, value], device="vulkan")[1]
    assert x.item() == value and x.tolist() == value and bool(x)
    if not isinstance(value, complex):
        assert float(x) == value
    for dtype in (torch.float16, torch.bfloat16, torch.int8):
        assert torch.tensor([2, 1], device="vulkan").to(dtype)[1].item() == 1


def test_what_is_refused() -> None:
    ours, theirs = both()
    with pytest.raises(TypeError, match=r"can't convert vulkan:0 device type tensor to numpy. Use Tensor.cpu\(\)"):
        ours.numpy()
    with pytest.raises(RuntimeError, match="12 elements cannot be converted to Scalar"):
        ours.item()
    with pytest.raises(RuntimeError, match="two devices, vulkan:0 and cpu"):
        ours + theirs
    with pytest.raises(BufferError, match=r"use tensor.cpu\(\)"):
        torch.utils.dlpack.to_dlpack(ours)
    with pytest.raises(RuntimeError, match=r"There is no device vulkan:7. There are: vulkan:0"):
        theirs.to("vulkan:7")
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        torch.ones(3, device="vulkan", requires_grad=True).add_(1)
    with pytest.raises(RuntimeError, match=r"send tensor.cpu\(\)"):
        torch.multiprocessing.reducer.ForkingPickler.dumps(ours)
    assert (ours + torch.tensor(1.0)).is_vulkan  # a number of the CPU is fine, as everywhere


def test_nested_tensors() -> None:
    """In the layout of which they are dense tensors with offsets; others are refused when they are made."""
    rows = [torch.ones(2, 3), torch.ones(1, 3)]
    on_device = [row.to("vulkan") for row in rows]
    made = torch.nested.nested_tensor(on_device, layout=torch.jagged) * 2
    assert made.values().device.type == "vulkan"
    expected = torch.nested.nested_tensor(rows, layout=torch.jagged) * 2
    assert torch.equal(made.to_padded_tensor(0.0).cpu(), expected.to_padded_tensor(0.0))
    for make in (torch.nested.nested_tensor, torch.nested.as_nested_tensor):
        with pytest.raises(NotImplementedError, match=r"give layout=torch\.jagged"):
            make(on_device, layout=torch.strided)


def test_quantized_tensors_are_refused_when_they_are_made() -> None:
    with pytest.raises(NotImplementedError, match="compile the quantized model"):
        torch.quantize_per_tensor(torch.ones(3, device="vulkan"), 0.1, 0, torch.quint8)


def test_printing() -> None:
    ours, theirs = both()
    assert repr(ours) == repr(theirs)[:-1] + ", device='vulkan:0')"
    assert repr(torch.nn.Parameter(ours)).startswith("Parameter containing:\ntensor([[ 0.,  1.,  2.,  3.]")
    assert "grad_fn=<MulBackward0>" in repr(torch.nn.Parameter(ours) * 2)
    assert f"{ours[1, 1]:.2f}" == "5.00" and "size=(0, 3)" in repr(torch.empty(0, 3, device="vulkan"))
    torch.testing.assert_close(ours, ours.clone())
    with pytest.raises(AssertionError, match="not close"):
        torch.testing.assert_close(ours, ours + 1)


# --- autograd modes, threads


def test_inference_mode_and_no_grad() -> None:
    ours, _ = both()
    weight = torch.ones(4, device="vulkan", requires_grad=True)
    with torch.no_grad():
        assert not (ours * weight).requires_grad
    with torch.inference_mode():
        made = ours + 1
        made.add_(1)
        assert made.is_inference() and made.t().is_inference() and not ours.t().is_inference()
        assert made[0].tolist() == [2, 3, 4, 5]
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        made * weight
    changed = (weight * 2).exp()
    changed_twice = changed.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        changed_twice.sum().backward()


def test_gradients_through_views_and_in_place() -> None:
    def gradient(device: str) -> torch.Tensor:
        w = torch.arange(12.0, device=device).view(3, 4).requires_grad_()
        x = w * 2
        x[1:].mul_(3)
        x.t()[0].add_(w[:, 1])
        x.square().sum().backward()
        assert w.grad is not None
        return w.grad.cpu()

    torch.testing.assert_close(gradient("vulkan"), gradient("cpu"))


def test_threads() -> None:
    x = torch.rand(8, 8)
    shared, errors = x.to("vulkan"), []

    def work(number: int) -> None:
        try:
            for _ in range(5):
                w = torch.full((8, 8), float(number), device="vulkan", requires_grad=True)
                (w * shared).sum().backward()
                assert w.grad is not None
                torch.testing.assert_close(w.grad.cpu(), x)
                assert torch.equal((shared[number:] + number).cpu(), x[number:] + number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


# --- memory


def test_memory_is_counted_and_given_back() -> None:
    gc.collect()
    torch.vulkan.synchronize()
    torch.vulkan.reset_peak_memory_stats()
    before = torch.vulkan.memory_allocated()
    x = torch.empty(1 << 20, device="vulkan")
    view = x[1:]
    del x
    assert torch.vulkan.memory_allocated() - before >= 4 << 20  # the view holds it
    del view
    assert torch.vulkan.memory_allocated() == before
    assert torch.vulkan.max_memory_allocated() - before >= 4 << 20
    free, total = torch.vulkan.mem_get_info()
    assert 0 < free <= total and torch.vulkan.memory_reserved() <= total
    torch.vulkan.empty_cache()
    assert torch.vulkan.memory_reserved() < total - free + (4 << 20)


def test_out_of_memory() -> None:
    torch.vulkan.empty_cache()
    torch.vulkan.set_per_process_memory_fraction((128 << 20) / torch.vulkan.mem_get_info()[1])
    try:
        with pytest.raises(torch.OutOfMemoryError, match="vulkan:0 is out of memory"):
            torch.empty(1 << 26, device="vulkan")
        assert torch.ones(1 << 10, device="vulkan").sum().item() == 1 << 10
    finally:
        torch.vulkan.set_per_process_memory_fraction(1.0)
    for wrong in (0, 2.0, "all"):
        with pytest.raises(ValueError, match="more than 0 and at most 1"):
            torch.vulkan.set_per_process_memory_fraction(wrong)


def test_memory_fraction_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    from lapilli.eager import device_state

    monkeypatch.setenv("LAPILLI_VULKAN_MEMORY_FRACTION", "0.5")
    monkeypatch.setattr(device_state, "streams", {})
    stream = device_state.open_stream(0)
    assert stream.memory().limit == device_state.found()[0]["memory"] // 2


def test_storages() -> None:
    ours, _ = both()
    untyped = ours.untyped_storage()
    assert untyped.nbytes() == 48 == len(untyped) and untyped.is_vulkan and untyped.data_ptr() == ours.data_ptr() != 0
    assert untyped.cpu().tolist() == torch.arange(12.0).untyped_storage().tolist() and untyped[4] == untyped.cpu()[4]
    made = torch.UntypedStorage(48, device="vulkan")
    assert made.device == ours.device and made.copy_(untyped).cpu().tolist() == untyped.cpu().tolist()
    made.fill_(0)
    assert set(made.tolist()) == {0}
    host = torch.arange(12.0).untyped_storage()
    assert host.vulkan().cpu().tolist() == host.tolist()
    made.resize_(0)
    assert made.nbytes() == 0 == made.data_ptr()
    with pytest.raises(TypeError, match="takes a number of bytes"):
        torch.UntypedStorage([1, 2], device="vulkan")
    with pytest.raises(RuntimeError, match="cannot take a copy"):
        untyped.copy_(torch.UntypedStorage(3))
    clone = copy.deepcopy({"all": ours, "row": ours[1]})
    clone["all"].zero_()
    assert clone["row"].tolist() == [0, 0, 0, 0] and ours[0, 1].item() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["no_stats", "running", "native", "layer", "group"])
def test_statistics_of_norms_in_half_precision_are_float32(name: str, dtype: torch.dtype) -> None:
    """As on torch's other devices, and as graphs of torch.compile are traced: these save them for their gradients."""
    aten = torch.ops.aten

    def norm(x: torch.Tensor, w: torch.Tensor) -> Any:
        if name == "no_stats":
            return aten._native_batch_norm_legit.no_stats(x, w, w, True, 0.1, 1e-5)
        if name == "running":
            return aten._native_batch_norm_legit.default(x, w, w, w.clone(), w.clone(), True, 0.1, 1e-5)
        if name == "native":
            return aten.native_batch_norm.default(x, w, w, None, None, True, 0.1, 1e-5)
        if name == "layer":
            return aten.native_layer_norm.default(x, [4, 5], None, None, 1e-5)
        return aten.native_group_norm.default(x, w, w, 3, 2, 20, 1, 1e-5)

    x, w = torch.randn(3, 2, 4, 5).to(dtype), torch.rand(2).to(dtype) + 0.5
    found = norm(x.to("vulkan"), w.to("vulkan"))[1:]
    for got, want in zip(found, norm(x.float(), w.float())[1:], strict=True):
        if name != "group":  # torch has these in half precision on every device
            assert got.dtype is torch.float32
        bound = 2**-8 if name in ("native", "group") else 2**-19  # those are rounded to the type before
        torch.testing.assert_close(got.cpu().float(), want, rtol=bound, atol=bound)
