"""Whether native/src keeps its layers: what a folder may include, no circle among headers, and Vulkan in hal/vulkan alone.

    python tools/native_layers.py [FOLDER]

A folder includes itself and those that its line below names. Files are included by their path from native/src.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

LAYERS = {
    "base": set(),
    "format": {"base"},
    "hal": {"base", "format"},
    "hal/vulkan": {"base", "format", "hal"},
    "hal/null": {"base", "format", "hal"},
    "core": {"base", "format", "hal"},
    "api": {"base", "format", "hal", "hal/vulkan", "core"},
}
OUTSIDE = {"lapilli.h", "program_generated.h"}  # the C ABI, and what flatc makes of the schema
VULKAN = re.compile(r"\bVk[A-Z]|\bVK_|\bvk[A-Z]|\bvulkan_api\.h")
INCLUDE = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)


def problems(root: Path) -> list[str]:
    """What is wrong, a line for each."""
    files = sorted(p for p in root.rglob("*") if p.suffix in (".cpp", ".h"))
    includes = {str(p.relative_to(root)): INCLUDE.findall(p.read_text()) for p in files}
    found = [text for path in files for text in _of_file(path, root, includes)]
    return found + _circles({name: named for name, named in includes.items() if name.endswith(".h")})


def _of_file(path: Path, root: Path, includes: dict[str, list[str]]) -> list[str]:
    name = str(path.relative_to(root))
    layer = str(Path(name).parent)
    if layer not in LAYERS:
        return [f"{name}: {layer} is no layer; there are {', '.join(LAYERS)}"]
    found = []
    for included in includes[name]:
        if included in OUTSIDE or (included == "vulkan_api.h" and layer == "hal/vulkan"):
            continue
        if included not in includes:
            found.append(f'{name}: "{included}" is no path of a file from {root.name}')
        elif (of := str(Path(included).parent)) != layer and of not in LAYERS[layer]:
            found.append(
                f"{name}: {layer} may not include {included}; it may include {', '.join(sorted(LAYERS[layer])) or 'nothing else'}"
            )
    if layer != "hal/vulkan":
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if name_of_vulkan := VULKAN.search(line):
                found.append(f"{name}:{number}: {name_of_vulkan[0]}... belongs to hal/vulkan")
    return found


def _circles(includes: dict[str, list[str]]) -> list[str]:
    done: set[str] = set()

    def walk(name: str, above: tuple[str, ...]) -> list[str]:
        if name in above:
            return [f"a circle: {' includes '.join((*above[above.index(name) :], name))}"]
        if name in done or name not in includes:
            return []
        found = [text for other in includes[name] for text in walk(other, (*above, name))]
        done.add(name)
        return found

    return [text for name in includes for text in walk(name, ())]


def main(arguments: list[str]) -> int:
    root = Path(arguments[0]) if arguments else Path(__file__).parents[1] / "native" / "src"
    found = problems(root)
    print("\n".join(found) or "native/src keeps its layers", file=sys.stderr if found else sys.stdout)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
