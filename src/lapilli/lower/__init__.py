"""ATen operators in terms of the kernel IR: the one operator registry."""

from lapilli.lower import (  # noqa: F401
    backward,
    bits,
    convolution,
    creation,
    distance,
    grid_sampler,
    matmul,
    normalization,
    pointwise,
    pooling,
    prims,
    random,
    reduction,
    resize,
    special,
    views,
)
from lapilli.lower.graph import lower
from lapilli.lower.registry import is_supported, lowerings

__all__ = ["is_supported", "lower", "lowerings"]
