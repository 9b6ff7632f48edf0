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
        "128x128x32 of 64x64, in bands": 135, "128x256x32 of 64x64, in bands": 139, "128x128x64 of 64x32, in bands": 170,
        "128x128x64 of 64x64 by 2, in bands": 174, "32x32x32 of 16x16": 178,
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
        "128x128x32 of 64x64, in bands": 85, "128x256x32 of 64x64, in bands": 86, "128x128x64 of 64x32, in bands": 102,
        "128x128x64 of 64x64 by 2, in bands": 103, "32x32x32 of 16x16": 134,
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
        "128x128x32 of 64x64, in bands": 59, "128x256x32 of 64x64, in bands": 59, "128x128x64 of 64x64 by 2, in bands": 66,
        "128x128x64 of 64x32, in bands": 66, "32x64x64 of 32x32 by 2": 98,
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


# The same of layers of some images, and of products that are no layers.
MEDIUM: dict[tuple[int, int, int, int, bool, int], dict[str, float]] = {
    (1, 8192, 320, 320, False, 0): {
        "128x128x32 of 64x64, in bands": 18.3, "128x256x32 of 64x64, in bands": 18.7, "64x64x64 of 64x32 by 2": 19.5,
        "64x64x64 of 32x32": 19.8, "128x128x64 of 64x32, in bands": 20.2, "128x128x64 of 64x64 by 2, in bands": 20.9,
        "32x64x64 of 32x32 by 2": 22.1,
    },
    (1, 25088, 256, 256, False, 0): {
        "128x128x64 of 64x32, in bands": 26.2, "128x128x64 of 64x64 by 2, in bands": 27.7,
        "128x256x32 of 64x64, in bands": 30.2, "128x128x32 of 64x64, in bands": 30.4, "64x64x64 of 32x32": 32.5,
        "64x64x64 of 64x32 by 2": 32.7, "32x64x64 of 32x32 by 2": 36.4,
    },
    (1, 65536, 128, 128, False, 0): {
        "128x128x64 of 64x32, in bands": 28, "128x128x32 of 64x64, in bands": 28.2, "128x128x64 of 64x64 by 2, in bands": 30.8,
        "64x64x64 of 32x32": 32.2, "64x64x64 of 64x32 by 2": 33.8, "32x64x64 of 32x32 by 2": 35.9,
        "128x256x32 of 64x64, in bands": 41,
    },
    (1, 100352, 256, 64, False, 0): {
        "128x128x32 of 64x64, in bands": 52.7, "128x256x32 of 64x64, in bands": 54.3, "128x128x64 of 64x32, in bands": 55.9,
        "128x128x64 of 64x64 by 2, in bands": 64.1, "64x64x64 of 32x32": 65.9, "64x64x64 of 64x32 by 2": 73.4,
        "32x64x64 of 32x32 by 2": 74.3,
    },
    (1, 100352, 64, 256, False, 0): {
        "64x64x64 of 32x32": 38, "64x64x64 of 64x32 by 2": 40.2, "32x64x64 of 32x32 by 2": 41.7,
        "64x64x128 of 32x32 by 2": 46.2, "128x128x32 of 64x64, in bands": 47.5, "128x128x64 of 64x32, in bands": 47.5,
        "128x128x64 of 64x64 by 2, in bands": 51.5,
    },
    (1, 2048, 640, 640, False, 0): {
        "128x128x64 of 64x32, in bands": 17.2, "128x128x64 of 64x64 by 2, in bands": 17.2, "32x64x64 of 32x32 by 2": 20,
        "128x128x32 of 64x64, in bands": 20.1, "64x64x64 of 64x32 by 2": 20.1, "64x64x128 of 32x32 by 2": 20.6,
        "64x64x64 of 32x32": 21.4,
    },
    (1, 3136, 128, 512, False, 0): {
        "64x64x128 of 32x32 by 2": 8.8, "32x64x64 of 32x32 by 2": 9.2, "64x64x128 of 64x64 by 8": 9.2, "64x64x64 of 32x32": 9.4,
        "64x64x64 of 64x32 by 2": 9.4, "128x128x64 of 64x32, in bands": 14.7, "128x128x64 of 64x64 by 2, in bands": 15.3,
    },
    (1, 3136, 512, 128, False, 0): {
        "128x128x64 of 64x32, in bands": 9.2, "128x128x64 of 64x64 by 2, in bands": 10.1, "32x64x64 of 32x32 by 2": 10.1,
        "64x64x64 of 32x32": 10.6, "64x64x64 of 64x32 by 2": 10.9, "64x64x128 of 32x32 by 2": 11.4,
        "128x128x32 of 64x64, in bands": 11.8,
    },
    (1, 12544, 192, 192, False, 0): {
        "128x128x32 of 64x64, in bands": 14.7, "32x64x64 of 32x32 by 2": 14.7, "128x256x32 of 64x64, in bands": 15.4,
        "64x64x64 of 32x32": 15.6, "64x64x64 of 64x32 by 2": 15.8, "128x128x64 of 64x32, in bands": 16,
        "128x128x64 of 64x64 by 2, in bands": 17.1,
    },
    (1, 32768, 64, 64, False, 0): {
        "64x64x64 of 32x32": 9, "64x64x64 of 64x32 by 2": 9.7, "32x64x64 of 32x32 by 2": 10.3,
        "128x128x64 of 64x32, in bands": 10.9, "128x128x32 of 64x64, in bands": 11.2, "64x64x128 of 32x32 by 2": 12.3,
        "128x128x64 of 64x64 by 2, in bands": 12.5,
    },
    (1, 1576, 768, 768, False, 0): {
        "128x128x64 of 64x64 by 2, in bands": 18.8, "128x128x64 of 64x32, in bands": 19.1,
        "128x128x32 of 64x64, in bands": 22.2, "32x64x64 of 32x32 by 2": 22.4, "64x64x64 of 64x32 by 2": 22.5,
        "64x64x128 of 32x32 by 2": 22.8, "64x64x128 of 64x64 by 8": 23.7,
    },
    (1, 4096, 1280, 320, False, 0): {
        "128x128x64 of 64x32, in bands": 28.4, "128x128x64 of 64x64 by 2, in bands": 29.3, "64x64x64 of 64x32 by 2": 30.2,
        "64x64x64 of 32x32": 31.1, "128x128x32 of 64x64, in bands": 32.3, "128x256x32 of 64x64, in bands": 33.4,
        "32x64x64 of 32x32 by 2": 36.2,
    },
    (1, 6272, 64, 576, True, 0): {
        "64x64x128 of 32x32 by 2": 10.4, "32x64x64 of 32x32 by 2": 11, "64x64x128 of 64x64 by 8": 11.1,
        "64x64x64 of 64x32 by 2": 11.7, "64x64x64 of 32x32": 11.9, "128x128x64 of 64x32, in bands": 17.2,
        "128x128x64 of 64x64 by 2, in bands": 17.2,
    },
    (1, 25088, 64, 576, True, 0): {
        "32x64x64 of 32x32 by 2": 20, "64x64x128 of 32x32 by 2": 22.1, "64x64x64 of 64x32 by 2": 22.1,
        "64x64x64 of 32x32": 22.4, "64x64x128 of 64x64 by 8": 24.7, "128x128x32 of 64x64, in bands": 25.9,
        "128x128x64 of 64x32, in bands": 29.5,
    },
    (1, 3136, 128, 1152, True, 0): {
        "64x64x128 of 32x32 by 2": 14, "64x64x128 of 64x64 by 8": 14.2, "32x64x64 of 32x32 by 2": 14.9,
        "64x64x64 of 64x32 by 2": 15.9, "64x64x64 of 32x32": 16.4, "128x128x64 of 64x64 by 2, in bands": 25.2,
        "128x128x64 of 64x32, in bands": 26.1,
    },
    (1, 16384, 128, 576, True, 0): {
        "128x128x64 of 64x64 by 2, in bands": 17.9, "128x128x64 of 64x32, in bands": 18.1,
        "128x128x32 of 64x64, in bands": 21.7, "64x64x64 of 64x32 by 2": 22.1, "64x64x64 of 32x32": 22.3,
        "32x64x64 of 32x32 by 2": 27, "128x256x32 of 64x64, in bands": 27.8,
    },
    (1, 16384, 64, 576, True, 0): {
        "64x64x64 of 64x32 by 2": 13.4, "64x64x64 of 32x32": 13.9, "64x64x128 of 32x32 by 2": 16.2,
        "128x128x64 of 64x64 by 2, in bands": 17.3, "64x64x128 of 64x64 by 8": 17.4, "128x128x64 of 64x32, in bands": 17.5,
        "32x64x64 of 32x32 by 2": 19.1,
    },
    (1, 65536, 64, 288, True, 0): {
        "64x64x64 of 32x32": 26.5, "64x64x64 of 64x32 by 2": 27, "128x128x32 of 64x64, in bands": 30.6,
        "32x64x64 of 32x32 by 2": 32.3, "128x128x64 of 64x32, in bands": 35.5, "128x128x64 of 64x64 by 2, in bands": 37,
        "64x64x128 of 32x32 by 2": 37.1,
    },
    (1, 4096, 128, 1152, True, 0): {
        "64x64x128 of 32x32 by 2": 14, "64x64x128 of 64x64 by 8": 14, "32x64x64 of 32x32 by 2": 15.1,
        "64x64x64 of 64x32 by 2": 15.7, "64x64x64 of 32x32": 16.2, "128x128x64 of 64x64 by 2, in bands": 24.8,
        "128x128x64 of 64x32, in bands": 26.1,
    },
    (1, 1568, 256, 2304, True, 0): {
        "64x64x128 of 64x64 by 8": 20.2, "64x64x128 of 32x32 by 2": 20.8, "32x64x64 of 32x32 by 2": 23.6,
        "64x64x64 of 64x32 by 2": 24.4, "64x64x64 of 32x32": 25.7, "128x128x64 of 64x64 by 2, in bands": 40.7,
        "128x128x64 of 64x32, in bands": 44.5,
    },
    (1, 1024, 320, 2880, True, 0): {
        "64x64x128 of 64x64 by 8": 23, "64x64x128 of 32x32 by 2": 24.9, "32x64x64 of 32x32 by 2": 27.6,
        "64x64x64 of 64x32 by 2": 28.2, "64x64x64 of 32x32": 29.3, "128x128x64 of 64x64 by 2, in bands": 49.8,
        "128x128x64 of 64x32, in bands": 53.4,
    },
    (1, 6272, 192, 864, True, 0): {
        "128x128x64 of 64x64 by 2, in bands": 22.3, "128x128x64 of 64x32, in bands": 23.2,
        "128x128x32 of 64x64, in bands": 26.8, "32x64x64 of 32x32 by 2": 26.8, "64x64x128 of 32x32 by 2": 28.5,
        "64x64x64 of 64x32 by 2": 28.7, "64x64x128 of 64x64 by 8": 29.3,
    },
    (1, 25088, 256, 256, False, 2): {
        "128x128x64 of 64x32, in bands": 35.4, "128x128x64 of 64x64 by 2, in bands": 36, "128x256x32 of 64x64, in bands": 36.3,
        "128x128x32 of 64x64, in bands": 39, "32x64x64 of 32x32 by 2": 50.4, "64x64x64 of 32x32": 52.5,
        "64x64x64 of 64x32 by 2": 52.8,
    },
    (1, 8192, 320, 320, False, 2): {
        "128x128x32 of 64x64, in bands": 19.9, "128x256x32 of 64x64, in bands": 20.7, "128x128x64 of 64x32, in bands": 22.4,
        "128x128x64 of 64x64 by 2, in bands": 22.6, "64x64x64 of 64x32 by 2": 22.7, "64x64x64 of 32x32": 23.1,
        "32x64x64 of 32x32 by 2": 24.3,
    },
    (1, 3136, 512, 128, False, 2): {
        "128x128x64 of 64x32, in bands": 10.7, "32x64x64 of 32x32 by 2": 10.9, "128x128x64 of 64x64 by 2, in bands": 11.3,
        "64x64x64 of 32x32": 12.5, "64x64x64 of 64x32 by 2": 12.8, "64x64x128 of 32x32 by 2": 13.2,
        "128x128x32 of 64x64, in bands": 13.6,
    },
    (1, 32768, 64, 64, False, 2): {
        "64x64x64 of 32x32": 11.4, "32x64x64 of 32x32 by 2": 11.7, "64x64x64 of 64x32 by 2": 11.9,
        "128x128x64 of 64x32, in bands": 13, "128x128x32 of 64x64, in bands": 13.1, "128x128x64 of 64x64 by 2, in bands": 13.9,
        "64x64x128 of 32x32 by 2": 15.1,
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("measured", "layer", "slower"),
    [(MEASURED, layer, 1.06) for layer in MEASURED] + [(MEDIUM, layer, 1.11) for layer in MEDIUM],
    ids=lambda x: "x".join(map(str, x[1:4])) if isinstance(x, tuple) else "",
)
def test_the_tile_is_the_fastest_or_nearly_so(
    measured: dict[tuple[int, int, int, int, bool, int], dict[str, float]],
    layer: tuple[int, int, int, int, bool, int],
    slower: float,
) -> None:
    batch, rows, columns, terms, windows, beside = layer
    chosen = str(matrix_tiles(batch, rows, columns, terms, H100, windows, beside=beside)[0])
    assert measured[layer][chosen] <= slower * min(measured[layer].values()), chosen


@pytest.mark.parametrize("columns", [64, 256])
def test_long_sums_of_few_tiles_keep_small_ones(columns: int) -> None:
    """As gradients of weights are: large tiles would leave most of the GPU idle, unless the sum is divided for all of it."""
    assert str(matrix_tiles(1, 64, columns, 200704, H100, False)[0]) == "16x16x512 of 16x16 by 8"
    divided = matrix_tiles(1, 64, columns, 200704, H100, False, divisible=True)[0]
    groups = divided.apart * -(-64 // divided.bm) * -(-columns // divided.bn)
    assert groups >= H100.compute_units / 2 and 200704 / divided.apart <= 8192
