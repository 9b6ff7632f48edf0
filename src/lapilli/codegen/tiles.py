"""Selects the tile of a kernel for a problem size, by rules found by measurement (docs/notes/h100-kernels.md)."""

from __future__ import annotations

from dataclasses import dataclass

from lapilli.target import MATRIX_SUBGROUP, Target


@dataclass(frozen=True)
class MatrixTile:
    """Work-group tile bm x bn, chunks of bk, subgroup tile wm x wn, sk subgroups that share a chunk along k, ep bands of
    accumulators staged at once.
    """

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
        return MATRIX_SUBGROUP * (self.bm // self.wm) * (self.bn // self.wn) * self.sk

    def shared(self, left: bool = False, right: bool = False) -> int:
        """Bytes of shared memory: the operands' chunks, or the staged accumulators. left, right: whether the operands are
        transposed, [K, M] and [N, K].
        """
        rows, columns = (
            (y, x) if turned else (x, y) for turned, x, y in ((left, self.bm, self.bk), (right, self.bk, self.bn))
        )
        operands = sum(lines * (line // 8 + 1) for lines, line in (rows, columns))
        staged = self.invocations // MATRIX_SUBGROUP * self.ep * 16 * (self.wn // 4 + 1)
        return 16 * max(operands, staged)


_MENU = tuple(
    MatrixTile(*t)
    for t in (
        (32, 32, 128, 32, 32, 4, 2), (64, 32, 64, 32, 16, 1, 2), (32, 32, 256, 32, 32, 8, 2), (16, 16, 512, 16, 16, 8, 1),
        (32, 32, 32, 16, 16, 1, 1), (32, 64, 128, 16, 32, 2, 1), (16, 64, 64, 16, 16, 1, 1), (32, 32, 128, 16, 16, 2, 1),
        (16, 32, 256, 16, 32, 8, 1), (16, 16, 256, 16, 16, 8, 1), (64, 64, 128, 32, 32, 2, 2), (16, 32, 64, 16, 16, 2, 1),
    )
)  # fmt: skip
_LARGE = (MatrixTile(128, 256, 32, 64, 64, 1, 1, True), MatrixTile(128, 128, 64, 64, 32, 1, 1, True))


def _tiles(batch: int, m: int, n: int, bm: int, bn: int) -> int:
    return batch * -(-m // bm) * -(-n // bn)


def matrix_tile(
    batch: int, m: int, n: int, k: int, target: Target, convolution: bool, turned: tuple[bool, bool] = (False, False)
) -> MatrixTile:
    """The tile with the least estimated time among those that fit the target's work groups. The model is fitted to all layers
    of MobileNetV2 and ResNet50 (docs/notes/h100-kernels.md). turned: which operands are transposed.
    """

    def fits(t: MatrixTile) -> bool:
        return t.shared(*turned) <= target.shared_memory and t.invocations <= target.invocations

    for t in _LARGE:
        if m >= 1024 and n >= 512 and _tiles(batch, m, n, t.bm, t.bn) >= target.compute_units and fits(t):
            return t
    return min(filter(fits, _MENU), key=lambda t: matrix_time(t, batch, m, n, k, target.compute_units, convolution))


def first_layer_tile(k: int) -> MatrixTile:
    """For an image with few channels, gathered element by element."""
    return MatrixTile(32, 64, 32, 32, 16, 1, 2) if k > 64 else MatrixTile(32, 32, 32, 16, 16, 1, 1)


def matrix_time(t: MatrixTile, batch: int, m: int, n: int, k: int, units: int, convolution: bool) -> float:
    """The model's estimate, in microseconds."""
    groups = _tiles(batch, m, n, t.bm, t.bn)
    chunks = -(-k // t.bk)
    rounds = -(-groups // units)
    area = t.bm * t.bn / 1024
    loads = (t.bm + t.bn) * t.bk * 2 / 1024
    time = 3.33 + 0.113 * chunks + 0.0187 * rounds * chunks * loads + 0.188 * rounds * area + 0.10 * rounds
    return time + (1.04 - 0.017 * chunks if convolution else 0)


_SIMT = {(32, 32, 32, 4, 4): 25.3, (64, 64, 16, 4, 4): 32.3, (64, 128, 16, 4, 8): 39.6}
"""bm, bn, bk, tm, tn: operations in a time, when there are many tiles. What counts is how many tiles each compute unit has."""
_MANY_UNITS = 24
"""Compute units of devices whose registers hold the largest tile without doubt; phones have fewer."""


def simt_tile(batch: int, m: int, n: int, k: int, target: Target) -> tuple[int, int, int, int, int]:
    """bm, bn, bk, tm, tn"""

    def fits(t: tuple[int, int, int, int, int]) -> bool:
        bm, bn, _, tm, tn = t
        return bm * bn // (tm * tn) <= target.invocations and (tm * tn <= 16 or target.compute_units >= _MANY_UNITS)

    return min(filter(fits, _SIMT), key=lambda t: simt_time(t, batch, m, n, k, target.compute_units))


def simt_time(t: tuple[int, int, int, int, int], batch: int, m: int, n: int, k: int, units: int) -> float:
    """In the time that a compute unit takes for one operation of the largest tile."""
    bm, bn, *_ = t
    return -(-_tiles(batch, m, n, bm, bn) // units) * bm * bn * k * max(_SIMT.values()) / _SIMT[t]


_LEAST_SUM, _LEAST_PART = 1024, 256
"""Elements of a sum that is divided, and of its parts."""
_LEAST_WORK = 1 << 27
"""Of a product's terms, below which a second kernel takes as long as it saves."""
_ALONE = 0.3
"""By which part a work group takes longer that has a compute unit for itself: nothing else runs while it waits for loads."""
_BYTE = 8
"""Terms of a product in the time of a byte that is written or read."""


def sum_parts(m: int, n: int, k: int, target: Target) -> int:
    """Into how many products a product's sum is divided, so that there are tiles enough for the device; 1 where that does not
    save a quarter of the time. Their results take no more memory than the operands.
    """
    if k < _LEAST_SUM or m * n * k < _LEAST_WORK:
        return 1
    units = target.compute_units

    def time(parts: int) -> float:
        tile = simt_tile(parts, m, n, k // parts, target)
        groups = _tiles(parts, m, n, tile[0], tile[1])
        added = 4 * m * n * (parts + 1) * _BYTE / units if parts > 1 else 0
        return simt_time(tile, parts, m, n, k // parts, units) * (1 + _ALONE * units / groups) + added

    possible = [p for p in range(2, 17) if k % (8 * p) == 0 and k // p >= _LEAST_PART and p * m * n <= (m + n) * k]
    best = min([1, *possible], key=time)
    return best if time(best) < 0.75 * time(1) else 1


OPERANDS_STAY = 0
"""1 where matrix units are emulated: an operand's fragments are in memory then while they are used."""


@dataclass(frozen=True)
class AttentionTile:
    """subgroups of a work group; bands of 16 queries of each; keys of a tile."""

    subgroups: int
    bands: int
    keys: int

    @property
    def queries(self) -> int:
        return 16 * self.subgroups * self.bands

    @property
    def invocations(self) -> int:
        return 32 * self.subgroups

    def shared(self, size: int, width: int) -> int:
        """Bytes of shared memory: keys, values and scores, or before them queries."""
        line, line_v = 2 * -(-size // 16) + 1, 2 * -(-width // 16) + 1
        scores = self.queries * (self.keys // 4 + 1 + OPERANDS_STAY * line)
        return 16 * max(self.keys * (line + line_v) + scores, self.queries * line)

    def divides(self, size: int, width: int) -> bool:
        """Whether all invocations load as much of a tile."""
        return all(self.keys * 2 * -(-d // 16) % self.invocations == 0 for d in (size, width))


_ATTENTION = tuple(AttentionTile(*t) for t in ((8, 1, 32), (4, 1, 64), (4, 1, 32), (2, 1, 64), (2, 1, 32)))


def attention_tile(batch: int, rows: int, size: int, width: int, target: Target) -> AttentionTile | None:
    """The tile of attention on matrix units; None if all are too large. size: of a row of queries, width: of values."""
    fitting = [
        t
        for t in _ATTENTION
        if t.divides(size, width)
        and t.shared(size, width) <= target.shared_memory
        and t.invocations <= target.invocations
    ]
    busy = [t for t in fitting if batch * -(-rows // t.queries) >= target.compute_units]
    return next(iter(busy or fitting[::-1]), None)
