"""Lowers ATen operators to the kernel IR: the operator registry and all lowerings."""

from lapilli.lower import (  # noqa: F401
    activation_backward,
    attention,
    backward,
    bits,
    cells,
    codes,
    composed,
    convolution,
    creation,
    distance,
    grid_sampler,
    grouped,
    histogram,
    indexing,
    linalg,
    matmul,
    next_token,
    normalization,
    orthogonal,
    pointwise,
    pooling,
    prims,
    product,
    random,
    recurrent,
    reduction,
    resize,
    resize_backward,
    scan,
    scatter,
    search,
    signal,
    sort,
    special,
    spectrum,
    views,
)
from lapilli.lower.graph import READS_NUMBER, STORED, is_computed, is_size, lower, refusals
from lapilli.lower.registry import is_supported, lowerings

__all__ = ["READS_NUMBER", "STORED", "is_computed", "is_size", "is_supported", "lower", "lowerings", "refusals"]
