"""The rules of the folders of tests, which CONTRIBUTING.md has in words."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("unit", "compiler", "runtime", "conformance", "integration", "apple")
WITHOUT_DEVICE = ("unit", "compiler")
NEEDS_DEVICE = {"as_gpu", "lapilli.autoload", "lapilli.backend", "lapilli.export", "lapilli.mobile", "lapilli.stream"}
"""Modules that are of no use without a driver, or load one when they are used."""

MODULES = sorted([*(ROOT / "tests").rglob("test_*.py"), *(ROOT / "tools" / "tests").rglob("test_*.py")])


def imported(file: Path) -> Iterator[str]:
    """Modules that a file imports anywhere in its text, `from a import b` as `a` and `a.b`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def with_support(file: Path) -> set[Path]:
    """The file and the modules of tests/support that it imports, directly or through others."""
    found, waiting = {file}, [file]
    while waiting:
        for name in imported(waiting.pop()):
            module = ROOT / "tests" / "support" / (name.replace(".", "/") + ".py")
            if module.exists() and module not in found:
                found.add(module)
                waiting.append(module)
    return found


def test_the_rules_see_the_tests() -> None:
    assert len(MODULES) > 50 and Path(__file__) in MODULES
    assert {"agreement.py", "plans.py"} <= {m.name for m in with_support(ROOT / "tests/compiler/test_schedule.py")}


def test_every_test_is_in_a_folder() -> None:
    outside = [m for m in (ROOT / "tests").rglob("test_*.py") if m.relative_to(ROOT / "tests").parts[0] not in FOLDERS]
    assert not outside, f"move these into one of {', '.join(FOLDERS)}: {outside}"


def test_names_of_modules_are_unique() -> None:
    """pytest imports test modules by their names alone."""
    names = [m.name for m in MODULES]
    assert sorted({n for n in names if names.count(n) > 1}) == []


@pytest.mark.parametrize("file", MODULES, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_test_module_imports_another(file: Path) -> None:
    """What tests share is in tests/support."""
    tests = {m.stem for m in MODULES} | {"conftest"}
    assert not [name for name in imported(file) if name.split(".")[-1] in tests or name.split(".")[0] in tests]


@pytest.mark.parametrize("folder", WITHOUT_DEVICE)
def test_these_need_no_device(folder: str) -> None:
    """`make check` and `make test` run them without a Vulkan driver. These signs of one are seen before that."""
    for file in sorted((ROOT / "tests" / folder).glob("test_*.py")):
        if file == Path(__file__):
            continue
        text = file.read_text(encoding="utf-8")
        assert not any(word in text for word in ("poor_device", "gpu_plans", '"vulkan"')), file
        for module in with_support(file):
            assert not NEEDS_DEVICE & set(imported(module)), module
