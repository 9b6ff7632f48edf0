"""Where the bytes of a program file are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PlanSize:
    """What a plan needs of the file, in bytes; `only_*`: what no other plan uses, which dropping it saves."""

    name: str
    kernels: int
    constants: int
    only_kernels: int
    only_constants: int


@dataclass(frozen=True)
class FileSizes:
    """Bytes of a program file: the parts add up to `total`. metadata and tables are the structure. rest: header, signature, what
    lies between parts, and what nothing refers to."""

    total: int
    constants: int
    kernels: int
    metadata: int
    tables: int
    rest: int
    plans: tuple[PlanSize, ...]

    @staticmethod
    def of(node: Mapping[str, Any], total: int, structure: int) -> FileSizes:
        """node: what the player says of the file (`lapilli_describe`). total, structure: bytes of the file and of its tables."""
        constants = [(c["offset"], c["offset"] + c["size"]) for c in node["constants"]]
        kernels = [(k["code_offset"], k["code_offset"] + k["code_size"]) for k in node["kernels"]]
        metadata = sum(len(str(k).encode()) + len(str(v).encode()) for k, v in node["metadata"].items())
        sizes = _covered(constants), _covered(kernels)
        used: dict[str, tuple[set[int], set[int]]] = {}
        for method in node["methods"]:
            for plan in method["plans"]:
                in_kernels, in_constants = used.setdefault(plan["name"], (set(), set()))
                in_kernels.update(d["kernel"] for d in (*plan["load"], *plan["run"]))
                in_constants.update(b["index"] for b in plan["buffers"] if b["kind"] in ("constant", "load_constant"))
        kept = {s["constant"] for s in node["states"] if s["constant"] is not None}
        plans = []
        for name, (in_kernels, in_constants) in used.items():
            others = [uses for other, uses in used.items() if other != name]
            plans.append(
                PlanSize(
                    name,
                    _covered(kernels[i] for i in in_kernels),
                    _covered(constants[i] for i in in_constants),
                    sizes[1] - _covered(kernels[i] for i in set().union(*(k for k, _ in others)))
                    if others
                    else sizes[1],
                    _covered(constants[i] for i in in_constants | set().union(kept, *(c for _, c in others)))
                    - _covered(constants[i] for i in set().union(kept, *(c for _, c in others))),
                )
            )
        return FileSizes(total, *sizes, metadata, structure - metadata, total - structure - sum(sizes), tuple(plans))


def _covered(intervals: Iterable[tuple[int, int]]) -> int:
    """The bytes in at least one of the intervals."""
    total = end = 0
    for first, last in sorted(intervals):
        total += max(0, last - max(first, end))
        end = max(end, last)
    return total
