"""ATen operators in terms of the kernel IR: the one operator registry."""

from lapilli.lower import (  # noqa: F401
    composed,
    convolution,
    distance,
    histogram,
    indexing,
    linalg,
    matmul,
    normalization,
    orthogonal,
    pointwise,
    pooling,
    reduction,
    resize,
    scan,
    scatter,
    search,
    sort,
    spectrum,
    views,
)
from lapilli.lower.graph import lower
from lapilli.lower.registry import is_supported, lowerings

__all__ = ["is_supported", "lower", "lowerings"]
