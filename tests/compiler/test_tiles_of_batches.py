"""Which tile a layer of many images gets: the fastest one or nearly so, by what was measured."""

from __future__ import annotations

import pytest

from lapilli.codegen.tiles import matrix_tiles
from lapilli.target import of_device
from lapilli.target.known import KNOWN

H100 = of_device(KNOWN["h100"], half=True, matrix=True)

# Microseconds on an H200, of layers of ResNet50 for 64 images: batch, rows, columns, terms, windows, bytes read beside.
MEASURED: dict[tuple[int, int, int, int, bool, int], dict[str, float]] = {
    (1, 200704, 256, 64, False, 2): {
        "32x32x32 of 16x16": 183, "64x32x64 of 32x16": 228, "128x128x32 of 64x64, in bands": 251,
        "128x256x32 of 64x64, in bands": 264, "128x128x64 of 64x64 by 2, in bands": 287,
    },
    (1, 200704, 64, 256, False, 0): {
        "64x64x64 of 32x32": 71, "128x128x32 of 64x64, in bands": 84, "64x64x128 of 32x32 by 2": 88,
        "128x128x64 of 64x64 by 2, in bands": 95,
    },
    (1, 200704, 128, 256, False, 0): {
        "128x128x32 of 64x64, in bands": 95, "128x128x64 of 64x64 by 2, in bands": 104, "64x64x64 of 32x32": 124,
        "128x256x32 of 64x64, in bands": 148, "64x64x128 of 32x32 by 2": 161,
    },
    (64, 3136, 64, 576, True, 0): {
        "64x64x64 of 32x32": 117, "128x128x32 of 64x64, in bands": 155, "64x64x128 of 32x32 by 2": 157,
        "128x128x64 of 64x64 by 2, in bands": 173,
    },
    (1, 50176, 512, 128, False, 2): {
        "32x32x32 of 16x16": 139, "128x128x32 of 64x64, in bands": 143, "128x256x32 of 64x64, in bands": 150,
        "128x128x64 of 64x64 by 2, in bands": 161, "64x64x64 of 32x32": 174,
    },
    (1, 50176, 128, 512, False, 0): {
        "128x128x64 of 64x64 by 2, in bands": 47, "128x128x32 of 64x64, in bands": 57, "64x64x64 of 32x32": 57,
        "64x64x128 of 32x32 by 2": 67,
    },
    (64, 784, 128, 1152, True, 0): {
        "128x128x32 of 64x64, in bands": 91, "128x128x64 of 64x64 by 2, in bands": 93, "64x64x64 of 32x32": 117,
        "64x64x128 of 32x32 by 2": 138,
    },
    (1, 12544, 1024, 256, False, 2): {
        "128x128x32 of 64x64, in bands": 86, "128x256x32 of 64x64, in bands": 87, "128x128x64 of 64x64 by 2, in bands": 93,
        "64x64x64 of 32x32": 106, "32x32x32 of 16x16": 113,
    },
    (1, 12544, 256, 1024, False, 0): {
        "128x128x32 of 64x64, in bands": 43, "128x128x64 of 64x64 by 2, in bands": 46, "128x256x32 of 64x64, in bands": 46,
        "64x64x64 of 32x32": 49, "64x64x128 of 32x32 by 2": 57,
    },
    (1, 12544, 256, 2304, True, 0): {
        "128x128x32 of 64x64, in bands": 80, "128x256x32 of 64x64, in bands": 84, "128x128x64 of 64x64 by 2, in bands": 85,
        "64x64x64 of 32x32": 97, "64x64x128 of 32x32 by 2": 110,
    },
    (64, 784, 512, 256, True, 2): {
        "128x256x32 of 64x64, in bands": 209, "128x128x32 of 64x64, in bands": 215, "128x128x64 of 64x64 by 2, in bands": 232,
        "64x64x64 of 32x32": 233,
    },
    (1, 3136, 512, 4608, True, 0): {
        "128x128x64 of 64x64 by 2, in bands": 80, "64x64x128 of 32x32 by 2": 104, "64x64x64 of 32x32": 121,
        "128x128x32 of 64x64, in bands": 121,
    },
}  # fmt: skip


@pytest.mark.parametrize("layer", MEASURED, ids=lambda layer: "x".join(map(str, layer[1:4])))
def test_the_tile_is_the_fastest_or_nearly_so(layer: tuple[int, int, int, int, bool, int]) -> None:
    batch, rows, columns, terms, windows, beside = layer
    chosen = str(matrix_tiles(batch, rows, columns, terms, H100, windows, beside=beside)[0])
    assert MEASURED[layer][chosen] <= 1.06 * min(MEASURED[layer].values()), chosen


@pytest.mark.parametrize("columns", [64, 256])
def test_long_sums_of_few_tiles_keep_small_ones(columns: int) -> None:
    """As gradients of weights are: large tiles would leave most of the GPU idle, unless the sum is divided for all of it."""
    assert str(matrix_tiles(1, 64, columns, 200704, H100, False)[0]) == "16x16x512 of 16x16 by 8"
    divided = matrix_tiles(1, 64, columns, 200704, H100, False, divisible=True)[0]
    groups = divided.apart * -(-64 // divided.bm) * -(-columns // divided.bn)
    assert groups >= H100.compute_units / 2 and 200704 / divided.apart <= 8192
