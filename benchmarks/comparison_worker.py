"""One system of the comparison, measured in its own environment: python comparison_worker.py SYSTEM PART FILE

Every measurement is a step of a process that may die (tools/workers.py). FILE gets JSON lines. comparison.py runs this."""

from __future__ import annotations

import argparse
import copy
import io
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "tools")]

import torch  # noqa: E402
from comparison_cases import DTYPES, MODELS, TRAINING, WRONG_ELSEWHERE, Inputs, small_cnn  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from workers import Died, Log, Result  # noqa: E402

Run = Callable[[], list[Tensor]]
"""From tensors on the host to tensors on the host."""

BOUNDS = {torch.float32: 1e-5, torch.complex64: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2, torch.float64: 1e-12}
SLACK = 8
"""The rule of tools/measure.py: the relative error that a dtype may have, or so many times torch's own."""


def first_line(error: BaseException | str) -> str:
    """The first line that says something, without its frame."""
    text = str(error)
    line = next((line.strip() for line in text.splitlines() if line.strip()), "")
    return (line if isinstance(error, str) else f"{type(error).__name__}: {line}")[:240]


def relative_error(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of b."""
    wide = torch.complex128 if b.is_complex() else torch.float64
    a, b = a.to(wide), b.to(wide)
    size = float(torch.linalg.vector_norm(b))
    return float(torch.linalg.vector_norm(a - b)) / (size or 1.0)


def judge(got: Sequence[Tensor], want: Sequence[Tensor], exact: Sequence[Tensor]) -> Result:
    """got against torch's CPU results, and what it computes in float64."""
    found: Result = {"verdict": "right", "error": 0.0, "torch_error": 0.0}
    for ours, theirs, wide in zip(got, want, exact, strict=True):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            found |= {
                "verdict": "wrong",
                "reason": f"{ours.dtype} {list(ours.shape)}, not {theirs.dtype} {list(theirs.shape)}",
            }
        elif theirs.dtype not in BOUNDS:
            if not torch.equal(ours, theirs):
                found |= {"verdict": "wrong", "reason": f"{int((ours != theirs).sum())} of {theirs.numel()} differ"}
        else:
            error, torch_error = relative_error(ours, wide), relative_error(theirs, wide)
            found["error"], found["torch_error"] = max(found["error"], error), max(found["torch_error"], torch_error)
            near = relative_error(ours, theirs) <= BOUNDS[theirs.dtype]
            if not near and not error <= BOUNDS[theirs.dtype] + SLACK * torch_error:
                found |= {"verdict": "wrong", "reason": f"relative error {error:.2g}; torch's own {torch_error:.2g}"}
    return found


def expected(model: nn.Module, inputs: Inputs) -> tuple[list[Tensor], list[Tensor]]:
    """What torch's CPU gives, and in float64."""
    wide = [
        x.to(torch.complex128 if x.is_complex() else torch.float64 if x.is_floating_point() else x.dtype)
        for x in inputs
    ]
    return tree_leaves(model(*inputs)), tree_leaves(copy.deepcopy(model).double()(*wide))


# -- the systems


class System:
    """How a system runs a model."""

    strict = ""
    """The environment variable that forbids the CPU."""

    def open(self) -> None:
        """Makes the system ready."""

    def prepare(self, model: nn.Module, inputs: Inputs) -> Run:
        raise NotImplementedError

    def case(self, model: nn.Module, inputs: Inputs) -> Result:
        """Runs a case, and compares."""
        want, exact = expected(model, inputs)
        return judge(self.prepare(model, inputs)(), want, exact)

    def features(self) -> dict[str, Callable[[], Result]]:
        return {}


class Eager(System):
    """A device named vulkan."""

    def __init__(self, module: str, strict: str) -> None:
        self.module, self.strict = module, strict

    def open(self) -> None:
        if self.module == "lapilli":
            if not hasattr(torch, "vulkan"):  # in an installed package the entry point has done so
                from lapilli import autoload

                autoload.register()
        else:
            __import__(self.module)

    def prepare(self, model: nn.Module, inputs: Inputs) -> Run:
        there = copy.deepcopy(model).to("vulkan")
        return lambda: [t.cpu() for t in tree_leaves(there(*(x.to("vulkan") for x in inputs)))]

    def train(self, model: nn.Module, loss: Callable[..., Tensor]) -> tuple[nn.Module, Callable[..., Tensor], str]:
        """A model on its device, and the loss of model, inputs, labels."""
        return model.to("vulkan"), loss, "vulkan"

    def features(self) -> dict[str, Callable[[], Result]]:
        def weights(moved: Callable[[nn.Module], nn.Module]) -> Result:
            model = small_cnn().eval()
            x = torch.rand(2, 3, 16, 16)
            want, exact = expected(model, (x,))
            again = moved(copy.deepcopy(model).to("vulkan"))
            device = next(again.parameters()).device
            return judge([again(x.to(device)).cpu()], want, exact)

        def state_dict(model: nn.Module) -> nn.Module:
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            again = small_cnn().eval()
            with torch.no_grad():
                for p in again.parameters():
                    p.zero_()
            again.load_state_dict(torch.load(file, map_location="cpu"))
            return again

        def scripted(model: nn.Module) -> nn.Module:
            file = io.BytesIO()
            torch.jit.save(torch.jit.trace(model, torch.rand(2, 3, 16, 16).to("vulkan")), file)
            file.seek(0)
            return torch.jit.load(file, map_location="cpu")

        def exported(model: nn.Module) -> nn.Module:
            file = io.BytesIO()
            torch.export.save(torch.export.export(model, (torch.rand(2, 3, 16, 16).to("vulkan"),)), file)
            file.seek(0)
            return torch.export.load(file).module()

        return {
            "sizes": lambda: sizes(lambda model: partial(_eagerly, model.to("vulkan"))),
            "saving: state_dict": lambda: weights(state_dict),
            "saving: torch.jit.save": lambda: weights(scripted),
            "saving: torch.export.save": lambda: weights(exported),
            "saving: deepcopy": lambda: weights(copy.deepcopy),
            "tied weights stay tied": _tied,
            "fallbacks named": lambda: self.fallbacks(),
        }

    def fallbacks(self) -> Result:
        """Of operators that run on the CPU: how many warnings name, without being asked; and how many strict mode refuses."""
        named, refused = 0, 0
        for name, call in self.on_cpu.items():
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
            named += any(name in str(w.message) for w in caught)
            code = f"import sys; sys.path[:0] = {sys.path[:2]}; import comparison_worker as w; w.refuses({self.module!r}, {name!r})"
            strict = subprocess.run(
                [sys.executable, "-c", code], env={**os.environ, self.strict: "1"}, stderr=subprocess.PIPE
            )
            refused += strict.returncode == 0
        return {"verdict": "right", "named": named, "refused": refused, "of": len(self.on_cpu)}

    @property
    def on_cpu(self) -> dict[str, Callable[[], Any]]:
        """Operators that the system runs on the CPU, by a word that a warning could have."""
        a = (torch.rand(4, 4) + torch.eye(4)).to("vulkan")
        if self.module == "lapilli":
            complex_lu = {"linalg_lu_factor": lambda: torch.linalg.lu_factor(a.to(torch.complex64))}
            return {
                "linalg_eig": lambda: torch.linalg.eig(a),
                "histogramdd": lambda: torch.histogramdd(a, bins=[2] * 4),
            } | complex_lu
        return {
            "LU": lambda: torch.linalg.lu_factor(a.to(torch.complex64)),
            "gamma_grad": lambda: torch._standard_gamma_grad(a, a),
            "dirichlet": lambda: torch._dirichlet_grad(a, a, a),
        }


def refuses(module: str, name: str) -> None:
    """Ends the process with 0 where the operator raises."""
    system = Eager(module, "")
    system.open()
    call = system.on_cpu[name]
    try:
        call()
    except (NotImplementedError, RuntimeError):
        sys.exit(0)
    sys.exit(1)


class Compiled(System):
    """lapilli.compile: a program in a file."""

    def prepare(self, model: nn.Module, inputs: Inputs) -> Run:
        import lapilli

        self.program = lapilli.compile(model, inputs)
        return lambda: tree_leaves(self.program(*inputs))

    def case(self, model: nn.Module, inputs: Inputs) -> Result:
        found = super().case(model, inputs)
        return found | {"cpu": sorted({o.operator for o in self.program.report().on_cpu})}

    def features(self) -> dict[str, Callable[[], Result]]:
        def program(model: nn.Module) -> Callable[[Tensor], Tensor]:
            from torch.export import Dim

            import lapilli

            free = {0: Dim("n", max=8), 2: Dim("h", min=8, max=64), 3: Dim("w", min=8, max=64)}
            made = lapilli.compile(model, (torch.rand(2, 3, 16, 24),), dynamic_shapes=(free,))
            return lambda x: made(x)

        def saved() -> Result:
            import lapilli

            model, x = small_cnn().eval(), torch.rand(2, 3, 16, 16)
            want, exact = expected(model, (x,))
            with tempfile.TemporaryDirectory() as folder:
                lapilli.compile(model, (x,)).save(f"{folder}/model.lap")
                (Path(folder) / "x.npy").write_bytes(_npy(x))
                code = "import sys, numpy, lapilli; f = sys.argv[1]; p = lapilli.load(f + '/model.lap'); "
                code += "numpy.save(f + '/y.npy', p(numpy.load(f + '/x.npy'))); assert 'torch' not in sys.modules"
                subprocess.run([sys.executable, "-c", code, folder], check=True)
                import numpy

                return judge([torch.from_numpy(numpy.load(f"{folder}/y.npy"))], want, exact)

        def reported() -> Result:
            import lapilli

            class Three(nn.Module):
                def forward(self, a: Tensor) -> Any:
                    return torch.linalg.eig(a), torch.geqrf(a), torch.histogramdd(a, bins=[2] * 4)

            report = lapilli.compile(Three(), (torch.rand(4, 4) + torch.eye(4),)).report()
            said = " ".join(o.operator for o in report.on_cpu)
            named = [name for name in ("linalg_eig", "geqrf", "histogramdd") if name in said]
            return {"verdict": "right", "named": len(named), "of": 3, "text": said}

        return {
            "sizes": lambda: sizes(program),
            "saving: program file, run without torch": saved,
            "fallbacks named": reported,
        }


class TorchCompile(Eager):
    """torch.compile with the backend vulkan, for tensors of the CPU."""

    def __init__(self) -> None:
        super().__init__("lapilli", "LAPILLI_STRICT")

    def open(self) -> None:
        super().open()
        from torch._dynamo.backends.registry import list_backends, register_backend

        if "vulkan" not in list_backends(None):  # not installed: no entry point
            from lapilli.backend import vulkan

            register_backend(vulkan, name="vulkan")

    def prepare(self, model: nn.Module, inputs: Inputs) -> Run:
        torch._dynamo.reset()  # graphs of other cases count towards its limit
        made = torch.compile(model, backend="vulkan", fullgraph=True)
        return lambda: tree_leaves(made(*inputs))

    def train(self, model: nn.Module, loss: Callable[..., Tensor]) -> tuple[nn.Module, Callable[..., Tensor], str]:
        return model.to("vulkan"), torch.compile(loss, backend="vulkan"), "vulkan"

    def features(self) -> dict[str, Callable[[], Result]]:
        return {"sizes": lambda: sizes(lambda model: torch.compile(model, backend="vulkan", dynamic=True))}


class Stock(System):
    """PyTorch's own Vulkan backend, in a wheel as pip installs it."""

    def prepare(self, model: nn.Module, inputs: Inputs) -> Run:
        return lambda: [t.cpu() for t in tree_leaves(model(*(x.to("vulkan") for x in inputs)))]

    def features(self) -> dict[str, Callable[[], Result]]:
        def mobile(backend: str) -> Result:
            from torch.utils.mobile_optimizer import optimize_for_mobile

            optimize_for_mobile(torch.jit.trace(small_cnn().eval(), torch.rand(1, 3, 16, 16)), backend=backend)
            return {"verdict": "right"}

        return {
            "torch.is_vulkan_available()": lambda: {"verdict": "right", "value": torch.is_vulkan_available()},
            "tensor.to('vulkan')": lambda: {"verdict": "right", "value": str(torch.rand(2).to("vulkan").device)},
            **{f"optimize_for_mobile, {b}": partial(mobile, b) for b in ("vulkan", "metal", "CPU")},
        }


class ExecuTorch(System):
    """ExecuTorch's Vulkan delegate: what its partitioner would give to it, and whether the wheel can run that."""

    def lower(self, model: nn.Module, inputs: Inputs, dynamic_shapes: Any = None) -> tuple[Any, Result]:
        from executorch.backends.vulkan.partitioner.vulkan_partitioner import VulkanPartitioner
        from executorch.devtools.backend_debug import get_delegation_info
        from executorch.exir import to_edge_transform_and_lower

        logging.disable()
        exported = torch.export.export(model, inputs, dynamic_shapes=dynamic_shapes)
        edge = to_edge_transform_and_lower(exported, partitioner=[VulkanPartitioner()])
        told = get_delegation_info(edge.exported_program().graph_module)
        table = told.get_operator_delegation_dataframe()
        rest = table[(table.op_type != "Total") & (table.occurrences_in_non_delegated_graphs > 0)]
        rest = rest[~rest.op_type.isin(["getitem"])]
        inside, outside = int(told.num_delegated_nodes), int(rest.occurrences_in_non_delegated_graphs.sum())
        counts = {"delegated": inside, "operators": inside + outside, "subgraphs": int(told.num_delegated_subgraphs)}
        return edge, {"verdict": "not run", "rest": sorted(rest.op_type), **counts}

    def case(self, model: nn.Module, inputs: Inputs) -> Result:
        return self.lower(model, inputs)[1]

    def features(self) -> dict[str, Callable[[], Result]]:
        def registry() -> Result:
            from executorch.backends.vulkan.op_registry import vulkan_supported_ops
            from executorch.extension.pybindings import portable_lib

            names = {getattr(op, "_op", op) for op in vulkan_supported_ops}
            aten = {str(op) for op in names if str(op).startswith("aten")}
            backends = list(portable_lib._get_registered_backend_names())
            return {"verdict": "right", "entries": len(vulkan_supported_ops), "aten": len(aten), "backends": backends}

        def run() -> Result:
            from executorch.extension.pybindings import portable_lib

            model, x = small_cnn().eval(), torch.rand(2, 3, 16, 16)
            want, exact = expected(model, (x,))
            edge, counts = self.lower(model, (x,))
            file = edge.to_executorch().buffer
            with tempfile.TemporaryFile() as said:  # the reason is written by C++
                kept = os.dup(2)
                os.dup2(said.fileno(), 2)
                try:
                    got = portable_lib._load_for_executorch_from_buffer(file).forward([x])
                    return counts | judge(got, want, exact)
                except RuntimeError as error:
                    said.seek(0)
                    reason = first_line(said.read().decode().partition("] ")[2] or str(error))
                    return counts | {"verdict": "refused", "reason": reason, "bytes": len(file)}
                finally:
                    os.dup2(kept, 2)

        def dynamic() -> Result:
            from torch.export import Dim

            free = {0: Dim("n", max=8), 2: Dim("h", min=8, max=64), 3: Dim("w", min=8, max=64)}
            return self.lower(small_cnn().eval(), (torch.rand(2, 3, 16, 24),), (free,))[1]

        return {"registry": registry, "running a program": run, "sizes": dynamic}


def _eagerly(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.to("vulkan")).cpu()


def _npy(x: Tensor) -> bytes:
    import numpy

    file = io.BytesIO()
    numpy.save(file, x.numpy())
    return file.getvalue()


def _tied() -> Result:
    model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    model[1].weight = model[0].weight
    model.to("vulkan")
    same = model[0].weight is model[1].weight
    return {"verdict": "right" if same else "wrong"}


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
        end = time.perf_counter()
        found["first"].append(middle - start)
        found["again"].append(end - middle)
        want, exact = expected(model, (x,))
        judged = judge([got], want, exact)
        if judged["verdict"] != "right":
            return judged
    return found


# -- the measurements


def latency(system: System, model: nn.Module, inputs: Inputs, rounds: int = 15, limit: float = 15.0) -> Result:
    """Medians of the system and of torch's CPU, taken in turn; host to host."""
    if isinstance(system, ExecuTorch):
        return system.case(model, inputs)
    want, exact = expected(model, inputs)
    start = time.perf_counter()
    run = system.prepare(model, inputs)
    found = judge(run(), want, exact)
    found["first"] = time.perf_counter() - start
    turns: dict[str, list[float]] = {"seconds": [], "torch_seconds": []}
    for _ in range(2):
        run()
    end = time.perf_counter() + limit
    while len(turns["seconds"]) < rounds and (len(turns["seconds"]) < 3 or time.perf_counter() < end):
        for name, function in (("seconds", run), ("torch_seconds", lambda: model(*inputs))):
            start = time.perf_counter()
            function()
            turns[name].append(time.perf_counter() - start)
    return found | {name: statistics.median(times) for name, times in turns.items()} | {"runs": len(turns["seconds"])}


def training(system: System, name: str, steps: int = 12) -> Result:
    """Losses beside those of the CPU from the same weights; median seconds of a step of both, after the first two."""
    if not isinstance(system, Eager):
        raise NotImplementedError("has no backward pass")
    make, batch, optimizer = TRAINING[name]

    def loss(model: nn.Module, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), labels)

    def step(model: nn.Module, loss: Callable[..., Tensor], to: str, optimize: torch.optim.Optimizer) -> float:
        x, labels = batch()
        optimize.zero_grad()
        value = loss(model, x.to(to), labels.to(to))
        value.backward()
        optimize.step()
        return float(value)

    kinds = [system.train(make(), loss), (make(), loss, "cpu")]
    runs = [(*kind, optimizer(kind[0].parameters(), lr=0.01)) for kind in kinds]
    losses: list[list[float]] = [[], []]
    times: list[list[float]] = [[], []]
    for _ in range(steps):
        for k, run in enumerate(runs):
            start = time.perf_counter()
            losses[k].append(step(*run))
            times[k].append(time.perf_counter() - start)
    apart = max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))
    fell = losses[1][-1] < losses[1][0]
    medians = {"seconds": statistics.median(times[0][2:]), "torch_seconds": statistics.median(times[1][2:])}
    return {"verdict": "right" if fell and apart < 1e-3 else "wrong", "apart": apart, "losses": losses[0], **medians}


SYSTEMS: dict[str, Callable[[], System]] = {
    "lapilli-compiled": Compiled,
    "lapilli-torch-compile": TorchCompile,
    "lapilli-eager": lambda: Eager("lapilli", "LAPILLI_STRICT"),
    "torchvulkan": lambda: Eager("torchvulkan", "TORCHVULKAN_STRICT"),
    "pytorch": Stock,
    "executorch": ExecuTorch,
}

_system: list[System] = []
"""The system of this process, once it is open."""


def _opened(name: str) -> System:
    if not _system:
        _system.append(SYSTEMS[name]())
        _system[0].open()
    return _system[0]


def tasks(name: str, part: str) -> dict[str, Callable[[System], Result]]:
    """The measurements of a part, by name."""
    match part:
        case "cases":
            return {n: lambda s, c=case: s.case(*c.make()) for n, case in WRONG_ELSEWHERE.items()}
        case "dtypes" | "dtypes-strict":
            return {n: lambda s, c=case: s.case(*c.make()) for n, case in DTYPES.items()}
        case "models":
            return {n: lambda s, c=case: latency(s, *c.make()) for n, case in MODELS.items()}
        case "training":
            return {n: lambda s, n=n: training(s, n) for n in TRAINING}
        case "features":
            return {n: lambda s, n=n: s.features()[n]() for n in SYSTEMS[name]().features()}
    raise ValueError(f"no such part: {part}")


def work(name: str, part: str, task: str, start: int) -> Iterator[Result]:
    """One measurement. What a system raises is its refusal."""
    warnings.simplefilter("ignore")
    try:
        system = _opened(name)
        keep = torch.enable_grad() if part == "training" else torch.no_grad()
        with keep:
            yield tasks(name, part)[task](system)
    except Exception as error:
        yield {"verdict": "refused", "reason": first_line(error)}


def entry(name: str, strict: bool, limit: int, task: str, start: int) -> Iterator[Result]:
    """An entry of op_db by tools/eager.py, on this system's device."""
    _opened(name)
    import eager

    yield from eager.work(limit, strict, task, start)


def died(reason: Died) -> Result:
    return {"verdict": "crash", "reason": reason.reason, "sample": 0, "cpu": {}}


def show(name: str, steps: list[Result], seconds: float) -> None:
    bad = "; ".join(f"{s['verdict']} {s.get('reason', '')}" for s in steps if s["verdict"] != "right")
    print(f"{seconds:6.0f} s  {name:50} {bad}"[:200], file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument(
        "part", help="cases, dtypes, dtypes-strict, models, training, features, operators, operators-strict"
    )
    parser.add_argument("file", type=Path)
    parser.add_argument("--samples", type=int, default=3)
    parser.add_argument("--every", type=int, default=1, metavar="K", help="every K-th entry of op_db")
    options = parser.parse_args()
    part, _, strict = options.part.partition("-")
    if strict:
        os.environ[SYSTEMS[options.system]().strict] = "1"
    log = Log(options.file)
    if part == "operators":
        from opdb import entries

        names = list(entries())[:: options.every]
        log.fill(partial(entry, options.system, bool(strict), options.samples), names, 1, 240.0, died, show)
    else:
        names = list(tasks(options.system, part))
        log.fill(partial(work, options.system, part), names, 1, 240.0, died, show)
    print(json.dumps({"load": os.getloadavg(), "threads": torch.get_num_threads(), "torch": torch.__version__}))


if __name__ == "__main__":
    main()
