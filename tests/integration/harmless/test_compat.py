"""Beside other accelerators, in another PyTorch, and what `torch_compat` lists."""

from __future__ import annotations

import os
import re
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from installed import ROOT, run_installed

from lapilli import torch_compat
from lapilli.eager import neighbours

SOURCES = sorted((ROOT / "src" / "lapilli").rglob("*.py"))


def private_names(text: str) -> set[str]:
    """Names of PyTorch's with a part that begins with an underscore, outside of docstrings."""
    text = re.sub(r'"""(?:.|\n)*?"""', "", text)
    found = {"torch" + m[1] for m in re.finditer(r"\b_?torch((?:\.\w+)*?\.(?:_[a-z]|_C\b)[\w.]*)", text, re.IGNORECASE)}
    for module, several, one in re.findall(
        r"^\s*from (torch[\w.]*) import (?:\(([\w, \n]+)\)|([\w, ]+))", text, re.MULTILINE
    ):
        every = (
            f"{module}.{name.split(' as ')[0].strip()}" for name in re.split(r"[,\n]", several or one) if name.strip()
        )
        found |= {name for name in every if re.search(r"\._(?!C\.DispatchKey)", name)}
    return {name for name in found - {"torch._C"} if not name.startswith(("torch.ops.", "torch._C.DispatchKey"))}


def test_private_names_are_listed() -> None:
    used: dict[str, set[str]] = {}
    for file in SOURCES:
        if file.name != "torch_compat.py":
            for name in private_names(file.read_text()):
                used.setdefault(name.rstrip("."), set()).add(file.name)
    listed = [*torch_compat.PRIVATE, *torch_compat.PATCHES]
    missing = {n: files for n, files in used.items() if not any(f"{n}.".startswith(f"{entry}.") for entry in listed)}
    assert not missing, f"say in torch_compat.PRIVATE what for: {missing}"
    text = "".join(file.read_text() for file in SOURCES if file.name != "torch_compat.py")
    unused = {
        entry for entry in torch_compat.PRIVATE
        if not any(f"{n}.".startswith(f"{entry}.") for n in used) and entry not in text
    }  # fmt: skip
    assert not unused, unused


def test_only_replace_replaces() -> None:
    """No source assigns to an attribute of PyTorch's, but for what is given back in the same function."""
    pattern = re.compile(
        r"^\s*(?:_?torch|_jit|accelerator|UntypedStorage|Module|registration|optimizer)\.[\w.]+ = |"
        r"^\s*setattr\((?!found)|\.(?:_apply|__call__|__new__) = ", re.MULTILINE
    )  # fmt: skip
    found = {f"{file.name}: {m[0].strip()}" for file in SOURCES for m in pattern.finditer(file.read_text())}
    assert found == {
        "device_registration.py: registration._check_register_once =",  # for the time of one call
        "torch_compat.py: setattr(",
        "player.py: setattr(",  # of its own limits
    }, found


def test_every_patch_has_its_reason() -> None:
    for name, patch in torch_compat.PATCHES.items():
        assert (
            patch.when in ("device", "compile", "mobile", "transformers", "torchao") and patch.why and patch.others
        ), name
    with pytest.raises(KeyError):
        torch_compat.replace(torch.nn.Module, "forward", None)


# --- neighbours


@pytest.mark.parametrize(
    ("built", "nodes", "environment", "expected"),
    [
        (None, True, {}, False), ("cuda", True, {}, True), ("cuda", False, {}, False),
        ("cuda", True, {"CUDA_VISIBLE_DEVICES": ""}, False), ("cuda", True, {"CUDA_VISIBLE_DEVICES": "-1"}, False),
        ("cuda", True, {"CUDA_VISIBLE_DEVICES": "0,1"}, True), ("mps", False, {}, True), ("xpu", False, {}, True),
    ],
)  # fmt: skip
def test_neighbours(
    built: str | None, nodes: bool, environment: dict[str, str], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether there may be another accelerator is known without a driver."""
    found = None if built is None else torch.device(built)
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: found)
    monkeypatch.setattr(neighbours.os.path, "exists", lambda path: nodes)  # type: ignore[attr-defined]
    monkeypatch.setattr(neighbours.sys, "platform", "linux")  # type: ignore[attr-defined]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert neighbours.possible() == (found if expected else None)


def beside_cuda(script: str, folder: Path, **environment: str) -> str:
    """A script in a process where PyTorch seems to be built for CUDA, and CUDA to be available."""
    pretend = """
        import os
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        import warnings
        import torch
        real = torch._C._accelerator_getAccelerator
        torch._C._accelerator_getAccelerator = lambda: real() or torch.device("cuda")
        torch.cuda.is_available = lambda: True
        exists = os.path.exists
        os.path.exists = lambda path: path == "/dev/nvidiactl" or exists(path)
        from lapilli import autoload
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            autoload.register()
    """
    return run_installed(textwrap.dedent(pretend) + textwrap.dedent(script), folder, **environment)  # type: ignore[arg-type]


def test_not_announced_beside_cuda(tmp_path: Path) -> None:
    beside_cuda(
        """
        assert not warned and not hasattr(torch, "vulkan") and real() is None
        import lapilli.eager
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            lapilli.eager.enable()
            lapilli.eager.enable()
        (said,) = warned
        assert "backward() on CUDA tensors fails from here on" in str(said.message) and said.category is RuntimeWarning
        assert torch.ones(2, device="vulkan").sum().item() == 2
        """,
        tmp_path,
    )


def test_announced_beside_cuda_where_the_environment_says_so(tmp_path: Path) -> None:
    beside_cuda(
        """
        assert len(warned) == 1 and "backward() on CUDA tensors fails" in str(warned[0].message)
        assert torch.accelerator.current_accelerator().type == "vulkan"
        """,
        tmp_path,
        LAPILLI_EAGER="1",
    )


def test_steps_back_for_other_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package's device finds its place free, whichever is loaded first."""
    info = tmp_path / "other" / "other-0.dist-info"
    info.mkdir(parents=True)
    (info / "entry_points.txt").write_text("[torch.backends]\nother = other_device:register\n")
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 0\n")
    (tmp_path / "other" / "other_device.py").write_text(
        "import torch\n\n\ndef register():\n    torch.utils.rename_privateuse1_backend('other')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"), prepend=os.pathsep)
    run_installed(
        """
        import warnings
        warnings.simplefilter("error")
        import torch
        assert torch._C._get_privateuse1_backend_name() == "other" and not hasattr(torch, "vulkan")
        """,
        tmp_path,
    )


# --- another PyTorch


@pytest.mark.parametrize(
    ("version", "good"),
    [
        ("2.13.0", True), ("2.13.1+cpu", True), ("2.14.0", False), ("2.14.0.dev20260801", False), ("2.12.1", False),
        ("3.0", False), ("1.13.0", False),
    ],
)  # fmt: skip
def test_versions(version: str, good: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    monkeypatch.delenv("LAPILLI_ANY_TORCH", raising=False)
    assert torch_compat.supported() is good
    monkeypatch.setenv("LAPILLI_ANY_TORCH", "1")
    assert torch_compat.supported()


def test_versions_are_those_of_the_package() -> None:
    (found,) = re.findall(r"torch>=(\d+)\.(\d+),<(\d+)\.(\d+)", _declared())
    assert tuple(map(int, found)) == (*torch_compat.OLDEST, *torch_compat.BEYOND)


def _declared() -> str:
    return next(line for line in (ROOT / "pyproject.toml").read_text().splitlines() if line.startswith("compile = "))


def test_another_torch(tmp_path: Path) -> None:
    """Nothing at import; one warning at first use; what can go on goes on in PyTorch."""
    run_installed(
        """
        import os, warnings
        os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
        import torch
        torch.__version__ = "2.14.0"
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            from lapilli import autoload, mobile
            autoload.register()
            mobile.register()
            x = torch.ones(3, requires_grad=True)
            (x * x + x).sum().backward()
            assert torch.compile(lambda v: v + 1, backend="eager")(x).tolist() == [2, 2, 2]

        def warned(use):
            with warnings.catch_warnings(record=True) as found:
                warnings.simplefilter("always")
                for _ in range(2):
                    result = use()
            return result, [str(w.message) for w in found if "torch 2.14.0" in str(w.message)]

        assert warned(torch.is_vulkan_available)[0] is False
        for use in (lambda: torch.ones(2, device="vulkan"), lambda: torch.ones(2).to("vulkan")):
            try:
                use()
            except Exception as error:
                assert "made for torch>=2.13,<2.14" in str(error) and "LAPILLI_ANY_TORCH=1" in str(error), error
            else:
                raise AssertionError("it went through")
        result, said = warned(lambda: torch.compile(lambda v: v * 3, backend="vulkan")(x))
        assert result.tolist() == [3, 3, 3] and len(said) == 1, said
        import lapilli
        layer = torch.nn.Linear(3, 2).eval()
        program, said = warned(lambda: lapilli.compile(layer, (torch.ones(1, 3),)))
        assert len(said) == 1, said
        from torch.utils.mobile_optimizer import optimize_for_mobile
        def fails():
            try:
                optimize_for_mobile(torch.jit.script(layer))
            except Exception as error:
                return error
        result, said = warned(fails)
        assert len(said) == 1 and result is not None, (said, result)
        """,
        tmp_path,
    )


@pytest.mark.parametrize(
    "first",
    [
        "import lapilli.eager; lapilli.eager.enable()",
        "from lapilli.eager import neighbours",
        "from lapilli import autoload; autoload.register()",
        "import lapilli.mobile; lapilli.mobile.install()",
        "import lapilli.mobile.fuse",
    ],
)
def test_modules_may_be_imported_before_torch(first: str, tmp_path: Path) -> None:
    """`import torch` imports some of them, wherever it is met, and finds them whole."""
    run_installed(
        f"""
        import warnings
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            {first}
            import torch
        assert torch.device("vulkan").type == "vulkan" and callable(torch.is_vulkan_available)
        assert "vulkan" in torch.vulkan.__name__ and torch.ops.lapilli_prepack.run
        """,
        tmp_path,
    )


# --- optimize_for_mobile


def test_mobile_optimizer_is_replaced_where_it_is_imported(tmp_path: Path) -> None:
    run_installed(
        """
        import sys, torch
        assert "torch.utils.mobile_optimizer" not in sys.modules
        stock = torch.ao.quantization.fuse_modules
        assert not hasattr(stock, "__wrapped__") and "lapilli" not in stock.__code__.co_filename
        before = len(sys.meta_path)
        from torch.utils import mobile_optimizer
        import importlib, inspect, pickle
        assert len(sys.meta_path) == before - 1
        function = mobile_optimizer.optimize_for_mobile
        assert list(inspect.signature(function).parameters) == [
            "script_module", "optimization_blocklist", "preserved_methods", "backend"
        ]
        assert function.__module__ == "torch.utils.mobile_optimizer" and "Optimize a torch script module" in function.__doc__
        assert pickle.loads(pickle.dumps(function)) is function
        assert type(mobile_optimizer.__spec__.loader).__name__ == "SourceFileLoader"
        assert "exec_module" not in vars(mobile_optimizer.__spec__.loader)
        assert "def optimize_for_mobile" in inspect.getsource(function)
        """,
        tmp_path,
    )


def test_conv_guards_of_others_stay(tmp_path: Path) -> None:
    """`_select_conv_backend` makes its guards unless we trace."""
    import lapilli.backend  # noqa: F401
    from lapilli.backend import placement

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not placement._traces_for_us()
        with placement.compiling():
            assert placement._traces_for_us()
        assert not placement._traces_for_us()


def test_moving_between_others_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ties are kept where the device is concerned, and come apart where PyTorch lets them."""
    torch.vulkan.current_device()  # type: ignore[attr-defined]  # names the device: what must be replaced is
    layer: Any = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    layer[1].weight = layer[0].weight
    empty = layer.to("meta")
    assert empty[0].weight is not empty[1].weight
