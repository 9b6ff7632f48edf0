"""What is asked of a system besides single results: open sizes, saving, what runs on the CPU, what a wheel has in it."""

from __future__ import annotations

import copy
import io
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from workers import Result

from comparison.judging import expected, first_line, judge
from comparison.models import small_cnn
from comparison.systems import Compiled, Eager, ExecuTorch, Stock, System, TorchCompile

Checks = dict[str, Callable[[], Result]]


def checks(system: System) -> Checks:
    """The checks that a system takes part in, by name."""
    match system:
        case TorchCompile():
            return {"sizes": partial(sizes, lambda model: torch.compile(model, backend="vulkan", dynamic=True))}
        case Eager():
            return {
                "sizes": partial(sizes, lambda model: partial(_eagerly, model.to("vulkan"))),
                **{f"saving: {name}": partial(_saving, saved) for name, saved in SAVED.items()},
                "tied weights stay tied": _tied,
                "fallbacks named": partial(_warnings, system),
            }
        case Compiled():
            return {
                "sizes": partial(sizes, _program),
                "saving: program file, run without torch": _without_torch,
                "fallbacks named": _reported,
            }
        case Stock():
            return {
                "torch.is_vulkan_available()": lambda: _value(torch.is_vulkan_available()),
                "tensor.to('vulkan')": lambda: _value(torch.rand(2).to("vulkan").device),
                **{f"optimize_for_mobile, {b}": partial(_mobile, b) for b in ("vulkan", "metal", "CPU")},
            }
        case ExecuTorch():
            return {
                "sizes": partial(_partitioned_sizes, system),
                "registry": _registry,
                "running a program": partial(_run_program, system),
            }
    return {}


def _value(value: object) -> Result:
    return {"verdict": "right", "value": str(value)}


# -- sizes


def sizes(compile: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> Result:
    """A network without fixed sizes at four sizes: right, and seconds of the first and of the second run at each."""
    model = small_cnn().eval()
    run = compile(copy.deepcopy(model))
    found: Result = {"verdict": "right", "first": [], "again": []}
    for n, h, w in ((2, 16, 24), (3, 32, 32), (1, 40, 20), (5, 12, 56)):
        x = torch.rand(n, 3, h, w)
        start = time.perf_counter()
        got = run(x)
        middle = time.perf_counter()
        run(x)
        found["first"].append(middle - start)
        found["again"].append(time.perf_counter() - middle)
        judged = judge([got], *expected(model, (x,)))
        if judged["verdict"] != "right":
            return judged
    return found


def _eagerly(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.to("vulkan")).cpu()


def _free() -> tuple[dict[int, Any]]:
    from torch.export import Dim

    return ({0: Dim("n", max=8), 2: Dim("h", min=8, max=64), 3: Dim("w", min=8, max=64)},)


def _program(model: nn.Module) -> Callable[[Tensor], Tensor]:
    import lapilli

    return lapilli.compile(model, (torch.rand(2, 3, 16, 24),), dynamic_shapes=_free())


def _partitioned_sizes(system: ExecuTorch) -> Result:
    return system.lower(small_cnn().eval(), (torch.rand(2, 3, 16, 24),), _free())[1]


# -- saving


def _saving(saved: Callable[[nn.Module], nn.Module]) -> Result:
    """A model of the device gives the same after a round trip."""
    model, x = small_cnn().eval(), torch.rand(2, 3, 16, 16)
    again = saved(copy.deepcopy(model).to("vulkan"))
    device = next(again.parameters()).device
    return judge([again(x.to(device)).cpu()], *expected(model, (x,)))


def _state_dict(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    again = small_cnn().eval()
    with torch.no_grad():
        for p in again.parameters():
            p.zero_()
    again.load_state_dict(torch.load(file, map_location="cpu"))
    return again


def _traced(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.jit.save(torch.jit.trace(model, torch.rand(2, 3, 16, 16).to("vulkan")), file)
    file.seek(0)
    return torch.jit.load(file, map_location="cpu")


def _exported(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.export.save(torch.export.export(model, (torch.rand(2, 3, 16, 16).to("vulkan"),)), file)
    file.seek(0)
    return torch.export.load(file).module()


SAVED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "state_dict": _state_dict,
    "torch.jit.save": _traced,
    "torch.export.save": _exported,
    "deepcopy": copy.deepcopy,
}


def _tied() -> Result:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    model.to("vulkan")
    same = model[0].weight is model[1].weight
    return {"verdict": "right" if same else "wrong"}


def _without_torch() -> Result:
    import numpy

    import lapilli

    model, x = small_cnn().eval(), torch.rand(2, 3, 16, 16)
    with tempfile.TemporaryDirectory() as folder:
        lapilli.compile(model, (x,)).save(f"{folder}/model.lap")
        numpy.save(f"{folder}/x.npy", x.numpy())
        code = "import sys, numpy, lapilli; f = sys.argv[1]; p = lapilli.load(f + '/model.lap'); "
        code += "numpy.save(f + '/y.npy', p(numpy.load(f + '/x.npy'))); assert 'torch' not in sys.modules"
        subprocess.run([sys.executable, "-c", code, folder], check=True)
        got = torch.from_numpy(numpy.load(f"{folder}/y.npy"))
    return judge([got], *expected(model, (x,)))


# -- what runs on the CPU


def _on_cpu(package: str) -> dict[str, Callable[[], Any]]:
    """Operators that the system runs on the CPU, by a word that a warning could have."""
    a = (torch.rand(4, 4) + torch.eye(4)).to("vulkan")
    if package == "lapilli":
        return {
            "linalg_eig": lambda: torch.linalg.eig(a),
            "histogramdd": lambda: torch.histogramdd(a, bins=[2] * 4),
            "linalg_lu_factor": lambda: torch.linalg.lu_factor(a.to(torch.complex64)),
        }
    return {
        "LU": lambda: torch.linalg.lu_factor(a.to(torch.complex64)),
        "gamma_grad": lambda: torch._standard_gamma_grad(a, a),
        "dirichlet": lambda: torch._dirichlet_grad(a, a, a),
    }


def _warnings(system: Eager) -> Result:
    """Of operators that run on the CPU: how many warnings name, without being asked; and how many strict mode refuses."""
    named, refused = 0, 0
    calls = _on_cpu(system.package)
    for name, call in calls.items():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            call()
        named += any(name in str(w.message) for w in caught)
        code = "import sys; from comparison.features import refuses; sys.exit(not refuses(*sys.argv[1:]))"
        strict = {**os.environ, system.strict: "1"}
        done = subprocess.run([sys.executable, "-c", code, system.package, name], env=strict, stderr=subprocess.PIPE)
        refused += done.returncode == 0
    return {"verdict": "right", "named": named, "refused": refused, "of": len(calls)}


def refuses(package: str, name: str) -> bool:
    """Whether the operator raises in this process."""
    Eager(package, "").open()
    call = _on_cpu(package)[name]
    try:
        call()
    except (NotImplementedError, RuntimeError):
        return True
    return False


def _reported() -> Result:
    import lapilli

    class Three(nn.Module):
        def forward(self, a: Tensor) -> Any:
            return (
                torch.linalg.eig(a),
                torch.histogramdd(a, bins=[2] * 4),
                torch.linalg.lu_factor(a.to(torch.complex64)),
            )

    report = lapilli.compile(Three(), (torch.rand(4, 4) + torch.eye(4),)).report()
    said = " ".join(o.operator for o in report.on_cpu)
    named = [name for name in ("linalg_eig", "histogramdd", "linalg_lu_factor") if name in said]
    return {"verdict": "right", "named": len(named), "of": 3, "text": said}


# -- what a wheel has in it


def _mobile(backend: str) -> Result:
    from torch.utils.mobile_optimizer import optimize_for_mobile

    optimize_for_mobile(torch.jit.trace(small_cnn().eval(), torch.rand(1, 3, 16, 16)), backend=backend)
    return {"verdict": "right"}


def _registry() -> Result:
    from executorch.backends.vulkan.op_registry import vulkan_supported_ops
    from executorch.extension.pybindings import portable_lib

    names = {getattr(op, "_op", op) for op in vulkan_supported_ops}
    aten = {str(op) for op in names if str(op).startswith("aten")}
    backends = list(portable_lib._get_registered_backend_names())
    return {"verdict": "right", "entries": len(vulkan_supported_ops), "aten": len(aten), "backends": backends}


def _run_program(system: ExecuTorch) -> Result:
    from executorch.extension.pybindings import portable_lib

    model, x = small_cnn().eval(), torch.rand(2, 3, 16, 16)
    edge, counts = system.lower(model, (x,))
    file = edge.to_executorch().buffer
    with tempfile.TemporaryFile() as said:  # the reason is written by C++
        kept = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            got = portable_lib._load_for_executorch_from_buffer(file).forward([x])
        except RuntimeError as error:
            said.seek(0)
            reason = first_line(said.read().decode().partition("] ")[2] or str(error))
            return counts | {"verdict": "refused", "reason": reason, "bytes": len(file)}
        finally:
            os.dup2(kept, 2)
    return counts | judge(got, *expected(model, (x,)))
