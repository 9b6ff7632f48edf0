"""Devices as poor as phones, and a driver that computes wrong: by a layer over lavapipe (tests/support/phones.py)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import phones
import pytest

pytestmark = [
    pytest.mark.skipif(not (phones.LAYER / "liblimits_layer.so").exists(), reason="make native builds the layer"),
    pytest.mark.skipif("lvp" not in os.environ.get("VK_DRIVER_FILES", ""), reason="the phones are made of lavapipe"),
]

MODEL = """
import warnings, numpy as np, torch
from torch import nn
import lapilli

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 13, 3, 2), nn.BatchNorm2d(13), nn.Linear(13, 37)
        self.attention = nn.MultiheadAttention(36, 3, batch_first=True)

    def forward(self, x, y):
        x = self.head(self.norm(self.conv(x)).relu().mean((2, 3))).softmax(-1)
        return x, self.attention(y, y, y, need_weights=False)[0], y.argmax(-1)

torch.manual_seed(0)
model, inputs = Net().eval(), (torch.randn(2, 3, 33, 31), torch.randn(2, 17, 36))
wanted = model(*inputs)

def error(program):
    found = program(*inputs)
    assert torch.equal(found[2], wanted[2])
    return max(float((a - b).norm() / b.norm()) for a, b in zip(found[:2], wanted[:2]))
"""


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the tests here: kernels are compiled once, and verdicts are theirs."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A folder with the model's file, what goes in and what is to come out."""
    folder = tmp_path_factory.mktemp("saved")
    run("mali", SAVE.replace("{folder}", str(folder)), folder, cache)
    return folder


def run(phone: str, code: str, tmp_path: Path, cache: Path, more: str = "") -> str:
    done = run_command([sys.executable, "-c", MODEL + code], phone, tmp_path, cache, more)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def run_command(
    command: list[str], phone: str, tmp_path: Path, cache: Path, more: str
) -> subprocess.CompletedProcess[str]:
    log = tmp_path / "validation.log"
    support = str(Path(phones.__file__).parent)
    environment = {
        **os.environ, **phones.environment(phone, more), "LAPILLI_CACHE_DIR": str(cache),
        "LAPILLI_VALIDATION_LOG": str(log), "PYTHONPATH": support,
    }  # fmt: skip
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not log.exists(), log.read_text()[:3000]
    return done


def test_validation_sees_the_limits_of_the_layer(tmp_path: Path) -> None:
    """Layers go by what is below them."""
    environment = {**os.environ, **phones.environment("minimum"), "VK_LOADER_DEBUG": "layer"}
    code = "import lapilli; print(lapilli.devices()[0].name)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.stdout == "Minimum\n", done.stderr[-2000:]
    stack = done.stderr.split("vkCreateInstance layer callstack setup to:")[-1]
    assert 0 < stack.index("VK_LAYER_KHRONOS_validation") < stack.index("VK_LAYER_LAPILLI_limits"), stack


@pytest.mark.part(4)
@pytest.mark.parametrize("phone", ["adreno", "powervr", "minimum", "tiny"])
def test_a_model_runs_on_each(phone: str, tmp_path: Path, cache: Path) -> None:
    assert run(phone, "print(error(lapilli.compile(model, inputs)) < 1e-5)", tmp_path, cache) == "True\n"


def test_the_least_device_binds_four_buffers(tmp_path: Path, cache: Path) -> None:
    """Kernels of more are refused, and there is a plan without them: for files, and for the device itself."""
    code = """
class Sum(nn.Module):
    forward = staticmethod(lambda a, b, c: a + b * c)
class Long(nn.Module):
    forward = staticmethod(lambda a, b, c, d: a + b * c - d)
x = tuple(torch.randn(5) for _ in range(4))
for model, given in ((Sum(), x[:3]), (Long(), x)):
    program = lapilli.compile(model, given)
    assert torch.allclose(program(*given), model(*given))
    print(program.plan)
y = [t.to("vulkan") for t in x]
assert torch.allclose(torch.compile(Long(), backend="vulkan")(*y).cpu(), Long()(*x))
assert torch.allclose(torch.nn.functional.batch_norm(y[0][:, None], *(t[:1].abs() for t in y[:2]), y[2][:1], y[3][:1]).cpu(),
    torch.nn.functional.batch_norm(x[0][:, None], *(t[:1].abs() for t in x[:2]), x[2][:1], x[3][:1]), atol=1e-5)
try:
    lapilli.compile(Long(), x, target="any-fp32")
except lapilli.errors.NoDeviceError as e:
    print(e)
"""
    printed = run("minimum", code, tmp_path, cache).splitlines()
    assert printed[1] == "any-fp32-few"
    assert "needs 5 storage buffers in a kernel, and the device allows 4" in printed[2]


def test_programs_for_metal_keep_to_what_moltenvk_says(tmp_path: Path, cache: Path) -> None:
    """Under the validation layers, which see the portability subset; halves, so that results are rounded."""
    code = """
program = lapilli.compile(model, inputs, target="metal")
print(program.plan, 1e-5 < error(program) < 2e-3)
print(lapilli.compile(model, inputs, target="metal", precision="fp32").plan)
"""
    assert run("apple", code, tmp_path, cache).split() == ["gpu-fp16", "True", "gpu-fp32"]


def test_the_portability_subset_is_enabled(tmp_path: Path, cache: Path) -> None:
    """The layer makes no device for who leaves out what it demands: here an extension that nobody knows."""
    code = """
try:
    lapilli.compile(model, inputs, target="metal")
except lapilli.LapilliError as refused:
    print(refused)
"""
    refused = run("apple", code, tmp_path, cache, "+VK_unknown_demand")
    assert "vkCreateDevice failed with Vulkan result -7" in refused  # VK_ERROR_EXTENSION_NOT_PRESENT


def test_a_driver_of_the_portability_subset_is_found(tmp_path: Path) -> None:
    """The loader hides such drivers from applications that do not ask for them."""
    manifest = json.loads(Path(os.environ["VK_DRIVER_FILES"]).read_text())
    manifest["ICD"]["is_portability_driver"] = True
    (tmp_path / "moltenvk.json").write_text(json.dumps(manifest))
    driver = str(tmp_path / "moltenvk.json")
    environment = {**os.environ, "VK_DRIVER_FILES": driver, "VK_ICD_FILENAMES": driver}
    code = "import lapilli; print(len(lapilli.devices()))"
    assert subprocess.check_output([sys.executable, "-c", code], env=environment, text=True) == "1\n"


FIRST_RUN = """
import warnings, numpy as np, lapilli

inputs = [np.load(f"{folder}/in{i}.npy") for i in range(2)]
wanted = [np.load(f"{folder}/want{i}.npy") for i in range(3)]

def error(program):
    found = [np.asarray(y) for y in program(*inputs)]
    assert np.array_equal(found[2], wanted[2])
    return max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(found[:2], wanted[:2]))

for _ in range(2):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        p = lapilli.load("{folder}/m.lap", verify="first-run")
    print(p.plan, error(p) < 1e-5, len(seen), *(str(w.message) for w in seen))
print(error(lapilli.load("{folder}/m.lap")) < 1e-5)
"""


def first_run(saved: Path, tmp_path: Path, cache: Path, more: str = "") -> list[str]:
    command = [sys.executable, "-c", FIRST_RUN.replace("{folder}", str(saved))]
    done = run_command(command, "mali", tmp_path, cache, more)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def test_a_right_driver_keeps_its_plan(saved: Path, tmp_path: Path, cache: Path) -> None:
    verdicts = cache / "verdicts"
    before = set(verdicts.iterdir()) if verdicts.exists() else set()
    printed = first_run(saved, tmp_path, cache)
    assert printed == ["gpu-fp32 True 0", "gpu-fp32 True 0", "True"]
    assert len(set(verdicts.iterdir()) - before) == 1


WRONG = "wrong=add wrong_with_barriers=1 driver_info=wrong"
SAVE = """
lapilli.compile(model, inputs).save("{folder}/m.lap")
for i, given in enumerate(inputs):
    np.save(f"{folder}/in{i}.npy", given.numpy())
for i, result in enumerate(wanted):
    np.save(f"{folder}/want{i}.npy", result.detach().numpy())
"""
JAVA = """
import org.lapilli.*;
import org.lapilli.Module; // java.lang has one, too

class Check {
  public static void main(String[] given) {
    for (Verify verify : Verify.values())
      try (Module module = Module.load(given[0], Device.VULKAN, verify)) {
        Tensor x = Tensor.fromBlob(new float[2 * 3 * 33 * 31], new long[] {2, 3, 33, 31});
        Tensor y = Tensor.fromBlob(new float[2 * 17 * 36], new long[] {2, 17, 36});
        float sum = 0; // of probabilities
        for (float p : module.forward(IValue.from(x), IValue.from(y)).toTuple()[0].toTensor().getDataAsFloatArray()) sum += p;
        System.out.println(verify + " " + (Math.abs(sum - 2) < 1e-3) + " " + module.warning());
      }
  }
}
"""
PLAYER = Path(__file__).parents[2] / "build" / "package"
CLASSES = Path(__file__).parents[2] / "build" / "android" / "host" / "lapilli"


def test_a_driver_that_miscompiles_work_groups_is_found(saved: Path, tmp_path: Path, cache: Path) -> None:
    """Without the check its results are wrong; with it the plan without shared memory is taken, now and from the cache."""
    printed = first_run(saved, tmp_path, cache, WRONG)
    assert printed[2] == "False"
    for line in printed[:2]:
        assert line.startswith("any-fp32 True 1 Like Mali (llvmpipe wrong)")
        assert "wrong, with a relative error of" in line
        assert "the slower plan any-fp32 is used instead" in line


@pytest.mark.skipif(not (PLAYER / "apps" / "lapilli-run").exists(), reason="make native builds it")
def test_it_is_found_from_cpp(saved: Path, tmp_path: Path, cache: Path) -> None:
    """With numbers of torch: wrong without the check, right with it, and right again when the verdict is known."""
    command = [str(PLAYER / "apps" / "lapilli-run"), str(saved / "m.lap")]
    command += [f"--input={saved}/in{i}.npy" for i in range(2)] + [f"--output={tmp_path}/out{i}.npy" for i in range(3)]
    for verify in ([], ["--verify=first-run"], ["--verify=first-run"]):
        done = run_command(command + verify, "mali", tmp_path, cache, WRONG)
        assert done.returncode == 0, done.stderr
        found, wanted = np.load(tmp_path / "out0.npy"), np.load(saved / "want0.npy")
        assert (np.linalg.norm(found - wanted) < 1e-5 * np.linalg.norm(wanted)) == bool(verify)
        assert ("the slower plan any-fp32 is used instead" in done.stderr) == bool(verify)
    refused = run_command([*command, "--verify=all"], "mali", tmp_path, cache, "")
    assert refused.returncode == 2 and '--verify is first-run; "all" was given' in refused.stderr


@pytest.mark.skipif(not CLASSES.exists() or shutil.which("java") is None, reason="make android builds the classes")
def test_it_is_found_from_java(saved: Path, tmp_path: Path, cache: Path) -> None:
    (tmp_path / "Check.java").write_text(JAVA)
    library = f"-Dorg.lapilli.library={PLAYER / 'jni' / 'liblapilli.so'}"
    command = ["java", library, "-cp", str(CLASSES), str(tmp_path / "Check.java"), str(saved / "m.lap")]
    done = run_command(command, "mali", tmp_path, cache, WRONG)
    assert done.returncode == 0, done.stderr
    unchecked, checked = done.stdout.splitlines()
    assert unchecked == "STRUCTURE false "
    assert checked.startswith("FIRST_RUN true Like Mali (llvmpipe wrong) computes wrong")
