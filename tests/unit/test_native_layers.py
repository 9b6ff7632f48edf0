"""The check of the player's layers, and what it finds where they are broken."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location("native_layers", ROOT / "tools" / "native_layers.py")
assert _spec is not None and _spec.loader is not None
layers = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(layers)


def test_the_player_keeps_them() -> None:
    assert layers.problems(ROOT / "native" / "src") == []


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        ({"format/a.h": '#include "core/b.h"', "core/b.h": ""}, "format may not include core/b.h"),
        ({"core/a.cpp": '#include "hal/vulkan/b.h"', "hal/vulkan/b.h": ""}, "core may not include hal/vulkan/b.h"),
        ({"hal/a.h": '#include "hal/vulkan/b.h"', "hal/vulkan/b.h": ""}, "hal may not include hal/vulkan/b.h"),
        ({"core/a.h": '#include "b.h"', "core/b.h": ""}, '"b.h" is no path'),
        (
            {"core/a.h": '#include "core/b.h"', "core/b.h": '#include "core/a.h"'},
            "a circle: core/a.h includes core/b.h includes core",
        ),
        ({"core/a.cpp": "VkBuffer buffer;"}, "core/a.cpp:1: VkB... belongs to hal/vulkan"),
        ({"hal/a.h": "\nconstexpr int x = VK_SUCCESS;"}, "hal/a.h:2: VK_... belongs to hal/vulkan"),
        ({"api/a.cpp": '#include "vulkan_api.h"'}, '"vulkan_api.h" is no path'),
        ({"a.cpp": ""}, ". is no layer"),
    ],
)
def test_what_is_found(tmp_path: Path, files: dict[str, str], problem: str) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = layers.problems(tmp_path)
    assert any(problem in line for line in found), found


def test_what_is_allowed(tmp_path: Path) -> None:
    files = {
        "api/a.cpp": '#include "core/b.h"\n#include "lapilli.h"',
        "core/b.h": '#include "hal/c.h"',
        "hal/c.h": "// Vulkan, in words",
    }
    files |= {"hal/vulkan/d.cpp": '#include "hal/c.h"\n#include "vulkan_api.h"\nVkBuffer buffer;'}
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert layers.problems(tmp_path) == []
