"""ATen operators in terms of the kernel IR: the one operator registry."""

from lapilli.lower import convolution, matmul, normalization, pointwise, pooling, reduction, resize, views  # noqa: F401
from lapilli.lower import composed, distance, indexing, linalg, orthogonal, scan, scatter, search, sort  # noqa: F401
from lapilli.lower.graph import lower
from lapilli.lower.registry import is_supported, lowerings

__all__ = ["is_supported", "lower", "lowerings"]
