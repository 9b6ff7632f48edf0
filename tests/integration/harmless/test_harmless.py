"""Installed means invisible until it is used: stock activities have the same results with Lapilli and without."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from installed import installed

DRIVER = os.environ.get("VK_DRIVER_FILES", "")
ACTIVITIES = Path(__file__).with_name("activities.py")

WITHOUT = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
CODEGEN = {"TORCHINDUCTOR_FX_GRAPH_CACHE": "0", "TORCHINDUCTOR_AUTOGRAD_CACHE": "0"}
"""Inductor makes its code anew in every process; a C++ compiler runs once for equal code."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("harmless")


def python(folder: Path, *arguments: str, **environment: str) -> str:
    variables = installed(folder) | CODEGEN | environment
    variables |= {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "HARMLESS_FOLDER": str(folder)}
    done = subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, timeout=300, env=variables, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


_plain: dict[str, Any] = {}


def without(folder: Path, groups: str) -> Any:
    if groups not in _plain:
        _plain[groups] = json.loads(python(folder, str(ACTIVITIES), groups, "plain", **WITHOUT))
    return _plain[groups]


ALL = bool(os.environ.get("LAPILLI_TEST_ALL"))


@pytest.mark.part(1)
@pytest.mark.parametrize(
    ("groups", "mode"),
    [
        ("plain,compile", "plain"),
        ("plain,compile" if ALL else "plain", "device"),
        pytest.param("plain,compile", "backend", marks=pytest.mark.long),
        ("processes,opdb" if ALL else "processes", "plain"),
    ],
)
def test_same_results(groups: str, mode: str, folder: Path) -> None:
    """Activities of a process; its start and what torch.compile loads take longer than they do."""
    expected = without(folder, groups)
    failed = {name: value for name, value in expected.items() if isinstance(value, str)}
    assert not failed, failed  # the list itself is right
    got = json.loads(python(folder, str(ACTIVITIES), groups, mode))
    different = {name: (value, got.get(name)) for name, value in expected.items() if got.get(name) != value}
    assert not different, different


INVENTORY = """
import inspect, json, sys, types, torch, torch.accelerator, torch.utils.dlpack, torch.nn.utils.rnn

def described(value):
    for part in ("fget", "__func__", "__wrapped__"):
        value = vars(type(value)).get(part) and getattr(value, part, None) or value
    if isinstance(value, types.FunctionType):
        return f"{value.__module__}.{value.__qualname__}, {value.__code__.co_filename}:{value.__code__.co_firstlineno}"
    if isinstance(value, type) or isinstance(value, types.ModuleType):
        return f"{type(value).__name__} {getattr(value, '__module__', '')} {value.__name__}"
    return type(value).__name__

found = {}
classes = {}
for name, module in sorted(sys.modules.items()):
    if isinstance(module, types.ModuleType) and name.split(".")[0] == "torch" and "lapilli" not in module.__name__:
        for key, value in sorted(vars(module).items()):
            found[f"{name}.{key}"] = described(value)
            if isinstance(value, type) and value.__module__.split(".")[0] in ("torch", "builtins"):
                classes[f"{value.__module__}.{value.__qualname__}"] = value
for name, kind in classes.items():
    for owner, prefix in ((kind, name), (type(kind), f"type of {name}")):
        if owner is not type:
            for key, value in vars(owner).items():
                found[f"{prefix}.{key}"] = described(value)
import lapilli.eager.device_registration, lapilli.torch_compat
ours = [key for key, value in found.items() if "/lapilli/" in value or "lapilli." in value]
print(json.dumps([found, ours, sorted(lapilli.torch_compat.replaced)]))
"""

BY_PYTORCH = {  # what torch.utils.rename_privateuse1_backend does itself, with functions of PyTorch's own
    f"torch._C.{kind}.{name}"
    for kind in ("_autograd.DeviceType", "_profiler._ProfilerActivity", "_profiler.ProfilerActivity")
    for name in ("__repr__", "__str__", "name", "VULKAN")
}

OPERATORS = {"torch.ops.lapilli", "torch.ops.lapilli_prepack", "torch.library.__warningregistry__"}
"""Files that call our operators can be loaded with nothing imported."""


def test_nothing_is_replaced(folder: Path) -> None:
    """At import: attributes of modules and classes are what they were; those that are new name the device."""
    before, _, _ = json.loads(python(folder, "-c", INVENTORY, **WITHOUT))
    after, ours, replaced = json.loads(python(folder, "-c", INVENTORY))
    assert not replaced and ours == ["torch.vulkan"]
    new = {key for key in after if key not in before} - OPERATORS
    assert all("vulkan" in key.rpartition(".")[2].lower() or key in BY_PYTORCH for key in new), new
    changed = {key for key in before if before[key] != after.get(key)}
    assert changed <= BY_PYTORCH, {key: (before[key], after.get(key)) for key in changed - BY_PYTORCH}


USED = """
import torch, torch.utils.mobile_optimizer
from lapilli import torch_compat

import inspect, pickle
x = torch.ones(2).to("vulkan")
torch.compile(lambda v: v + 1, backend="vulkan")(x)
listed = {name for name, patch in torch_compat.PATCHES.items() if patch.when not in ("transformers", "torchao")}
assert set(torch_compat.replaced) == listed, listed ^ set(torch_compat.replaced)
def found(name):
    owner, _, last = name.rpartition(".")
    return getattr(pickle._getattribute(torch, owner.removeprefix("torch").lstrip("."))[0] if owner != "torch" else torch, last)
for name, theirs in torch_compat.replaced.items():
    ours = found(name)
    if name.endswith(("__call__", "__new__", "is_vulkan", "data_ptr", "_execution_engine")) or "Script" in name or theirs is None:
        continue
    assert ours is not theirs and ours.__name__ == getattr(theirs, "__name__", ours.__name__), name
"""


def test_what_is_replaced_is_what_is_listed(folder: Path) -> None:
    python(folder, "-c", USED)


COST = """
import os, time
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
def used(): return [int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")][0]
start = time.thread_time()
import torch
middle, memory = time.thread_time(), used()
from lapilli import autoload
autoload.register()
from lapilli import mobile
mobile.register()
print(middle - start, time.thread_time() - middle, used() - memory)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_cost_of_import_torch(folder: Path) -> None:
    """What the entry points add, in processor time, to `import torch`: 5 ms, or what that is of the second that PyTorch itself
    takes where nothing else runs. The least of several processes, for others only add; the first writes bytecode."""
    runs = [[float(n) for n in python(folder, "-c", COST, PYTHONDONTWRITEBYTECODE="").split()] for _ in range(4)][1:]
    assert min(min(ours, 0.005 * ours / (0.0065 * theirs)) for theirs, ours, _ in runs) <= 0.005, runs
    assert min(memory for *_, memory in runs) <= 4096, runs  # kB


BACKEND = """
import torch

layer = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.GELU(), torch.nn.Linear(8, 4))
compiled = torch.compile(layer, backend="vulkan")
optimizer = torch.optim.AdamW(layer.parameters())
for _ in range(2):
    x = torch.rand(4, 8, requires_grad=True)
    compiled(x).sin().sum().backward()
    torch.testing.assert_close(x.grad, torch.autograd.grad(layer(x).sin().sum(), x)[0], rtol=1e-3, atol=1e-4)
    optimizer.step()
with torch.no_grad():
    torch.testing.assert_close(compiled(x), layer(x), rtol=1e-3, atol=1e-4)
import lapilli
torch.testing.assert_close(lapilli.compile(layer, (x.detach(),))(x.detach()), layer(x).detach(), rtol=1e-3, atol=1e-4)
assert torch.accelerator.current_accelerator() is None and not hasattr(torch, "vulkan")
import warnings
with warnings.catch_warnings():
    warnings.simplefilter("error")
    lapilli.eager.enable()  # from here on
y = torch.ones(3, device="vulkan", requires_grad=True)
(y * y + y).sum().backward()
assert y.grad.tolist() == [3, 3, 3] and torch.accelerator.current_accelerator().type == "vulkan"
compiled(x).sum().backward()
"""


def test_the_backend_needs_no_announcement(folder: Path) -> None:
    """As beside CUDA, where the device has no name: PyTorch's accelerator stays what it was."""
    python(folder, "-c", BACKEND, LAPILLI_EAGER="0")


FIRST_USES = {
    "module": """
        class Tied(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b = torch.nn.Linear(3, 3), torch.nn.Linear(3, 3)
                self.b.weight = self.a.weight
        tied = Tied().to("vulkan")
        assert tied.a.weight is tied.b.weight and tied.b.bias.is_vulkan
    """,
    "pinned": """
        x = torch.ones(3)
        pinned = x.pin_memory()  # a copy: nothing is used yet
        assert pinned.tolist() == [1, 1, 1] and pinned.data_ptr() != x.data_ptr() and pinned.device.type == "cpu"
        assert pinned.to("vulkan", non_blocking=True).tolist() == [1, 1, 1] == x.pin_memory().tolist()
        assert torch.Stream(device="cpu").device_type == 0
    """,
    "scripted": """
        scripted = torch.jit.script(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU())).to("vulkan")
        assert scripted(torch.ones(2, 3, device="vulkan")).is_vulkan and next(scripted.parameters()).requires_grad
    """,
    "load": """
        import io
        file = io.BytesIO()
        torch.save(torch.arange(3.0), file)
        file.seek(0)
        assert torch.load(file, map_location="vulkan").tolist() == [0, 1, 2]
    """,
    "after a backward pass": """
        x = torch.ones(3, requires_grad=True)
        import threading
        (x + x.sin()).sum().backward()
        wanted, seen = x.grad.clone(), []
        def on_device():
            y = torch.ones(3, device="vulkan", requires_grad=True)
            z = y.sin()
            z.register_hook(lambda gradient: seen.append(threading.get_ident()))
            (y + z).sum().backward()
            torch.testing.assert_close(y.grad.cpu(), wanted)
        on_device()
        thread = threading.Thread(target=on_device)
        thread.start()
        thread.join()
        assert seen == [threading.get_ident(), thread.ident], "not in the threads that called backward()"
        (x + x.sin()).sum().backward()
        torch.testing.assert_close(x.grad, 2 * wanted)
    """,
    "generator": """
        assert torch.vulkan.is_available()
        assert torch.Generator(device="vulkan").device.type == "vulkan"
    """,
    "jit.load": """
        import io
        file = io.BytesIO()
        torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), file)
        file.seek(0)
        torch.vulkan.init()
        assert torch.jit.load(file, map_location="vulkan")(torch.ones(1, 2).vulkan()).is_vulkan
    """,
    "inductor": """
        try:
            torch.compile(lambda x: x + 1)(torch.ones(2, device="vulkan"))
        except Exception as error:
            assert 'torch.compile(model, backend="vulkan")' in str(error), error
        else:
            raise AssertionError("inductor has learnt it")
        for backend in ("eager", "aot_eager"):
            x = torch.ones(2, device="vulkan", requires_grad=True)
            torch.compile(lambda v: (v * v + v).sum(), backend=backend)(x).backward()
            assert x.grad.tolist() == [3, 3]
    """,
}


def test_children_train_after_the_device_was_asked_for(folder: Path) -> None:
    """Autograd has no thread for a device that was not used, and so a process can be forked after a pass on the CPU."""
    script = """
        import os, torch
        assert torch.vulkan.is_available()
        x = torch.ones(3, requires_grad=True)
        x.sin().sum().backward()
        child = os.fork()
        if child == 0:
            x.cos().sum().backward()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    python(folder, "-c", textwrap.dedent(script))


@pytest.mark.parametrize("use", FIRST_USES)
def test_first_uses(use: str, folder: Path) -> None:
    """Whatever uses the device first finds it."""
    python(folder, "-c", "import torch\n" + textwrap.dedent(FIRST_USES[use]))
