"""What Lapilli does to CUDA in the same Python, on a machine that has CUDA and has Lapilli installed:

    python tests/integration/harmless/on_gpu.py

Every line runs in a process of its own. First stock CUDA activities, without Lapilli (loading of device backends is off), with it
installed and not used, after `torch.compile(backend="vulkan")` was used, and after the eager device was asked for. Then ways
by which a device from outside could stand beside CUDA, with plain PyTorch and no Lapilli. Needs nothing but torch, and Lapilli
for the lines that say so."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

ACTIVITIES = {
    "training": """
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8)).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        x = torch.rand(32, 8).cuda()
        losses = []
        for _ in range(20):
            optimizer.zero_grad()
            y = model(x)
            loss = ((y + y.sin()) ** 2).mean()  # y has two readers
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0], losses
    """,
    "graphs": """
        weight = torch.rand(8, 8, device="cuda", requires_grad=True)
        x = torch.rand(4, 8, device="cuda")
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                weight.grad = None
                y = x @ weight
                (y + y * y).sum().backward()
        torch.cuda.current_stream().wait_stream(side)
        weight.grad = None
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = x @ weight
            (y + y * y).sum().backward()
        x.copy_(torch.rand(4, 8))
        graph.replay()
        expected = x.T @ (1 + 2 * (x @ weight))
        torch.testing.assert_close(weight.grad, expected.detach(), rtol=1e-3, atol=1e-3)
    """,
    "streams": """
        x = torch.rand(256, 256, device="cuda", requires_grad=True)
        streams = [torch.cuda.Stream() for _ in range(3)]
        parts = []
        for stream in streams:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                y = x * 2
                parts.append(y + y.sin())
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)
        sum(parts).sum().backward()
        torch.testing.assert_close(x.grad, 3 * (2 + 2 * (2 * x).cos()).detach())
        event = torch.cuda.Event()
        event.record()
        event.synchronize()
        torch.cuda.synchronize()
        assert torch.accelerator.current_accelerator().type == "cuda"
        torch.accelerator.synchronize()
        # a torch.cuda.Stream equals none of another class
        assert torch.accelerator.current_stream().stream_id == torch.cuda.current_stream().stream_id
    """,
    "amp": """
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        scaler = torch.amp.GradScaler("cuda")
        for _ in range(5):
            with torch.autocast("cuda", dtype=torch.float16):
                y = model(torch.rand(16, 64, device="cuda"))
                loss = (y * y + y).mean()
            assert y.dtype == torch.float16
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
    """,
    "inductor": """
        model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 8)).cuda()

        def loss_of(x):
            y = model(x)
            return (y * y + y.sin()).mean()

        x = torch.rand(32, 8, device="cuda")
        expected = torch.autograd.grad(loss_of(x), list(model.parameters()))
        compiled = torch.compile(loss_of)
        for _ in range(2):
            got = torch.autograd.grad(compiled(x), list(model.parameters()))
        torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)
    """,
    "loading": """
        data = torch.utils.data.TensorDataset(torch.arange(64.0).reshape(16, 4))
        total = 0.0
        for (batch,) in torch.utils.data.DataLoader(data, 4, num_workers=2, pin_memory=True):
            assert batch.is_pinned()
            total += batch.to("cuda", non_blocking=True).sum().item()
        assert total == 64 * 63 / 2, total
    """,
    "checkpointing": """
        from torch.utils.checkpoint import checkpoint

        layer = torch.nn.Linear(8, 8).cuda()
        x = torch.rand(4, 8, device="cuda", requires_grad=True)
        for reentrant in (True, False):
            y = checkpoint(lambda v: layer(v).sin() + v, x, use_reentrant=reentrant)
            (y + y * y).sum().backward()
    """,
    "profiler": """
        from torch.profiler import ProfilerActivity, profile

        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as report:
            (torch.rand(64, 64, device="cuda") @ torch.rand(64, 64, device="cuda")).sum().item()
        assert "CUDA" in report.key_averages().table()
    """,
}

USES = {
    "torch.compile by vulkan": """
        layer = torch.nn.Linear(8, 8)
        compiled = torch.compile(layer, backend="vulkan")
        x = torch.rand(4, 8, requires_grad=True)
        compiled(x).sin().sum().backward()
        torch.testing.assert_close(x.grad, torch.autograd.grad(layer(x).sin().sum(), x)[0], rtol=1e-3, atol=1e-3)
    """,
    "lapilli.compile": """
        import lapilli

        layer = torch.nn.Linear(8, 8).eval()
        x = torch.rand(4, 8)
        torch.testing.assert_close(lapilli.compile(layer, (x,))(x), layer(x).detach(), rtol=1e-3, atol=1e-3)
    """,
    "eager": """
        x = torch.rand(4, 8).to("vulkan").requires_grad_()
        y = x * 2
        (y + y.sin()).sum().backward()
        torch.testing.assert_close(x.grad.cpu(), (2 + 2 * (2 * x.detach().cpu()).cos()), rtol=1e-4, atol=1e-4)
        print(torch.accelerator.current_accelerator())
    """,
}

# A device without data, which is enough for the engine of autograd to run over its tensors.
TOY = """
        class Hook(torch._C._acc.PrivateUse1Hooks):
            def is_available(self): return HOOKED
            def has_primary_context(self, index): return HOOKED
            def is_built(self): return HOOKED

        class Guard(torch._C._acc.DeviceGuard):
            def type_(self): return torch._C._autograd.DeviceType.PrivateUse1

        def toy(value):
            return torch._C._acc.create_empty_tensor(list(value.shape), value.dtype)

        def kernel(op, *args, **kwargs):
            meta = lambda v: torch.empty(v.shape, dtype=v.dtype, device="meta") if isinstance(v, torch.Tensor) else v
            given = [meta(a) for a in args]
            named = {k: meta(v) for k, v in kwargs.items()}
            if "device" in named:
                named["device"] = torch.device("meta")
            return torch.utils._pytree.tree_map_only(torch.Tensor, toy, op(*given, **named))

        hook, guard = Hook(), Guard()
        library = torch.library.Library("_", "IMPL")
        library.fallback(kernel, "PrivateUse1")

        def train_toy():
            x = toy(torch.empty(3, device="meta")).requires_grad_()
            y = x * 2
            (y + y.sin()).sum().backward(toy(torch.empty((), device="meta")))
            assert x.grad.shape == (3,)
"""

NAME = "torch._C._rename_privateuse1_backend('toy')\n"
HOOK = "torch._C._acc.register_python_privateuseone_hook(hook)\n"
GUARD = "torch._C._acc.register_python_privateuseone_device_guard(guard)\n"
TRAIN_TOY = "train_toy()\n"


def joined(*parts: str) -> str:
    """Blocks of code with indentations of their own, as one."""
    return "\n".join(map(textwrap.dedent, parts))


WAYS = {
    "a guard and hooks, no name": joined("HOOKED = True", TOY, HOOK, GUARD),
    "a name alone": NAME,
    "a name and a guard": joined("HOOKED = True", TOY, NAME, GUARD),
    "a name, a guard, and hooks that say: not built": joined("HOOKED = False", TOY, HOOK, GUARD, NAME),
    "a name, a guard and hooks": joined("HOOKED = True", TOY, HOOK, GUARD, NAME),
}


def run(setup: str, activity: str, loaded: bool, **environment: str) -> tuple[bool, str]:
    """Whether a process came to its end, and the last lines that it wrote if not."""
    script = joined("import torch", "torch.manual_seed(0)", setup, activity, "print('done')")
    variables = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(loaded)), "LAPILLI_ANY_TORCH": "1"} | environment
    try:
        done = subprocess.run(
            [sys.executable, "-c", script], env=variables, capture_output=True, text=True, timeout=240, check=False
        )
    except subprocess.TimeoutExpired:
        return False, "no end within 240 s"
    good = done.returncode == 0 and done.stdout.endswith("done\n")
    said = done.stdout.removesuffix("done\n").strip() if good else ""
    warned = [line for line in done.stderr.splitlines() if "lapilli" in line.lower() or "vulkan" in line.lower()]
    last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
    return good, " | ".join([*filter(None, [said]), *(warned[-1:] if good else last)])[:300]


def show(what: str, good: bool, said: str) -> None:
    print(f"{'PASS' if good else 'FAIL'}  {what}{': ' + said if said else ''}", flush=True)


def import_seconds(loaded: bool) -> float:
    code = "import time; a = time.perf_counter(); import torch; print(time.perf_counter() - a)"
    variables = os.environ | {"TORCH_DEVICE_BACKEND_AUTOLOAD": str(int(loaded))}
    return float(subprocess.check_output([sys.executable, "-c", code], env=variables, text=True))


def lines(quick: bool) -> Iterator[tuple[str, str, str, bool, dict[str, str]]]:
    """What is tried: a title, then the arguments of `run`."""
    for name, activity in ACTIVITIES.items():
        yield f"{name}, without Lapilli", "", activity, False, {}
        yield f"{name}, Lapilli installed", "", activity, True, {}
    train = ACTIVITIES["training"]
    for way, setup in WAYS.items():
        yield f"CUDA trains beside {way}", setup, train, False, {}
        yield f"CUDA trains before and after {way}", joined(train, setup), train, False, {}
        if "guard" in way:
            yield f"the toy trains: {way}", joined(setup, TRAIN_TOY), "", False, {}
            yield f"the toy trains after CUDA did: {way}", joined(train, setup, TRAIN_TOY), "", False, {}
    for use, code in USES.items():
        asked = {"LAPILLI_EAGER": "1" if use == "eager" else ""}
        yield use, "", code, True, asked
        yield f"{use}, after CUDA trained", train, code, True, asked
        for name, activity in ACTIVITIES.items():
            if not quick or name == "training":
                yield f"{name}, after {use}", code, activity, True, asked
    yield "eager by lapilli.eager.enable()", "import lapilli.eager; lapilli.eager.enable()\n", USES["eager"], True, {}


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="after each use, CUDA's training only")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name(0)}, {time.strftime('%Y-%m-%d')}")
    with ThreadPoolExecutor(given.jobs) as pool:
        tried = [(title, pool.submit(run, *args, **asked)) for title, *args, asked in lines(given.quick)]  # type: ignore[arg-type]
        for title, done in tried:
            show(title, *done.result())
    pairs = [(import_seconds(False), import_seconds(True)) for _ in range(11)]
    extra = sorted(with_it - without for without, with_it in pairs)[len(pairs) // 2]
    show("import torch", extra < 0.005, f"{extra * 1000:+.1f} ms, the median of {len(pairs)} pairs")


if __name__ == "__main__":
    main()
