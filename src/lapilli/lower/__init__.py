"""ATen operators in terms of the kernel IR: the one operator registry."""

from lapilli.lower import (  # noqa: F401
    backward,
    bits,
    convolution,
    creation,
    matmul,
    normalization,
    pointwise,
    pooling,
    random,
    reduction,
    resize,
    special,
    views,
)
from lapilli.lower import prims  # noqa: F401, I001  (last: what has a lowering stays)
from lapilli.lower.graph import lower
from lapilli.lower.registry import is_supported, lowerings

__all__ = ["is_supported", "lower", "lowerings"]
