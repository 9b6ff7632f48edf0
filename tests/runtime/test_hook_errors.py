"""What a hook raises in a backward pass on the device arrives as it was raised, and the process goes on."""

from __future__ import annotations

import re
from pathlib import Path

from installed import run_installed

SCRIPT = """
import sys, threading, traceback
import torch
from torch.utils.checkpoint import checkpoint

class Mine(Exception):
    pass

def bad(*given):
    raise Mine("of a hook")

def leaf():
    return torch.rand(4, 3, device="vulkan", requires_grad=True)

def on_leaf():
    x = leaf()
    x.register_hook(bad)
    return x.sin().sum()

def on_value():
    y = leaf().sin()
    y.register_hook(bad)
    return y.sum()

def after_accumulation():
    x = leaf()
    x.register_post_accumulate_grad_hook(bad)
    return x.sin().sum()

def before_node():
    y = leaf().sin()
    y.grad_fn.register_prehook(bad)
    return y.sum()

def after_node():
    y = leaf().sin()
    y.grad_fn.register_hook(bad)
    return y.sum()

def of_module():
    layer = torch.nn.Linear(3, 2).to("vulkan")
    layer.register_full_backward_hook(bad)
    return layer(leaf()).sum()

def before_module():
    layer = torch.nn.Linear(3, 2).to("vulkan")
    layer.register_full_backward_pre_hook(bad)
    return layer(leaf()).sum()

def unpacking():
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, bad):
        return leaf().sin().sum()

def recomputing():
    calls = []
    def function(x):
        calls.append(1)
        return bad() if len(calls) > 1 else x.sin()
    return checkpoint(function, leaf(), use_reentrant=False).sum()

def nested():
    def within(gradient):
        with torch.enable_grad():
            on_leaf().backward()
    x = leaf()
    x.register_hook(within)
    return x.sin().sum()

class Function(torch.autograd.Function):
    forward = staticmethod(lambda context, x: x * 1)
    backward = staticmethod(bad)

def own_function():
    return (Function.apply(leaf()) * 2).sum()

def beside_the_host():
    x = torch.rand(3, requires_grad=True)
    y = x.to("vulkan")
    y.register_hook(bad)
    return (x.sum() + y.sin().sum().cpu())

def compiled():
    x = leaf()
    x.register_hook(bad)
    return torch.compile(lambda v: v.sin().sum(0), backend="vulkan")(x).sum()

KINDS = [on_leaf, on_value, after_accumulation, before_node, after_node, of_module, before_module, unpacking, recomputing, nested,
         own_function, beside_the_host, compiled]

def attempt(make):
    y = make()
    try:
        y.backward()
    except Mine as error:
        assert str(error) == "of a hook" and "bad" in [f.name for f in traceback.extract_tb(error.__traceback__)]
        assert error.__cause__ is None and error.__context__ is None, make
    else:
        raise AssertionError(f"{make.__name__}: nothing was raised")
    print(make.__name__, flush=True)

for kind in KINDS:
    attempt(kind)
    x = leaf()
    x.sin().sum().backward()
    torch.testing.assert_close(x.grad.cpu(), x.detach().cpu().cos(), rtol=1e-4, atol=1e-5)

# In several threads, each gets its own.
def numbered(number, found):
    for turn in range(20):
        x = leaf()
        def hook(gradient):
            raise Mine((number, turn))
        x.register_hook(hook)
        try:
            x.sin().sum().backward()
        except Mine as error:
            found.append(error.args[0])

found = [[] for _ in range(3)]
threads = [threading.Thread(target=numbered, args=(n, found[n])) for n in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert found == [[(n, turn) for turn in range(20)] for n in range(3)], found

# Exceptions that are no Exception, and grad() instead of backward().
def stop(gradient):
    raise KeyboardInterrupt
x = leaf()
y = x.sin()
y.register_hook(stop)
try:
    torch.autograd.grad(y.sum(), x)
except KeyboardInterrupt:
    print("interrupted", flush=True)

# An error of PyTorch's own stays what it is.
try:
    leaf().sin().backward(torch.rand(5, device="vulkan"))
except RuntimeError as error:
    assert "Mismatch in shape" in str(error)
    print("mismatch")

import weakref
hooked = on_leaf()
alive = weakref.ref(hooked)
try:
    hooked.backward()
except Mine:
    pass
import gc
gc.disable()
del hooked
assert alive() is None, "the error keeps the graph"
"""


def test_hooks_raise(tmp_path: Path) -> None:
    """All kinds of hooks in one process: before, the first ended it."""
    said = run_installed(SCRIPT, tmp_path).split()
    kinds = re.findall(r"\w+", SCRIPT.partition("KINDS = [")[2].partition("]")[0])
    assert said == [*kinds, "interrupted", "mismatch"]
