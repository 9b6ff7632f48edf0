"""Which tile a kernel takes for a problem size: rules found by measurement (docs/notes/h100-kernels.md)."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class MatrixTile:
    """Work group tile bm x bn, chunks of bk, subgroup tile wm x wn, sk subgroups that share a chunk along k, ep bands of
    accumulators staged at once."""

    bm: int
    bn: int
    bk: int
    wm: int
    wn: int
    sk: int
    ep: int
    swizzle: bool = False

    @property
    def invocations(self) -> int:
        return 32 * (self.bm // self.wm) * (self.bn // self.wn) * self.sk

    @property
    def shared(self) -> int:
        """Bytes of work-group memory: the operands' chunks, or the staged accumulators."""
        operands = self.bm * (self.bk // 8 + 1) + self.bk * (self.bn // 8 + 1)
        staged = self.invocations // 32 * self.ep * 16 * (self.wn // 4 + 1)
        return 16 * max(operands, staged)


def matrix_tile(batch: int, m: int, n: int, k: int, groups: int) -> MatrixTile:
    """The largest tile that still gives the device enough work groups."""
    if m >= 2048 and n >= 2048:
        return MatrixTile(128, 256, 32, 64, 64, 1, 1, swizzle=True)

    def count(bm: int, bn: int) -> int:
        return batch * -(-m // bm) * -(-n // bn)

    for t in (MatrixTile(64, 64, 64, 32, 32, 1, 2), MatrixTile(32, 64, 64, 32, 16, 1, 2), MatrixTile(32, 32, 64, 16, 16, 1, 1)):
        if count(t.bm, t.bn) >= groups // 2:
            return t
    return MatrixTile(16, 32, 128, 16, 32, 4, 1) if k >= 128 else MatrixTile(16, 16, 64, 16, 16, 4, 1)


def simt_tile(batch: int, m: int, n: int, k: int, groups: int) -> tuple[int, int, int, int, int]:
    """bm, bn, bk, tm, tn"""
    if batch * -(-m // 64) * -(-n // 64) >= groups // 2:
        return 64, 64, 16, 4, 4
    return 32, 32, 32, 4, 4


def depthwise_wide(work: int) -> bool:
    """Eight channels an invocation rather than four."""
    return work >= 1 << 18


def depthwise_outputs(work: int, stride: int) -> int:
    """Neighbouring pixels an invocation computes."""
    return 2 if work >= 1 << 20 and stride == 1 else 1


def matvec_rows(n: int) -> int:
    return 1 if n <= 1024 else 2
