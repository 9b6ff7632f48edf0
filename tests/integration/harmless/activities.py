"""What people do with PyTorch on a CPU, Lapilli or not: python activities.py GROUPS MODE writes what came out as JSON;
GROUPS are names with commas.

MODE: "plain" (what `import torch` has loaded, if anything), or what was used before in the same process: "device" (the eager device
"vulkan"), "backend" (torch.compile by it)."""

from __future__ import annotations

import copy
import io
import json
import os
import pickle
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

ALL = bool(os.environ.get("LAPILLI_TEST_ALL"))
GROUPS: dict[str, dict[str, Callable[[], Any]]] = {"compile": {}, "plain": {}, "processes": {}, "opdb": {}}


def activity(group: str) -> Callable[[Callable[[], Any]], Callable[[], Any]]:
    def add(function: Callable[[], Any]) -> Callable[[], Any]:
        GROUPS[group][function.__name__] = function
        return function

    return add


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.first(x)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def data(rows: int = 3) -> torch.Tensor:
    return torch.linspace(-1, 1, rows * 4).reshape(rows, 4)


def two_readers(x: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return (y + y.sin()).sum()


# --- torch.compile


def _compiled(backend: str) -> list[Any]:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    results: list[Any] = []
    function = torch.compile(two_readers, backend=backend, fullgraph=True)
    x = data().requires_grad_()
    function(x).backward()
    results.append(x.grad)
    if backend != "inductor" or ALL:  # whose C++ compiler takes two seconds for each kernel
        model = net()
        compiled = torch.compile(model, backend=backend)
        compiled(data()).sum().backward()
        results += [p.grad for p in model.parameters()]
        dynamic = torch.compile(lambda x: (x.softmax(0) * x.shape[0]).cumsum(0), backend=backend, dynamic=True)
        with torch.no_grad():
            results += [dynamic(data(n)) for n in (3, 5, 9)]
    return [results, counters["stats"]["unique_graphs"], dict(counters["graph_break"])]


@activity("compile")
def compiled_eager() -> Any:
    return _compiled("eager")


@activity("compile")
def compiled_aot_eager() -> Any:
    return _compiled("aot_eager")


@activity("compile")
def compiled_inductor() -> Any:
    return _compiled("inductor")


@activity("compile")
def graphs_and_guards() -> Any:
    torch._dynamo.reset()
    seen: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        seen.append(graph.code)
        return graph.forward

    def broken(x: torch.Tensor) -> torch.Tensor:
        y = x + 1
        print("a break", file=io.StringIO())
        return y * torch.ones(4)

    torch.compile(broken, backend=backend)(data())
    explained = torch._dynamo.explain(broken)(data())
    return [
        seen,
        explained.graph_count,
        explained.graph_break_count,
        sorted(_without_numbers(g.name) for g in explained.out_guards),
    ]


def _without_numbers(text: str) -> str:
    return "".join(c for c in text if not c.isdigit())


@activity("compile")
def convolution_sizes() -> Any:
    """Guards of convolutions, of which our backend makes fewer."""
    torch._dynamo.reset()
    layer = nn.Conv2d(1, 2, 3)
    programs: list[Any] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        programs.append(str([tuple(map(str, i.shape)) for i in inputs if isinstance(i, torch.Tensor)]))
        return graph.forward

    compiled = torch.compile(layer, backend=backend, dynamic=True)
    shapes = [tuple(compiled(torch.ones(n, 1, 8, 8)).shape) for n in (3, 20)]
    return [shapes, programs]


@activity("compile")
def accelerators_in_a_graph() -> Any:
    torch._dynamo.reset()

    def function(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if torch.cuda.is_available() else x - 1

    return torch.compile(function, backend="eager")(data())


@activity("compile")
def autocast_in_a_graph() -> Any:
    torch._dynamo.reset()
    layer = net()

    def function(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return layer(x).float()

    return torch.compile(function, backend="aot_eager")(data())


# --- without a compiler


@activity("plain")
def exporting() -> Any:
    program = torch.export.export(net(), (data(),), dynamic_shapes=({0: torch.export.Dim("n", min=2)},))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return [str(program.graph), torch.export.load(file).module()(data(5))]


@activity("plain")
def scripting() -> Any:
    scripted, traced = torch.jit.script(net()), torch.jit.trace(net(), data())
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    loaded = torch.jit.load(file, map_location="cpu")
    moved = torch.jit.script(net()).to(torch.float64)
    return [str(scripted.inlined_graph), str(traced.graph), loaded(data()), moved(data().double())]


@activity("plain")
def tracing_by_fx() -> Any:
    traced = torch.fx.symbolic_trace(net())
    return [traced.code, traced(data())]


@activity("plain")
def pickling() -> Any:
    model = net()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "x": data()[1:]}, file)
    file.seek(0)
    again = pickle.loads(pickle.dumps([model, data(), torch.float32, torch.device("cpu"), nn.Parameter(data())]))
    return [torch.load(file), again[0](data()), again[1:], len(pickle.dumps(data())), len(file.getvalue())]


@activity("plain")
def hooks_of_autograd() -> Any:
    said: list[Any] = []
    x = data().requires_grad_()
    y = x.exp()
    y.register_hook(lambda g: said.append(g.clone()))
    model = net()
    model.register_full_backward_hook(lambda m, i, o: said.append(type(m).__name__))
    x.register_post_accumulate_grad_hook(lambda t: said.append(t.grad.clone()))
    (two_readers(y) + model(y).sum()).backward()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t + 1, lambda t: t - 1):
        z = data().requires_grad_()
        (z * z).sum().backward()
    grad = torch.autograd.grad(two_readers(w := data().requires_grad_()), w, create_graph=True)[0]
    return [said, x.grad, z.grad, torch.autograd.grad(grad.sum(), w)]


@activity("plain")
def checkpointing() -> Any:
    from torch.utils.checkpoint import checkpoint

    results = []
    for reentrant in (True, False):
        x = data().requires_grad_()
        model = net()
        torch.manual_seed(1)
        checkpoint(lambda v, m=model: nn.functional.dropout(m(v)), x, use_reentrant=reentrant).sum().backward()
        results.append(x.grad)
    return results


@activity("plain")
def functions_of_functions() -> Any:
    from torch import func

    def f(x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x).sum()

    x = data()[0]
    model = net()
    values = func.functional_call(model, dict(model.named_parameters()), (data(),))
    return [func.grad(f)(x), func.vmap(func.grad(f))(data()), func.hessian(f)(x), func.jvp(f, (x,), (x,)), values]


@activity("plain")
def autocast() -> Any:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        x = data().requires_grad_()
        y = net()(x)
    y.float().sum().backward()
    return [str(y.dtype), x.grad, torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled()]


@activity("plain")
def copying() -> Any:
    model = net()
    model.second.bias = None  # type: ignore[assignment]
    model.tied = model.first
    twin = copy.deepcopy(model)
    return [twin(data()), twin.tied is twin.first, model.double().tied is model.first, str(model)]


@activity("plain")
def moving() -> Any:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)
            self.b.weight = self.a.weight

    model = Tied().double()
    empty = Tied().to("meta")
    empty = empty.to_empty(device="cpu")
    return [model.a.weight is model.b.weight, str(model.a.weight.dtype), [str(p.device) for p in empty.parameters()]]


@activity("plain")
def profiling() -> Any:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as report:
        two_readers(data().requires_grad_()).backward()
    table = report.key_averages()
    columns = table.table(row_limit=1).splitlines()[1].split()
    return [sorted({e.key for e in table}), columns, repr(ProfilerActivity.CPU), str(torch.device("cpu"))]


@activity("plain")
def optimizing() -> Any:
    results = []
    for kind in (torch.optim.SGD, torch.optim.AdamW):
        model = net()
        optimizer = kind(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            two_readers(model(data())).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        results.append([list(model.parameters()), torch.amp.GradScaler("cpu").is_enabled()])
    return results


@activity("plain")
def random_numbers() -> Any:
    torch.manual_seed(7)
    first = torch.rand(3)
    with torch.random.fork_rng():
        torch.rand(9)
    second = torch.rand(3)
    generator = torch.Generator().manual_seed(3)
    return [first, second, torch.randperm(9, generator=generator), str(generator.device), torch.initial_seed()]


@activity("plain")
def many_devices() -> Any:
    return [nn.DataParallel(net())(data()), torch.cuda.is_available(), data().is_pinned(), data().is_cuda]


@activity("plain")
def storages() -> Any:
    x = data()
    untyped = x.untyped_storage()
    untyped[0] = 5
    other = torch.UntypedStorage(len(untyped))
    other.copy_(untyped)
    shared = torch.ones(3).share_memory_()
    return [untyped.nbytes(), len(untyped), list(other[:8]), other.data_ptr() != 0, shared.is_shared(),
            torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)), x.numpy().tolist(), repr(x[:, :2])]  # fmt: skip


@activity("plain")
def refusals() -> Any:
    """The same errors."""

    def error(attempt: Callable[[], Any]) -> str:
        try:
            attempt()
        except Exception as found:
            return f"{type(found).__name__}: {str(found).splitlines()[0]}"
        return "none"

    training = nn.Sequential(nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1))
    return [
        error(lambda: torch.ones(2).to("cuda")), error(lambda: torch.ones(2) @ torch.ones(3)), error(lambda: torch.device("x")),
        error(lambda: torch.ao.quantization.fuse_modules(training, [["0", "1"]])), error(lambda: torch.Generator("cuda")),
        error(lambda: torch.jit.load("nowhere.pt")), error(lambda: nn.Linear(2, 2).to(3.5)),
    ]  # fmt: skip


@activity("plain")
def attention() -> Any:
    torch.manual_seed(0)
    layer = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1).eval()
    with torch.inference_mode():
        return layer(data(6).reshape(2, 3, 4))


@activity("plain")
def quantizing() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(net(), {nn.Linear}, dtype=torch.qint8)(data())


# --- with several processes


class Squares(torch.utils.data.Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> torch.Tensor:
        x = torch.full((2,), float(index), requires_grad=True)
        (x * x).sum().backward()  # in a worker, after one in the parent
        assert x.grad is not None
        return x.grad


@activity("processes")
def loading_data() -> Any:
    two_readers(data().requires_grad_()).backward()
    batches = []
    for method in ("fork", "spawn"):
        loader = torch.utils.data.DataLoader(
            Squares(), 3, num_workers=1, multiprocessing_context=method, pin_memory=method == "fork"
        )
        batches.append(list(loader))
    return batches


def _reduce(rank: int, file: str, results: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(net())
    two_readers(model(data() + rank)).backward()
    total = torch.tensor([float(rank + 1)])
    torch.distributed.all_reduce(total)
    results[rank] = (total.item(), [p.grad.sum().item() for p in model.parameters() if p.grad is not None])
    torch.distributed.destroy_process_group()


@activity("processes")
def distributed() -> Any:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        file = os.path.join(os.environ["HARMLESS_FOLDER"], f"meeting-{os.getpid()}")
        torch.multiprocessing.start_processes(_reduce, (file, results), nprocs=2, start_method="fork")
        return sorted(results.items())


# --- PyTorch's own samples


@activity("opdb")
def samples() -> Any:
    from torch.testing._internal.common_methods_invocations import op_db

    chosen = ("nn.functional.layer_norm", "cumsum", "where", "scatter_add", "linalg.solve")
    results = []
    for name in chosen if ALL else chosen[::3]:  # inductor's C++ compiler again
        entry = next(o for o in op_db if o.name == name)
        torch.manual_seed(0)
        sample = next(iter(entry.sample_inputs("cpu", torch.float32, requires_grad=True)))

        def call(value: Any, op: Any = entry.op, args: Any = sample.args, kwargs: Any = sample.kwargs) -> Any:
            return op(value, *args, **kwargs)

        torch._dynamo.reset()
        results.append([name, torch.compile(call, backend="inductor")(sample.input)])
    return results


# ---


def _readable(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return [str(value.dtype), list(value.shape), str(value.device), value.requires_grad, _readable(value.tolist())]
    if isinstance(value, float):
        return f"{value:.5g}"
    if isinstance(value, dict):
        return {str(k): _readable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_readable(v) for v in value]
    return value if isinstance(value, (int, str, type(None))) else str(value)


def _use(mode: str) -> None:
    if mode == "device":
        x = data().to("vulkan").requires_grad_()
        two_readers(x).backward()
        net().to("vulkan")(data().vulkan()).sum().item()
    elif mode == "backend":
        x = data().requires_grad_()
        torch.compile(two_readers, backend="vulkan")(x).backward()
        torch._dynamo.reset()


def main(groups: str, mode: str) -> None:
    torch.set_num_threads(1)
    results: dict[str, Any] = {}
    _use(mode)
    for name, function in [item for group in groups.split(",") for item in GROUPS[group].items()]:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                results[name] = _readable(function())
            except Exception as error:
                results[name] = f"{type(error).__name__}: {error}"
        kept = [w for w in warned if w.category is not DeprecationWarning and "multi-threaded" not in str(w.message)]
        results[f"{name}, warnings"] = sorted({f"{w.category.__name__}: {w.message}"[:200] for w in kept})
    print(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
