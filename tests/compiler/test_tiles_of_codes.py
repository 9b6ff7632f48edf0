"""Which tile a product of a few rows gets whose weights are codes of 4 bits: the fastest one or nearly so, by what was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lapilli.codegen.tiles import MatrixTile, for_codes, matrix_tiles
from lapilli.target import of_device
from lapilli.target.known import KNOWN

H100 = of_device(KNOWN["h100"], half=True, matrix=True)

# Microseconds on an H200, a scale for 64 codes: rows, columns, terms.
MEASURED: dict[tuple[int, int, int], dict[str, float]] = {
    (16, 1024, 4096): {
        "16x32x128 of 16x32 by 4, sum in 8 parts": 7.2, "16x64x128 of 16x32 by 4, sum in 8 parts": 7.4,
        "16x64x128 of 16x32 by 4, sum in 4 parts": 8.9, "16x64x128 of 16x32 by 4": 22.5,
    },
    (16, 4096, 1024): {
        "16x64x128 of 16x32 by 4, sum in 4 parts": 7.2, "16x32x128 of 16x32 by 4": 7.5, "16x64x128 of 16x32 by 4": 8.1,
        "16x64x128 of 16x32 by 4, sum in 8 parts": 9.9,
    },
    (16, 4096, 4096): {
        "16x64x128 of 16x32 by 4, sum in 4 parts": 14, "16x64x64 of 16x32 by 2, sum in 8 parts": 14.9,
        "16x64x128 of 16x32 by 4, sum in 8 parts": 16.7, "16x64x128 of 16x32 by 4, sum in 2 parts": 19.2,
        "16x64x128 of 16x32 by 4": 33.8,
    },
    (16, 4096, 14336): {
        "16x64x128 of 16x32 by 4, sum in 4 parts": 38.3, "16x64x64 of 16x32 by 2, sum in 8 parts": 39.3,
        "16x64x128 of 16x32 by 4, sum in 8 parts": 40.8, "16x64x128 of 16x32 by 4, sum in 2 parts": 61.5,
        "16x64x128 of 16x32 by 4": 109,
    },
    (16, 14336, 4096): {
        "16x64x64 of 16x32 by 2, sum in 4 parts": 41.8, "16x32x128 of 16x32 by 4, sum in 4 parts": 41.8,
        "16x64x128 of 16x32 by 4, sum in 8 parts": 43.9, "16x64x128 of 16x32 by 4, sum in 4 parts": 44.5,
        "16x64x128 of 16x32 by 4, sum in 2 parts": 45.5, "16x64x128 of 16x32 by 4": 45.6,
    },
    (16, 2048, 8192): {
        "16x64x128 of 16x32 by 4, sum in 8 parts": 15.5, "16x64x64 of 16x32 by 2, sum in 8 parts": 18,
        "16x64x128 of 16x32 by 4, sum in 4 parts": 22, "16x64x128 of 16x32 by 4, sum in 2 parts": 36.9,
        "16x64x128 of 16x32 by 4": 64.7,
    },
    (16, 8192, 2048): {
        "16x64x64 of 16x32 by 2, sum in 4 parts": 14.4, "16x64x128 of 16x32 by 4, sum in 2 parts": 14.4,
        "16x64x128 of 16x32 by 4, sum in 4 parts": 17.4, "16x64x128 of 16x32 by 4": 19.6,
        "16x64x128 of 16x32 by 4, sum in 8 parts": 22.2,
    },
    (32, 1024, 4096): {
        "32x64x128 of 32x32 by 4, sum in 8 parts": 9.1, "32x32x128 of 32x32 by 4, sum in 8 parts": 9.1,
        "32x64x128 of 32x32 by 4, sum in 4 parts": 11.4, "32x128x128 of 32x32 by 2, sum in 8 parts": 11.6,
        "32x128x64 of 32x32, sum in 8 parts": 15.1, "32x128x128 of 32x32 by 2, sum in 4 parts": 15.8,
    },
    (32, 4096, 1024): {
        "32x64x64 of 32x32 by 2, sum in 4 parts": 8.6, "32x32x128 of 32x32 by 4": 8.7,
        "32x128x128 of 32x32 by 2, sum in 4 parts": 9, "32x64x128 of 32x32 by 4": 9.7,
        "32x64x128 of 32x32 by 4, sum in 4 parts": 10.7, "32x128x64 of 32x32, sum in 4 parts": 10.8,
    },
    (32, 4096, 4096): {
        "32x64x64 of 32x32 by 2, sum in 4 parts": 18.5, "32x32x64 of 32x32 by 2, sum in 4 parts": 18.9,
        "32x128x64 of 32x32, sum in 8 parts": 19, "32x128x128 of 32x32 by 2, sum in 4 parts": 19.1,
        "32x64x128 of 32x32 by 4, sum in 2 parts": 20.8, "32x128x128 of 32x32 by 2, sum in 8 parts": 21.6,
    },
    (32, 4096, 14336): {
        "32x128x64 of 32x64 by 2, sum in 8 parts": 47, "32x128x128 of 32x32 by 2, sum in 4 parts": 47.2,
        "32x128x64 of 32x32, sum in 8 parts": 50.6, "32x128x128 of 32x32 by 2, sum in 8 parts": 57.6,
        "32x64x128 of 32x32 by 4, sum in 2 parts": 60.4, "32x64x128 of 32x32 by 4, sum in 4 parts": 66.8,
    },
    (32, 14336, 4096): {
        "32x128x64 of 32x64 by 2, sum in 2 parts": 46.9, "32x128x128 of 32x32 by 2": 47.3,
        "32x128x64 of 32x32, sum in 2 parts": 51.3, "32x128x128 of 32x32 by 2, sum in 4 parts": 54.5,
        "32x128x64 of 32x32, sum in 4 parts": 55.2, "32x128x128 of 32x32 by 2, sum in 2 parts": 55.5,
    },
    (32, 2048, 8192): {
        "32x128x128 of 32x32 by 2, sum in 8 parts": 19.3, "32x64x64 of 32x32 by 2, sum in 8 parts": 20.2,
        "32x64x128 of 32x32 by 4, sum in 4 parts": 23.6, "32x64x128 of 32x32 by 4, sum in 8 parts": 26,
        "32x128x128 of 32x32 by 2, sum in 4 parts": 31.3, "32x64x128 of 32x32 by 4, sum in 2 parts": 35.8,
    },
    (32, 8192, 2048): {
        "32x64x64 of 32x32 by 2, sum in 2 parts": 18.9, "32x128x128 of 32x32 by 2, sum in 2 parts": 18.9,
        "32x64x128 of 32x32 by 4": 20.5, "32x128x128 of 32x32 by 2, sum in 4 parts": 21.6,
        "32x64x128 of 32x32 by 4, sum in 2 parts": 22.5, "32x128x128 of 32x32 by 2": 24.3,
    },
    (32, 128256, 4096): {
        "32x128x64 of 32x32": 311.7, "32x128x64 of 32x64 by 2": 339.2, "32x128x128 of 32x32 by 2": 355.1,
    },
    (64, 4096, 4096): {
        "64x64x64 of 32x32, sum in 4 parts": 23.9, "64x64x128 of 64x32 by 4, sum in 2 parts": 24.1,
        "64x64x128 of 32x32 by 2, sum in 2 parts": 24.8, "64x64x128 of 32x32 by 2, sum in 4 parts": 28.5,
        "32x128x128 of 32x32 by 2, sum in 2 parts": 28.8, "32x128x128 of 32x32 by 2, sum in 4 parts": 29.6,
    },
    (64, 4096, 14336): {
        "64x64x64 of 64x32 by 2, sum in 4 parts": 63.7, "64x64x128 of 32x32 by 2, sum in 2 parts": 68.3,
        "64x64x128 of 32x32 by 2, sum in 4 parts": 79.9, "32x128x128 of 32x32 by 2, sum in 2 parts": 83.6,
        "32x128x128 of 32x32 by 2, sum in 4 parts": 90.3, "64x64x128 of 32x32 by 2": 115.7,
    },
    (64, 14336, 4096): {
        "64x64x64 of 64x32 by 2": 67.3, "64x64x64 of 32x32": 67.4, "64x64x128 of 32x32 by 2": 69.5,
        "64x64x128 of 32x32 by 2, sum in 2 parts": 80.9, "32x128x128 of 32x32 by 2": 89.4,
        "32x128x128 of 32x32 by 2, sum in 2 parts": 92.5,
    },
}  # fmt: skip


# The same of codes that become numbers in registers. 6144 are those of queries, keys and values together, 28672 of a pair.
STRAIGHT: dict[tuple[int, int, int], dict[str, float]] = {
    (16, 1024, 4096): {
        "16x64x256 of 16x32 by 2, straight, sum in 8 parts": 6.6, "16x32x128 of 16x32 by 4, sum in 8 parts": 7.7,
        "16x128x256 of 16x32 by 2, straight, sum in 8 parts": 8.5,
    },
    (16, 4096, 4096): {
        "16x128x256 of 16x32 by 2, straight, sum in 8 parts": 11.3, "16x128x256 of 16x32 by 2, straight, sum in 4 parts": 11.6,
        "16x128x128 of 16x32, straight, sum in 8 parts": 11.8, "16x128x128 of 16x32, straight, sum in 12 parts": 13.2,
    },
    (16, 6144, 4096): {
        "16x128x128 of 16x32, straight, sum in 8 parts": 14.7, "16x128x256 of 16x32 by 2, straight, sum in 5 parts": 15.8,
        "16x128x256 of 16x32 by 2, straight, sum in 4 parts": 15.9,
    },
    (16, 4096, 14336): {
        "16x128x128 of 16x32, straight, sum in 16 parts": 23.2, "16x128x256 of 16x32 by 2, straight, sum in 8 parts": 24.0,
        "16x128x128 of 16x32, straight, sum in 12 parts": 25.4,
    },
    (16, 14336, 4096): {
        "16x128x128 of 16x32, straight, sum in 3 parts": 21.4, "16x128x128 of 16x32, straight, sum in 4 parts": 22.3,
        "16x128x256 of 16x32 by 2, straight, sum in 2 parts": 23.1,
    },
    (16, 28672, 4096): {
        "16x128x256 of 16x32 by 2, straight": 37.4, "16x128x128 of 16x32, straight, sum in 2 parts": 38.6,
        "16x128x128 of 16x32, straight": 45.1,
    },
    (32, 4096, 4096): {
        "32x128x256 of 32x32 by 2, straight, sum in 8 parts": 14.6, "32x128x128 of 32x32, straight, sum in 12 parts": 14.9,
        "32x128x256 of 32x32 by 2, straight, sum in 4 parts": 15.0, "32x128x128 of 32x32, straight, sum in 8 parts": 15.3,
        "32x64x128 of 32x32, straight, sum in 6 parts": 16.8,
    },
    (32, 6144, 4096): {
        "32x128x256 of 32x32 by 2, straight, sum in 4 parts": 19.3, "32x128x256 of 32x32 by 2, straight, sum in 5 parts": 19.9,
        "32x128x128 of 32x32, straight, sum in 8 parts": 21.2, "32x128x256 of 32x32 by 2, straight, sum in 2 parts": 23.0,
    },
    (32, 4096, 14336): {
        "32x128x256 of 32x32 by 2, straight, sum in 8 parts": 28.0, "32x128x256 of 32x32 by 2, straight, sum in 4 parts": 30.5,
        "32x128x128 of 32x32, straight, sum in 16 parts": 32.2, "32x128x128 of 32x32, straight, sum in 8 parts": 35.3,
    },
    (32, 14336, 4096): {
        "32x128x256 of 32x32 by 2, straight, sum in 2 parts": 27.9, "32x128x128 of 32x32, straight, sum in 4 parts": 30.2,
        "32x64x128 of 32x32, straight, sum in 2 parts": 30.6, "32x128x256 of 32x32 by 2, straight": 33.7,
    },
    (32, 28672, 4096): {
        "32x128x256 of 32x32 by 2, straight": 49.1, "32x128x128 of 32x32, straight, sum in 2 parts": 49.5,
        "32x128x256 of 32x32 by 2, straight, sum in 2 parts": 57.5, "32x128x128 of 32x32, straight": 59.4,
    },
    (32, 8192, 2048): {
        "32x128x256 of 32x32 by 2, straight, sum in 2 parts": 13.5, "32x128x256 of 32x32 by 2, straight, sum in 4 parts": 15.0,
        "32x128x256 of 32x32 by 2, straight": 17.8,
    },
    (32, 2048, 8192): {
        "32x128x256 of 32x32 by 2, straight, sum in 8 parts": 14.5, "32x128x128 of 32x32, straight, sum in 8 parts": 19.1,
        "32x128x256 of 32x32 by 2, straight, sum in 4 parts": 21.6,
    },
    (32, 128256, 4096): {
        "32x128x128 of 32x32, straight": 158.7, "32x256x128 of 32x32, straight": 160.8,
        "32x128x256 of 32x32 by 2, straight": 189.5, "32x64x128 of 32x32, straight": 202.2,
    },
    (64, 4096, 4096): {
        "64x128x128 of 64x32, straight, sum in 8 parts": 20.3, "64x64x128 of 32x32, straight, sum in 4 parts": 21.7,
        "64x128x128 of 64x32, straight, sum in 4 parts": 22.6,
    },
    (64, 14336, 4096): {
        "64x128x128 of 64x32, straight, sum in 2 parts": 43.4, "64x128x128 of 64x32, straight": 46.9,
        "64x64x128 of 32x32, straight, sum in 2 parts": 53.6,
    },
    (64, 4096, 14336): {
        "64x128x128 of 64x32, straight, sum in 8 parts": 43.1, "64x128x128 of 64x32, straight, sum in 4 parts": 53.4,
        "64x64x128 of 32x32, straight, sum in 4 parts": 54.7,
    },
}  # fmt: skip


def chosen(
    rows: int, columns: int, terms: int, units: int = H100.compute_units, joinable: bool = True, straight: int = 0
) -> MatrixTile:
    target = replace(H100, compute_units=units)
    found = matrix_tiles(1, rows, columns, terms, target, False, (False, True))
    return for_codes(found, 1, rows, columns, terms, target, joinable, straight)[0]


@pytest.mark.parametrize("product", MEASURED, ids=lambda product: "x".join(map(str, product)))
def test_the_tile_is_the_fastest_or_nearly_so(product: tuple[int, int, int]) -> None:
    assert MEASURED[product][str(chosen(*product))] <= 1.1 * min(MEASURED[product].values())


@pytest.mark.parametrize("product", STRAIGHT, ids=lambda product: "x".join(map(str, product)))
def test_so_is_one_whose_codes_become_numbers_in_registers(product: tuple[int, int, int]) -> None:
    assert STRAIGHT[product][str(chosen(*product, straight=4))] <= 1.1 * min(STRAIGHT[product].values())


def test_small_products_go_by_way_of_shared_memory() -> None:
    """A tile that reads codes to registers has 128 columns, or 64."""
    for rows, columns, terms in ((32, 576, 1536), (16, 1536, 576), (32, 1024, 1024)):
        assert chosen(rows, columns, terms, straight=4) == chosen(rows, columns, terms)
    assert not chosen(512, 4096, 4096, straight=4).straight, "many rows pay for the way through shared memory"


def test_a_sum_is_in_parts_only_where_that_is_needed() -> None:
    assert chosen(16, 4096, 4096).parts > 1
    assert chosen(16, 4096, 4096, units=16).parts == 1, "a small GPU has tiles enough"
    assert chosen(16, 4096, 4096, joinable=False).parts == 1
    assert chosen(16, 576, 576).parts == 1, "tiles with parts are slower for small matrices"
    for rows in range(1, 70):  # each part has two chunks, but the last
        tile = chosen(rows, 1024, 4096)
        assert 2 * tile.parts * tile.bk <= 4096, tile
