"""Selects the tile of a kernel for a problem size, by rules found by measurement (docs/notes/h100-kernels.md)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from lapilli.target import MATRIX_SUBGROUP, Target

OPERANDS_STAY = 0
"""1 where matrix units are emulated: an operand's fragments are in memory then while they are used."""


@dataclass(frozen=True)
class MatrixTile:
    """Work-group tile bm x bn, chunks of bk, subgroup tile wm x wn, sk subgroups that share a chunk along k, ep bands of
    accumulators staged at once; parts: work groups that share the sum of a tile; apart: products into which the sum is divided,
    which a second kernel adds; straight: codes of 4 bits become numbers in the registers where they are multiplied.
    """

    bm: int
    bn: int
    bk: int
    wm: int
    wn: int
    sk: int
    ep: int
    swizzle: bool = False
    parts: int = 1
    apart: int = 1
    straight: bool = False

    def __str__(self) -> str:
        split = f" of {self.wm}x{self.wn}" + (f" by {self.sk}" if self.sk > 1 else "")
        parts = (
            f", sum in {self.parts} parts" if self.parts > 1 else f", {self.apart} products" if self.apart > 1 else ""
        )
        straight = ", straight" if self.straight else ""
        return f"{self.bm}x{self.bn}x{self.bk}{split}{', in bands' if self.swizzle else ''}{straight}{parts}"

    @property
    def invocations(self) -> int:
        return MATRIX_SUBGROUP * (self.bm // self.wm) * (self.bn // self.wn) * self.sk

    def shared(self, left: bool = False, right: bool = False, fragments: bool = False) -> int:
        """Bytes of shared memory: the operands' chunks, or the staged accumulators. left, right: whether the operands are
        transposed, [K, M] and [N, K]; fragments: whether the right one lies by fragments.
        """
        rows, columns = (
            (y, x) if turned else (x, y) for turned, x, y in ((left, self.bm, self.bk), (right, self.bk, self.bn))
        )
        subgroups, alone = self.invocations // MATRIX_SUBGROUP, fragments or self.straight
        operands = sum(lines * (line // 8 + 1) for lines, line in ((rows,) if alone else (rows, columns)))
        operands += subgroups * MATRIX_SUBGROUP * (self.wn // 16 if OPERANDS_STAY and fragments else 1) if alone else 0
        staged = subgroups * self.ep * 16 * (self.wn // 4 + 1)
        return 16 * max(operands, staged) + (4 if self.parts > 1 else 0)


_MENU = tuple(
    MatrixTile(*t)
    for t in (
        (32, 32, 128, 32, 32, 4, 2), (64, 32, 64, 32, 16, 1, 2), (32, 32, 256, 32, 32, 8, 2), (16, 16, 512, 16, 16, 8, 1),
        (32, 32, 32, 16, 16, 1, 1), (32, 64, 128, 16, 32, 2, 1), (16, 64, 64, 16, 16, 1, 1), (32, 32, 128, 16, 16, 2, 1),
        (16, 32, 256, 16, 32, 8, 1), (16, 16, 256, 16, 16, 8, 1), (64, 64, 128, 32, 32, 2, 2), (16, 32, 64, 16, 16, 2, 1),
    )
)  # fmt: skip
_WIDE, _SLOWER = MatrixTile(64, 96, 96, 32, 32, 1, 2), 1.25
"""For products of 16 bits alone, and what it takes longer than the model says."""
_DIVIDED = MatrixTile(64, 64, 128, 32, 32, 2, 2)
"""Whose sums work groups may share: the best of seven tiles in 2 to 4 parts, and the one that the model is right for."""
_OF_WINDOWS = MatrixTile(32, 32, 256, 32, 32, 8, 2)
"""The same for convolutions: of ResNet50's layers of 256 and 512 filters, it took the least time in 2 and 3 parts of five tiles."""
_LARGE = (MatrixTile(128, 256, 32, 64, 64, 1, 1, True), MatrixTile(128, 128, 64, 64, 32, 1, 1, True))
_DECODING = MatrixTile(128, 128, 64, 64, 64, 2, 1, True)
"""The best of sixteen for 512 and 2,048 rows and codes of 4 bits, wherever most compute units have one."""


@dataclass(frozen=True)
class _Rate:
    """How fast a tile is. held: by a compute unit at once. start: microseconds that a round of tiles takes beside its products;
    full: operations in a picosecond when all units hold as many as they can, lying: the same of a right operand [N, K], alone: when
    each unit has one. With some tiles each, the time of a round is between the two. beside: microseconds for each megabyte that the
    epilogue reads; windows: by how much a round of a convolution takes longer.
    """

    tile: MatrixTile
    held: int
    start: float
    full: float
    lying: float
    alone: float
    beside: float = 0
    windows: float = 0

    def time(self, batch: int, m: int, n: int, k: int, units: int, lying: bool, convolution: bool = False) -> float:
        """In microseconds, if all units were those that were measured."""
        t = self.tile
        work = 2e-6 * t.bm * t.bn * -(-k // t.bk) * t.bk * MEASURED_UNITS
        rate = self.lying if lying else self.full
        start = self.start + (self.windows if convolution else 0)
        alone, full = start + work / min(self.alone, rate), start + work * self.held / rate
        rounds, rest = divmod(_tiles(batch, m, n, t.bm, t.bn), units * self.held)
        more = (-(-rest // units) - 1) / max(self.held - 1, 1)
        return rounds * full + (alone + more * (full - alone) if rest else 0)


MEASURED_UNITS = 132
"""Compute units of the GPU whose rates these are."""
_RATES_OF_LARGE = (
    _Rate(_LARGE[0], 1, 4.5, 320, 240, 320),
    _Rate(_DECODING, 1, 3.3, 310, 250, 310),
    _Rate(MatrixTile(128, 128, 32, 64, 64, 1, 1, True), 2, 3.0, 280, 225, 189),
    _Rate(MatrixTile(64, 64, 64, 64, 32, 2, 2), 2, 0.5, 188, 154, 87),
    _Rate(MatrixTile(64, 64, 128, 64, 64, 8, 1), 1, 0.0, 137, 137, 137),
)
_RATES_BY_FRAGMENTS = (
    _Rate(MatrixTile(64, 256, 64, 64, 64, 1, 1, True), 2, 4.5, 390, 390, 220),
    _Rate(MatrixTile(64, 128, 128, 64, 64, 2, 1), 2, 3.0, 290, 290, 162),
    _Rate(MatrixTile(64, 64, 128, 64, 64, 4, 1), 2, 4.0, 240, 240, 153),
    _Rate(MatrixTile(48, 128, 64, 48, 32, 1, 1, True), 4, 3.7, 344, 344, 130),
)
"""The same where the right operand lies by fragments: work groups of one row of subgroups, which share no fragment."""
_PACK, _PACKED = 4.0, 0.42
"""Microseconds that it takes to pack an operand by fragments, and elements in a picosecond."""
_WORTH_FRAGMENTS = 0.95
"""With what part of the time fragments are worth it."""
_MUCH, _LONG = 1 << 31, 512
"""Terms of a product, and sizes, from which on these are compared."""
_RATES_OF_MANY = (
    _Rate(MatrixTile(128, 128, 32, 64, 64, 1, 1, True), 2, 6.6, 262, 210, 169, 0.5),
    _Rate(_DECODING, 1, 3.3, 250, 200, 250, 0.5),
    _Rate(_LARGE[0], 1, 13.0, 300, 225, 300, 0.5),
    _Rate(MatrixTile(64, 64, 64, 32, 32, 1, 1), 4, 5.8, 178, 146, 39, 0.5),
    _Rate(MatrixTile(32, 32, 32, 16, 16, 1, 1), 12, 2.8, 69, 57, 8),
)
"""The same for convolutions of many images, and products that are long in rows alone, where half of the units have a tile of
128x128 at least (gradients of weights, whose sums are long, have few): the layers of ResNet50 for 64 images. Large tiles wait for
what they read beside; small ones, of which a unit holds many, do not. Right
operands [N, K] were not measured: they are slower by as much as above.
"""

_RATES_OF_MEDIUM = (
    _Rate(MatrixTile(128, 128, 32, 64, 64, 1, 1, True), 2, 6.5, 300, 240, 250, 0.5, 1.0),
    _Rate(_LARGE[1], 1, 3.5, 260, 208, 260, 0.5),
    _Rate(_DECODING, 1, 4.0, 280, 224, 280, 0.5, 0.5),
    _Rate(_LARGE[0], 1, 6.0, 300, 240, 300, 0.5, 0.5),
    _Rate(_DIVIDED, 1, 1.5, 160, 128, 160, 0.9, 0.5),
    _Rate(MatrixTile(64, 64, 128, 64, 64, 8, 1), 1, 2.5, 180, 144, 180, 0.8, 0.5),
    _Rate(MatrixTile(64, 64, 64, 32, 32, 1, 1), 2, 2.0, 180, 144, 130, 0.9, 1.0),
    _Rate(MatrixTile(64, 64, 64, 64, 32, 2, 2), 2, 2.5, 200, 160, 130, 0.8, 0.5),
    _Rate(MatrixTile(32, 64, 64, 32, 32, 2, 1), 3, 1.5, 140, 112, 80, 0.5, 0.5),
)
"""The same for what has fewer terms and many rows: layers of some images, or of large ones. Right operands [N, K] as above."""
_MEDIUM, _ROWS_OF_MEDIUM = 1 << 27, 1024
"""Terms, and rows, from which on these are compared."""

_OTHERS = tuple(
    MatrixTile(*t)
    for t in (
        (128, 128, 32, 64, 64, 1, 1, True), (64, 128, 64, 32, 64, 1, 1), (128, 64, 64, 64, 32, 1, 1), (64, 64, 64, 32, 32, 1, 1),
        (128, 128, 64, 64, 64, 2, 1, True), (64, 64, 128, 64, 64, 8, 1), (64, 64, 64, 64, 32, 2, 2), (32, 64, 64, 32, 32, 2, 1),
        (16, 64, 128, 16, 32, 4, 1), (16, 32, 128, 16, 16, 4, 1), (32, 128, 64, 32, 32, 1, 1),
    )
)  # fmt: skip
"""Tiles that the cost model was not fitted to, which only measuring can choose."""


def _tiles(batch: int, m: int, n: int, bm: int, bn: int) -> int:
    return batch * -(-m // bm) * -(-n // bn)


def matrix_tile(
    batch: int, m: int, n: int, k: int, target: Target, convolution: bool, turned: tuple[bool, bool] = (False, False)
) -> MatrixTile:
    """The tile with the least estimated time among those that fit the target's work groups. The model is fitted to all layers
    of MobileNetV2 and ResNet50 (docs/notes/h100-kernels.md). turned: which operands are transposed.
    """

    return matrix_tiles(batch, m, n, k, target, convolution, turned)[0]


def matrix_tiles(
    batch: int, m: int, n: int, k: int, target: Target, convolution: bool, turned: tuple[bool, bool] = (False, False),
    divisible: bool = False, fragments: bool = False, beside: int = 0, joinable: bool = False,
) -> list[MatrixTile]:  # fmt: skip
    """All tiles that fit, the one that the model prefers first; arguments as for `matrix_tile`. divisible: whether the sum may be
    divided; fragments: whether the right operand lies so; beside: bytes that the epilogue reads for each result. joinable: whether
    work groups may share the sum of a tile, as they may if it is divisible.
    """

    def fits(t: MatrixTile) -> bool:
        return _is_possible(t, target, turned, fragments)

    def time(t: MatrixTile) -> float:
        far = convolution and joinable and n * k >= _COLD
        return matrix_time(t, batch, m, n, k, target.compute_units, convolution, far)

    def rated(rates: Sequence[_Rate]) -> list[MatrixTile]:
        def expected(r: _Rate) -> float:
            read = r.beside * 1e-6 * beside * batch * m * n * MEASURED_UNITS / target.compute_units
            return r.time(batch, m, n, k, target.compute_units, turned[1], convolution) + read

        return [r.tile for r in sorted((r for r in rates if fits(r.tile)), key=expected)]

    rates: Sequence[_Rate] = ()
    if not convolution and _is_large(batch, m, n, k):
        rates = _RATES_BY_FRAGMENTS if fragments else _RATES_OF_LARGE
    elif batch * m * n * k >= _MUCH and 2 * _tiles(batch, m, n, 128, 128) >= target.compute_units:
        rates = _RATES_OF_MANY
    elif _MEDIUM <= batch * m * n * k < _MUCH and batch * m >= _ROWS_OF_MEDIUM:
        rates = _RATES_OF_MEDIUM
    large = rated(rates) or [
        t
        for t in _LARGE
        if m >= 1024 and n >= 512 and _tiles(batch, m, n, t.bm, t.bn) >= target.compute_units and fits(t)
    ]
    menu = _MENU if convolution else (*_MENU, _WIDE)
    best = sorted((t for t in menu if fits(t) and t not in large), key=time)
    others = sorted((t for t in (*_LARGE, *_OTHERS) if fits(t) and t not in large), key=time)
    if (divisible or joinable) and best and not large:
        made = _divided_windows(m, n, k, target) if convolution else _divided_tiles(m, n, k)
        divided = sorted(filter(fits, made), key=time) if target.between_groups else []
        worth = [t for t in divided[:1] if time(t) < _WORTH_PARTS * time(best[0])]
        best, others = [*worth, *best], [*others, *(t for t in divided if t not in worth)]
    found = [*large, *best[:1], *(t for pair in zip_longest(best[1:], others) for t in pair if t is not None)]
    if divisible and found and not fragments:
        times = (r.time(batch, m, n, k, target.compute_units, turned[1]) for r in rates if r.tile == found[0])
        apart = _apart(m, n, k, target, turned[1], fits)
        if apart is not None and apart[1] < _WORTH_SECOND * next(times, time(found[0])):
            return [apart[0], *found]
    return found


def _is_possible(t: MatrixTile, target: Target, turned: tuple[bool, bool], fragments: bool) -> bool:
    return t.shared(*turned, fragments) <= target.shared_memory and t.invocations <= target.invocations


def _is_large(batch: int, m: int, n: int, k: int) -> bool:
    return min(n, k) >= _LONG and batch * m * n * k >= _MUCH


def fragments_pay(batch: int, m: int, n: int, k: int, target: Target, lying: bool, packing: bool) -> bool:
    """Whether a product is faster if its right operand lies by fragments. lying: whether it would be read along the sum otherwise;
    packing: whether it has to be packed in each run.
    """
    if not _is_large(batch, m, n, k):
        return False

    def best(rates: Sequence[_Rate], along: bool, fragments: bool) -> float:
        fitting = [r for r in rates if _is_possible(r.tile, target, (False, along), fragments)]
        return min((r.time(batch, m, n, k, target.compute_units, along) for r in fitting), default=math.inf)

    packed = _PACK + 1e-6 * batch * n * k / _PACKED * MEASURED_UNITS / target.compute_units if packing else 0
    by_columns = best(_RATES_OF_LARGE, lying, False)
    return best(_RATES_BY_FRAGMENTS, False, True) + packed < _WORTH_FRAGMENTS * by_columns


_MOST_PARTS = 4
_JOIN, _SUM_OF_PART = 1.5, 1.95e-4
"""Microseconds that the last work group of a tile takes to put its parts together, and for each sum of a part."""
_WORTH_PARTS = 0.92
"""With what part of the time a divided sum is worth it: in each run counters are set to zero first, for all products together."""


def _divided_tiles(m: int, n: int, k: int) -> list[MatrixTile]:
    """In parts of at least two chunks that take no more memory than the operands."""
    counts = range(2, min(_MOST_PARTS, -(-k // _DIVIDED.bk) // 2) + 1)
    return [replace(_DIVIDED, parts=p) for p in counts if 2 * p * m * n <= (m + n) * k]


def _divided_windows(m: int, n: int, k: int, target: Target) -> list[MatrixTile]:
    """For convolutions with large weights, where all parts run at once."""
    tiles = _tiles(1, m, n, _OF_WINDOWS.bm, _OF_WINDOWS.bn)
    if tiles == 0 or n * k < _COLD:
        return []
    counts = range(2, min(_MOST_PARTS, target.compute_units // tiles, -(-k // _OF_WINDOWS.bk) // 2) + 1)
    return [replace(_OF_WINDOWS, parts=p) for p in counts]


_SUM_KERNEL, _READ = 3.5, 0.6e-6
"""Microseconds that a second kernel takes that adds parts, and for each byte of them."""
_WORTH_SECOND = 0.9
"""With what part of the time a second kernel is worth it."""


def _apart(
    m: int, n: int, k: int, target: Target, lying: bool, fits: Callable[[MatrixTile], bool]
) -> tuple[MatrixTile, float] | None:
    """The best tile for products of parts of the sum, and the time of them and of adding them. The parts take no more memory than
    the operands, which have half as many bytes a number.
    """
    units = target.compute_units
    found = []
    for parts in _possible_parts(2 * m, n, k) if k >= _LEAST_SUM else ():
        terms = part_terms(k, parts)
        if m * n * k >= _MUCH:
            times = [(r.time(parts, m, n, terms, units, lying), r.tile) for r in _RATES_OF_LARGE if fits(r.tile)]
        else:
            times = [(matrix_time(t, parts, m, n, terms, units, False), t) for t in _MENU if fits(t)]
        time, best = min(times, default=(math.inf, _DIVIDED), key=lambda made: made[0])
        read = _READ * 4 * m * n * (parts + 1 + _LEFT_OVER * (k - parts * terms)) * MEASURED_UNITS / units
        found.append((replace(best, apart=parts), time + _SUM_KERNEL + read))
    return min(found, default=None, key=lambda made: made[1])


@dataclass(frozen=True)
class _Few:
    """A tile that decodes, for at most `rows` rows. most: how many of its parts a compute unit may have; parts: into how many its
    sum may be divided; least: chunks of a part; rounds: how many of it each compute unit has at least.
    """

    rows: int
    tile: MatrixTile
    most: int = 1
    parts: tuple[int, ...] = (8, 4, 2)
    least: int = 2
    rounds: int = 0


_STRAIGHT_FEW = (
    _Few(16, MatrixTile(16, 128, 256, 16, 32, 2, 1, straight=True), 2),
    _Few(16, MatrixTile(16, 64, 256, 16, 32, 2, 1, straight=True)),
    _Few(32, MatrixTile(32, 128, 128, 32, 32, 1, 1, straight=True), parts=(), rounds=4),
    _Few(32, MatrixTile(32, 128, 256, 32, 32, 2, 1, straight=True), 2, least=4),
    _Few(64, MatrixTile(64, 128, 128, 64, 32, 1, 1, straight=True), 2, least=4),
    _Few(64, MatrixTile(64, 64, 128, 32, 32, 1, 2, straight=True), 2),
)
"""The best of nine tiles for 16 rows, of twenty-five for 32 and of eight for 64. Sums leave in bands of 16 rows: all at once, they
take more shared memory than the operands do, and fewer work groups are on a unit.
"""
_DECODING_MANY = MatrixTile(32, 128, 64, 32, 32, 1, 1)
"""By way of shared memory, for 17 to 32 rows, wherever each compute unit has four."""
_DECODING_FEW = (
    _Few(16, MatrixTile(16, 64, 128, 16, 32, 4, 1), 2),
    _Few(32, MatrixTile(32, 128, 128, 32, 32, 2, 1)),
    _Few(32, MatrixTile(32, 64, 128, 32, 32, 4, 1)),
    _Few(64, _DIVIDED),
)
"""The same: the best of six tiles for 16 rows, of nine for 32 and of eight for 64. The third is for products of few columns."""


def for_codes(
    found: list[MatrixTile], batch: int, m: int, n: int, k: int, target: Target, joinable: bool, straight: int
) -> list[MatrixTile]:
    """Tiles for a right operand that is decoded, once for each tile of rows: large ones first, if most compute units have one, and
    those for few rows. joinable: whether work groups may share the sum of a tile; straight: bits of codes that can become
    numbers in registers, 0 if they cannot. A tile that is decoded takes as long for 8 rows as for 32, so each compute unit has
    to have one.
    """
    units, menu = target.compute_units, _straight(straight) if straight else []
    joinable = joinable and target.between_groups

    def has_tiles(t: MatrixTile, fours: int) -> bool:
        """Whether each compute unit has so many fourths of a tile."""
        return 4 * _tiles(batch, m, n, t.bm, t.bn) >= fours * units

    if 2 * m > _DECODING.bm:
        first = [t for t in found if t == _DECODING and has_tiles(t, 3)]
    else:
        first = _few_for_codes(menu, batch, m, n, k, target, joinable)
    if not first and 16 < m <= _DECODING_MANY.bm and has_tiles(_DECODING_MANY, 16):
        first = [t for t in found if t == _DECODING_MANY]
    if not first and joinable:
        first = _few_for_codes(_DECODING_FEW, batch, m, n, k, target, joinable)
    others = [few.tile for few in menu if m <= few.rows and _decodes(few.tile, target)]
    return list(dict.fromkeys((*first, *found, *others)))


def straight_tile(m: int, n: int, k: int, bits: int, target: Target, joinable: bool) -> MatrixTile | None:
    """The tile for up to 64 rows of codes of 4 or 8 bits that become numbers in registers; None if there are too few. joinable: as
    above.
    """
    return next(iter(_few_for_codes(_straight(bits), 1, m, n, k, target, joinable and target.between_groups)), None)


def _straight(bits: int) -> list[_Few]:
    """The menu for codes of so many bits: a chunk has as many bytes of a line."""
    return [replace(few, tile=replace(few.tile, bk=few.tile.bk * 4 // bits)) for few in _STRAIGHT_FEW]


def _few_for_codes(
    menu: Sequence[_Few], batch: int, m: int, n: int, k: int, target: Target, joinable: bool
) -> list[MatrixTile]:
    """The first of these tiles of which there are enough, in as many parts as compute units are to have at once."""
    units = target.compute_units
    for few in menu:
        t = few.tile
        if m > few.rows or not _decodes(t, target):
            continue
        count, chunks = _tiles(batch, m, n, t.bm, t.bn), -(-k // t.bk)
        if count < few.rounds * units:
            continue
        possible = (p for p in few.parts if joinable and p * count <= few.most * units and few.least * p <= chunks)
        parts = next(possible, 1)
        if 4 * parts * count >= 3 * units:
            return [replace(t, parts=parts)]
    return []


def _decodes(t: MatrixTile, target: Target) -> bool:
    """Whether a tile fits, for a right operand that lies along the sum."""
    return _is_possible(t, target, (False, True), False)


def byte_tiles(batch: int, m: int, n: int, k: int, target: Target, convolution: bool) -> list[MatrixTile]:
    """For codes of 8 bits, k of them: what takes as long as half as many halves."""
    found = matrix_tiles(batch, m, n, -(-k // 2), target, convolution, (False, True))
    return [t for t in found if t != _WIDE and byte_memory(t, True) <= target.shared_memory]


def byte_memory(t: MatrixTile, shifted: bool) -> int:
    """Bytes of shared memory of a tile of codes. shifted: whether sums of the right operand's lines are added."""
    return t.shared(right=True) + 4 * (t.bn if shifted else 4)


def first_layer_tiles(k: int) -> list[MatrixTile]:
    """For an image with few channels, gathered element by element."""
    wide, small = MatrixTile(32, 64, 32, 32, 16, 1, 2), MatrixTile(32, 32, 32, 16, 16, 1, 1)
    others = [
        MatrixTile(64, 32, 64, 32, 16, 1, 2),
        MatrixTile(64, 64, 64, 32, 32, 1, 1),
        MatrixTile(16, 64, 64, 16, 16, 1, 1),
    ]
    return [*((wide, small) if k > 64 else (small, wide)), *others]


def matrix_time(
    t: MatrixTile, batch: int, m: int, n: int, k: int, units: int, convolution: bool, far: bool = False
) -> float:
    """The model's estimate, in microseconds. far: whether weights of a convolution come from memory."""
    groups = _tiles(batch, m, n, t.bm, t.bn) * t.parts
    whole = -(-k // t.bk)
    chunks = -(-whole // t.parts)
    rounds = -(-groups // units)
    area = t.bm * t.bn / 1024
    loads = (t.bm + t.bn) * t.bk * 2 / 1024
    time = 3.33 + 0.113 * chunks + 0.0187 * rounds * chunks * loads + 0.188 * rounds * area + 0.10 * rounds
    time *= _SLOWER if t == _WIDE else 1
    time += _JOIN + _SUM_OF_PART * t.parts * t.bm * t.bn if t.parts > 1 else 0
    if convolution:
        time += (_FAR * chunks if far else 1.04) - 0.017 * chunks
    return time


_COLD, _FAR = 1 << 19, 0.4
"""Weights of a layer from which on caches no longer keep them between runs; microseconds that each chunk then takes longer."""


@dataclass(frozen=True)
class SimtTile:
    """Without matrix units: work-group tile bm x bn, chunks of bk, tile of an invocation tm x tn; apart: products into which
    the sum is divided, which a second kernel adds.
    """

    bm: int
    bn: int
    bk: int
    tm: int
    tn: int
    apart: int = 1

    def __str__(self) -> str:
        parts = f", sum in {self.apart} parts" if self.apart > 1 else ""
        return f"{self.bm}x{self.bn}x{self.bk} of {self.tm}x{self.tn}{parts}"

    @property
    def invocations(self) -> int:
        return self.bm * self.bn // (self.tm * self.tn)

    @property
    def rate(self) -> float:
        """Operations in a time, when there are many tiles."""
        return _RATES[self.bm, self.bn]


_RATES = {(32, 32): 25.3, (64, 64): 32.3, (64, 128): 39.6, (128, 64): 33.0}
"""What counts is how many tiles each compute unit has, and these."""
_SIMT = (SimtTile(32, 32, 32, 4, 4), SimtTile(64, 64, 16, 4, 4), SimtTile(64, 128, 16, 4, 8))
_OTHER_SIMT = (SimtTile(128, 64, 16, 8, 4),)
"""Which only measuring can choose."""
_MANY_UNITS = 24
"""Compute units of devices whose registers hold the largest tile without doubt; phones have fewer."""


def _fits(t: SimtTile, target: Target) -> bool:
    return t.invocations <= target.invocations and (t.tm * t.tn <= 16 or target.compute_units >= _MANY_UNITS)


def simt_tile(batch: int, m: int, n: int, k: int, target: Target) -> SimtTile:
    """The tile with the least estimated time, of an undivided sum."""
    return min((t for t in _SIMT if _fits(t, target)), key=lambda t: simt_time(t, batch, m, n, k, target.compute_units))


def simt_time(t: SimtTile, batch: int, m: int, n: int, k: int, units: int) -> float:
    """In the time that a compute unit takes for one operation of the largest tile. Of an undivided sum."""
    return -(-_tiles(batch, m, n, t.bm, t.bn) // units) * t.bm * t.bn * k * max(_RATES.values()) / t.rate


_LEAST_SUM, _LEAST_PART = 1024, 256
"""Elements of a sum that is divided, and of its parts."""
_MOST_SUM_PARTS = 64  # fewer would leave large devices idle; more were not measured
_SECOND = 800_000
"""Terms that a compute unit of a large device could have added while a second kernel is started: 5 microseconds."""
_ALONE = 0.3
"""By which part a work group takes longer that has a compute unit for itself: nothing else runs while it waits for loads."""
_MOST_ALONE = 4
"""The most of that, however few work groups there are."""
_RAGGED = 1.1
"""Terms are left over where that saves more than a tenth."""
_LEFT_OVER = 4
"""What a left over term of a sum costs, as so many parts of it."""
_BYTE = 8
"""Terms of a product in the time of a byte that is written or read."""


def sum_parts(m: int, n: int, k: int, target: Target) -> int:
    """Into how many products a product's sum is divided, so that there are tiles enough for the device; 1 where that does not
    save a quarter of the time. Their results take no more memory than the operands.
    """
    if k < _LEAST_SUM:
        return 1

    def time(parts: int) -> float:
        tile = replace(simt_tile(parts, m, n, part_terms(k, parts), target), apart=parts)
        return _divided_time(tile, m, n, k, target) * (_RAGGED if part_terms(k, parts) * parts < k else 1)

    best = min([1, *_possible_parts(m, n, k)], key=time)
    return best if time(best) < 0.75 * time(1) else 1


def part_terms(k: int, parts: int) -> int:
    """The terms of each part of a sum: whole vectors. The kernel that adds the parts adds those that are left over, too."""
    return k if parts == 1 else k // parts // 8 * 8


def _divided_time(t: SimtTile, m: int, n: int, k: int, target: Target) -> float:
    units, parts = target.compute_units, t.apart
    groups = max(_tiles(parts, m, n, t.bm, t.bn), 1)  # where there is nothing to compute, too
    terms = part_terms(k, parts)
    added = 4 * m * n * (parts + 1 + _LEFT_OVER * (k - parts * terms)) * _BYTE / units + _SECOND if parts > 1 else 0
    return simt_time(t, parts, m, n, terms, units) * (1 + min(_ALONE * units / groups, _MOST_ALONE)) + added


def _possible_parts(m: int, n: int, k: int) -> list[int]:
    return [p for p in range(2, _MOST_SUM_PARTS + 1) if k // p >= _LEAST_PART and p * m * n <= (m + n) * k]


def simt_tiles(batch: int, m: int, n: int, k: int, target: Target, divisible: bool) -> list[SimtTile]:
    """All tiles that fit, the one that the model prefers first. divisible: whether the sum may be divided."""
    parts = sum_parts(m, n, k, target) if divisible else 1
    first = replace(simt_tile(batch * parts, m, n, part_terms(k, parts), target), apart=parts)
    menu = [t for t in (*_SIMT, *_OTHER_SIMT) if _fits(t, target)]
    if not divisible:
        others = sorted(menu, key=lambda t: simt_time(t, batch, m, n, k, target.compute_units))
        return [first, *(t for t in others if t != first)]
    counts = [1, *(p for p in _possible_parts(m, n, k) if p in (2, 3, 4, 6, 8, 12, 16))]
    others = sorted(
        (replace(t, apart=p) for t in menu for p in counts), key=lambda t: _divided_time(t, m, n, k, target)
    )
    return [first, *(t for t in others if t != first)]


@dataclass(frozen=True)
class DotTile:
    """Of dot products of words: work-group tile bm x bn, chunks of bk words, tile of an invocation tm x tn."""

    bm: int
    bn: int
    bk: int
    tm: int
    tn: int

    def __str__(self) -> str:
        return f"{self.bm}x{self.bn}x{4 * self.bk} of {self.tm}x{self.tn}"

    @property
    def invocations(self) -> int:
        return self.bm * self.bn // (self.tm * self.tn)

    @property
    def shared(self) -> int:
        """Bytes of shared memory."""
        return 16 * self.bk * (self.bm // 4 + 1 + self.bn // 4 + 1)


_DOT = tuple(DotTile(*t) for t in ((32, 32, 16, 4, 4), (64, 64, 16, 4, 4), (64, 128, 16, 4, 8), (128, 128, 16, 8, 8)))
_OTHER_DOT = (DotTile(64, 64, 8, 4, 4), DotTile(128, 128, 8, 8, 8))
"""Which only measuring can choose."""


def dot_tiles(batch: int, m: int, n: int, target: Target) -> list[DotTile]:
    """All tiles that fit, the one first that is taken without measuring: the largest of which every compute unit has one, if the
    rows and columns fill it.
    """

    def fits(t: DotTile) -> bool:
        few = t.tm * t.tn <= 16 or target.compute_units >= _MANY_UNITS
        return t.invocations <= target.invocations and t.shared <= target.shared_memory and few

    fitting = [*filter(fits, _DOT)]
    first = next((t for t in fitting[::-1] if _tiles(batch, m, n, t.bm, t.bn) >= target.compute_units), fitting[0])
    return [first, *(t for t in (*fitting, *filter(fits, _OTHER_DOT)) if t != first)]
